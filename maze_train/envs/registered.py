"""Packages whose environments gymnasium knows once they are imported."""

from __future__ import annotations

import importlib.util

import gymnasium

from maze_train.errors import MissingExtraError
from maze_train.extras import import_extra
from maze_train.targets import locate

ROBOTICS = ("gymnasium-robotics", "robotics", "this environment", "gymnasium_robotics")
ROBOTS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "Hand", "PointMaze")
"""Beginnings of the ids of gymnasium-robotics."""


def register_installed() -> None:
    """Make the ids of Atari games and of robots known, as far as their packages are installed."""
    if importlib.util.find_spec("ale_py") is not None:
        locate("maze_train.envs.atari.register_atari")()
    if importlib.util.find_spec("gymnasium_robotics") is not None:
        gymnasium.register_envs(import_extra(*ROBOTICS))


def missing_package(env_id: str) -> MissingExtraError | None:
    """The error for an id of a package that is not installed; None for any other id."""
    if env_id.startswith("ALE/") and importlib.util.find_spec("ale_py") is None:
        return MissingExtraError("ale-py", "atari", "this environment")
    if env_id.startswith(ROBOTS) and importlib.util.find_spec("gymnasium_robotics") is None:
        return MissingExtraError(*ROBOTICS[:3])
    return None
