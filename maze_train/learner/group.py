"""One interface to learners in this process and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from maze_train.core.checks import check_at_least
from maze_train.core.events import Statistics
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners, Result
from maze_train.learner.modules import DEFAULT_MODULE, ModuleSource, torch_threads
from maze_train.learner.others import OtherLearners
from maze_train.learner.update_queue import UpdateQueue
from maze_train.workers.places import Place


class LearnerGroup(Learners):
    """The learners of a trainer: one in this process, and further ones in their own processes.

    All get the same experience, and have the same weights and the same state to the bit. Each
    computes a part of the values of experience and every n-th sample of a minibatch; one exchange
    per gradient step sums the gradients (see `Shard`). The first learner runs in this process; its
    modules act and are saved. The others are started at the first call that needs them.

    If `place` allows it, a learner that dies or hangs is started again: all learners then repeat
    the update.

    Args:
        learner: The first learner.
        settings: Settings of the group; a number: that many learners, and defaults.
        place: Where the workers of the run are started; None: learners are processes of this
            machine.

    Raises:
        ConfigError: If the modules cannot be trained by several learners, or there are too few
            GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig | int = 1,
        place: Place | None = None,
    ) -> None:
        if isinstance(settings, int):
            settings = LearnerGroupConfig(n_learners=settings)
        super().__init__(learner, settings)
        self._queue: UpdateQueue | None = None
        self._others: OtherLearners | None = None
        if settings.n_learners > 1:
            self._others = OtherLearners(learner, settings, place)

    @property
    def n_learners(self) -> int:
        """Number of learners."""
        return self.settings.n_learners

    @property
    def first(self) -> Learner[Any, Any, Any]:
        """The learner of this process, after the updates that wait or run."""
        if self._queue is not None:
            self._queue.wait()
        return self._first

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        return self._update_of(self.first, experience, progress)

    def _update_of(
        self, first: Learner[Any, Any, Any], experience: Any, progress: Progress
    ) -> Statistics:
        with torch_threads(self.settings.n_cpus_per_learner):
            if self._others is None:
                return first.update(experience, progress)
            return self._others.update(experience, progress)

    def async_update(
        self,
        experience: Any,
        progress: Progress,
        size: int = 1,
        after: Callable[[], object] = lambda: None,
    ) -> Statistics:
        """Let the learners learn from a copy of experience, in a thread, and continue meanwhile.

        The modules may change at any time then: actors need their own copy of the weights, which
        `after` may send. All other methods wait until the updates have ended.

        Args:
            experience: The experience.
            progress: Where training stands before the update.
            size: Number of its samples, for the metrics of `QueueEvents`.
            after: Called in the thread when the update has ended, before the next one.

        Returns:
            Statistics of earlier updates that have ended since the last call.

        Raises:
            ConfigError: If there is no queue (`learner_group.queue_size`).
            MazeTrainError: What an earlier update raised.
        """
        if self._queue is None:
            size_of_queue, drops = self.settings.queue_size, self.settings.drop_when_full
            check_at_least("learner_group.queue_size", size_of_queue, 1)
            update = partial(self._update_of, self._first)
            self._queue = UpdateQueue(update, size_of_queue, drops)
        return self._queue.put(experience, progress, size, after)

    def wait(self) -> Statistics:
        """Wait for the updates of `async_update`; returns the statistics that are left."""
        if self._queue is None:
            return Statistics()
        self._queue.wait()
        return self._queue.take()

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner, which changes all of them alike.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        first = self.first
        return [function(first)] if self._others is None else self._others.apply(function)

    def shutdown(self) -> None:
        """End the other learners and drop waiting experience; they start again when needed.

        Calling it again does nothing.
        """
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._others is not None:
            self._others.shutdown()

    def add_module(
        self,
        module_id: str,
        module: ModuleSource,
        *,
        frozen: bool = False,
        like: str = DEFAULT_MODULE,
        overrides: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Add a module to every learner; see `Learner.add_module`.

        Raises:
            ConfigError: As there, or if several learners cannot train it.
        """
        how: dict[str, Any] = {"frozen": frozen, "like": like, "overrides": overrides}
        added = super().add_module(module_id, module, **how)
        if self._others is not None:
            try:
                self._others.check_modules()
            except Exception:
                self.first.remove_module(module_id)
                raise
        return added

    def _change(self) -> None:
        """Make the other learners equal to the first one, which was changed, before they run."""
        if self._others is not None:
            self._others.are_equal = False
