"""Limits and the summary of training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


def crosses(interval: int, before: int, after: int) -> bool:
    """Return whether a multiple of `interval` is in (before, after]; False if `interval` is 0."""
    return interval > 0 and after // interval > before // interval


@dataclass(frozen=True)
class Limits:
    """Limits at which training stops; 0 means no limit."""

    n_epochs: int = 0
    total_steps: int = 0
    patience: int = 0
    max_wall_time_s: float = 0.0

    def reached(self, env_steps: int, wall_time_s: float, last_epoch: int, epochs: int) -> str:
        """Return the name of the limit that was reached, excluding patience, or an empty string.

        Args:
            env_steps: Environment steps so far.
            wall_time_s: Wall-clock time so far in seconds.
            last_epoch: Epoch after which training ends; 0: none.
            epochs: Number of finished epochs; -1: within an epoch.
        """
        if 0 < self.total_steps <= env_steps:
            return "total_steps"
        if 0 < last_epoch <= epochs:
            return "n_epochs"
        return "max_wall_time_s" if 0 < self.max_wall_time_s <= wall_time_s else ""

    def share(self, env_steps: int, wall_time_s: float, updates: int, last_update: int) -> float:
        """Return the completed fraction of training, in [0, 1].

        Args:
            env_steps: Environment steps so far.
            wall_time_s: Wall-clock time so far in seconds.
            updates: Updates so far.
            last_update: Update after which training ends; 0: none.
        """
        shares = [0.0]
        if self.total_steps:
            shares.append(env_steps / self.total_steps)
        if last_update:
            shares.append(updates / last_update)
        if self.max_wall_time_s and len(shares) == 1:
            # Used only without other limits: results that depend on time are not reproducible.
            shares.append(wall_time_s / self.max_wall_time_s)
        return min(max(shares), 1.0)


LIMITS = tuple(limit.name for limit in fields(Limits))
"""Stop reasons that correspond to configured limits."""


@dataclass(frozen=True)
class Position:
    """Training progress at a checkpoint."""

    epoch: int
    """Number of finished epochs."""

    updates: int
    """Updates so far."""

    env_steps: int
    """Environment steps so far."""

    score: float | None = None
    """Score of the policy; None if missing or not finite."""

    within_epoch: bool = False
    """Whether the next epoch has started."""

    @property
    def name(self) -> str:
        """Name of the directory of a checkpoint."""
        return f"epoch_{self.epoch:06d}" + (
            f"_update_{self.updates:06d}" if self.within_epoch else ""
        )


@dataclass(frozen=True)
class TrainingSummary:
    """Outcome of training, as written to `summary.json`."""

    stop_reason: str
    """total_steps, n_epochs, patience, max_wall_time_s, interrupted or error."""

    epochs: int
    updates: int
    env_steps: int
    wall_time_s: float
    steps_per_second: float
    """Environment steps of training per second of wall time; the time includes evaluation."""

    best_metric: float
    """Best value of the selection metric; NaN if the metric was never reported."""

    best_epoch: int
    final_eval_return_mean: float
    """Mean return of the last evaluation; NaN without evaluations."""

    exact: bool = True
    """Whether the results are identical to the results of an uninterrupted run. False if the run
    was resumed and the state of an environment could not be restored."""

    final_test: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics (and `epoch`) of the policies `last` and `best` in the test after training; empty
    without a test."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, keyed by name."""
        return asdict(self)
