"""DiagonalGaussian matches torch.distributions; limits of the log std."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium.spaces import Box
from no_float64 import SimulatedMps

from maze_train.core.errors import ConfigError
from maze_train.distributions.beta import Beta
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian


def test_free_log_std_is_appended_to_the_parameters() -> None:
    """A free log std is appended to the parameters and gets the gradient of every row."""
    family = DiagonalGaussian(Box(-1.0, 1.0, (3,)), initial_log_std=-0.5)
    assert family.free_param_size == 3
    free = family.initial_free_params().requires_grad_()
    assert free.tolist() == [-0.5] * 3
    mean = torch.zeros(8, family.param_size - family.free_param_size)
    params = torch.cat([mean, free.expand(8, 3)], dim=-1)
    family.entropy(params).sum().backward()
    assert free.grad is not None
    assert free.grad.tolist() == [8.0] * 3


@pytest.mark.parametrize("family_class", [DiagonalGaussian, SquashedGaussian])
@pytest.mark.parametrize("is_free", [False, True])
def test_log_std_is_clamped_to_its_limits(family_class: Any, is_free: bool) -> None:
    """A log std is clamped to its limits, with gradient 0 outside; a limit may be None.

    The reference has the clamped values as parameters.
    """
    space, limits = Box(-1.0, 1.0, (4,)), {"log_std_min": -1.0, "log_std_max": 0.5}
    family = family_class(space, state_dependent_std=not is_free, **limits)
    plain = family_class(space, state_dependent_std=not is_free)
    mean, actions = torch.randn(3, 4), torch.randn(3, 4)
    log_std = torch.tensor([-3.0, -1.0, 0.2, 0.7]).expand(3, 4).clone().requires_grad_()
    clamped = log_std.detach().clamp(-1.0, 0.5).requires_grad_()
    for one, params in ((family, log_std), (plain, clamped)):
        log_prob, entropy = one.log_prob_and_entropy(torch.cat([mean, params], -1), actions)
        (log_prob + 2.0 * entropy).sum().backward()
    assert log_std.grad is not None
    assert clamped.grad is not None
    inside = torch.tensor([0.0, 1.0, 1.0, 0.0])
    torch.testing.assert_close(log_std.grad, clamped.grad * inside)
    noise = torch.randn(3, 4)
    given, expected = (torch.cat([mean, x.detach()], -1) for x in (log_std, clamped))
    assert torch.equal(family.sample(given, noise), plain.sample(expected, noise))
    free = torch.tensor([-3.0, -1.0, 0.2, 0.7])
    family.limit_free_params(free)
    assert torch.equal(free, clamped[0])
    above = family_class(space, state_dependent_std=False, log_std_min=-1.0)
    above.limit_free_params(free.fill_(7.0))
    assert free.tolist() == [7.0] * 4


def test_free_log_std_is_not_limited_by_default() -> None:
    """A free log std is not limited by default; a state-dependent one is shifted and clamped."""
    space = Box(-1.0, 1.0, (1,))
    params = torch.tensor([0.0, 5.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(DiagonalGaussian(space).entropy(params), params)
    assert gradient.tolist() == [0.0, 1.0]
    dependent, shifted = (
        DiagonalGaussian(space, state_dependent_std=True, initial_log_std=log_std)
        for log_std in (0.0, -1.0)
    )
    assert torch.equal(dependent.entropy(params), dependent.entropy(torch.tensor([0.0, 2.0])))
    at_zero, at_minus_one = torch.zeros(2), torch.tensor([0.0, -1.0])
    assert torch.equal(shifted.entropy(at_zero), dependent.entropy(at_minus_one))
    assert dependent.free_param_size == 0
    assert dependent.initial_free_params().shape == (0,)


def test_to_env_clips_each_dimension() -> None:
    """Each dimension is clipped to its bounds, which may be infinite; integers are rounded."""
    low = np.array([-1.0, -np.inf, 0.0], dtype=np.float32)
    high = np.array([2.0, np.inf, np.inf], dtype=np.float32)
    in_env = DiagonalGaussian(Box(low, high)).to_env(torch.tensor([[-9.0] * 3, [9.0] * 3]))
    assert in_env.tolist() == [[-1.0, -9.0, 0.0], [2.0, 9.0, 9.0]]
    assert in_env.dtype == torch.float32
    low = np.array([[0, -5], [10, 100]], np.int16)
    high = np.array([[3, 5], [20, 30_000]], np.int16)
    family = DiagonalGaussian(Box(low, high, dtype=np.int16))
    for value, expected in [(-1e9, low), (1e9, high), (2.4, [[2, 2], [10, 100]])]:
        in_env = family.to_env(torch.full((7, 2, 2), value))
        assert in_env.dtype == torch.int16
        assert in_env[6].tolist() == np.asarray(expected).tolist()


@sweep(
    "dtype", [np.float16, np.float32, np.float64, np.uint8, np.int8, np.int32, np.int64, np.uint32]
)
@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_to_env_stays_in_any_box(dtype: type, device: str) -> None:
    """Actions respect the widest bounds of every dtype, and integers are rounded."""
    kind = np.iinfo if np.issubdtype(dtype, np.integer) else np.finfo
    space = Box(kind(dtype).min, kind(dtype).max, (2,), dtype=dtype)
    family = DiagonalGaussian(space)
    with nullcontext() if device == "cpu" else SimulatedMps():
        for values in ([-1e30, 1e30], [0.6, 3.4], [-3.0, 100.7]):
            in_env = family.to_env(torch.tensor(values).to(device)).cpu().numpy().astype(dtype)
            assert space.contains(in_env)
            assert in_env[0] < in_env[1]
        near = family.to_env(torch.tensor([3.4, 3.6]).to(device)).cpu()
    assert near.double().numpy() == pytest.approx(
        [3, 4] if kind is np.iinfo else [3.4, 3.6], rel=1e-3
    )


@pytest.mark.parametrize("family", [DiagonalGaussian, SquashedGaussian, Beta])
@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_bounds_without_float64(family: type[Any], dtype: type) -> None:
    """On MPS, float32 actions stay within bounds that float32 cannot represent."""
    high = 0.1 if dtype is np.float64 else 2**31 - 1
    space = Box(-high, high, (2,), dtype=dtype)
    with SimulatedMps():
        actions = torch.tensor([0.0, 1.0] if family is Beta else [-1e30, 1e30])
        in_env = family(space).to_env(actions.to("mps")).cpu().numpy()
    assert space.contains(in_env.astype(dtype))
    np.testing.assert_allclose(in_env, [-high, high], rtol=1e-6)


def test_log_prob_of_the_unclipped_action() -> None:
    """An action outside the bounds has the density of the unclipped sample."""
    family = DiagonalGaussian(Box(-1.0, 1.0, (1,)))
    params = torch.zeros(2, dtype=torch.float64)
    action = torch.tensor([3.0], dtype=torch.float64)
    assert family.log_prob(params, action).item() == pytest.approx(-4.5 - 0.9189385332046727)


@pytest.mark.parametrize(
    ("settings_", "key"),
    [
        ({"state_dependent_std": "yes"}, "state_dependent_std"),
        ({"initial_log_std": float("nan")}, "initial_log_std"),
        ({"log_std_min": "low"}, "log_std_min"),
        ({"log_std_min": 2.0, "log_std_max": 2.0}, "log_std_min"),
        ({"log_std_min": 2.0}, "initial_log_std"),
        ({"log_std_max": 100.0}, "log_std_max"),
        ({"state_dependent_std": True, "initial_log_std": 3.0}, "initial_log_std"),
    ],
)
def test_gaussian_settings_out_of_range_raise(settings_: dict[str, object], key: str) -> None:
    """The error contains the setting."""
    with pytest.raises(ConfigError) as caught:
        DiagonalGaussian(Box(-1.0, 1.0, (1,)), **settings_)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_critic_features_of_clipped_actions_are_scaled() -> None:
    """Critic inputs are clipped, not rounded, and scaled by finite bounds; modes are unclipped."""
    low = np.array([-1.0, -np.inf, 0.0, 2.0], dtype=np.float32)
    high = np.array([3.0, np.inf, np.inf, 2.0], dtype=np.float32)
    family = DiagonalGaussian(Box(low, high))
    actions = torch.tensor([[-9.0, -9.0, -9.0, -9.0], [2.0, 9.0, 9.0, 9.0]], requires_grad=True)
    features = family.critic_input(actions)
    assert features.tolist() == [[-1.0, -9.0, 0.0, 0.0], [0.5, 9.0, 9.0, 0.0]]
    features.sum().backward()
    assert actions.grad is not None
    assert actions.grad.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.5, 1.0, 1.0, 0.0]]
    modes = family.unit_mode(torch.cat((actions.detach(), torch.zeros(2, 4)), -1))
    assert modes.tolist() == [[-5.0, -9.0, -9.0, -11.0], [0.5, 9.0, 9.0, 7.0]]
    assert family.log_scale == 0.0
    integer = DiagonalGaussian(Box(0, 10, (1,), dtype=np.uint8))
    assert integer.critic_input(torch.tensor([7.4])).item() == pytest.approx(0.48)
