"""Resources of the package `maze_train.conf`: the YAML files, and `env/<id>.yaml` for environments.

Hydra reads `pkg://maze_train.conf` through these classes in every program, so `env=CartPole-v1`
requires neither a YAML file nor `maze-run`. Gymnasium is imported only to look up files below
`env/` that do not exist.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.readers import FileReader
from pathlib import Path, PurePath
from typing import IO, Any

from maze_train.config.options import group_names, list_options
from maze_train.core.targets import import_for_id
from maze_train.envs.config import SIMULATORS

GROUP = "env"
SUFFIX = ".yaml"


class OptionLoader(SourceFileLoader):
    """Loader of `maze_train.conf`, whose resources are `OptionFile`s."""

    def get_resource_reader(self, name: str | None = None) -> OptionReader:
        """Return the reader of the resources, see `importlib.resources`."""
        return OptionReader(self)


class OptionReader(FileReader):
    """Reader of the resources of a package."""

    def files(self) -> OptionFile:  # type: ignore[override]  # any Traversable is allowed
        """Return the folder of the package."""
        root = Path(self.path)
        return OptionFile(root, ".", root.name)


@dataclass(frozen=True)
class OptionFile:
    """File or folder of the configuration.

    In addition to the files in the folder, there is a file `env/<id>.yaml` with the content
    `id: <id>` for each environment: `CartPole-v1`, `ALE/Pong-v5`, `my_module:MyEnv-v0`.
    """

    root: Path
    """The folder `conf/`."""
    key: str
    """Path relative to `root`, with slashes."""
    name: str
    """Path relative to the listed folder."""

    def __str__(self) -> str:
        return str(self.root / self.key)

    def is_dir(self) -> bool:
        """Return whether this is a folder of `conf/`, or a namespace of environment ids."""
        if (self.root / self.key).is_dir():
            return True
        namespace = self.key.removeprefix(f"{GROUP}/")
        if namespace == self.key or namespace.endswith(SUFFIX):
            return False
        return any(i.startswith(f"{namespace}/") for i in registered_ids())

    def is_file(self) -> bool:
        """Return whether this is a file of `conf/`, or `env/<id>.yaml` with a registered id."""
        if (self.root / self.key).is_file():
            return True
        return bool(self._env_id) and is_registered(self._env_id)

    def exists(self) -> bool:
        """Return whether this is a file or a folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[OptionFile]:
        """Yield the files and folders in a folder; in a group, also the options in sub-folders."""
        path = self.root / self.key
        names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
        if self.key in group_names(self.root):
            names |= {f"{option}{SUFFIX}" for option in list_options(self.key)}
        if self.key.partition("/")[0] == GROUP:
            prefix = self.key[len(GROUP) + 1 :] + "/" if self.key != GROUP else ""
            found = (i.removeprefix(prefix) for i in registered_ids() if i.startswith(prefix))
            names |= {f"{env_id}{SUFFIX}" for env_id in found}
        return (OptionFile(self.root, f"{self.key}/{name}", name) for name in sorted(names))

    def joinpath(self, *parts: str | os.PathLike[str]) -> OptionFile:
        """Return a file or folder below this folder."""
        key = PurePath(self.key, *parts).as_posix()
        return OptionFile(self.root, key, PurePath(key).name)

    def __truediv__(self, part: str | os.PathLike[str]) -> OptionFile:
        return self.joinpath(part)

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> IO[Any]:
        """Open the file for reading, see `pathlib.Path.open`."""
        data = io.BytesIO(self.read_bytes())
        return data if "b" in mode else io.TextIOWrapper(data, *args, **kwargs)

    def read_bytes(self) -> bytes:
        """Return the content."""
        path = self.root / self.key
        if path.is_file() or not self._env_id:
            return path.read_bytes()
        return f"id: {json.dumps(self._env_id)}\n".encode()

    def read_text(self, encoding: str | None = None) -> str:
        """Return the content as text."""
        return self.read_bytes().decode(encoding or "utf-8")

    @property
    def _env_id(self) -> str:
        """The id in a path `env/<id>.yaml`; empty for any other path."""
        group, _, name = self.key.partition("/")
        return name.removesuffix(SUFFIX) if group == GROUP and name.endswith(SUFFIX) else ""


def is_registered(env_id: str) -> bool:
    """Return whether an id is registered in gymnasium or PettingZoo; imports `module:Id`.

    Raises:
        ConfigError: If the module cannot be imported, or PettingZoo has no such environment.
        MissingExtraError: If PettingZoo is needed but not installed.
    """
    import gymnasium

    module, colon, name = env_id.rpartition(":")
    if module == "pettingzoo":
        from maze_train.envs.pettingzoo import module_named

        return bool(module_named(env_id))
    if module in SIMULATORS:
        return True  # The name is checked when the environment is built.
    if colon:
        import_for_id(env_id, module, "env")
    if name not in gymnasium.registry:
        _register_installed()
    return name in gymnasium.registry


def registered_ids() -> list[str]:
    """Return the ids of all environments that are registered in gymnasium."""
    import gymnasium

    _register_installed()
    return sorted(gymnasium.registry)


def _register_installed() -> None:
    from maze_train.envs.registered import register_installed

    register_installed()
