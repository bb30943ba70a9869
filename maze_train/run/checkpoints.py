"""Checkpoints of a run, and how it is continued from one of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING

from maze_train.config.overrides import shell_word
from maze_train.config.resuming import checkpoint_name, continued
from maze_train.config.signature import is_signed
from maze_train.config.stored import given_in_python, modules_to_trust
from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import CONFIG_FILE, config_text, writable
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import new_directory, remove_leftovers
from maze_train.core.notices import warn
from maze_train.core.targets import arguments_for
from maze_train.run.parts import BEST, METRICS, SUMMARY
from maze_train.run.saved_policies import weights_that_differ
from maze_train.tracking.tracker import MetricsRow, read_rows

if TYPE_CHECKING:
    from maze_train.core.types import Tensor
    from maze_train.training.checkpoints import Checkpoint, CheckpointInfo, CheckpointStore
    from maze_train.training.trainer import Trainer


RESULTS = (METRICS, BEST, SUMMARY, "policies", "plots", "profile", "events.out.tfevents.*")
"""Files and directories of a run in addition to its configuration and its checkpoints."""


def take_up(
    store: CheckpointStore, run_dir: Path, config: TrainConfig, compared: CheckpointInfo | None
) -> Checkpoint | None:
    """Load the checkpoint from which a run continues, and remove what killed processes left.

    Without a checkpoint a run begins again, and what it has written so far is put aside; in an
    empty directory there is nothing to do. The run directory must be locked.

    Args:
        store: The checkpoints of the run.
        run_dir: Directory of the run.
        config: Configuration of the run; `resume` may name a checkpoint.
        compared: The checkpoint whose settings were compared with the configuration.

    Raises:
        ConfigError: If another checkpoint is loaded, because files of that one are damaged, and its
            settings do not allow the run to resume.
        RunDirectoryError: If all are damaged, or the one that is named is damaged or missing.
    """
    for directory in (run_dir, run_dir / BEST):
        remove_leftovers(directory)
    store.clean()
    checkpoint = store.load(checkpoint_name(config.resume))
    if checkpoint is None:
        put_aside(run_dir)
    else:
        if compared is None or compared.path != checkpoint.path:
            continued(config, run_dir, checkpoint)
        store.point_to(checkpoint)
    return checkpoint


def put_aside(run_dir: Path) -> None:
    """Move the results of a run that begins again into a directory below it, if there are any.

    Its settings stay until those of the new run take their place, so that it can begin once more.

    Raises:
        ConfigError: If they cannot be moved.
    """
    found = [path for name in RESULTS for path in sorted(run_dir.glob(name))]
    if not found or not (run_dir / CONFIG_FILE).exists():
        return
    with writable("run_dir", run_dir):
        aside = new_directory(run_dir / "before")
        shutil.copy(run_dir / CONFIG_FILE, aside)
        for path in found:
            path.rename(aside / path.name)
    warn(
        f"{run_dir} has no checkpoint: the run begins again, at step 0; what it had "
        f"written is in {aside}"
    )


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint.

    Raises:
        RunDirectoryError: If it is that of another algorithm or of other networks.
    """
    with fitting(checkpoint):
        saved = by_name(checkpoint.state["learners"]["learner"]["modules"])
        if differing := weights_that_differ(saved, by_name(trainer.learners.get_weights())):
            raise does_not_fit(checkpoint, f"weights differ: {differing}")
        trainer.load_state_dict(checkpoint.state)


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Let a state that has other parts than those read in the block be an error of its checkpoint.

    An error of user-defined code passes unchanged.

    Raises:
        RunDirectoryError: If it has.
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
"""Packages through which a state that does not fit may fail."""


def passes_other_code(error: BaseException) -> bool:
    """Whether an exception was raised in, or passed, code of other packages than `OUR_CODE`."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(name.partition(".")[0] not in OUR_CODE for name in names)


def does_not_fit(checkpoint: Checkpoint, problem: str) -> RunDirectoryError:
    """The error for a checkpoint whose state is not that of its run."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.path} does not fit this run: {problem}; is it a copy from another "
        "run, or has the environment other spaces now?"
    )


def by_name(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All weights by module and name."""
    return {
        f"{module}/{name}": value
        for module, weights in modules.items()
        for name, value in weights.items()
    }


def how_to_go_on(run_dir: Path | None, config: TrainConfig) -> str:
    """The line that says how a run is continued.

    Args:
        run_dir: Its directory.
        config: Its configuration.
    """
    modules = [] if is_signed(config_text(config)) else modules_to_trust(config)
    given = given_in_python(config)
    if given:
        trust = f", trust={modules!r}" if modules else ""
        return f"to continue: train({arguments_for(given)}, resume={str(run_dir)!r}{trust})"
    trust = f" trust=[{','.join(modules)}]" if modules else ""
    return f"to continue: maze-run {shell_word('resume', str(run_dir))}{trust}"


def past_rows(run_dir: Path, resumed: Checkpoint, is_kept: bool) -> tuple[MetricsRow, ...]:
    """The metrics of a run up to the checkpoint from which it is continued.

    A table that is damaged is set aside: the checkpoint is whole, and the run continues without it.

    Args:
        run_dir: Directory of the run.
        resumed: The checkpoint.
        is_kept: Whether the run writes metrics.csv; then missing rows are reported.
    """
    table = run_dir / "metrics.csv"
    try:
        rows = read_rows(table, resumed.epoch)
    except RunDirectoryError as error:
        aside = table.with_suffix(".damaged.csv")
        os.replace(table, aside)
        kept = f"it is kept as {aside.name}, and a new one begins after {resumed.path.name}"
        warn(f"{error}; {kept}")
        return ()
    if is_kept and len(rows) < resumed.epoch:
        missing = f"{resumed.epoch - len(rows)} of {resumed.epoch} epochs"
        warn(f"metrics.csv lacks {missing} before {resumed.path.name}")
    return tuple(rows)
