"""Schedule of checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from maze_train.training.manifests import Position

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.training.checkpoints import Checkpoint, CheckpointStore
    from maze_train.training.config import CheckpointConfig

__all__ = ["Checkpoints"]


class Checkpoints:
    """Says when a checkpoint is due, and writes it.

    Args:
        store: Where they are written.
        config: The settings.
        resumed: The checkpoint from which the run continues, which need not be written again.
    """

    def __init__(
        self, store: CheckpointStore, config: CheckpointConfig, resumed: Checkpoint | None = None
    ) -> None:
        self._store = store
        self._config = config
        self._saved_at = time.monotonic()
        self._latest = None if resumed is None else resumed.path
        self._place: tuple[int, int, bool] | None = None
        if resumed is not None:
            self._place = (resumed.epoch, resumed.updates, resumed.within_epoch)

    @property
    def latest(self) -> Path | None:
        """The last checkpoint that was written, or from which the run continues."""
        return self._latest

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch that just ended, the first is 1, ends with a checkpoint."""
        interval = self._config.interval
        return (interval > 0 and epoch % interval == 0) or self.is_overdue()

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is longer ago than the settings allow."""
        minutes = self._config.interval_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * minutes

    def holds(self, epoch: int, updates: int, within_epoch: bool) -> bool:
        """Whether the last checkpoint was taken at this position."""
        return self._place == (epoch, updates, within_epoch)

    def save(
        self,
        state: dict[str, Any],
        *,
        epoch: int,
        updates: int,
        env_steps: int,
        score: float | None,
        within_epoch: bool,
    ) -> Path | None:
        """Write a checkpoint.

        Args:
            state: The state of the trainer.
            epoch: Epochs that ended.
            updates: Updates that were made.
            env_steps: Environment steps that were made.
            score: Last score of the policy; None: there is none.
            within_epoch: Whether an epoch is running.

        Returns:
            Its directory; None if it could not be written.
        """
        position = Position(
            epoch=epoch,
            updates=updates,
            env_steps=env_steps,
            score=score,
            within_epoch=within_epoch,
        )
        path = self._store.save(state, position)
        self._saved_at = time.monotonic()
        if path is not None:
            self._latest, self._place = path, (epoch, updates, within_epoch)
        return path
