"""Result of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.training.outcome import TrainingSummary
    from maze_train.training.policy_files import TrainedPolicy

__all__ = ["TrainingResult"]


@dataclass(frozen=True)
class TrainingResult:
    """Result of a finished run."""

    run_dir: Path
    """Directory of the run."""

    summary: TrainingSummary
    """The outcome in numbers."""

    history: list[dict[str, float]]
    """One row of metrics per epoch."""

    policy: TrainedPolicy
    """The best policy, or the last one if none was selected."""

    missing: tuple[str, ...] = ()
    """Results that could not be written, as on a full disk; `maze-run` fails then."""

    @property
    def best_metric(self) -> float:
        """Best value of the metric that selects the policy; the objective of a sweep."""
        return self.summary.best_metric
