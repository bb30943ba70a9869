"""The learners of a group besides the first one: started, called, made equal, started again."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from maze_train.errors import ConfigError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.learner.parcels import Parcels
from maze_train.learner.part import Part
from maze_train.learner.shard import PeersLostError, Shard
from maze_train.learner.worker import (
    LearnerWorker,
    MeetingPlace,
    ProcessModes,
    copy_maker,
    gpu_of,
    join,
    leave,
)
from maze_train.workers.pool import WorkerFailedError
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.events import Statistics
    from maze_train.learner.config import LearnerGroupConfig, Progress
    from maze_train.learner.learner import Learner
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

NOT_SHARED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU)
"""Layers that do with samples what depends on others, or on chance."""


class OtherLearners:
    """Learners in processes that do what the first one does, with other samples.

    Args:
        learner: The first learner.
        settings: Settings of the group, of several learners.
        place: Where the workers of the run live; None: in this process, and the learners in
            processes of this machine.

    Attributes:
        are_equal: Whether they have the state of the first learner; where not, they get it before
            the next call.

    Raises:
        ConfigError: If the modules can not be trained by several learners, or there are too few
            GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig,
        place: Place | None = None,
    ) -> None:
        self.n_learners = settings.n_learners
        self.are_equal = False
        self._learner = learner
        self._threads = settings.n_cpus_per_learner
        self._place = LocalProcesses() if place is None else place.for_learners()
        self._parcels: Parcels | None = None
        self._meeting: MeetingPlace | None = None
        args, kwargs = learner.made_from
        built = args[0] if args else kwargs.get("modules", {})
        # The modules that a process makes by itself.
        self._built = dict(built) if isinstance(built, Mapping) else {DEFAULT_MODULE: built}
        self.check_modules()
        if not self._place.has_own_gpus:
            check_gpus(settings, learner.device)

    def check_modules(self) -> None:
        """Refuse what several learners could not compute as one does.

        Raises:
            ConfigError: If there is such a layer.
        """
        for module in self._learner.modules.values():
            for name, layer in module.named_modules():
                if depends_on_others(layer):
                    raise ConfigError(
                        "learner_group.n_learners",
                        f"{name} is a {type(layer).__name__}: what it does depends on all samples "
                        "of a minibatch, or on chance, so that several learners differ from one; "
                        "expected 1",
                        self.n_learners,
                    )

    @property
    def pool(self) -> WorkerPool | None:
        """The workers; None: they are not started."""
        return None if self._parcels is None else self._parcels.pool

    def update(self, experience: Any, progress: Progress) -> Statistics:
        """Let all learners, the first one included, learn from experience.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
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

    def apply(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """The results of a function of each learner, the first one included.

        Raises:
            WorkerError: If a learner died or hung, and is not to be started again.
        """
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
        while not self.are_equal:
            others.send("begin", self._beginning())
            gpus, failures = self._receive(others.pool)
            if failures or not self._connect(others.pool, gpus, failures):
                self._restart(others, failures)
            else:
                self.are_equal = True
        return others

    def _beginning(self) -> tuple[Any, ...]:
        """What `LearnerWorker.begin` takes, of the first learner as it is."""
        learner, modules = self._learner, None
        if list(learner.modules.items()) != list(self._built.items()):
            frozen, own = learner.frozen_modules, learner.own_settings
            modules = {
                k: (deepcopy(m), k in frozen, own.get(k)) for k, m in learner.modules.items()
            }
        modes = ProcessModes.here(self._threads)
        return learner.state_dict(), modes, modules, learner.policies_to_train

    def _check_threads(self) -> None:
        """Refuse a fork that would have several threads, for which it would wait forever."""
        threads = max(self._threads, torch.get_num_threads())
        if getattr(self._place, "start_method", "") == "fork" and threads > 1:
            raise ConfigError(
                "runner.start_method",
                f"several learners have {threads} threads each, which is not possible after a "
                "fork; expected forkserver, or runner.torch_threads=1 and "
                "learner_group.n_cpus_per_learner=0",
                "fork",
            )

    def _connect(
        self, pool: WorkerPool, gpus: Sequence[str | None], failures: list[WorkerFailedError]
    ) -> bool:
        """Let all learners meet; whether they did, else `failures` gets who failed.

        Args:
            pool: The other learners.
            gpus: Their GPUs, see `gpu_of`.
            failures: Failures so far, of which there are none.
        """
        device = self._learner.device
        have_own_gpus = are_apart([gpu_of(device), *gpus])
        self._end_meeting()
        self._meeting = meeting = MeetingPlace(pool.host)
        for index in range(len(pool)):
            pool.call(index, "connect", meeting.address, have_own_gpus)
        gpu = device if have_own_gpus else None
        how = (self.n_learners, self._place.timeout_s, gpu, meeting.listener)
        has_met = join(meeting.address, 0, *how)
        others_met, failed = self._receive(pool)
        failures += failed
        return has_met and all(others_met) and not failed

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
        self._end_meeting()  # A process that is forked would take the connection with it.
        for failure in failures or [unknown]:
            others.pool.restart(failure, failure.text, "all learners go on from before the update")
            others.forget(failure.index)
        self.are_equal = False

    def _end_meeting(self) -> None:
        """End the connection with the others."""
        leave()
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = None

    def shutdown(self) -> None:
        """End the other learners; calling it again does nothing. They start again when needed."""
        if self._parcels is not None:
            self._end_meeting()
            self._parcels.pool.close()
            self._parcels.close()
        self._parcels, self.are_equal = None, False
        self._learner.part = Part()


def are_apart(gpus: Sequence[str | None]) -> bool:
    """Whether all learners have GPUs, and no two of them the same one; see `gpu_of`."""
    return None not in gpus and len(set(gpus)) == len(gpus)


def check_gpus(settings: LearnerGroupConfig, device: torch.device) -> None:
    """Refuse fewer GPUs than learners, where each is to have one.

    Raises:
        ConfigError: If there are too few.
    """
    if settings.device is None or device.type != "cuda":
        return
    found = torch.cuda.device_count() - (device.index or 0)
    if found < settings.n_learners:
        raise ConfigError(
            "learner_group.device",
            f"{settings.n_learners} learners need a GPU each, and there are {found}; expected "
            f"learner_group.n_learners={max(found, 1)}, or null and algorithm.device=cuda, with "
            "which learners share GPUs",
            settings.device,
        )


def depends_on_others(layer: nn.Module) -> bool:
    """Whether a layer does with samples what depends on others, or on chance."""
    if isinstance(layer, nn.RNNBase):
        return bool(layer.dropout) and layer.num_layers > 1
    if isinstance(layer, nn.MultiheadAttention):
        return bool(layer.dropout)
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return bool(layer.track_running_stats)
    return isinstance(layer, NOT_SHARED)
