"""The loss of behavioral cloning matches its formulas in float64."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from maze_train.algorithms.bc.learner import BCLoss, balanced_weights
from maze_train.core.errors import ConfigError, ShapeError
from maze_train.distributions.categorical import impossible_logit
from maze_train.distributions.mapping import distribution_for

GRIP = spaces.Discrete(4, start=2)
KEYS = spaces.MultiDiscrete([3, 2])
BITS = spaces.MultiBinary(3)
ARM = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))
HYBRID = spaces.Dict(OrderedDict(arm=ARM, grip=GRIP, keys=KEYS, bits=BITS))
FAMILIES = ("diagonal_gaussian", "squashed_gaussian", "beta")


def drawn(space, n=6, **families):
    """Return a distribution, float64 parameters [n, P] and actions sampled from it."""
    distribution = distribution_for(space, families)
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(n, distribution.param_size, generator=generator, dtype=torch.float64)
    noise = distribution.draw_noise((n,), generator).double()
    return distribution, params, distribution.sample(params, noise)


def slow_likelihood(space, params, actions, weights):
    """Return the negative log-likelihood summed over samples, with a weight per choice.

    The parameters of a diagonal Gaussian are its means, then its log stds.
    """
    if isinstance(space, spaces.Box):
        mean, log_std = params.chunk(2, 1)
        terms = ((actions - mean) / log_std.exp()) ** 2 / 2 + log_std + 0.5 * math.log(2 * math.pi)
        return terms.sum()
    if isinstance(space, spaces.MultiBinary):
        each = F.binary_cross_entropy_with_logits(params, actions.double(), reduction="none")
        of_bits = weights.view(-1, 2)[torch.arange(space.n), actions.long()]
        return (of_bits * each).sum()
    sizes = [int(n) for n in getattr(space, "nvec", [getattr(space, "n", 0)])]
    pieces = zip(params.split(sizes, 1), weights.split(sizes), strict=True)
    return sum(
        F.cross_entropy(logits, column, weight=weight, reduction="sum")
        for (logits, weight), column in zip(pieces, actions.reshape(len(params), -1).T, strict=True)
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_bc_likelihood_is_summed_over_components(weighted):
    """Cross-entropies of choices and bits and the Gaussian NLL are summed over components.

    Every choice has a different weight.
    """
    distribution, params, actions = drawn(HYBRID, n=40)
    weights, total, own = {}, 0.0, iter(distribution.split(params))
    for key, part in distribution.parts.items():
        weights[key] = torch.linspace(1.0, 1.0 + weighted, part.num_choices)
        total += slow_likelihood(HYBRID[key], next(own), actions[key], weights[key].double())
    del weights["arm"]
    loss = BCLoss(distribution, class_weights=weights if weighted else None)(params, actions)
    torch.testing.assert_close(loss, total / 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_mean_squared_error_of_scaled_actions(family):
    """Mode and recorded action are scaled to [-1, 1], and the mean is over dimensions."""
    distribution, params, actions = drawn(ARM, Box=family)
    low, high = torch.tensor([-2.0, 0.0]).double(), torch.tensor([2.0, 5.0]).double()

    def scaled(x):
        return 2 * (x.double() - low) / (high - low) - 1

    loss = BCLoss(distribution, box_loss="mse")(params, actions)
    wanted = distribution.unit_mode(params)
    inside = (distribution.critic_input(actions).abs() <= 1).all(1)
    recorded = scaled(distribution.to_env(actions))
    torch.testing.assert_close(
        distribution.critic_input(actions)[inside], recorded[inside], atol=1e-5, rtol=1e-5
    )
    expected = (wanted - distribution.critic_input(actions)).square().mean()
    torch.testing.assert_close(loss, expected)


def test_hybrid_actions_sum_over_their_parts():
    """The loss of a Dict is the sum of the losses of its leaves, also for different losses."""
    distribution, params, actions = drawn(HYBRID)
    total = sum(
        BCLoss(part, box_loss="mse")(own, actions[key])
        for (key, part), own in zip(
            distribution.parts.items(), distribution.split(params), strict=True
        )
    )
    torch.testing.assert_close(BCLoss(distribution, box_loss="mse")(params, actions), total)


def gradient_of(loss, params, actions):
    """Return the gradient of a loss with respect to the distribution parameters."""
    leaf = params.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, actions), leaf)[0]


def test_balanced_class_weights_match_the_formula():
    """Weights are total / (K n), and 0 for choices that never occur; a Box has no weights.

    MultiDiscrete components and bits are balanced separately: the mean weight over the data is 1.
    """
    distribution = distribution_for(HYBRID, {})
    actions = {
        "arm": torch.zeros(8, 2),
        "grip": torch.tensor([0, 0, 0, 1, 0, 0, 2, 1]),
        "keys": torch.tensor([[0, 0], [1, 0], [1, 1], [1, 1]] * 2),
        "bits": torch.tensor([[0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 1, 0]] * 2).to(
            distribution.parts["bits"].action_dtype
        ),
    }
    halves = [{k: x[half] for k, x in actions.items()} for half in (slice(0, 3), slice(3, 8))]
    weights = balanced_weights(distribution, halves)
    assert set(weights) == {"grip", "keys", "bits"}
    torch.testing.assert_close(weights["grip"], torch.tensor([8 / 15, 8 / 6, 8 / 3, 0.0]))
    torch.testing.assert_close(weights["keys"], torch.tensor([2.0, 4 / 6, 0.0, 1.0, 1.0]))
    for key, own in weights.items():
        chosen = own[distribution.parts[key].choices(actions[key])]
        torch.testing.assert_close(chosen.mean(0), torch.ones_like(chosen.mean(0)))


def test_impossible_choices_have_finite_loss_and_gradient():
    """Choices whose probability rounds to 0 get their full loss and gradient, also with weights."""
    distribution = distribution_for(GRIP)
    params = torch.tensor([[0.0, 0.0, 110.0, 0.0]])
    actions = torch.tensor([0])
    weighted = BCLoss(distribution, class_weights={"": torch.full((4,), 2.0)})
    assert weighted(params, actions) == 2 * BCLoss(distribution)(params, actions) == 220.0
    assert gradient_of(weighted, params, actions)[0].tolist() == [-2.0, 0.0, 2.0, 0.0]


def test_bc_loss_ignores_illegal_choices():
    """With a mask, the loss is the cross-entropy over the legal choices."""
    distribution, params, _ = drawn(GRIP)
    actions = torch.tensor([0, 2, 2, 0, 0, 2])
    masked = params.clone()
    masked[:, [1, 3]] = impossible_logit(masked.dtype)
    expected = F.cross_entropy(params[:, [0, 2]], actions // 2)
    loss = BCLoss(distribution)
    torch.testing.assert_close(loss(masked, actions), expected)
    assert (gradient_of(loss, masked, actions)[:, [1, 3]] == 0).all()
    weighted = BCLoss(distribution, class_weights={"": torch.ones(4)})
    torch.testing.assert_close(weighted(masked, actions), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_squared_error_of_modes_outside_bounds_has_a_gradient(family):
    """The squared error of a mode outside the bounds is not clipped and has a gradient."""
    distribution = distribution_for(ARM, {"Box": family})
    params = torch.zeros(1, distribution.param_size)
    params[0, :2] = 9.0
    actions = distribution.from_env(torch.tensor([[-1.0, 1.0]]))
    loss = BCLoss(distribution, box_loss="mse")
    assert (gradient_of(loss, params, actions)[0, :2] > 0).all()
    if family == "diagonal_gaussian":
        expected = ((9 / 2 - -1 / 2) ** 2 + ((9 - 2.5) / 2.5 - (1 - 2.5) / 2.5) ** 2) / 2
        assert float(loss(params, actions)) == pytest.approx(expected, rel=1e-5)


def test_squared_error_excludes_the_entropy_bonus():
    """With squared errors no loss limits the std of a Box, so its entropy is excluded."""
    distribution, params, actions = drawn(HYBRID)
    loss = BCLoss(distribution, box_loss="mse", entropy_coef=0.5)
    discrete = [
        part.entropy(own)
        for (key, part), own in zip(
            distribution.parts.items(), distribution.split(params), strict=True
        )
        if key != "arm"
    ]
    expected = loss.per_sample(params, actions).mean() - 0.5 * sum(discrete).mean()
    torch.testing.assert_close(loss(params, actions), expected)
    with pytest.raises(ConfigError, match="entropy_coef"):
        BCLoss(distribution_for(ARM, {}), box_loss="mse", entropy_coef=0.5)


@pytest.mark.parametrize("box_loss", ["nll", "mse"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_actions_at_and_beyond_the_bounds(family, box_loss):
    """Actions on the bounds or slightly outside have a finite loss and gradient."""
    distribution = distribution_for(ARM, {"Box": family})
    recorded = torch.tensor([[-2.0, 0.0], [2.0, 5.0], [2.1, -0.1], [0.0, 2.5]])
    actions = distribution.from_env(recorded)
    loss, params = BCLoss(distribution, box_loss=box_loss), torch.zeros(4, distribution.param_size)
    assert torch.isfinite(loss(params, actions))
    gradient = gradient_of(loss, params, actions)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_invalid_bc_settings_raise():
    """Unknown losses, negative coefficients and weights of a wrong shape raise errors."""
    distribution = distribution_for(GRIP, {})
    with pytest.raises(ConfigError, match="box_loss"):
        BCLoss(distribution, box_loss="huber")
    with pytest.raises(ConfigError, match="entropy_coef"):
        BCLoss(distribution, entropy_coef=-1.0)
    with pytest.raises(
        ShapeError, match=r"class_weights\[''\] has the shape \[3\], expected \[4\]"
    ):
        BCLoss(distribution, class_weights={"": torch.ones(3)})
