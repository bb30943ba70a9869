"""Directories of runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from maze_train.config.writing import CHECKPOINTS, CONFIG_FILE
from maze_train.errors import ConfigError

__all__ = ["BEST", "METRICS", "check_is_free", "make_run_dir", "new_directory"]

BEST, METRICS = "best", "metrics.csv"


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
