"""Critic inputs of all distributions: continuous features and discrete choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import sweep
from family_cases import BOUNDED, CASES, CONTINUOUS, DISCRETE, UNCLIPPED, build, draw, randn

from maze_train.core.errors import SpaceError


@pytest.mark.parametrize("case", BOUNDED)
def test_critic_features_are_scaled_environment_actions(case: str) -> None:
    """Critic inputs are environment actions scaled from -1 (lower bound) to 1 (upper bound)."""
    family, space = build(case)
    actions = draw(family, 3 * randn(200, family.param_size))
    in_env = family.to_env(actions).double().reshape(200, -1)  # type: ignore[union-attr]
    low, high = (torch.tensor(x, dtype=torch.float64).flatten() for x in (space.low, space.high))
    expected = 2 * (in_env - low) / (high - low) - 1
    torch.testing.assert_close(family.critic_input(actions), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", CONTINUOUS)
@sweep("batch", [(), (0,), (50,), (2, 3)])
def test_reparameterized_samples_match_critic_features(case: str, batch: tuple[int, ...]) -> None:
    """Features and log-densities match scaled samples for any leading dimensions."""
    family, space = build(case)
    params = 2 * randn(*batch, family.param_size)
    noise = family.draw_noise(batch, torch.Generator().manual_seed(1)).double()
    features, log_probs = family.reparameterized(params, noise)
    actions = family.sample(params, noise)
    assert (family.critic_input_size, family.num_choices) == (int(np.prod(space.shape)), 0)
    assert features.shape == (*batch, family.critic_input_size)
    torch.testing.assert_close(features, family.critic_input(actions), rtol=0, atol=1e-12)
    expected = family.log_prob(params, actions) + family.log_scale
    torch.testing.assert_close(log_probs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", UNCLIPPED)
def test_log_scale_makes_densities_over_the_unit_box(case: str) -> None:
    """The mean of 1 / p over samples is 2ᴰ, the volume of [-1, 1]ᴰ."""
    family, _ = build(case)
    params = torch.zeros(family.param_size, dtype=torch.float64)
    if case.startswith("squashed"):
        params[params.shape[0] // 2 :] = -0.5
    many = params.expand(20_000, -1)
    inverse = (-family.log_prob(many, draw(family, many)) - family.log_scale).exp()
    volume = 2.0**family.critic_input_size
    assert abs(inverse.mean().item() - volume) < 5 * inverse.std().item() / 20_000**0.5


@pytest.mark.parametrize("case", DISCRETE)
@sweep("batch", [(), (0,), (5,), (2, 3)])
def test_choice_log_probs_add_up_to_the_action_log_prob(case: str, batch: tuple[int, ...]) -> None:
    """The log-probabilities of the chosen entries add up to the log-probability of the action."""
    family, _ = build(case)
    params = 2 * randn(*batch, family.param_size)
    actions = draw(family, params)
    probs, log_probs = family.choice_probs(params)
    chosen = family.choices(actions)
    assert probs.shape == log_probs.shape == (*batch, family.num_choices)
    assert chosen.shape[:-1] == batch
    assert chosen.dtype == torch.int64
    assert family.critic_input_size == 0
    torch.testing.assert_close(probs, log_probs.exp())
    torch.testing.assert_close(
        log_probs.gather(-1, chosen).sum(-1), family.log_prob(params, actions)
    )
    torch.testing.assert_close(-(probs * log_probs).sum(-1), family.entropy(params))


@pytest.mark.parametrize("case", DISCRETE)
def test_choice_frequencies_match_their_probabilities(case: str) -> None:
    """The frequencies of choices match their probabilities."""
    family, _ = build(case)
    params = randn(family.param_size).expand(20_000, -1)
    chosen = family.choices(draw(family, params))
    rates = torch.zeros(20_000, family.num_choices).scatter_add_(
        -1, chosen, torch.ones(chosen.shape)
    )
    assert (rates <= 1).all()
    probs = family.choice_probs(params)[0][0].float()
    errors = 5 * (probs * (1 - probs) / 20_000).sqrt() + 1e-9
    assert ((rates.mean(0) - probs).abs() <= errors).all()
    assert probs.sum().item() == pytest.approx(chosen.shape[-1])


@pytest.mark.parametrize("case", DISCRETE)
def test_max_entropy_is_the_entropy_of_uniform_logits(case: str) -> None:
    """If all actions are legal, `max_entropy` is the entropy of the uniform distribution."""
    family, _ = build(case)
    params = randn(4, family.param_size)
    torch.testing.assert_close(family.max_entropy(params), family.entropy(torch.zeros_like(params)))


@pytest.mark.parametrize("case", CASES)
def test_features_of_discrete_and_choices_of_continuous_raise(case: str) -> None:
    """Discrete distributions have no features, and continuous ones have no choices."""
    family, _ = build(case)
    params = randn(2, family.param_size)
    noise, actions = family.draw_noise((2,)).double(), draw(family, params)
    calls = [
        lambda: family.choice_probs(params),
        lambda: family.choices(actions),
        lambda: family.max_entropy(params),
    ]
    if case in DISCRETE:
        calls = [
            lambda: family.critic_input(actions),
            lambda: family.reparameterized(params, noise),
        ]
    for call in calls:
        with pytest.raises(SpaceError, match=f"{type(family).__name__} has no .*SoftActions"):
            call()
