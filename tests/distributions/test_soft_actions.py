"""SoftActions: parts of any distribution as soft actor-critics read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from family_cases import randn
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from maze_train.distributions.bernoulli import Bernoulli
from maze_train.distributions.beta import Beta
from maze_train.distributions.categorical import Categorical, MultiCategorical, impossible_logit
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.joint import JointDistribution
from maze_train.distributions.soft import SoftActions, SoftSample
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from maze_train.distributions.base import Distribution

SINGLE: dict[str, Distribution] = {
    "bernoulli": Bernoulli(MultiBinary(2)),
    "beta": Beta(Box(-2.0, 3.0, (2,))),
    "categorical": Categorical(Discrete(4)),
    "gaussian": DiagonalGaussian(Box(-1.0, 1.0, (2,))),
    "multi_categorical": MultiCategorical(MultiDiscrete([2, 3])),
    "squashed": SquashedGaussian(Box(-2.0, 3.0, (2, 1))),
    "squashed, free std": SquashedGaussian(Box(0.0, 3.0, (2,)), state_dependent_std=False),
}
JOINT: dict[str, Distribution] = {
    "continuous parts": JointDistribution({"a": SINGLE["squashed"], "b": SINGLE["gaussian"]}),
    "discrete parts": JointDistribution({"a": SINGLE["categorical"], "b": SINGLE["bernoulli"]}),
    "all": JointDistribution(SINGLE),
    "all, other order": JointDistribution(dict(reversed(SINGLE.items()))),
}
CASES = {"categorical": SINGLE["categorical"], "squashed": SINGLE["squashed"], **JOINT}
ALPHA = 0.3


def parts_of(distribution: Distribution) -> dict[str, Distribution]:
    """The parts by key."""
    return distribution.parts if isinstance(distribution, JointDistribution) else {"": distribution}


def draw(distribution: Distribution, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Params and noise, float64, [n, ...]."""
    noise = distribution.draw_noise((n,), torch.Generator().manual_seed(3)).double()
    return 0.7 * randn(n, distribution.param_size), noise


def own_columns(distribution: Distribution) -> dict[str, tuple[list[int], list[int]]]:
    """Columns of params and noise of each part: all of the network first, then all free ones."""
    parts = parts_of(distribution)
    net, noise = 0, 0
    free = sum(part.param_size - part.free_param_size for part in parts.values())
    result = {}
    for key, part in parts.items():
        net_size = part.param_size - part.free_param_size
        columns = [*range(net, net + net_size), *range(free, free + part.free_param_size)]
        result[key] = (columns, list(range(noise, noise + part.noise_size)))
        net, free, noise = net + net_size, free + part.free_param_size, noise + part.noise_size
    return result


def reference(distribution: Distribution, params: torch.Tensor, noise: torch.Tensor) -> Any:
    """The four fields of a sample with graphs, and all entropies, part by part in a plain loop."""
    empty = params.new_zeros(len(params), 0)
    features, log_probs, probs, choice_log_probs, entropies = [empty], [], [empty], [empty], []
    for key, (columns, noise_columns) in own_columns(distribution).items():
        part, own = parts_of(distribution)[key], params[:, columns]
        if part.num_choices:
            p, log_p = part.choice_probs(own)
            probs.append(p)
            choice_log_probs.append(log_p)
            entropies.append(part.entropy(own))
        else:
            x, log_prob = part.reparameterized(own, noise[:, noise_columns])
            features.append(x)
            log_probs.append(log_prob)
            entropies.append(-log_prob)
    sample = SoftSample(
        torch.cat(features, -1),
        torch.stack(log_probs, -1) if log_probs else empty,
        torch.cat(probs, -1),
        torch.cat(choice_log_probs, -1),
    )
    return sample, torch.stack(entropies, -1)


@pytest.mark.parametrize("case", CASES)
def test_sample_is_that_of_the_parts(case: str) -> None:
    """Fields are those of the parts, in their order."""
    soft = SoftActions(CASES[case])
    params, noise = draw(CASES[case], 5)
    expected, entropies = reference(CASES[case], params, noise)
    sample = soft.sample(params, noise)
    for name in SoftSample.__slots__:
        value = getattr(sample, name)
        torch.testing.assert_close(value, getattr(expected, name))
    assert sample.features.shape == (5, soft.critic_input_size)
    assert sample.probs.shape == (5, soft.num_choices)
    torch.testing.assert_close(soft.neg_log_probs(sample), entropies)


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_soft_loss(case: str) -> None:
    """The gradient of a soft actor's loss is that of the parts."""
    soft = SoftActions(CASES[case])
    params, noise = draw(CASES[case], 5)
    f, q = randn(5, soft.critic_input_size, seed=1), randn(5, soft.num_choices, seed=2)
    slopes = []
    for draw_sample in (
        lambda x: reference(CASES[case], x, noise)[0],
        lambda x: soft.sample(x, noise),
    ):
        leaf = params.clone().requires_grad_()
        sample = draw_sample(leaf)
        loss = (sample.features * f).sum() + ALPHA * sample.log_probs.sum()
        loss = loss + (sample.probs * (ALPHA * sample.choice_log_probs - q)).sum()
        slopes += torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("case", CASES)
def test_actions_are_read_by_part(case: str) -> None:
    """Features of stored actions are those of the parts; choices have their probability."""
    soft, distribution = SoftActions(CASES[case]), CASES[case]
    params, noise = draw(distribution, 5)
    actions: Any = distribution.sample(params, noise)
    features, chosen = soft.critic_input(actions), soft.choices(actions)
    sample = soft.sample(params, noise)
    torch.testing.assert_close(features.double(), sample.features)
    assert chosen.dtype == torch.int64
    total = sample.choice_log_probs.gather(1, chosen).sum(1)
    expected = torch.zeros(5, dtype=torch.float64)
    for key, (columns, _) in own_columns(distribution).items():
        part = parts_of(distribution)[key]
        if part.num_choices:
            own = actions[key] if isinstance(actions, dict) else actions
            expected = expected + part.log_prob(params[:, columns], own)
    torch.testing.assert_close(total, expected)
    assert features.shape == (5, soft.critic_input_size)


@pytest.mark.parametrize("case", CASES)
def test_empty_batch(case: str) -> None:
    """No rows give no values and no gradients."""
    soft = SoftActions(CASES[case])
    params, noise = draw(CASES[case], 0)
    sample = soft.sample(params, noise)
    assert sample.features.shape == (0, soft.critic_input_size)
    assert soft.neg_log_probs(sample).shape == (0, len(soft.parts))
    assert soft.target_entropies(params, 1.0, 1.0).shape == (0, len(soft.parts))


def test_what_the_parts_are() -> None:
    """Keys, kinds and sizes follow the order of the parts."""
    soft = SoftActions(JOINT["all"])
    assert soft.part_keys == list(SINGLE)
    discrete = {"bernoulli", "categorical", "multi_categorical"}
    assert soft.is_discrete == [key in discrete for key in SINGLE]
    assert (soft.critic_input_size, soft.num_choices) == (8, 4 + 4 + 5)
    single = SoftActions(SINGLE["categorical"])
    assert (single.part_keys, single.is_discrete) == ([""], [True])
    assert (single.critic_input_size, single.num_choices) == (0, 4)


def test_choices_count_through_the_parts() -> None:
    """The choices of a part begin where those of the discrete parts before it end."""
    soft = SoftActions(JointDistribution({key: SINGLE[key] for key in sorted(SINGLE)}))
    actions = {key: torch.zeros(2, *part.action_shape) for key, part in SINGLE.items()}
    actions["bernoulli"] = torch.tensor([[0, 1], [1, 1]], dtype=torch.int8)
    actions["categorical"] = torch.tensor([3, 0])
    actions["multi_categorical"] = torch.tensor([[0, 2], [1, 0]])
    assert soft.choices(actions).tolist() == [[0, 3, 7, 8, 12], [1, 3, 4, 9, 10]]
    assert SoftActions(SINGLE["squashed"]).choices(torch.zeros(3, 2, 1)).shape == (3, 0)


def test_target_entropies() -> None:
    """-D for continuous parts, a fraction of the largest possible entropy for discrete ones."""
    joint = JointDistribution(
        {"move": SINGLE["squashed"], "gear": SINGLE["categorical"], "aim": SINGLE["gaussian"]}
    )
    params = randn(2, joint.param_size).float()
    params[1, 5:7] = impossible_logit(torch.float32)
    targets = SoftActions(joint).target_entropies(params, 0.5, 0.8)
    assert targets.dtype == torch.float32
    expected = [[-1.0, 0.4 * math.log(4), -1.0], [-1.0, 0.4 * math.log(2), -1.0]]
    torch.testing.assert_close(targets, torch.tensor(expected))
    single = SoftActions(SINGLE["squashed"]).target_entropies(randn(3, 4), 1.5, 0.8)
    assert single.tolist() == [[-3.0]] * 3


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1e6])
def test_masked_choices_add_nothing(alpha: float) -> None:
    """Illegal choices have no share in loss and gradient, and nothing overflows in float32."""
    joint = JointDistribution({"gear": SINGLE["categorical"], "aim": SINGLE["gaussian"]})
    soft = SoftActions(joint)
    params, noise = (tensor.float() for tensor in draw(joint, 6))
    params[:, 1:3] = impossible_logit(torch.float32)
    sample = soft.sample(params.requires_grad_(), noise)
    q = randn(6, 4).float()
    costs = alpha * sample.choice_log_probs - q
    assert (sample.probs * costs).isfinite().all()
    assert (sample.probs * costs)[:, 1:3].eq(0).all()
    (result,) = torch.autograd.grad((sample.probs * costs).sum(), params, retain_graph=True)
    assert result.isfinite().all()
    assert result[:, 1:3].eq(0).all()
    two = torch.log_softmax(params[:, [0, 3]].double(), -1)
    expected = two.exp() * (alpha * two - q[:, [0, 3]])
    torch.testing.assert_close(
        (sample.probs * costs)[:, [0, 3]].double(), expected, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        soft.neg_log_probs(sample)[:, 0].double(), -(two.exp() * two).sum(-1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("family", [SINGLE["squashed"], SINGLE["squashed, free std"]])
def test_saturated_actions_are_finite(family: Distribution) -> None:
    """At |u| = 50 and a log std beyond its limits, float32 values and gradients are finite."""
    params = torch.tensor([[-50.0, 50.0, -30.0, 1.0], [20.0, -20.0, 9.0, -9.0]])
    sample = SoftActions(family).sample(params.requires_grad_(), torch.ones(2, 2))
    (result,) = torch.autograd.grad(sample.features.sum() + sample.log_probs.sum(), params)
    assert sample.log_probs.isfinite().all()
    assert result.isfinite().all()


def test_splitting_finds_the_params_of_each_part() -> None:
    """Free ones included."""
    joint = JOINT["all"]
    assert isinstance(joint, JointDistribution)
    params = randn(3, joint.param_size)
    assert joint.free_param_size == 4
    own = [params[:, columns] for columns, _ in own_columns(joint).values()]
    assert all(torch.equal(a, b) for a, b in zip(joint.split(params), own, strict=True))


def test_families_without_either_are_named() -> None:
    """A family that is neither continuous nor discrete is refused, with the key of its part."""

    class Neither(Categorical):
        def __init__(self, space: Discrete) -> None:
            super().__init__(space)
            self.num_choices = 0

    neither = Neither(Discrete(2))
    with pytest.raises(SpaceError, match=r"^Neither: .*implement"):
        SoftActions(neither)
    with pytest.raises(SpaceError, match=r"^b: Neither: "):
        SoftActions(JointDistribution({"a": SINGLE["squashed"], "b": neither}))
