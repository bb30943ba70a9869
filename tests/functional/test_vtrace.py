"""V-trace matches the paper; its helper functions match the distributions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_returns import (
    Steps,
    make_steps,
    make_trajectory,
    slow_advantages,
    slow_returns,
    slow_vtrace,
)
from step_ends import ends_of

from maze_train.core.errors import ConfigError, ShapeError
from maze_train.distributions.mapping import distribution_for
from maze_train.functional.returns import discounts_and_lambdas
from maze_train.functional.vtrace import (
    VTraceReturns,
    from_importance_weights,
    from_logits,
    get_log_rhos,
    importance_weights,
    vtrace,
)

RTOL = 1e-9
KEYS = ("clip_rho_threshold", "clip_pg_rho_threshold", "clip_c_threshold")
THRESHOLDS = st.sampled_from([None, math.inf, 3.7, 1.0, 0.4])


def tensors(steps: Steps) -> list[Any]:
    """Return the arguments of `vtrace`."""
    return [torch.from_numpy(column) for column in vars(steps).values()]


def run(steps: Steps, **thresholds: Any) -> VTraceReturns:
    """Return the result of `vtrace`."""
    return vtrace(*tensors(steps), **thresholds)


def assert_close(result: VTraceReturns, vs: Any, pg_advantages: Any) -> None:
    """Assert that both results match."""
    np.testing.assert_allclose(result.vs, vs, rtol=RTOL, atol=1e-12)
    np.testing.assert_allclose(result.pg_advantages, pg_advantages, rtol=RTOL, atol=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    num_steps=st.integers(1, 9),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    seed=st.integers(0, 2**31),
    bounds=st.tuples(THRESHOLDS, THRESHOLDS, THRESHOLDS),
)
def test_vtrace_matches_the_paper(
    num_steps: int, batch: tuple[int, ...], seed: int, bounds: tuple[float | None, ...]
) -> None:
    """Results match for any length, shape, thresholds, discounts and lambdas, including 0."""
    steps = make_steps((num_steps, *batch), seed)
    result = run(steps, **dict(zip(KEYS, bounds, strict=True)))
    assert_close(result, *slow_vtrace(steps, *bounds))


@sweep("seed", range(5))
@sweep("gae_lambda", [0.0, 0.5, 1.0])
@sweep("thresholds", [(1.0, 1.0, 1.0), (3.7, 2.2, 1.5), (None, None, None)])
def test_vtrace_equals_lambda_returns_on_policy(
    gae_lambda: float, thresholds: tuple[float | None, float | None, float | None], seed: int
) -> None:
    """Equal policies give n-step returns and generalized advantages, cut at every end."""
    data = make_trajectory(7, 2, seed)
    end = ends_of(data.tensor("terminated"), data.tensor("truncated"))
    discounts, lambdas = discounts_and_lambdas(end, 0.9, gae_lambda, dtype=torch.float64)
    columns = [data.tensor(name) for name in ("rewards", "values", "next_values")]
    bounds = dict(zip(KEYS, thresholds, strict=True))
    result = vtrace(torch.zeros_like(discounts), discounts, *columns, lambdas, **bounds)
    advantages = slow_advantages(data, 0.9, gae_lambda)
    assert_close(result, slow_returns(data, 0.9, gae_lambda), advantages)


@sweep("dtype", [torch.float32, torch.float64])
@sweep("threshold", [None, 1.0])
def test_vtrace_of_huge_log_ratios_is_finite(dtype: torch.dtype, threshold: float | None) -> None:
    """Overflowing weights give finite results, also for a discount, error or lambda of 0."""
    steps = make_steps((8, 4), seed=4)
    steps.log_rhos[:] = 1e4 * np.sign(steps.log_rhos)
    steps.log_rhos[::3, 0], steps.log_rhos[1::3, 0] = math.inf, -math.inf
    for column in (steps.rewards, steps.values, steps.discounts):
        column[5] = 0.0
    result = vtrace(
        *(tensor.to(dtype) for tensor in tensors(steps)),
        clip_rho_threshold=threshold,
        clip_pg_rho_threshold=threshold,
    )
    assert result.vs.dtype == result.pg_advantages.dtype == dtype
    assert result.vs.isfinite().all()
    assert result.pg_advantages.isfinite().all()
    never = torch.from_numpy(steps.log_rhos < 0)
    assert torch.equal(result.vs[never], torch.from_numpy(steps.values).to(dtype)[never])
    assert not result.pg_advantages[never].any()
    assert result.pg_advantages[~never].any()
    # Without clipping, an unlikely action before an episode end gives no NaN in float64.
    steps = make_steps((4, 2), seed=5)
    steps.log_rhos[:], steps.discounts[1] = 1e4, 0.0
    assert all(part.isfinite().all() for part in run(steps, **dict.fromkeys(KEYS)))


def test_importance_weights_are_bounded() -> None:
    """Large ratios are clamped and others exact; arguments do not change and no gradient flows."""
    log_rhos = torch.tensor([-math.inf, -1e4, 0.0, 3.0, 39.0, 41.0, math.inf], requires_grad=True)
    before = log_rhos.detach().clone()
    rhos = importance_weights(log_rhos)
    assert not rhos.requires_grad
    assert torch.equal(log_rhos, before)
    assert torch.equal(rhos[:5], before[:5].exp())
    assert torch.equal(rhos[5:], torch.full((2,), 40.0).exp())


def test_no_gradient_and_arguments_stay() -> None:
    """The results have no gradient, and the arguments are not modified."""
    arguments = [tensor.requires_grad_() for tensor in tensors(make_steps((5, 2), seed=6))]
    before = [tensor.detach().clone() for tensor in arguments]
    result = vtrace(*arguments)
    log_rhos, discounts, rewards, values, next_values, lambdas = arguments
    seed_form = from_importance_weights(
        log_rhos, discounts, rewards, values, next_values[-1], lambdas=lambdas
    )
    for tensor in (*result, *seed_form):
        assert not tensor.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize("shape", [(6, 3), (5,)])
def test_vtrace_accepts_a_single_sequence(shape: tuple[int, ...]) -> None:
    """Next values are the values of the next row, and the bootstrap value in the last row.

    Without a batch dimension, the bootstrap value is a scalar.
    """
    steps = make_steps(shape, seed=7)
    steps.next_values[:-1] = steps.values[1:]
    log_rhos, discounts, rewards, values, next_values, lambdas = tensors(steps)
    arguments = log_rhos, discounts, rewards, values, next_values[-1]
    for given_lambdas, expected in [
        (lambdas, steps.lambdas),
        (None, np.ones(shape)),
        (0.3, np.full(shape, 0.3)),
    ]:
        own = replace(steps, lambdas=expected)
        result = from_importance_weights(*arguments, 1.7, 0.6, lambdas=given_lambdas)
        assert_close(result, *slow_vtrace(own, 1.7, 0.6, 1.0))
        result = from_importance_weights(*arguments, lambdas=given_lambdas)
        assert_close(result, *slow_vtrace(own, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("form", [(6, 3), (6, 3, 1), (6, 3, 4)])
def test_vtrace_accepts_several_values_per_step(form: tuple[int, ...]) -> None:
    """Weights, discounts, rewards and lambdas of a step apply to all its values."""
    rng = np.random.default_rng(8)
    values, bootstrap = rng.normal(size=(6, 3, 4)), rng.normal(size=(3, 4))
    steps = make_steps((6, 3), seed=9)
    shared = [steps.log_rhos, steps.discounts, steps.rewards, steps.lambdas]
    log_rhos, discounts, rewards, lambdas = (
        torch.from_numpy(x if form == (6, 3) else np.broadcast_to(x[..., None], form).copy())
        for x in shared
    )
    result = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        torch.from_numpy(values),
        torch.from_numpy(bootstrap),
        lambdas=lambdas,
    )
    assert result.vs.shape == result.pg_advantages.shape == (6, 3, 4)
    for k in range(4):
        steps.values = values[..., k]
        steps.next_values = np.concatenate([values[1:, :, k], bootstrap[None, :, k]])
        one = VTraceReturns(result.vs[..., k], result.pg_advantages[..., k])
        assert_close(one, *slow_vtrace(steps, 1.0, 1.0, 1.0))


ONES, LAST, NUMBER = torch.ones(4, 2), torch.ones(2), torch.ones(())
SEVERAL = torch.ones(4, 2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (vtrace, (*[ONES] * 5, LAST), r"^lambdas has shape \[2\], expected \[4, 2\] like log_r"),
        (vtrace, [NUMBER] * 6, "time dimension"),
        (from_importance_weights, [ONES] * 5, r"bootstrap_value has shape \[4, 2\], .* \[4, 2\]"),
        (from_importance_weights, [NUMBER] * 5, "bootstrap_value"),
        (
            from_importance_weights,
            (ONES[:, :1], *[ONES] * 3, LAST),
            r"^log_rhos has shape \[4, 1\], expected \[4, 2\] like",
        ),
        (
            from_importance_weights,
            (ONES, ONES[:, 0], ONES, ONES, LAST),
            r"^discounts has shape \[4\], expected \[4, 2\] like",
        ),
        (
            from_importance_weights,
            (ONES, ONES, torch.ones(4, 2, 5), *SEVERAL),
            r"^rewards has shape \[4, 2, 5\], .*, or \[4, 2\]$",
        ),
        (
            lambda *args: from_importance_weights(*args, lambdas=ONES.T),
            (*[ONES] * 4, LAST),
            r"^lambdas has shape \[2, 4\]",
        ),
        (get_log_rhos, ({"a": ONES}, {"b": ONES}), r"^behaviour_.* \['b'\], expected .*\['a'\]"),
        (get_log_rhos, ({"a": ONES}, ONES), r"no parts, expected the parts \['a'\] like target"),
        (get_log_rhos, ({}, {}), "empty mapping"),
        (get_log_rhos, (ONES, LAST), r"behaviour_action_log_probs has shape \[2\]"),
        (
            get_log_rhos,
            [{"a": ONES, "b": ONES[:, :1]}] * 2,
            r"target_action_log_probs\['b'\] has shape \[4, 1\]",
        ),
    ],
)
def test_vtrace_raises_for_wrong_shapes_and_components(
    function: Any, arguments: Any, message: str
) -> None:
    """The error contains the argument, its shape or components, and the expected ones."""
    with pytest.raises(ShapeError, match=message):
        function(*arguments)


@sweep("key", KEYS)
@sweep("threshold", [0.0, -1.0, math.nan])
def test_vtrace_raises_for_invalid_thresholds(key: str, threshold: float) -> None:
    """The error contains the threshold and how to disable clipping."""
    arguments = tensors(make_steps((2, 2), seed=0))
    with pytest.raises(ConfigError, match=rf"^{key} = .*or None for no clipping"):
        vtrace(*arguments, **{key: threshold})  # type: ignore[arg-type]


def test_log_rhos_are_summed_over_components() -> None:
    """The ratio of a joint action is the product over its components, in any order."""
    rng = np.random.default_rng(0)
    target = {key: torch.from_numpy(rng.normal(size=(5, 3))) for key in ("a", "b", "c")}
    behaviour = {key: torch.from_numpy(rng.normal(size=(5, 3))) for key in ("c", "b", "a")}
    before = {key: part.clone() for key, part in target.items()}
    expected = sum(target[key].numpy() - behaviour[key].numpy() for key in "abc")
    np.testing.assert_allclose(get_log_rhos(target, behaviour), expected, rtol=RTOL)
    assert all(torch.equal(part, before[key]) for key, part in target.items())
    learning = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    log_rhos = get_log_rhos(learning, torch.tensor([[-3.0, -0.5]]))
    assert log_rhos.tolist() == [[2.0, -1.5]]
    assert not log_rhos.requires_grad


SPACES = {
    "discrete": Discrete(4),
    "dict": Dict({"gear": Discrete(3), "keys": MultiDiscrete([2, 2]), "steer": Box(-1, 1, (2,))}),
}


def make_policies(name: str) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """Return a distribution, parameters of two policies, and actions of the first; T = 6, B = 3."""
    distribution = distribution_for(SPACES[name])
    generator = torch.Generator().manual_seed(0)
    behaviour, target = torch.randn(
        2, 6, 3, distribution.param_size, generator=generator, dtype=torch.float64
    )
    noise = distribution.draw_noise((6, 3), generator)
    return distribution, behaviour, target.requires_grad_(), distribution.sample(behaviour, noise)


@pytest.mark.parametrize("name", SPACES)
def test_vtrace_from_logits_equals_from_importance_weights(name: str) -> None:
    """The parameters of two policies give the weights of the joint actions."""
    distribution, behaviour, target, actions = make_policies(name)
    behaviour.requires_grad_()
    steps = make_steps((6, 3), seed=11)
    _, discounts, rewards, values, next_values, lambdas = tensors(steps)
    rest = discounts, rewards, values, next_values[-1]
    options: Any = dict(zip((*KEYS[:2], "lambdas"), (2.0, 3.0, lambdas), strict=True))
    result: Any = from_logits(behaviour, target, actions, distribution, *rest, **options)
    log_pi, log_mu = (distribution.log_prob(params, actions) for params in (target, behaviour))
    assert torch.equal(result.log_rhos, (log_pi - log_mu).detach())
    assert torch.equal(result.target_action_log_probs, log_pi)
    assert torch.equal(result.behaviour_action_log_probs, log_mu)
    expected = from_importance_weights(result.log_rhos, *rest, **options)
    assert torch.equal(result.vs, expected.vs)
    assert torch.equal(result.pg_advantages, expected.pg_advantages)
    constants = [part for name, part in result._asdict().items() if not name.startswith("target")]
    assert result.target_action_log_probs.requires_grad
    assert not any(part.requires_grad for part in constants if isinstance(part, torch.Tensor))
    assert (result.log_rhos > 0.1).any()
    assert (result.log_rhos < -0.1).any()


def test_vtrace_from_logits_accepts_mappings_of_components() -> None:
    """Mappings by component give log-probabilities by component and the weights of the whole."""
    joint, behaviour, target, actions = make_policies("dict")
    mu, pi = (dict(zip(joint.parts, joint.split(p), strict=True)) for p in (behaviour, target))
    _, discounts, rewards, values, next_values, _ = tensors(make_steps((6, 3), seed=12))
    rest = discounts, rewards, values, next_values[-1]
    result: Any = from_logits(mu, pi, actions, joint.parts, *rest)
    whole = from_logits(behaviour, target, actions, joint, *rest)
    for key, part in joint.parts.items():
        expected = part.log_prob(pi[key], actions[key])
        assert torch.equal(result.target_action_log_probs[key], expected)
        assert not result.behaviour_action_log_probs[key].requires_grad
    with pytest.raises(ShapeError, match=r"^actions has the parts \['gear'\], expected the parts"):
        from_logits(mu, pi, {"gear": actions["gear"]}, joint.parts, *rest)
    with pytest.raises(ShapeError, match=r"^distribution has no parts, expected the parts"):
        from_logits(mu, pi, actions, joint, *rest)
    assert result.target_action_log_probs.keys() == result.behaviour_action_log_probs.keys()
    torch.testing.assert_close(result.log_rhos, whole.log_rhos, rtol=RTOL, atol=1e-12)
    assert_close(VTraceReturns(*result[:2]), whole.vs, whole.pg_advantages)
