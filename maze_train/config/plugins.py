"""Hydra plug-ins of `maze-run`: search path, launchers, shell completion, Hydra's own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any, ClassVar

from hydra.conf import HydraConf, RunDir, SweepDir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf

from maze_train.config.compose import PRESETS
from maze_train.config.hydra_input import OPTIONS, PATHS, STAYS, WITH_VALUE, Task
from maze_train.config.launchers import (
    SWEEP_DIR,
    FailureCallback,
    LocalLauncher,
    LocalLauncherConf,
    RayLauncher,
    RayLauncherConf,
    RecordingLauncher,
    SweepStart,
)
from maze_train.config.options import CONFIG_DIR, CONFIG_NAME, config_names, list_options
from maze_train.core.notices import notify
from maze_train.core.targets import TARGET

LAUNCHERS: dict[str, tuple[type, Any]] = {
    "local": (LocalLauncher, LocalLauncherConf),
    "ray": (RayLauncher, RayLauncherConf),
}


class MazeTrainSearchPath(SearchPathPlugin):
    """Search path: the user's folders, then the shipped folder."""

    folders: ClassVar[Sequence[str]] = ()
    """The user's folders."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the user's folders to the search path."""
        for folder in reversed(self.folders):
            path = f"file://{Path(folder).absolute()}"
            search_path.prepend(provider="user", path=path, anchor="main")


def completions(line: str, folders: Sequence[str]) -> list[str] | None:
    """Return completions of the last word: options, values of `-cn`, presets, ids, or paths.

    Args:
        line: The command line up to the cursor.
        folders: The user's configuration folders.

    Returns:
        The completions; None for other overrides, which Hydra completes.
    """
    before, _, word = line.rpartition(" ")
    previous = before.rpartition(" ")[2]
    if previous in CONFIG_NAME:
        return [name for name in config_names(folders) if name.startswith(word)]
    if previous in WITH_VALUE:
        return []
    if word.startswith("-"):
        return [option for option in OPTIONS if option.startswith(word)]
    key, equals, value = word.rpartition("=")
    group = key.lstrip("+") if equals else ""
    if group in ("env", PRESETS):  # Hydra lists neither ids nor options in sub-folders.
        names = list_options(group, folders)
        if group == "env":
            import gymnasium

            from maze_train.envs.building import register_installed

            register_installed()
            names = sorted({*names, *gymnasium.registry} - {"id"})
        return [f"{key}={name}" for name in names if name.startswith(value)]
    if not (previous in CONFIG_DIR or (equals and PATHS.fullmatch(key.lstrip("+")))):
        return None
    found = sorted(glob(f"{escape(value)}*"))
    return [f"{key}{equals}{path}{'/' if os.path.isdir(path) else ''}" for path in found]


def completing_values(shell: type[CompletionPlugin]) -> type[CompletionPlugin]:
    """Return Hydra's completion plug-in with a fix for lists and empty mappings.

    Hydra completes `runs` to `runs.`, although a list has no keys; the fixed plug-in completes
    `runs` to `runs=`.
    """

    class Completion(shell):  # type: ignore[valid-type,misc]  # a class that is an argument
        def _query(self, config_name: str | None, line: str) -> list[str]:
            found: list[str] = super()._query(config_name, line)
            if not any(word.endswith(".") for word in found):
                return found
            words = [word for word in line.split(" ")[:-1] if "=" in word]
            config = self.config_loader.load_configuration(config_name, words, RunMode.RUN)
            return [f"{word[:-1]}=" if is_value(config, word) else word for word in found]

    def is_value(config: DictConfig, word: str) -> bool:
        node = OmegaConf.select(config, word[:-1]) if word.endswith(".") else None
        return OmegaConf.is_list(node) or (OmegaConf.is_dict(node) and not node)

    return Completion


@contextmanager
def extended_hydra(folders: Sequence[str] = ()) -> Iterator[None]:
    """Register the plug-ins and defaults for Hydra's settings; restore Hydra on exit.

    The defaults apply to all primary configs, including `-cn config` for the file of an earlier
    run. For a single run, Hydra creates no files. For a sweep, Hydra creates one directory with
    numbered job directories. Logging is not configured.

    Args:
        folders: The user's configuration folders.
    """
    MazeTrainSearchPath.folders = folders
    Plugins.instance().register(MazeTrainSearchPath)
    store = ConfigStore.instance()
    launchers = store.repo["hydra"]["launcher"]
    hidden = {name: launchers.get(f"{name}.yaml") for name in LAUNCHERS}
    for name, (launcher, node) in LAUNCHERS.items():
        Plugins.instance().class_name_to_class[node._target_] = launcher
        store.store(group="hydra/launcher", name=name, node=node, provider="maze_train")
    before = store.repo["hydra"]["config.yaml"]
    plugins: Any = Plugins.instance()
    shells = plugins.plugin_type_to_subclass_list[CompletionPlugin]
    plugins.plugin_type_to_subclass_list[CompletionPlugin] = [
        completing_values(shell) for shell in shells
    ]

    def sweeper(
        *, config: DictConfig, hydra_context: HydraContext, task_function: TaskFunction
    ) -> Sweeper:
        """Return the sweeper chosen by the user, wrapped in `SweepStart`."""
        chosen = Plugins.instantiate_sweeper(
            plugins, config=config, hydra_context=hydra_context, task_function=task_function
        )
        assert isinstance(task_function, Task)
        return SweepStart(chosen, config, hydra_context, task_function)

    def recording(
        hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> Launcher:
        """Return the launcher chosen by the user, wrapped in `RecordingLauncher`."""
        chosen = Plugins.instantiate_launcher(plugins, hydra_context, task_function, config)
        name = config.hydra.runtime.choices["hydra/launcher"]
        if (other := hidden.get(name)) is not None:
            ours = type(chosen).__name__
            notify(f"note: hydra/launcher={name} is {ours} of maze_train, not {other.node[TARGET]}")
        assert isinstance(task_function, Task)
        return RecordingLauncher(chosen, config, task_function)

    plugins.instantiate_sweeper, plugins.instantiate_launcher = sweeper, recording
    store.store(group="hydra", name="config", node=_hydra_settings(), provider="maze_train")
    try:
        yield
    finally:
        MazeTrainSearchPath.folders = ()
        del plugins.instantiate_sweeper, plugins.instantiate_launcher
        plugins.plugin_type_to_subclass_list[CompletionPlugin] = shells
        store.repo["hydra"]["config.yaml"] = before
        for name, node in hidden.items():
            del launchers[f"{name}.yaml"]
            if node is not None:
                launchers[f"{name}.yaml"] = node


def _hydra_settings() -> HydraConf:
    settings = HydraConf(
        run=RunDir(dir=STAYS),
        sweep=SweepDir(dir=SWEEP_DIR, subdir="${hydra.job.num}"),
        output_subdir=None,
        callbacks={"maze_train": {TARGET: f"{FailureCallback.__module__}.FailureCallback"}},
    )
    settings.job.chdir = False
    silent = ("hydra_logging", "job_logging")
    settings.defaults = [
        {key: "none" if key in silent else value for key, value in entry.items()}
        for entry in settings.defaults
    ]
    return settings
