"""Config-driven reinforcement-learning training.

Public names are listed in `__init__.pyi` and imported lazily, so that `import maze_train` is fast.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.3.0"


def _homes() -> dict[str, str]:
    """Return the module of each public name, from the stub's lines `from x import y as y`."""
    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    words = [line.split() for line in stub.splitlines()]
    return {line[3]: line[1] for line in words if line[:1] == ["from"]}


HOMES = _homes()
"""Module of each public name, including names that `dir` omits."""

__all__ = [
    *("__version__", "train", "evaluate", "load_policy", "load_learner", "run_rollout", "make_env"),
    *("compare_runs", "search", "export_policy", "push_to_hub", "load_config", "config_to_dict"),
    *("check_env",),
    *("TrainConfig", "RolloutConfig", "EnvConfig", "ModelConfig", "TrainingResult"),
    *("TrainedPolicy", "SavedPolicy", "RolloutGenerator", "TrainingRunner", "RolloutRunner"),
    *("Callback", "StopAtReturn", "Evaluator", "MetricsWriter", "Statistics", "EventInterface"),
    *("Learner", "LearnerGroup", "Run", "Trainer", "Schedule", "Distribution"),
    *("A2CAlgorithmConfig", "PPOAlgorithmConfig", "ImpalaAlgorithmConfig", "SACAlgorithmConfig"),
    *("TD3AlgorithmConfig", "DQNAlgorithmConfig", "ESAlgorithmConfig", "BCAlgorithmConfig"),
    *("MultiAgentEnv", "ValueTransform", "BaseReplayBuffer", "Trajectory", "TrajectoryWriter"),
    *("RolloutResult", "open_dataset", "MazeTrainError", "ConfigError"),
]
"""The most commonly used names; the other names of `__init__.pyi` can be imported as well."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'maze_train' has no attribute {name!r}")
    value = getattr(importlib.import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
