"""Group of data-parallel learners."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from maze_train.core.checks import check_at_least
from maze_train.core.events import Statistics
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners, Result
from maze_train.learner.modules import torch_threads
from maze_train.learner.peers import PeerLearners, check_modules
from maze_train.learner.update_queue import UpdateQueue
from maze_train.workers.backends import WorkerBackend


class LearnerGroup(Learners):
    """Data-parallel learners: one in this process and the others in separate processes.

    All learners receive the same experience and have bit-for-bit identical weights and state. Each
    learner computes values for a slice of the experience and gradients for every n-th sample of a
    minibatch. One all-reduce per gradient step sums the gradients (see `Shard`). Only the modules
    of the first learner are saved and used for acting. The other learners are started on first use.

    If `backend` allows restarts, a learner that dies or hangs is restarted, and all learners repeat
    the update.

    Args:
        learner: The first learner.
        settings: Settings of the group; an int sets only `n_learners`.
        backend: Backend of the run's workers; None: processes on this machine.

    Raises:
        ConfigError: If the modules do not support several learners, or there are too few GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig | int = 1,
        backend: WorkerBackend | None = None,
    ) -> None:
        if isinstance(settings, int):
            settings = LearnerGroupConfig(n_learners=settings)
        super().__init__(learner, settings)
        self._queue: UpdateQueue | None = None
        self._others: PeerLearners | None = None
        if settings.n_learners > 1:
            self._others = PeerLearners(learner, settings, backend)

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.settings.n_learners

    @property
    def first(self) -> Learner[Any, Any, Any]:
        """Learner of this process; waits for background updates."""
        if self._queue is not None:
            self._queue.wait()
        return self._first

    def update(self, experience: object, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        return self._update_of(self.first, experience, progress)

    def _update_of(
        self, first: Learner[Any, Any, Any], experience: object, progress: Progress
    ) -> Statistics:
        with torch_threads(self.settings.n_cpus_per_learner):
            if self._others is None:
                return first.update(experience, progress)
            return self._others.update(experience, progress)

    def async_update(
        self,
        experience: object,
        progress: Progress,
        size: int = 1,
        after: Callable[[], object] = lambda: None,
    ) -> Statistics:
        """Queue an update on a copy of the experience, to be run by a background thread.

        The background thread may change the weights at any time, so actors need a copy of the
        weights; `after` can send this copy. All other methods wait for pending updates.

        Args:
            experience: The experience.
            progress: Training progress before the update.
            size: Number of samples, for the metrics of `QueueEvents`.
            after: Called in the background thread after the update.

        Returns:
            Statistics of updates that finished since the last call.

        Raises:
            ConfigError: If there is no queue (`learner_group.queue_size`).
            MazeTrainError: If an earlier update raised this error.
        """
        if self._queue is None:
            size_of_queue, drops = self.settings.queue_size, self.settings.drop_when_full
            check_at_least("learner_group.queue_size", size_of_queue, 1)
            update = partial(self._update_of, self._first)
            self._queue = UpdateQueue(update, size_of_queue, drops)
        return self._queue.put(experience, progress, size, after)

    def wait(self) -> Statistics:
        """Wait for pending updates of `async_update`, and return their statistics."""
        if self._queue is None:
            return Statistics()
        self._queue.wait()
        return self._queue.take()

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """Call a function with each learner and return the results.

        The function must make the same change to every learner.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        first = self.first
        return [function(first)] if self._others is None else self._others.apply(function)

    def shutdown(self) -> None:
        """Stop the other learners and drop pending updates; a second call does nothing.

        The next call that needs the other learners restarts them.
        """
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._others is not None:
            self._others.shutdown()

    def check_modules(self) -> None:
        """Raise ConfigError if results would depend on the number of learners."""
        if self._others is not None:
            check_modules(self.first, self.n_learners)

    def _change(self) -> None:
        """Synchronise the other learners with the first learner before their next call."""
        if self._others is not None:
            self._others.are_equal = False
