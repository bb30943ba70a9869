"""Directories of runs."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from maze_train.config.resuming import CHECKPOINTS, checkpoint_name
from maze_train.config.stored import CONFIG_FILE, check_plain, modules_to_trust
from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.files import atomic_write, remove_leftovers
from maze_train.training.checkpoints import CheckpointStore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.config.train_config import TrainConfig
    from maze_train.training.checkpoints import Checkpoint, CheckpointInfo
    from maze_train.training.trainer import Trainer
    from maze_train.types import Tensor

__all__ = [
    "check_is_free",
    "find_checkpoint",
    "how_to_go_on",
    "load_checkpoint",
    "make_run_dir",
    "new_directory",
    "take_up",
    "write_config",
]

BEST, METRICS = "best", "metrics.csv"
RESULTS = (METRICS, BEST, "summary.json", "policies", "plots", "events.out.tfevents.*")
"""Files and directories of a run besides its configuration and its checkpoints."""

SHOWN_DIFFERENCES = 4


def check_is_free(run_dir: str | Path | None) -> None:
    """Refuse a directory for a new run that holds one already, or the remains of one.

    Raises:
        ConfigError: If it does.
    """
    if run_dir is None:
        return
    if (Path(run_dir) / CONFIG_FILE).exists():
        problem = "holds a run already; continue it with resume=auto, name another directory, or "
        raise ConfigError("run_dir", f"{problem}remove it", str(run_dir))
    left = [name for name in (CHECKPOINTS, BEST, METRICS) if (Path(run_dir) / name).exists()]
    if left:
        raise ConfigError(
            "run_dir",
            f"holds {', '.join(left)} of a run whose {CONFIG_FILE} is missing: restore that file "
            "(best/ has a copy) to continue it, or name another directory",
            str(run_dir),
        )


def find_checkpoint(run_dir: Path, resume: str | None) -> CheckpointInfo | None:
    """The newest checkpoint of a run, or the one that `resume` names; None: there is none."""
    name = checkpoint_name(resume)
    infos = CheckpointStore(run_dir / CHECKPOINTS).list()
    return next((info for info in infos[::-1] if name in (None, info.path.name)), None)


def take_up(run_dir: Path, store: CheckpointStore, name: str | None) -> Checkpoint | None:
    """The checkpoint from which a run goes on; what killed processes left is removed.

    Without one the run begins again, and what it has written so far is put aside.

    Args:
        run_dir: Directory of the run, which this process has for itself.
        store: Its checkpoints.
        name: Name of the checkpoint; None: the newest one.

    Raises:
        RunDirectoryError: If all are damaged, or the one that is named is damaged or missing.
    """
    for directory in (run_dir, run_dir / BEST):
        remove_leftovers(directory)
    store.clean()
    checkpoint = store.load(name)
    if checkpoint is None:
        put_aside(run_dir)
    else:
        store.point_to(checkpoint)
    return checkpoint


def put_aside(run_dir: Path) -> None:
    """Move the results of a run that begins again into a directory below it.

    Raises:
        ConfigError: If they can not be moved.
    """
    if not (run_dir / METRICS).exists() and not (run_dir / BEST).exists():
        return
    try:
        aside = new_directory(run_dir / "before")
        for path in [path for name in RESULTS for path in sorted(run_dir.glob(name))]:
            path.rename(aside / path.name)
    except OSError as error:
        raise ConfigError("run_dir", f"can not be written: {error}", str(run_dir)) from error
    print(
        f"warning: {run_dir} has no checkpoint: the run begins again, at step 0; what it had "
        f"written is in {aside}",
        file=sys.stderr,
    )


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint.

    Raises:
        RunDirectoryError: If it is that of another algorithm or of other networks.
    """
    problem = f"checkpoint {checkpoint.path} does not fit this run: "
    remedy = "; is it a copy from another run, or has the environment other spaces now?"
    try:
        saved = shapes_of(checkpoint.state["learners"]["learner"]["modules"])
        own = shapes_of(trainer.learners.get_weights())
        differing = [
            f"{name} {saved.get(name, 'missing')} there, {own.get(name, 'missing')} here"
            for name in (saved | own)
            if saved.get(name) != own.get(name)
        ]
        if differing:
            more = f" and {len(differing) - SHOWN_DIFFERENCES} more"
            told = "; ".join(differing[:SHOWN_DIFFERENCES])
            told += more if len(differing) > SHOWN_DIFFERENCES else ""
            raise RunDirectoryError(f"{problem}weights differ: {told}{remedy}")
        trainer.load_state_dict(checkpoint.state)
    except KeyError as error:
        raise RunDirectoryError(
            f"{problem}it has no {error}, as of another algorithm{remedy}"
        ) from error


def shapes_of(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[int]]:
    """The shape of every weight, by module and name."""
    return {
        f"{module}/{name}": list(value.shape)
        for module, weights in modules.items()
        for name, value in weights.items()
    }


def make_run_dir(run_dir: str | None, default_parent: Path) -> Path:
    """Create the directory of a new run.

    Args:
        run_dir: Its name; None: `<default_parent>/<date>_<time>`.
        default_parent: Where runs of its kind are.

    Raises:
        ConfigError: If it can not be created.
    """
    try:
        if run_dir is None:
            return new_directory(default_parent)
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        return Path(run_dir)
    except OSError as error:
        problem = f"can not be written: {error}"
        raise ConfigError("run_dir", problem, run_dir or str(default_parent)) from error


def write_config(run_dir: Path, text: str) -> None:
    """Write the configuration of a run.

    Raises:
        ConfigError: If it can not be written, or not be read again.
    """
    try:
        check_plain(text)
    except ValueError as error:
        raise ConfigError(CONFIG_FILE, f"could not be read again: it would be {error}") from error
    try:
        with atomic_write(run_dir / CONFIG_FILE) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError("run_dir", f"can not be written: {error}", str(run_dir)) from error


def how_to_go_on(run_dir: Path | None, config: TrainConfig, has_env: bool) -> str:
    """The line that says how a run is continued.

    Args:
        run_dir: Its directory.
        config: Its configuration.
        has_env: Whether the environment was made in Python.
    """
    modules = modules_to_trust(config, has_env)
    if has_env:
        trust = f", trust={modules!r}" if modules else ""
        return f"to go on: train(env=..., resume={str(run_dir)!r}{trust})"
    trust = f" trust=[{','.join(modules)}]" if modules else ""
    return f"to go on: maze-run resume={shlex.quote(str(run_dir))}{trust}"


def new_directory(parent: Path) -> Path:
    """A directory named after the time, with a number if there is one of that second already."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    number = 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return path
