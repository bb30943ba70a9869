"""Processes of the additional learners of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.modules import CUBLAS, DEFAULT_MODULE, REPEATABLE
from maze_train.learner.parallel import SingleLearner
from maze_train.learner.process_group import Address, Rendezvous, gpu_of, join, leave
from maze_train.learner.shard import Mapped, PeersLostError, Shard, SharedMessages, unpack
from maze_train.workers.backends import Pickled, WorkerBackend
from maze_train.workers.pool import (
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)
from maze_train.workers.process_pool import LocalProcesses


@dataclass(frozen=True)
class ProcessModes:
    """PyTorch modes of a process, to reproduce in other processes."""

    threads: int
    deterministic: bool
    warn_only: bool
    """Whether nondeterministic operations warn instead of raising an error."""

    detect_anomaly: bool
    matmul_precision: str

    @classmethod
    def here(cls, threads: int = 0) -> ProcessModes:
        """Return the modes of this process; a nonzero `threads` replaces the number of threads."""
        return cls(
            threads or torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_float32_matmul_precision(),
        )

    def take_on(self) -> None:
        """Apply the modes to this process."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.deterministic:
            os.environ.setdefault(CUBLAS, REPEATABLE)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.autograd.set_detect_anomaly(self.detect_anomaly)
        torch.set_float32_matmul_precision(self.matmul_precision)


class LearnerWorker(Worker):
    """Worker process of an additional learner, which computes the gradients of its own shard.

    Args:
        make_learner: Creates the learner.
        count: Number of learners of the group.
        timeout_s: Timeout of a collective operation in seconds.
        context: Context of the worker; worker 0 runs learner 1.
    """

    def __init__(
        self,
        make_learner: Pickled[Callable[[], Learner[Any, Any, Any]]],
        count: int,
        timeout_s: float,
        context: WorkerContext,
    ) -> None:
        self._rank, self._count, self._timeout_s = context.index + 1, count, timeout_s
        self._shard = Shard(self._rank, count, context.count)
        self._learner = make_learner.value()
        self._learner.parallel = self._shard
        self._memory: Mapped = None

    def _unpack(self, memory: Mapped, content: bytes, sizes: Sequence[int]) -> Any:
        """Return the value of a message. The next message may overwrite the memory of the value."""
        self._memory = memory or self._memory
        return unpack(self._memory, content, sizes)

    def begin(self, memory: Mapped, content: bytes, sizes: Sequence[int]) -> str | None:
        """Copy modules, state and process modes of the first learner.

        Returns:
            GPU of this learner, see `gpu_of`.
        """
        # Copy the value, because the next message overwrites the memory.
        state, config, modes, modules, chosen = deepcopy(self._unpack(memory, content, sizes))
        learner = self._learner
        learner.change_settings(config)
        if modules is not None:
            for module_id in list(learner.modules):
                learner.remove_module(module_id)
            for module_id, (module, is_frozen, own) in modules.items():
                learner.add_module(module_id, module, frozen=is_frozen, overrides=own)
        learner.policies_to_train = chosen
        learner.load_state_dict(state)
        modes.take_on()
        return gpu_of(learner.device)

    def connect(self, address: Address, have_own_gpus: bool) -> bool:
        """Join the process group at an address; return whether all learners joined."""
        leave()
        gpu = self._learner.device if have_own_gpus else None
        return join(address, self._rank, self._count, self._timeout_s, gpu)

    def update(self, memory: Mapped, content: bytes, sizes: Sequence[int]) -> Statistics | None:
        """Run an update; return the statistics of this shard, or None if another learner died."""
        try:
            self._learner.update(*self._unpack(memory, content, sizes))
        except PeersLostError:
            leave()  # Unblocks the other learners.
            return None
        return self._shard.statistics

    def apply(self, memory: Mapped, content: bytes, sizes: Sequence[int]) -> object:
        """Call a function with the learner, and return the result."""
        return self._unpack(memory, content, sizes)(self._learner)

    def close(self) -> None:
        """Leave the group."""
        leave()


def copy_maker(
    learner: Learner[Any, Any, Any], rank: int
) -> Pickled[Callable[[], Learner[Any, Any, Any]]]:
    """Return a function that creates a copy of a learner without the state of the learner.

    Args:
        learner: The first learner.
        rank: Rank of the new learner, which selects its GPU.
    """
    args, kwargs = deepcopy(learner.made_from)
    make = partial(type(learner), *args, **kwargs)
    if learner.device.type == "cuda":
        make = partial(_on_gpu, make, (learner.device.index or 0) + rank)
    return Pickled(make, "algorithm")


def _on_gpu(make: Callable[..., Result], number: int) -> Result:
    """Create a learner on one of the GPUs visible to this process.

    Raises:
        ConfigError: If no GPU is visible.
    """
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            "runner.gpus_per_learner",
            "a learner needs a GPU, but its machine has none; set 1 (or a fraction), so that Ray "
            "reserves a GPU for the learner, or algorithm.device=cpu",
        )
    return make(device=f"cuda:{number % count}")


Result = TypeVar("Result")

CALLS = {
    "building its environments": "its start",
    "begin": "receiving the weights",
    "connect": "joining the process group",
    "update": "an update",
}
"""Descriptions of remote calls, for error messages."""

NOT_SHARED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.RReLU)
"""Layers that mix samples (batch norm) or are stochastic (dropout)."""


class PeerLearners:
    """Additional learners in separate processes, which compute the gradients of their shards.

    Args:
        learner: The first learner.
        settings: Settings of the group, with more than one learner.
        backend: Backend of the run's workers; None: this process.

    Attributes:
        are_equal: Whether all learners have the state of the first learner. If False, the state is
            sent to the other learners before the next call.

    Raises:
        ConfigError: If the modules do not support several learners, or there are too few GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig,
        backend: WorkerBackend | None = None,
    ) -> None:
        self.n_learners = settings.n_learners
        self.are_equal = False
        self._learner = learner
        self._threads = settings.n_cpus_per_learner
        self._backend = (backend.for_learners() if backend else None) or LocalProcesses()
        self._messages: SharedMessages | None = None
        self._meeting: Rendezvous | None = None
        args, kwargs = learner.made_from
        built = args[0] if args else kwargs.get("modules", {})
        # Modules that each process creates from the constructor arguments.
        self._built = dict(built) if isinstance(built, Mapping) else {DEFAULT_MODULE: built}
        check_modules(learner, self.n_learners)
        if not self._backend.has_own_gpus:
            check_gpus(settings, learner.device)

    @property
    def pool(self) -> WorkerPool | None:
        """The workers; None if they have not been started."""
        return None if self._messages is None else self._messages.pool

    def update(self, experience: object, progress: Progress) -> Statistics:
        """Update all learners, including the first learner.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        try:
            while (statistics := self._try_update(experience, progress)) is None:
                pass
        except BaseException:
            self.shutdown()
            raise
        return statistics

    def _try_update(self, experience: object, progress: Progress) -> Statistics | None:
        """Update all learners; if a learner dies, restore the previous state and return None."""
        others = self._start()
        pool = others.pool
        before = deepcopy(self._learner.state_dict()) if pool.may_restart else {}
        others.send("update", (experience, progress))
        statistics: Statistics | None = None
        try:
            statistics = self._learner.update(experience, progress)
        except PeersLostError:
            leave()  # Ends pending operations of the other learners.
        parts, failures = self._receive(pool)
        if statistics is None or failures or None in parts:
            self._restart(others, failures)
            self._learner.load_state_dict(before)
            return None
        for part in parts:
            statistics.merge(part)
        return statistics

    def apply(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """Call a function with each learner, including the first, and return the results.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
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
        # A restarted learner becomes a copy of the first learner.
        return [own, *results, *[own] * len(failures)]

    def _start(self) -> SharedMessages:
        """Start the other learners and synchronise them with the first learner, if necessary."""
        others = self._messages
        if others is None:
            self._check_fork()
            how, ranks = (self.n_learners, self._backend.timeout_s), range(1, self.n_learners)
            makers = [partial(LearnerWorker, copy_maker(self._learner, r), *how) for r in ranks]
            specs = WorkerSpecs(makers, [f"learner {rank}" for rank in ranks], CALLS)
            self._messages = others = SharedMessages(self._backend.pool(specs))
            self._learner.parallel = Shard(0, self.n_learners)
        while not self.are_equal:
            others.send("begin", self._beginning())
            gpus, failures = self._receive(others.pool)
            if failures or not self._connect(others.pool, gpus, failures):
                self._restart(others, failures)
            else:
                self.are_equal = True
        return others

    def _beginning(self) -> tuple[Any, ...]:
        """Return the arguments of `LearnerWorker.begin` from the first learner."""
        learner, modules = self._learner, None
        if list(learner.modules.items()) != list(self._built.items()):
            frozen, own = learner.modules.frozen, learner.modules.overrides
            modules = {
                k: (deepcopy(m), k in frozen, own.get(k)) for k, m in learner.modules.items()
            }
        modes = ProcessModes.here(self._threads)
        state, chosen = learner.state_dict(), learner.policies_to_train
        return state, learner.config, modes, modules, chosen

    def _check_fork(self) -> None:
        """Raise ConfigError if a process that uses threads or a GPU would be forked."""
        key, threads = "runner.start_method", max(self._threads, torch.get_num_threads())
        if self._backend.forks and self._learner.device.type != "cpu":
            problem = (
                f"does not support several learners on {self._learner.device}, because a forked "
                "process cannot use the GPU; use forkserver, or algorithm.device=cpu"
            )
            raise ConfigError(key, problem, "fork")
        if self._backend.forks and threads > 1:  # Forked processes can deadlock.
            raise ConfigError(
                key,
                f"does not support several learners with {threads} threads each; use forkserver, "
                "or runner.torch_threads=1 and learner_group.n_cpus_per_learner=0",
                "fork",
            )

    def _connect(
        self, pool: WorkerPool, gpus: Sequence[str | None], failures: list[WorkerFailedError]
    ) -> bool:
        """Connect all learners; return whether all joined the process group.

        Args:
            pool: Workers of the other learners.
            gpus: GPUs of the workers, see `gpu_of`.
            failures: Empty list, to which failures are appended.
        """
        device = self._learner.device
        have_own_gpus = are_apart([gpu_of(device), *gpus])
        self._end_meeting()
        self._meeting = meeting = Rendezvous(pool.host)
        for index in range(len(pool)):
            pool.call(index, "connect", meeting.address, have_own_gpus)
        gpu = device if have_own_gpus else None
        how = (self.n_learners, self._backend.timeout_s, gpu, meeting.listener)
        has_met = join(meeting.address, 0, *how)
        others_met, failed = self._receive(pool)
        failures += failed
        return has_met and all(others_met) and not failed

    def _receive(self, pool: WorkerPool) -> tuple[list[Any], list[WorkerFailedError]]:
        """Receive the results of a call from each worker, and the failures."""
        results: list[Any] = []
        failures: list[WorkerFailedError] = []
        for index in range(len(pool)):
            try:
                results.append(pool.receive(index))
            except WorkerFailedError as failure:
                failures.append(failure)
        return results, failures

    def _restart(self, others: SharedMessages, failures: list[WorkerFailedError]) -> None:
        """Restart failed learners.

        Raises:
            WorkerError: If restarts are disabled.
        """
        unknown = WorkerFailedError(0, "learner 1 answered too late or lost its connection")
        self._end_meeting()  # A forked process would inherit the group.
        for failure in failures or [unknown]:
            others.pool.restart(
                failure, failure.text, "all learners continue from before the update"
            )
            others.forget(failure.index)
        self.are_equal = False

    def _end_meeting(self) -> None:
        """Leave the process group and close the rendezvous."""
        leave()
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = None

    def shutdown(self) -> None:
        """Stop the other learners; the next call that needs them restarts them."""
        if self._messages is not None:
            self._end_meeting()
            self._messages.pool.close()
            self._messages.close()
        self._messages, self.are_equal = None, False
        self._learner.parallel = SingleLearner()


def check_modules(
    learner: Learner[Any, Any, Any], n_learners: int, key: str = "learner_group.n_learners"
) -> None:
    """Check that results do not depend on the number of learners.

    Args:
        learner: The learner.
        n_learners: Number of learners (> 1).
        key: Setting or variable with this number, for the message.

    Raises:
        ConfigError: If a layer mixes samples or is stochastic.
    """
    for module in learner.modules.values():
        for name, layer in module.named_modules():
            if depends_on_others(layer):
                raise ConfigError(
                    key,
                    f"{name} is a {type(layer).__name__}, which mixes the samples of a "
                    "minibatch or is stochastic, so results would depend on the number of "
                    "learners; expected 1",
                    n_learners,
                )


def are_apart(gpus: Sequence[str | None]) -> bool:
    """Return whether all learners have distinct GPUs; see `gpu_of`."""
    return None not in gpus and len(set(gpus)) == len(gpus)


def check_gpus(settings: LearnerGroupConfig, device: torch.device) -> None:
    """Check that there are enough GPUs if every learner needs a separate GPU.

    Raises:
        ConfigError: If there are too few GPUs.
    """
    if settings.device is None or device.type != "cuda":
        return
    found = torch.cuda.device_count() - (device.index or 0)
    if found < settings.n_learners:
        raise ConfigError(
            "learner_group.device",
            f"{settings.n_learners} learners need a GPU each, but only {found} are available; use "
            f"learner_group.n_learners={max(found, 1)}, or learner_group.device=null and "
            "algorithm.device=cuda to share GPUs",
            settings.device,
        )


def depends_on_others(layer: nn.Module) -> bool:
    """Return whether a layer mixes samples (batch norm) or is stochastic (dropout)."""
    if isinstance(layer, nn.RNNBase):
        return bool(layer.dropout) and layer.num_layers > 1
    if isinstance(layer, nn.MultiheadAttention):
        return bool(layer.dropout)
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return bool(layer.track_running_stats)
    return isinstance(layer, NOT_SHARED)
