"""Callbacks: user code that is called during a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol, overload

from torch import nn

from maze_train.core.errors import CallbackError, ConfigError, one_of
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import notify, tell_traceback, warn
from maze_train.core.run_directory import FAILURES, MetricsRow
from maze_train.core.step_end import StepBatch
from maze_train.data.rollout import Rollout
from maze_train.envs.calls import CALL_ENVS, EnvCall, EnvCalls
from maze_train.learner.config import Progress
from maze_train.learner.group import LearnerGroup
from maze_train.learner.learner import Learner
from maze_train.learner.ranks import Ranks
from maze_train.tracking.media import Values, as_numbers, as_pixels
from maze_train.tracking.tracker import Tracker
from maze_train.training.changes import ChangedSettings, split
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.config import AlgorithmConfig
from maze_train.training.generators import generators_kept

PREFIX = "callback"
"""Prefix of the metrics that callbacks add."""


NO_CALLS = ("on_checkpoint", "on_run_end")
"""Callback methods that cannot change the run, since they are not repeated when a run is
resumed."""


class Rows(Sequence[MetricsRow]):
    """Read-only view of rows of metrics; accessing a row returns a copy.

    Args:
        rows: The rows.
    """

    def __init__(self, rows: Sequence[MetricsRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> MetricsRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[MetricsRow]: ...

    def __getitem__(self, index: int | slice) -> MetricsRow | list[MetricsRow]:
        """Return a copy of a row, or of each row of a slice."""
        if isinstance(index, slice):
            return [dict(row) for row in self._rows[index]]
        return dict(self._rows[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self._rows) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like list

    def __repr__(self) -> str:
        return repr(self._rows)


class RunObjects(Protocol):
    """Members of a `Run` that are available to callbacks."""

    tracker: Tracker
    env_calls: EnvCalls
    ranks: Ranks
    checkpoints: CheckpointStore | None


class Training(Protocol):
    """Members of a `Trainer` that are available to callbacks."""

    statistics: Statistics
    learners: LearnerGroup
    model: nn.Module
    stop_reason: str
    has_started: bool
    settings: ChangedSettings

    @property
    def run(self) -> RunObjects:
        """Objects of the run."""
        ...

    def progress(self, last_epoch: int = 0) -> Progress:
        """Progress of training before the next update."""
        ...

    @property
    def algorithm_config(self) -> AlgorithmConfig:
        """The current settings of the algorithm."""
        ...

    def set(self, key: str, value: object) -> None:
        """Change a setting of the algorithm."""
        ...


class TrainingView:
    """A run as seen by callbacks: read access, `record`, `set` and `stop`.

    Args:
        trainer: The `Trainer`.
        last_epoch: Epoch after which training ends; 0: none.
    """

    def __init__(self, trainer: Training, last_epoch: int) -> None:
        self._trainer = trainer
        self._last_epoch = last_epoch
        self._hook = ""
        self._row: dict[str, float] | None = None
        self._seen: Any = None

    @property
    def progress(self) -> Progress:
        """Finished epochs, updates, environment steps, and the finished fraction of training."""
        return self._trainer.progress(self._last_epoch)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics, keyed by name.

        `on_evaluation_end`: metrics of the evaluation. `on_epoch_end`: metrics of the updates and
        the evaluation. Other methods: metrics of the updates of the current epoch so far.
        """
        return self._trainer.statistics.reduce() if self._row is None else dict(self._row)

    @property
    def history(self) -> Sequence[dict[str, float]]:
        """One row of metrics per finished epoch: a read-only sequence whose rows are copies."""
        return Rows(self._trainer.run.tracker.history)

    @property
    def algorithm(self) -> AlgorithmConfig:
        """A copy of the current settings of the algorithm."""
        return deepcopy(self._trainer.algorithm_config)

    @property
    def learner(self) -> Learner[Any, Any, Any]:
        """The learner of this process; read-only."""
        return self._trainer.learners.first

    @property
    def model(self) -> nn.Module:
        """The trained policy after all queued updates; read-only."""
        _ = self.learner  # Waits for queued updates.
        return self._trainer.model

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run, to which callbacks may write; None if the run writes no files."""
        return self._trainer.run.tracker.run_info.run_dir

    @property
    def checkpoint(self) -> Path | None:
        """Path of the last checkpoint, if any."""
        checkpoints = self._trainer.run.checkpoints
        return None if checkpoints is None else checkpoints.latest

    @property
    def rollouts(self) -> Mapping[str, Rollout]:
        """New rollouts in `on_rollout_end`, keyed by module ID; valid until the next rollout.

        Rollouts are read-only. The mapping is empty for ES and in all other callback methods.
        """
        return self._seen or {} if self._hook == "on_rollout_end" else {}

    @property
    def step(self) -> StepBatch[Any] | None:
        """Results of the step in `on_step`, see `StepBatch`; read-only. None in other methods."""
        step: StepBatch[Any] | None = self._seen if self._hook == "on_step" else None
        return step

    @property
    def stop_reason(self) -> str:
        """Reason why training ends or ended; empty while training continues."""
        return self._trainer.stop_reason

    def record(self, name: str, value: float) -> None:
        """Add the metric `callback/<name>` to the epoch.

        Values recorded within an epoch are averaged; a value recorded in `on_epoch_end` replaces
        the mean.
        """
        self.record_event(Event.of_tag(f"{PREFIX}/{name}", "Metric of a callback."), value)

    def record_event(self, event: Event, value: float) -> None:
        """Record a value of a declared event; see `record`."""
        if self._row is not None:
            self._row[event.tag] = float(value)
        else:
            self._trainer.statistics.record(event, float(value))

    def log_image(self, name: str, image: Values) -> None:
        """Log `callback/<name>` to TensorBoard and services, at the current environment step.

        Args:
            name: Name of the image.
            image: Array or tensor `[H, W]` or `[H, W, C]` with 1, 3 or 4 channels, uint8 or floats
                in [0, 1].

        Raises:
            ConfigError: If `image` is not an image.
        """
        pixels, tag, step = as_pixels(name, image), *self._place(name)
        self._trainer.run.tracker.log("image", tag, lambda w: w.log_image(tag, pixels, step))

    def log_histogram(self, name: str, values: Values) -> None:
        """Log a histogram of an array or a tensor; otherwise like `log_image`."""
        numbers, tag, step = as_numbers(name, values), *self._place(name)
        self._trainer.run.tracker.log(
            "histogram", tag, lambda w: w.log_histogram(tag, numbers, step)
        )

    def log_video(self, name: str, frames: Values, fps: float = 30.0) -> None:
        """Log frames `[T, H, W, C]` as an animated image; otherwise like `log_image`."""
        pixels, tag, step = as_pixels(name, frames, has_frames=True), *self._place(name)
        self._trainer.run.tracker.log("video", tag, lambda w: w.log_video(tag, pixels, fps, step))

    def log_text(self, name: str, text: str) -> None:
        """Log a text; otherwise like `log_image`."""
        tag, step = self._place(name)
        self._trainer.run.tracker.log("text", tag, lambda w: w.log_text(tag, text, step))

    def _place(self, name: str) -> tuple[str, int]:
        """Return the tag and the step of logged content."""
        return f"{PREFIX}/{name}", self.progress.env_steps

    def call_envs(
        self, method: str, /, *args: object, evaluate: bool = False, **kwargs: object
    ) -> None:
        """Call a method of every training environment after the current update.

        The call is made after the current methods of all callbacks have returned; calls in
        `on_step` and `on_rollout_end` are made after `on_update_end`. The method is looked up in
        the wrappers, starting with the outermost, and then in the environment. Resumed runs,
        restarted workers and new environments repeat all calls at the same steps.

        Args:
            method: Name of the method.
            *args: Positional arguments: plain values, lists, dicts and arrays.
            evaluate: Whether to also call evaluation environments.
            **kwargs: Keyword arguments.

        Raises:
            ConfigError: If an argument has an unsupported type, the name is not allowed, or the run
                has no environments of the requested kind. If the method does not exist or raises an
                error, the run ends when the call is made.
        """
        self.add_call(EnvCall(method, [*args], kwargs), evaluate=evaluate)

    def set_env_attr(self, name: str, value: object, *, evaluate: bool = False) -> None:
        """Set an existing attribute of every training environment; otherwise like `call_envs`.

        Args:
            name: Name of the attribute.
            value: New value.
            evaluate: See `call_envs`.
        """
        key = "run.set_env_attr"
        self.add_call(EnvCall(name, [value], is_attribute=True, key=key), evaluate=evaluate)

    def value(self, key: str) -> float:
        """Return the current value of a number among the settings of the algorithm.

        The value of a schedule is the value at the current progress; the value of a learning rate
        that adapts to the KL divergence is the current rate.

            run.value("algorithm.lr")

        Args:
            key: Dotted name, such as `algorithm.lr`, or `algorithm.overrides.wolf.lr` for a single
                module.

        Raises:
            ConfigError: If there is no such setting, or its value is not a number.
        """
        value = self._trainer.settings.value(key, self.progress)
        if value is None:
            module_id = split(key.partition(".")[2])[0] or next(iter(self.learner.modules))
            optimizer = self.learner.get_optimizers_for_module(module_id)[0][1]
            value = optimizer.set_lr(self.progress)
        return value

    def set(self, key: str, value: object) -> None:
        """Change a setting of the algorithm during training.

        Checkpoints contain the changes, so a resumed run repeats them. The values are recorded as
        metrics `settings/<name>`.

        Args:
            key: Dotted name, such as `algorithm.entropy_coef`, or `algorithm.overrides.wolf.lr` for
                a single module; fields marked `IN_RUN` may change.
            value: New value, as in a configuration, including schedules such as `linear_0.001`.

        Raises:
            ConfigError: If the setting must not change, the value is invalid, or `set` is called in
                `on_checkpoint` or `on_run_end`.
        """
        if self._may_act("run.set", key):
            self._trainer.set(key, value)

    def add_call(self, call: EnvCall, *, evaluate: bool = False) -> None:
        """Add a call of an environment method; see `call_envs`."""
        if self._may_act(call.key, call.name):
            self._trainer.run.env_calls.add(call, evaluate=evaluate)

    def _may_act(self, key: str, value: object) -> bool:
        """Return False in `on_run_start` of a resumed run: the checkpoint contains the change.

        Raises:
            ConfigError: If called in a method of `NO_CALLS`.
        """
        if self._hook in NO_CALLS:
            problem = f"not available in {self._hook}, because resumed runs do not repeat it"
            raise ConfigError(key, problem, value)
        if self._hook == "on_run_start" and self._trainer.has_started:
            notify(f"note: {key} ({value}) in on_run_start has no effect in a resumed run")
            return False
        return True

    def stop(self, reason: str) -> None:
        """Stop training after this update; the epoch is finished, evaluated and saved first.

        Args:
            reason: Reason printed at the end and stored in `summary.json` as `stop_reason`.

        Raises:
            ConfigError: If `reason` is empty or reserved for failed runs.
        """
        if not reason.strip() or reason in FAILURES:
            raise ConfigError("reason", "expected a short, unreserved text", reason)
        self._trainer.stop_reason = self._trainer.stop_reason or reason


class Callback:
    """Base class of callbacks. Subclasses override some methods; the defaults do nothing.

    Callbacks may use the global random number generators without affecting training. If a callback
    raises an exception, a checkpoint is saved and the run ends with a `CallbackError`.

    Raises:
        ConfigError: If a subclass defines an unknown method `on_...`.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        called = [name for name in vars(Callback) if name.startswith("on_")]
        for name, value in vars(cls).items():
            if name.startswith("on_") and callable(value) and name not in called:
                problem = f"no such callback method: {one_of(name, called)}"
                raise ConfigError(f"{cls.__name__}.{name}", problem)

    def on_run_start(self, run: TrainingView) -> None:
        """Called before the first update, and when a run is resumed."""

    def on_step(self, run: TrainingView) -> None:
        """Called after each step of the environments; `run.step` contains the results.

        Requires that the main process steps the environments: not available with actors, es,
        impala and bc.
        """

    def on_rollout_end(self, run: TrainingView) -> None:
        """Called after a rollout was collected, before an update uses it; see `run.rollouts`.

        Not called for BC. `run.progress` does not include this rollout.
        """

    def on_update_end(self, run: TrainingView) -> None:
        """Called after each update."""

    def on_evaluation_end(self, run: TrainingView) -> None:
        """Called after each evaluation; `run.metrics` contains the metrics of the evaluation."""

    def on_epoch_end(self, run: TrainingView) -> None:
        """Called after each epoch and evaluation, before the row of metrics is written."""

    def on_checkpoint(self, run: TrainingView) -> None:
        """Called after a checkpoint was written; `run.checkpoint` is its path."""

    def on_run_end(self, run: TrainingView) -> None:
        """Called at the end of the run, even after an error or a signal; see `run.stop_reason`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints: plain values, arrays and tensors, keyed by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`; called when a run is resumed."""


class Callbacks:
    """The callbacks of a run, called in order.

    Args:
        callbacks: The callbacks.
        trainer: The `Trainer`.
    """

    def __init__(self, callbacks: Sequence[Callback], trainer: Training) -> None:
        self._callbacks = list(callbacks)
        self._trainer = trainer
        self._view = TrainingView(trainer, 0)
        self._failure: CallbackError | None = None
        self._defining = {
            hook: [c for c in callbacks if getattr(type(c), hook) is not getattr(Callback, hook)]
            for hook in vars(Callback)
            if hook.startswith("on_")
        }

    def __len__(self) -> int:
        return len(self._callbacks)

    @property
    def has_failed(self) -> bool:
        """Whether an exception of a callback is pending."""
        return self._failure is not None

    def defining(self, hook: str) -> list[str]:
        """Return the names of the callbacks that define a method."""
        return [name_of(callback) for callback in self._defining[hook]]

    @contextmanager
    def running(self, last_epoch: int) -> Iterator[None]:
        """Context manager around training that always calls `on_run_end`.

        Raises:
            CallbackError: If `on_run_end` failed and no other error ended the run.
        """
        self._view, self._failure = TrainingView(self._trainer, last_epoch), None
        try:
            yield
        except BaseException as error:
            is_signal = isinstance(error, KeyboardInterrupt)
            self._trainer.stop_reason = "interrupted" if is_signal else "error"
            self._failure = None
            self.call("on_run_end")
            if self._failure is not None:
                tell_traceback(self._failure.__cause__ or self._failure)
                warn(str(self._failure))
            raise
        self.call("on_run_end")
        self.check()

    def call(
        self, hook: str, row: dict[str, float] | None = None, seen: object | None = None
    ) -> None:
        """Call a method of all callbacks; `check` raises their exceptions later.

        Args:
            hook: Name of the method.
            row: Metrics of an evaluation or epoch that ended, which callbacks may extend.
            seen: The rollouts of `on_rollout_end`, or the results of `on_step`.
        """
        defining = self._defining[hook]
        if self._failure is not None or not defining:
            return
        view = self._view
        view._row, view._hook, view._seen = row, hook, seen
        with generators_kept():
            for callback in defining:
                try:
                    getattr(callback, hook)(self._view)
                except Exception as error:
                    problem = f"{name_of(callback)}.{hook} failed: {type(error).__name__}: {error}"
                    self._failure = CallbackError(problem)
                    self._failure.__cause__ = error
                    break
        view._row, view._hook, view._seen = None, "", None

    def check(self) -> None:
        """Raise the pending exception of a callback; call while the training state is consistent.

        Raises:
            CallbackError: If a callback raised an exception. The message names the class
                and the method.
        """
        if self._failure is not None:
            raise self._failure

    def check_all(self) -> None:
        """Raise the pending exception of a callback in any process; see `check`.

        Raises:
            CallbackError: If a callback raised an exception. The message names the class
                and the method, or refers to the process.
        """
        if self and self._trainer.run.ranks.largest(self.has_failed):
            self.check()
            raise CallbackError("a callback failed in another process, which shows the error")

    def agree(self, hook: str) -> None:
        """Stop all processes if a callback ends training in one process, and compare the changes.

        If a callback failed, the changes are not compared, because the run ends.

        Args:
            hook: Name of the method that was called.

        Raises:
            ConfigError: If callbacks request different changes in different processes.
        """
        trainer = self._trainer
        if not self or trainer.run.ranks.count == 1:
            return
        changes = {
            "run.set": repr(trainer.settings.changed),
            CALL_ENVS: trainer.run.env_calls.added,
        }
        own = trainer.stop_reason, self.has_failed, changes
        reasons, failures, others = zip(*trainer.run.ranks.gather(own), strict=True)
        trainer.stop_reason = next(filter(None, reasons), "")
        for key, value in changes.items():
            if not any(failures) and len({other[key] for other in others}) > 1:
                problem = f"differs between processes after {hook}; callbacks must request the "
                problem += "same changes in every process"
                raise ConfigError(key, problem, value)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all callbacks in order, each with the name of its class."""
        return [
            {"class": name_of(callback), "state": deepcopy(callback.state_dict())}
            for callback in self._callbacks
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of callbacks, matched by class and order.

        Prints a note for callbacks that were added or removed since the state was saved.
        """
        left = list(state)
        for callback in self._callbacks:
            name = name_of(callback)
            found = next((entry for entry in left if entry["class"] == name), None)
            if found is None:
                notify(f"callback {name} has no state in the checkpoint and starts from scratch")
            else:
                left.remove(found)
                callback.load_state_dict(found["state"])
        for entry in left:
            name = entry["class"]
            notify(f"callback {name} of the checkpoint is not in this run; its state is dropped")


class StopAtReturn(Callback):
    """Ends training when the mean return of an evaluation reaches a threshold.

    Args:
        threshold: Return at which training ends.
        metric: Metric to compare. Epochs without this metric are skipped.
    """

    def __init__(self, threshold: float, metric: str = "eval/episode_return_mean") -> None:
        self.threshold = float(threshold)
        self.metric = metric
        self._last: float | None = None

    def on_run_start(self, run: TrainingView) -> None:
        """End a resumed run that had already reached the threshold."""
        self._stop_if_reached(run)

    def on_epoch_end(self, run: TrainingView) -> None:
        """Compare the metric with the threshold if the metric was reported."""
        self._last = run.metrics.get(self.metric, self._last)
        self._stop_if_reached(run)

    def on_run_end(self, run: TrainingView) -> None:
        """Warn if the metric was never reported."""
        if self._last is None and run.history:
            names = ", ".join(name for name in run.history[-1] if "/" in name)
            warn(f"StopAtReturn: no epoch reported {self.metric}; available: {names}")

    def _stop_if_reached(self, run: TrainingView) -> None:
        if self._last is not None and self._last >= self.threshold:
            run.stop(f"{self.metric} {self._last:g} >= {self.threshold:g}")

    def state_dict(self) -> dict[str, Any]:
        """Return the last value of the metric."""
        return {"metric": self.metric, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the last value if the value belongs to the same metric."""
        if state["metric"] == self.metric:
            self._last = state["last"]


def name_of(callback: Callback) -> str:
    """Return the dotted name of the class of a callback."""
    return f"{type(callback).__module__}.{type(callback).__qualname__}"
