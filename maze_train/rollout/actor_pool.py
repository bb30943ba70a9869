"""Workers with actors, the weights that these act with, and the memory of their rollouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from maze_train.rollout.actor_worker import ActorPolicy, ActorWorker
from maze_train.rollout.weights import WeightsWriter, weights_nbytes
from maze_train.workers.places import Portable, ThisProcess
from maze_train.workers.pool import check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from maze_train.rollout.actor_worker import ActorEnvs, CollectedRollout, MakeActorEnv
    from maze_train.workers.places import Place


CALLS = {
    "collect": "a step of a rollout",
    "load_state_dict": "putting its environments back",
    "set_policy": "building its policy",
    "state_dict": "telling its state",
}
"""Names of calls in messages."""


class Actors:
    """Actors of one learner, spread over workers in this process or elsewhere.

    An actor is a few environments and a policy, and its numbers depend on nothing else: so it makes
    no difference how many of them a worker has.

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
        envs: The environments of an actor.
        env_observation_space: Observation space of one of them, as the environment has it.
        single_action_space: Action space of one of them.
        policy: The policy; there from `begin` on.
        writer: Writes the weights; likewise.

    Raises:
        SpaceError: If the environments differ in their spaces.
        WorkerError: If an environment can not be built, or a worker dies or hangs.
    """

    policy: ActorPolicy
    writer: WeightsWriter

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
        self.slices = [
            range(*bounds) for bounds in pairwise(num_actors * i // count for i in range(count + 1))
        ]
        self._memories: list[Any] = []
        self._slots: list[list[Any]] = []
        make = partial(ActorWorker, Portable(make_env, "env"), num_envs)
        makers = [partial(make, part, can_be_restored) for part in self.slices]
        names = [
            f"{'worker' if num_workers else 'actor'} {i} (environments {part.start * num_envs} to "
            f"{part.stop * num_envs - 1})"
            for i, part in enumerate(self.slices)
        ]
        self.pool = (place or ThisProcess()).pool(makers, names, CALLS)
        described = self.pool.call_new("describe")
        self.envs: ActorEnvs = described[0]
        self.env_observation_space, self.single_action_space = self.envs.spaces
        try:
            for part, envs in zip(self.slices, described, strict=True):
                check_spaces(part.start * num_envs, envs.spaces, self.envs.spaces)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        model: nn.Module,
        make_model: Callable[[], nn.Module],
        num_slots: int,
        **settings: Any,
    ) -> None:
        """Make room for the weights of a policy, and for its rollouts.

        Args:
            model: The model that the learner updates.
            make_model: Builds a model of the same layout, in whatever process.
            num_slots: Rollouts of each worker that there is room for.
            **settings: Further fields of `ActorPolicy`.
        """
        self.policy = ActorPolicy.of(model, make_model=Portable(make_model, "model"), **settings)
        self._close_memories()
        self._memories, self._slots = [], []
        weights = self.pool.allocate(weights_nbytes(model))
        self.writer = WeightsWriter(model, weights.buffer)
        self._memories.append(weights)
        layout = self.policy.layout(self.envs, self.num_envs)
        for _ in self.slices:
            self._memories.append(self.pool.allocate(num_slots * layout.nbytes))
            self._slots.append(layout.slots(self._memories[-1]))

    def set_policy(self, worker: int, seeds: Sequence[tuple[int, int]], **changes: Any) -> None:
        """Send the policy to a worker, which has no result.

        Args:
            worker: Number of the worker.
            seeds: Seeds of episodes and of actions of each of its actors.
            **changes: Fields of `ActorPolicy` that are others for it.
        """
        weights, *slots = self._memories
        policy = replace(self.policy, **changes)
        self.pool.call(worker, "set_policy", policy, seeds, weights, slots[worker])

    def publish(self, weights_seq_no: int) -> None:
        """Let actors act with the weights of the learner as they are, from their next rollout on.

        Args:
            weights_seq_no: Updates that the weights have seen.
        """
        self.writer.publish(weights_seq_no)
        self.pool.publish(self._memories[0], self.writer.newest())

    def load_weights(self, state: dict[str, Any]) -> None:
        """Let actors act with the weights of a state of `writer`."""
        self.writer.load_state_dict(state)
        self.pool.publish(self._memories[0], self.writer.newest())

    def rollout(self, worker: int, collected: CollectedRollout) -> Any:
        """The rollout that a worker collected, or those by policy; views of its slot."""
        self.busy_s += collected.seconds
        return self._slots[worker][collected.slot].rollout()

    def _close_memories(self) -> None:
        for memory in self._memories:
            memory.close()

    def close(self) -> None:
        """End the actors; again it does nothing."""
        try:
            self.pool.close()
        finally:
            self._close_memories()
