"""Packages whose environments gymnasium knows once they are imported."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import gymnasium

from maze_train.envs.atari import register_atari
from maze_train.errors import MissingExtraError
from maze_train.extras import import_extra


@dataclass(frozen=True)
class EnvPackage:
    """A package of environments: its name for pip, its module, and beginnings of its ids."""

    package: str
    extra: str
    module: str
    prefixes: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether its module is there."""
        return importlib.util.find_spec(self.module) is not None


ATARI = EnvPackage("ale-py", "atari", "ale_py", ("ALE/",))
ROBOTS = ("AdroitHand", "AntMaze", "Fetch", "FrankaKitchen", "Hand", "PointMaze")
OTHERS = (
    EnvPackage("gymnasium-robotics", "robotics", "gymnasium_robotics", ROBOTS),
    EnvPackage("minigrid", "minigrid", "minigrid", ("MiniGrid-", "BabyAI-")),
)


def register_installed() -> None:
    """Make the ids of these packages known, as far as they are installed."""
    if ATARI.installed:
        register_atari()
    for each in OTHERS:
        if each.installed:
            gymnasium.register_envs(
                import_extra(each.package, each.extra, "this environment", each.module)
            )


def missing_package(env_id: str) -> MissingExtraError | None:
    """The error for an id of a package that is not installed; None for any other id."""
    for each in (ATARI, *OTHERS):
        if env_id.startswith(each.prefixes) and not each.installed:
            return MissingExtraError(each.package, each.extra, "this environment")
    return None
