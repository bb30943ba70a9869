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
from maze_train.targets import locate
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from maze_train.data.rollout import Rollout
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.episodes import FinishedEpisodes
    from maze_train.types import TensorTree
    from maze_train.workers.places import Portable
    from maze_train.workers.pool import WorkerContext


# Found where there are several agents.
TURN_COLLECTOR = "maze_train.rollout.turn_collector.TurnCollector"
POLICY_ROLLOUTS_LAYOUT = "maze_train.data.policy_rollouts.PolicyRolloutsLayout"


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

    state_sizes: dict[str, int]
    """Sizes of those of several agents, by name."""

    members: dict[str, list[str]]
    """The agents of each policy, if there are several agents."""

    num_steps: int
    """Steps T of each environment per rollout."""

    allow_new_episodes: bool
    """See `RolloutCollector`."""

    info_keys: Sequence[str] = ()
    """Likewise."""

    @classmethod
    def of(cls, model: Any, **settings: Any) -> ActorPolicy:
        """The policy that a model is, of one agent or several."""
        mode = model.distribution.mode(torch.zeros(1, model.distribution.param_size))
        return cls(
            actions=tree_map(lambda x: x[0].cpu(), mode),
            state_size=int(getattr(model, "state_size", 0)),
            state_sizes=getattr(model, "state_sizes", {}),
            members=getattr(model, "members", {}),
            **settings,
        )

    def layout(self, env: Any, num_envs: int) -> Any:
        """Layout of rollouts of so many environments in a slot.

        Args:
            env: Has `single_observation_space` and `frame_stack`.
            num_envs: Environments B.
        """
        if self.members:
            return locate(POLICY_ROLLOUTS_LAYOUT)(
                env.single_observation_space,
                self.actions,
                self.members,
                self.state_sizes,
                self.num_steps,
                num_envs,
            )
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
        self._filled: Any = None

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
        self._collector: Any = RolloutCollector(
            env,
            policy.num_steps,
            env_seed=env_seed,
            action_seed=action_seed,
            allow_new_episodes=policy.allow_new_episodes,
            records_log_probs=True,
            info_keys=policy.info_keys,
            on_step=partial(self._context.count, env.num_envs),
        )
        if policy.members:
            settings = {"records_log_probs": True, "as_steps": True}
            self._collector = locate(TURN_COLLECTOR)(self._collector, self._model, **settings)

    def collect(self, slot: int) -> tuple[int, int, FinishedEpisodes, float]:
        """Collect a rollout with the newest weights into a slot.

        Returns:
            The slot, the number of transitions, the episodes that ended, and the time.
        """
        seq_no = self._weights.load()
        collected, episodes = self._collector.collect(self._model)
        if isinstance(collected, dict):
            collected = {key: _numbered(rollout, seq_no) for key, rollout in collected.items()}
        else:
            collected = _numbered(collected, seq_no)
        self._filled = self._slots[slot]
        self._filled.write(collected)
        return slot, episodes.steps, episodes, time.time()

    def written(self) -> Any:
        """The parts of its slot that the last rollout takes."""
        return self._filled.written() if self._filled else []

    def state_dict(self) -> dict[str, Any]:
        """State of the environments and of what is random."""
        state: dict[str, Any] = self._collector.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._collector.load_state_dict(state)

    def close(self) -> None:
        """Close the environments."""
        self._env.close()


def _numbered(rollout: Rollout, weights_seq_no: int) -> Rollout:
    """A rollout with the number of the weights that acted."""
    numbers = torch.full((rollout.num_envs,), weights_seq_no, dtype=torch.int64)
    return replace(rollout, weights_seq_no=numbers)
