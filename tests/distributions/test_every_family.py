"""What every family promises, asked of all of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from cases import sweep
from family_cases import CASES, CONTINUOUS, LOW, build, draw, randn
from gymnasium.spaces import Box

from maze_train.distributions.mapping import FAMILIES, distribution_for
from maze_train.errors import SpaceError


def test_every_family_has_a_case() -> None:
    """A family that is added to the table is added here."""
    assert {name for name, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
@sweep("batch", [(), (0,), (5,), (2, 3)])
def test_shapes_and_types(case: str, batch: tuple[int, ...]) -> None:
    """Leading dimensions are free, and sizes and types are those that the family declares."""
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
def test_noise_decides_the_sample(case: str) -> None:
    """Equal seeds give equal actions, other seeds others."""
    family, _ = build(case)
    params = randn(40, family.param_size)
    assert torch.equal(draw(family, params), draw(family, params))
    assert not torch.equal(draw(family, params), draw(family, params, seed=1))


@pytest.mark.parametrize("case", CASES)
def test_env_actions_are_in_the_space(case: str) -> None:
    """Samples and modes of wild params are members of the space, also in float32."""
    family, space = build(case)
    params = 4 * randn(300, family.param_size).float()
    for actions in (draw(family, params), family.mode(params)):
        for row in family.to_env(actions).numpy():  # type: ignore[union-attr]
            value = np.asarray(row)
            assert space.contains(value if isinstance(space, Box) else value[()])


@pytest.mark.parametrize("case", CASES)
def test_round_trip_through_the_environment(case: str) -> None:
    """from_env gives back what to_env was given, where nothing was clipped."""
    family, _ = build(case)
    actions = draw(family, 0.1 * randn(50, family.param_size)).to(family.action_dtype)
    if case.startswith(("clipped", "gaussian")):
        actions = actions.clamp(0.0, 0.5)
        if "n-d" in case:
            actions = torch.tensor(LOW) + actions
    torch.testing.assert_close(
        family.from_env(family.to_env(actions)), actions, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("case", CASES)
def test_entropy_and_kl_are_expectations(case: str) -> None:
    """Entropy and divergence are the means of log-probabilities of 10,000 samples."""
    family, _ = build(case)
    p, q = 0.7 * randn(family.param_size), 0.7 * randn(family.param_size, seed=1)
    many, other = p.expand(10_000, -1), q.expand(10_000, -1)
    actions = draw(family, many)
    log_p, log_q = family.log_prob(many, actions), family.log_prob(other, actions)
    for samples, exact in [(-log_p, family.entropy(p)), (log_p - log_q, family.kl(p, q))]:
        error = 4 * samples.std().item() / 100
        assert abs(samples.mean().item() - exact.item()) < max(error, 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_divergence_from_itself_is_zero(case: str) -> None:
    """KL(p || p) = 0 and KL(p || q) > 0."""
    family, _ = build(case)
    p, q = 2 * randn(20, family.param_size), 2 * randn(20, family.param_size, seed=1)
    torch.testing.assert_close(family.kl(p, p), torch.zeros(20, dtype=torch.float64))
    assert (family.kl(p, q) > 0).all()


@pytest.mark.parametrize("case", CASES)
def test_shared_computation_gives_the_same_bits(case: str) -> None:
    """log_prob_and_entropy returns exactly what the two methods return."""
    family, _ = build(case)
    params = randn(7, family.param_size)
    actions = draw(family, params)
    log_prob, entropy = family.log_prob_and_entropy(params, actions)
    assert torch.equal(log_prob, family.log_prob(params, actions))
    assert torch.equal(entropy, family.entropy(params))


@pytest.mark.parametrize("case", CASES)
def test_gradient(case: str) -> None:
    """The gradients of log-probability and entropy are the numerical ones."""
    family, _ = build(case)
    params = randn(6, family.param_size)
    actions = draw(family, params)
    leaf = params.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: family.log_prob_and_entropy(p, actions), (leaf,))


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_divergence(case: str) -> None:
    """The gradients of KL for both arguments are the numerical ones."""
    family, _ = build(case)
    p, q = randn(4, family.param_size), randn(4, family.param_size, seed=1)
    assert torch.autograd.gradcheck(family.kl, (p.requires_grad_(), q.requires_grad_()))


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("squashed")])
def test_mode_is_most_probable(case: str) -> None:
    """No action drawn is more probable than the mode (that of `squashed` is the median)."""
    family, _ = build(case)
    params = randn(family.param_size).expand(2000, -1)
    best = family.log_prob(params, family.mode(params))
    assert (family.log_prob(params, draw(family, params)) <= best + 1e-9).all()


@pytest.mark.parametrize("case", ["beta", "beta scalar"])
def test_density_over_the_environments_action(case: str) -> None:
    """The mean of 1 / p(a) over samples is the volume that they fill: no scale is forgotten."""
    family, space = build(case)
    params = torch.zeros(family.param_size, dtype=torch.float64).expand(20_000, -1)
    inverse = (-family.log_prob(params, draw(family, params))).exp()
    volume = float(np.prod(space.high - space.low))
    assert abs(inverse.mean().item() - volume) < 5 * inverse.std().item() / 20_000**0.5


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_stays_on_the_device_of_params(case: str) -> None:
    """No family mixes devices: on torch's `meta` device, mixing would raise."""
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
def test_survives_pickling(case: str) -> None:
    """A copy in another process computes the same numbers."""
    family, _ = build(case)
    copy, params = pickle.loads(pickle.dumps(family)), randn(3, family.param_size)
    assert torch.equal(copy.entropy(params), family.entropy(params))
    assert torch.equal(draw(copy, params), draw(family, params))


@pytest.mark.parametrize("case", CONTINUOUS)
def test_samples_have_gradients(case: str) -> None:
    """The gradient of sampled actions reaches every parameter, finite and float32."""
    family, _ = build(case)
    params = randn(6, family.param_size).float().requires_grad_()
    noise = family.draw_noise((6,), torch.Generator().manual_seed(0))
    actions = family.sample(params, noise)
    assert isinstance(actions, torch.Tensor)
    actions.sum().backward()
    assert params.grad is not None
    assert params.grad.isfinite().all()
    assert (params.grad != 0).any(0).all()


@pytest.mark.parametrize("name", ["diagonal_gaussian", "squashed_gaussian", "beta"])
def test_a_box_without_numbers_is_refused(name: str) -> None:
    """There is nothing to choose."""
    with pytest.raises(SpaceError, match="holds no number"):
        distribution_for(Box(-1.0, 1.0, (0,)), {"Box": name})
