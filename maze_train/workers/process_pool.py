"""Workers in processes of this machine."""

from __future__ import annotations

import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_one_of
from maze_train.errors import WorkerError
from maze_train.workers.memory import SharedMemory
from maze_train.workers.pool import CLOSED
from maze_train.workers.process import PAGE_NBYTES, STEPS
from maze_train.workers.remote import RemotePlace, RemotePool
from maze_train.workers.worker_process import WorkerProcess, end_all, naming_limits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from maze_train.workers.pool import MakeWorker, WorkerPool


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

    def pool(
        self, make_workers: Sequence[MakeWorker], names: Sequence[str], calls: Mapping[str, str]
    ) -> WorkerPool:
        """A pool of workers in processes."""
        return ProcessPool(make_workers, names, calls, self)


class ProcessPool(RemotePool):
    """Workers with a process and a pipe each, which end with this process.

    A worker that raises, dies or hangs gives a `WorkerFailedError`. With
    `on_worker_failure="restart"` it may be started again, with a line on stderr.

    Workers survive SIGINT, SIGTERM, SIGHUP and SIGUSR1: the parent decides.

    Args:
        make_workers: Makes the workers, one function each; sent to the processes.
        names: Names of the workers in messages.
        calls: Names of calls in messages, by method.
        place: Settings of the processes.

    Raises:
        ConfigError: If a worker can not be sent.
        OSError: If a process can not be started.
        WorkerError: If more files would be open than the system allows.
    """

    @naming_limits()
    def __init__(
        self,
        make_workers: Sequence[MakeWorker],
        names: Sequence[str],
        calls: Mapping[str, str],
        place: LocalProcesses,
    ) -> None:
        super().__init__(make_workers, names, calls, place)
        self._start_method = place.start_method
        self._poller = select.poll()
        self._pages = [SharedMemory(PAGE_NBYTES) for _ in make_workers]
        self._processes: list[WorkerProcess] = []
        try:
            for index in range(len(make_workers)):
                self._processes.append(self._started(index))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def processes(self) -> list[BaseProcess]:
        """The processes, in the order of the workers."""
        return [process.process for process in self._processes]

    def _start(self, index: int) -> None:
        self._processes[index] = self._started(index)

    def _started(self, index: int) -> WorkerProcess:
        others = [process.conn for process in self._processes if not process.conn.closed]
        process = WorkerProcess(
            self._names[index], index, self._pages[index], others, self._start_method
        )
        try:
            process.send_worker(self._make_workers[index])
        except BaseException:
            process.end()
            raise
        self._poller.register(process.descriptor, select.POLLIN)
        return process

    # -- calls -----------------------------------------------------------------------------------

    def call(self, index: int, method: str, *args: Any) -> None:
        """Send a call to the process of a worker."""
        self._check_open()
        self._processes[index].call(method, args)

    def pending(self, index: int) -> int:
        """Number of calls without a received result."""
        return len(self._processes[index].pending)

    def ready(self, timeout_s: float) -> list[int]:
        """Workers whose oldest call is done, or failed; those that hang count as well."""
        self._check_open()
        by_descriptor = {p.descriptor: p.index for p in self._processes if not p.conn.closed}
        found = {by_descriptor[number] for number, _ in self._poller.poll(timeout_s * 1000.0)}
        for process in self._processes:
            if process.still_s() > self.timeout_s:
                found.add(process.index)
        return sorted(found)

    def receive(self, index: int) -> Any:
        """The result of the oldest call of a worker; one that hangs is killed."""
        return self._processes[index].receive(self._calls, self.timeout_s)

    def cancel(self, index: int) -> None:
        """Make a worker end the calls that it was sent."""
        self._processes[index].cancel()

    def steps(self, index: int) -> int:
        """Environment steps that the processes of a worker counted."""
        return memoryview(self._pages[index].buffer).cast("q")[STEPS]

    @naming_limits()
    def allocate(self, nbytes: int) -> SharedMemory:
        """Memory that processes can map."""
        return SharedMemory(nbytes)

    def _check_open(self) -> None:
        if not self._processes:
            raise WorkerError(CLOSED)

    # -- failures, ending ------------------------------------------------------------------------

    def stop(self, index: int) -> None:
        """End the process of a worker."""
        process = self._processes[index]
        if not process.conn.closed:
            # Another file may get the number of the descriptor once it is closed.
            self._poller.unregister(process.descriptor)
            end_all([process])

    def close(self) -> None:
        """Let the workers close and end; kill those that take too long."""
        super().close()
        running = [process for process in self._processes if not process.conn.closed]
        self._processes = []
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
