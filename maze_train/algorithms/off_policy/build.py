"""Builder of algorithms with a replay buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from maze_train.algorithms.off_policy.config import BUFFERS, OffPolicyConfig
from maze_train.algorithms.off_policy.demonstrations import read_demonstrations
from maze_train.data.replay import UniformReplayBuffer
from maze_train.data.replay_columns import ReplayLayout
from maze_train.data.transitions import BaseReplayBuffer
from maze_train.data.turn_replay import PolicyReplayBuffers, TurnReplayBuffer
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.errors import ConfigError, SpaceError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.notices import tell
from maze_train.rollout.collector import RolloutCollector
from maze_train.rollout.initial_policies import GivenPolicy, RandomPolicy
from maze_train.rollout.random_agents import RandomAgents
from maze_train.spaces.agent_trees import flat_space_of
from maze_train.spaces.agents import agent_spaces
from maze_train.targets import TARGET, Given, build_target, locate
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.environments import close_quietly
from maze_train.training.machine import available_disk, available_memory, readable_nbytes
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gymnasium import Env
    from torch import nn

    from maze_train.data.rollout import Rollout
    from maze_train.distributions.base import Distribution
    from maze_train.nets.masking import ActionMasking
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.training.trainer import Trainer
    from maze_train.types import TensorTree


Config = TypeVar("Config", bound=OffPolicyConfig)


class OffPolicyModel(Protocol):
    """Part of a model that filling a replay buffer needs, besides being an `ActingModel`."""

    normalizer: ObservationNormalizer | None
    """Normalises observations."""

    masking: ActionMasking | None
    """Rules out illegal actions."""

    @property
    def distribution(self) -> Distribution:
        """The family of actions."""
        ...


@dataclass(frozen=True)
class Source:
    """What fills the replay buffer of a module."""

    model: OffPolicyModel
    observation_space: Any
    """Flat observation space."""
    num_envs: int
    """Columns of rollouts: environments, or agents in them."""
    size: int
    """Transitions that the buffer holds in the end."""

    @property
    def actions(self) -> TensorTree:
        """One action of the agent, all zeros."""
        family = self.model.distribution
        params, noise = torch.zeros(family.param_size), torch.zeros(family.noise_size)
        return tree_map(torch.zeros_like, family.sample(params, noise))


class OffPolicyBuilder(AlgorithmBuilder[Config]):
    """Builds what collects transitions, the replay buffer, and the policy that acts first."""

    def prepare(self, model: nn.Module) -> None:
        """Build learner and replay buffer.

        Raises:
            ConfigError: If the replay buffer does not fit where it is to lie, or a part that the
                configuration names is none.
        """
        acting: Any = model
        self._buffer_node = self.algorithm.replay_buffer_node
        if agent_spaces(*self.spaces) is not None:
            self._prepare_for_agents(acting)
            return
        demonstrations = self._demonstrations(acting)
        space, num_envs = self.env.single_observation_space, self.env.num_envs
        source = Source(acting, space, num_envs, self._reached_size(demonstrations))
        self._sources = {DEFAULT_MODULE: source}
        self._check_buffers_fit()
        super().prepare(model)
        self._buffer = self._build_buffer(source, "replay")
        self._buffer.use_environment(self._single_env)
        self._initial_policy = self._build_initial_policy(acting)
        if demonstrations is not None:
            self._add_demonstrations(acting, demonstrations)

    def _prepare_for_agents(self, model: Any) -> None:
        """Build the learner of all policies, and a replay buffer for each of them."""
        config = self.algorithm
        if locate(self._buffer_node[TARGET]) is not UniformReplayBuffer:
            problem = "turns of several agents are drawn uniformly; expected uniform"
            raise ConfigError("algorithm.replay_buffer", problem, self._buffer_node)
        for key in ("initial_demonstration_trajectories", "initial_sampling_policy"):
            if getattr(config, key) is not None:
                problem = "is for one agent, the environment has several; expected null"
                raise ConfigError(f"algorithm.{key}", problem, getattr(config, key))
        self._buffer_node = {**self._buffer_node, TARGET: Given(TurnReplayBuffer)}
        space: Any = self.env.single_observation_space
        num_envs = self.env.num_envs
        self._sources = {
            policy: Source(
                model.by_policy[policy],
                flat_space_of(space, agents[0]),
                num_envs * len(agents),
                self._reached_size(None, len(agents)),
            )
            for policy, agents in model.members.items()
            if agents and hasattr(model.by_policy[policy], "update_targets")  # else it never learns
        }
        self._check_buffers_fit()
        super().prepare(model)
        buffers: Any = PolicyReplayBuffers(
            {
                policy: self._build_buffer(source, f"replay/{policy}")
                for policy, source in self._sources.items()
            }
        )
        self._buffer = buffers
        self._initial_policy = self._build_initial_policy(model)

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """A collector on the environments of this process, the buffer, and the first policy."""
        acting: Any = model
        if self.context.checkpoint.is_on:
            size = readable_nbytes(self._buffer_nbytes)
            tell(f"checkpoints hold the replay buffer, which grows to {size}")
        collector = self.make_collector(self.algorithm.n_rollout_steps, acting, at_end=True)
        if isinstance(collector, RolloutCollector):
            collector.keeps_terminal_obs = self._buffer.keeps_terminal_obs
        return {
            "collector": collector,
            "replay_buffer": self._buffer,
            "initial_policy": self._initial_policy,
        }

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are too few."""
        normalizers = {key: source.model.normalizer for key, source in self._sources.items()}
        if any(normalizers.values()):
            # Not the policy of the trainer: what that remembers belongs to the run.
            self.begin_statistics(normalizers, 100, self._build_initial_policy(trainer.model))

    def _build_initial_policy(self, model: Any) -> RandomPolicy | GivenPolicy | RandomAgents:
        """Build the policy that acts until the buffer is filled."""
        distribution, (observation_space, action_space) = model.distribution, self.spaces
        node, repeat = self.algorithm.initial_sampling_policy, self.algorithm.initial_action_repeat
        several = agent_spaces(observation_space, action_space)
        if several is not None:
            learns = self.learners.first.may_learn
            return RandomAgents(model, several, learns, repeat)
        if node is None:
            return RandomPolicy(distribution, action_space, model.masking, repeat=repeat)
        key = "algorithm.initial_sampling_policy"
        given = build_target(node, key=key)
        if not callable(getattr(given, "act", None)):
            raise ConfigError(key, "expected an object with a method act(observations)", node)
        return GivenPolicy(given, distribution, observation_space, action_space)

    # -- demonstrations ----------------------------------------------------------------------------

    def _demonstrations(self, model: OffPolicyModel) -> Rollout | None:
        """Demonstrations with which the replay buffer of a new run begins."""
        source = self.algorithm.initial_demonstration_trajectories
        if source is None or self.context.has_checkpoint:
            return None
        rollout: Rollout = read_demonstrations(source, self.env, model.distribution)
        return rollout

    def _add_demonstrations(self, model: OffPolicyModel, rollout: Rollout) -> None:
        """Begin the replay buffer with demonstrations."""
        self._buffer.add_rollout(rollout)
        self._buffer.interrupt()
        if len(self._buffer) < rollout.num_samples:
            raise ConfigError(
                "algorithm.replay_buffer_size",
                f"holds {len(self._buffer)} of the {rollout.num_samples} transitions of the "
                "demonstrations: raise it",
                self.algorithm.replay_buffer_size,
            )
        if model.normalizer is not None:
            acted_on = rollout.to(self.context.device).acted_on(model.normalizer.keys)
            model.normalizer.update(acted_on)

    # -- the replay buffer -------------------------------------------------------------------------

    def _reached_size(self, demonstrations: Rollout | None, num_agents: int = 1) -> int:
        """Transitions that the buffer of so many agents holds in the end."""
        size, total_steps = self.algorithm.replay_buffer_size, self.context.total_steps
        if not total_steps:
            return size
        is_unknown = (
            self.algorithm.initial_demonstration_trajectories and self.context.has_checkpoint
        )
        if is_unknown:  # how many demonstrations a run began with that is continued
            return size
        update = self.env.num_envs * self.algorithm.n_rollout_steps
        reached = -(-total_steps // update) * update
        if demonstrations is not None:  # and the row where the run begins
            reached += demonstrations.rewards.numel() + self.env.num_envs
        return min(size, reached * num_agents)

    @property
    def _buffer_nbytes(self) -> int:
        """Bytes of the replay buffers in the end."""
        key = f"algorithm.replay_buffer.{TARGET}"
        buffer_class = locate(self._buffer_node[TARGET], key)
        entry_nbytes, nbytes = int(getattr(buffer_class, "entry_nbytes", 0)), 0
        for source in self._sources.values():
            layout = ReplayLayout(
                source.size,
                source.observation_space,
                source.actions,
                num_envs=source.num_envs,
                frame_stack=self.env.frame_stack,
            )
            nbytes += layout.nbytes + layout.ring.size * entry_nbytes
        return nbytes

    def _check_buffers_fit(self) -> None:
        """Refuse replay buffers that would run out of memory in the middle of training."""
        storage = self.algorithm.replay_buffer_storage
        device = self.context.device if storage == "device" else torch.device("cpu")
        in_memory = storage != "disk"
        free = available_memory(device) if in_memory else available_disk(self._buffer_dir)
        if free is not None and self._buffer_nbytes > free:
            raise self._too_large(f"{readable_nbytes(free)} are free ({storage})")

    def _too_large(self, problem: str) -> ConfigError:
        """The error for a replay buffer that does not fit its storage."""
        needed = readable_nbytes(self._buffer_nbytes)
        size = sum(source.size for source in self._sources.values())
        remedy = "set algorithm.replay_buffer_storage=disk"
        if self.algorithm.replay_buffer_storage == "disk":
            remedy = "set run_dir to a place on a larger disk"
        return ConfigError(
            "algorithm.replay_buffer_size",
            f"the replay buffer takes {needed} for {size:,} transitions, but "
            f"{problem}: lower it, or {remedy}",
            self.algorithm.replay_buffer_size,
        )

    def _single_env(self) -> Env[Any, Any]:
        """An environment in this process, for a buffer that asks it."""
        if self.context.env.backend != "gymnasium":
            key = "algorithm.replay_buffer"
            problem = "it asks an environment of gymnasium: set env.backend=gymnasium"
            raise ConfigError(key, problem, self.algorithm.replay_buffer)
        env = PooledVectorEnv([self.context.env_factory])
        self.context.closing.callback(close_quietly, env)
        return env.envs[0]

    @property
    def _buffer_dir(self) -> Path:
        """Directory of its unnamed files: the run directory, or the one that will hold it."""
        run_dir = self.context.run_dir
        return next(place for place in (run_dir, *run_dir.parents) if place.is_dir())

    def _build_buffer(self, source: Source, stream: str) -> BaseReplayBuffer:
        config = self.algorithm
        try:
            buffer: BaseReplayBuffer = build_target(
                self._buffer_node,
                config.replay_buffer_size,
                source.observation_space,
                source.actions,
                key="algorithm.replay_buffer",
                kind=BaseReplayBuffer,
                num_envs=source.num_envs,
                seed=self.context.seeds.integer(stream),
                n_steps=config.n_step_returns,
                gamma=config.gamma,
                frame_stack=self.env.frame_stack,
                storage=config.replay_buffer_storage,
                directory=self._buffer_dir,
                device=self.context.device,
            )
            if not isinstance(buffer, BaseReplayBuffer):
                raise ConfigError(
                    "algorithm.replay_buffer",
                    "expected a subclass of maze_train.BaseReplayBuffer",
                    type(buffer).__name__,
                )
            buffer.reserve(source.size)
        except SpaceError as error:
            names = {target: name for name, target in BUFFERS.items()}
            node = config.replay_buffer_node
            value = names.get(node[TARGET], node)
            raise ConfigError("algorithm.replay_buffer", str(error), value) from error
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._too_large(f"there is no room: {error}") from error
        except OSError as error:
            problem = f"the replay buffer can not be made: {error}"
            storage = config.replay_buffer_storage
            raise ConfigError("algorithm.replay_buffer_storage", problem, storage) from error
        return buffer
