"""Group of data-parallel learners, and the processes of the additional learners."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.types import Array, Tensor
from maze_train.learner.config import LearnerGroupConfig, OptimizerSettings, Progress
from maze_train.learner.learner import Learner
from maze_train.learner.modules import (
    CUBLAS,
    DEFAULT_MODULE,
    REPEATABLE,
    Chosen,
    ModuleSource,
    torch_threads,
)
from maze_train.learner.process_group import Address, Rendezvous, gpu_of, join, leave
from maze_train.learner.ranks import GroupRanks, OneRank, Ranks, RanksLostError
from maze_train.spaces.columns import padded
from maze_train.workers.backends import Pickled, RemoteBackend, WorkerBackend
from maze_train.workers.pool import (
    Memory,
    SharedMemory,
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)
from maze_train.workers.process_pool import LocalProcesses

Mapped: TypeAlias = SharedMemory | None
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


class LearnerGroup:
    """All learners of a run: one in this process, and possibly others.

    All learners receive the same experience and have bit-for-bit identical weights and state. Each
    learner computes values for a slice of the experience and gradients for every n-th sample of a
    minibatch; one all-reduce per gradient step sums the gradients. The other learners are
    processes of this group, which start on first use, or processes of torchrun (`ranks`).

    If `backend` allows restarts, a learner that dies or hangs is restarted, and all learners repeat
    the update.

    Args:
        learner: The learner of this process.
        settings: Settings of the group; an int sets only `n_learners`.
        backend: Backend of the run's workers; None: processes on this machine.
        ranks: Ranks of the run; None: a single process.

    Raises:
        ConfigError: If the modules do not support several learners, or there are too few GPUs.
    """

    def __init__(
        self,
        learner: Learner[Any, Any, Any],
        settings: LearnerGroupConfig | int = 1,
        backend: WorkerBackend | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if isinstance(settings, int):
            settings = LearnerGroupConfig(n_learners=settings)
        self.settings, self.first = settings, learner
        self._ranks = learner.ranks = ranks or OneRank()
        self._messages: SharedMessages | None = None
        self._meeting: Rendezvous | None = None
        self._are_equal = False
        args, kwargs = learner.made_from
        built = args[0] if args else kwargs.get("modules", {})
        # Modules that each process creates from the constructor arguments.
        self._built = dict(built) if isinstance(built, Mapping) else {DEFAULT_MODULE: built}
        self.check_modules()
        if self.n_learners > 1:
            given = None if backend is None else backend.for_learners()
            self._backend: RemoteBackend = given or LocalProcesses()
            if not self._backend.has_own_gpus:
                check_gpus(settings, learner.device)

    @property
    def n_learners(self) -> int:
        """Number of learners that this group starts, including the learner of this process."""
        return self.settings.n_learners

    @property
    def weights_seq_no(self) -> int:
        """Number of updates that have changed the weights."""
        return self.first.weights_seq_no

    @property
    def pool(self) -> WorkerPool | None:
        """Workers of the other learners; None if they have not been started."""
        return None if self._messages is None else self._messages.pool

    def update(self, experience: object, progress: Progress) -> Statistics:
        """Learn from experience with all learners; see `Learner.update`.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        with torch_threads(self.settings.n_cpus_per_learner):
            if self.n_learners == 1:
                return self.first.update(experience, progress)
            try:
                while (statistics := self._try_update(experience, progress)) is None:
                    pass
            except BaseException:
                self.shutdown()
                raise
            return statistics

    def foreach_learner(self, function: Callable[[Learner[Any, Any, Any]], Result]) -> list[Result]:
        """Call a function with each learner and return the results.

        The function must make the same change to every learner.

        Raises:
            WorkerError: If a learner died or hung and restarts are disabled.
        """
        if self.n_learners == 1:
            return [function(self.first)]
        try:
            others = self._start()
            others.send("apply", function)
            own = function(self.first)
            results, failures = self._receive(others.pool)
            if failures:
                self._restart(others, failures)
        except BaseException:
            self.shutdown()
            raise
        # A restarted learner becomes a copy of the first learner.
        return [own, *results, *[own] * len(failures)]

    def change_settings(self, config: OptimizerSettings) -> None:
        """Replace the settings of every learner; see `Learner.change_settings`."""
        self.first.change_settings(config)
        self._are_equal = False

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
            ConfigError: If `Learner.add_module` raises it, or the module does not support several
                learners.
        """
        how: dict[str, Any] = {"frozen": frozen, "like": like, "overrides": overrides}
        added = self.first.add_module(module_id, module, **how)
        try:
            self.check_modules()
        except ConfigError:
            self.first.remove_module(module_id)
            raise
        self._are_equal = False
        return added

    def check_modules(self) -> None:
        """Raise ConfigError if results would depend on the number of learners."""
        if self._ranks.count > 1:
            check_modules(self.first, self._ranks.count, "WORLD_SIZE")
        if self.n_learners > 1:
            check_modules(self.first, self.n_learners)

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module from every learner, and return the module of the first learner."""
        removed = self.first.remove_module(module_id)
        self._are_equal = False
        return removed

    @property
    def policies_to_train(self) -> Chosen:
        """IDs of modules to train, or a function of ID and experience; None: all.

        Setting an unknown ID raises a ConfigError.
        """
        return self.first.policies_to_train

    @policies_to_train.setter
    def policies_to_train(self, chosen: Chosen) -> None:
        known = ", ".join(self.first.modules)
        if isinstance(chosen, str):
            raise ConfigError("policies_to_train", f"expected a list of ids from: {known}", chosen)
        for module_id in () if chosen is None or callable(chosen) else chosen:
            if module_id not in self.first.modules:
                problem = f"no such module; available: {known}"
                raise ConfigError("policies_to_train", problem, module_id)
        self.first.policies_to_train = chosen
        self._are_equal = False

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the weights, keyed by module ID."""
        return self.first.get_weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy weights into the modules of every learner."""
        self.first.set_weights(weights)
        self._are_equal = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is identical for all learners."""
        return {"learner": self.first.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; the number of learners may differ from the saved run."""
        self.first.load_state_dict(state["learner"])
        self._are_equal = False

    def _try_update(self, experience: object, progress: Progress) -> Statistics | None:
        """Update all learners; if a learner dies, restore the previous state and return None."""
        others = self._start()
        pool = others.pool
        before = deepcopy(self.first.state_dict()) if pool.may_restart else {}
        others.send("update", (experience, progress))
        statistics: Statistics | None = None
        try:
            statistics = self.first.update(experience, progress)
        except RanksLostError:
            leave()  # Ends pending operations of the other learners.
        have_finished, failures = self._receive(pool)
        if statistics is None or failures or not all(have_finished):
            self._restart(others, failures)
            self.first.load_state_dict(before)
            return None
        return statistics

    def _start(self) -> SharedMessages:
        """Start the other learners and synchronise them with the first learner, if necessary."""
        others = self._messages
        if others is None:
            self._check_fork()
            how, ranks = (self.n_learners, self._backend.timeout_s), range(1, self.n_learners)
            makers = [partial(Peer, copy_maker(self.first, r), *how) for r in ranks]
            specs = WorkerSpecs(makers, [f"learner {rank}" for rank in ranks], CALLS)
            self._messages = others = SharedMessages(self._backend.pool(specs))
            self.first.ranks = GroupRanks(0, self.n_learners)
        while not self._are_equal:
            others.send("begin", self._beginning())
            gpus, failures = self._receive(others.pool)
            if failures or not self._connect(others.pool, gpus, failures):
                self._restart(others, failures)
            else:
                self._are_equal = True
        return others

    def _beginning(self) -> tuple[Any, ...]:
        """Return the arguments of `Peer.begin` from the first learner."""
        learner, modules = self.first, None
        if list(learner.modules.items()) != list(self._built.items()):
            frozen, own = learner.modules.frozen, learner.modules.overrides
            modules = {
                k: (deepcopy(m), k in frozen, own.get(k)) for k, m in learner.modules.items()
            }
        modes = ProcessModes.here(self.settings.n_cpus_per_learner)
        state, chosen = learner.state_dict(), learner.policies_to_train
        return state, learner.config, modes, modules, chosen

    def _check_fork(self) -> None:
        """Raise ConfigError if a process that uses threads or a GPU would be forked."""
        key = "runner.start_method"
        threads = max(self.settings.n_cpus_per_learner, torch.get_num_threads())
        if self._backend.forks and self.first.device.type != "cpu":
            problem = (
                f"does not support several learners on {self.first.device}, because a forked "
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
        device = self.first.device
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
        self._are_equal = False

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
        self._messages, self._are_equal = None, False
        self.first.ranks = self._ranks


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


class Peer(Worker):
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
        self._ranks = GroupRanks(context.index + 1, count, context.count)
        self._timeout_s = timeout_s
        self._learner = make_learner.value()
        self._learner.ranks = self._ranks
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
        return join(address, self._ranks.rank, self._ranks.count, self._timeout_s, gpu)

    def update(self, memory: Mapped, content: bytes, sizes: Sequence[int]) -> bool:
        """Run an update; return False if another learner died."""
        try:
            self._learner.update(*self._unpack(memory, content, sizes))
        except RanksLostError:
            leave()  # Unblocks the other learners.
            return False
        return True

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


class SharedMessages:
    """Sends a value to all workers, with tensors and arrays in shared memory.

    The called method receives the memory (None if unchanged) and the two other arguments of
    `unpack`. Tensors of the value are views of the memory, which the next message overwrites.

    Args:
        pool: The workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self._memory: Memory | None = None
        self._have_memory: set[int] = set()

    def send(self, method: str, value: object) -> None:
        """Call a method of all idle workers, without waiting for results.

        Args:
            method: Name of the method.
            value: Argument of the method; may contain arbitrary functions (pickled by cloudpickle).
        """
        content, buffers = _packed(value)
        sizes = [buffer.nbytes for buffer in buffers]
        nbytes = sum(map(padded, sizes))
        memory = self._with_room_for(nbytes)
        for buffer, start in zip(buffers, _starts(sizes), strict=True):
            memory.buffer[start : start + buffer.nbytes] = buffer
        self.pool.publish(memory, [np.frombuffer(memory.buffer, np.uint8, nbytes)])
        for index in range(len(self.pool)):
            new = None if index in self._have_memory else memory
            self.pool.call(index, method, new, content, sizes)
            self._have_memory.add(index)

    def _with_room_for(self, nbytes: int) -> Memory:
        """Return shared memory of at least `nbytes`."""
        if self._memory is None or self._memory.nbytes < nbytes:
            self.close()
            self._memory = self.pool.allocate(max(nbytes, 1))
            self._have_memory.clear()
        return self._memory

    def forget(self, index: int) -> None:
        """Mark a worker as restarted; its next message includes the memory."""
        self._have_memory.discard(index)

    def close(self) -> None:
        """Close the file descriptor of the memory; a second call does nothing."""
        if self._memory is not None:
            self._memory.close()


def unpack(memory: Mapped, content: bytes, sizes: Sequence[int]) -> object:
    """Return the value of a message.

    Args:
        memory: Shared memory of the message.
        content: Pickled value without its arrays.
        sizes: Sizes of the arrays in bytes.
    """
    assert memory is not None
    view = memoryview(memory.buffer)
    places = zip(_starts(sizes), sizes, strict=True)
    return pickle.loads(content, buffers=[view[start : start + size] for start, size in places])


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each array, given the sizes of the arrays in bytes."""
    return [0, *accumulate(map(padded, sizes))][: len(sizes)]


def _packed(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle a value; return the bytes, and the buffers of tensors and arrays separately."""
    import cloudpickle  # Imported lazily: only groups of several learners need it.

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # untyped
        def reducer_override(self, obj: object) -> object:
            is_plain = type(obj) is torch.Tensor and not obj.requires_grad
            # NumPy has no bfloat16, so such tensors are pickled.
            if type(obj) is torch.Tensor and is_plain and obj.dtype is not torch.bfloat16:
                return _tensor, (obj.detach().cpu().contiguous().numpy(),)
            return super().reducer_override(obj)

    file, buffers = io.BytesIO(), []
    Pickler(file, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    return file.getvalue(), buffers


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)
