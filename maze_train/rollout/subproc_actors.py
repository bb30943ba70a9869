"""Actors in processes of their own, as the learner sees them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.data.joining import join_rollouts
from maze_train.errors import ConfigError
from maze_train.rollout.actor_worker import ActorPolicy, ActorWorker
from maze_train.rollout.actors import DistributedActors, GatheredRollouts
from maze_train.rollout.weights import WeightsWriter, weights_nbytes
from maze_train.trees import tree_map
from maze_train.workers.messages import Portable
from maze_train.workers.places import LocalProcesses
from maze_train.workers.pool import WorkerFailedError, check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from maze_train.data.rollout_slots import RolloutSlot
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.actor_worker import ActorEnvs
    from maze_train.rollout.episodes import FinishedEpisodes
    from maze_train.workers.places import Place

__all__ = ["SubprocDistributedActors"]

POLL_S = 0.1
"""Longest sleep of the learner, in seconds, while it waits for actors."""


@dataclass(frozen=True)
class QueuedRollout:
    """A rollout that waits in a slot."""

    actor: int
    slot: int
    num_samples: int
    episodes: FinishedEpisodes
    finished: float


class SubprocDistributedActors(DistributedActors):
    """Actors in processes, which act while the learner learns.

    Each actor has a few slots of shared memory for its rollouts. It writes one after the other and
    announces each with a few bytes; when all of them wait for the learner, it pauses. Nobody holds
    a lock that a process could leave behind.

    An actor that raises, dies or hangs ends training with a `WorkerError`. With
    `on_worker_failure="restart"` it is started again with new episodes and a line on stderr; the
    steps of the rollout that it was collecting are dropped and counted.

    Args:
        make_env: Builds the environments of one actor, in its process; called with the number of
            the first one, for messages.
        num_actors: How many actors.
        num_envs: Environments of each actor.
        num_steps: Steps T of each environment per rollout.
        seed_of: Gives the seed of a named stream of random numbers.
        place: Where actors live; they are as many as there are to be, whatever it says.
        queue_size: Rollouts that may wait for the learner, rounded up to the same number for each
            actor; each actor may have a further one under way.

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
        place: Place | None = None,
        *,
        queue_size: int,
    ) -> None:
        super().__init__(num_actors, num_steps, seed_of)
        self.num_envs = num_envs
        self.num_slots = 1 + -(-queue_size // num_actors)
        self._queue: deque[QueuedRollout] = deque()
        self._acting = False
        # Steps that were made before this object was.
        self._made_before = 0
        # Steps of each actor whose rollouts arrived, or were dropped.
        self._settled = [0] * num_actors
        self._is_acting = [False] * num_actors
        self._memories: list[Any] = []
        self._slots: list[list[RolloutSlot]] = []
        names = [
            f"actor {i} (environments {i * num_envs} to {(i + 1) * num_envs - 1})"
            for i in range(num_actors)
        ]
        make_worker = partial(ActorWorker, Portable(make_env, "env"), num_envs)
        self._pool = (place or LocalProcesses()).pool(
            [make_worker] * num_actors, names, {"collect": "a step of a rollout"}
        )
        described = self._pool.call_all("describe")
        self._envs: ActorEnvs = described[0]
        try:
            for i, envs in enumerate(described):
                check_spaces(i * num_envs, _spaces(envs), self.spaces)
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
        """Number of times actors were started again."""
        return self._pool.restarts

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Give the actors their policy, and memory for their rollouts."""
        self._weights = self._pool.allocate(weights_nbytes(model))
        self._writer = WeightsWriter(model, self._weights.buffer)
        distribution: Any = model.distribution
        mode = distribution.mode(torch.zeros(1, distribution.param_size))
        self._policy = ActorPolicy(
            make_model=Portable(make_model, "model"),
            actions=tree_map(lambda x: x[0].cpu(), mode),
            state_size=int(getattr(model, "state_size", 0)),
        )
        layout = self._policy.layout(self._envs, self.num_steps, self.num_envs)
        for _ in range(self.num_actors):
            memory = self._pool.allocate(self.num_slots * layout.nbytes)
            offsets = (i * layout.nbytes for i in range(self.num_slots))
            self._memories.append(memory)
            self._slots.append([layout.slot(memory.buffer, offset) for offset in offsets])

    def _let_act(self, actor: int) -> None:
        """Give an actor its policy, and all slots that hold nothing."""
        self._is_acting[actor] = True
        self._pool.call(
            actor,
            "set_policy",
            self._policy,
            self._settings(actor),
            self._weights,
            self._memories[actor],
        )
        waiting = {queued.slot for queued in self._queue if queued.actor == actor}
        for slot in range(self.num_slots):
            if slot not in waiting:
                self._pool.call(actor, "collect", slot)

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
            for actor in range(self.num_actors):
                self._let_act(actor)
        self._look(0.0)
        before, started = len(self._queue), time.perf_counter()
        while len(self._queue) < count:
            self._look(POLL_S)
            idle()
        waited_s = time.perf_counter() - started
        taken = [self._queue.popleft() for _ in range(count)]
        rollout = join_rollouts(
            [self._slots[queued.actor][queued.slot].rollout() for queued in taken]
        )
        episodes = self._take_news()
        for queued in taken:
            episodes.extend(queued.episodes)
            self.counts.trained += queued.num_samples
            # Rows of lost episodes are no steps to learn from.
            self.counts.dropped += self.num_envs * self.num_steps - queued.num_samples
            if self._is_acting[queued.actor]:
                self._pool.call(queued.actor, "collect", queued.slot)
        self._count_made()
        return GatheredRollouts(rollout, episodes, before, len(self._queue), waited_s)

    def _look(self, timeout_s: float) -> None:
        """Take in what actors have to say, and repair those that failed."""
        # All that there is: an actor may have finished several rollouts since it was looked at.
        while ready := self._pool.ready(timeout_s):
            timeout_s = 0.0
            for actor in ready:
                try:
                    self._take_in(actor, self._pool.receive(actor))
                except WorkerFailedError as failure:
                    self._repair(failure.with_traceback(None))
        self._queue = deque(sorted(self._queue, key=lambda queued: queued.finished))

    def _take_in(self, actor: int, told: Any) -> None:
        """Take in a result: of a rollout, or of a new actor the environments."""
        if not self._is_acting[actor]:
            check_spaces(actor * self.num_envs, _spaces(told), self.spaces)
            self._let_act(actor)
        elif told is not None:
            slot, num_samples, episodes, finished = told
            self._settled[actor] += self.num_envs * self.num_steps
            self._queue.append(QueuedRollout(actor, slot, num_samples, episodes, finished))

    def _count_made(self) -> None:
        self.counts.made = self._made_before + sum(map(self._pool.steps, range(self.num_actors)))

    def _repair(self, failure: WorkerFailedError) -> None:
        """Start an actor again, or end training.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        actor = failure.index
        self._pool.stop(actor)
        # Only now it makes no further step.
        lost = self._pool.steps(actor) - self._settled[actor]
        self._settled[actor] += lost
        self.counts.dropped += lost
        self._is_acting[actor] = False
        told = f"{failure.text}; {lost} steps of its rollout are dropped"
        try:
            self._pool.restart(failure, told, "and its environments begin new episodes")
        except BaseException:
            self.close()
            raise
        self._pool.call(actor, "describe")
        self._news.worker_restarts += 1
        self._news.lost += self.num_envs
        self._generations[actor] += 1

    # -- ending, state ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes; what is in flight is dropped and counted."""
        self._pool.close()
        self._count_made()
        self.counts.dropped += self.counts.in_flight
        self._queue.clear()
        for memory in self._memories:
            memory.close()
        if self._writer is not None:
            self._weights.close()

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
