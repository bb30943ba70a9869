"""Contract of distributions, tested for all families."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from cases import sweep
from family_cases import CASES, CONTINUOUS, LOW, UNCLIPPED, build, draw, randn, torch_parts
from gymnasium.spaces import Box, Discrete
from torch import distributions as td

from maze_train.core.errors import SpaceError
from maze_train.distributions.mapping import FAMILIES, distribution_for

FILLING = ("beta", "squashed_gaussian")
BOXED = (*FILLING, "diagonal_gaussian")
REMEDY = ".*model.distributions.Box=diagonal_gaussian"


def test_every_distribution_has_a_case() -> None:
    """The cases cover every distribution of the table."""
    names = {
        override if isinstance(override, str) else override["name"]
        for override, _ in CASES.values()
    }
    assert names == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
@sweep("batch", [(), (0,), (2, 3)])
def test_distributions_keep_leading_dimensions_and_dtypes(
    case: str, batch: tuple[int, ...]
) -> None:
    """Leading dimensions are arbitrary; sizes and dtypes match the declared ones."""
    family, space = build(case)
    params = randn(*batch, family.param_size).float()
    noise = family.draw_noise(batch, torch.Generator().manual_seed(0))
    actions = family.sample(params, noise)
    assert noise.shape == (*batch, family.noise_size)
    assert noise.dtype == torch.float32
    for tensor in (actions, family.mode(params), family.from_env(family.to_env(actions))):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.shape == (*batch, *family.action_shape)
        assert tensor.dtype == family.action_dtype
    assert family.to_env(actions).shape == (*batch, *space.shape)  # type: ignore[union-attr]
    values = [*family.log_prob_and_entropy(params, actions), family.kl(params, params)]
    assert all(value.shape == batch and value.dtype == torch.float32 for value in values)
    assert family.initial_free_params().shape == (family.free_param_size,)


@pytest.mark.parametrize("case", CASES)
def test_distributions_match_torch_distributions(case: str) -> None:
    """Log-probability, entropy and KL divergence are sums over torch.distributions."""
    family, space = build(case)
    p, q = randn(5, family.param_size), randn(5, family.param_size, seed=1)
    actions = draw(family, p)
    columns = actions.reshape(5, -1)
    if case in UNCLIPPED:  # torch.distributions use the environment's action
        low, high = (torch.from_numpy(x.astype(np.float64)) for x in (space.low, space.high))
        centre, half = (high + low).flatten() / 2, (high - low).flatten() / 2
        columns = centre + half * family.critic_input(actions)
    elif not isinstance(space, Box):
        columns = columns.double()
    parts, others = list(torch_parts(case, p)), list(torch_parts(case, q))
    log_probs = [part.log_prob(x) for part, x in zip(parts, columns.unbind(-1), strict=True)]
    torch.testing.assert_close(family.log_prob(p, actions), sum(log_probs), rtol=1e-6, atol=1e-8)
    divergences = [td.kl_divergence(a, b) for a, b in zip(parts, others, strict=True)]
    torch.testing.assert_close(family.kl(p, q), sum(divergences))
    torch.testing.assert_close(family.kl(p, p), torch.zeros(5, dtype=torch.float64))
    if case not in UNCLIPPED:  # torch.distributions have no entropy of transformed distributions
        torch.testing.assert_close(family.entropy(p), sum(part.entropy() for part in parts))


@pytest.mark.parametrize("case", CASES)
def test_samples_depend_on_the_noise_only(case: str) -> None:
    """Samples depend on the seed of the noise only; a Gaussian without noise returns its mode."""
    family, _ = build(case)
    params = randn(40, family.param_size)
    assert torch.equal(draw(family, params), draw(family, params))
    assert not torch.equal(draw(family, params), draw(family, params, seed=1))
    if case.startswith(("clipped", "gaussian", "squashed")):
        zeros = torch.zeros(40, family.noise_size)
        assert torch.equal(family.sample(params, zeros), family.mode(params))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_env_actions_are_in_the_space_and_invertible(case: str) -> None:
    """Float32 samples and modes of large parameters are members of the space.

    `from_env` inverts `to_env` unless an action was clipped.
    """
    family, space = build(case)
    params = 4 * randn(300, family.param_size).float()
    for actions in (draw(family, params), family.mode(params)):
        for row in family.to_env(actions).numpy():  # type: ignore[union-attr]
            value = np.asarray(row)
            assert space.contains(value if isinstance(space, Box) else value[()])
    actions = draw(family, 0.1 * randn(50, family.param_size)).to(family.action_dtype)
    if case.startswith(("clipped", "gaussian")):
        actions = actions.clamp(0.0, 0.5)
        if "n-d" in case:
            actions = torch.tensor(LOW) + actions
    back = family.from_env(family.to_env(actions))
    torch.testing.assert_close(back, actions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_entropy_and_kl_are_expectations(case: str) -> None:
    """Entropy and KL divergence are means of log-probabilities over 10,000 samples."""
    family, _ = build(case)
    p, q = 0.7 * randn(family.param_size), 0.7 * randn(family.param_size, seed=1)
    many, other = p.expand(10_000, -1), q.expand(10_000, -1)
    actions = draw(family, many)
    log_p, log_q = family.log_prob(many, actions), family.log_prob(other, actions)
    for samples, exact in [(-log_p, family.entropy(p)), (log_p - log_q, family.kl(p, q))]:
        error = 4 * samples.std().item() / 100
        assert abs(samples.mean().item() - exact.item()) < max(error, 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_distribution_gradients_match_numerical_gradients(case: str) -> None:
    """Gradients match numerical ones; combined methods return the same values as separate ones."""
    family, _ = build(case)
    params = randn(6, family.param_size)
    actions = draw(family, params)
    leaf, q = params.requires_grad_(), randn(6, family.param_size, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: family.log_prob_and_entropy(p, actions), (leaf,))
    assert torch.autograd.gradcheck(family.kl, (leaf, q))
    log_prob, entropy = family.log_prob_and_entropy(leaf, actions)
    assert torch.equal(log_prob, family.log_prob(leaf, actions))
    assert torch.equal(entropy, family.entropy(leaf))
    noise = family.draw_noise((6,), torch.Generator().manual_seed(2)).double()
    if case not in CONTINUOUS:
        assert torch.autograd.gradcheck(family.choice_probs, (leaf,))
    elif not case.startswith("beta"):  # the gradient of beta samples is that of their quantiles
        assert torch.autograd.gradcheck(lambda p: family.reparameterized(p, noise), (leaf,))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("squashed")])
def test_mode_is_most_probable(case: str) -> None:
    """No sample is more probable than the mode (the median for `squashed`)."""
    family, _ = build(case)
    params = randn(family.param_size).expand(2000, -1)
    best = family.log_prob(params, family.mode(params))
    assert (family.log_prob(params, draw(family, params)) <= best + 1e-9).all()


@pytest.mark.parametrize("case", CASES)
def test_distribution_tensors_stay_on_the_device(case: str) -> None:
    """No distribution mixes devices, which would raise an error on the `meta` device."""
    family, _ = build(case)
    params = torch.zeros(4, family.param_size, device="meta")
    actions = family.sample(params, family.draw_noise((4,), device="meta"))
    results = [*family.log_prob_and_entropy(params, actions), family.kl(params, params)]
    results += [family.to_env(actions), family.from_env(actions), family.mode(params)]
    if case in CONTINUOUS:
        noise = family.draw_noise((4,), device="meta")
        results += [*family.reparameterized(params, noise), family.critic_input(actions)]
    else:
        results += [*family.choice_probs(params), family.max_entropy(params)]
        results.append(family.choices(actions))
    assert {result.device.type for result in results} == {"meta"}


@pytest.mark.parametrize("case", CASES)
def test_pickled_distribution_is_identical(case: str) -> None:
    """A pickled copy returns identical values."""
    family, _ = build(case)
    copy, params = pickle.loads(pickle.dumps(family)), randn(3, family.param_size)
    assert torch.equal(copy.entropy(params), family.entropy(params))
    assert torch.equal(draw(copy, params), draw(family, params))


@pytest.mark.parametrize(
    ("name", "space", "message"),
    [
        *((name, Box(-1.0, 1.0, (0,)), "has no elements") for name in BOXED),
        *((name, Discrete(3), r"requires a Box space.*Discrete\(3\)") for name in BOXED),
        *((name, Box(-np.inf, 1.0, (2,)), f"finite bounds{REMEDY}") for name in FILLING),
        *((name, Box(0.0, 0.0, (2,)), "low < high.*remove the constant") for name in FILLING),
        ("diagonal_gaussian", Box(-1.0, 1.0, (1,), dtype=np.longdouble), "longdouble|float128"),
        ("bernoulli", Discrete(3), r"Bernoulli requires a MultiBinary space.*Discrete\(3\)"),
        ("categorical", Box(-1.0, 1.0), r"Categorical requires a Discrete space.*Box"),
        ("multi_categorical", Discrete(3), r"MultiCategorical requires a MultiDiscrete space"),
    ],
)
def test_distributions_of_unsupported_spaces_raise(name: str, space: Any, message: str) -> None:
    """The error contains the distribution, the space and a remedy if there is one."""
    family: Any = FAMILIES[name]
    with pytest.raises(SpaceError, match=message):
        family(space)


@pytest.mark.parametrize("name", BOXED)
def test_integer_box_is_rounded(name: str) -> None:
    """Actions for an integer Box are integers within its bounds."""
    family = distribution_for(Box(0, 10, (1,), dtype=np.uint8), {"Box": name})
    lowest, middle, highest = {"beta": (1e-7, 0.52, 1.0), "diagonal_gaussian": (-9, 5.2, 99)}.get(
        name, (-9.0, 0.0, 9.0)
    )
    in_env = family.to_env(torch.tensor([[lowest], [middle], [highest]]))
    assert isinstance(in_env, torch.Tensor)
    assert in_env.tolist() == [[0], [5], [10]]
    assert in_env.dtype == torch.uint8
