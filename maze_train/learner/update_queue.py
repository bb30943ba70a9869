"""Queue of updates to run in a background thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

from maze_train.core.errors import TrainingError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.learner.config import Progress


class QueueEvents(EventInterface, prefix="learners"):
    """Metrics of the update queue; submitted = trained + queued + dropped samples."""

    samples_trained = Event("Samples of finished updates.", reduce="sum")
    samples_dropped = Event("Samples dropped: queue full or failed update.", reduce="sum")
    samples_queued = Event("Samples of pending and running updates.", reduce="last")


class Job(NamedTuple):
    """Pending update."""

    experience: object
    progress: Progress
    size: int
    after: Callable[[], object]


class UpdateQueue:
    """Runs updates one by one in a background thread.

    Args:
        update: Runs an update; called in the background thread.
        size: Maximum number of pending updates, excluding the running one, >= 1.
        drops: Whether to drop experience if the queue is full; otherwise the caller waits.

    Attributes:
        queued: Number of samples in pending and running updates.
    """

    def __init__(
        self, update: Callable[[object, Progress], Statistics], size: int, drops: bool
    ) -> None:
        self.queued = 0
        self._update, self._size, self._drops = update, size, drops
        self._jobs: deque[Job] = deque()
        self._is_running = self._is_closed = False
        self._results = Statistics()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="learner", daemon=True)
        self._thread.start()

    def put(
        self, experience: object, progress: Progress, size: int, after: Callable[[], object]
    ) -> Statistics:
        """Queue an update on a copy of the experience.

        Args:
            experience: The experience.
            progress: Training progress before the update.
            size: Number of samples, for the metrics.
            after: Called in the background thread after the update.

        Returns:
            Statistics of updates that finished since the last call.

        Raises:
            BaseException: If an earlier update raised this exception. Pending updates are dropped.
        """
        with self._changed:
            if not self._drops:
                self._changed.wait_for(lambda: self._error or len(self._jobs) < self._size)
            self._check()
            if len(self._jobs) >= self._size:
                self._drop(size)
                return self._taken()
        job = Job(deepcopy(experience), progress, size, after)  # Copy without holding the lock.
        with self._changed:
            self._check()
            self._jobs.append(job)
            self.queued += size
            self._changed.notify_all()
            return self._taken()

    def wait(self) -> None:
        """Wait until all updates have finished.

        Raises:
            BaseException: If an update raised this exception.
        """
        if threading.current_thread() is self._thread:
            raise TrainingError("an update cannot wait for itself: call wait() outside updates")
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._is_running)
            self._check()

    def take(self) -> Statistics:
        """Return the statistics of updates that finished since the last call."""
        with self._changed:
            return self._taken()

    def close(self) -> None:
        """Drop pending updates, and stop after the running update."""
        with self._changed:
            self._is_closed = True
            self._give_up()
            self._changed.notify_all()
        self._thread.join()

    # The caller of the next four methods holds the lock.

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _taken(self) -> Statistics:
        results, self._results = self._results, Statistics()
        results.record(QueueEvents.samples_queued, float(self.queued))
        return results

    def _drop(self, size: int) -> None:
        self._results.record(QueueEvents.samples_dropped, float(size))

    def _give_up(self) -> None:
        """Drop all pending updates."""
        for job in self._jobs:
            self.queued -= job.size
            self._drop(job.size)
        self._jobs.clear()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            error: BaseException | None = None
            statistics = Statistics()
            try:
                statistics = self._update(job.experience, job.progress)
                job.after()
            except BaseException as raised:
                error = raised
            with self._changed:
                self.queued -= job.size
                self._is_running = False
                if error is None:
                    self._results.merge(statistics)
                    self._results.record(QueueEvents.samples_trained, float(job.size))
                else:
                    self._error = error
                    self._drop(job.size)
                    self._give_up()
                self._changed.notify_all()

    def _next(self) -> Job | None:
        """Wait for the oldest job, and return it; return None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None
            self._is_running = True
            job = self._jobs.popleft()
            self._changed.notify_all()
            return job
