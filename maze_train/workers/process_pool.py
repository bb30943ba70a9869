"""Workers in processes of this machine, as their pool sees them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maze_train.core.checks import check_one_of
from maze_train.core.errors import WorkerError
from maze_train.core.files import claim_temporary, process_runs
from maze_train.workers.places import GUARD, PROCESS_NAME, SIGNALS, RemotePlace, refuse_import
from maze_train.workers.pool import Crew, MakeWorker, SharedMemory, WorkerFailedError, WorkerPool
from maze_train.workers.process import (
    BEATS,
    BUILT,
    CALL,
    CANCELLED,
    DEFINE,
    DONE,
    FAILED,
    FIRST_METHOD,
    MOST_METHODS,
    PAGE_NBYTES,
    QUIT,
    STEPS,
    process_main,
    send_message,
)
from maze_train.workers.remote import BUILDING, CLOSE_GRACE_S, RemotePool, RemoteWorker

LOST_EXIT_CODE = 255
"""Exit code that multiprocessing reports for a process whose fork server is gone."""


@contextmanager
def naming_limits() -> Iterator[None]:
    """Let a limit of open files that is too small for workers be named.

    Raises:
        WorkerError: If it is reached.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise WorkerError(
            f"too many open files: this process may have {limit} (ulimit -n), which is too few for "
            "its workers: raise it, such as ulimit -n 4096, or set a smaller runner.n_workers"
        ) from None


class WorkerProcess(RemoteWorker):
    """A process with a worker, seen from its pool.

    Args:
        name: Name of the worker in messages.
        index: Its number.
        page: Memory of the numbers that both sides see; it outlives the process.
        others: Pipes to other processes.
        start_method: `forkserver`, `spawn` or `fork`.
        entropy: Seeds the global random generators, together with the number of the worker.
        preload: Modules that a fork server imports once, if this process starts it.
    """

    def __init__(
        self,
        name: str,
        index: int,
        page: SharedMemory,
        others: Sequence[Connection],
        start_method: str,
        entropy: int,
        preload: list[str],
    ) -> None:
        super().__init__(name, index)
        self._page = page
        self._numbers = memoryview(page.buffer).cast("q")
        self._numbers[CANCELLED] = self._numbers[BUILT] = 0
        self._beats = self._numbers[BEATS]
        self._methods: dict[str, bytes] = {}
        self._sent = 0
        refuse_import()
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            claim_temporary()
            multiprocessing.set_forkserver_preload(preload)
        self.conn, theirs = context.Pipe()
        inherited = [*others, self.conn] if start_method == "fork" else []
        self.process: BaseProcess = context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
            target=process_main,
            args=(theirs, inherited, index, os.getpid(), entropy),
            name=f"{PROCESS_NAME}-{index}",
            daemon=True,
        )
        with signals_held_back(start_method):
            self.process.start()
        theirs.close()
        self.descriptor = self.conn.fileno()
        self._waiting = select.poll()
        self._waiting.register(self.descriptor, select.POLLIN)

    def send_worker(self, make_worker: MakeWorker) -> None:
        """Let the process make its worker."""
        # A broken pipe is no news here, nor in calls: the reader finds it, after what the worker
        # had to say before it ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            send_message(self.conn, self.process.pid or 0, (make_worker, self._page))

    def call(self, method: str, args: tuple[Any, ...]) -> None:
        """Send a call."""
        if not self.pending:
            self.since = time.monotonic()
        self.pending.append(method)
        self._sent += 1
        try:
            command = self._methods.get(method) or self._define(method)
            if args:
                os.write(self.descriptor, CALL)
                message = (command[0] - FIRST_METHOD, args)
                send_message(self.conn, self.process.pid or 0, message)
            else:
                os.write(self.descriptor, command)
        except (BrokenPipeError, ConnectionResetError):
            pass  # As in `send_worker`.

    def _define(self, method: str) -> bytes:
        """Give a method a number; returns the command that calls it without arguments."""
        number = len(self._methods)
        assert number < MOST_METHODS
        self._methods[method] = bytes([FIRST_METHOD + number])
        os.write(self.descriptor, DEFINE)
        self.conn.send_bytes(method.encode())
        return self._methods[method]

    def cancel(self) -> None:
        """Cancel the calls that were sent."""
        self._numbers[CANCELLED] = self._sent

    def still_s(self) -> float:
        """Seconds since the process was seen to move; 0 while it has nothing to do."""
        if not self.pending:
            return 0.0
        now, beats = time.monotonic(), self._numbers[BEATS]
        if beats != self._beats:
            self._beats, self.since = beats, now
        return now - self.since

    def receive(self, calls: Mapping[str, str], timeout_s: float) -> Any:
        """Wait for the result of the oldest call.

        Args:
            calls: Names of calls in messages, by method.
            timeout_s: Seconds without a sign of life after which the process counts as hung.

        Raises:
            WorkerFailedError: If the worker raised, died or hangs; then it is killed.
        """
        kind, content = b"", None
        try:
            waited = time.monotonic() - self.since
            while not self._waiting.poll(max(0.0, timeout_s - waited) * 1000.0):
                waited = self.still_s()
                if waited >= timeout_s:
                    raise self.hung(self._what(calls), timeout_s)
            kind = os.read(self.descriptor, 1)
            self.since = time.monotonic()
            if kind == DONE:
                self.pending.popleft()
                return None
            if kind:
                content = pickle.loads(self.conn.recv_bytes())
        except (EOFError, OSError):
            kind = b""
        if not kind:
            raise self._died(self._what(calls))
        if kind == FAILED:
            assert content is not None
            content["text"] = f"{self.name}: {content['text']}"
            raise WorkerFailedError(self.index, **content)
        self.pending.popleft()
        return content

    def _what(self, calls: Mapping[str, str]) -> str:
        """Name of what the process does, or did last."""
        if not self._numbers[BUILT]:
            return calls.get(BUILDING, BUILDING)
        # A process that has nothing to do may die as well.
        method = self.pending[0] if self.pending else "waiting"
        return calls.get(method, method)

    def wait(self, deadline: float) -> None:
        """Wait until the process ended, at most until `deadline`."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        while self._lost_sight() and time.monotonic() < deadline:
            time.sleep(0.01)

    def quit(self) -> None:
        """Ask the process to end."""
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(self.descriptor, QUIT)
        # Frees a worker that is blocked on sending something.
        self.conn.close()

    def end(self) -> None:
        """Kill the process and give back what belongs to it."""
        self.conn.close()
        self.kill()
        self.process.join()
        self.process.close()

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self.process.kill()
        if self._lost_sight():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGKILL)

    def _lost_sight(self) -> bool:
        """Whether the process runs, although multiprocessing reports that it ended.

        That is so when its fork server is gone, which would report its end.
        """
        lost = self.process.exitcode == LOST_EXIT_CODE
        return lost and self.process.pid is not None and process_runs(self.process.pid)

    def _died(self, what: str) -> WorkerFailedError:
        self.wait(time.monotonic() + CLOSE_GRACE_S)
        code = self.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += "; was memory exhausted?"
        hint = f". {GUARD}" if not self._numbers[BUILT] and code == 1 else ""
        self.kill()
        return WorkerFailedError(self.index, f"{self.name} died in {what} ({how}){hint}")


def modules_to_preload(make_workers: Sequence[MakeWorker]) -> list[str]:
    """Return the modules of this package that workers import, without those of environments.

    A worker takes 0.3 s to import them, and more if it needs PyTorch. Custom modules are left to
    the workers: they may not stand a fork.
    """
    names = {process_main.__module__}
    for make_worker in make_workers:
        made: Any = make_worker
        while isinstance(made, partial):
            made = made.func
        names.add(str(made.__module__))
    package = __name__.partition(".")[0]
    return sorted(name for name in names if name.partition(".")[0] == package)


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Hold back the signals that workers survive, while one is started that is not ready for them.

    A new process inherits the mask, and a worker lifts it. The resource tracker, which other start
    methods than `fork` need, keeps it. Not so a fork server: every process that anybody starts from
    it would keep the mask as well.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # It lifts the mask on the way.
        mask = before if start_method == "forkserver" else before | set(SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """Let workers close and end; kill those that take too long."""
    try:
        for process in processes:
            process.quit()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for process in processes:
            process.wait(deadline)
    finally:  # a signal may end the wait, after which no one knows of them
        for process in processes:
            process.kill()
        for process in processes:
            process.end()


START_METHODS = ("forkserver", "spawn", "fork")


@dataclass(frozen=True)
class LocalProcesses(RemotePlace):
    """Processes of this machine; see `ProcessPool`.

    Raises:
        ConfigError: If a setting is out of its range.
    """

    start_method: str = "forkserver"
    """`forkserver`, `spawn` or `fork`. With the first two, a script needs the guard
    `if __name__ == "__main__":` around what it runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("start_method", self.start_method, START_METHODS)

    def pool(self, crew: Crew) -> WorkerPool:
        """A pool of workers in processes."""
        return ProcessPool(crew, self)


class ProcessPool(RemotePool[WorkerProcess]):
    """Workers with a process and a pipe each, which end with this process.

    A worker that raises, dies or hangs gives a `WorkerFailedError`. With
    `on_worker_failure="restart"` it may be started again, with a line on stderr.

    Workers survive SIGINT, SIGTERM, SIGHUP and SIGUSR1: the parent decides.

    Args:
        crew: The workers.
        place: Settings of the processes.

    Raises:
        ConfigError: If a worker cannot be sent.
        OSError: If a process cannot be started.
        WorkerError: If more files would be open than the system allows.
    """

    @naming_limits()
    def __init__(self, crew: Crew, place: LocalProcesses) -> None:
        super().__init__(crew, place)
        self._start_method = place.start_method
        self._preload = modules_to_preload(crew.make_workers)
        self._poller = select.poll()
        self._pages = [SharedMemory(PAGE_NBYTES) for _ in crew.make_workers]
        self._start_all()

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in the order of the workers."""
        return [process.process for process in self._remote]

    def _started(self, index: int) -> WorkerProcess:
        others = [process.conn for process in self._remote if not process.conn.closed]
        process = WorkerProcess(
            self._crew.names[index],
            index,
            self._pages[index],
            others,
            self._start_method,
            self._entropy,
            self._preload,
        )
        try:
            process.send_worker(self._crew.make_workers[index])
        except BaseException:
            process.end()
            raise
        self._poller.register(process.descriptor, select.POLLIN)
        return process

    # -- calls -----------------------------------------------------------------------------------

    def call(self, index: int, method: str, *args: Any) -> None:
        """Send a call to the process of a worker."""
        self._check_open()
        self._remote[index].call(method, args)

    def ready(self, timeout_s: float) -> list[int]:
        """Workers whose oldest call is done, or failed; those that hang count as well."""
        self._check_open()
        by_descriptor = {p.descriptor: p.index for p in self._remote if not p.conn.closed}
        found = {by_descriptor[number] for number, _ in self._poller.poll(timeout_s * 1000.0)}
        for process in self._remote:
            if process.still_s() > self.timeout_s:
                found.add(process.index)
        return sorted(found)

    def receive(self, index: int) -> Any:
        """The result of the oldest call of a worker; one that hangs is killed."""
        return self._remote[index].receive(self._crew.calls, self.timeout_s)

    def steps(self, index: int) -> int:
        """Environment steps that the processes of a worker counted."""
        return memoryview(self._pages[index].buffer).cast("q")[STEPS]

    @naming_limits()
    def allocate(self, nbytes: int) -> SharedMemory:
        """Memory that processes can map."""
        return SharedMemory(nbytes)

    # -- failures, ending ------------------------------------------------------------------------

    def stop(self, index: int) -> None:
        """End the process of a worker."""
        process = self._remote[index]
        if not process.conn.closed:
            # Another file may get the number of the descriptor once it is closed.
            self._poller.unregister(process.descriptor)
            end_all([process])

    def close(self) -> None:
        """Let the workers close and end; kill those that take too long."""
        super().close()
        running = [process for process in self._remote if not process.conn.closed]
        self._remote = []
        try:
            for process in running:
                process.cancel()
                self._poller.unregister(process.descriptor)
        finally:
            try:
                end_all(running)
            finally:
                for page in self._pages:
                    page.close()
