"""Workers in Ray actors, on this machine or others."""

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

from maze_train.workers.places import available_cores
from maze_train.workers.pool import Crew, PrivateMemory, WorkerFailedError, WorkerPool
from maze_train.workers.process import pack
from maze_train.workers.ray_session import LOOK_S, RaySession, RaySettings
from maze_train.workers.ray_worker import RayWorker, Reply, Span, fill, flat, spans_of
from maze_train.workers.remote import BUILDING, CLOSE_GRACE_S, RemotePool, RemoteWorker

if TYPE_CHECKING:
    from maze_train.core.types import Array


SIDE = "side"
"""Concurrency group of what does not wait for the call that runs."""

NEWS_S = 0.2
"""Seconds between two questions for the steps of a call that runs."""

PULSE_S = 5.0
"""Seconds within which a living worker has to answer."""

MACHINE_LOST = "its machine is lost, or cannot be reached"

REMEDY = (
    "every machine needs this module: set runner.working_dir to the folder of your modules (it is "
    "sent along), or install it there"
)


class RemoteActor(RemoteWorker):
    """An actor with a worker, seen from its pool.

    Args:
        session: The connection.
        options: Where it is started.
        name: Name of the worker in messages.
        index: Its number.

    Attributes:
        memories: Numbers of the pieces of memory that it has a copy of.
        forgotten: Numbers of those that it gives back with the next call.
        steps: Environment steps that it reported.
    """

    def __init__(self, session: RaySession, options: dict[str, Any], name: str, index: int) -> None:
        super().__init__(name, index)
        self.session = session
        self._ray = ray = session.ray
        self.memories: set[int] = set()
        self.forgotten: list[int] = []
        self.steps = 0
        self.has_ended = self._was_made = False
        self._sent = self._mail = self._beats = 0
        self._news: Any = None
        self._asked = 0.0
        self._handle = ray.remote(concurrency_groups={SIDE: 1})(RayWorker)
        self._handle = self._handle.options(**options).remote(index)

    def make(self, content: bytes, entropy: int) -> None:
        """Let it make its worker, and seed the global random generators of its process."""
        self._made = self._handle.make.remote(content, sys.path, entropy)

    def call(self, method: str, content: bytes, numbers: list[int], sent: list[Span]) -> None:
        """Send a call."""
        if not self.pending:
            self.since = time.monotonic()
        self._sent += 1
        forgotten, self.forgotten = self.forgotten, []
        result = self._handle.call.remote(method, content, numbers, sent, self._mail, forgotten)
        self.pending.append((result, method))

    def _at_once(self, method: Any, *args: Any) -> Any:
        """Call a method of the actor that does not wait for the call that runs."""
        return method.options(concurrency_group=SIDE).remote(*args)

    def write(self, number: int, published: Any) -> None:
        """Send it the published data, before all calls that follow."""
        self._mail += 1
        self._at_once(self._handle.write, number, published)

    def cancel(self) -> None:
        """Cancel the calls that were sent."""
        self._at_once(self._handle.cancel, self._sent)

    # -- signs of life ---------------------------------------------------------------------------

    def _heard(self, beats: int, steps: int) -> None:
        if beats != self._beats:
            self._beats, self.since = beats, time.monotonic()
        self.steps = max(self.steps, steps)

    def ask_for_news(self, wait_s: float = 0.0) -> None:
        """Listen to the answer to the last question, and ask the next one from time to time.

        Args:
            wait_s: Seconds to wait for an answer.
        """
        if self._news is not None and self._ray.wait([self._news], timeout=wait_s)[0]:
            with suppress(self._ray.exceptions.RayError):  # The result of its call will show it.
                self._heard(*self._ray.get(self._news))
            self._news = None
        if self._news is None and self.pending and time.monotonic() > self._asked + NEWS_S:
            self._ask()

    def _ask(self) -> None:
        self._news, self._asked = self._at_once(self._handle.pulse), time.monotonic()

    def hangs(self, timeout_s: float) -> bool:
        """Whether it gave no sign of life for so long."""
        if not self.pending or time.monotonic() - self.since <= timeout_s:
            return False
        self._ask()  # The answer to the last question may be old.
        self.ask_for_news(min(PULSE_S, timeout_s))
        if not self._was_made and self._is_made():
            self._was_made, self.since = True, time.monotonic()  # a sign of life
        return time.monotonic() - self.since > timeout_s

    # -- results ---------------------------------------------------------------------------------

    def receive(self, calls: Mapping[str, str], timeout_s: float) -> Reply:
        """Wait for the result of the oldest call.

        Args:
            calls: Names of calls in messages, by method.
            timeout_s: Seconds without a sign of life after which the actor counts as hung.

        Raises:
            WorkerFailedError: If the worker raised, died or hangs; then it is killed.
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

    def _is_made(self) -> bool:
        with suppress(self._ray.exceptions.RayError):
            return bool(self._ray.get(self._made, timeout=0))
        return False

    def _died(self, what: str, calls: Mapping[str, str], error: Exception) -> WorkerFailedError:
        what = what if self._is_made() else calls.get(BUILDING, BUILDING)
        if not self.session.answers():
            self.has_ended = True
            self.pending.clear()
            return WorkerFailedError(self.index, self.session.head_lost, final=True)
        self.kill()
        text, unreachable = " ".join(str(error).split()), self._ray.exceptions.ActorUnavailableError
        if getattr(error, "_actor_init_failed", False):
            how = f"{text.rpartition(' ^')[2].lstrip('^ ')}: {REMEDY}"
        elif "its node has died" in text or isinstance(error, unreachable):
            how = MACHINE_LOST
        else:
            how = "its process ended; was memory exhausted?"
        return WorkerFailedError(self.index, f"{self.name} died in {what} ({how})")

    def quit(self) -> Any:
        """Ask it to close its worker; returns the reference of its result."""
        self.cancel()
        return self._handle.close.remote()

    def kill(self) -> None:
        """End it."""
        self.has_ended = True
        self.pending.clear()
        self._ray.kill(self._handle)

    def last_news(self, result: Any) -> None:
        """Record its last report, from when it closed."""
        with suppress(self._ray.exceptions.RayError):
            reply = Reply(*self._ray.get(result, timeout=0))
            self._heard(reply.beats, reply.steps)


def end_all(actors: Sequence[RemoteActor]) -> None:
    """Let workers close and end; kill those that take too long."""
    running = [actor for actor in actors if not actor.has_ended]
    if not running or not running[0].session.answers():
        return
    try:
        results = [actor.quit() for actor in running]
        running[0]._ray.wait(results, num_returns=len(results), timeout=CLOSE_GRACE_S)
        for actor, result in zip(running, results, strict=True):
            actor.last_news(result)
    finally:  # a signal may end the wait, after which no one knows of them
        for actor in running:
            actor.kill()


class RayPool(RemotePool[RemoteActor]):
    """Workers with a Ray actor each, which end with this process.

    Each worker has a copy of the memory; what was written travels with calls and results, and what
    is published through Ray's object store, to each machine once.

    Args:
        crew: The workers.
        place: Settings of the actors.

    Raises:
        ConfigError: If a worker cannot be sent, or there is no such cluster.
        MissingExtraError: If Ray is not installed.
        WorkerError: If the cluster has no room for the workers.
    """

    def __init__(self, crew: Crew, place: RayPlace) -> None:
        session = place.session.acquire(place)  # At exit, Ray is to end after this pool.
        super().__init__(crew, place)
        self._release = weakref.finalize(self, session.release)
        self._release.atexit = False  # `close` is called then, and comes first.
        self._session, self._ray = session, session.ray
        self._memories: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._counter = count()
        self._published: dict[int, Any] = {}
        self._links: list[list[Span]] = [[] for _ in crew.make_workers]
        self._steps_before = [0] * len(crew.make_workers)
        self._new = ""  # method that is called of workers which were just made
        try:
            self.host = session.host
            self._options = session.options(place, len(crew.make_workers), self)
        except BaseException:
            self.close()
            raise
        self._start_all()

    def _started(self, index: int) -> RemoteActor:
        if index < len(self):
            self._steps_before[index] += self._remote[index].steps
        content, _ = pack(self._crew.make_workers[index])
        actor = RemoteActor(self._session, self._options[index], self._crew.names[index], index)
        actor.make(content, self._entropy)
        return actor

    # -- calls -----------------------------------------------------------------------------------

    def call(self, index: int, method: str, *args: Any) -> None:
        """Send a call to the actor of a worker."""
        self._check_open()
        self._session.check_head()
        content, memories = pack(args)
        numbers = [self._given(index, memory) for memory in memories]
        actor = self._remote[index]
        # A worker that was started again has no memory at first.
        sent = [span for span in self._links[index] if span[0] in actor.memories]
        actor.call(method, content, numbers, sent)

    def call_new(self, method: str) -> list[Any]:
        """Call a method of every worker; where its machine is lost, it is made on another one."""
        self._new = method
        try:
            return self.call_all(method)
        finally:
            self._new = ""

    def _given(self, index: int, memory: Any) -> int:
        """The number of a piece of memory for a worker, with its published content."""
        is_new = id(memory) not in self._numbers
        number = self._number_of(memory)
        if is_new:
            self.publish(memory, [flat(memory)])  # someone else made it: no one knows of what
        actor = self._remote[index]
        if number not in actor.memories:
            actor.memories.add(number)
            if number in self._published:
                actor.write(number, self._published[number])
        return number

    def ready(self, timeout_s: float) -> list[int]:
        """Workers whose oldest call is done, or failed; those that hang count as well."""
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
        """The result of the oldest call of a worker; one that hangs is killed."""
        try:
            reply = self._remote[index].receive(self._crew.calls, self.timeout_s)
        except WorkerFailedError as failure:
            if not (self._new and self.may_restart and MACHINE_LOST in failure.text):
                raise
            self.restart(failure.with_traceback(None), failure.text, "and begins")
            return self.ask(index, self._new)
        known = self._memories.keys()
        fill([span for span in reply.written if span[0] in known], self._memories)
        return None if reply.result is None else pickle.loads(reply.result)

    def steps(self, index: int) -> int:
        """Environment steps that the actors of a worker reported."""
        if not self._remote:
            return self._steps_before[index]
        self._remote[index].ask_for_news()
        return self._steps_before[index] + self._remote[index].steps

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> PrivateMemory:
        """Memory of this process; each worker has a copy."""
        memory = PrivateMemory(nbytes, partial(_forget, weakref.ref(self)))
        self._number_of(memory)
        return memory

    def _number_of(self, memory: Any) -> int:
        """The number of a piece of memory, which is kept until it is closed."""
        number = self._numbers.get(id(memory))
        if number is None:
            self._numbers[id(memory)] = number = next(self._counter)
            self._memories[number] = memory
        return number

    def forget(self, memory: PrivateMemory) -> None:
        """Give back what is known of memory; workers do so with their next call."""
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

    def sends(self, index: int, memory: Any, arrays: Iterable[Array]) -> None:
        """Let views of memory go to a worker with each of its calls."""
        self._links[index] += spans_of(arrays, {self._number_of(memory): memory})

    def publish(self, memory: Any, arrays: Iterable[Array]) -> None:
        """Put views of memory into the object store, from where each machine takes them once."""
        self._check_open()
        number = self._number_of(memory)
        spans = [span[1:] for span in spans_of(arrays, {number: memory})]
        self._published[number] = self._ray.put(spans)
        for actor in self._remote:
            if number in actor.memories:
                actor.write(number, self._published[number])

    # -- ending ----------------------------------------------------------------------------------

    def stop(self, index: int) -> None:
        """End the actor of a worker."""
        end_all([self._remote[index]])

    def close(self) -> None:
        """Let the workers close and end; kill those that take too long."""
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
    """Let a pool that still exists give memory back."""
    pool = reference()
    if pool is not None:
        pool.forget(memory)


@dataclass(frozen=True)
class RayPlace(RaySettings):
    """Actors of a Ray cluster; see `RayPool`.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    def _num_cores(self) -> int:
        """Return the number of workers that there is room for."""
        if self.address == "local":
            return available_cores()
        self.session.connect(self)
        return max(1, int(self.session.free_cpus(self) / self.cpus_per_worker))

    @property
    def has_own_gpus(self) -> bool:
        """Whether a whole GPU is reserved for each worker."""
        return self.gpus_per_worker >= 1

    def pool(self, crew: Crew) -> WorkerPool:
        """A pool of workers in actors."""
        return RayPool(crew, self)

    def for_learners(self) -> RayPlace:
        """The same cluster, with the CPUs and GPUs of learners."""
        return replace(
            self, cpus_per_worker=self.cpus_per_learner, gpus_per_worker=self.gpus_per_learner
        )
