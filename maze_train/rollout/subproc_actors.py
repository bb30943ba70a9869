"""Actors in processes of their own, as the learner sees them."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.data.joining import join_rollouts
from maze_train.envs.buffers import map_shared, open_shared
from maze_train.envs.building import pickled
from maze_train.envs.crew import Crew
from maze_train.envs.workers import WorkerFailedError, check_spaces
from maze_train.errors import ConfigError
from maze_train.rollout.actor_handle import ActorProcess
from maze_train.rollout.actor_process import ActorMemory, ActorTask, actor_main
from maze_train.rollout.actors import DistributedActors, GatheredRollouts
from maze_train.rollout.weights import WeightsWriter, weights_nbytes
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.actor_process import ActorEnvs
    from maze_train.rollout.episodes import FinishedEpisodes

__all__ = ["SubprocDistributedActors"]

POLL_MS = 100
"""How long the learner sleeps at most while it waits for actors."""


@dataclass(frozen=True)
class QueuedRollout:
    """A rollout that waits in a slot."""

    process: ActorProcess
    slot: int
    num_samples: int
    episodes: FinishedEpisodes
    finished: float


class SubprocDistributedActors(DistributedActors):
    """Actors in processes, which act while the learner learns.

    Each actor has a few slots of shared memory for its rollouts. It writes one after the other and
    tells of each by a few bytes; when all of them wait for the learner, it pauses. Nobody holds a
    lock that a process could leave behind.

    An actor that raises, dies or hangs ends training with a `WorkerError`. With
    `on_worker_failure="restart"` it is told on stderr and started again, with new episodes; the
    steps of the rollout that it was collecting are dropped and counted.

    Args:
        make_env: Builds the environments of one actor, in its process; called with the number of
            the first one, for messages.
        num_actors: How many actors.
        num_envs: Environments of each actor.
        num_steps: Steps T of each environment per rollout.
        seed_of: Gives the seed of a named stream of random numbers.
        queue_size: Rollouts that may wait for the learner, rounded up to the same number for each
            actor; each actor may have a further one under way.
        start_method: `forkserver`, `spawn` or `fork`.
        timeout_s: Seconds without a step after which an actor counts as hung, > 0.
        on_worker_failure: `fail` or `restart`.
        max_worker_restarts: How many times actors are started again at most, >= 0.

    Raises:
        SpaceError: If the environments differ in their spaces.
        WorkerError: If an environment can not be built, or an actor dies or hangs.
    """

    def __init__(
        self,
        make_env: Callable[[int], MazeVectorEnv],
        num_actors: int,
        num_envs: int,
        num_steps: int,
        seed_of: Callable[[str], int],
        *,
        queue_size: int,
        **crew_settings: Any,
    ) -> None:
        super().__init__(num_actors, num_steps, seed_of)
        self.num_envs = num_envs
        self.num_slots = 1 + -(-queue_size // num_actors)
        self._queue: deque[QueuedRollout] = deque()
        self._weights = -1
        self._acting = False
        # Steps that were made by processes that are gone.
        self._made_before = 0
        self._processes: list[ActorProcess] = []
        make_task = partial(ActorTask, pickled(make_env, "env"), os.getpid())
        envs = [range(i * num_envs, (i + 1) * num_envs) for i in range(num_actors)]
        self._crew = Crew(actor_main, make_task, envs, kind="actor", owner=self, **crew_settings)
        self.timeout_s = self._crew.timeout_s
        try:
            for i, worker in enumerate(self._crew.workers):
                self._processes.append(ActorProcess(i, worker))
            described = self._crew.first_replies("building its environments")
            self._envs: ActorEnvs = described[0]
            for worker, one in zip(self._crew.workers, described, strict=True):
                check_spaces(worker, _spaces(one), self.spaces)
        except BaseException:
            self.close()
            raise

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._envs.env_observation_space, self._envs.single_action_space

    @property
    def queued(self) -> int:
        """Rollouts that wait."""
        return len(self._queue)

    @property
    def worker_restarts(self) -> int:
        """How many times actors were started again."""
        return self._crew.restarts

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Give the actors their policy, and memory for their rollouts."""
        nbytes = weights_nbytes(model)
        self._weights = open_shared(nbytes)
        self._writer = WeightsWriter(model, map_shared(os.dup(self._weights), nbytes))
        distribution: Any = model.distribution
        mode = distribution.mode(torch.zeros(1, distribution.param_size))
        self._memory = ActorMemory(
            make_model=pickled(make_model, "model"),
            settings=self._settings(0),
            actions=tree_map(lambda x: x[0].cpu(), mode),
            state_size=int(getattr(model, "state_size", 0)),
            weights_nbytes=nbytes,
            num_slots=self.num_slots,
        )
        layout = self._memory.layout(self._envs, self.num_envs)
        for process in self._processes:
            process.reserve(layout, self.num_slots)

    def _let_act(self, process: ActorProcess) -> None:
        """Give a process its policy, and all slots that hold nothing."""
        memory = replace(self._memory, settings=self._settings(process.index))
        waiting = {queued.slot for queued in self._queue if queued.process is process}
        process.begin(memory, self._weights, set(range(self.num_slots)) - waiting)

    # -- the queue -------------------------------------------------------------------------------

    def gather(self, count: int, idle: Callable[[], None]) -> GatheredRollouts:
        """The next rollouts, in the order in which they were finished.

        Args:
            count: How many.
            idle: Called again and again while there is nothing to do but wait; what it raises goes
                through, and nothing is lost then.

        Raises:
            ConfigError: If there is no room for so many rollouts.
            WorkerError: If an actor fails and is not started again, or they are closed.
        """
        if count > self.num_actors * self.num_slots:
            raise ConfigError(
                "queue_size",
                f"expected at least {count - self.num_actors}, so that {count} rollouts can be "
                "taken at once",
                self.num_slots * self.num_actors - self.num_actors,
            )
        if not self._acting:
            self._acting = True
            for process in self._processes:
                self._let_act(process)
        self._look(0)
        before, started = len(self._queue), time.perf_counter()
        while len(self._queue) < count:
            self._look(POLL_MS)
            idle()
        waited_s = time.perf_counter() - started
        taken = [self._queue.popleft() for _ in range(count)]
        rollout = join_rollouts([queued.process.slots[queued.slot].rollout() for queued in taken])
        episodes = self._take_news()
        for queued in taken:
            episodes.extend(queued.episodes)
            self.counts.trained += queued.num_samples
            # Rows of lost episodes are no steps to learn from.
            self.counts.dropped += self.num_envs * self.num_steps - queued.num_samples
            if queued.process.begun:
                queued.process.grant(queued.slot)
        self._count_made()
        return GatheredRollouts(rollout, episodes, before, len(self._queue), waited_s)

    def _look(self, timeout_ms: int) -> None:
        """Take in what processes have to say, and find those that hang."""
        # All that there is: an actor may have finished several rollouts since it was looked at.
        while ready := self._crew.ready(timeout_ms):
            timeout_ms = 0
            for index in ready:
                process = self._processes[index]
                try:
                    self._take_in(process, process.worker.receive("a rollout", self.timeout_s))
                except WorkerFailedError as failure:
                    self._repair(process, failure.with_traceback(None))
        self._queue = deque(sorted(self._queue, key=lambda queued: queued.finished))
        for process in self._processes:
            if process.still_s() > self.timeout_s:
                what = "a step" if process.begun else "building its environments"
                self._repair(process, process.worker.hung(what, self.timeout_s))

    def _take_in(self, process: ActorProcess, told: Any) -> None:
        """What a process says: first of its environments, later of rollouts."""
        if not process.begun:
            check_spaces(process.worker, _spaces(told), self.spaces)
            self._let_act(process)
            return
        slot, num_samples, episodes, finished = told
        process.arrive(slot, self.num_envs * self.num_steps)
        self._queue.append(QueuedRollout(process, slot, num_samples, episodes, finished))

    def _count_made(self) -> None:
        self.counts.made = self._made_before + sum(p.made for p in self._processes)

    def _repair(self, process: ActorProcess, failure: WorkerFailedError) -> None:
        """Start an actor again, or end training.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        process.stop()
        self._crew.stop(process.index)
        # Only now it makes no further step.
        made, arrived = process.reset_counts()
        self._made_before += made
        self.counts.dropped += made - arrived
        told = f"{failure.text}; {made - arrived} steps of its rollout are dropped"
        outlook = "and its environments begin new episodes"
        process.worker = self._crew.replace(process.index, failure, told, outlook)
        self._news.worker_restarts += 1
        self._news.lost += self.num_envs
        self._generations[process.index] += 1

    # -- ending, state ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes; what is in flight is dropped and counted."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.stop()
        self._crew.close()
        self._made_before += sum(process.made for process in processes)
        self.counts.made = self._made_before
        self.counts.dropped += self.counts.in_flight
        self._queue.clear()
        for process in processes:
            process.release()
        if self._weights >= 0:
            os.close(self._weights)
            self._weights = -1

    def state_dict(self) -> dict[str, Any]:
        """Counts and weights; environments, and rollouts in flight, are not kept."""
        self._count_made()
        return {**super().state_dict(), "collectors": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with new episodes; before the actors begin to act."""
        super().load_state_dict(state)
        self._made_before = self.counts.made
        self._begin_anew(self.num_actors * self.num_envs)


def _spaces(envs: ActorEnvs) -> tuple[Any, Any]:
    return envs.env_observation_space, envs.single_action_space
