"""Restarts of failed workers of a vector environment."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from maze_train.core.notices import warn
from maze_train.core.seeding import episode_seed
from maze_train.envs.batch import StepReport
from maze_train.envs.calls import EnvCall
from maze_train.envs.journal import Journal
from maze_train.envs.vector import Array, StepBuffers
from maze_train.workers.pool import (
    Memory,
    WorkerFailedError,
    WorkerPool,
    check_spaces,
    worker_names,
)


class WorkerRepair:
    """Restarts failed workers of a vector environment.

    Args:
        pool: The workers.
        slices: Indices of the environments of each worker.
        spaces: Observation and action space of one environment.
        memory: Shared memory for the results of steps.
        journal: Journal of the running episodes, required for restarts; if None, errors do not
            contain the seeds of the episodes.
        calls: All calls of the environments.
        seeded_as: See `SliceSettings`.
        paused: Indices of the paused environments, which are not restored.
    """

    def __init__(
        self,
        pool: WorkerPool,
        slices: Sequence[range],
        spaces: tuple[Any, Any],
        memory: Memory,
        journal: Journal | None,
        calls: list[EnvCall],
        seeded_as: tuple[int, int],
        paused: Set[int],
    ) -> None:
        self._pool, self._slices, self._spaces = pool, slices, spaces
        self._memory, self._journal, self._calls = memory, journal, calls
        self._first, self._num_envs = seeded_as
        self._paused = paused
        self._obs: dict[str, Array] = {}
        self._pairs: list[tuple[Array, Array]] = []

    def keep(self, buffers: StepBuffers) -> None:
        """Register the buffers that `remember` copies."""
        self._obs = {key: column.copy() for key, column in buffers.obs.items()}
        self._rewards = buffers.rewards.copy()
        self._pairs = [(self._obs[key], buffers.obs[key]) for key in buffers.obs]
        self._pairs.append((self._rewards, buffers.rewards))

    def remember(self) -> None:
        """Copy observations and rewards before a step; a restarted worker must reproduce them."""
        for kept, column in self._pairs:
            kept[...] = column

    def repeat(
        self, failure: WorkerFailedError, root_seed: int, method: str, *args: object
    ) -> StepReport | None:
        """Restart a worker until it completes the call or begins new episodes; return its report.

        If a call of `run.call_envs`, or saving the state of environments, fails again after a
        restart, the run ends instead.

        Args:
            failure: Failure of the worker.
            root_seed: Seed of the sequence of episodes.
            method: Method of the call.
            *args: Arguments of the call.

        Raises:
            MazeTrainError: If the worker cannot be restarted.
            SpaceError: If the environments of the restarted worker have different spaces.
        """
        given_up = 0
        while True:
            repeats = given_up > 0 and method in ("make_calls", "own_states")
            failure.final = failure.final or repeats
            outlook = "begin new episodes" if given_up else "are restored"
            self._pool.restart(
                failure,
                f"{failure.text}{self._seeds_of(failure, root_seed)}",
                f"and its environments {outlook}",
            )
            try:
                self._begin_again(failure.index)
            except WorkerFailedError as another:
                # The worker failed before it restored episodes.
                failure = another.with_traceback(None)
                continue
            try:
                if given_up:
                    return self._begin_anew(failure.index, root_seed, given_up)
                return self._put_back(failure.index, root_seed, method, *args)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _begin_again(self, index: int) -> None:
        """Map the memory in a restarted worker."""
        spaces = self._pool.ask(index, "describe")[:2]
        check_spaces(self._slices[index].start, spaces, self._spaces)
        self._pool.ask(index, "map", self._memory)

    def _put_back(self, index: int, root: int, method: str, *args: object) -> StepReport | None:
        """Restore the environments of a restarted worker, and repeat the call."""
        assert self._journal is not None
        if method != "reset" and self._journal.has_begun:
            part = self._slices[index]
            records = [self._journal.record_of(i, self._obs, self._rewards) for i in part]
            paused = [i - part.start for i in part if i in self._paused]
            problems = self._pool.ask(index, "restore", root, self._calls, records, False, paused)
            for _, problem in problems:
                text = f"{worker_names('worker', self._slices)[index]}: {problem.text}"
                if not problem.is_rounding:
                    raise WorkerFailedError(index, text, raised=True)
                warn(f"{text}; the difference is within rounding, so training continues")
        else:
            self._pool.ask(index, "make_calls", self._calls)
        report: StepReport | None = self._pool.ask(index, method, *args)
        return report

    def _begin_anew(self, index: int, root_seed: int, given_up: int) -> StepReport:
        """Begin new episodes in a restarted worker after `given_up` failed attempts to restore."""
        assert self._journal is not None
        self._pool.ask(index, "make_calls", self._calls)
        started = [self._journal.episodes[i] + given_up - 1 for i in self._slices[index]]
        report: StepReport = self._pool.ask(index, "begin_anew", root_seed, started)
        report.lost *= given_up
        return report

    def _seeds_of(self, failure: WorkerFailedError, root_seed: int) -> str:
        """Return the seeds of the episodes of a worker, for messages without a seed."""
        if failure.raised or self._journal is None:
            return ""
        seeds = []
        for i in self._slices[failure.index]:
            seed, count = self._journal.given_seed(i), self._journal.episodes[i]
            if seed is None:
                seed = episode_seed(root_seed, self._first + i, self._num_envs, count)
            seeds.append(seed)
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"
