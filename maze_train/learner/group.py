"""One interface to learners, in this process and others."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError, WorkerError
from maze_train.learner.modes import ProcessModes
from maze_train.learner.parcels import Parcels
from maze_train.learner.part import Part, PeersLostError, Shard
from maze_train.learner.worker import LearnerWorker, copy_maker, join, leave, meeting_place
from maze_train.workers.places import LocalProcesses
from maze_train.workers.pool import WorkerFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.learner.learner import Learner
    from maze_train.types import Tensor
    from maze_train.workers.places import Place
    from maze_train.workers.pool import WorkerPool


Result = TypeVar("Result")

CALLS = {
    "building its environments": "its start",
    "begin": "taking the weights",
    "connect": "meeting the others",
    "update": "an update",
}
"""Names of calls in messages."""

NOT_SHARED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Layers that do with samples what depends on others, or on chance."""


class LearnerGroup:
    """The learners of a trainer: one in this process, and further ones in processes of their own.

    All get the same experience, prepare all of it, and have the same weights and the same state to
    the bit. Each computes every n-th sample of a minibatch; one exchange per gradient step sums the
    gradients (see `Shard`). The first learner, whose modules act and are saved, is that of this
    process. The others are started at the first call that needs them.

    A learner that dies or hangs is started again where `place` says so: all learners then go on
    from before the update.

    Args:
        learner: The first learner.
        n_learners: Number of learners, >= 1; several have one module.
        place: Settings of processes, where they are `LocalProcesses`; else those have their
            defaults.

    Raises:
        ConfigError: If the module can not be trained by several learners.
    """

    def __init__(
        self, learner: Learner[Any, Any, Any], n_learners: int = 1, place: Place | None = None
    ) -> None:
        check_at_least("n_learners", n_learners, 1)
        self.n_learners = n_learners
        self._learner = learner
        self._place = place if isinstance(place, LocalProcesses) else LocalProcesses()
        self._parcels: Parcels | None = None
        self._is_ready = False
        if n_learners > 1:
            _check_modules(learner, n_learners)

    @property
    def weights_seq_no(self) -> int:
        """Updates that the weights have seen."""
        return self._learner.weights_seq_no

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Learn from experience; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        if self.n_learners == 1:
            return self._learner.update(experience, progress)
        try:
            while (statistics := self._try_update(experience, progress)) is None:
                pass
        except BaseException:
            self.shutdown()
            raise
        return statistics

    def _try_update(self, experience: Any, progress: Progress) -> Statistics | None:
        """Update; None if a learner was lost, all are then as they were before."""
        others = self._start()
        pool = others.pool
        before = deepcopy(self._learner.state_dict()) if pool.may_restart else {}
        others.send("update", (experience, progress))
        statistics: Statistics | None = None
        try:
            statistics = self._learner.update(experience, progress)
        except PeersLostError:
            leave()  # The others notice it.
        parts, failures = self._receive(pool)
        if statistics is None or failures or None in parts:
            self._restart(others, failures)
            self._learner.load_state_dict(before)
            return None
        for part in parts:
            statistics.merge(part)
        return statistics

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner, which changes all of them alike.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
        if self.n_learners == 1:
            return [function(self._learner)]
        try:
            others = self._start()
            others.send("apply", function)
            own = function(self._learner)
            results, failures = self._receive(others.pool)
            if failures:
                self._restart(others, failures)
        except BaseException:
            self.shutdown()
            raise
        # One that is started again becomes a copy of the first.
        return [own, *results, *[own] * len(failures)]

    # -- the other learners ----------------------------------------------------------------------

    def _start(self) -> Parcels:
        """Start learners, and make them equal to the first one, where they are not."""
        others = self._parcels
        if others is None:
            self._check_threads()
            ranks = range(1, self.n_learners)
            how = (self.n_learners, self._place.timeout_s)
            makers = [partial(LearnerWorker, copy_maker(self._learner, r), *how) for r in ranks]
            pool = self._place.pool(makers, [f"learner {rank}" for rank in ranks], CALLS)
            self._parcels = others = Parcels(pool)
            self._learner.part = Shard(0, self.n_learners)
        if not self._is_ready:
            others.send("begin", (self._learner.state_dict(), ProcessModes.here()))
            others.pool.receive_all()
            self._connect(others.pool)
            self._is_ready = True
        return others

    def _check_threads(self) -> None:
        """Refuse a fork that would have several threads, for which it would wait forever."""
        threads = torch.get_num_threads()
        if self._place.start_method == "fork" and threads > 1:
            raise ConfigError(
                "runner.start_method",
                f"several learners have as many threads as this process, {threads}, which is not "
                "possible after a fork; expected forkserver, or runner.torch_threads=1",
                "fork",
            )

    def _connect(self, pool: WorkerPool) -> None:
        """Let all learners meet."""
        leave()
        store = meeting_place(0, self.n_learners, self._place.timeout_s)
        for index in range(len(pool)):
            pool.call(index, "connect", store.port)
        try:
            join(store, 0, self.n_learners, self._place.timeout_s, self._learner.device)
        except PeersLostError as error:
            pool.receive_all()
            raise WorkerError(f"the learners can not connect to each other: {error}") from error
        pool.receive_all()

    def _receive(self, pool: WorkerPool) -> tuple[list[Any], list[WorkerFailedError]]:
        """The results of a call of each learner, and the failures of the others."""
        results: list[Any] = []
        failures: list[WorkerFailedError] = []
        for index in range(len(pool)):
            try:
                results.append(pool.receive(index))
            except WorkerFailedError as failure:
                failures.append(failure)
        return results, failures

    def _restart(self, others: Parcels, failures: list[WorkerFailedError]) -> None:
        """Start learners that failed again.

        Raises:
            WorkerError: If they are not to be started again.
        """
        unknown = WorkerFailedError(0, "learner 1 answered too late or lost its connection")
        leave()  # A process that is forked would take the connection with it.
        for failure in failures or [unknown]:
            others.pool.restart(failure, failure.text, "all learners go on from before the update")
            others.give_memory(failure.index)
        self._is_ready = False

    def shutdown(self) -> None:
        """End the other learners; calling it again does nothing. They start again when needed."""
        if self._parcels is not None:
            leave()
            self._parcels.pool.close()
            self._parcels.close()
        self._parcels, self._is_ready = None, False
        self._learner.part = Part()

    # -- state -----------------------------------------------------------------------------------

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return self._learner.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights into the modules of every learner."""
        self._learner.set_weights(weights)
        self._is_ready = False

    def state_dict(self) -> dict[str, Any]:
        """State of the learners, which is the same for all of them."""
        return {"learner": self._learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, of however many learners."""
        self._learner.load_state_dict(state["learner"])
        self._is_ready = False


def _check_modules(learner: Learner[Any, Any, Any], n_learners: int) -> None:
    """Refuse what several learners could not compute as one does."""
    if len(learner.modules) > 1:
        problem = (
            f"there are {len(learner.modules)} modules, several learners train one; expected 1"
        )
        raise ConfigError("learner_group.n_learners", problem, n_learners)
    for module in learner.modules.values():
        for name, layer in module.named_modules():
            if isinstance(layer, NOT_SHARED):
                raise ConfigError(
                    "learner_group.n_learners",
                    f"{name} is a {type(layer).__name__}: what it does depends on all samples of a "
                    "minibatch, or on chance, so that several learners differ from one; expected 1",
                    n_learners,
                )
