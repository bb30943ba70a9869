"""Many environments, spread over worker processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_at_least, check_one_of, check_positive
from maze_train.envs.buffers import StepBuffers, map_shared, open_shared
from maze_train.envs.stepping import StepReport
from maze_train.envs.vector import ArrayTree, MazeVectorEnv, StepResult
from maze_train.envs.worker import (
    DONE,
    FAILED,
    MAP,
    QUIT,
    RESET,
    STEP,
    WorkerTask,
    worker_main,
)
from maze_train.errors import ConfigError, SpaceError, WorkerError
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import gymnasium

__all__ = ["SubprocVectorEnv"]

START_METHODS = ("forkserver", "spawn", "fork")

CLOSE_GRACE_S = 5.0
"""How long workers may take to close their environments before they are killed."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process, seen from its parent."""

    index: int
    first: int
    stop: int
    process: BaseProcess
    conn: Connection
    descriptor: int
    poller: select.poll

    def __str__(self) -> str:
        return f"worker {self.index} (environments {self.first} to {self.stop - 1})"


class SubprocVectorEnv(MazeVectorEnv):
    """Steps its environments in worker processes, each of which has a contiguous slice of them.

    For environments that take tens of microseconds or more per step. Gives the same numbers as
    `SequentialVectorEnv`, bit for bit, whatever the number of workers. Observations, copies and
    infos are described at `MazeVectorEnv`.

    A worker that raises, dies or hangs ends the whole vector environment with a `WorkerError`; no
    process is left.

    Args:
        env_factories: One function per environment, each of which returns a new environment.
            Lambdas and local classes are fine.
        n_workers: Number of processes, >= 0; 0 means one per core that this process may use. Never
            more than there are environments.
        start_method: `forkserver`, `spawn` or `fork`. With the first two, a script needs the guard
            `if __name__ == "__main__":` around what it runs.
        timeout_s: Seconds after which a worker that does not answer counts as hung, > 0.
        copy: Whether to return copies of the observations instead of the internal buffers.
        step_infos: Whether to return the infos of every step, which then have to travel between
            processes.

    Raises:
        ConfigError: If an argument is out of its range.
        SpaceError: If the environments differ in their spaces, or a space can not be flattened.
        WorkerError: If an environment can not be built, or a worker dies or hangs.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        *,
        n_workers: int = 0,
        start_method: str = "forkserver",
        timeout_s: float = 300.0,
        copy: bool = False,
        step_infos: bool = False,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        check_at_least("n_workers", n_workers, 0)
        check_one_of("start_method", start_method, START_METHODS)
        check_positive("timeout_s", timeout_s)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        self.timeout_s = timeout_s
        self._workers: list[Worker] = []
        try:
            self._start(env_factories, n_workers, start_method)
            self._share_memory(len(env_factories))
        except BaseException:
            self.close()
            raise

    @property
    def n_workers(self) -> int:
        """Number of worker processes."""
        return len(self._workers)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Start a run of episodes.

        Args:
            seed: Names the run of episodes, an integer >= 0; None draws one.
            options: Passed to the reset of every environment, not to later autoresets.

        Returns:
            The first observations, [num_envs, ...], and the infos of the resets.

        Raises:
            WorkerError: If an environment raises or returns something invalid, or a worker dies or
                hangs.
        """
        report = self._call(RESET, pickle.dumps((self._seed_for(seed), options)))
        return self._observations(), self._infos(report or StepReport())

    def step(self, actions: Any) -> StepResult:
        """Step every environment once.

        Args:
            actions: [num_envs, ...], or a flat dict of such arrays when the action space is a Dict
                or Tuple.

        Returns:
            Observations, rewards (float64), terminated, truncated (bool), [num_envs, ...] each, and
            infos.

        Raises:
            ShapeError: If the actions have the wrong shape.
            SpaceError: If the actions have the wrong type.
            WorkerError: If an environment raises or returns something invalid, or a worker dies or
                hangs.
        """
        self._put_actions(actions)
        return self._step_result(self._call(STEP))

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments and end; kill those that take too long."""
        if hasattr(self, "_workers"):
            self._stop()

    def _start(
        self, factories: Sequence[Callable[[], Any]], n_workers: int, start_method: str
    ) -> None:
        import cloudpickle  # Imported here, since only worker processes and their parents need it.

        context = multiprocessing.get_context(start_method)
        n = len(factories)
        count = min(n_workers or available_cores(), n)
        bounds = [n * i // count for i in range(count + 1)]
        for i in range(count):
            first, stop = bounds[i], bounds[i + 1]
            ours, theirs = context.Pipe()
            inherited = [w.conn for w in self._workers] + [ours] if start_method == "fork" else []
            task = WorkerTask(
                cloudpickle.dumps(list(factories[first:stop])), first, n, self.step_infos
            )
            process = context.Process(  # type: ignore[attr-defined]  # BaseContext lacks it
                target=worker_main,
                args=(theirs, inherited, task),
                name=f"maze-env-worker-{i}",
                daemon=True,
            )
            process.start()
            theirs.close()
            poller = select.poll()
            poller.register(ours.fileno(), select.POLLIN)
            self._workers.append(Worker(i, first, stop, process, ours, ours.fileno(), poller))

    def _share_memory(self, num_envs: int) -> None:
        """Learn the spaces from the workers, and give them the memory to step into."""
        described = self._receive("building its environments")
        observation_space, action_space, metadata, self.render_mode = described[0]
        for worker, (other_observation, other_action, *_) in zip(
            self._workers, described, strict=True
        ):
            if (other_observation, other_action) != (observation_space, action_space):
                raise SpaceError(
                    f"the spaces of environment {worker.first} are {other_observation} and "
                    f"{other_action}, those of environment 0 are {observation_space} and "
                    f"{action_space}: all environments must have equal spaces"
                )
        self._describe(observation_space, action_space, num_envs, metadata)
        observation = FlatView(observation_space)
        nbytes = StepBuffers.nbytes(observation, self._action, num_envs)
        descriptor = open_shared(nbytes)
        try:
            for worker in self._workers:
                self._send(worker, MAP)
                send_handle(worker.conn, descriptor, worker.process.pid)
            self._receive("mapping the shared memory")
        finally:
            memory = map_shared(descriptor, nbytes)
        self._buffers = StepBuffers.over(memory, observation, self._action, num_envs)

    def _call(self, command: bytes, content: bytes = b"") -> StepReport | None:
        """Let all workers obey a command, and join what they report."""
        if self.closed:
            raise WorkerError("this vector environment is closed: build a new one")
        what = "a step" if command == STEP else "a reset"
        try:
            for worker in self._workers:
                self._send(worker, command, content)
            parts = [part for part in self._receive(what) if part is not None]
        except BaseException:
            # Also after Ctrl+C: replies left in the pipe would be taken for those to the next call.
            self.close()
            raise
        return StepReport(*map(sum_lists, zip(*parts, strict=True))) if parts else None

    def _send(self, worker: Worker, command: bytes, content: bytes = b"") -> None:
        # A broken pipe is no news here: the reader finds it, after what the worker had to say
        # before it ended.
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(worker.descriptor, command)
            if content:
                worker.conn.send_bytes(content)

    def _receive(self, what: str) -> list[Any]:
        """One reply of each worker, unpickled, in their order; None for one with no content."""
        deadline = time.monotonic() + self.timeout_s
        replies = []
        # Waiting for one after the other wakes this process less often than waiting for all.
        for worker in self._workers:
            if not worker.poller.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
                raise self._hung(worker, what)
            replies.append(self._reply(worker, what))
        return replies

    def _reply(self, worker: Worker, what: str) -> Any:
        try:
            kind = os.read(worker.descriptor, 1)
            if kind == DONE:
                return None
            content = pickle.loads(worker.conn.recv_bytes())
        except (EOFError, OSError):
            raise self._died(worker, what) from None
        if kind == FAILED:
            text, trace, configuration_error = content
            if configuration_error is not None:
                raise configuration_error
            raise WorkerError(f"{worker}: {text}\n\nIn the worker process:\n{trace}")
        return content

    def _died(self, worker: Worker, what: str) -> WorkerError:
        worker.process.join(CLOSE_GRACE_S)
        code = worker.process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += "; was memory exhausted?"
        hint = ""
        if what.startswith("building") and code == 1:
            hint = '. A script that starts processes needs the guard `if __name__ == "__main__":`'
        worker.process.kill()
        return WorkerError(f"{worker} died in {what} ({how}){hint}")

    def _hung(self, worker: Worker, what: str) -> WorkerError:
        worker.process.kill()
        return WorkerError(
            f"{worker} hangs: it did not finish {what} within timeout_s = {self.timeout_s:g} "
            "seconds, and was killed"
        )

    def _stop(self) -> None:
        for worker in self._workers:
            self._send(worker, QUIT)
            # Frees a worker that is blocked on sending us something.
            worker.conn.close()
        deadline = time.monotonic() + CLOSE_GRACE_S
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.process.close()
        self._workers = []


def sum_lists(lists: tuple[list[Any], ...]) -> list[Any]:
    """The lists in a row."""
    return list(chain.from_iterable(lists))


def available_cores() -> int:
    """Number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
