"""One training run as Hydra starts it, and what is told when it fails."""

from __future__ import annotations

import math
import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maze_train.config.loading import load_config
from maze_train.config.messages import CONFIGURATION_ERRORS, explain
from maze_train.errors import EnvError, MazeTrainError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Job", "report"]

PROGRAM = "maze-run"
DONE, FAILURE, CONFIGURATION_ERROR = 0, 1, 2


class Job:
    """Trains as a composed configuration says; called by Hydra, several times in a sweep.

    Errors do not go through Hydra, which would stop a sweep and print them in its own way: they are
    told here, and kept for the exit code.

    Args:
        folders: Folders with configuration of the user, for messages.
        debug: Whether the traceback of every error is shown.
    """

    def __init__(self, folders: Sequence[str] = (), debug: bool = False) -> None:
        self.folders = list(folders)
        self.debug = debug
        self.is_sweep = False
        self.n_jobs = 0
        self.exit_codes: list[int] = []
        self._pid = os.getpid()

    def __call__(self, composed: DictConfig) -> float:
        """Train, and return the best metric: what a sweeper optimises. NaN after a failure."""
        settings = HydraConfig.get()
        self.is_sweep = settings.mode == RunMode.MULTIRUN
        self.n_jobs += 1
        label = ""
        if self.is_sweep:
            chosen = " ".join(word.lstrip("+") for word in settings.overrides.task)
            label = f"job {settings.job.num} ({chosen}): "
            print(f"{PROGRAM}: job {settings.job.num}: {chosen}", flush=True)
        try:
            return train(composed, settings.runtime.output_dir if self.is_sweep else None)
        except Exception as error:
            self.exit_codes.append(report(error, self.folders, self.debug, label))
            if self.is_sweep:
                self._after_failure(settings)
                if not self._may_go_on(settings):
                    raise
            return math.nan

    def exit_code(self) -> int:
        """The exit code of all jobs; tells how many jobs of a sweep failed."""
        failed = len(self.exit_codes)
        if failed and self.is_sweep:
            print(f"{PROGRAM}: {failed} of {self.n_jobs} jobs failed", file=sys.stderr)
        return min(self.exit_codes, default=DONE)

    def _may_go_on(self, settings: Any) -> bool:
        """Whether Hydra need not know of a failure; other processes and sweepers count them."""
        sweeper = str(OmegaConf.select(settings, "sweeper._target_"))
        return os.getpid() == self._pid and sweeper.endswith(".BasicSweeper")

    def _after_failure(self, settings: Any) -> None:
        """Remove the directory that Hydra made for the job, if nothing was put there."""
        with suppress(OSError):
            os.rmdir(settings.runtime.output_dir)


def train(composed: DictConfig, run_dir: str | None = None) -> float:
    """Run a composed configuration and return its best metric.

    Args:
        composed: What Hydra composed.
        run_dir: Directory of the run, unless the configuration names one.
    """
    node = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    if run_dir is not None and node.get("run_dir") is None:
        node["run_dir"] = run_dir
    config = load_config({str(key): value for key, value in node.items()})
    # Only now: PyTorch takes a second to import, and a configuration error should be told at once.
    from maze_train.runners.factory import build_runner

    return build_runner(config).run().best_metric


def report(
    error: Exception, folders: Sequence[str] = (), debug: bool = False, label: str = ""
) -> int:
    """Tell an error on stderr: one message if it was to be expected, else with its traceback.

    Args:
        error: The error.
        folders: Folders with configuration of the user, for messages.
        debug: Whether to show the traceback in any case.
        label: What comes before the message, such as the job of a sweep.

    Returns:
        The exit code that belongs to the error.
    """
    is_configuration = isinstance(error, CONFIGURATION_ERRORS)
    if debug or not (is_configuration or isinstance(error, MazeTrainError)):
        traceback.print_exception(type(error), error, error.__traceback__)
    elif isinstance(error, EnvError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)  # where the user's environment raised
    if is_configuration:
        text = explain(error, folders)
    elif isinstance(error, MazeTrainError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    print(f"{PROGRAM}: error: {label}{text}", file=sys.stderr, flush=True)
    return CONFIGURATION_ERROR if is_configuration else FAILURE
