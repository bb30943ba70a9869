"""Actors that collect rollouts: workers, weights, memory; a learner that does not wait for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from maze_train.collect.actor_worker import (
    ActorPolicy,
    ActorWorker,
    CollectedRollout,
    MakeActorEnv,
    WeightsWriter,
    weights_nbytes,
)
from maze_train.collect.collector import OneModule, turns_of
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.errors import ConfigError
from maze_train.core.notices import warn
from maze_train.data.rollout import Rollout, RolloutStorage, join_rollouts, slot_nbytes, slots_in
from maze_train.data.turns import TurnSplitter
from maze_train.nets.joint import JointModel
from maze_train.workers.places import Place, Portable, ThisProcess
from maze_train.workers.pool import WorkerFailedError, check_spaces, shares, worker_names

SeedOf: TypeAlias = "Callable[[int, int], tuple[int, int]]"
"""Maps an actor and its number of restarts to its seeds of episodes and of actions."""

CALLS = {
    "collect": "a step of a rollout",
    "load_state_dict": "putting its environments back",
    "set_policy": "building its policy",
    "state_dict": "reporting its state",
}
"""Names of calls in messages."""


class Actors:
    """Actors of one learner, spread over workers in this process or elsewhere.

    An actor is a few environments and a policy, and its numbers depend on nothing else: so it makes
    no difference how many of them a worker has. `ActorCollector` waits for the rollouts of all
    actors; `DistributedActors` takes the finished ones.

    Args:
        make_env: Builds the environments of one actor, where it lives.
        num_actors: How many actors.
        num_envs: Environments of each actor.
        place: Where workers live; None: in this process.
        num_workers: How many workers share out the actors; 0: one for each.
        can_be_restored: Whether states will be asked for; None: in this process only.

    Attributes:
        pool: The workers.
        busy_s: Seconds that the rollouts took which were asked for, summed up.
        slices: Numbers of the actors of each worker.
        spaces: Observation and action space of one environment, as the environment has them.
        env_observation_space: The first of them.
        single_action_space: The second one.
        policy: The policy; there from `begin` on, as all that follows.
        writer: Writes the weights.
        generations: How often each actor started over, with other random numbers.
        states: State that each actor begins with when its worker is set up; None: with new
            episodes.

    Raises:
        SpaceError: If the environments differ in their spaces.
        WorkerError: If an environment cannot be built, or a worker dies or hangs.
    """

    policy: ActorPolicy
    writer: WeightsWriter
    generations: list[int]
    states: list[Any]

    def __init__(
        self,
        make_env: MakeActorEnv,
        num_actors: int,
        num_envs: int,
        place: Place | None = None,
        *,
        num_workers: int = 0,
        can_be_restored: bool | None = None,
    ) -> None:
        self.num_actors, self.num_envs = num_actors, num_envs
        self.busy_s = 0.0
        count = num_workers or num_actors
        self.slices = shares(num_actors, count)
        self._weights_lock, self._have_changed = threading.Lock(), False
        self._memories: list[Any] = []
        self._slots: list[list[RolloutStorage]] = []
        make = partial(ActorWorker, Portable(make_env, "env"), num_envs)
        makers = [partial(make, part, can_be_restored) for part in self.slices]
        envs = [range(part.start * num_envs, part.stop * num_envs) for part in self.slices]
        names = worker_names("worker" if num_workers else "actor", envs)
        self.pool = (place or ThisProcess()).pool(makers, names, CALLS)
        found = self.pool.call_new("describe")
        self.spaces: tuple[Any, Any] = found[0]
        self.env_observation_space, self.single_action_space = self.spaces
        try:
            for part, spaces in zip(self.slices, found, strict=True):
                check_spaces(part.start * num_envs, spaces, self.spaces)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        model: nn.Module,
        make_model: Callable[[], nn.Module],
        num_slots: int,
        seed_of: SeedOf,
        **settings: Any,
    ) -> None:
        """Make room for the weights of a policy, and for its rollouts.

        Args:
            model: The model that the learner updates.
            make_model: Builds a model of the same layout, in whatever process.
            num_slots: Rollouts of each worker that there is room for.
            seed_of: Gives the seeds of an actor.
            **settings: Further fields of `ActorPolicy`.
        """
        self._seed_of = seed_of
        self.generations = [0] * self.num_actors
        self.states = [None] * self.num_actors
        self.policy = ActorPolicy(Portable(make_model, "model"), **settings)
        self._close_memories()
        self._memories, self._slots = [], []
        weights = self.pool.allocate(weights_nbytes(model))
        self.writer = WeightsWriter(model, weights.buffer)
        self._memories.append(weights)
        columns = self.policy.columns(model, self.env_observation_space, self.num_envs)
        for _ in self.slices:
            self._memories.append(self.pool.allocate(num_slots * slot_nbytes(columns)))
            self._slots.append(slots_in(self._memories[-1], columns))

    def set_up(self, worker: int, **changes: Any) -> int:
        """Send a worker the policy, and the states of its actors.

        Args:
            worker: Number of the worker.
            **changes: Fields of `ActorPolicy` that are others for it.

        Returns:
            The number of results to receive: None, and for each state that of
            `ActorWorker.load_state_dict`.
        """
        weights, *slots = self._memories
        policy, part = replace(self.policy, **changes), self.slices[worker]
        seeds = [self._seed_of(actor, self.generations[actor]) for actor in part]
        self.pool.call(worker, "set_policy", policy, seeds, weights, slots[worker])
        continued = [actor for actor in part if self.states[actor] is not None]
        for actor in continued:
            self.pool.call(worker, "load_state_dict", actor, self.states[actor])
        return 1 + len(continued)

    def start_over(self, actor: int) -> None:
        """Let an actor begin new episodes, with other random numbers, when it is set up again."""
        self.generations[actor] += 1
        self.states[actor] = None

    def publish(self, weights_seq_no: int) -> None:
        """Let actors act with the weights of the learner as they are, from their next rollout on.

        Args:
            weights_seq_no: Updates that the weights have seen.
        """
        self.write_weights(weights_seq_no)
        self.send_weights()

    def write_weights(self, weights_seq_no: int) -> None:
        """Copy the weights of the learner, in any thread; `send_weights` follows."""
        with self._weights_lock:
            self.writer.publish(weights_seq_no)
            self._have_changed = True

    def send_weights(self) -> None:
        """Send the weights that were written last, in the thread that calls the actors."""
        if self._have_changed:
            with self._weights_lock:
                self._have_changed = False
                self.pool.publish(self._memories[0], self.writer.newest())

    def load_weights(self, state: dict[str, Any]) -> None:
        """Let actors act with the weights of a state of `writer`."""
        with self._weights_lock:
            self.writer.load_state_dict(state)
            self._have_changed = True
        self.send_weights()

    def rollout(self, worker: int, collected: CollectedRollout) -> Rollout:
        """The rollout that a worker collected: views of its slot."""
        self.busy_s += collected.seconds
        slot = self._slots[worker][collected.slot]
        return slot.view(collected.num_final_obs, collected.has_gaps)

    def state_dict(self, actors: list[Any] | None) -> dict[str, Any]:
        """How often actors started over, and their states, which are None if these are lost."""
        return {"generations": list(self.generations), "actors": actors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let actors continue from `state` when they are set up."""
        self.generations = list(state["generations"])
        self.states = list(state["actors"] or self.states)

    def _close_memories(self) -> None:
        for memory in self._memories:
            memory.close()

    def close(self) -> None:
        """End the actors; again it does nothing."""
        try:
            self.pool.close()
        finally:
            self._close_memories()


def _with_seq_no(rollout: Rollout, seq_no: int) -> Rollout:
    seq_nos = torch.full((rollout.num_envs,), seq_no, dtype=torch.int64)
    return replace(rollout, weights_seq_no=seq_nos)


POLL_S = 0.1
"""Longest sleep of the learner, in seconds, while it waits for actors."""


@dataclass
class StepCounts:
    """Counts of the steps of all actors: made = trained + queued + under way + dropped.

    Dropped are those that were lost with an actor or an episode, or in flight when a run stopped.
    """

    made: int = 0
    trained: int = 0
    dropped: int = 0

    @property
    def in_flight(self) -> int:
        """Number of steps in the queue and in running rollouts."""
        return self.made - self.trained - self.dropped


@dataclass(frozen=True)
class GatheredRollouts:
    """Rollouts of actors, as the learner gets them."""

    rollouts: dict[str, Rollout]
    """Rollouts of actors side by side, by module id, with log-probabilities and the numbers of
    their weights."""

    episodes: FinishedEpisodes
    """Episodes that ended in them."""

    queue_before: int
    """Rollouts that waited when the learner asked."""

    queue_after: int
    """Rollouts that wait now."""

    waited_s: float
    """Seconds in which the learner had nothing to do."""


class DistributedActors:
    """Actors of one learner, in this process or elsewhere.

    Each actor has a few slots of memory for its rollouts. In this process, actors take turns: a
    rollout is collected when the learner asks for it, so none ever waits, and the numbers are the
    same each time. Elsewhere, actors act while the learner learns. An actor fills one slot after
    the other and announces each with a few bytes; when all of them wait for the learner, it pauses.
    No one holds a lock that a process could leave behind.

    In this process, what an environment raises goes through. Elsewhere, an actor that raises, dies
    or hangs ends training with a `WorkerError`. With `on_worker_failure="restart"` it is started
    again with new episodes and a line on stderr; the steps of the rollout that it was collecting
    are dropped and counted.

    Args:
        actors: The actors, one in each worker.
        model: The model that the learner updates.
        make_model: Builds a model of the same layout, in whatever process.
        num_steps: Steps T of each environment per rollout.
        seed_of: Gives the seed of a named stream of random numbers.
        queue_size: Rollouts that may wait for the learner, rounded up to the same number for each
            actor; each actor may have a further one under way.
        allow_new_episodes: See `RolloutCollector`.
        info_keys: Likewise.
    """

    def __init__(
        self,
        actors: Actors,
        model: nn.Module,
        make_model: Callable[[], nn.Module],
        num_steps: int,
        seed_of: Callable[[str], int],
        *,
        queue_size: int = 0,
        allow_new_episodes: bool = False,
        info_keys: Sequence[str] = (),
    ) -> None:
        self.actors, self.num_actors = actors, actors.num_actors
        self.num_slots = 1 + -(-queue_size // actors.num_actors)
        self.counts = StepCounts()
        self.has_weights = False
        self._num_rows = actors.num_envs * num_steps
        self._news = FinishedEpisodes()  # between two calls of `gather`
        self._queue: deque[CollectedRollout] = deque()
        self._turn = 0
        self._made_before = 0  # steps, before this object was
        # Steps of each actor whose rollouts arrived, or were dropped.
        self._settled = [0] * actors.num_actors
        self._has_begun = False
        self._is_acting = [False] * actors.num_actors
        self._pool = actors.pool
        self._is_remote = not self._pool.workers
        self.is_exact = True

        self._make_turns: Callable[[], TurnSplitter | OneModule] = OneModule
        if isinstance(model, JointModel):
            self._make_turns = partial(turns_of, model, as_steps=True)
        self._turns = [self._make_turns() for _ in range(actors.num_actors)]

        def seeds(actor: int, generation: int) -> tuple[int, int]:
            name = f"actors/{actor}/{generation}"
            return seed_of(f"{name}/episodes"), seed_of(f"{name}/actions")

        actors.begin(
            model,
            make_model,
            self.num_slots,
            seeds,
            num_steps=num_steps,
            allow_new_episodes=allow_new_episodes,
            info_keys=info_keys,
            keeps_terminal_obs=isinstance(model, JointModel),
        )

    def publish(self, weights_seq_no: int) -> None:
        """Let actors act with the weights of the learner as they are, from the next `gather` on.

        The thread of a learner queue may call it.
        """
        self.actors.write_weights(weights_seq_no)
        self.has_weights = True

    def _let_act(self, actor: int) -> None:
        """Give an actor its policy; elsewhere, also all slots that hold nothing."""
        self._is_acting[actor] = True
        results = self.actors.set_up(actor)
        if not self._is_remote:
            turns = self._turns[actor]
            for lost, is_exact in [self._pool.receive(actor) for _ in range(results)][1:]:
                self.is_exact = self.is_exact and is_exact
                turns.load_state_dict(self.actors.states[actor]["turns"])
                turns.forget(torch.from_numpy(lost))
            return
        waiting = {queued.slot for queued in self._queue if queued.actor == actor}
        for slot in range(self.num_slots):
            if slot not in waiting:
                self._pool.call(actor, "collect", actor, slot)

    def _begin_to_act(self) -> None:
        """Let all act, unless they do."""
        if not self._has_begun:
            self._has_begun = True
            for actor in range(self.num_actors):
                self._let_act(actor)

    # -- the queue -------------------------------------------------------------------------------

    def gather(self, count: int, idle: Callable[[], None]) -> GatheredRollouts:
        """The next rollouts, in the order in which they were finished.

        Args:
            count: How many.
            idle: Called again and again while there is nothing to do but wait; what it raises goes
                through, and nothing is lost then.

        Raises:
            ConfigError: If there is no room for that many rollouts.
            WorkerError: If an actor fails and is not started again, or they are closed.
        """
        if count > self.num_actors * self.num_slots:
            raise ConfigError(
                "queue_size",
                f"expected at least {count - self.num_actors}, so that {count} rollouts can be "
                "taken at once",
                self.num_slots * self.num_actors - self.num_actors,
            )
        self.actors.send_weights()
        self._begin_to_act()
        if self._is_remote:
            self._look(0.0)
        before, started = len(self._queue), time.perf_counter()
        while len(self._queue) < count:
            if self._is_remote:
                self._look(POLL_S)
                idle()
            else:
                self._take_turns(count)
        waited_s = time.perf_counter() - started
        taken = [self._queue.popleft() for _ in range(count)]
        parts = [self._split(queued) for queued in taken]
        rollouts = {key: join_rollouts([part[key] for part in parts]) for key in parts[0]}
        episodes, self._news = self._news, FinishedEpisodes()
        for queued in taken:
            episodes.extend(queued.episodes)
            self.counts.trained += queued.episodes.steps
            # Rows of lost episodes are no steps to learn from.
            self.counts.dropped += self._num_rows - queued.episodes.steps
            if self._is_remote and self._is_acting[queued.actor]:
                self._pool.call(queued.actor, "collect", queued.actor, queued.slot)
        self._count_made()
        return GatheredRollouts(rollouts, episodes, before, len(self._queue), waited_s)

    def _split(self, collected: CollectedRollout) -> dict[str, Rollout]:
        """The rollouts of an actor by module id."""
        rollout = self.actors.rollout(collected.actor, collected)
        found = self._turns[collected.actor].split(rollout)
        return {key: _with_seq_no(part, collected.weights_seq_no) for key, part in found.items()}

    def _take_turns(self, count: int) -> None:
        """Let the next actors of this process collect a rollout each."""
        for i in range(count):
            actor, self._turn = self._turn, (self._turn + 1) % self.num_actors
            self._record(actor, self._pool.ask(actor, "collect", actor, i // self.num_actors))

    def _look(self, timeout_s: float) -> None:
        """Receive the messages of actors elsewhere, and repair those that failed."""
        self.actors.send_weights()
        # All that there is: an actor may have finished several rollouts since it was looked at.
        while ready := self._pool.ready(timeout_s):
            timeout_s = 0.0
            for actor in ready:
                try:
                    self._record(actor, self._pool.receive(actor))
                except WorkerFailedError as failure:
                    self._repair(failure.with_traceback(None))
        self._queue = deque(sorted(self._queue, key=lambda queued: queued.finished))

    def _record(self, actor: int, result: Any) -> None:
        """Record a result: a rollout, or the spaces of a new actor."""
        if not self._is_acting[actor]:
            actors = self.actors
            check_spaces(actor * actors.num_envs, result, actors.spaces)
            self._let_act(actor)
        elif result is not None:
            self._settled[actor] += self._num_rows
            self._queue.append(result)

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
        description = f"{failure.text}; {lost} steps of its rollout are dropped"
        try:
            self._pool.restart(failure, description, "and its environments begin new episodes")
        except BaseException:
            self.close()
            raise
        self._pool.call(actor, "describe")
        self._news.worker_restarts += 1
        self._news.lost += self.actors.num_envs
        self._start_over(actor)

    # -- ending, state ---------------------------------------------------------------------------

    def close(self) -> None:
        """End the actors; what is in flight is dropped and counted. Again it does nothing."""
        try:
            self.actors.close()
        finally:
            self._count_made()
            self.counts.dropped += self.counts.in_flight
            self._queue.clear()

    def state_dict(self) -> dict[str, Any]:
        """Counts, published weights, how often actors started over; in this process, all of them.

        The environments and rollouts in flight of other processes are not saved.
        """
        actors = None
        if not self._is_remote:
            self._begin_to_act()
            numbers = range(self.num_actors)
            actors = [
                {
                    **self._pool.ask(actor, "state_dict", actor),
                    "turns": self._turns[actor].state_dict(),
                }
                for actor in numbers
            ]
        self._count_made()
        return {
            **self.actors.state_dict(actors),
            "counts": asdict(self.counts),
            "weights": self.actors.writer.state_dict() if self.has_weights else None,
            "turn": self._turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, before the first rollout.

        Environments begin new episodes unless both these actors and those of the state live in the
        process of the learner.
        """
        self.counts = StepCounts(**state["counts"])
        self._made_before = self.counts.made
        if state["weights"] is not None:
            self.actors.load_weights(state["weights"])
            self.has_weights = True
        self.actors.load_state_dict(state)
        if self._is_remote or None in self.actors.states:
            self._begin_anew()
            return
        self._turn, self._has_begun = state["turn"], True
        for actor in range(self.num_actors):
            self._let_act(actor)

    def _start_over(self, actor: int) -> None:
        self.actors.start_over(actor)
        self._turns[actor] = self._make_turns()

    def _begin_anew(self) -> None:
        """Continue with new episodes in all environments; rollouts in flight are dropped."""
        dropped = self.counts.in_flight
        self.counts.dropped += dropped
        self.is_exact = False
        for actor in range(self.num_actors):
            self._start_over(actor)
        self._news.lost += self.num_actors * self.actors.num_envs
        lost = f", and {dropped} steps that were in flight are dropped" if dropped else ""
        warn(f"the environments of the actors begin new episodes{lost}")
