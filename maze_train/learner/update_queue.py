"""The queue of updates that a thread makes while the rest of a run continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

from maze_train.core.errors import TrainingError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.learner.config import Progress


class QueueEvents(EventInterface, prefix="learners"):
    """Samples of updates that a queue holds; given = trained + queued + dropped."""

    samples_trained = Event("Samples of updates that ended.", reduce="sum")
    samples_dropped = Event("Samples that found the queue full, or were given up.", reduce="sum")
    samples_queued = Event("Samples that wait or are learned from now.", reduce="last")


class Job(NamedTuple):
    """Experience that waits for its update."""

    experience: Any
    progress: Progress
    size: int
    after: Callable[[], object]


class UpdateQueue:
    """Makes updates one after the other in a thread of this process, while others continue.

    Args:
        update: Makes an update, in the thread.
        size: Experience that may wait, that of the running update not included, >= 1.
        drops: Whether experience is dropped when the queue is full; otherwise the caller waits.

    Attributes:
        queued: Samples of batches that wait or are learned from now.
    """

    def __init__(
        self, update: Callable[[Any, Progress], Statistics], size: int, drops: bool
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
        self, experience: Any, progress: Progress, size: int, after: Callable[[], object]
    ) -> Statistics:
        """Let an update be made of a copy of experience.

        Args:
            experience: The experience.
            progress: Where training stands before the update.
            size: Number of its samples, for the counts.
            after: Called in the thread when the update has ended.

        Returns:
            Statistics of the updates that ended since they were taken last.

        Raises:
            BaseException: The exception of an earlier update; what waited is dropped then.
        """
        with self._changed:
            if not self._drops:
                self._changed.wait_for(lambda: self._error or len(self._jobs) < self._size)
            self._check()
            if len(self._jobs) >= self._size:
                self._drop(size)
                return self._taken()
        job = Job(deepcopy(experience), progress, size, after)  # the thread continues meanwhile
        with self._changed:
            self._check()
            self._jobs.append(job)
            self.queued += size
            self._changed.notify_all()
            return self._taken()

    def wait(self) -> None:
        """Wait until all updates have ended.

        Raises:
            BaseException: The exception of one of them.
        """
        if threading.current_thread() is self._thread:
            raise TrainingError("an update cannot wait for its own end: call this after it")
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._is_running)
            self._check()

    def take(self) -> Statistics:
        """The statistics of updates that ended since they were taken last."""
        with self._changed:
            return self._taken()

    def close(self) -> None:
        """Drop what waits, and end after the running update."""
        with self._changed:
            self._is_closed = True
            self._give_up()
            self._changed.notify_all()
        self._thread.join()

    # -- within the lock -------------------------------------------------------------------------

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
        """Drop all that waits."""
        for job in self._jobs:
            self.queued -= job.size
            self._drop(job.size)
        self._jobs.clear()

    # -- the thread ------------------------------------------------------------------------------

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
        """The oldest job, waited for; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None
            self._is_running = True
            job = self._jobs.popleft()
            self._changed.notify_all()
            return job
