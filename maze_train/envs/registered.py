"""Packages whose environments gymnasium knows once they are imported."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache

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


OF_OLD_GYM = ("gymnasium.envs", "shimmy", "shimmy.openai_gym_compatibility")
"""Modules of what makes old gym environments, whose arguments name modules to import. Of gymnasium
itself that is what stands for shimmy where this is not installed."""

HARMLESS = frozenset((*sys.stdlib_module_names, "cuda"))
"""Modules that a text may name for other reasons: `http://...`, `cuda:0`."""

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


def module_of_id(env_id: str) -> str:
    """The module that gymnasium imports for an id, or shimmy if its arguments say which; or empty.

    As gymnasium does it, an id without a version is the same as one with it.
    """
    module, colon, _ = env_id.partition(":")
    if colon:
        return module or env_id
    registered = len(gymnasium.registry), next(reversed(gymnasium.registry), "")
    return "shimmy" if env_id in _old_gym_ids(registered) else ""


def module_of_argument(text: str) -> str:
    """The same of an argument, which may be an id; or empty, as for a module that is not there."""
    module = module_of_id(text)
    package = module.partition(".")[0]
    if not package.isidentifier() or package in HARMLESS:
        return ""
    is_there = package in sys.modules or importlib.util.find_spec(package) is not None
    return module if is_there or ":" not in text else ""


@cache
def _old_gym_ids(registered: tuple[int, str]) -> set[str]:
    """The ids of old gym environments, with and without versions, until others are registered."""
    found = set()
    for spec in gymnasium.registry.values():
        for entry in (spec.entry_point, spec.vector_entry_point):
            text = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
            if text.partition(":")[0] in OF_OLD_GYM:
                found |= {spec.id, spec.id.removesuffix(f"-v{spec.version}")}
    return found


def missing_package(env_id: str) -> MissingExtraError | None:
    """The error for an id of a package that is not installed; None for any other id."""
    for each in (ATARI, *OTHERS):
        if env_id.startswith(each.prefixes) and not each.installed:
            return MissingExtraError(each.package, each.extra, "this environment")
    return None
