"""Populations in processes of their own, as the trainer sees them."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from dataclasses import replace
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.envs.buffers import map_shared, open_shared
from maze_train.envs.building import pickled
from maze_train.envs.crew import Crew, Movement
from maze_train.envs.workers import WorkerFailedError, check_spaces
from maze_train.rollout.es_process import (
    ABORT,
    BEGIN,
    COUNTS_NBYTES,
    PLAY,
    ESTask,
    PopulationMemory,
    Work,
    es_worker_main,
)
from maze_train.rollout.es_rollouts import ESDistributedRollouts
from maze_train.rollout.weights import WeightsWriter, weights_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium
    from torch import nn

    from maze_train.rollout.members import MemberResult
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.rollout.population import MemberSettings
    from maze_train.types import Array

__all__ = ["ESSubprocDistributedRollouts"]

POLL_MS = 100
"""How long to wait at most for news of the processes."""


class ESSubprocDistributedRollouts(ESDistributedRollouts):
    """Members play in processes, several at a time in each.

    Every process maps the noise table and the weights. It is told numbers of members and tells
    their returns. Members of a process that fails are given to others, or to the one that takes its
    place with `on_worker_failure="restart"`, and do the same again.

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
        slots = -(-num_envs // n_workers)
        self._slots = slots
        # Some wait in a process, so that no slot is empty while messages travel.
        self._most_members = slots + slots // 2 + 1
        task = ESTask(pickled([env_factory] * slots, "env"), on_non_finite, os.getpid())
        envs = [range(i * slots, (i + 1) * slots) for i in range(n_workers)]
        self._crew = Crew(es_worker_main, task, envs, kind="worker", owner=self, **crew_settings)
        self._weights = -1
        self._states: list[_ProcessState] = []
        self._work = Work(-1, -1, 0.0, [])
        self._next = 0
        self._again: list[int] = []
        try:
            described = self._crew.first_replies("building its environments")
            for worker, spaces in zip(self._crew.workers, described, strict=True):
                check_spaces(worker, spaces, described[0])
        except BaseException:
            self.close()
            raise
        self._spaces = described[0]

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._spaces  # type: ignore[no-any-return]  # a pair of spaces

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
        self._states = [_ProcessState() for _ in self._crew.workers]
        for index in range(len(self._states)):
            self._let_play(index)

    def _let_play(self, index: int) -> None:
        """Give a process what it needs."""
        worker, state = self._crew.workers[index], self._states[index]
        worker.send(BEGIN, pickle.dumps(self._memory))
        with suppress(BrokenPipeError, ConnectionResetError):
            for descriptor in (self._weights, self.noise_table.descriptor, state.counts):
                send_handle(worker.conn, descriptor, worker.process.pid)
        state.begun = True

    # -- an iteration ----------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        return self._slots * len(self._states)

    def _begin_iteration(self, iteration: int, noise_stddev: float) -> None:
        self._writer.publish(iteration)
        self._work = Work(self._work.round + 1, iteration, noise_stddev, [])
        self._next = 0
        self._again.clear()

    def _advance(self, limit: int) -> list[MemberResult]:
        """Hand members out, and wait for results."""
        self._hand_out(limit)
        results: list[MemberResult] = []
        for index in self._crew.ready(POLL_MS):
            try:
                told = self._crew.workers[index].receive("an episode", self._crew.timeout_s)
            except WorkerFailedError as failure:
                self._repair(index, failure.with_traceback(None))
                continue
            results += self._take_in(index, told)
        for index, state in enumerate(self._states):
            if state.still_s() > self._crew.timeout_s:
                what = "a step" if state.begun else "building its environments"
                worker = self._crew.workers[index]
                self._repair(index, worker.hung(what, self._crew.timeout_s))
        self.steps_made = sum(state.steps for state in self._states)
        return results

    def _hand_out(self, limit: int) -> None:
        """Give members to those processes that have the fewest."""
        given: dict[int, list[int]] = {}
        while self._again or self._next < limit:
            index = min(
                (i for i, state in enumerate(self._states) if state.begun),
                key=lambda i: len(self._states[i].members),
                default=-1,
            )
            if index < 0 or len(self._states[index].members) >= self._most_members:
                break
            if self._again:
                member = self._again.pop(0)
            else:
                member, self._next = self._next, self._next + 1
            self._states[index].give(member)
            given.setdefault(index, []).append(member)
        for index, members in given.items():
            work = replace(self._work, members=members)
            self._crew.workers[index].send(PLAY, pickle.dumps(work))

    def _take_in(self, index: int, told: Any) -> list[MemberResult]:
        """What a process says: of its environments when it was started again, else results."""
        state = self._states[index]
        if not state.begun:
            check_spaces(self._crew.workers[index], told, self._spaces)
            self._let_play(index)
            return []
        number, results = told
        if number != self._work.round:
            return []  # of an earlier policy: they were on their way when they were called off
        for result in results:
            state.members.discard(result.member)
        return list(results)

    def _repair(self, index: int, failure: WorkerFailedError) -> None:
        """Have a process started again, and its members play again.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        state = self._states[index]
        outlook = f"and its {len(state.members)} episodes are played again, with the same numbers"
        self._again = sorted([*self._again, *state.members])
        state.restart()
        self._crew.replace(index, failure, failure.text, outlook)

    def _end_iteration(self) -> None:
        """Call off what still plays."""
        for worker, state in zip(self._crew.workers, self._states, strict=False):
            if state.members and state.begun:
                worker.send(ABORT)
            state.members.clear()

    def close(self) -> None:
        """End the processes; calling it again does nothing."""
        self._crew.close()
        for state in self._states:
            state.release()
        self._states = []
        if self._weights >= 0:
            os.close(self._weights)
            self._weights = -1


class _ProcessState:
    """What is known of a process, which may be another one later."""

    def __init__(self) -> None:
        self.begun = False
        """Whether it has its policy."""
        self.members: set[int] = set()
        """Members that were given to it."""
        self.counts = open_shared(COUNTS_NBYTES)
        self._steps: Array = np.ndarray(1, np.int64, map_shared(os.dup(self.counts), COUNTS_NBYTES))
        self._movement = Movement()

    @property
    def steps(self) -> int:
        """Environment steps made, also by processes that are gone."""
        return int(self._steps[0])

    def give(self, member: int) -> None:
        """Note a member that is to play there."""
        if not self.members:
            self._movement.expect()
        self.members.add(member)

    def still_s(self) -> float:
        """Seconds since the process was seen to move; 0 while it has nothing to do."""
        return self._movement.still_s(self.steps, has_work=not self.begun or bool(self.members))

    def restart(self) -> None:
        """Wait for a new process."""
        self.begun = False
        self.members.clear()
        self._movement.expect()

    def release(self) -> None:
        """Give the memory back."""
        if self.counts >= 0:
            os.close(self.counts)
            self.counts = -1
