"""When things happen: epochs of updates, evaluation, selection of the best policy, metrics."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError, nearest
from maze_train.events import Event, EventInterface, Statistics
from maze_train.learner.progress import Progress
from maze_train.rollout.episodes import TrainingEpisodeEvents

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from torch import nn

    from maze_train.learner.group import LearnerGroup
    from maze_train.tracking.tracker import Tracker
    from maze_train.training.config import AlgorithmConfig
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.model_selection import BestModelSelection

__all__ = ["Limits", "TimeEvents", "Trainer", "TrainingSummary"]


class TimeEvents(EventInterface, prefix="time"):
    """Where the wall time of an epoch goes, in seconds."""

    collect_s = Event("Collecting experience.", reduce="sum")
    update_s = Event("Updating the weights.", reduce="sum")
    evaluate_s = Event("Evaluating the policy.", reduce="sum")
    epoch_s = Event("The whole epoch.", reduce="sum")
    total_s = Event("Since training began.", reduce="last")
    steps_per_second = Event("Environment steps per second of the epoch.", reduce="last")


@dataclass(frozen=True)
class Limits:
    """When training stops; 0 means no limit."""

    n_epochs: int = 0
    total_steps: int = 0
    patience: int = 0
    max_wall_time_s: float = 0.0


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of training, as in summary.json."""

    stop_reason: str
    """total_steps, n_epochs, patience, max_wall_time_s, interrupted or error."""

    epochs: int
    updates: int
    env_steps: int
    wall_time_s: float
    steps_per_second: float
    """Environment steps of training over the whole wall time, evaluations included."""

    best_metric: float
    """Best value of the metric that selects the policy; NaN if there was none."""

    best_epoch: int
    final_eval_return_mean: float
    """Mean return of the last evaluation; NaN if there was none."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


class Trainer(ABC):
    """Runs the training loop of an algorithm.

    An epoch is `epoch_length` updates, then (when due) an evaluation, the selection of the best
    policy, and a row of metrics. A subclass says what one update is: `update_once`.

    Args:
        config: Settings of the algorithm.
        learners: What changes the weights.
        model: The policy, for evaluation.
        tracker: Takes the metrics.
        evaluator: Judges the policy; None: the training return selects the best one.
        model_selection: Keeps the best policy; None: nothing is kept.
        limits: When to stop; None: those of the algorithm.
        evaluation_interval: Epochs from one evaluation to the next.
        selection_metric: Metric that `model_selection` is told.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: LearnerGroup,
        model: nn.Module,
        tracker: Tracker,
        *,
        evaluator: Evaluator | None = None,
        model_selection: BestModelSelection | None = None,
        limits: Limits | None = None,
        evaluation_interval: int = 1,
        selection_metric: str = "eval/episode_return_mean",
    ) -> None:
        self.algorithm_config = config
        self.learners = learners
        self.model = model
        self.tracker = tracker
        self.evaluator = evaluator
        self.model_selection = model_selection
        self.limits = limits or Limits(n_epochs=config.n_epochs, patience=config.patience)
        self.evaluation_interval = evaluation_interval
        self.selection_metric = selection_metric
        self.epoch = 0
        self.updates = 0
        self.env_steps = 0
        self.wall_time_s = 0.0
        self.final_eval_return_mean = math.nan
        self.stop_reason = ""
        self._resumed_at = time.perf_counter()
        self._statistics = Statistics()

    @abstractmethod
    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Get experience and learn from it, once; returns the environment steps that it took."""

    # -- the loop --------------------------------------------------------------------------------

    def train(self, n_epochs: int | None = None) -> TrainingSummary:
        """Train until a limit is reached.

        Args:
            n_epochs: Epochs to train from here on instead of `limits.n_epochs`; the other limits
                hold. >= 1.

        Raises:
            ConfigError: If nothing would end training.
        """
        if n_epochs is not None:
            check_at_least("n_epochs", n_epochs, 1)
        elif not any(asdict(self.limits).values()):
            raise ConfigError("limits", "nothing would end training; set one, or pass n_epochs")
        self._resumed_at = time.perf_counter() - self.wall_time_s
        last_epoch = self.limits.n_epochs if n_epochs is None else self.epoch + n_epochs
        self.stop_reason = self._limit_reached(last_epoch)
        while not self.stop_reason:
            self._run_epoch(last_epoch)
        return self.summary()

    def _run_epoch(self, last_epoch: int) -> None:
        started, steps_before = time.perf_counter(), self.env_steps
        length = self.algorithm_config.epoch_length
        for i in range(length):
            self.env_steps += self.update_once(self.progress(last_epoch), self._statistics)
            self.updates += 1
            self.wall_time_s = time.perf_counter() - self._resumed_at
            self.stop_reason = self._limit_reached()
            if self.stop_reason:
                break
            self.tracker.advance((i + 1) / length, self.env_steps)
        self.epoch += 1
        self.stop_reason = self.stop_reason or self._limit_reached(last_epoch)
        row: dict[str, float] = {
            "epoch": self.epoch,
            "updates": self.updates,
            "env_steps": self.env_steps,
            **self._statistics.reduce(),
        }
        self._statistics.clear()
        # A training metric first: when it ends the run, there is still an evaluation to come.
        self._select(row)
        row.update(self._evaluate_if_due(row))
        now = time.perf_counter()
        self.wall_time_s = now - self._resumed_at
        row[TimeEvents.epoch_s.tag] = now - started
        row[TimeEvents.total_s.tag] = self.wall_time_s
        row[TimeEvents.steps_per_second.tag] = (self.env_steps - steps_before) / (now - started)
        self.tracker.write(row)

    def _limit_reached(self, last_epoch: int = 0) -> str:
        """The limit that is reached, or an empty string; between epochs `last_epoch` counts."""
        if 0 < self.limits.total_steps <= self.env_steps:
            return "total_steps"
        if 0 < last_epoch <= self.epoch:
            return "n_epochs"
        if 0 < self.limits.max_wall_time_s <= self.wall_time_s:
            return "max_wall_time_s"
        return ""

    def _evaluate_if_due(self, row: dict[str, float]) -> dict[str, float]:
        """Evaluate every so many epochs and at the end, and offer the score for selection."""
        due = self.epoch % self.evaluation_interval == 0 or bool(self.stop_reason)
        if not due:
            return {}
        metrics: dict[str, float] = {}
        if self.evaluator is not None:
            started = time.perf_counter()
            metrics = self.evaluate()
            self._select(metrics)
            metrics[TimeEvents.evaluate_s.tag] = time.perf_counter() - started
        self._check_metric({*row, *metrics})
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy; training goes on as if nothing had happened."""
        if self.evaluator is None:
            return {}
        metrics = self.evaluator.evaluate(self.model)  # type: ignore[arg-type]  # an ActingModel
        self.final_eval_return_mean = metrics.get("eval/episode_return_mean", math.nan)
        return metrics

    def _select(self, metrics: dict[str, float]) -> None:
        """Tell the model selection the score, if it is among the metrics."""
        selection = self.model_selection
        if selection is None or self.selection_metric not in metrics:
            return
        selection.update(metrics[self.selection_metric], self.epoch)
        if not self.stop_reason and selection.patience_is_exhausted(self.limits.patience):
            self.stop_reason = "patience"

    def _check_metric(self, present: set[str]) -> None:
        """Refuse a metric that is never reported: it would select nothing, in silence."""
        # These are absent until an episode ends, or until one tells of success.
        known = present | {event.tag for event in TrainingEpisodeEvents.events()}
        known.add("eval/success_rate")
        if self.model_selection is None or self.selection_metric in known:
            return
        close = nearest(self.selection_metric, known)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise ConfigError(
            "evaluation.metric", f"no such metric is reported{hint}", self.selection_metric
        )

    def progress(self, last_epoch: int = 0) -> Progress:
        """Where training stands before the next update."""
        fractions = [0.0]
        if self.limits.total_steps:
            fractions.append(self.env_steps / self.limits.total_steps)
        if last_epoch:
            fractions.append(self.updates / (last_epoch * self.algorithm_config.epoch_length))
        if self.limits.max_wall_time_s and len(fractions) == 1:
            # Only without another limit: numbers that depend on the clock can not be repeated.
            fractions.append(self.wall_time_s / self.limits.max_wall_time_s)
        return Progress(self.env_steps, self.updates, self.epoch, min(max(fractions), 1.0))

    def summary(self) -> TrainingSummary:
        """The outcome so far."""
        selection = self.model_selection
        return TrainingSummary(
            stop_reason=self.stop_reason,
            epochs=self.epoch,
            updates=self.updates,
            env_steps=self.env_steps,
            wall_time_s=self.wall_time_s,
            steps_per_second=self.env_steps / self.wall_time_s if self.wall_time_s else 0.0,
            best_metric=math.nan if selection is None else selection.best_score,
            best_epoch=0 if selection is None else selection.best_epoch,
            final_eval_return_mean=self.final_eval_return_mean,
        )

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Learners, best policy and counters: everything but the environments."""
        selection = self.model_selection
        return {
            "learners": self.learners.state_dict(),
            "model_selection": None if selection is None else selection.state_dict(),
            "progress": {
                "epoch": self.epoch,
                "updates": self.updates,
                "env_steps": self.env_steps,
                "wall_time_s": self.wall_time_s,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.learners.load_state_dict(state["learners"])
        if self.model_selection is not None and state["model_selection"] is not None:
            self.model_selection.load_state_dict(state["model_selection"])
        progress = state["progress"]
        self.epoch = progress["epoch"]
        self.updates = progress["updates"]
        self.env_steps = progress["env_steps"]
        self.wall_time_s = progress["wall_time_s"]

    def save_state(self, file_path: str | Path | BinaryIO) -> None:
        """Write `state_dict` to a file of tensors and plain values."""
        torch.save(self.state_dict(), file_path)

    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Continue from a file that `save_state` wrote; it can not run code."""
        self.load_state_dict(torch.load(file_path, map_location="cpu", weights_only=True))
