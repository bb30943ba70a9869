"""The options of the configuration groups: one YAML file each, `conf/<group>/<name>.yaml`.

Only names, texts and targets are read here, without Hydra and without a YAML parser: `maze-run
--help` uses it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from maze_train.core.errors import MazeTrainError
from maze_train.core.targets import locate

PROGRAM = "maze-run"
DONE, FAILURE, CONFIGURATION_ERROR = 0, 1, 2
"""Exit codes."""


def shipped_root() -> Path:
    """The folder `conf/` that comes with the package."""
    return Path(str(files("maze_train.conf")))


def group_names(root: Path | None = None) -> list[str]:
    """The groups below `root` (by default the shipped ones): every folder is one."""
    base = root or shipped_root()
    if not base.is_dir():
        return []
    return sorted(
        entry.name
        for entry in base.iterdir()
        if entry.is_dir() and not entry.name.startswith(("_", ".")) and entry.name != "hydra"
    )


def list_options(group: str, folders: Iterable[str] = ()) -> list[str]:
    """The options of a group, shipped or in the user's `folders`; nested: `ppo/CartPole-v1`."""
    found: set[str] = set()
    for root in (shipped_root(), *map(Path, folders)):
        folder = root / group
        found.update(
            path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
        )
    return sorted(found)


def read_option(group: str, name: str, folders: Iterable[str] = ()) -> str | None:
    """The text of an option, from the user's `folders` before the shipped one, or None."""
    for root in (*map(Path, folders), shipped_root()):
        entry = root.joinpath(*f"{group}/{name}.yaml".split("/"))
        if entry.is_file():
            return entry.read_text(encoding="utf-8")
    return None


def describe_options(group: str, folders: Iterable[str] = ()) -> dict[str, str]:
    """The options of a group, each with the first line of the docstring of its class."""
    folders = list(folders)
    return {name: _first_line(group, name, folders) for name in list_options(group, folders)}


def _first_line(group: str, name: str, folders: list[str]) -> str:
    target = re.search(r"^_target_: *([\w.:]+) *$", read_option(group, name, folders) or "", re.M)
    if target is None:
        return ""
    try:
        text = locate(target[1]).__doc__ or ""
    except MazeTrainError:  # someone's own file names no class that is there: still an option
        return ""
    return text.strip().partition("\n")[0]


def config_names(folders: Iterable[str] = ()) -> list[str]:
    """Names of primary configs (`-cn`): one for each command, and those of the user's folders."""
    roots = (*map(Path, folders), shipped_root())
    return sorted({path.stem for root in roots for path in root.glob("*.yaml")})
