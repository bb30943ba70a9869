"""Many environments, spread over worker processes."""

from __future__ import annotations

import atexit
import os
import pickle
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any, Literal

from maze_train.checks import check_at_least, check_one_of, check_positive
from maze_train.envs.buffers import StepBuffers, map_shared, open_shared
from maze_train.envs.faults import warn
from maze_train.envs.journal import Journal, episode_seed
from maze_train.envs.journaled import JournaledVectorEnv
from maze_train.envs.stepping import ON_NON_FINITE, StepReport
from maze_train.envs.worker import BEGIN, MAP, OWN, QUIT, RESET, RESTORE, STEP
from maze_train.envs.workers import (
    Worker,
    WorkerFailedError,
    WorkerStarter,
    available_cores,
    check_spaces,
    close_at_exit,
    failure_error,
    stop_workers,
)
from maze_train.errors import ConfigError, EnvError, MazeTrainError, WorkerError
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium

    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.vector import Array, ArrayTree, StepResult

__all__ = ["SubprocVectorEnv"]

START_METHODS = ("forkserver", "spawn", "fork")


class SubprocVectorEnv(JournaledVectorEnv):
    """Steps its environments in worker processes, each of which has a contiguous slice of them.

    For environments that take tens of microseconds or more per step. Gives the same numbers as
    `SequentialVectorEnv`, bit for bit, whatever the number of workers. Observations, copies and
    infos are described at `MazeVectorEnv`.

    A worker that raises, dies or hangs ends the whole vector environment with a `WorkerError`; no
    process is left. With `on_worker_failure="restart"` it is told on stderr and started again; its
    environments play their episodes again up to the step that failed, and make that step, so that
    no number is another one. Where that fails too, the worker is started once more, and its
    environments begin new episodes, as described at `MazeVectorEnv`.

    Workers survive SIGINT, SIGTERM, SIGHUP and SIGUSR1: the parent decides.

    Args:
        env_factories: One function per environment, each of which returns a new environment.
            Lambdas and local classes are fine.
        n_workers: Number of processes, >= 0; 0 means one per core that this process may use. Never
            more than there are environments.
        start_method: `forkserver`, `spawn` or `fork`. With the first two, a script needs the guard
            `if __name__ == "__main__":` around what it runs.
        timeout_s: Seconds after which a worker that does not answer counts as hung, > 0. Where
            episodes are played again it holds for each of their steps.
        copy: Whether to return copies of the observations instead of the internal buffers.
        step_infos: Whether to return the infos of every step, which then have to travel between
            processes.
        on_worker_failure: `fail`, or `restart` a worker that raises, dies or hangs in a step or a
            reset. A number that is not finite is no failure of the worker.
        max_worker_restarts: How many times workers are started again at most, >= 0.
        on_non_finite: What to do about NaN and infinities in rewards, observations, and last
            observations of truncated episodes: `raise`, or `skip`: the episode is given up. In the
            first observation of an episode they are always an error.

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
        on_worker_failure: Literal["fail", "restart"] = "fail",
        max_worker_restarts: int = 10,
        on_non_finite: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        check_at_least("n_workers", n_workers, 0)
        check_one_of("start_method", start_method, START_METHODS)
        check_positive("timeout_s", timeout_s)
        check_one_of("on_worker_failure", on_worker_failure, ("fail", "restart"))
        check_at_least("max_worker_restarts", max_worker_restarts, 0)
        check_one_of("on_non_finite", on_non_finite, ON_NON_FINITE)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        self.timeout_s = timeout_s
        self.on_worker_failure = on_worker_failure
        self.max_worker_restarts = max_worker_restarts
        self._workers: list[Worker] = []
        self._memory = -1
        # Before multiprocessing waits for its children, which do not end by its SIGTERM.
        self._at_exit = partial(close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        count = min(n_workers or available_cores(), len(env_factories))
        try:
            self._starter = WorkerStarter(
                env_factories, count, start_method, step_infos, on_non_finite
            )
            for i in range(count):
                self._workers.append(self._starter.start(i, self._workers))
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
        self._check_not_stepping("reset()")
        self._journal.invalidate()
        content = pickle.dumps((self._seed_for(seed), options))
        self._send(RESET, content)
        report = self._gather(RESET, content) or StepReport()
        self._journal.begin(options)
        self._journal.ended(report.lost)
        report.lost = []
        return self._observations(), self._infos(report)

    def step_async(self, actions: Any) -> None:
        """Let the workers begin a step, see `MazeVectorEnv`.

        Raises:
            WorkerError: If this vector environment is closed.
        """
        super().step_async(actions)
        for kept, column in self._before:
            kept[...] = column
        self._send(STEP)

    def _finish_step(self) -> StepResult:
        return self._step_result(self._gather(STEP))

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments and end; kill those that take too long."""
        if hasattr(self, "_workers"):
            atexit.unregister(self._at_exit)
            stop_workers(self._workers, QUIT)
            if self._memory >= 0:
                os.close(self._memory)
                self._memory = -1

    def _own_states(self) -> Sequence[dict[str, Any] | None]:
        states: list[dict[str, Any] | None] = []
        if not self._offers_own_state:
            return [None] * self.num_envs
        problem = None
        try:
            for worker in self._workers:
                worker.send(OWN)
            for worker in self._workers:
                told: Any = [None] * (worker.stop - worker.first)
                # The next step finds a worker that died. Until then the journal knows as much.
                with suppress(WorkerFailedError):
                    told = worker.receive("telling the state of its environments", self.timeout_s)
                problem = problem or (told if isinstance(told, str) else None)
                states += told
        except BaseException:
            self.close()
            raise
        if problem is not None:
            raise EnvError(problem)
        return states

    def _restore(
        self, root: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, str]]:
        self._journal.invalidate()
        try:
            for worker in self._workers:
                part = records[worker.first : worker.stop]
                worker.hand_over(RESTORE, pickle.dumps((root, part, allow_new_episodes)))
            return sum_lists(self._receive("playing episodes again"))
        except BaseException:
            self.close()
            raise

    def _share_memory(self, num_envs: int) -> None:
        """Learn the spaces from the workers, and give them the memory to step into."""
        described = self._receive("building its environments")
        observation_space, action_space, metadata, self.render_mode, _ = described[0]
        self._offers_own_state = any(offers for *_, offers in described)
        for worker, spaces in zip(self._workers, described, strict=True):
            check_spaces(worker, spaces[:2], described[0][:2])
        self._spaces = (observation_space, action_space)
        self._describe(observation_space, action_space, num_envs, metadata)
        observation = FlatView(observation_space)
        nbytes = StepBuffers.nbytes(observation, self._action, num_envs)
        self._memory = open_shared(nbytes)
        for worker in self._workers:
            self._send_memory(worker)
        self._receive("mapping the shared memory")
        memory = map_shared(os.dup(self._memory), nbytes)
        self._buffers = buffers = StepBuffers.over(memory, observation, self._action, num_envs)
        self._journal = Journal(buffers.actions)
        self._obs_before: dict[str, Array] = {}
        self._before: list[tuple[Array, Array]] = []
        if self.on_worker_failure == "restart":
            self._obs_before = {key: column.copy() for key, column in buffers.obs.items()}
            self._rewards_before = buffers.rewards.copy()
            self._before = [(self._obs_before[key], buffers.obs[key]) for key in buffers.obs]
            self._before.append((self._rewards_before, buffers.rewards))

    def _send_memory(self, worker: Worker) -> None:
        worker.send(MAP)
        with suppress(BrokenPipeError, ConnectionResetError):
            send_handle(worker.conn, self._memory, worker.process.pid)

    def _send(self, command: bytes, content: bytes = b"") -> None:
        """Let all workers begin to obey a command."""
        if self.closed:
            raise WorkerError("this vector environment is closed: build a new one")
        try:
            for worker in self._workers:
                worker.send(command, content)
        except BaseException:
            self.close()
            raise

    def _gather(self, command: bytes, content: bytes = b"") -> StepReport | None:
        """Join what workers report of a command that they were sent."""
        try:
            failures: list[WorkerFailedError] = []
            parts = self._receive(CALLS[command], failures)
            for failure in failures:
                parts[failure.worker.index] = self._repair(failure, command, content)
        except BaseException:
            # Also after Ctrl+C: replies left in the pipe would be taken for those to the next call.
            self.close()
            raise
        reports = [part for part in parts if part is not None]
        return joined(reports) if reports else None

    def _receive(self, what: str, failures: list[WorkerFailedError] | None = None) -> list[Any]:
        """One reply of each worker, in their order; None for one with no content.

        Failures are appended to the list; without one, the first is raised.
        """
        deadline = time.monotonic() + self.timeout_s
        replies = []
        # Waiting for one after the other wakes this process less often than waiting for all.
        for worker in self._workers:
            try:
                replies.append(worker.receive(what, self.timeout_s, deadline))
            except WorkerFailedError as failure:
                if failures is None:
                    raise self._error(failure) from None
                # Without its frames, which would keep this object alive.
                failures.append(failure.with_traceback(None))
                replies.append(None)
        return replies

    def _repair(
        self, failure: WorkerFailedError, command: bytes, content: bytes
    ) -> StepReport | None:
        """Start a worker again until it obeys the command; returns its report."""
        index, given_up = failure.worker.index, 0
        while True:
            told = f"{failure.text}{self._seeds_of(failure, command)}"
            spent = self.worker_restarts >= self.max_worker_restarts
            if self.on_worker_failure == "fail" or failure.final or spent:
                raise self._error(failure, told)
            warn(
                f"{told}; it is started again (restart {self.worker_restarts + 1} of at most "
                f"{self.max_worker_restarts}), and its environments "
                f"{'begin new episodes' if given_up else 'are put back where they were'}"
                f"{failure.appendix}"
            )
            try:
                worker = self._replace(index)
                if given_up:
                    return self._begin_anew(worker, command, given_up)
                return self._again(worker, command, content)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _replace(self, index: int) -> Worker:
        """End what is left of a worker, and start it again."""
        stop_workers([self._workers.pop(index)], QUIT)
        worker = self._starter.start(index, self._workers)
        self._workers.insert(index, worker)
        self.worker_restarts += 1
        spaces = worker.receive("building its environments", self.timeout_s)[:2]
        check_spaces(worker, spaces, self._spaces)
        self._send_memory(worker)
        worker.receive("mapping the shared memory", self.timeout_s)
        return worker

    def _again(self, worker: Worker, command: bytes, content: bytes) -> StepReport | None:
        """Put the environments of a new worker back, and let it obey the command."""
        if command == STEP:
            records = [
                self._journal.record_of(i, self._obs_before, self._rewards_before)
                for i in range(worker.first, worker.stop)
            ]
            worker.hand_over(RESTORE, pickle.dumps((self.root_seed, records, False)))
            problems = worker.receive("playing episodes again", self.timeout_s)
            if problems:
                raise WorkerFailedError(worker, f"{worker}: {problems[0][1]}", names_seed=True)
        worker.send(command, content)
        report: StepReport | None = worker.receive(CALLS[command], self.timeout_s)
        return report

    def _begin_anew(self, worker: Worker, command: bytes, given_up: int) -> StepReport:
        """Begin new episodes in a new worker, after so many were given up."""
        started = [self._started(i, command) + given_up - 1 for i in worker.envs]
        worker.send(BEGIN, pickle.dumps((self.root_seed, started)))
        report: StepReport = worker.receive("a reset", self.timeout_s)
        report.lost *= given_up
        return report

    def _started(self, i: int, command: bytes) -> int:
        """How many episodes an environment has started when it obeys the command."""
        return 1 if command == RESET else self._journal.episodes[i]

    def _seeds_of(self, failure: WorkerFailedError, command: bytes) -> str:
        """The seeds of the episodes of a worker, for a message that does not name one."""
        if failure.names_seed or self.root_seed is None:
            return ""
        seeds = [
            episode_seed(self.root_seed, i, self.num_envs, self._started(i, command))
            for i in failure.worker.envs
        ]
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"

    def _error(self, failure: WorkerFailedError, told: str | None = None) -> MazeTrainError:
        """The error that ends this vector environment."""
        if told is None:
            return failure.error or WorkerError(f"{failure.text}{failure.appendix}")
        return failure_error(
            failure,
            told,
            restarts=self.worker_restarts,
            max_worker_restarts=self.max_worker_restarts,
            on_worker_failure=self.on_worker_failure,
        )


CALLS = {STEP: "a step", RESET: "a reset"}
"""What workers do, for messages."""


def joined(reports: Sequence[StepReport]) -> StepReport:
    """What several workers report, in one."""
    return StepReport(
        final=sum_lists([report.final for report in reports]),
        ordinary=sum_lists([report.ordinary for report in reports]),
        lost=sum_lists([report.lost for report in reports]),
        continuing=sum_lists([report.continuing for report in reports]),
    )


def sum_lists(lists: Sequence[list[Any]]) -> list[Any]:
    """The lists in a row."""
    return list(chain.from_iterable(lists))
