"""Curricula: changes to the environments in stages, triggered by steps or by a metric."""

from __future__ import annotations

import math
from typing import Any

from maze_train.core.events import Event, EventInterface
from maze_train.core.notices import notify, warn
from maze_train.envs.calls import EnvCall
from maze_train.training.callbacks import Callback, TrainingView
from maze_train.training.config import CurriculumConfig, StageConfig
from maze_train.training.evaluators import check_metric, metric_of


class CurriculumEvents(EventInterface, prefix="curriculum"):
    """Progress of a curriculum."""

    stage = Event("Stage at the end of the updates of the epoch, from 0.", reduce="last")


class Curriculum(Callback):
    """Changes the environments at the beginning of each stage of a curriculum.

    Stages with a step condition begin at the end of an update. Stages with a metric condition begin
    at the end of an epoch.

    Args:
        config: The stages.

    Attributes:
        stage: Index of the current stage; -1 before the run starts.
    """

    def __init__(self, config: CurriculumConfig) -> None:
        self.config = config
        self.stage = -1
        self._values: list[float] = []  # Last values of the metric in this stage.
        self._was_seen = False

    def on_run_start(self, run: TrainingView) -> None:
        """Begin the first stage of a new run, and check the names in the other stages."""
        if self.stage >= 0:
            return
        for i in range(1, len(self.config.stages)):
            self._call_envs(run, i, only_checks=True)
        self.stage = 0
        self._call_envs(run, 0)

    def on_update_end(self, run: TrainingView) -> None:
        """Begin all stages whose number of steps has been reached."""
        steps = run.progress.env_steps
        while (following := self._following) is not None:
            if following.steps is None or steps < following.steps:
                break
            self._begin(run, self.stage + 1, "")

    def on_epoch_end(self, run: TrainingView) -> None:
        """Report the stage, then begin the next or previous stage if the metric requires this."""
        run.record_event(CurriculumEvents.stage, self.stage)
        config, metrics = self.config, run.metrics
        if config.metric in metrics:
            self._was_seen = True
        else:
            self._check_metric(run, metrics)
        value = metric_of(metrics, config.metric)
        if value is None or not math.isfinite(value):
            return
        self._values = [*self._values, value][-config.window :]
        if len(self._values) < config.window:
            return
        mean = sum(self._values) / config.window
        why = f": {config.metric} is {mean:.3g}"
        following, current = self._following, config.stages[self.stage]
        if following is not None and has_reached(following, mean):
            self._begin(run, self.stage + 1, why)
        elif current.back is not None and (
            mean <= current.back if current.above is not None else mean >= current.back
        ):
            self._begin(run, self.stage - 1, why)

    def on_run_end(self, run: TrainingView) -> None:
        """Warn if the metric that begins the next stage was never reported."""
        following = self._following
        if following is not None and following.steps is None and not self._was_seen:
            warn(f"curriculum.metric = {self.config.metric}: no epoch reported it")

    @property
    def _following(self) -> StageConfig | None:
        """The next stage; None in the last stage."""
        stages = self.config.stages
        return stages[self.stage + 1] if self.stage + 1 < len(stages) else None

    def _check_metric(self, run: TrainingView, metrics: dict[str, float]) -> None:
        """Raise ConfigError if the metric will never be reported."""
        config = self.config
        is_used = any(stage.steps is None for stage in config.stages[1:])
        of_training = not config.metric.startswith("eval/")
        is_due = of_training or any(name.startswith("eval/") for name in metrics)
        if is_used and is_due and not self._was_seen:
            check_metric(config.metric, metrics, run.model, "curriculum.metric")

    def _begin(self, run: TrainingView, stage: int, why: str) -> None:
        self.stage, self._values = stage, []
        self._call_envs(run, stage)
        steps, last = run.progress.env_steps, len(self.config.stages) - 1
        notify(f"curriculum: stage {stage} (last: {last}) begins at {steps:,} steps{why}")

    def _call_envs(self, run: TrainingView, stage: int, *, only_checks: bool = False) -> None:
        """Change the environments, or check that they support the changes of a stage."""
        for call in calls_of(self.config.stages[stage], f"curriculum.stages[{stage}]", only_checks):
            run.add_call(call, evaluate=self.config.evaluate)

    def state_dict(self) -> dict[str, Any]:
        """Return the stage and the last values of the metric."""
        return {"stage": self.stage, "values": self._values, "was_seen": self._was_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        self.stage, self._values = state["stage"], list(state["values"])
        self._was_seen = state["was_seen"]


def has_reached(stage: StageConfig, mean: float) -> bool:
    """Return whether the mean of the metric satisfies the condition `above` or `below`."""
    if stage.above is not None:
        return mean >= stage.above
    return stage.below is not None and mean <= stage.below


def calls_of(stage: StageConfig, key: str, only_checks: bool) -> list[EnvCall]:
    """Return the changes of a stage: attributes first, then calls."""
    found = [
        EnvCall(name, [value], {}, True, only_checks, f"{key}.attributes")
        for name, value in stage.attributes.items()
    ]
    for name, given in stage.calls.items():
        kwargs = given if isinstance(given, dict) else {}
        args = given if isinstance(given, list) else [] if isinstance(given, dict) else [given]
        found.append(EnvCall(name, args, kwargs, False, only_checks, f"{key}.calls"))
    return found
