"""Limits of training, where it stands, and its outcome."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Limits", "Position", "TrainingSummary"]


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
