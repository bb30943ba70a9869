"""The training loop: epochs of updates, evaluation, model selection, metrics, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import nn

from maze_train.core.checks import check_at_least
from maze_train.core.errors import CallbackError, ConfigError, TrainingError
from maze_train.core.events import Statistics
from maze_train.core.files import atomic_write
from maze_train.core.notices import notify
from maze_train.core.state_files import dumps, loads
from maze_train.learner.config import Progress
from maze_train.learner.learners import Learners
from maze_train.training.callbacks import Callbacks
from maze_train.training.changes import ChangedSettings
from maze_train.training.config import AlgorithmConfig
from maze_train.training.evaluators import Evaluator, check_metric, metric_of
from maze_train.training.events import TimeEvents
from maze_train.training.generators import generator_states, generators_kept, load_generator_states
from maze_train.training.outcome import (
    Interrupted,
    Interruption,
    Limits,
    Position,
    TrainingSummary,
    crosses,
)
from maze_train.training.services import TrainerServices

if TYPE_CHECKING:
    from typing import Self

    from maze_train.collect.collector import RolloutCollector
    from maze_train.training.background import BackgroundEvaluator, PendingEvaluation


LOG = logging.getLogger(__package__)

PROGRESS = (
    "epoch",
    "updates",
    "env_steps",
    "wall_time_s",
    "final_eval_return_mean",
    "_updates_in_epoch",
    "_epoch_began_s",
    "_epoch_began_steps",
)
"""Attributes of a trainer that describe the training progress."""

MAX_LOST_UPDATES = 1_000
"""Maximum number of consecutive updates without a valid transition."""


class Trainer(ABC):
    """Runs the training loop of an algorithm.

    An epoch consists of `epoch_length` updates, an evaluation and model selection (if due), and a
    row of metrics. Subclasses implement `update_once`. Additional constructor arguments of
    subclasses are keyword-only.

    Args:
        config: Settings of the algorithm.
        learners: Learners that update the weights.
        model: The policy, for evaluation.
        services: Tracker, evaluator, model selection, limits, checkpoints.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise TypeError with a hint for calls such as `PPO("MlpPolicy", "CartPole-v1")`."""
        if args and not isinstance(args[0], AlgorithmConfig):
            given = [*args[1:], *kwargs.values(), "CartPole-v1"]
            env = next(value for value in given if isinstance(value, str))
            name = cls.__name__.removesuffix("Trainer")
            raise TypeError(
                f"{name} cannot be created directly. To train and to act:\n"
                "    from maze_train import train\n"
                f'    result = train("{env}", "{name.lower()}", total_steps=100_000)\n'
                "    action = result.policy.act(observation)"
            )
        return super().__new__(cls)

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: Learners,
        model: nn.Module,
        services: TrainerServices,
    ) -> None:
        self.settings = ChangedSettings(config)
        self.learners = learners
        self.model = model
        self.tracker = services.tracker
        self.evaluator = services.evaluator
        self.background = services.background
        self.model_selection = services.model_selection
        self.limits = services.limits or Limits(n_epochs=config.n_epochs, patience=config.patience)
        self.evaluation_interval = services.evaluation_interval
        self.evaluation_interval_steps = services.evaluation_interval_steps
        self.selection_metric = services.selection_metric
        self.checkpoints = services.checkpoints
        self.around_update = services.around_update
        self.interruption = services.interruption or Interruption()
        self.env_calls = services.env_calls
        self.processes = services.processes
        self.infos = services.infos
        self.callbacks = Callbacks(services.callbacks, self)
        self.epoch = 0
        self.updates = 0
        self.env_steps = 0
        self.wall_time_s = 0.0
        self.final_eval_return_mean = math.nan
        self.stop_reason = ""
        self.has_started = False
        """Whether `on_run_start` of all callbacks succeeded, in this or an earlier process."""
        self.exact = True
        """Whether the results are identical to the results of an uninterrupted run."""
        self._score: float | None = None
        self._resumed_at = 0.0
        self._updates_in_epoch = self._lost_updates = self._last_epoch = 0
        self._epoch_began_s = 0.0
        self._epoch_began_steps = 0
        self.statistics = Statistics()
        # Metrics of an epoch that has not been evaluated yet.
        self._row: dict[str, float] | None = None
        # Environment steps at the last evaluation, and the metrics of evaluations in this epoch.
        self._evaluated_at = 0
        self._evaluated: dict[str, float] = {}
        # Rows of finished epochs that wait for a pending evaluation.
        self._rows: list[dict[str, float]] = []

    @property
    def algorithm_config(self) -> AlgorithmConfig:
        """The current settings of the algorithm."""
        return self.settings.current

    def set(self, key: str, value: object) -> None:
        """Change a setting of the algorithm; see `TrainingView.set`."""
        limits = self.limits
        is_limited = limits.total_steps or limits.max_wall_time_s or self._last_epoch
        apply, modules = self.learners.change_settings, self.learners.first.modules
        self.settings.change(key, value, bool(is_limited), apply, modules)

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps environments in this process; None without such a collector."""
        return None

    def connect_callbacks(self) -> None:
        """Connect callbacks that define `on_step` to the collector.

        Raises:
            ConfigError: If this process does not step environments.
        """
        names = self.callbacks.defining("on_step")
        if names and self.stepping is None:
            problem = "not available with actors, es, impala and bc; use on_rollout_end"
            raise ConfigError("on_step", problem, names[0])
        if names and self.stepping is not None:
            self.stepping.on_step = lambda batch: self.callbacks.call("on_step", seen=batch)

    @property
    def epoch_length(self) -> int:
        """Updates per epoch."""
        return self.algorithm_config.epoch_length

    @abstractmethod
    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Collect experience and update once; return the number of environment steps."""

    def check_lost(self, num_samples: int) -> None:
        """Raise an error if too many consecutive updates had no transitions.

        Args:
            num_samples: Number of transitions of an update.

        Raises:
            TrainingError: If `MAX_LOST_UPDATES` consecutive updates had no transition.
        """
        self._lost_updates = 0 if num_samples else self._lost_updates + 1
        if self._lost_updates == MAX_LOST_UPDATES:
            raise TrainingError(
                f"{MAX_LOST_UPDATES} consecutive updates had no valid transition: at the beginning "
                "of each episode, the environments return non-finite values or their workers fail"
            )

    def train(self, n_epochs: int | None = None) -> TrainingSummary:
        """Train until a limit is reached.

        Args:
            n_epochs: Epochs to train in this call, >= 1, in place of `limits.n_epochs`; the other
                limits apply.

        Raises:
            ConfigError: If there is no limit.
            Interrupted: If a signal was received. Raised after a checkpoint was saved, or
                immediately if the signal was sent twice.
        """
        if n_epochs is not None:
            check_at_least("n_epochs", n_epochs, 1)
        elif not any(asdict(self.limits).values()):
            raise ConfigError("limits", "no limit is set, so training would never end; set a limit")
        self.connect_callbacks()
        self._resumed_at = self._now() - self.wall_time_s
        last_epoch = self.limits.n_epochs if n_epochs is None else self.epoch + n_epochs
        self._last_epoch = last_epoch
        with self.interruption.deferred(), self.callbacks.running(last_epoch):
            try:
                self._run_epochs(last_epoch)
            except (Interrupted, CallbackError) as stop:
                stop.is_common = stop.is_common or not stop.at_once
                if self.checkpoints is not None and not stop.at_once:
                    stop.checkpoint = self._save_checkpoint(within_epoch=True)
                raise
            finally:
                self._write_rows(self.epoch)
        return self.summary()

    def _run_epochs(self, last_epoch: int) -> None:
        ended = self.epoch + (self._row is not None)
        self.stop_reason = self._limit_reached(last_epoch, ended)
        self._call("on_run_start")
        self.callbacks.check_all()
        self.has_started = True
        # Finish an interrupted epoch even if its last update reached a limit.
        while self._row is not None or self._updates_in_epoch or not self.stop_reason:
            if self._row is None:
                self._update_for_an_epoch(last_epoch)
                self._row = self._closed_row(last_epoch)
            self._finish_epoch(self._row)
            if self.checkpoints is not None and self.checkpoints.is_due(self.epoch):
                self._save_checkpoint()
            self._check()
        if self.checkpoints is not None:
            self._save_checkpoint()

    def _update_for_an_epoch(self, last_epoch: int) -> None:
        """Run the remaining updates of the current epoch."""
        length = self.epoch_length
        self._evaluate_within_epoch(length)  # Repeat an evaluation that was interrupted.
        while self._updates_in_epoch < length and not self.stop_reason:
            with ExitStack() as around:
                for context in self.around_update:
                    around.enter_context(context(self.updates + 1))
                steps_before = self.env_steps
                self.env_steps += self.update_once(self.progress(last_epoch), self.statistics)
            self.updates += 1
            self._updates_in_epoch += 1
            self._score = None  # The score of earlier weights.
            self.wall_time_s = self._now() - self._resumed_at
            self.stop_reason = self.stop_reason or self._limit_reached()
            self._call("on_update_end")
            if not self.stop_reason:
                self.tracker.advance(self._updates_in_epoch / length, self.env_steps)
            self._dump_if_due(steps_before)
            self._evaluate_within_epoch(length)
            store = self.checkpoints
            if store is not None and store.is_overdue(steps_before, self.env_steps):
                self._save_checkpoint(within_epoch=True)
            self._check()

    def _dump_if_due(self, steps_before: int) -> None:
        selection = self.model_selection
        if selection is not None and crosses(
            selection.dump_interval_steps, steps_before, self.env_steps
        ):
            selection.dump(self.env_steps, self.epoch + 1)

    def _evaluate_within_epoch(self, length: int) -> None:
        """Evaluate between two updates of an epoch if the interval in steps has passed."""
        is_within = 0 < self._updates_in_epoch < length and not self.stop_reason
        if self.evaluation_interval_steps and is_within:
            self._evaluate_if_due(self.statistics.reduce())

    def _closed_row(self, last_epoch: int) -> dict[str, float]:
        """Return the metrics of the updates of an epoch."""
        self.learners.foreach_learner(lambda learner: learner.check_weights())
        row: dict[str, float] = {
            "epoch": self.epoch + 1,
            "updates": self.updates,
            "env_steps": self.env_steps,
            **self.statistics.reduce(),
        }
        self.statistics.clear()
        # Select by a training metric first, since the last epoch is always evaluated.
        self._select(row)
        self.stop_reason = self.stop_reason or self._limit_reached(last_epoch, self.epoch + 1)
        return row

    def _finish_epoch(self, closed: dict[str, float]) -> None:
        """Evaluate the policy and write the metrics row of the epoch."""
        metrics = self._evaluate_if_due(closed)
        row = {**closed, **self._evaluated, **metrics}
        self._call("on_epoch_end", row)
        for name in metrics.keys() - self._evaluated.keys():
            del row[name]  # Result of an earlier epoch.
        if self.stop_reason and (not metrics or self._pending is not None):
            self._evaluate_if_due(closed)  # A callback stopped training after the check.
            row.update(self._evaluated)
        row.update(self.settings.metrics(self.progress(self._last_epoch)))
        self.wall_time_s = self._now() - self._resumed_at
        row[TimeEvents.epoch_s.tag] = seconds = self.wall_time_s - self._epoch_began_s
        row[TimeEvents.total_s.tag] = self.wall_time_s
        seconds -= row.get("train/compile_s", 0.0)
        row[TimeEvents.steps_per_second.tag] = (self.env_steps - self._epoch_began_steps) / seconds
        self._rows.append(row)
        self.epoch += 1
        self._write_rows(self.epoch if self._pending is None else self._pending.epoch - 1)
        self._row, self._evaluated = None, {}
        self._updates_in_epoch = 0
        self._epoch_began_s, self._epoch_began_steps = self.wall_time_s, self.env_steps

    def _limit_reached(self, last_epoch: int = 0, epochs: int = -1) -> str:
        """Return the name of the limit that was reached, or an empty string.

        Args:
            last_epoch: Epoch after which training ends; 0: none.
            epochs: Number of finished epochs; -1: within an epoch, which ignores patience and
                `last_epoch`.
        """
        reached = self.limits.reached(self.env_steps, self.wall_time_s, last_epoch, epochs)
        selection = self.model_selection
        if not reached and epochs > 0 and selection is not None:
            return "patience" if selection.patience_is_exhausted(self.limits.patience) else ""
        return reached

    def _save_checkpoint(self, within_epoch: bool = False) -> Path | None:
        """Write a checkpoint; return its path, or None if writing failed.

        Raises:
            TrainingError: If a weight is not finite. The last checkpoint is kept.
        """
        assert self.checkpoints is not None
        started = time.perf_counter()
        within_epoch = within_epoch and (self._row is not None or self._updates_in_epoch > 0)
        if self.checkpoints.holds(self.epoch, self.updates, within_epoch):
            return self.checkpoints.latest
        self.learners.foreach_learner(lambda learner: learner.check_weights())
        self.tracker.sync()
        counters = (self.epoch, self.updates, self.env_steps)
        position = Position(*counters, self._score, within_epoch)
        path = self.checkpoints.save(self.state_dict(), position)
        self.statistics.record(TimeEvents.checkpoint_s, time.perf_counter() - started)
        if path is not None:
            LOG.debug("saved %s in %.3f s", path, time.perf_counter() - started)
            self._call("on_checkpoint")
        return path

    def _check(self) -> None:
        """Raise a pending error or signal; call only while the training state is consistent."""
        self.interruption.check()
        self.callbacks.check_all()

    def _call(self, hook: str, row: dict[str, float] | None = None) -> None:
        """Call a method of all callbacks, then call the environments as requested by callbacks.

        Checkpoints are written later, so they contain no failed call.

        Raises:
            ConfigError: If callbacks request different changes in different processes.
        """
        self.callbacks.call(hook, row)
        self.callbacks.agree(hook)
        self.env_calls.make()

    def _now(self) -> float:
        """Return the time in the first process in seconds, so that all processes stop together."""
        return self.processes.first(time.perf_counter)

    def _evaluate_if_due(self, row: dict[str, float]) -> dict[str, float]:
        """Evaluate if an evaluation is due, and pass the score to the model selection."""
        steps = self.evaluation_interval_steps
        if steps:
            due = crosses(steps, self._evaluated_at, self.env_steps)
            due = due or (bool(self.stop_reason) and self._evaluated_at < self.env_steps)
        else:
            due = (self.epoch + 1) % self.evaluation_interval == 0 or bool(self.stop_reason)
        if not due:
            return {}
        metrics: dict[str, float] = {}
        started = time.perf_counter()
        for of, metrics in self._evaluations():
            if steps:
                metrics["eval/env_steps"] = self.env_steps if of is None else of.env_steps
            self._select(metrics, of)
            self._call("on_evaluation_end", metrics)
            self._row_of(self.epoch + 1 if of is None else of.epoch).update(metrics)
        if self.evaluator is not None:
            before = self._evaluated.get(TimeEvents.evaluate_s.tag, 0.0)
            self._evaluated[TimeEvents.evaluate_s.tag] = before + time.perf_counter() - started
        is_known = bool(metrics) or self.evaluator is None
        if self.model_selection is not None and is_known and not self.model_selection.updates:
            check_metric(self.selection_metric, {*row, *metrics}, self.model)
        return metrics

    def _evaluations(self) -> Iterator[tuple[PendingEvaluation | None, dict[str, float]]]:
        """Evaluate the policy; yield the metrics, each with the evaluation if it was pending.

        In the background, an evaluation is only started, and the metrics are those of the earlier
        evaluation. If training stops, the metrics of both are yielded.
        """
        if self.evaluator is None:
            return
        if self.background is None:
            metrics = self._evaluate_unless_interrupted(self.evaluator)
            self._evaluated_at = self.env_steps
            yield None, metrics
            return
        yield from self._joined(self.background)
        if self._evaluated_at < self.env_steps:
            self.background.begin(self.model, self.epoch + 1, self.env_steps)
            self._evaluated_at = self.env_steps
        if self.stop_reason:
            yield from self._joined(self.background)

    def _joined(
        self, background: BackgroundEvaluator
    ) -> Iterator[tuple[PendingEvaluation, dict[str, float]]]:
        """Wait for the pending evaluation, if any, and yield it with its metrics."""
        with self.interruption.immediate():
            joined = background.join()
        if joined is not None:
            self._keep_return(joined[1])
            yield joined

    @property
    def _pending(self) -> PendingEvaluation | None:
        """The evaluation that runs in another process."""
        return None if self.background is None else self.background.pending

    def _row_of(self, epoch: int) -> dict[str, float]:
        """Return the metrics of an epoch that are not written yet."""
        rows = {row["epoch"]: row for row in self._rows}
        return rows.get(epoch, self._evaluated if epoch == self.epoch + 1 else {})

    def _write_rows(self, last_epoch: int) -> None:
        """Write the rows up to an epoch."""
        while self._rows and self._rows[0]["epoch"] <= last_epoch:
            self.tracker.write(self._rows.pop(0))

    def _evaluate_unless_interrupted(self, evaluator: Evaluator) -> dict[str, float]:
        """Evaluate; restore the state of the evaluator after a signal or an error in user code."""
        state = deepcopy(evaluator.state_dict())
        try:
            with self.interruption.immediate():
                return self.evaluate()
        except (Interrupted, CallbackError):
            evaluator.load_state_dict(state)
            raise

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy, without any effect on training."""
        if self.evaluator is None:
            return {}
        with generators_kept():
            metrics = self.evaluator.evaluate(self.model)
        self._keep_return(metrics)
        return metrics

    def _keep_return(self, metrics: dict[str, float]) -> None:
        self.final_eval_return_mean = metrics.get("eval/episode_return_mean", math.nan)

    def _select(self, metrics: dict[str, float], of: PendingEvaluation | None = None) -> None:
        """Pass the score to the model selection if the metrics contain it.

        Args:
            metrics: The metrics.
            of: Evaluation of earlier weights; None: metrics of the current weights.
        """
        selection, score = self.model_selection, metric_of(metrics, self.selection_metric)
        if selection is None or score is None:
            return
        if self.selection_metric not in metrics and not selection.updates:
            check_metric(self.selection_metric, metrics, self.model)
            notify(f"note: no episode has reported is_success, so {self.selection_metric} is 0")
        if of is None:
            self._score = score
            selection.update(score, self.epoch + 1)
        else:
            selection.update(score, of.epoch, of.weights)
        if not self.stop_reason and selection.patience_is_exhausted(self.limits.patience):
            self.stop_reason = "patience"

    def progress(self, last_epoch: int = 0) -> Progress:
        """Return the progress of training before the next update."""
        last_update = last_epoch * self.epoch_length
        done = self.limits.share(self.env_steps, self.wall_time_s, self.updates, last_update)
        return Progress(self.env_steps, self.updates, self.epoch, done)

    def summary(self) -> TrainingSummary:
        """Return the outcome so far."""
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
            exact=self.exact,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete training state; call between two updates."""
        selection, evaluator = self.model_selection, self.evaluator
        called = self.callbacks.state_dict()
        return {
            **({"callbacks": self.processes.state(called)} if called else {}),
            **({"env_calls": self.env_calls.state_dict()} if self.env_calls else {}),
            "learners": self.learners.state_dict(),
            "model_selection": None if selection is None else selection.state_dict(),
            "evaluator": None if evaluator is None else deepcopy(evaluator.state_dict()),
            "statistics": self.statistics.state_dict(),
            "row": self._row,
            "evaluated": (self._evaluated_at, self._evaluated),
            "rows": list(self._rows),
            "progress": {name: getattr(self, name) for name in PROGRESS},
            "exact": self.exact,
            "has_started": self.has_started,
            "infos": sorted(self.infos.seen),
            "settings": self.settings.state_dict(),
            "generators": self.processes.state(generator_states()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        generators = self.processes.own_state(state["generators"])
        # Settings are applied before the learners are loaded, so that rates of `adaptive_kl` are
        # restored, and again after, so that new values replace weights (SAC's fixed temperatures).
        were_given = "settings" in state and self.settings.load_state_dict(state["settings"])
        if self.settings.are_changed:
            self.learners.change_settings(self.algorithm_config)
        self.learners.load_state_dict(state["learners"])
        if were_given:
            self.learners.change_settings(self.algorithm_config)
        if self.model_selection is not None and state["model_selection"] is not None:
            self.model_selection.load_state_dict(state["model_selection"])
        if self.evaluator is not None and state["evaluator"] is not None:
            self.evaluator.load_state_dict(state["evaluator"])
        called = self.processes.own_state(state["callbacks"]) if "callbacks" in state else ()
        self.callbacks.load_state_dict(called)
        if "env_calls" in state:
            self.env_calls.load_state_dict(state["env_calls"])
        self.statistics.load_state_dict(state["statistics"])
        self._row = state["row"]
        self._evaluated_at, self._evaluated = state.get("evaluated", (0, {}))
        self._rows = list(state.get("rows", ()))
        for name in PROGRESS:
            setattr(self, name, state["progress"][name])
        # Checkpoints of earlier versions lack both entries.
        self.exact = bool(state.get("exact", True))
        self.has_started = bool(state.get("has_started", self.updates))
        self.infos.seen.clear()
        self.infos.seen.update(state.get("infos", ()))
        self.load_experience(state)
        # Restored last, since restoring other parts may draw random numbers.
        load_generator_states(generators)

    def load_experience(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Restore the state of the source of experience."""

    def save_state(self, file_path: str | Path | BinaryIO) -> None:
        """Write `state_dict` to a file of tensors and plain values."""
        data: bytes = dumps(self.state_dict())
        target = Path(file_path) if isinstance(file_path, str) else file_path
        with atomic_write(target) if isinstance(target, Path) else nullcontext(target) as file:
            file.write(data)

    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Restore the state from a file written by `save_state`; loading does not run code.

        Raises:
            RunDirectoryError: If the file is damaged.
        """
        if isinstance(file_path, (str, Path)):
            state = loads(Path(file_path).read_bytes(), file_path)
        else:
            state = loads(file_path.read())
        self.load_state_dict(state)
