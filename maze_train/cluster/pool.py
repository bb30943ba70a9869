"""Pool of workers in Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from maze_train.cluster.session import LOOK_S, RaySession, RaySettings
from maze_train.cluster.worker import RayWorker, Reply, Span, fill, flat, spans_of
from maze_train.workers.backends import available_cores
from maze_train.workers.pool import (
    Memory,
    PrivateMemory,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
)
from maze_train.workers.process_pool import pack
from maze_train.workers.remote import BUILDING, CLOSE_GRACE_S, RemotePool, RemoteWorker

if TYPE_CHECKING:
    from maze_train.core.types import Array


SIDE = "side"
"""Concurrency group of methods that run alongside a call."""

NEWS_S = 0.2
"""Minimum interval in seconds between progress requests to a busy worker."""

PULSE_S = 5.0
"""Time limit in seconds for a worker to answer a progress request."""

MACHINE_LOST = "is lost or unreachable"

REMEDY = (
    "the module must be available on every machine: set runner.working_dir to the folder of your "
    "modules, which is sent to all machines, or install the module"
)


class RemoteActor(RemoteWorker):
    """Handle of a worker in a Ray actor.

    Args:
        session: The connection to Ray.
        options: Resources and placement of the actor.
        name: Name of the worker in messages.
        index: Index of the worker.

    Attributes:
        memories: Ids of memory objects that have a copy in the actor.
        forgotten: Ids of memory objects to release in the actor with the next call.
        steps: Number of environment steps reported.
    """

    def __init__(self, session: RaySession, options: dict[str, Any], name: str, index: int) -> None:
        super().__init__(name, index)
        self.session = session
        self._ray = ray = session.ray
        self.memories: set[int] = set()
        self.forgotten: list[int] = []
        self.steps = 0
        self.has_ended = self._was_made = False
        self._options = options
        self._sent = self._mail = self._beats = 0
        self._news: object = None
        self._asked = 0.0
        self._handle = ray.remote(concurrency_groups={SIDE: 1})(RayWorker)
        self._handle = self._handle.options(**options).remote(index)

    def make(self, content: bytes, entropy: int) -> None:
        """Create the worker in the actor, and seed the global generators of the process."""
        self._made = self._handle.make.remote(content, sys.path, entropy)

    def call(self, method: str, content: bytes, numbers: list[int], sent: list[Span]) -> None:
        """Send a call."""
        if not self.pending:
            self.since = time.monotonic()
        self._sent += 1
        forgotten, self.forgotten = self.forgotten, []
        result = self._handle.call.remote(method, content, numbers, sent, self._mail, forgotten)
        self.pending.append((result, method))

    def _at_once(self, method: Any, *args: object) -> object:
        """Call a method of the actor without waiting for the running call."""
        return method.options(concurrency_group=SIDE).remote(*args)

    def write(self, number: int, published: object) -> None:
        """Send published data, which arrives before all later calls."""
        self._mail += 1
        self._at_once(self._handle.write, number, published)

    def cancel(self) -> None:
        """Cancel all calls sent so far."""
        self._at_once(self._handle.cancel, self._sent)

    def _heard(self, beats: int, steps: int) -> None:
        if beats != self._beats:
            self._beats, self.since = beats, time.monotonic()
        self.steps = max(self.steps, steps)

    def ask_for_news(self, wait_s: float = 0.0) -> None:
        """Record the answer to the last progress request, and send a new one if due.

        Args:
            wait_s: Maximum time in seconds to wait for the answer.
        """
        if self._news is not None and self._ray.wait([self._news], timeout=wait_s)[0]:
            with suppress(self._ray.exceptions.RayError):  # `receive` reports failures.
                self._heard(*self._ray.get(self._news))
            self._news = None
        if self._news is None and self.pending and time.monotonic() > self._asked + NEWS_S:
            self._ask()

    def _ask(self) -> None:
        self._news, self._asked = self._at_once(self._handle.pulse), time.monotonic()

    def hangs(self, timeout_s: float) -> bool:
        """Whether the actor has made no progress for `timeout_s` seconds."""
        if not self.pending or time.monotonic() - self.since <= timeout_s:
            return False
        self._ask()  # The previous answer may be outdated.
        self.ask_for_news(min(PULSE_S, timeout_s))
        if not self._was_made and self._machine() is not None:
            self._was_made, self.since = True, time.monotonic()  # The creation counts as progress.
        return time.monotonic() - self.since > timeout_s

    def receive(self, calls: Mapping[str, str], timeout_s: float) -> Reply:
        """Wait for the result of the oldest call.

        Args:
            calls: Description of each method, for messages.
            timeout_s: Time in seconds without progress after which the actor is considered hung.

        Raises:
            WorkerFailedError: If the worker raised, died or hung. A hung actor is killed.
        """
        result, method = self.pending[0]
        what = calls.get(method, method)
        while True:
            left = timeout_s - (time.monotonic() - self.since)
            self.session.check_head()
            if self._ray.wait([result], timeout=min(max(left, 0.0), LOOK_S))[0]:
                break
            if self.hangs(timeout_s):
                what = what if self._was_made else calls.get(BUILDING, BUILDING)
                raise self.hung(what, timeout_s)
        try:
            reply = Reply(*self._ray.get(result))
        except self._ray.exceptions.RayError as error:
            raise self._died(what, calls, error) from None
        self._was_made, self.since = True, time.monotonic()
        self._heard(reply.beats, reply.steps)
        if reply.failure is not None:
            text = f"{self.name}: {reply.failure['text']}"
            if "ModuleNotFoundError" in text:
                text = f"{text}: {REMEDY}"
            raise WorkerFailedError(self.index, **{**reply.failure, "text": text})
        self.pending.popleft()
        return reply

    def hung(self, what: str, timeout_s: float) -> WorkerFailedError:
        """Kill the actor, and return the failure; final if there are no resources for the actor."""
        failure = super().hung(what, timeout_s)
        if self._was_made or self.session.is_reserved(self._options):
            return failure
        text = (
            f"{self.name} was not started within worker_timeout_s = {timeout_s:g} seconds, because "
            f"the cluster has no resources for it; {self.session.room()}; add machines, and resume "
            "the run"
        )
        return WorkerFailedError(self.index, text, final=True)

    def _machine(self) -> str | None:
        """Return the address of the worker's machine; None if the worker was not created."""
        with suppress(self._ray.exceptions.RayError):
            content = Reply(*self._ray.get(self._made, timeout=0)).result
            return None if content is None else str(pickle.loads(content))
        return None

    def _died(self, what: str, calls: Mapping[str, str], error: Exception) -> WorkerFailedError:
        machine = self._machine()
        what = calls.get(BUILDING, BUILDING) if machine is None else what
        if not self.session.answers():
            self.has_ended = True
            self.pending.clear()
            return WorkerFailedError(self.index, self.session.head_lost, final=True)
        self.kill()
        text, unreachable = " ".join(str(error).split()), self._ray.exceptions.ActorUnavailableError
        if getattr(error, "_actor_init_failed", False):
            how = f"{text.rpartition(' ^')[2].lstrip('^ ')}: {REMEDY}"
        elif "its node has died" in text or isinstance(error, unreachable):
            how = f"the machine {f'{machine} ' if machine else ''}{MACHINE_LOST}"
        else:
            how = "the process ended; was memory exhausted?"
        return WorkerFailedError(self.index, f"{self.name} died in {what} ({how})")

    def quit(self) -> object:
        """Ask the actor to close its worker; return the reference of the result."""
        self.cancel()
        return self._handle.close.remote()

    def kill(self) -> None:
        """Kill the actor."""
        self.has_ended = True
        self.pending.clear()
        self._ray.kill(self._handle)

    def last_news(self, result: object) -> None:
        """Record the final report of a closed actor."""
        with suppress(self._ray.exceptions.RayError):
            reply = Reply(*self._ray.get(result, timeout=0))
            self._heard(reply.beats, reply.steps)


def end_all(actors: Sequence[RemoteActor]) -> None:
    """Stop actors; kill actors that exceed the grace period."""
    running = [actor for actor in actors if not actor.has_ended]
    if not running or not running[0].session.answers():
        return
    try:
        results = [actor.quit() for actor in running]
        running[0]._ray.wait(results, num_returns=len(results), timeout=CLOSE_GRACE_S)
        for actor, result in zip(running, results, strict=True):
            actor.last_news(result)
    finally:  # If a signal interrupts the wait, no later code would kill the actors.
        for actor in running:
            actor.kill()


class RayPool(RemotePool[RemoteActor]):
    """Pool of workers in Ray actors. The actors end with this process.

    Each worker has a copy of the memory. Written data is sent with calls and results; published
    data is transferred through Ray's object store, once per machine.

    Args:
        specs: Factories and names of the workers.
        backend: Settings of the actors.

    Raises:
        ConfigError: If a factory cannot be sent, or the cluster cannot be reached.
        MissingExtraError: If Ray is not installed.
        WorkerError: If the cluster does not have the resources for the workers.
    """

    def __init__(self, specs: WorkerSpecs, backend: RayBackend) -> None:
        session = backend.session.acquire(backend)  # Ray must be shut down after this pool.
        super().__init__(specs, backend)
        self._release = weakref.finalize(self, session.release)
        self._release.atexit = False  # At exit, `close` runs first and releases the session.
        self._session, self._ray = session, session.ray
        self._memories: dict[int, Memory] = {}
        self._numbers: dict[int, int] = {}
        self._counter = count()
        self._published: dict[int, Any] = {}
        self._links: list[list[Span]] = [[] for _ in specs.make_workers]
        self._steps_before = [0] * len(specs.make_workers)
        self._new = ""  # Method of a running `call_new`.
        try:
            self.host = session.host
            self._options = session.options(backend, len(specs.make_workers), self)
        except BaseException:
            self.close()
            raise
        self._start_all()

    def _started(self, index: int) -> RemoteActor:
        if index < len(self):
            self._steps_before[index] += self._remote[index].steps
        content, _ = pack(self._specs.make_workers[index])
        actor = RemoteActor(self._session, self._options[index], self._specs.names[index], index)
        actor.make(content, self._entropy)
        return actor

    def call(self, index: int, method: str, *args: object) -> None:
        """Send a call to the actor of a worker."""
        self._check_open()
        self._session.check_head()
        content, memories = pack(args)
        numbers = [self._given(index, memory) for memory in memories]
        actor = self._remote[index]
        # A restarted worker has no copies yet.
        sent = [span for span in self._links[index] if span[0] in actor.memories]
        actor.call(method, content, numbers, sent)

    def call_new(self, method: str) -> list[Any]:
        """Call a method of every worker; recreate a worker whose machine is lost."""
        self._new = method
        try:
            return self.call_all(method)
        finally:
            self._new = ""

    def _given(self, index: int, memory: Memory) -> int:
        """Return the id of memory; send its published content to the worker if necessary."""
        is_new = id(memory) not in self._numbers
        number = self._number_of(memory)
        if is_new:
            self.publish(
                memory, [flat(memory)]
            )  # Not allocated by this pool: send the whole memory.
        actor = self._remote[index]
        if number not in actor.memories:
            actor.memories.add(number)
            if number in self._published:
                actor.write(number, self._published[number])
        return number

    def ready(self, timeout_s: float) -> list[int]:
        """Return the workers whose oldest call has finished or failed, including hung workers."""
        self._check_open()
        self._session.check_head()
        heads = {actor.pending[0][0]: actor.index for actor in self._remote if actor.pending}
        if not heads:
            time.sleep(timeout_s)
            return []
        refs = list(heads)
        done, _ = self._ray.wait(refs, timeout=timeout_s)
        if done and len(refs) > 1:
            done, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        found = {heads[ref] for ref in done}
        if not found:
            found = {i for i in heads.values() if self._remote[i].hangs(self.timeout_s)}
        return sorted(found)

    def receive(self, index: int) -> Any:
        """Return the result of the oldest call of a worker; a hung worker is killed."""
        try:
            reply = self._remote[index].receive(self._specs.calls, self.timeout_s)
        except WorkerFailedError as failure:
            if not (self._new and self.may_restart and MACHINE_LOST in failure.text):
                raise
            self.restart(failure.with_traceback(None), failure.text, "and begins")
            return self.ask(index, self._new)
        known = self._memories.keys()
        fill([span for span in reply.written if span[0] in known], self._memories)
        return None if reply.result is None else pickle.loads(reply.result)

    def steps(self, index: int) -> int:
        """Return the number of environment steps of a worker, including steps before restarts."""
        if not self._remote:
            return self._steps_before[index]
        self._remote[index].ask_for_news()
        return self._steps_before[index] + self._remote[index].steps

    def allocate(self, nbytes: int) -> PrivateMemory:
        """Allocate memory of this process; workers have copies."""
        memory = PrivateMemory(nbytes, partial(_forget, weakref.ref(self)))
        self._number_of(memory)
        return memory

    def _number_of(self, memory: Memory) -> int:
        """Return the id of memory; valid until the memory is closed."""
        number = self._numbers.get(id(memory))
        if number is None:
            self._numbers[id(memory)] = number = next(self._counter)
            self._memories[number] = memory
        return number

    def forget(self, memory: PrivateMemory) -> None:
        """Remove memory from the pool; workers release their copies in the next call."""
        number = self._numbers.pop(id(memory), None)
        if number is None:
            return
        del self._memories[number]
        self._published.pop(number, None)
        self._links = [[span for span in spans if span[0] != number] for spans in self._links]
        for actor in self._remote:
            if number in actor.memories:
                actor.memories.remove(number)
                actor.forgotten.append(number)

    def sends(self, index: int, memory: Memory, arrays: Iterable[Array]) -> None:
        """Send views of memory with each call of a worker."""
        self._links[index] += spans_of(arrays, {self._number_of(memory): memory})

    def publish(self, memory: Memory, arrays: Iterable[Array]) -> None:
        """Publish views of memory in the object store; each machine fetches them once."""
        self._check_open()
        number = self._number_of(memory)
        spans = [span[1:] for span in spans_of(arrays, {number: memory})]
        self._published[number] = self._ray.put(spans)
        for actor in self._remote:
            if number in actor.memories:
                actor.write(number, self._published[number])

    def stop(self, index: int) -> None:
        """Stop the actor of a worker."""
        end_all([self._remote[index]])

    def close(self) -> None:
        """Stop all actors; kill actors that exceed the grace period."""
        super().close()
        actors, self._remote = self._remote, []
        try:
            end_all(actors)
        finally:
            for actor in actors:
                self._steps_before[actor.index] += actor.steps
            for known in (self._published, self._memories, self._numbers):
                known.clear()
            self._release()


def _forget(reference: weakref.ref[RayPool], memory: PrivateMemory) -> None:
    """Remove memory from a pool, if the pool still exists."""
    pool = reference()
    if pool is not None:
        pool.forget(memory)


@dataclass(frozen=True)
class RayBackend(RaySettings):
    """Backend with workers in actors of a Ray cluster; see `RayPool`.

    Raises:
        ConfigError: If a setting is out of range.
    """

    def _num_cores(self) -> int:
        """Return the number of workers for which CPUs are available."""
        if self.address == "local":
            return available_cores()
        self.session.connect(self)
        return max(1, int(self.session.free_cpus(self) / self.cpus_per_worker))

    @property
    def has_own_gpus(self) -> bool:
        """Whether each worker has exclusive use of a GPU."""
        return self.gpus_per_worker >= 1

    def pool(self, specs: WorkerSpecs) -> WorkerPool:
        """Create a pool of workers in Ray actors."""
        return RayPool(specs, self)

    def for_learners(self) -> RayBackend:
        """Return a backend for additional learners, with the CPUs and GPUs per learner."""
        return replace(
            self, cpus_per_worker=self.cpus_per_learner, gpus_per_worker=self.gpus_per_learner
        )
