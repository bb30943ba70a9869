"""Group of data-parallel learners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze_train.core.events import Statistics
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners, Result
from maze_train.learner.modules import torch_threads
from maze_train.learner.peers import PeerLearners, check_modules
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
        self._others: PeerLearners | None = None
        if settings.n_learners > 1:
            self._others = PeerLearners(learner, settings, backend)

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.settings.n_learners

    def update(self, experience: object, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        if self._others is None:
            return super().update(experience, progress)
        with torch_threads(self.settings.n_cpus_per_learner):
            return self._others.update(experience, progress)

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """Call a function with each learner and return the results.

        The function must make the same change to every learner.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        first = self.first
        return [function(first)] if self._others is None else self._others.apply(function)

    def shutdown(self) -> None:
        """Stop the other learners; a second call does nothing.

        The next call that needs the other learners restarts them.
        """
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
