"""The table of presets to score, and their settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import hydra
import yaml

from maze_train.config.compose import load_config
from maze_train.core.conversion import config_to_dict
from maze_train.core.targets import is_within
from maze_train.hydra_app import normalise, resolved_values
from maze_train.hydra_sweeps import extended_hydra
from maze_train.tools.runs import NOT_COMPARED
from maze_train.tracking.services import flattened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from maze_train.config.train_config import TrainConfig

Settings = dict[str, Any]

ALWAYS = (
    "evaluation.final_episodes=100",
    *("checkpoint.interval=0", "checkpoint.interval_minutes=2", "checkpoint.keep_last=1"),
    *("tracking.progress=quiet", "tracking.tensorboard=false", "tracking.plot=false"),
)
"""Settings of all runs; override those of the preset, and are overridden by those of the cell."""

DATASET, TAUGHT = "runner.dataset", "of_the_teacher"
"""Setting for the dataset, and its placeholder before the teacher has been trained."""


@dataclass(frozen=True)
class Cell:
    """A preset to score; one cell of the tables."""

    preset: str
    """Option of `experiment`."""

    seeds: int = 5
    """Number of runs, with seeds 0, 1, ..."""

    settings: tuple[str, ...] = ()
    """Overrides of the preset, as on the command line."""

    task: str = ""
    """Name of the environment in tables; empty for its id."""

    label: str = ""
    """Name of the algorithm in tables; empty for its default name."""

    teacher: Cell | None = None
    """Preset of the teacher, trained first with the same seed; provides the demonstrations."""

    n_demonstrations: int = 100
    """Number of demonstration episodes."""

    published: list[dict[str, Any]] = field(default_factory=list)
    """Published results: value, source, steps, and optionally a note."""

    @cached_property
    def values(self) -> Settings:
        """The composed settings, as for `configure`."""
        argv = [f"experiment={self.preset}", *ALWAYS, *self.settings]
        if self.teacher:
            argv.append(f"{DATASET}={TAUGHT}")
        overrides = normalise(argv)
        folder = "maze_train.conf"
        with extended_hydra(), hydra.initialize_config_module(folder, version_base="1.3"):
            return resolved_values(hydra.compose("train", overrides))

    @cached_property
    def config(self) -> TrainConfig:
        """The configuration of the runs, without seed and directory."""
        return load_config(self.values)

    @property
    def env(self) -> str:
        """Name of the environment in tables."""
        return self.task or str(self.config.env.id)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in tables."""
        return self.label or self.config.algorithm.name

    @cached_property
    def flat(self) -> Settings:
        """All settings by dotted key, except those that do not distinguish configurations."""
        flat = without_paths(self.config)
        if self.teacher:
            teacher = f"{self.teacher.preset} {self.teacher.fingerprint}"
            flat[DATASET] = f"{self.n_demonstrations} episodes of {teacher}"
        return flat

    @property
    def fingerprint(self) -> str:
        """Short hash of the settings."""
        text = json.dumps(self.flat, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Describe how the settings differ from those of an earlier run; empty if they are equal.

        A new setting that the preset leaves at its default does not count as a change.
        """
        now = self.flat
        needed = {"algorithm": self.config.algorithm.name, "env": self.config.env.id}
        usual = without_paths(load_config({**needed, DATASET: self.config.runner.dataset}))
        known = {key: usual[key] for key in now.keys() - before.keys() if key in usual} | {**before}
        keys = sorted(known.keys() | now.keys())
        return [
            f"`{key}` was {known.get(key, 'not set')}, is {now.get(key, 'not set')}"
            for key in keys
            if key not in known or key not in now or known[key] != now[key]
        ]


def without_paths(config: TrainConfig) -> Settings:
    """Return the settings that affect the results of a run, by dotted key."""
    flat = flattened(config_to_dict(config))
    return {key: value for key, value in flat.items() if not is_within(key, NOT_COMPARED)}


@dataclass(frozen=True)
class Table:
    """All cells by family of environments, and the sources of published results."""

    families: dict[str, list[Cell]]
    sources: dict[str, dict[str, Any]]

    @property
    def cells(self) -> list[Cell]:
        """Return the cells in execution order."""
        return [cell for cells in self.families.values() for cell in cells]


def read_table(path: Path) -> Table:
    """Read the table from a YAML file."""
    content = yaml.safe_load(path.read_text())
    families = {
        name: [_cell(**node) for node in nodes] for name, nodes in content["families"].items()
    }
    return Table(families, content["sources"])


def _cell(settings: Sequence[str] = (), teacher: Settings | None = None, **node: Any) -> Cell:
    return Cell(**node, settings=tuple(settings), teacher=_cell(**teacher) if teacher else None)
