"""Starts workers of environments again, and lets them go on with the call that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.seeding import EpisodeSeeds
from maze_train.workers.pool import WorkerFailedError, check_spaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.envs.buffers import StepBuffers
    from maze_train.envs.journal import Journal
    from maze_train.envs.vector import Array
    from maze_train.envs.worker import StepReport
    from maze_train.workers.pool import WorkerPool


class WorkerRepair:
    """Restarts of the workers of a vector environment.

    Args:
        pool: The workers.
        slices: Indices of the environments of each.
        spaces: Observation and action space of an environment.
        memory: Memory into which they step.
        journal: Journal of the running episodes; None: workers are never started again.
    """

    def __init__(
        self,
        pool: WorkerPool,
        slices: Sequence[range],
        spaces: tuple[Any, Any],
        memory: Any,
        journal: Journal | None,
    ) -> None:
        self._pool, self._slices, self._spaces = pool, slices, spaces
        self._memory, self._journal = memory, journal
        self._num_envs = slices[-1].stop
        self._obs: dict[str, Array] = {}
        self._pairs: list[tuple[Array, Array]] = []

    def keep(self, buffers: StepBuffers) -> None:
        """Let `remember` copy these observations and rewards."""
        self._obs = {key: column.copy() for key, column in buffers.obs.items()}
        self._rewards = buffers.rewards.copy()
        self._pairs = [(self._obs[key], buffers.obs[key]) for key in buffers.obs]
        self._pairs.append((self._rewards, buffers.rewards))

    def remember(self) -> None:
        """Keep the numbers from before a step, to which a new worker has to come."""
        for kept, column in self._pairs:
            kept[...] = column

    def repeat(
        self, failure: WorkerFailedError, root_seed: int, method: str, *args: Any
    ) -> StepReport | None:
        """Start a worker again until it does the call; returns its report.

        Args:
            failure: Failure of the worker.
            root_seed: Seed of the run of episodes.
            method: The call.
            *args: Its arguments.

        Raises:
            MazeTrainError: If it is not to be started again.
            SpaceError: If the environments of a new worker differ in their spaces.
        """
        given_up = 0
        while True:
            outlook = "begin new episodes" if given_up else "are put back where they were"
            self._pool.restart(
                failure,
                f"{failure.text}{self._seeds_of(failure, root_seed, method)}",
                f"and its environments {outlook}",
            )
            try:
                self._begin_again(failure.index)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)  # before it came to the episodes
                continue
            try:
                if given_up:
                    return self._begin_anew(failure.index, root_seed, method, given_up)
                return self._put_back(failure.index, root_seed, method, *args)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _begin_again(self, index: int) -> None:
        """Give a new worker its memory."""
        spaces = self._pool.ask(index, "describe")[:2]
        check_spaces(self._slices[index].start, spaces, self._spaces)
        self._pool.ask(index, "map", self._memory)

    def _put_back(self, index: int, root_seed: int, method: str, *args: Any) -> StepReport | None:
        """Put the environments of a new worker back, and let it do the call."""
        if method == "step":
            assert self._journal is not None
            part = self._slices[index]
            records = [self._journal.record_of(i, self._obs, self._rewards) for i in part]
            problems = self._pool.ask(index, "restore", root_seed, records, False)
            if problems:
                name = f"worker {index} (environments {part.start} to {part.stop - 1})"
                raise WorkerFailedError(index, f"{name}: {problems[0][1]}", raised=True)
        report: StepReport | None = self._pool.ask(index, method, *args)
        return report

    def _begin_anew(self, index: int, root_seed: int, method: str, given_up: int) -> StepReport:
        """Begin new episodes in a new worker, after `given_up` attempts."""
        started = [self._started(i, method) + given_up - 1 for i in self._slices[index]]
        report: StepReport = self._pool.ask(index, "begin", root_seed, started)
        report.lost *= given_up
        return report

    def _started(self, i: int, method: str) -> int:
        """Number of episodes that an environment has started when it does the call."""
        assert self._journal is not None
        return 1 if method == "reset" else self._journal.episodes[i]

    def _seeds_of(self, failure: WorkerFailedError, root_seed: int, method: str) -> str:
        """The seeds of the episodes of a worker, for a message that does not name one."""
        if failure.raised or self._journal is None:
            return ""
        seeds = [
            episode_seed(root_seed, i, self._num_envs, self._started(i, method))
            for i in self._slices[failure.index]
        ]
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"


def episode_seed(root: int, index: int, num_envs: int, episodes: int) -> int:
    """The seed of the last one of `episodes` >= 1 episodes of an environment."""
    seeds = EpisodeSeeds(root, index, num_envs)
    seeds.episodes_started = episodes - 1
    return seeds.next()
