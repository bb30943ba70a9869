"""Metrics of imitation, counted by hand."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.algorithms.bc.metrics import ImitationMetrics
from maze_train.distributions.mapping import distribution_for


def measured(space, params, actions, **families):
    """Values by tag."""
    metrics = ImitationMetrics(distribution_for(space, families), space)
    return {event.tag: float(value) for event, value in metrics(params, actions)}


def test_accuracy_and_rank_of_a_discrete_action():
    """Shares of first places, and mean places; few choices have no top 5."""
    params = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 5.0]])
    found = measured(spaces.Discrete(3), params, torch.tensor([0, 2, 2]))
    assert found == {
        "train/discrete_accuracy": pytest.approx(2 / 3),
        "train/discrete_action_rank": pytest.approx((1 + 3 + 1) / 3),
    }


def test_top_places_of_many_choices():
    """With more than 10 choices the first 5 count, with more than 20 the first 10 too."""
    places = torch.arange(25.0).flip(0).expand(25, 25)  # choice k has place k + 1
    found = measured(spaces.Discrete(25), places, torch.arange(25))
    assert found["train/discrete_accuracy"] == pytest.approx(1 / 25)
    assert found["train/discrete_top_5_accuracy"] == pytest.approx(5 / 25)
    assert found["train/discrete_top_10_accuracy"] == pytest.approx(10 / 25)
    assert found["train/discrete_action_rank"] == pytest.approx(13)
    twelve = measured(spaces.Discrete(12), places[:12, :12], torch.arange(12))
    assert "train/discrete_top_5_accuracy" in twelve
    assert "train/discrete_top_10_accuracy" not in twelve


def test_of_equal_choices_one_is_the_most_likely():
    """A policy that knows nothing is not always right: the mode is one of the choices."""
    params = torch.zeros(4, 4)
    found = measured(spaces.Discrete(4), params, torch.arange(4))
    assert found["train/discrete_accuracy"] == pytest.approx(1 / 4)


def test_accuracy_over_choices_made_at_once():
    """Every choice of a MultiDiscrete counts alike, whatever the number of alternatives."""
    space = spaces.MultiDiscrete([2, 3])
    params = torch.tensor([[1.0, 0.0, 0.0, 1.0, 2.0], [0.0, 1.0, 3.0, 2.0, 1.0]])
    found = measured(space, params, torch.tensor([[0, 1], [1, 0]]))
    assert found["train/discrete_accuracy"] == pytest.approx(3 / 4)
    assert found["train/discrete_action_rank"] == pytest.approx((1 + 2 + 1 + 1) / 4)


def test_top_places_of_large_choices_alone():
    """What has few alternatives would always be among the first five."""
    space = spaces.MultiDiscrete([11, 2])
    params = torch.cat([torch.arange(11.0).flip(0), torch.zeros(2)])[None]
    found = measured(space, params, torch.tensor([[10, 0]]))
    assert found["train/discrete_top_5_accuracy"] == 0.0
    assert "train/discrete_top_10_accuracy" not in found
    assert found["train/discrete_action_rank"] == pytest.approx((11 + 1) / 2)


def test_bits():
    """Share of the bits that are more likely set as recorded."""
    params = torch.tensor([[1.0, -1.0, 1.0]])
    found = measured(spaces.MultiBinary(3), params, torch.tensor([[1, 1, 1]]).float())
    assert found == {"train/multi_binary_accuracy": pytest.approx(2 / 3)}


@pytest.mark.parametrize("family", ["diagonal_gaussian", "squashed_gaussian"])
def test_deviation_in_units_of_the_environment(family):
    """Actions are compared as the environment gets them."""
    space = spaces.Box(-4.0, 4.0, (2,), np.float32)
    distribution = distribution_for(space, {"Box": family})
    params = torch.zeros(1, distribution.param_size)
    recorded = torch.tensor([[1.0, -3.0]])
    found = measured(space, params, distribution.from_env(recorded), Box=family)
    assert found == {"train/box_mean_abs_deviation": pytest.approx(2.0, abs=1e-4)}


def test_parts_and_their_mean():
    """Several parts have tags of their own beside the mean over those that an event applies to."""
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
