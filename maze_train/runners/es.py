"""Runner of evolution strategies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.errors import ConfigError
from maze_train.learner.group import LearnerGroup
from maze_train.nets.building import Policy
from maze_train.nets.population import find_normalizer
from maze_train.rollout.es_rollouts import ESDistributedRollouts
from maze_train.rollout.members import num_reals
from maze_train.rollout.noise_table import SharedNoiseTable
from maze_train.rollout.population import MemberSettings
from maze_train.runners.base import TrainingRunner
from maze_train.runners.machine import available_memory, readable_nbytes
from maze_train.runners.parts import close_quietly
from maze_train.runners.vector_envs import begin_statistics
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium
    from torch import nn

    from maze_train.algorithms.es.trainer import ESTrainer
    from maze_train.config.pipeline import PreparedRun
    from maze_train.envs.factory import EnvFactory
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.learner.learner import Learner
    from maze_train.nets.config import ModelConfig
    from maze_train.training.trainer import Trainer

__all__ = ["ESMasterRunner"]

STATISTICS_STEPS, STATISTICS_ENVS = 128, 8
"""Steps of each environment per rollout of the untrained policy, and how many environments: not
`runner.concurrency`, on which no number depends."""


NOISE_NBYTES = 4
"""Bytes of a number in the noise table."""


class ESMasterRunner(TrainingRunner):
    """Runs evolution strategies.

    Args:
        prepared: The configuration and what the run begins with; the algorithm is
            an `ESAlgorithmConfig`.
        env_factory: Builds the environments instead of what `config.env` names.
    """

    def __init__(self, prepared: PreparedRun, env_factory: EnvFactory | None = None) -> None:
        super().__init__(prepared, env_factory)
        if not isinstance(self.config.algorithm, ESAlgorithmConfig):
            raise ConfigError("algorithm", "expected es", type(self.config.algorithm).__name__)
        if self.config.env.backend != "gymnasium":
            raise ConfigError(
                "env.backend",
                "evolution strategies give every episode a seed of its own, which only single "
                "environments take; expected gymnasium",
                self.config.env.backend,
            )
        self.algorithm = self.config.algorithm
        self.device = torch.device("cpu")
        self._rollouts: ESDistributedRollouts | None = None

    def create_distributed_rollouts(
        self, shared_noise: SharedNoiseTable, settings: MemberSettings
    ) -> ESDistributedRollouts:
        """Build the workers that play the population.

        Args:
            shared_noise: The noise.
            settings: How members act.
        """
        return ESDistributedRollouts(
            self.member_env_factory(),
            self.num_slots,
            shared_noise,
            settings,
            self.place,
            on_non_finite=self.algorithm.on_non_finite,
        )

    @property
    def rollouts(self) -> ESDistributedRollouts:
        """Workers that play the population, closed at the end of the run."""
        if self._rollouts is None:
            self._check_table_fits()
            table = SharedNoiseTable(
                self.algorithm.noise_table_size, self.seeds.integer("noise_table")
            )
            self._closing.callback(table.close)
            settings = MemberSettings(
                seed=self.seeds.integer("population"),
                deterministic=self.algorithm.deterministic,
                action_noise_stddev=self.algorithm.action_noise_stddev,
            )
            self._rollouts = self.create_distributed_rollouts(table, settings)
            self._closing.callback(close_quietly, self._rollouts)
        return self._rollouts

    def _check_table_fits(self) -> None:
        """Refuse a noise table that is larger than the memory."""
        needed = self.algorithm.noise_table_size * NOISE_NBYTES
        free = available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"the noise table takes {readable_nbytes(needed)}, and {readable_nbytes(free)} of "
                "memory are free: lower it",
                self.algorithm.noise_table_size,
            )

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.rollouts.spaces

    @property
    def env(self) -> MazeVectorEnv:
        """Environments in which statistics of observations begin."""
        if self._env is None:
            self._env = self.make_env(STATISTICS_ENVS)
        return self._env

    @property
    def num_slots(self) -> int:
        """Members that play at a time, none of them for nothing."""
        count = self.config.runner.concurrency
        if self.algorithm.n_timesteps_per_update:
            return count
        return min(count, self.algorithm.n_rollouts_per_update)

    def member_env_factory(self) -> Callable[[], gymnasium.Env[Any, Any]]:
        """Builds an environment of a member."""
        limit = self.algorithm.max_steps
        return BoundedEnvFactory(self.env_factory, limit) if limit else self.env_factory

    def build_model(self) -> nn.Module:
        """The policy for the spaces of the environment, and its learner."""
        model = self.model_maker()()
        self._check_action_noise(model)
        learner_class = locate(self.algorithm.learner_class)
        self._learner: Learner[Any, Any, Any] = learner_class(
            model, self.algorithm, device=self.device, seed=self.seeds.integer("minibatches")
        )
        self.rollouts.begin(model, self.model_maker())
        return model

    def _check_action_noise(self, model: Any) -> None:
        """Refuse noise that no action would get."""
        if self.algorithm.action_noise_stddev and not num_reals(model.distribution):
            raise ConfigError(
                "algorithm.action_noise_stddev",
                f"no part of {self.spaces[1]} is a real number; expected 0",
                self.algorithm.action_noise_stddev,
            )

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a builder of the policy, with the same initial weights each time."""
        observation_space, action_space = self.spaces
        return partial(
            build_member,
            self.algorithm,
            self.config.model,
            observation_space,
            action_space,
            self.seeds.integer("model"),
        )

    def build_trainer(self, model: nn.Module, **services: Any) -> ESTrainer:
        """The trainer, with a population that knows the policy."""
        trainer_class = locate(self.algorithm.trainer_class)
        trainer: ESTrainer = trainer_class(
            self.algorithm,
            LearnerGroup(self._learner),
            model,
            rollouts=self.rollouts,
            **services,
        )
        return trainer

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none, with environments of their own."""
        model: Any = trainer.model
        begin_statistics(
            find_normalizer(model),
            self.config.model.normalization,
            lambda: self.make_collector(STATISTICS_STEPS, "normalization/"),
            model,
        )
        self.close_env()


def build_member(
    algorithm: ESAlgorithmConfig,
    config: ModelConfig,
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    seed: int,
) -> nn.Module:
    """The policy that a configuration asks for.

    State-independent parameters that make no difference to the most likely action are frozen where
    that is what members take.
    """
    model: nn.Module = locate(algorithm.model_builder)(
        config, observation_space, action_space, seed, **algorithm.model_settings
    )
    if algorithm.deterministic:
        for module in model.modules():
            if isinstance(module, Policy) and module.free_params is not None:
                module.free_params.requires_grad_(module.distribution.free_params_move_mode)
    return model
