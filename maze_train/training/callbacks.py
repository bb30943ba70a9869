"""Callbacks: code of a user that is called while a run goes on."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from maze_train.errors import CallbackError, ConfigError
from maze_train.events import Event
from maze_train.notices import tell, warn
from maze_train.targets import build_target
from maze_train.training.generators import generators_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from maze_train.learner.config import Progress
    from maze_train.learner.learner import Learner
    from maze_train.training.trainer import Trainer


class TrainingView:
    """A run as callbacks see it.

    Attributes:
        metrics: Metrics of the running epoch so far by name; in `on_epoch_end` those of the epoch
            that ended, with its evaluation. A copy.
    """

    def __init__(self, trainer: Trainer, last_epoch: int) -> None:
        self._trainer = trainer
        self._last_epoch = last_epoch
        self._row: dict[str, float] | None = None

    @property
    def progress(self) -> Progress:
        """Epochs that ended, updates, environment steps, and the share of training that is done."""
        return self._trainer.progress(self._last_epoch)

    @property
    def metrics(self) -> dict[str, float]:
        """See the class."""
        if self._row is not None:
            return dict(self._row)
        return self._trainer.statistics.reduce()

    @property
    def history(self) -> list[dict[str, float]]:
        """One row of metrics per epoch that ended."""
        return [dict(row) for row in self._trainer.tracker.history]

    @property
    def learner(self) -> Learner[Any, Any, Any]:
        """The learner of this process, to be looked at."""
        return self._trainer.learners.foreach_learner(lambda learner: learner)[0]

    @property
    def model(self) -> nn.Module:
        """The policy that is trained, to be looked at."""
        return self._trainer.model

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run, where a callback may write files; None: there is none."""
        return self._trainer.tracker.run_info.run_dir

    @property
    def checkpoint(self) -> Path | None:
        """The last checkpoint; None: there is none."""
        checkpoints = self._trainer.checkpoints
        return None if checkpoints is None else checkpoints.latest

    @property
    def stop_reason(self) -> str:
        """Reason for which training ends; empty: it goes on."""
        return self._trainer.stop_reason

    def record(self, name: str, value: float) -> None:
        """Add a metric to the epoch; several values of a name within an epoch become their mean.

        Raises:
            ConfigError: If the name is not of the form `group/name`, or that of another metric.
        """
        if self._row is not None:
            self._check_name(name, self._row)
            self._row[name] = float(value)
        else:
            self._check_name(name, ())
            self._trainer.statistics.record(Event.tagged(name, "Of a callback."), float(value))

    def _check_name(self, name: str, taken: Any) -> None:
        group = name.partition("/")[0]
        if not name.strip("/").count("/") or group in ("train", "eval", "time") or name in taken:
            problem = "expected a name of its own, such as my_callback/number"
            raise ConfigError("metric", problem, name)

    def stop(self, reason: str) -> None:
        """End training after this update; there is an evaluation and a checkpoint before.

        Args:
            reason: Stands in `summary.json` and at the end of the display.
        """
        if not reason.strip() or reason in ("error", "interrupted"):
            raise ConfigError("reason", "expected a few words that say why", reason)
        self._trainer.stop_reason = self._trainer.stop_reason or reason
