"""Schedule of checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from maze_train.training.checkpoints import Checkpoint, CheckpointStore
    from maze_train.training.outcome import Position


class Checkpoints:
    """Says when a checkpoint is due, and writes it.

    Args:
        store: Where they are written; its settings say when.
        resumed: The checkpoint from which the run continues, which need not be written again.
    """

    def __init__(self, store: CheckpointStore, resumed: Checkpoint | None = None) -> None:
        self._store = store
        self._saved_at = time.monotonic()
        self.latest = None if resumed is None else resumed.path
        """The last checkpoint that was written, or from which the run continues."""
        self._position: Position | None = resumed

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch that just ended, the first is 1, ends with a checkpoint."""
        interval = self._store.config.interval
        return (interval > 0 and epoch % interval == 0) or self.is_overdue()

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is longer ago than the settings allow."""
        minutes = self._store.config.interval_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * minutes

    def holds(self, epoch: int, updates: int, within_epoch: bool) -> bool:
        """Whether the last checkpoint was taken at this position."""
        last, here = self._position, (epoch, updates, within_epoch)
        return last is not None and here == (last.epoch, last.updates, last.within_epoch)

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint.

        Args:
            state: The state of the trainer.
            position: Where training stands.

        Returns:
            Its directory; None if it could not be written.
        """
        path = self._store.save(state, position)
        self._saved_at = time.monotonic()
        if path is not None:
            self.latest, self._position = path, position
        return path
