"""Workers that collect rollouts with a policy whose weights come through shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from maze_train.data.rollout_slots import RolloutLayout
from maze_train.rollout.collector import RolloutCollector
from maze_train.rollout.weights import WeightsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.episodes import FinishedEpisodes
    from maze_train.types import TensorTree
    from maze_train.workers.places import Portable
    from maze_train.workers.pool import WorkerContext


class MakeActorEnv(Protocol):
    """Builds the environments of an actor."""

    def __call__(self, first_env: int, /, *, can_be_restored: bool) -> MazeVectorEnv:
        """The environments, not reset yet.

        Args:
            first_env: Number of the first of them in messages.
            can_be_restored: Whether their state will be asked for.
        """
        ...


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

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.env_observation_space, self.single_action_space


@dataclass(frozen=True)
class ActorPolicy:
    """The policy of all actors."""

    make_model: Portable[Callable[[], nn.Module]]
    """Builds the policy."""

    actions: TensorTree
    """An example of the actions of one environment."""

    state_size: int
    """Size of the hidden state of the policy."""

    num_steps: int
    """Steps T of each environment per rollout."""

    allow_new_episodes: bool
    """See `RolloutCollector`."""

    info_keys: Sequence[str] = ()
    """Likewise."""

    def layout(self, env: Any, num_envs: int) -> RolloutLayout:
        """Layout of rollouts of so many environments in a slot.

        Args:
            env: Has `single_observation_space` and `frame_stack`.
            num_envs: Environments B.
        """
        return RolloutLayout(
            env.single_observation_space,
            self.actions,
            self.num_steps,
            num_envs,
            frame_stack=env.frame_stack,
            state_size=self.state_size,
        )


class ActorWorker:
    """An actor: environments and a policy, which collect rollouts into slots of memory.

    Args:
        make_env: Builds the environments.
        num_envs: How many environments each worker has.
        context: Where it lives.
    """

    def __init__(
        self, make_env: Portable[MakeActorEnv], num_envs: int, context: WorkerContext
    ) -> None:
        first_env = context.index * num_envs
        self._env = make_env.value(first_env, can_be_restored=not context.is_remote)
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
        self, policy: ActorPolicy, env_seed: int, action_seed: int, weights: Any, slots: Any
    ) -> None:
        """Begin with a policy, whose parameters become those that the learner publishes.

        Args:
            policy: The policy.
            env_seed: Seed of the episodes.
            action_seed: Seed of the actions.
            weights: Memory that a `WeightsWriter` writes.
            slots: Memory of as many rollouts as fit into it.
        """
        env = self._env
        layout = policy.layout(env, env.num_envs)
        self._slots = layout.slots(slots)
        self._model: Any = policy.make_model.value()
        self._weights = WeightsReader(self._model, weights.buffer)
        self._collector = RolloutCollector(
            env,
            policy.num_steps,
            env_seed=env_seed,
            action_seed=action_seed,
            allow_new_episodes=policy.allow_new_episodes,
            records_log_probs=True,
            info_keys=policy.info_keys,
            on_step=partial(self._context.count, env.num_envs),
        )

    def collect(self, slot: int) -> tuple[int, int, FinishedEpisodes, float]:
        """Collect a rollout with the newest weights into a slot.

        Returns:
            The slot, the number of transitions, the episodes that ended, and the time.
        """
        seq_no = self._weights.load()
        rollout, episodes = self._collector.collect(self._model)
        seq_nos = torch.full((rollout.num_envs,), seq_no, dtype=torch.int64)
        self._slots[slot].write(replace(rollout, weights_seq_no=seq_nos))
        return slot, rollout.num_samples, episodes, time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """State of the environments and of what is random."""
        return self._collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._collector.load_state_dict(state)

    def close(self) -> None:
        """Close the environments."""
        self._env.close()
