"""Many environments, spread over worker processes."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

from maze_train.checks import check_one_of
from maze_train.envs.buffers import StepBuffers
from maze_train.envs.journal import Journal, episode_seed
from maze_train.envs.journaled import JournaledVectorEnv
from maze_train.envs.stepping import ON_NON_FINITE, StepReport
from maze_train.envs.worker import EnvWorker
from maze_train.errors import ConfigError, EnvError, WorkerError
from maze_train.spaces.describe import FlatView
from maze_train.workers.messages import Portable
from maze_train.workers.places import LocalProcesses
from maze_train.workers.pool import WorkerFailedError
from maze_train.workers.task_queue import check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium

    from maze_train.envs.journal import EpisodeRecord
    from maze_train.envs.vector import Array, ArrayTree, StepResult

__all__ = ["SubprocVectorEnv"]

CALLS = {
    "step": "a step",
    "reset": "a reset",
    "begin": "a reset",
    "restore": "playing episodes again",
    "own_states": "telling the state of its environments",
    "map": "mapping the shared memory",
}
"""Names of the calls of workers in messages."""


class SubprocVectorEnv(JournaledVectorEnv):
    """Steps its environments in worker processes, each of which has a contiguous slice of them.

    For environments that take tens of microseconds or more per step. Gives the same numbers as
    `SequentialVectorEnv`, bit for bit, whatever the number of workers. Observations, copies and
    infos are described at `MazeVectorEnv`.

    A worker that raises, dies or hangs ends the whole vector environment with a `WorkerError`; no
    process is left. With `on_worker_failure="restart"` it is started again with a line on stderr;
    its environments play their episodes again up to the step that failed, and make that step, so
    that no number is another one. Where that fails too, the worker is started once more, and its
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
        on_non_finite: Reaction to NaN and infinities in rewards, observations, and last
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
        check_one_of("on_non_finite", on_non_finite, ON_NON_FINITE)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        place = LocalProcesses(
            n_workers, start_method, timeout_s, on_worker_failure, max_worker_restarts
        )
        n = len(env_factories)
        count = place.num_workers(n)
        bounds = [n * i // count for i in range(count + 1)]
        self._slices = [range(first, stop) for first, stop in pairwise(bounds)]
        make_workers = [
            partial(
                EnvWorker,
                Portable(list(env_factories[part.start : part.stop]), "env"),
                part.start,
                n,
                step_infos,
                on_non_finite,
            )
            for part in self._slices
        ]
        names = [
            f"worker {i} (environments {part.start} to {part.stop - 1})"
            for i, part in enumerate(self._slices)
        ]
        self.on_worker_failure = on_worker_failure
        self._pool = place.pool(make_workers, names, CALLS)
        self._memory: Any = None
        try:
            self._share_memory(n)
        except BaseException:
            self.close()
            raise

    @property
    def n_workers(self) -> int:
        """Number of worker processes."""
        return len(self._pool)

    @property
    def worker_restarts(self) -> int:
        """Number of workers that were started again."""
        return self._pool.restarts

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
        arguments = self._seed_for(seed), options
        self._call("reset", *arguments)
        report = self._gather("reset", *arguments) or StepReport()
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
        self._call("step")

    def _finish_step(self) -> StepResult:
        return self._step_result(self._gather("step"))

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments and end; kill those that take too long."""
        if hasattr(self, "_pool"):
            self._pool.close()
            if self._memory is not None:
                self._memory.close()

    def _own_states(self) -> Sequence[dict[str, Any] | None]:
        states: list[dict[str, Any] | None] = []
        if not self._offers_own_state:
            return [None] * self.num_envs
        problem = None
        self._call("own_states")
        try:
            for index, part in enumerate(self._slices):
                told: Any = [None] * len(part)
                # The next step finds a worker that died. Until then the journal knows as much.
                with suppress(WorkerFailedError):
                    told = self._pool.receive(index)
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
        for index, part in enumerate(self._slices):
            own = records[part.start : part.stop]
            self._pool.call(index, "restore", root, own, allow_new_episodes)
        return sum_lists(self._results("restore"))

    def _share_memory(self, num_envs: int) -> None:
        """Learn the spaces from the workers, and give them the memory to step into."""
        described = self._pool.call_all("describe")
        observation_space, action_space, metadata, self.render_mode, _ = described[0]
        self._offers_own_state = any(offers for *_, offers in described)
        for part, spaces in zip(self._slices, described, strict=True):
            check_spaces(part.start, spaces[:2], described[0][:2])
        self._spaces = (observation_space, action_space)
        self._describe(observation_space, action_space, num_envs, metadata)
        observation = FlatView(observation_space)
        self._memory = self._pool.allocate(StepBuffers.nbytes(observation, self._action, num_envs))
        self._pool.call_all("map", self._memory)
        self._buffers = buffers = StepBuffers.over(
            self._memory.buffer, observation, self._action, num_envs
        )
        self._journal = Journal(buffers.actions)
        self._obs_before: dict[str, Array] = {}
        self._before: list[tuple[Array, Array]] = []
        if self.on_worker_failure == "restart":
            self._obs_before = {key: column.copy() for key, column in buffers.obs.items()}
            self._rewards_before = buffers.rewards.copy()
            self._before = [(self._obs_before[key], buffers.obs[key]) for key in buffers.obs]
            self._before.append((self._rewards_before, buffers.rewards))

    def _call(self, method: str, *args: Any) -> None:
        """Start a call in all workers."""
        if self.closed:
            raise WorkerError("this vector environment is closed: build a new one")
        try:
            for index in range(len(self._slices)):
                self._pool.call(index, method, *args)
        except BaseException:
            self.close()
            raise

    def _gather(self, method: str, *args: Any) -> StepReport | None:
        """Join what workers report of a call; those that failed are repaired and called again."""
        reports = []
        failures: list[WorkerFailedError] = []
        try:
            # Waiting for one after the other wakes this process less often than waiting for all.
            for index in range(len(self._slices)):
                try:
                    reports.append(self._pool.receive(index))
                except WorkerFailedError as error:
                    # Without its frames, which would keep this object alive.
                    failures.append(error.with_traceback(None))
            for failure in failures:
                reports.insert(failure.index, self._repair(failure, method, *args))
        except BaseException:
            # Also after Ctrl+C: results that were not received would be taken for later ones.
            self.close()
            raise
        told = [report for report in reports if report is not None]
        return joined(told) if told else None

    def _results(self, method: str) -> list[Any]:
        """Receive the result of each worker; a failure ends this vector environment."""
        try:
            return [self._pool.receive(index) for index in range(len(self._slices))]
        except WorkerFailedError as failure:
            self.close()
            raise failure.error or WorkerError(failure.text + failure.appendix) from None
        except BaseException:
            self.close()
            raise

    def _repair(self, failure: WorkerFailedError, method: str, *args: Any) -> StepReport | None:
        """Start a worker again until it does the call; returns its report."""
        given_up = 0
        while True:
            outlook = "begin new episodes" if given_up else "are put back where they were"
            self._pool.restart(
                failure,
                f"{failure.text}{self._seeds_of(failure, method)}",
                f"and its environments {outlook}",
            )
            try:
                self._begin_again(failure.index)
                if given_up:
                    return self._begin_anew(failure.index, method, given_up)
                return self._put_back(failure.index, method, *args)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _ask(self, index: int, method: str, *args: Any) -> Any:
        """Call a method of a worker, and wait for the result."""
        self._pool.call(index, method, *args)
        return self._pool.receive(index)

    def _begin_again(self, index: int) -> None:
        """Give a new worker its memory."""
        spaces = self._ask(index, "describe")[:2]
        check_spaces(self._slices[index].start, spaces, self._spaces)
        self._ask(index, "map", self._memory)

    def _put_back(self, index: int, method: str, *args: Any) -> StepReport | None:
        """Put the environments of a new worker back, and let it do the call."""
        if method == "step":
            records = [
                self._journal.record_of(i, self._obs_before, self._rewards_before)
                for i in self._slices[index]
            ]
            problems = self._ask(index, "restore", self.root_seed, records, False)
            if problems:
                part = self._slices[index]
                name = f"worker {index} (environments {part.start} to {part.stop - 1})"
                raise WorkerFailedError(index, f"{name}: {problems[0][1]}", raised=True)
        report: StepReport | None = self._ask(index, method, *args)
        return report

    def _begin_anew(self, index: int, method: str, given_up: int) -> StepReport:
        """Begin new episodes in a new worker, after `given_up` attempts."""
        started = [self._started(i, method) + given_up - 1 for i in self._slices[index]]
        report: StepReport = self._ask(index, "begin", self.root_seed, started)
        report.lost *= given_up
        return report

    def _started(self, i: int, method: str) -> int:
        """Number of episodes that an environment has started when it does the call."""
        return 1 if method == "reset" else self._journal.episodes[i]

    def _seeds_of(self, failure: WorkerFailedError, method: str) -> str:
        """The seeds of the episodes of a worker, for a message that does not name one."""
        if failure.raised or self.root_seed is None:
            return ""
        seeds = [
            episode_seed(self.root_seed, i, self.num_envs, self._started(i, method))
            for i in self._slices[failure.index]
        ]
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"


def joined(reports: Sequence[StepReport]) -> StepReport:
    """Join the reports of several workers."""
    return StepReport(
        final=sum_lists([report.final for report in reports]),
        ordinary=sum_lists([report.ordinary for report in reports]),
        lost=sum_lists([report.lost for report in reports]),
        continuing=sum_lists([report.continuing for report in reports]),
    )


def sum_lists(lists: Sequence[list[Any]]) -> list[Any]:
    """The lists in a row."""
    return list(chain.from_iterable(lists))
