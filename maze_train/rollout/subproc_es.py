"""Populations in processes of their own, as the trainer sees them."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.envs.buffers import map_shared, open_shared
from maze_train.envs.building import pickled
from maze_train.envs.crew import Crew
from maze_train.rollout.es_process import (
    ABORT,
    BEGIN,
    COUNTS_NBYTES,
    PLAY,
    ESTask,
    MemberNews,
    PopulationMemory,
    Work,
    es_worker_main,
)
from maze_train.rollout.es_rollouts import ESDistributedRollouts
from maze_train.rollout.job_board import JobBoard
from maze_train.rollout.weights import WeightsWriter, weights_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium
    from torch import nn

    from maze_train.rollout.members import MemberResult, PairDraws
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.rollout.population import MemberSettings
    from maze_train.types import Array

__all__ = ["ESSubprocDistributedRollouts"]


class ESSubprocDistributedRollouts(ESDistributedRollouts):
    """Members play in processes, several at a time in each.

    Every process maps the noise table and the weights. It is told numbers of members and tells
    their returns. Members of a process that fails are given to others, or to the one that takes its
    place with `on_worker_failure="restart"`, and do the same again. One that fails again after that
    ends it all: when an episode with its seed raised for the second time, or when the third process
    died or hung with it.

    Args:
        env_factory: Builds an environment.
        n_workers: How many processes, >= 1.
        num_envs: Environments of all processes together, at least one each.
        noise_table: The noise.
        settings: How members act.
        on_non_finite: What to do about numbers that are not finite: `raise` or `skip`.
        start_method: `forkserver`, `spawn` or `fork`.
        timeout_s: Seconds without a step after which a process counts as hung, > 0.
        on_worker_failure: `fail` or `restart`.
        max_worker_restarts: How many times processes are started again at most, >= 0.

    Raises:
        SpaceError: If the environments differ in their spaces.
        WorkerError: If an environment can not be built, or a process dies or hangs.
    """

    def __init__(
        self,
        env_factory: Callable[[], gymnasium.Env[Any, Any]],
        n_workers: int,
        num_envs: int,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        *,
        on_non_finite: str = "raise",
        **crew_settings: Any,
    ) -> None:
        super().__init__(noise_table, settings)
        self._weights = -1
        self._counts: list[_Counts] = []
        self._work = Work(-1, -1, 0.0, [])
        slots = -(-num_envs // n_workers)
        factories = pickled([env_factory] * slots, "env")
        make_task = partial(ESTask, factories, on_non_finite, os.getpid())
        envs = [range(i * slots, (i + 1) * slots) for i in range(n_workers)]
        self._crew = Crew(
            es_worker_main, make_task, envs, kind="worker", owner=self, **crew_settings
        )
        self._board = JobBoard(self._crew, slots)

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._board.spaces

    @property
    def worker_restarts(self) -> int:
        """How many times processes were started again."""
        return self._crew.restarts

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Give every process the policy, the noise, and memory for what it counts."""
        super().begin(model, make_model)
        nbytes = weights_nbytes(model)
        self._weights = open_shared(nbytes)
        self._writer = WeightsWriter(model, map_shared(os.dup(self._weights), nbytes))
        self._memory = PopulationMemory(
            make_model=pickled(make_model, "model"),
            settings=self.settings,
            weights_nbytes=nbytes,
            table=self.noise_table.state_dict(),
        )
        self._counts = [_Counts() for _ in self._crew.workers]
        for index in range(len(self._counts)):
            self._let_play(index)

    def _let_play(self, index: int) -> None:
        """Give a process what it needs."""
        worker, counts = self._crew.workers[index], self._counts[index]
        worker.send(BEGIN, pickle.dumps(self._memory))
        with suppress(BrokenPipeError, ConnectionResetError):
            for descriptor in (self._weights, self.noise_table.descriptor, counts.descriptor):
                send_handle(worker.conn, descriptor, worker.process.pid)

    # -- an iteration ----------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        return self._board.capacity

    def _begin_iteration(self, iteration: int, noise_stddev: float) -> None:
        assert self._draws is not None, "begin() comes first"
        self._writer.publish(iteration)
        self._work = Work(self._work.round + 1, iteration, noise_stddev, [])
        self._board.begin(partial(_env_seed, self._draws, iteration))

    def _advance(self, limit: int) -> list[MemberResult]:
        """Hand members out, and wait for results."""
        for index, members in self._board.hand_out(limit).items():
            work = replace(self._work, members=members)
            self._crew.workers[index].send(PLAY, pickle.dumps(work))
        results = self._board.listen(self._take_in, self._let_play)
        steps = [counts.steps for counts in self._counts]
        self._board.repair_hung(steps)
        self.steps_made = sum(steps)
        return results

    def _take_in(self, index: int, news: MemberNews) -> list[MemberResult]:
        """The results of which a process tells."""
        self._board.suspect(index, news.failed_seed)
        if news.round != self._work.round:
            return []  # of an earlier policy: they were on their way when they were called off
        self._board.done(index, (result.member for result in news.results))
        return news.results

    def _end_iteration(self) -> None:
        """Call off what still plays."""
        self._board.drop(ABORT)

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        self._crew.close()
        for counts in self._counts:
            counts.release()
        self._counts = []
        if self._weights >= 0:
            os.close(self._weights)
            self._weights = -1


class _Counts:
    """Memory in which a process counts, and those that take its place later."""

    def __init__(self) -> None:
        self.descriptor = open_shared(COUNTS_NBYTES)
        memory = map_shared(os.dup(self.descriptor), COUNTS_NBYTES)
        self._steps: Array = np.ndarray(1, np.int64, memory)

    @property
    def steps(self) -> int:
        """Environment steps made, also by processes that are gone."""
        return int(self._steps[0])

    def release(self) -> None:
        """Give the memory back; to be called once."""
        os.close(self.descriptor)


def _env_seed(draws: PairDraws, iteration: int, member: int) -> int:
    """Seed of the episode of a member."""
    return draws.draw(iteration, member // 2).env_seed
