"""DiagonalGaussian against torch.distributions and its own limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as td

from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.errors import ConfigError, SpaceError


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64 numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def normal(params: torch.Tensor) -> td.Distribution:
    """The same distribution as torch has it."""
    mean, log_std = params.chunk(2, -1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    batch=st.lists(st.integers(1, 3), max_size=2),
    seed=st.integers(0, 99),
)
def test_equals_torch_distributions(shape: list[int], batch: list[int], seed: int) -> None:
    """For any shape of box and batch the four functions agree with torch's classes in float64."""
    family = DiagonalGaussian(Box(-np.inf, np.inf, tuple(shape)))
    p = randn(*batch, family.param_size, seed=seed)
    q = randn(*batch, family.param_size, seed=seed + 1)
    actions = family.sample(p, randn(*batch, family.noise_size, seed=seed + 2))
    assert actions.shape == (*batch, *shape)
    flat = actions.reshape(normal(p).mean.shape)
    torch.testing.assert_close(family.log_prob(p, actions), normal(p).log_prob(flat))
    torch.testing.assert_close(family.entropy(p), normal(p).entropy())
    torch.testing.assert_close(family.kl(p, q), td.kl_divergence(normal(p), normal(q)))
    log_prob, entropy = family.log_prob_and_entropy(p, actions)
    assert torch.equal(log_prob, family.log_prob(p, actions))
    assert torch.equal(entropy, family.entropy(p))


@pytest.mark.parametrize("family_type", [DiagonalGaussian, SquashedGaussian])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_empty_batch(family_type: type, shape: tuple[int, ...]) -> None:
    """No rows give no actions and no values."""
    family = family_type(Box(-1.0, 1.0, shape))
    params = torch.zeros(0, family.param_size)
    actions = family.sample(params, family.draw_noise((0,)))
    assert actions.shape == family.to_env(actions).shape == (0, *shape)
    assert family.log_prob_and_entropy(params, actions)[1].shape == (0,)


def test_moments_of_samples() -> None:
    """Mean and standard deviation of 100,000 samples lie within four standard errors."""
    family = DiagonalGaussian(Box(-1.0, 1.0, (2,)))
    params = torch.tensor([1.0, -2.0, 0.5, -1.0])
    noise = family.draw_noise((100_000,), torch.Generator().manual_seed(0))
    samples = family.sample(params.expand(100_000, 4), noise).double()
    std = params[2:].double().exp()
    assert ((samples.mean(0) - params[:2]).abs() < 4 * std / 100_000**0.5).all()
    assert ((samples.std(0) - std).abs() < 4 * std / 200_000**0.5).all()


@pytest.mark.parametrize("family_type", [DiagonalGaussian, SquashedGaussian])
def test_noise_decides_the_sample(family_type: type) -> None:
    """Equal seeds give equal noise and so equal samples; no noise gives the mode."""
    family = family_type(Box(-1.0, 1.0, (3,)))
    first, again, other = (
        family.draw_noise((5,), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    params = randn(5, 6)
    assert first.shape == (5, family.noise_size)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(family.sample(params, first), family.sample(params, again))
    assert torch.equal(family.sample(params, torch.zeros(5, 3)), family.mode(params))


def test_samples_are_reparameterised() -> None:
    """The gradient of a sample is 1 for the mean and std * noise for the log std."""
    family = DiagonalGaussian(Box(-1.0, 1.0, (2,)))
    params, noise = randn(4, 4).requires_grad_(), randn(4, 2, seed=1)
    family.sample(params, noise).sum().backward()
    assert params.grad is not None
    torch.testing.assert_close(params.grad[:, :2], torch.ones(4, 2, dtype=torch.float64))
    torch.testing.assert_close(params.grad[:, 2:], params.detach()[:, 2:].exp() * noise)


@pytest.mark.parametrize("family_type", [DiagonalGaussian, SquashedGaussian])
@pytest.mark.parametrize("state_dependent", [False, True])
def test_gradients(family_type: type, state_dependent: bool) -> None:
    """Analytic gradients equal numerical ones."""
    family = family_type(Box(-1.0, 2.0, (2, 1)), state_dependent_std=state_dependent)
    params = (0.3 * randn(3, 4)).requires_grad_()
    actions, other = randn(3, 2, 1, seed=1), 0.3 * randn(3, 4, seed=2)
    assert torch.autograd.gradcheck(lambda p: family.log_prob_and_entropy(p, actions), (params,))
    assert torch.autograd.gradcheck(lambda p: family.kl(p, other), (params,))


def test_free_params_are_the_last_entries() -> None:
    """A state-independent log std is the tail of params and gets the gradient of every row."""
    family = DiagonalGaussian(Box(-1.0, 1.0, (3,)), initial_log_std=-0.5)
    assert family.free_param_size == 3
    free = family.initial_free_params().requires_grad_()
    assert free.tolist() == [-0.5] * 3
    mean = torch.zeros(8, family.param_size - family.free_param_size)
    params = torch.cat([mean, free.expand(8, 3)], dim=-1)
    family.entropy(params).sum().backward()
    assert free.grad is not None
    assert free.grad.tolist() == [8.0] * 3


def test_only_a_networks_log_std_is_limited() -> None:
    """A free log std passes any limit with its gradient; a network's is clamped."""
    space = Box(-1.0, 1.0, (1,))
    free = DiagonalGaussian(space)
    dependent = DiagonalGaussian(space, state_dependent_std=True)
    params = torch.tensor([0.0, 5.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(free.entropy(params), params)
    assert gradient.tolist() == [0.0, 1.0]
    inside = torch.tensor([0.0, 2.0])
    assert torch.equal(dependent.entropy(params.detach()), dependent.entropy(inside))
    assert dependent.free_param_size == 0
    assert dependent.initial_free_params().shape == (0,)


def test_initial_log_std_shifts_a_networks_output() -> None:
    """A network that computes 0 starts at `initial_log_std`."""
    space = Box(-1.0, 1.0, (2,))
    shifted = DiagonalGaussian(space, state_dependent_std=True, initial_log_std=-1.0)
    plain = DiagonalGaussian(space, state_dependent_std=True)
    at_zero, at_minus_one = torch.zeros(4), torch.tensor([0.0, 0.0, -1.0, -1.0])
    assert torch.equal(shifted.entropy(at_zero), plain.entropy(at_minus_one))


def test_to_env_clips_each_dimension() -> None:
    """Actions are clipped to bounds per dimension; infinite bounds leave them alone."""
    low = np.array([-1.0, -np.inf, 0.0], dtype=np.float32)
    high = np.array([2.0, np.inf, np.inf], dtype=np.float32)
    family = DiagonalGaussian(Box(low, high))
    in_env = family.to_env(torch.tensor([[-9.0, -9.0, -9.0], [9.0, 9.0, 9.0]]))
    assert in_env.tolist() == [[-1.0, -9.0, 0.0], [2.0, 9.0, 9.0]]
    assert in_env.dtype == torch.float32


def test_to_env_clips_each_element_of_an_integer_matrix() -> None:
    """An n-d integer box with bounds of its own for each element is clipped and rounded there."""
    low = np.array([[0, -5], [10, 100]], np.int16)
    high = np.array([[3, 5], [20, 30_000]], np.int16)
    space = Box(low, high, dtype=np.int16)
    family = DiagonalGaussian(space)
    for value, expected in [(-1e9, low), (1e9, high), (2.4, [[2, 2], [10, 100]])]:
        in_env = family.to_env(torch.full((7, 2, 2), value))
        assert in_env.dtype == torch.int16
        assert in_env[0].tolist() == np.asarray(expected).tolist()
        assert space.contains(in_env[6].numpy())


@pytest.mark.parametrize(("low", "high"), [(-1.0, np.inf), (-np.inf, 1.0), (-np.inf, np.inf)])
def test_open_sides_work(low: float, high: float) -> None:
    """A box without bounds on one side or both has the same density, clipped where it can be."""
    family, bounded = (DiagonalGaussian(Box(a, b, (2,))) for a, b in [(low, high), (-1.0, 1.0)])
    params, noise = randn(50, 4), 3 * randn(50, 2, seed=1)
    actions = family.sample(params, noise)
    assert torch.equal(family.log_prob(params, actions), bounded.log_prob(params, actions))
    in_env = family.to_env(actions)
    assert torch.equal(in_env, actions.float().clamp(low, high))
    assert torch.equal(family.from_env(in_env), in_env)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, np.uint8, np.int8, np.int32, np.int64, np.uint32]
)
def test_to_env_stays_in_any_box(dtype: type) -> None:
    """Even the widest bounds of every data type are kept, and integers are rounded."""
    kind = np.iinfo if np.issubdtype(dtype, np.integer) else np.finfo
    space = Box(kind(dtype).min, kind(dtype).max, (2,), dtype=dtype)
    family = DiagonalGaussian(space)
    for values in ([-1e30, 1e30], [0.6, 3.4], [-3.0, 100.7]):
        in_env = family.to_env(torch.tensor(values)).numpy()
        assert space.contains(in_env)
        assert in_env[0] < in_env[1]
    assert family.to_env(torch.tensor([3.4, 3.6])).double().numpy() == pytest.approx(
        [3, 4] if kind is np.iinfo else [3.4, 3.6], rel=1e-3
    )


def test_from_env_inverts_to_env_inside_the_bounds() -> None:
    """Inside the bounds the round trip is the identity, for an n-d box."""
    family = DiagonalGaussian(Box(-5.0, 5.0, (2, 2)))
    actions = randn(6, 2, 2).float()
    assert torch.equal(family.from_env(family.to_env(actions)), actions)
    assert family.action_shape == (2, 2)
    assert family.from_env(actions.double()).dtype == family.action_dtype == torch.float32


def test_log_prob_of_the_unclipped_action() -> None:
    """An action outside the bounds keeps the density it was drawn with."""
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
        ({"log_std_min": 2.0}, "log_std_min"),
        ({"log_std_max": 100.0}, "log_std_max"),
        ({"state_dependent_std": True, "initial_log_std": 3.0}, "initial_log_std"),
    ],
)
def test_wrong_settings_are_named(settings_: dict[str, object], key: str) -> None:
    """A setting of a wrong type or range is refused under its name."""
    with pytest.raises(ConfigError) as caught:
        DiagonalGaussian(Box(-1.0, 1.0, (1,)), **settings_)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_space_without_a_torch_type_is_refused() -> None:
    """A box of a type that torch lacks is an error that names the type."""
    with pytest.raises(SpaceError, match=r"longdouble|float128"):
        DiagonalGaussian(Box(-1.0, 1.0, (1,), dtype=np.longdouble))


def test_what_critics_read_of_clipped_actions() -> None:
    """Clipped as `to_env` does, not rounded, scaled where both bounds are finite."""
    low = np.array([-1.0, -np.inf, 0.0, 2.0], dtype=np.float32)
    high = np.array([3.0, np.inf, np.inf, 2.0], dtype=np.float32)
    family = DiagonalGaussian(Box(low, high))
    actions = torch.tensor([[-9.0, -9.0, -9.0, -9.0], [2.0, 9.0, 9.0, 9.0]], requires_grad=True)
    features = family.critic_input(actions)
    assert features.tolist() == [[-1.0, -9.0, 0.0, 0.0], [0.5, 9.0, 9.0, 0.0]]
    features.sum().backward()
    assert actions.grad is not None
    assert actions.grad.tolist() == [[0.0, 1.0, 0.0, 0.0], [0.5, 1.0, 1.0, 0.0]]
    assert family.log_scale == 0.0
    integer = DiagonalGaussian(Box(0, 10, (1,), dtype=np.uint8))
    assert integer.critic_input(torch.tensor([7.4])).item() == pytest.approx(0.48)
