"""Options of the configuration groups: one YAML file `conf/<group>/<name>.yaml` per option.

Only names, raw texts and targets are read, without Hydra or a YAML parser, so that `maze-run
--help` is fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from maze_train.core.errors import MazeTrainError
from maze_train.core.targets import locate

DONE, FAILURE, CONFIGURATION_ERROR = 0, 1, 2
"""Exit codes of `maze-run`."""
CONFIG_DIR, CONFIG_NAME = ("--config-dir", "-cd"), ("--config-name", "-cn")
DEBUG_VARIABLE = "HYDRA_FULL_ERROR"
"""Environment variable that enables tracebacks for all errors, as in Hydra."""


def shipped_root() -> Path:
    """Return the folder `conf/` of the package."""
    return Path(str(files("maze_train.conf")))


def group_names(root: Path | None = None) -> list[str]:
    """Return the names of the groups, the folders below `root` (default: the shipped `conf/`)."""
    base = root or shipped_root()
    return sorted(
        entry.name
        for entry in base.iterdir()
        if entry.is_dir() and not entry.name.startswith(("_", ".")) and entry.name != "hydra"
    )


def list_options(group: str, folders: Iterable[str] = ()) -> list[str]:
    """List the options of a group, shipped or in the user's `folders`, e.g. `ppo/CartPole-v1`."""
    roots = (shipped_root(), *map(Path, folders))
    return sorted({name for root in roots for name in options_below(root, group)})


def options_below(root: Path, group: str) -> list[str]:
    """List the options of a group in one folder."""
    folder = root / group
    return [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]


def read_option(group: str, name: str, folders: Iterable[str] = ()) -> str | None:
    """Return the text of an option; None if missing. The user's `folders` take precedence."""
    if ".." in re.split(r"[/\\]", name):
        return None  # Outside the folder of the group.
    for root in (*map(Path, folders), shipped_root()):
        entry = root.joinpath(*f"{group}/{name}.yaml".split("/"))
        with suppress(OSError):  # The name is too long.
            if entry.is_file():
                return entry.read_text(encoding="utf-8")
    return None


def describe_options(group: str, folders: Iterable[str] = ()) -> dict[str, str]:
    """Return the options of a group, each with the first line of its class docstring."""
    folders = list(folders)
    return {name: _first_line(group, name, folders) for name in list_options(group, folders)}


def _first_line(group: str, name: str, folders: list[str]) -> str:
    target = re.search(r"^_target_: *([\w.:]+) *$", read_option(group, name, folders) or "", re.M)
    if target is None:
        return ""
    try:
        text = locate(target[1]).__doc__ or ""
    except MazeTrainError:  # The class named in a user's file might be missing.
        return ""
    return text.strip().partition("\n")[0]


def config_names(folders: Iterable[str] = ()) -> list[str]:
    """Return the names of primary configs (`-cn`): the commands and the user's files."""
    roots = (*map(Path, folders), shipped_root())
    return sorted({path.stem for root in roots for path in root.glob("*.yaml")})


def config_folders(argv: Sequence[str]) -> list[str]:
    """Return the user's existing folders: `--config-dir X` and local `hydra.searchpath`."""
    folders: list[str] = []
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name in CONFIG_DIR:
            folders.append(value if equals else following)
        elif name.lstrip("+") == "hydra.searchpath":
            entries = (entry.strip(" '\"") for entry in value.strip("[]").split(","))
            plain = (entry.removeprefix("file://") for entry in entries)
            folders += [entry for entry in plain if "://" not in entry]
    return [folder for folder in folders if os.path.isdir(folder)]
