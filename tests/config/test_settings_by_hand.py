"""Settings constructed in Python without a configuration file."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import maze_train
from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import Settings, key_of_field
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Freeze, Schedule
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig, RecurrentConfig
from maze_train.training.config import PolicyConfig

FREEZE = {"params": ["trunk"], "stop": 3}


def settings_classes():
    """Return all public classes of settings."""
    found = {}
    for module in pkgutil.walk_packages(maze_train.__path__, "maze_train."):
        if module.name.endswith("config"):
            members = vars(importlib.import_module(module.name)).values()
            found |= {m: None for m in members if isinstance(m, type) and issubclass(m, Settings)}
    return [cls for cls in found if cls is not Settings]


def typed_fields():
    """Yield class and name of each field that does not accept every type."""
    for cls in settings_classes():
        yield from ((cls, name) for name, hint in cls.hints().items() if hint is not Any)


@pytest.mark.parametrize("cls", settings_classes(), ids=lambda cls: cls.__name__)
def test_constructors_raise_for_other_types(cls):
    """Every field of every class raises ConfigError with its key."""
    for owner, name in typed_fields():
        if owner is cls:
            needed = {"algorithm": DQNAlgorithmConfig()} if cls is TrainConfig else {}
            with pytest.raises(ConfigError) as caught:
                cls(**{**needed, name: object()})
            assert caught.value.key == key_of_field(name)


@pytest.mark.parametrize(
    ("cls", "name", "value", "expected"),
    [
        (DQNAlgorithmConfig, "freeze", ["policy"], [Freeze(params=["policy"])]),
        (A2CAlgorithmConfig, "freeze", ["a", FREEZE], [Freeze(params=["a"]), Freeze(**FREEZE)]),
        (A2CAlgorithmConfig, "lr", "1e-3", 0.001),
        (A2CAlgorithmConfig, "lr", "linear_0.1", Schedule(start=0.1, end=0.0)),
        (TD3AlgorithmConfig, "critic_lr", {"start": 1, "end": 2}, Schedule(start=1.0, end=2.0)),
        (A2CAlgorithmConfig, "lr_factors", {"trunk": "1e-1"}, {"trunk": 0.1}),
        (ModelConfig, "rnn", {"cell": "gru"}, RecurrentConfig(cell="gru")),
        (
            ModelConfig,
            "normalization",
            {"mode": "running"},
            ObservationNormalizationConfig(mode="running"),
        ),
        (PolicyConfig, "model", {"branch_size": 3}, ModelConfig(branch_size=3)),
    ],
)
def test_constructors_convert_file_values(cls, name, value, expected):
    """Mappings and short forms are converted to settings objects."""
    others: dict[str, Any] = {"agents": ["a"]} if cls is PolicyConfig else {}
    assert getattr(cls(**{name: value}, **others), name) == expected


def test_sections_may_be_mappings():
    """Mappings are accepted as sections, also with `_target_`."""
    target = f"{DQNAlgorithmConfig.__module__}.{DQNAlgorithmConfig.__name__}"
    config = TrainConfig(env={"id": "CartPole-v1"}, algorithm={"_target_": target, "lr": 1})
    assert config.algorithm == DQNAlgorithmConfig(lr=1.0)
    assert config.env.id == "CartPole-v1"


def test_objects_in_arguments_are_kept():
    """Arguments of custom functions may be objects that YAML cannot represent, such as tensors."""
    node = {"_target_": "my_package.my_loss", "weights": torch.ones(2)}
    kept = A2CAlgorithmConfig(loss_function=node).loss_function
    assert kept is not None
    assert kept["weights"] is node["weights"]
