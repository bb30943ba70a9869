"""SoftActions: components of any distribution for soft actor-critics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from cases import sweep
from family_cases import randn
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from maze_train.core.errors import SpaceError
from maze_train.distributions.beta import Beta
from maze_train.distributions.categorical import (
    Bernoulli,
    Categorical,
    MultiCategorical,
    impossible_logit,
)
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.mapping import JointDistribution
from maze_train.distributions.soft import SoftActions, SoftSample

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


def draw(distribution: Distribution, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float64 parameters and noise [n, ...]."""
    noise = distribution.draw_noise((n,), torch.Generator().manual_seed(3)).double()
    return 0.7 * randn(n, distribution.param_size), noise


def pieces(
    distribution: Distribution, params: torch.Tensor, noise: torch.Tensor
) -> list[tuple[str, Distribution, torch.Tensor, torch.Tensor]]:
    """Return key, distribution, parameters and noise of each component."""
    if not isinstance(distribution, JointDistribution):
        return [("", distribution, params, noise)]
    own = distribution.split(params), distribution.split_noise(noise)
    return [
        (*part, *tensors) for part, *tensors in zip(distribution.parts.items(), *own, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
@sweep("n", [5, 0])
def test_soft_actions_match_their_components(case: str, n: int) -> None:
    """Samples, gradients and entropies match the components in order.

    Stored actions have the same features, and choices with their probabilities.
    """
    soft, distribution = SoftActions(CASES[case]), CASES[case]
    params, noise = draw(distribution, n)
    params.requires_grad_()
    sample, actions = soft.sample(params, noise), distribution.sample(params, noise)
    fields: dict[str, list[torch.Tensor]] = {name: [] for name in SoftSample.__slots__}
    entropies, chosen = [], torch.zeros(n, dtype=torch.float64)
    for key, part, own, own_noise in pieces(distribution, params, noise):
        if part.num_choices:
            pair = ("probs", "choice_log_probs"), part.choice_probs(own)
            entropies.append(part.entropy(own))
            own_actions = actions[key] if isinstance(actions, dict) else actions
            chosen = chosen + part.log_prob(own, own_actions)
        else:
            x, log_prob = part.reparameterized(own, own_noise)
            pair = ("features", "log_probs"), (x, log_prob.unsqueeze(-1))
            entropies.append(-log_prob)
        for name, value in zip(*pair, strict=True):
            fields[name].append(value)
    for name, values in fields.items():
        own_field = getattr(sample, name)
        expected = torch.cat(values, -1) if values else params.new_zeros(n, 0)
        torch.testing.assert_close(own_field, expected)
        if values:
            weights = randn(*expected.shape, seed=4)
            slopes = [
                torch.autograd.grad((x * weights).sum(), params, retain_graph=True)
                for x in (own_field, expected)
            ]
            torch.testing.assert_close(*slopes)
    torch.testing.assert_close(soft.neg_log_probs(sample), torch.stack(entropies, -1))
    assert soft.part_keys == list(getattr(distribution, "parts", [""]))
    assert sample.features.shape == (n, soft.critic_input_size)
    assert sample.probs.shape == (n, soft.num_choices)
    assert soft.target_entropies(params, 1.0, 1.0).shape == (n, len(soft.parts))
    torch.testing.assert_close(soft.critic_input(actions).double(), sample.features)
    choices = soft.choices(actions)
    assert choices.dtype == torch.int64
    torch.testing.assert_close(sample.choice_log_probs.gather(1, choices).sum(1), chosen)


def test_soft_action_target_entropies_match_the_formula() -> None:
    """Targets are -D, or a fraction of the maximum entropy for discrete components."""
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


def test_distribution_without_features_or_choices_raises() -> None:
    """A distribution without features or choices raises an error with the key of its component."""

    class Neither(Categorical):
        def __init__(self, space: Discrete) -> None:
            super().__init__(space)
            self.num_choices = 0

    neither = Neither(Discrete(2))
    with pytest.raises(SpaceError, match=r"^Neither: .*implement"):
        SoftActions(neither)
    with pytest.raises(SpaceError, match=r"^b: Neither: "):
        SoftActions(JointDistribution({"a": SINGLE["squashed"], "b": neither}))
