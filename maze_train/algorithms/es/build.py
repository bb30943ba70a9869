"""Builder of evolution strategies."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.errors import ConfigError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.policy_model import Policy
from maze_train.nets.population import find_normalizer
from maze_train.rollout.es_rollouts import ESDistributedRollouts
from maze_train.rollout.members import num_reals
from maze_train.rollout.noise_table import SharedNoiseTable
from maze_train.rollout.population import MemberSettings
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.environments import close_quietly
from maze_train.training.machine import available_memory, readable_nbytes
from maze_train.training.models import modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import gymnasium
    from torch import nn

    from maze_train.training.build_context import BuildContext
    from maze_train.training.trainer import Trainer


STATISTICS_STEPS, STATISTICS_ENVS = 128, 8
"""Steps of each environment per rollout of the untrained policy, and how many environments: not
`runner.concurrency`, on which no number depends."""

NOISE_NBYTES = 4
"""Bytes of a number in the noise table."""


class ESBuilder(AlgorithmBuilder[ESAlgorithmConfig]):
    """Builds a population of perturbed policies, and the learner of their returns.

    Args:
        context: Everything that the algorithm is built from.

    Raises:
        ConfigError: If the environments are not those of gymnasium.
    """

    def __init__(self, context: BuildContext[ESAlgorithmConfig]) -> None:
        super().__init__(context)
        if context.env.backend != "gymnasium":
            raise ConfigError(
                "env.backend",
                "evolution strategies give every episode a seed of its own, which only single "
                "environments take; expected gymnasium",
                context.env.backend,
            )

    @cached_property
    def rollouts(self) -> ESDistributedRollouts:
        """Workers that play the population, closed at the end of the run."""
        context, config = self.context, self.algorithm
        self._check_table_fits()
        table = SharedNoiseTable(config.noise_table_size, context.seeds.integer("noise_table"))
        context.closing.callback(table.close)
        settings = MemberSettings(
            seed=context.seeds.integer("population"),
            deterministic=config.deterministic,
            action_noise_stddev=config.action_noise_stddev,
        )
        rollouts = ESDistributedRollouts(
            self.member_env_factory(),
            self.num_slots,
            table,
            settings,
            context.place,
            on_non_finite=config.on_non_finite_step,
        )
        context.closing.callback(close_quietly, rollouts)
        return rollouts

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
    def num_envs(self) -> int:
        """Number of environments in which statistics of observations begin."""
        return STATISTICS_ENVS

    @property
    def num_slots(self) -> int:
        """Number of members that play at a time, none of them for nothing."""
        count = self.context.concurrency
        if self.algorithm.n_timesteps_per_update:
            return count
        return min(count, self.algorithm.n_rollouts_per_update)

    def member_env_factory(self) -> Callable[[], gymnasium.Env[Any, Any]]:
        """Return a builder of an environment of a member."""
        limit, factory = self.algorithm.max_steps, self.context.env_factory
        return BoundedEnvFactory(factory, limit) if limit else factory

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a builder of the policy, with the same initial weights each time."""
        frozen = [key for key, own in self.context.policies.items() if own.frozen]
        return partial(build_member, super().model_maker(), self.algorithm.deterministic, frozen)

    def prepare(self, model: nn.Module) -> None:
        """Build the learner, and let the population know the policy."""
        policy: Any = model
        if hasattr(model, "members"):
            self._check_agents(model)
        if self.algorithm.action_noise_stddev and not num_reals(policy.distribution):
            raise ConfigError(
                "algorithm.action_noise_stddev",
                f"no part of {self.spaces[1]} is a real number; expected 0",
                self.algorithm.action_noise_stddev,
            )
        super().prepare(model)
        self.rollouts.begin(model, self.model_maker())

    def _check_agents(self, model: nn.Module) -> None:
        """Refuse what is for one agent only."""
        if find_normalizer(model) is not None:
            problem = "members of several agents take no statistics of observations; expected none"
            mode = self.context.model.normalization.mode
            raise ConfigError("model.normalization.mode", problem, mode)
        chosen = self.context.policies_to_train
        if chosen is not None:
            problem = "es trains all policies that are not frozen; set policies.<id>.frozen=true"
            raise ConfigError("policies_to_train", problem, chosen)

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """The population."""
        return {"rollouts": self.rollouts}

    def before_training(self, trainer: Trainer) -> None:
        """Take statistics of observations, if there are none, in environments of their own."""
        model: Any = trainer.model
        self.begin_statistics({DEFAULT_MODULE: find_normalizer(model)}, STATISTICS_STEPS, model)
        self.close_env()


def build_member(
    build_policy: Callable[[], nn.Module], deterministic: bool, frozen: Sequence[str] = ()
) -> nn.Module:
    """The policy of the members.

    Args:
        build_policy: Builds the policy that a configuration asks for.
        deterministic: Whether members take the most likely action. State-independent parameters
            that make no difference to it are frozen then.
        frozen: Ids of policies that stay as they are.
    """
    model = build_policy()
    for policy in frozen:
        modules_of(model)[policy].requires_grad_(False)
    if deterministic:
        for module in model.modules():
            if isinstance(module, Policy) and module.free_params is not None:
                module.free_params.requires_grad_(module.distribution.free_params_move_mode)
    return model
