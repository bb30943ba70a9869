"""Runs one Hydra job and reports failures."""

from __future__ import annotations

import math
import os
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from maze_train.config.messages import CONFIGURATION_ERRORS, explain
from maze_train.config.options import group_names
from maze_train.config.pipeline import configure, prepare
from maze_train.config.rollout_loading import is_rollout, load_rollout_config
from maze_train.config.train_config import AUTO
from maze_train.errors import ConfigError, EnvError, MazeTrainError, RunDirectoryError
from maze_train.notices import tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PROGRAM = "maze-run"
DONE, FAILURE, CONFIGURATION_ERROR = 0, 1, 2


class Job:
    """Does what a composed configuration says; called by Hydra, several times in a sweep.

    Errors do not go through Hydra, which would stop a sweep and print them in its own way: they are
    printed here, and kept for the exit code.

    Args:
        argv: Arguments of the command as the user typed them, for messages.
        debug: Whether the traceback of every error is shown.
    """

    def __init__(self, argv: Sequence[str] = (), debug: bool = False) -> None:
        self.argv = list(argv)
        self.debug = debug
        self.is_sweep = False
        self.n_jobs = 0
        self.exit_codes: list[int] = []
        self._pid = os.getpid()

    def __call__(self, composed: DictConfig) -> float:
        """Train or play, and return what a sweeper optimises. NaN after a failure.

        Of training, this is the best metric; of a rollout, the mean return.
        """
        settings = HydraConfig.get()
        self.is_sweep = settings.mode == RunMode.MULTIRUN
        self.n_jobs += 1
        label = ""
        if self.is_sweep:
            chosen = " ".join(word.lstrip("+") for word in settings.overrides.task)
            label = f"job {settings.job.num} ({chosen}): "
            print(f"{PROGRAM}: job {settings.job.num}: {chosen}", flush=True)
        directory = settings.runtime.output_dir if self.is_sweep else None
        started_in = os.getcwd()
        try:
            if is_rollout(settings.job.config_name, composed):
                return roll_out(composed, directory)
            return train(
                composed,
                directory,
                # As the user wrote them: what they refer to is resolved in the configuration.
                OmegaConf.to_container(settings.overrides.task, resolve=False),
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(), too: it must not end the other jobs
            self.exit_codes.append(report(error, self.argv, self.debug, label))
            if self.is_sweep:
                self._after_failure(settings)
                if not self._may_go_on(settings):
                    raise
            return math.nan
        finally:
            os.chdir(started_in)  # an environment may have left it; the next job begins here

    def exit_code(self) -> int:
        """The exit code of all jobs; prints how many jobs of a sweep failed."""
        failed = len(self.exit_codes)
        if failed and self.is_sweep:
            tell(f"{PROGRAM}: {failed} of {self.n_jobs} jobs failed")
        return min(self.exit_codes, default=DONE)

    def _may_go_on(self, settings: Any) -> bool:
        """Whether Hydra need not know of a failure; other processes and sweepers count them."""
        sweeper = str(OmegaConf.select(settings, "sweeper._target_"))
        return os.getpid() == self._pid and sweeper.endswith(".BasicSweeper")

    def _after_failure(self, settings: Any) -> None:
        """Remove the directory that Hydra made for the job, if nothing was put there."""
        with suppress(OSError):
            os.rmdir(settings.runtime.output_dir)


def train(composed: DictConfig, run_dir: str | None = None, overrides: Any = ()) -> float:
    """Run a composed configuration and return its best metric.

    Args:
        composed: Hydra's configuration.
        run_dir: Directory of the run, unless the configuration names one.
        overrides: Settings of the user, a list in Hydra's spelling. A run that is continued by its
            directory has its own settings, changed by these.

    Raises:
        RunDirectoryError: If some of the results could not be written.
    """
    values = plain_values(composed)
    changes: dict[str, Any] = {}
    if values.get("resume") not in (None, AUTO):
        changes = settings_of(overrides, values)
    elif values.get("resume") is None and values.get("run_dir") is None:
        values["run_dir"] = run_dir
    config = configure(values, changes)
    # Only now: PyTorch takes a second to import, and a configuration error should be shown at once.
    from maze_train.runners.base import TrainingRunner

    result = TrainingRunner(prepare(config)).run()
    if result.missing:
        raise RunDirectoryError(
            f"training came to its end, but these could not be written to {result.run_dir}: "
            f"{', '.join(result.missing)}; make room and continue the run, which writes them"
        )
    return result.best_metric


def roll_out(composed: DictConfig, output_dir: str | None = None) -> float:
    """Play the episodes of a composed configuration and return their mean return.

    Args:
        composed: Hydra's configuration.
        output_dir: Directory of the results, unless the configuration names one.
    """
    values = plain_values(composed)
    if values.get("output_dir") is None:
        values["output_dir"] = output_dir
    config = load_rollout_config(values)
    # Late, as in training.
    from maze_train.runners.rollout import RolloutRunner

    return RolloutRunner(config).run().summary.return_mean


def plain_values(composed: DictConfig) -> dict[str, Any]:
    """Convert Hydra's configuration to plain values, with interpolations resolved."""
    node = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def settings_of(overrides: Sequence[str], composed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, of a group the name of its option.

    Args:
        overrides: Settings of the user, in Hydra's spelling.
        composed: Its configuration as Hydra composed it, where interpolations are resolved.

    Raises:
        ConfigError: If one deletes a setting.
    """
    settings: dict[str, Any] = {}
    groups = group_names()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete() or override.is_sweep_override():
            problem = "with resume=<run dir> settings can only be set: key=value"
            raise ConfigError(override.input_line or "", problem)
        key = override.key_or_group
        settings[key] = override.value() if key in groups else _select(composed, key)
    return settings


def _select(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node[part]
    return node


def report(
    error: BaseException, argv: Sequence[str] = (), debug: bool = False, label: str = ""
) -> int:
    """Tell an error on stderr: one message if it was to be expected, else with its traceback.

    Args:
        error: The error.
        argv: Arguments of the command as the user typed them, for messages.
        debug: Whether to show the traceback in any case.
        label: Prefix of the message, such as the job of a sweep.

    Returns:
        The exit code that belongs to the error.
    """
    is_configuration = isinstance(error, CONFIGURATION_ERRORS)
    if debug or not (is_configuration or isinstance(error, MazeTrainError)):
        traceback.print_exception(type(error), error, error.__traceback__)
    elif isinstance(error, EnvError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)  # where the user's environment raised
    if is_configuration:
        text = explain(error, argv)
    elif isinstance(error, MazeTrainError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    tell(f"{PROGRAM}: error: {label}{text}")
    return CONFIGURATION_ERROR if is_configuration else FAILURE
