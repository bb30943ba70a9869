"""Workers that collect rollouts with a policy whose weights come through shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.data.rollout_slots import RolloutLayout
from maze_train.rollout.actors import RolloutActor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.actors import ActorSettings
    from maze_train.rollout.episodes import FinishedEpisodes
    from maze_train.types import TensorTree
    from maze_train.workers.messages import Portable
    from maze_train.workers.pool import WorkerContext

__all__ = ["ActorEnvs", "ActorPolicy", "ActorWorker"]


@dataclass(frozen=True)
class ActorEnvs:
    """The environments of an actor, as the learner needs to know them."""

    single_observation_space: Any
    """Flat observation space."""

    env_observation_space: Any
    """Observation space as the environment has it."""

    single_action_space: Any
    """Action space."""

    frame_stack: dict[str, int]
    """Observations that are stacks of frames, see `MazeVectorEnv`."""


@dataclass(frozen=True)
class ActorPolicy:
    """The policy of all actors."""

    make_model: Portable[Callable[[], nn.Module]]
    """Builds the policy."""

    actions: TensorTree
    """An example of the actions of one environment."""

    state_size: int
    """Size of the hidden state of the policy."""

    def layout(self, env: Any, num_steps: int, num_envs: int) -> RolloutLayout:
        """Layout of rollouts of so many steps and environments in a slot.

        Args:
            env: Has `single_observation_space` and `frame_stack`.
            num_steps: Steps T.
            num_envs: Environments B.
        """
        return RolloutLayout(
            env.single_observation_space,
            self.actions,
            num_steps,
            num_envs,
            frame_stack=env.frame_stack,
            state_size=self.state_size,
        )


class ActorWorker:
    """Environments and a policy, which collect rollouts into slots of memory.

    Args:
        make_env: Builds the environments; called with the number of the first one.
        num_envs: How many environments each worker has.
        context: Where it lives.
    """

    def __init__(
        self,
        make_env: Portable[Callable[[int], MazeVectorEnv]],
        num_envs: int,
        context: WorkerContext,
    ) -> None:
        self._env = make_env.value(context.index * num_envs)
        self._context = context

    def describe(self) -> ActorEnvs:
        """The environments."""
        env = self._env
        return ActorEnvs(
            env.single_observation_space,
            env.env_observation_space,
            env.single_action_space,
            dict(env.frame_stack),
        )

    def set_policy(
        self, policy: ActorPolicy, settings: ActorSettings, weights: Any, slots: Any
    ) -> None:
        """Begin with a policy.

        Args:
            policy: The policy.
            settings: Length of the rollouts, seeds.
            weights: Memory of the weights.
            slots: Memory of as many rollouts as fit into it.
        """
        env = self._env
        layout = policy.layout(env, settings.num_steps, env.num_envs)
        count = slots.nbytes // layout.nbytes
        self._slots = [layout.slot(slots.buffer, i * layout.nbytes) for i in range(count)]
        on_step = partial(self._context.count, env.num_envs)
        model = policy.make_model.value()
        self._actor = RolloutActor(env, model, weights.buffer, settings, on_step)

    def collect(self, slot: int) -> tuple[int, int, FinishedEpisodes, float]:
        """Collect a rollout into a slot.

        Returns:
            The slot, the number of transitions, the episodes that ended, and the time.
        """
        rollout, episodes = self._actor.act()
        self._slots[slot].write(rollout)
        return slot, rollout.num_samples, episodes, time.monotonic()

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
