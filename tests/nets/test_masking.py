from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.core.errors import ConfigError
from maze_train.distributions.categorical import Categorical, MultiCategorical
from maze_train.distributions.mapping import JointDistribution, distribution_for
from maze_train.nets.policy_model import ActionMasking
from maze_train.spaces.describe import MASK_KEY
from maze_train.spaces.masks import mask_layout

NESTED = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
        "keys": spaces.MultiDiscrete([2, 4]),
        "wheel": spaces.Discrete(2),
    }
)


def build(mask, action, overrides=None):
    """Return the distribution and the masking for a mask space and an action space."""
    family = distribution_for(action, overrides)
    layout = mask_layout(spaces.Dict({"x": spaces.Box(-1, 1), MASK_KEY: mask}), action)
    return family, ActionMasking(family, layout)


def bits(n):
    """Return the space of a mask with n entries."""
    return spaces.MultiBinary(n)


def observed(values):
    """Return observations with these masks: [..., *mask_shape], or a dict by component."""
    if not isinstance(values, dict):
        return {MASK_KEY: torch.as_tensor(values)}
    return {f"{MASK_KEY}/{key}": torch.as_tensor(value) for key, value in values.items()}


def randn(*shape, seed=0, scale=1.0):
    """Return seeded normal values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def random_masks(n, sizes, seed=0):
    """Return masks of n rows in which every component has a legal choice."""
    rng = np.random.default_rng(seed)
    masks = []
    for size in sizes:
        mask = rng.random((n, size)) < 0.5
        mask[np.arange(n), rng.integers(size, size=n)] = True
        masks.append(mask)
    return np.concatenate(masks, axis=1)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_illegal_actions_are_never_sampled(scale):
    """100,000 samples contain legal actions only, also for extreme logits."""
    family, masking = build(bits(5), spaces.Discrete(5))
    legal = torch.tensor([0, 1, 0, 1, 0])
    logits = scale * torch.tensor([3.0, -1.0, 0.5, -1.0, 9.0])
    params = masking.apply(logits, observed(legal))
    noise = family.draw_noise((100_000,), torch.Generator().manual_seed(0))
    actions = family.sample(params.expand(100_000, 5), noise)
    # Noise is below the precision of the largest logits, so the first of equal logits is selected.
    assert actions.unique().tolist() == ([1, 3] if scale < 1e30 else [1])
    worst = torch.full_like(noise, -5.0)
    worst[:, [0, 2, 4]] = 100.0
    assert (legal[family.sample(params.expand(100_000, 5), worst)] == 1).all()


@pytest.mark.parametrize(
    ("space", "legal"),
    [
        (spaces.Discrete(6), {0: [1, 2, 4]}),
        (spaces.MultiDiscrete([2, 4, 3]), {0: [1], 2: [0, 3], 6: [0, 1, 2]}),
    ],
)
def test_masked_distribution_equals_legal_distribution(space, legal):
    """log_prob, entropy, KL and mode match distributions over the legal actions only."""
    size = int(np.sum(getattr(space, "nvec", 6)))
    mask, p, q = torch.zeros(size), randn(7, size, scale=2), randn(7, size, seed=1)
    log_prob = entropy = kl = 0.0
    actions, modes = [], []
    for offset, own in legal.items():
        kept, part = torch.tensor(own) + offset, Categorical(spaces.Discrete(len(own)))
        picked, mask[kept] = torch.arange(7) % len(own), 1
        log_prob += part.log_prob(p[:, kept], picked)
        entropy += part.entropy(p[:, kept])
        kl += part.kl(p[:, kept], q[:, kept])
        actions.append(kept[picked] - offset)
        modes.append(kept[part.mode(p[:, kept])] - offset)
    family, masking = build(bits(size), space)
    masked_p, masked_q = (masking.apply(x, observed(mask.expand(7, size))) for x in (p, q))
    mode = family.mode(masked_p)
    found = family.log_prob_and_entropy(masked_p, torch.stack(actions, -1).view(mode.shape))
    torch.testing.assert_close(found, (log_prob, entropy))
    torch.testing.assert_close(family.kl(masked_p, masked_q), kl)
    assert torch.equal(mode, torch.stack(modes, -1).view(mode.shape))


@pytest.mark.parametrize("space", [spaces.Discrete(6), spaces.MultiDiscrete([3, 3])], ids=str)
def test_gradients(space):
    """Gradients are finite, and 0 for illegal actions."""
    sizes = [6] if isinstance(space, spaces.Discrete) else [3, 3]
    family, masking = build(bits(6), space)
    obs = observed(random_masks(8, sizes))
    params, g = randn(8, 6, scale=3), randn(8, seed=1)
    actions = family.mode(masking.apply(params, obs))
    leaf = params.clone().requires_grad_()
    log_prob, entropy = family.log_prob_and_entropy(masking.apply(leaf, obs), actions)
    ((log_prob * g).sum() + 0.3 * entropy.sum()).backward()
    legal, slopes = obs[MASK_KEY], leaf.grad
    assert slopes.isfinite().all()
    assert (slopes[~legal] == 0).all()
    many = legal.unflatten(-1, (-1, sizes[0])).sum(-1, keepdim=True).expand(8, len(sizes), sizes[0])
    assert (slopes[legal & (many.reshape(8, 6) > 1)] != 0).all()


@pytest.mark.parametrize("batch", [(), (4,), (2, 3), (0,)])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_masks_accept_any_leading_dimensions(batch, shape):
    """Masks of any shape and batch replace the same entries."""
    _, masking = build(bits(shape), spaces.MultiDiscrete([3, 3]))
    flat = torch.as_tensor(random_masks(int(np.prod(batch)), [3, 3])).reshape(*batch, 6)
    params = randn(*batch, 6)
    masked = masking.apply(params, observed(flat.reshape(*batch, *shape).to(torch.int8)))
    assert masked.shape == params.shape
    assert torch.equal(masked == params, flat)
    assert (masked[~flat] < -1e300).all()
    assert masked.isfinite().all()


def test_nonzero_mask_values_are_legal():
    """In a float mask, all values other than 0 are legal."""
    _, masking = build(spaces.Box(0, 1, (3,)), spaces.Discrete(3))
    masked = masking.apply(torch.zeros(3), observed(torch.tensor([0.0, 0.2, 1.0])))
    assert masked.dtype == torch.float32
    assert (masked == 0).tolist() == [False, True, True]
    assert masked[0].item() == torch.finfo(torch.float32).min / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_illegal_logits_are_finite_in_half_precision(dtype):
    """The logit of illegal actions is finite in the dtype of the parameters."""
    family, masking = build(bits(3), spaces.Discrete(3))
    masked = masking.apply(torch.tensor([1.0, 2.0, 3.0]).to(dtype), observed([1, 0, 1]))
    assert masked.dtype == dtype
    assert masked.isfinite().all()
    assert family.entropy(masked).isfinite()


def test_joint_component_masks_change_their_components_only():
    """Only the logits of masked components change."""
    mask = spaces.Dict({"wheel": bits(2), "arm": spaces.Tuple([bits(3)])})
    family, masking = build(mask, NESTED)
    assert isinstance(family, JointDistribution)
    # arm/0: 0-2, arm/1: 3-4, keys: 5-10, wheel: 11-12, free params of arm/1: 13-14.
    assert family.param_size == 15
    obs = observed({"wheel": [[1, 0], [1, 1]], "arm/0": [[0, 1, 1], [0, 1, 0]]})
    params = randn(2, 15)
    changed = masking.apply(params, obs) != params
    assert [row.nonzero().flatten().tolist() for row in changed] == [[0, 12], [0, 2]]


def test_joint_mask_is_split_by_component():
    """One mask over all components is split in their order, without continuous components."""
    family, masking = build(bits(11), NESTED)
    keys = MultiCategorical(spaces.MultiDiscrete([2, 4]))
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1])
    params = randn(3, 15)
    masked = masking.apply(params, observed(mask.expand(3, 11)))
    changed = (masked != params).any(0).nonzero().flatten().tolist()
    assert changed == [1, 7, 8, 11]
    parts = {"arm/0": Categorical(spaces.Discrete(3)), "wheel": Categorical(spaces.Discrete(2))}
    expected = (
        parts["arm/0"].entropy(masked[:, :3])
        + family.parts["arm/1"].entropy(torch.cat([params[:, 3:5], params[:, 13:]], -1))
        + keys.entropy(masked[:, 5:11])
        + parts["wheel"].entropy(masked[:, 11:13])
    )
    torch.testing.assert_close(family.entropy(masked), expected)
    noise = family.draw_noise((100_000,), torch.Generator().manual_seed(0))
    actions = family.sample(masked[0].float().expand(100_000, 15), noise)
    assert actions["arm/0"].unique().tolist() == [0, 2]
    assert actions["keys"][:, 1].unique().tolist() == [2, 3]
    assert actions["wheel"].unique().tolist() == [1]


@pytest.mark.parametrize(
    ("action", "mask", "key"),
    [
        (spaces.Discrete(3), bits(3), "model.distributions.Discrete"),
        (spaces.MultiDiscrete([3, 2]), bits(5), "model.distributions.MultiDiscrete"),
        (spaces.Dict({"a": spaces.Discrete(3)}), bits(3), "model.distributions.a"),
    ],
)
def test_masks_of_other_distributions_raise(action, mask, key):
    """Masks require a categorical distribution; the error contains the setting."""
    override = {"_target_": f"{__name__}.own_family"}
    with pytest.raises(ConfigError, match="'action_mask' masks the actions of this") as caught:
        build(mask, action, {key.rsplit(".", 1)[1]: override})
    assert caught.value.key == key


def own_family(space):
    """Return a distribution that is not categorical, with one parameter per action."""
    return distribution_for(bits(int(np.sum(getattr(space, "nvec", 3)))))


class Sticky(Categorical):
    """Categorical distribution with more parameters than actions."""

    def __init__(self, space):
        super().__init__(space)
        self.param_size += 1


def test_masks_require_one_logit_per_action():
    """Masks require exactly one logit per action."""
    with pytest.raises(ConfigError, match="Discrete = 'Sticky'"):
        build(bits(3), spaces.Discrete(3), {"Discrete": {"_target_": f"{__name__}.Sticky"}})
