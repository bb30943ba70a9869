"""The public names listed in `maze_train/__init__.pyi`."""

from __future__ import annotations

import importlib

import pytest

import maze_train
from docs.generate import stub_path
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.algorithms.ppo.learner import PPOLearner
from maze_train.core.errors import ConfigError
from maze_train.distributions.categorical import Categorical


def test_public_names_can_be_imported():
    """Each public name is imported from the listed module, and is listed once."""
    lines = [line.split() for line in stub_path().read_text().splitlines() if "import" in line]
    names = [line[3] for line in lines]
    assert len(names) > 150
    assert len(names) == len(set(names))
    assert dir(maze_train) == sorted(maze_train.__all__)
    assert set(maze_train.__all__) - {"__version__"} < set(names)
    assert len(maze_train.__all__) <= 55
    for _, module, _, name, _, alias in lines:
        assert alias == name
        assert getattr(maze_train, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'PPP'"):
        maze_train.PPP  # noqa: B018  # reading the attribute is the test
    with pytest.raises(AttributeError, match="it was renamed to HasLoss"):
        _ = maze_train.HasOwnLoss


@pytest.mark.parametrize(
    ("base", "old", "new"),
    [
        (PPOLearner, "gradients_by_hand", "analytic_gradients"),
        (Categorical, "log_prob_and_entropy_by_hand", "analytic_log_prob_and_entropy"),
        (PPOAlgorithmConfig, "learns_for_several_agents", "supports_multi_agent"),
    ],
)
def test_former_names_of_attributes_are_errors(base, old, new):
    """Defining a class with the former name raises ConfigError, which contains the new name."""
    with pytest.raises(ConfigError, match=rf"Own\.{old}: was renamed to {new}"):
        type("Own", (base,), {old: True, "__qualname__": "Own"})
