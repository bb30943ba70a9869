"""Parts that a configuration names: dotted paths, or objects that are given in Python."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

from maze_train.conversion import join
from maze_train.targets import TARGET, Given

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "env": "gymnasium.Env",
        "env.wrappers": "gymnasium.Wrapper",
        "env.training_wrappers": "gymnasium.Wrapper",
        "model.policy": "torch.nn.Module",
        "model.critic": "torch.nn.Module",
        "model.trunk": "torch.nn.Module",
        "model.value_transform": "maze_train.ValueTransform",
        "model.distributions": "maze_train.Distribution",
        "algorithm.policy_wrapper": "torch.nn.Module",
        "algorithm.optimizer": "torch.optim.Optimizer",
        "algorithm.lr_scheduler": "torch.optim.lr_scheduler.LRScheduler",
        "algorithm.loss": "maze_train.BCLoss",
        "algorithm.replay_buffer": "maze_train.BaseReplayBuffer",
        "algorithm.initial_sampling_policy": "maze_train.RandomPolicy",
        "algorithm.initial_demonstration_trajectories": "maze_train.TrajectoryDataset",
        "policies.source": "torch.nn.Module",
        "runner.dataset": "maze_train.TrajectoryDataset",
        "evaluation.evaluators": "maze_train.Evaluator",
        "evaluation.opponents": "torch.nn.Module",
        "tracking.writers": "maze_train.MetricsWriter",
        "callbacks": "maze_train.Callback",
    }
)
"""Parts that a configuration names, each with the class from which it derives. They are built when
they are needed; all other nodes with a target are settings, and built when they are read."""

OF_SEVERAL = ("model.distributions", "evaluation.opponents")
"""Parts that are mappings of nodes by name."""

FUNCTIONS = ("algorithm.loss_function",)
"""Parts that are functions, and called as they are."""

DATA = ("runner.dataset", "algorithm.initial_demonstration_trajectories")
"""Parts that may be lists of episodes."""

OF_ONE = re.compile(
    r"^policies\.[^.]+\.(?=model\b)|(?<=^policies)\.[^.]+(?=\.source\b)"
    r"|(?<=^algorithm)\.overrides\.[^.]+"
)
"""What stands in keys of the settings of one policy or one module."""

PLAIN = (str, bool, int, float, os.PathLike)


def named(node: Any, key: str = "") -> Any:
    """Settings in which every object stands by its name, as `{_target_: name}`.

    Classes, functions and instances are taken where a part belongs, and as the value of any key
    `_target_`; elsewhere they stay, and are refused by whoever reads them.

    Args:
        node: Plain values by name, in which such objects may stand; they are not changed.
        key: Dotted key of the node.
    """
    if isinstance(node, Mapping):
        return {name: named(value, join(key, str(name))) for name, value in node.items()}
    place = place_of(key).partition("[")[0]
    if type(node) in (list, tuple) and place not in DATA:
        return type(node)(named(value, f"{key}[{i}]") for i, value in enumerate(node))
    is_plain = node is None or isinstance(node, PLAIN) or hasattr(node, "shape")
    if is_plain or (is_dataclass(node) and not isinstance(node, type)):
        return node
    if key.endswith(f".{TARGET}"):
        return Given(node)
    if place == "env" and not callable(node):
        return node  # one environment can not be many
    if place in (*PARTS, *FUNCTIONS) or place.rpartition(".")[0] in OF_SEVERAL:
        return {TARGET: Given(node)}
    return node


def place_of(key: str) -> str:
    """The key of a setting of one policy or module, as it is where it is that of all."""
    return OF_ONE.sub("", key)
