"""Workers in processes on this machine: the pool, its backend, and the main loop of a process."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, EnvError, MissingExtraError, WorkerError, user_cause
from maze_train.core.files import claim_temporary, process_runs
from maze_train.core.names import SIGNALS
from maze_train.core.notices import warn
from maze_train.core.seeding import seed_generators
from maze_train.workers.backends import (
    GUARD,
    PROCESS_NAME,
    RemoteBackend,
    limit_threads,
    refuse_import,
)
from maze_train.workers.pool import (
    CallCancelledError,
    MakeWorker,
    Memory,
    PrivateMemory,
    SharedMemory,
    WorkerContext,
    WorkerFailedError,
    WorkerPool,
    WorkerSpecs,
    open_shared,
)
from maze_train.workers.remote import BUILDING, CLOSE_GRACE_S, RemotePool, RemoteWorker

QUIT, DEFINE, CALL = b"\x00", b"\x01", b"\x02"
"""Commands from the pool. `QUIT`: close the worker and exit. `DEFINE`: a method name follows and
gets the next index. `CALL`: a message with a method index and arguments follows."""

FIRST_METHOD = 16
"""Byte 16 + n calls method n without arguments."""

MAX_METHODS = 256 - FIRST_METHOD

DONE, RESULT, FAILED = b"d", b"r", b"f"
"""Replies of a worker. `DONE`: the call returned None. `RESULT`: a pickled result follows.
`FAILED`: a pickled description of the failure follows."""

PIPE_NBYTES = 1 << 15
"""Larger messages are sent in an anonymous file, so that sending never blocks on a hung worker."""


class _Pickler(pickle.Pickler):
    """Pickles memory objects as references; the memory is sent separately."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.memories: list[Any] = []

    def persistent_id(self, obj: object) -> tuple[int, int] | None:
        if not isinstance(obj, (SharedMemory, PrivateMemory)):
            return None
        self.memories.append(obj)
        return len(self.memories) - 1, obj.nbytes


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory_of: Callable[[int, int], Memory]) -> None:
        super().__init__(file)
        self._memory_of = memory_of

    def persistent_load(self, pid: tuple[int, int]) -> Memory:
        return self._memory_of(*pid)


def pack(value: object) -> tuple[bytes, list[Any]]:
    """Pickle a value; return the bytes and the referenced memory objects."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.memories


def unpack(content: bytes, memory_of: Callable[[int, int], Memory]) -> Any:
    """Restore a value from `pack`; `memory_of(k, nbytes)` returns memory object k."""
    return _Unpickler(io.BytesIO(content), memory_of).load()


def send_message(conn: Connection, process: int, value: object) -> None:
    """Send a value that may contain shared memory.

    Args:
        conn: The pipe.
        process: Process id of the receiver.
        value: The value to send.
    """
    content, memories = pack(value)
    in_file = len(content) > PIPE_NBYTES
    head = bytes([in_file, len(memories)])
    conn.send_bytes(head if in_file else head + content)
    if in_file:
        with open(open_shared(0), "wb") as shared:
            shared.write(content)
            shared.flush()
            send_handle(conn, shared.fileno(), process)
    for memory in memories:
        send_handle(conn, memory.descriptor, process)


def receive_message(conn: Connection) -> Any:
    """Receive a value from `send_message`."""
    content = conn.recv_bytes()
    in_file, num_memories, content = content[0], content[1], content[2:]
    if in_file:
        with open(recv_handle(conn), "rb") as shared:
            os.lseek(shared.fileno(), 0, os.SEEK_SET)  # Both processes share the file position.
            content = shared.read()
    descriptors = [recv_handle(conn) for _ in range(num_memories)]
    return unpack(content, lambda number, nbytes: SharedMemory(nbytes, descriptors[number]))


def dumps(value: object) -> bytes:
    """Pickle a value, falling back to the slower cloudpickle for objects of local classes.

    Raises:
        Exception: If pickle cannot serialise the value; the type depends on the value.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        import cloudpickle

        content: bytes = cloudpickle.dumps(value)
        return content


BEATS, STEPS, CANCELLED, BUILT = range(4)
"""int64 values in memory shared by pool and process: progress counter, environment steps, number of
cancelled calls (counted from the first call), whether the worker has been created."""

PAGE_NBYTES = 4096
"""Size of the memory with these values, in bytes."""

ORPHAN_CHECK_S = 2.0
"""Interval in seconds at which a worker checks that its parent is alive."""


def process_main(
    conn: Connection, inherited: Sequence[Connection], index: int, parent: int, entropy: int
) -> None:
    """Create a worker, and run its methods until the parent quits or dies.

    Args:
        conn: End of the pipe to the parent.
        inherited: Pipe ends inherited from the parent by `fork`; this function closes them.
        index: Index of the worker.
        parent: Process id of the caller.
        entropy: Seed of the global random number generators, combined with the index of the worker.
    """
    survive_signals()
    for other in inherited:
        other.close()
    closing = ExitStack()
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            _serve(conn, closing, index, _watch(parent, conn), entropy)
        except BaseException as error:
            _send(conn, FAILED, pickle.dumps(describe_failure(error)))
    try:
        closing.close()
    except BaseException as error:
        warn(str(error))
    conn.close()


def _serve(
    conn: Connection,
    closing: ExitStack,
    index: int,
    parent_is_gone: Callable[[], bool],
    entropy: int,
) -> None:
    set_up_packages(entropy, index, IMPORTING)
    make_worker, page = receive_message(conn)
    set_up_packages(entropy, index, MAKING)
    context = ProcessContext(index, page, parent_is_gone)
    worker = make_worker(context)
    closing.callback(worker.close)
    set_up_packages(entropy, index, CALLING)
    context.numbers[BUILT] = 1
    methods: list[Callable[..., Any]] = []
    for command in _commands(conn, parent_is_gone):
        if command == DEFINE:
            methods.append(worker.method(conn.recv_bytes().decode()))
            continue
        number, args = command[0] - FIRST_METHOD, ()
        if command == CALL:
            number, args = receive_message(conn)
        result = context.run(methods[number], args)
        if result is None:
            os.write(conn.fileno(), DONE)
        else:
            _send(conn, RESULT, encoded(result))


class ProcessContext(WorkerContext):
    """Context of a worker in a separate process.

    Args:
        index: Index of the worker.
        page: Memory shared with the pool; see `BEATS`.
        parent_is_gone: Returns whether the parent has died.
    """

    is_remote = True

    def __init__(self, index: int, page: Any, parent_is_gone: Callable[[], bool]) -> None:
        super().__init__(index)
        self.numbers = memoryview(page.buffer).cast("q")
        self._parent_is_gone = parent_is_gone
        self._next_look = time.monotonic() + ORPHAN_CHECK_S
        self._number_of_call = 0

    def run(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a method; return None if the call was cancelled."""
        self._number_of_call += 1
        if self.numbers[CANCELLED] >= self._number_of_call:
            return None
        try:
            return method(*args)
        except CallCancelledError:
            return None

    def seed_generators(self, seed: int) -> None:
        """Seed the global random number generators with `seed` and the index of the worker."""
        seed_generators(seed, self.index)

    def count(self, steps: int = 0) -> None:
        """Report progress and the number of new environment steps."""
        numbers = self.numbers
        numbers[BEATS] += 1
        numbers[STEPS] += steps
        if numbers[CANCELLED] >= self._number_of_call > 0:
            raise CallCancelledError
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + ORPHAN_CHECK_S
            if self._parent_is_gone():
                raise CallCancelledError


def _watch(parent: int, conn: Connection) -> Callable[[], bool]:
    """Return a function that checks whether the parent process is gone.

    The function checks that the other end of the pipe is open and that the process runs. Both
    checks are required, because unrelated forks of the parent may keep a copy of the pipe end open.
    """
    poller = select.poll()
    poller.register(conn.fileno(), 0)  # Hang-ups only.
    return lambda: bool(poller.poll(0)) or not process_runs(parent)


def _commands(conn: Connection, parent_is_gone: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the commands of the parent until it quits or dies."""
    poller = select.poll()
    descriptor = conn.fileno()
    poller.register(descriptor, select.POLLIN)
    while True:
        while not poller.poll(ORPHAN_CHECK_S * 1000.0):
            if parent_is_gone():
                return
        command = os.read(descriptor, 1)
        if not command or command == QUIT:
            return
        yield command


def _send(conn: Connection, kind: bytes, content: bytes) -> None:
    os.write(conn.fileno(), kind)
    conn.send_bytes(content)


def encoded(result: object) -> bytes:
    """Pickle a result.

    Raises:
        EnvError: If the result cannot be pickled.
    """
    try:
        return dumps(result)
    except Exception as error:
        raise EnvError(
            f"infos cannot be sent to the main process ({error}): remove objects that cannot be "
            "pickled from the info dict of the environment, or use runner=dev"
        ) from error


def survive_signals() -> None:
    """Install handlers that ignore `SIGNALS` in a worker process."""
    for number in SIGNALS:
        # Programs started by an environment would inherit SIG_IGN.
        signal.signal(number, _survive)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _survive(number: int, frame: object) -> None:
    """Ignore the signal."""


IMPORTING, MAKING, CALLING = range(3)
"""Phases of a worker. The setup is repeated after each phase, which may have imported PyTorch."""


def set_up_packages(entropy: int, index: int, phase: int) -> None:
    """Limit the threads of a worker, and seed the global random number generators.

    Without seeding, all forked workers would sample the same random numbers as their parent.

    Args:
        entropy: See `process_main`.
        index: Index of the worker.
        phase: `IMPORTING`, `MAKING` or `CALLING`.
    """
    limit_threads()
    seed_generators(entropy, index, phase)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Return the arguments of `WorkerFailedError` for an exception, except the index."""
    message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    trace = traceback.format_exception(cause) if user_cause(error) else []
    known = error if isinstance(error, (ConfigError, MissingExtraError)) else None
    is_final = known is not None or (isinstance(cause, EnvError) and cause.is_final)
    return {
        "text": message,
        "trace": "".join(trace),
        "error": known,
        "final": is_final,
        "seed": error.seed if isinstance(error, EnvError) else None,
        "raised": True,
    }


LOST_EXIT_CODE = 255
"""Exit code reported by multiprocessing if the fork server of the process has died."""


@contextmanager
def naming_limits() -> Iterator[None]:
    """Replace errors about too many open files by an error that names the remedy.

    Raises:
        WorkerError: If the process has too many open files.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        import resource  # Not available on Windows.

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise WorkerError(
            f"too many open files: the limit of this process is {limit} (ulimit -n), too low for "
            "the workers: increase it, for example ulimit -n 4096, or reduce runner.n_workers"
        ) from None


class WorkerProcess(RemoteWorker):
    """Handle of a worker process.

    Args:
        name: Name of the worker in messages.
        index: Index of the worker.
        page: Memory shared with the process; remains valid after the process ends.
        others: Pipes to other processes, closed in a forked process.
        start_method: `forkserver`, `spawn` or `fork`.
        entropy: Seed of the global random number generators, combined with the index of the worker.
        preload: Modules for a newly started fork server to import once.
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
        """Send the factory of the worker to the process."""
        # Broken pipes are ignored when sending: `receive` first returns the remaining replies of
        # the worker, then reports the broken pipe.
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
            pass  # See `send_worker`.

    def _define(self, method: str) -> bytes:
        """Register a method; return the command for a call without arguments."""
        number = len(self._methods)
        assert number < MAX_METHODS
        self._methods[method] = bytes([FIRST_METHOD + number])
        os.write(self.descriptor, DEFINE)
        self.conn.send_bytes(method.encode())
        return self._methods[method]

    def cancel(self) -> None:
        """Cancel all calls sent so far."""
        self._numbers[CANCELLED] = self._sent

    def still_s(self) -> float:
        """Return the time in seconds since the last progress; 0 if no call is pending."""
        if not self.pending:
            return 0.0
        now, beats = time.monotonic(), self._numbers[BEATS]
        if beats != self._beats:
            self._beats, self.since = beats, now
        return now - self.since

    def receive(self, calls: Mapping[str, str], timeout_s: float) -> Any:
        """Wait for the result of the oldest call.

        Args:
            calls: Description of each method, for messages.
            timeout_s: Time in seconds without progress after which the process is considered hung.

        Raises:
            WorkerFailedError: If the worker raised, died or hung. A hung process is killed.
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
        """Return the description of the current or last call."""
        if not self._numbers[BUILT]:
            return calls.get(BUILDING, BUILDING)
        # An idle process can die as well.
        method = self.pending[0] if self.pending else "waiting"
        return calls.get(method, method)

    def wait(self, deadline: float) -> None:
        """Wait until the process has exited, or until `deadline`."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        while self._lost_sight() and time.monotonic() < deadline:
            time.sleep(0.01)

    def quit(self) -> None:
        """Ask the process to exit."""
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(self.descriptor, QUIT)
        # Closing the pipe unblocks a worker that is sending.
        self.conn.close()

    def end(self) -> None:
        """Kill the process and release its resources."""
        self.conn.close()
        self.kill()
        self.process.join()
        self.process.close()

    def kill(self) -> None:
        """Kill the process without waiting for it to exit."""
        self.process.kill()
        if self._lost_sight():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGKILL)

    def _lost_sight(self) -> bool:
        """Whether the process runs although multiprocessing reports an exit.

        The exit code is unknown if the fork server, which reports exit codes, has died.
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
    """Return the modules of maze_train to preload for workers.

    Importing these modules would take 0.3 s per worker, or more with PyTorch. Third-party modules
    are not preloaded, because they might not be fork-safe.
    """
    names = {process_main.__module__}
    for make_worker in make_workers:
        made: object = make_worker
        while isinstance(made, partial):
            made = made.func
        names.add(str(made.__module__))
    package = __name__.partition(".")[0]
    return sorted(name for name in names if name.partition(".")[0] == package)


@contextmanager
def signals_held_back(start_method: str) -> Iterator[None]:
    """Block the signals that workers ignore until a new worker has installed its handlers.

    A new process inherits the signal mask, and the worker unblocks the signals. The resource
    tracker, used by all start methods except `fork`, is started with the signals blocked. A fork
    server is started with the previous mask, because all processes that it forks would inherit
    blocked signals, including processes of other users of the server.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if start_method != "fork":
            resource_tracker.ensure_running()  # This unblocks the signals.
        mask = before if start_method == "forkserver" else before | set(SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_all(processes: Sequence[WorkerProcess]) -> None:
    """Stop worker processes; kill processes that exceed the grace period."""
    try:
        for process in processes:
            process.quit()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for process in processes:
            process.wait(deadline)
    finally:  # If a signal interrupts the wait, no later code would kill the processes.
        for process in processes:
            process.kill()
        for process in processes:
            process.end()


START_METHODS = ("forkserver", "spawn", "fork")


@dataclass(frozen=True)
class LocalProcesses(RemoteBackend):
    """Backend with worker processes on this machine; see `ProcessPool`.

    Raises:
        ConfigError: If a setting is out of range, or the platform does not support the workers.
    """

    start_method: str = "forkserver"
    """`forkserver`, `spawn` or `fork`. With `forkserver` and `spawn`, a script must guard its main
    code with `if __name__ == "__main__":`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (hasattr(select, "poll") and hasattr(signal, "pthread_sigmask")):
            problem = "worker processes require Linux or macOS; use runner=dev and a single learner"
            raise ConfigError("runner", problem)
        check_one_of("start_method", self.start_method, START_METHODS)

    @property
    def forks(self) -> bool:
        """Whether workers are forks of this process."""
        return self.start_method == "fork"

    def pool(self, specs: WorkerSpecs) -> WorkerPool:
        """Create a pool of worker processes."""
        return ProcessPool(specs, self)


class ProcessPool(RemotePool[WorkerProcess]):
    """Pool of worker processes with one pipe each. The workers end with this process.

    If a worker raises, dies or hangs, a `WorkerFailedError` is raised. With
    `on_worker_failure="restart"`, the worker may be restarted, and a warning is printed to stderr.
    Workers ignore `SIGNALS`, which the parent handles.

    Args:
        specs: Factories and names of the workers.
        backend: Settings of the processes.

    Raises:
        ConfigError: If a factory cannot be sent.
        OSError: If a process cannot be started.
        WorkerError: If the system limit on open files is exceeded.
    """

    @naming_limits()
    def __init__(self, specs: WorkerSpecs, backend: LocalProcesses) -> None:
        super().__init__(specs, backend)
        self._start_method = backend.start_method
        self._preload = modules_to_preload(specs.make_workers)
        self._poller = select.poll()
        self._pages = [SharedMemory(PAGE_NBYTES) for _ in specs.make_workers]
        self._start_all()

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in order of the workers."""
        return [process.process for process in self._remote]

    def _started(self, index: int) -> WorkerProcess:
        others = [process.conn for process in self._remote if not process.conn.closed]
        process = WorkerProcess(
            self._specs.names[index],
            index,
            self._pages[index],
            others,
            self._start_method,
            self._entropy,
            self._preload,
        )
        try:
            process.send_worker(self._specs.make_workers[index])
        except BaseException:
            process.end()
            raise
        self._poller.register(process.descriptor, select.POLLIN)
        return process

    def call(self, index: int, method: str, *args: object) -> None:
        """Send a call to a worker process."""
        self._check_open()
        self._remote[index].call(method, args)

    def ready(self, timeout_s: float) -> list[int]:
        """Return the workers whose oldest call has finished or failed, including hung workers."""
        self._check_open()
        by_descriptor = {p.descriptor: p.index for p in self._remote if not p.conn.closed}
        found = {by_descriptor[number] for number, _ in self._poller.poll(timeout_s * 1000.0)}
        for process in self._remote:
            if process.still_s() > self.timeout_s:
                found.add(process.index)
        return sorted(found)

    def receive(self, index: int) -> Any:
        """Return the result of the oldest call of a worker; a hung worker is killed."""
        return self._remote[index].receive(self._specs.calls, self.timeout_s)

    def steps(self, index: int) -> int:
        """Return the number of environment steps of a worker, including steps before restarts."""
        return memoryview(self._pages[index].buffer).cast("q")[STEPS]

    @naming_limits()
    def allocate(self, nbytes: int) -> SharedMemory:
        """Allocate memory that worker processes can map."""
        return SharedMemory(nbytes)

    def stop(self, index: int) -> None:
        """Stop the process of a worker."""
        process = self._remote[index]
        if not process.conn.closed:
            # The descriptor may be reused after it is closed.
            self._poller.unregister(process.descriptor)
            end_all([process])

    def close(self) -> None:
        """Stop all processes; kill processes that exceed the grace period."""
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
