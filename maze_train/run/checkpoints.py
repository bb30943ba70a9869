"""Resume a run from one of its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from maze_train.config.overrides import shell_word
from maze_train.config.resuming import continued
from maze_train.config.signature import is_signed
from maze_train.config.stored import given_in_python, modules_to_trust
from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import config_text
from maze_train.core.errors import RunDirectoryError
from maze_train.core.notices import warn
from maze_train.core.run_directory import MetricsRow, RunDirectory, checkpoint_name
from maze_train.core.targets import arguments_for
from maze_train.run.saved_policies import weights_that_differ

if TYPE_CHECKING:
    from maze_train.core.types import Tensor
    from maze_train.training.checkpoints import Checkpoint, CheckpointInfo, CheckpointStore
    from maze_train.training.trainer import Trainer


class CheckpointContinuation:
    """Resumes a run from one of its checkpoints.

    Args:
        config: Configuration of the run; `resume` may name a checkpoint.
        compared: Checkpoint whose settings were compared with the configuration.
    """

    def __init__(self, config: TrainConfig, compared: CheckpointInfo | None) -> None:
        self._config, self._compared = config, compared

    def checkpoint(self, store: CheckpointStore, run_dir: Path) -> Checkpoint | None:
        """Load the checkpoint to resume from; None if the run has none.

        Args:
            store: The checkpoints of the run.
            run_dir: Directory of the run, which must be locked.

        Raises:
            ConfigError: If files of that checkpoint are damaged and the settings of the one loaded
                instead do not allow the run to resume.
            RunDirectoryError: If all checkpoints are damaged, or the named one is damaged or
                missing.
        """
        checkpoint, compared = store.load(checkpoint_name(self._config.resume)), self._compared
        if checkpoint is not None:
            if compared is None or compared.path != checkpoint.path:
                continued(self._config, run_dir, checkpoint)
            store.point_to(checkpoint)
        return checkpoint

    def load(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """Restore the state of the trainer from the checkpoint.

        Raises:
            RunDirectoryError: If the state belongs to another algorithm or to other networks.
        """
        with fitting(checkpoint):
            saved = by_name(checkpoint.state["learners"]["learner"]["modules"])
            if differing := weights_that_differ(saved, by_name(trainer.learners.get_weights())):
                raise does_not_fit(checkpoint, f"weights differ: {differing}")
            trainer.load_state_dict(checkpoint.state)

    def past_rows(self, run: RunDirectory, checkpoint: Checkpoint) -> tuple[MetricsRow, ...]:
        """Return the rows of metrics up to the checkpoint.

        A damaged table is renamed, and the run continues without it.

        Args:
            run: Directory of the run.
            checkpoint: The checkpoint.
        """
        table = run.metrics
        try:
            rows = run.rows(checkpoint.epoch)
        except RunDirectoryError as error:
            aside = table.with_suffix(".damaged.csv")
            os.replace(table, aside)
            kept = f"it is kept as {aside.name}, and a new one begins after {checkpoint.path.name}"
            warn(f"{error}; {kept}")
            return ()
        if self._config.tracking.csv and len(rows) < checkpoint.epoch:
            missing = f"{checkpoint.epoch - len(rows)} of {checkpoint.epoch} epochs"
            warn(f"{table.name} lacks {missing} before {checkpoint.path.name}")
        return tuple(rows)


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert errors about missing or unexpected parts of a state to RunDirectoryError.

    Errors of user-defined code are not converted.

    Raises:
        RunDirectoryError: If the state does not fit.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        if passes_other_code(error):
            raise
        problem = f"it has other parts ({error})"
        if isinstance(error, KeyError):
            problem = f"it has no {error}, as of another algorithm"
        raise does_not_fit(checkpoint, problem) from error


OUR_CODE = ("maze_train", "torch", "numpy", "contextlib")
"""Packages that may raise the error of a state that does not fit."""


def passes_other_code(error: BaseException) -> bool:
    """Return whether the traceback of an exception contains packages other than `OUR_CODE`."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(name.partition(".")[0] not in OUR_CODE for name in names)


def does_not_fit(checkpoint: Checkpoint, problem: str) -> RunDirectoryError:
    """Return the error for a checkpoint whose state does not fit its run."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.path} does not fit this run: {problem}; is it a copy from another "
        "run, or have the environment's spaces changed?"
    )


def by_name(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return all weights by module and name."""
    return {
        f"{module}/{name}": value
        for module, weights in modules.items()
        for name, value in weights.items()
    }


def how_to_go_on(run_dir: Path | None, config: TrainConfig) -> str:
    """Return a message that explains how to resume a run.

    Args:
        run_dir: Directory of the run.
        config: Configuration of the run.
    """
    modules = [] if is_signed(config_text(config)) else modules_to_trust(config)
    given = given_in_python(config)
    if given:
        trust = f", trust={modules!r}" if modules else ""
        return f"to continue: train({arguments_for(given)}, resume={str(run_dir)!r}{trust})"
    trust = f" trust=[{','.join(modules)}]" if modules else ""
    return f"to continue: maze-run {shell_word('resume', str(run_dir))}{trust}"
