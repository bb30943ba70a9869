"""Services and limits that a trainer gets from whoever runs it, and the outcome of training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from maze_train.tracking.tracker import RunInfo, Tracker

if TYPE_CHECKING:
    from maze_train.training.checkpoint_schedule import Checkpoints
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.interruption import Interruption
    from maze_train.training.model_selection import BestModelSelection

__all__ = ["Limits", "Position", "TrainerServices", "TrainingSummary"]


@dataclass(frozen=True)
class Limits:
    """Limits at which training stops; 0 means no limit."""

    n_epochs: int = 0
    total_steps: int = 0
    patience: int = 0
    max_wall_time_s: float = 0.0


@dataclass(frozen=True)
class Position:
    """Position of training at a checkpoint."""

    epoch: int
    """Epochs that are complete."""

    updates: int
    """Updates so far."""

    env_steps: int
    """Environment steps so far."""

    score: float | None = None
    """Score of the policy; None if there is none, or if it is not finite."""

    within_epoch: bool = False
    """Whether the next epoch is under way."""

    @property
    def name(self) -> str:
        """Name of the directory of a checkpoint."""
        return f"epoch_{self.epoch:06d}" + (
            f"_update_{self.updates:06d}" if self.within_epoch else ""
        )


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


def _silent_tracker() -> Tracker:
    return Tracker([], RunInfo())


@dataclass(frozen=True, kw_only=True)
class TrainerServices:
    """Everything around training that does not depend on the algorithm.

    Attributes:
        tracker: Takes the metrics; by default it keeps them in `history` and writes nothing.
        evaluator: Judges the policy; None: the training return selects the best one.
        model_selection: Keeps the best policy; None: nothing is kept.
        limits: When to stop; None: those of the algorithm.
        evaluation_interval: Epochs from one evaluation to the next.
        selection_metric: Metric that `model_selection` is told.
        checkpoints: Writes where training stands; None: nothing is written.
        interruption: Tells whether a signal came; None: no signals are taken.
    """

    tracker: Tracker = field(default_factory=_silent_tracker)
    evaluator: Evaluator | None = None
    model_selection: BestModelSelection | None = None
    limits: Limits | None = None
    evaluation_interval: int = 1
    selection_metric: str = "eval/episode_return_mean"
    checkpoints: Checkpoints | None = None
    interruption: Interruption | None = None
