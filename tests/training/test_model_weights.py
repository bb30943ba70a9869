"""Weights of a model from those of its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.core.errors import ConfigError
from maze_train.nets.config import ModelConfig
from maze_train.spaces.agents import AgentSpaces
from maze_train.training.models import make_model, model_weights, modules_of


@dataclass(kw_only=True)
class OwnConfig(PPOAlgorithmConfig):
    """Settings of an algorithm of a user."""

    name: ClassVar[str] = "own"
    learns_for_several_agents: ClassVar[bool] = False


LARGE, SMALL = (spaces.Box(-1.0, 1.0, (size,), np.float32) for size in (4, 2))
CHOICE = spaces.Discrete(2)
SEVERAL = AgentSpaces({"a": LARGE, "b": SMALL, "c": SMALL}, dict.fromkeys("abc", CHOICE))
ALIKE = AgentSpaces({"b": SMALL, "c": SMALL}, dict.fromkeys("bc", CHOICE))


@pytest.mark.parametrize(
    "pair",
    [(LARGE, CHOICE), *((own.observation_space, own.action_space) for own in (SEVERAL, ALIKE))],
    ids=["one agent", "two policies", "a shared policy"],
)
def test_weights_of_a_model_are_those_of_its_modules(pair):
    """By the names that the model has for them."""
    model = make_model(PPOAlgorithmConfig(), ModelConfig(hidden_sizes=[3]), {}, *pair, seed=0)
    modules = {key: module.state_dict() for key, module in modules_of(model).items()}
    found, expected = model_weights(modules, *pair), model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_algorithm_for_one_agent_names_the_others():
    """It is refused before anything is built."""
    given = {}, SEVERAL.observation_space, SEVERAL.action_space
    with pytest.raises(
        ConfigError, match=r"algorithm = 'own': learns for one agent.*say learns_for_several"
    ):
        make_model(OwnConfig(), ModelConfig(), *given, seed=0)
