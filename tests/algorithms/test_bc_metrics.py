"""Metrics of imitation learning match expected values."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.algorithms.bc.learner import ImitationMetrics
from maze_train.distributions.mapping import distribution_for


def measured(space, params, actions, **families):
    """Return metric values by tag."""
    metrics = ImitationMetrics(distribution_for(space, families), space)
    return {event.tag: float(value) for event, value in metrics(params, actions)}


@pytest.mark.parametrize(
    "space",
    [
        *(spaces.Discrete(n) for n in (3, 11, 25)),
        *(spaces.MultiDiscrete(sizes) for sizes in ([2, 3], [11, 2], [12, 30, 4])),
    ],
    ids=str,
)
def test_accuracy_and_rank_match_the_reference(space):
    """Accuracy and mean rank match a reference; ties are ranked by index.

    Top-5 accuracy covers actions with more than 10 choices, top-10 accuracy actions with more than
    20 choices.
    """
    sizes = [int(n) for n in getattr(space, "nvec", [getattr(space, "n", 0)])]
    generator = torch.Generator().manual_seed(0)
    params = torch.randint(0, 6, (40, sum(sizes)), generator=generator).float()
    columns = [torch.randint(0, n, (40,), generator=generator) for n in sizes]
    ranks = np.array(
        [
            [
                1 + sum((-row[j], j) < (-row[a], a) for j in range(len(row)))
                for a, row in zip(column.tolist(), piece.tolist(), strict=True)
            ]
            for column, piece in zip(columns, params.split(sizes, 1), strict=True)
        ]
    )
    actions = columns[0] if isinstance(space, spaces.Discrete) else torch.stack(columns, 1)
    expected = {
        "train/discrete_accuracy": (ranks == 1).mean(),
        "train/discrete_action_rank": ranks.mean(),
    }
    for k, least in ((5, 10), (10, 20)):
        large = [n > least for n in sizes]
        if any(large):
            expected[f"train/discrete_top_{k}_accuracy"] = (ranks[large] <= k).mean()
    assert measured(space, params, actions) == pytest.approx(expected)


def test_accuracy_of_bits_is_the_fraction_of_matches():
    """The accuracy is the fraction of bits whose more likely value is the recorded one."""
    params = torch.tensor([[1.0, -1.0, 1.0]])
    found = measured(spaces.MultiBinary(3), params, torch.tensor([[1, 1, 1]]).float())
    assert found == {"train/multi_binary_accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize("family", ["diagonal_gaussian", "squashed_gaussian"])
def test_action_error_is_in_environment_units(family):
    """The deviation is in units of the environment."""
    space = spaces.Box(-4.0, 4.0, (2,), np.float32)
    distribution = distribution_for(space, {"Box": family})
    params = torch.zeros(1, distribution.param_size)
    recorded = torch.tensor([[1.0, -3.0]])
    found = measured(space, params, distribution.from_env(recorded), Box=family)
    assert found == {"train/box_mean_abs_deviation": pytest.approx(2.0, abs=1e-4)}


def test_metrics_of_components_and_their_mean():
    """Several components have separate tags, and the plain tag has their mean."""
    space = spaces.Dict(
        OrderedDict(a=spaces.Discrete(2), b=spaces.Discrete(2), arm=spaces.Box(-1.0, 1.0, (1,)))
    )
    distribution = distribution_for(space, {})
    params = torch.zeros(1, distribution.param_size)
    params[0, 0] = params[0, 2] = 1.0
    actions = {"a": torch.tensor([0]), "b": torch.tensor([1]), "arm": torch.tensor([[0.5]])}
    found = measured(space, params, actions)
    assert found["train/discrete_accuracy/a"] == 1.0
    assert found["train/discrete_accuracy/b"] == 0.0
    assert found["train/discrete_accuracy"] == 0.5
    assert found["train/box_mean_abs_deviation"] == pytest.approx(0.5)
    assert found["train/box_mean_abs_deviation/arm"] == pytest.approx(0.5)
