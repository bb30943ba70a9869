"""Runner of SAC."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.data.replay import PrioritizedReplayBuffer, replay_nbytes
from maze_train.data.trajectories import trajectories_as_rollout
from maze_train.data.trajectory_store import open_dataset
from maze_train.data.transitions import BaseReplayBuffer
from maze_train.errors import ConfigError, DatasetError
from maze_train.learner.group import LearnerGroup
from maze_train.nets.soft_actor_critic import SoftActorCriticModel
from maze_train.rollout.initial_policies import GivenPolicy, RandomPolicy
from maze_train.runners.base import TrainingRunner
from maze_train.runners.machine import available_disk, available_memory, readable_nbytes
from maze_train.runners.vector_envs import begin_statistics
from maze_train.spaces.compare import check_same_spaces
from maze_train.targets import TARGET, build_target, locate
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from torch import nn

    from maze_train.algorithms.sac.trainer import SAC
    from maze_train.config.pipeline import PreparedRun
    from maze_train.data.rollout import Rollout
    from maze_train.data.trajectory_store import TrajectoryDataset
    from maze_train.distributions.base import Distribution
    from maze_train.envs.factory import EnvFactory
    from maze_train.learner.learner import Learner
    from maze_train.training.trainer import Trainer
    from maze_train.types import TensorTree

__all__ = ["SACRunner"]


class SACRunner(TrainingRunner):
    """Runs SAC.

    Args:
        prepared: The configuration and what the run begins with; the algorithm is
            a `SACAlgorithmConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    def __init__(self, prepared: PreparedRun, env_factory: EnvFactory | None = None) -> None:
        super().__init__(prepared, env_factory)
        if not isinstance(self.config.algorithm, SACAlgorithmConfig):
            raise ConfigError("algorithm", "expected sac", type(self.config.algorithm).__name__)
        self.algorithm = self.config.algorithm

    def build_model(self) -> SoftActorCriticModel:
        """Policy and critics for the spaces of the environment, their learner, and its experience.

        Raises:
            ConfigError: If the replay buffer does not fit where it is to lie, or a part that the
                configuration names is none.
        """
        observation_space, action_space = self.spaces
        model: SoftActorCriticModel = locate(self.algorithm.model_builder)(
            self.config.model,
            observation_space,
            action_space,
            self.seeds.integer("model"),
            **self.algorithm.model_settings,
        )
        demonstrations = None if self._has_checkpoint else self._demonstrations(model)
        self._buffer_size = self._reached_size(demonstrations)
        self._check_buffer_fits(model)
        learner_class = locate(self.algorithm.learner_class)
        self._learner: Learner[Any, Any, Any] = learner_class(
            model, self.algorithm, device=self.device, seed=self.seeds.integer("minibatches")
        )
        self._buffer = self._build_buffer(model)
        self._initial_policy = self._build_initial_policy(model)
        if demonstrations is not None:
            self._add_demonstrations(model, demonstrations)
        return model

    def build_trainer(self, model: nn.Module, **services: Any) -> SAC:
        """The trainer, with a collector on the vector environments of this runner."""
        assert isinstance(model, SoftActorCriticModel)
        if self.config.checkpoint.is_on:
            size = readable_nbytes(self._buffer_nbytes(model))
            print(f"checkpoints hold the replay buffer, which grows to {size}", file=sys.stderr)
        trainer_class = locate(self.algorithm.trainer_class)
        trainer: SAC = trainer_class(
            self.algorithm,
            LearnerGroup(self._learner),
            model,
            collector=self.make_collector(self.algorithm.n_rollout_steps),
            replay_buffer=self._buffer,
            initial_policy=self._initial_policy,
            **services,
        )
        return trainer

    def _build_initial_policy(self, model: SoftActorCriticModel) -> RandomPolicy | GivenPolicy:
        """Build the policy that acts until the buffer is filled."""
        distribution, (observation_space, action_space) = model.distribution, self.spaces
        node = self.algorithm.initial_sampling_policy
        if node is None:
            repeat = self.algorithm.initial_action_repeat
            return RandomPolicy(distribution, action_space, model.masking, repeat=repeat)
        key = "algorithm.initial_sampling_policy"
        policy = build_target(node, key=key)
        if not callable(getattr(policy, "act", None)):
            raise ConfigError(key, "expected an object with a method act(observations)", node)
        return GivenPolicy(policy, distribution, observation_space, action_space)

    # -- the replay buffer -----------------------------------------------------------------------

    def _reached_size(self, demonstrations: Rollout | None) -> int:
        """Transitions that the buffer holds in the end."""
        size, total_steps = self.algorithm.replay_buffer_size, self.config.total_steps
        if not total_steps:
            return size
        is_unknown = self.algorithm.initial_demonstration_trajectories and self._has_checkpoint
        if is_unknown:  # how many demonstrations a run began with that is continued
            return size
        update = self.env.num_envs * self.algorithm.n_rollout_steps
        reached = -(-total_steps // update) * update
        if demonstrations is not None:  # and the row where the run begins
            reached += demonstrations.rewards.numel() + self.env.num_envs
        return min(size, reached)

    def _buffer_nbytes(self, model: SoftActorCriticModel) -> int:
        """Bytes of the replay buffer in the end."""
        buffer_class = locate(
            str(self.algorithm.replay_buffer[TARGET]), f"algorithm.replay_buffer.{TARGET}"
        )
        return replay_nbytes(
            self._buffer_size,
            self.env.single_observation_space,
            _action_zeros(model.distribution),
            num_envs=self.env.num_envs,
            frame_stack=self.env.frame_stack,
            prioritized=_is_subclass(buffer_class, PrioritizedReplayBuffer),
        )

    def _check_buffer_fits(self, model: SoftActorCriticModel) -> None:
        """Refuse a replay buffer that would run out of memory in the middle of training."""
        storage = self.algorithm.replay_buffer_storage
        device = self.device if storage == "device" else torch.device("cpu")
        in_memory = storage != "disk"
        free = available_memory(device) if in_memory else available_disk(self._buffer_dir)
        if free is not None and self._buffer_nbytes(model) > free:
            raise self._too_large(model, f"{readable_nbytes(free)} are free ({storage})")

    def _too_large(self, model: SoftActorCriticModel, problem: str) -> ConfigError:
        """The error for a replay buffer that does not fit its storage."""
        needed = readable_nbytes(self._buffer_nbytes(model))
        remedy = "set algorithm.replay_buffer_storage=disk"
        if self.algorithm.replay_buffer_storage == "disk":
            remedy = "set run_dir to a place on a larger disk"
        return ConfigError(
            "algorithm.replay_buffer_size",
            f"the replay buffer takes {needed} for {self._buffer_size:,} transitions, but "
            f"{problem}: lower it, or {remedy}",
            self.algorithm.replay_buffer_size,
        )

    @property
    def _buffer_dir(self) -> Path:
        """Directory of its unnamed files: the run directory, or the one that will hold it."""
        run_dir = self.resumed_dir or Path(self.config.run_dir or ".").absolute()
        return next(place for place in (run_dir, *run_dir.parents) if place.is_dir())

    def _build_buffer(self, model: SoftActorCriticModel) -> BaseReplayBuffer:
        config = self.algorithm
        try:
            buffer: BaseReplayBuffer = build_target(
                config.replay_buffer,
                config.replay_buffer_size,
                self.env.single_observation_space,
                _action_zeros(model.distribution),
                key="algorithm.replay_buffer",
                kind=BaseReplayBuffer,
                num_envs=self.env.num_envs,
                seed=self.seeds.integer("replay"),
                n_steps=config.n_step_returns,
                gamma=config.gamma,
                frame_stack=self.env.frame_stack,
                storage=config.replay_buffer_storage,
                directory=self._buffer_dir,
                device=self.device,
            )
            if not isinstance(buffer, BaseReplayBuffer):
                raise ConfigError(
                    "algorithm.replay_buffer",
                    "expected a subclass of maze_train.BaseReplayBuffer",
                    type(buffer).__name__,
                )
            buffer.reserve(self._buffer_size)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._too_large(model, f"there is no room: {error}") from error
        except OSError as error:
            problem = f"the replay buffer can not be made: {error}"
            storage = config.replay_buffer_storage
            raise ConfigError("algorithm.replay_buffer_storage", problem, storage) from error
        return buffer

    def _demonstrations(self, model: SoftActorCriticModel) -> Rollout | None:
        """Demonstrations with which the replay buffer begins."""
        node = self.algorithm.initial_demonstration_trajectories
        if node is None:
            return None
        key = "algorithm.initial_demonstration_trajectories"
        trajectories = self._demonstration_dataset(node, key)
        rollout = trajectories_as_rollout(
            trajectories,
            self.env.num_envs,
            self.env.single_observation_space,
            self.env.single_action_space,
            model.distribution.from_env,
        )
        if rollout is None:
            raise ConfigError(key, "expected at least one trajectory", node)
        return rollout

    def _add_demonstrations(self, model: SoftActorCriticModel, rollout: Rollout) -> None:
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
            model.normalizer.update(rollout.to(self.device).acted_on(model.normalizer.keys))

    def _demonstration_dataset(self, node: str | dict[str, Any], key: str) -> TrajectoryDataset:
        """The recorded episodes that a setting names."""
        observation_space, action_space = self.spaces
        try:
            dataset = open_dataset(
                node, observation_space=observation_space, action_space=action_space
            )
        except ConfigError as error:
            raise error.below(key) from error
        except DatasetError as error:
            raise ConfigError(key, str(error), node) from error
        found = (dataset.metadata.observation_space, dataset.metadata.action_space)
        problem = "it has the {kind} space {found}, the environment has {wanted}"
        check_same_spaces(key, problem, found, self.spaces, node)
        return dataset

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are too few."""
        model = trainer.model
        assert isinstance(model, SoftActorCriticModel)
        if model.normalizer is None:
            return
        begin_statistics(
            model.normalizer,
            self.config.model.normalization,
            lambda: self.make_collector(100, "normalization/"),
            # Not the one of the trainer: what that remembers belongs to the run.
            self._build_initial_policy(model),
        )


def _action_zeros(distribution: Distribution) -> TensorTree:
    """One action of the agent, all zeros."""
    params, noise = torch.zeros(distribution.param_size), torch.zeros(distribution.noise_size)
    return tree_map(torch.zeros_like, distribution.sample(params, noise))


def _is_subclass(found: object, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base)
