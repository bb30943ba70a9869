"""Trainer and builder of evolution strategies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import gymnasium
import torch
from torch import nn

from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.es.learner import ESEvents, EvaluatedPopulation, PopulationEvents
from maze_train.algorithms.es.population import (
    NOISE_NBYTES,
    ESDistributedRollouts,
    ESRolloutResult,
    MemberSettings,
    SharedNoiseTable,
    trained_size,
)
from maze_train.collect.episodes import FinishedEpisodes, add_lists
from maze_train.collect.row_agents import num_reals
from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.events import Statistics
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.learner.config import Progress, scheduled_value
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import acting
from maze_train.nets.joint import JointModel, members_of
from maze_train.nets.policy_model import Policy
from maze_train.nets.population import find_normalizer
from maze_train.training.build_context import BuildContext, close_quietly
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Trainer

MOST_LOST = 10
"""Pairs that may be lost in an update, for each episode that it needs or pair that it has."""


class ESTrainer(Trainer):
    """Lets perturbed copies of the policy play, and learns from their returns, in turns.

    An update learns from the pairs 0, 1, 2, ... of its iteration, until there are
    `n_rollouts_per_update` episodes and `n_timesteps_per_update` steps. Pairs of which an episode
    was lost are passed over. See `ESLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The policy that the learner updates.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        rollouts: Where the population plays; has begun with `model`.
    """

    algorithm_config: ESAlgorithmConfig

    def __init__(self, *args: Any, rollouts: ESDistributedRollouts) -> None:
        super().__init__(*args)
        self.rollouts = rollouts
        self._expected = self.algorithm_config.n_rollouts_per_update // 2
        self._trained_steps = 0
        sizes = {policy: trained_size(own) for policy, own in modules_of(self.model).items()}
        self._sizes = {policy: size for policy, size in sizes.items() if size}

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Play the pairs of an iteration, and learn from them."""
        started = time.perf_counter()
        noise_stddev = scheduled_value(self.algorithm_config.noise_stddev, progress)
        episodes = FinishedEpisodes()
        pairs = self._play(noise_stddev, episodes)
        played = time.perf_counter()
        episodes.record(statistics)
        statistics.merge(self.learners.update(self._populations(pairs), progress))
        num_steps = sum(pair.num_steps for pair in pairs)
        self._trained_steps += num_steps
        dropped = self.rollouts.steps_made - self._trained_steps
        statistics.record(ESEvents.noise_stddev, noise_stddev)
        statistics.record(PopulationEvents.steps_dropped, float(dropped))
        statistics.record(TimeEvents.collect_s, played - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - played)
        return num_steps

    def _populations(self, pairs: list[ESRolloutResult]) -> dict[str, EvaluatedPopulation]:
        """The evaluated population that each policy learns from."""
        table, members = self.rollouts.noise_table, members_of(self.model)
        found, offset = {}, 0
        for policy, size in self._sizes.items():
            found[policy] = EvaluatedPopulation(pairs, table, members.get(policy, ()), offset)
            offset += size
        return found

    def _play(self, noise_stddev: float, episodes: FinishedEpisodes) -> list[ESRolloutResult]:
        """The pairs that the next update learns from."""
        config = self.algorithm_config
        restarts = self.rollouts.worker_restarts
        pairs: list[ESRolloutResult] = []
        num_steps = lost = 0
        results = self.rollouts.generate_rollouts(
            self.learners.weights_seq_no, noise_stddev, self._expected, self.interruption.check
        )
        with closing(results):
            for pair in results:
                if pair.lost:
                    lost += 1
                    episodes.lost += sum(member.lost for member in pair.members)
                    self._check_lost(lost, len(pairs))
                    continue
                pairs.append(pair)
                num_steps += pair.num_steps
                for member in pair.members:
                    episodes.returns.append(member.episode_return)
                    episodes.lengths.append(member.length)
                    if member.success == member.success:
                        episodes.successes.append(member.success)
                    returns = {agent: [own] for agent, own in member.agent_returns.items()}
                    add_lists(episodes.agent_returns, returns)
                enough = 2 * len(pairs) >= config.n_rollouts_per_update
                if enough and num_steps >= config.n_timesteps_per_update:
                    break
        self._expected = pair.pair + 1
        episodes.worker_restarts = self.rollouts.worker_restarts - restarts
        return pairs

    def _check_lost(self, lost: int, found: int) -> None:
        """Refuse to continue when nothing but lost episodes comes."""
        needed = self.algorithm_config.n_rollouts_per_update
        if lost > MOST_LOST * max(needed, found):
            raise TrainingError(
                f"an update of {needed} episodes lost {lost} pairs of "
                "them: the environments return numbers that are not finite, again and again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers, and the counters."""
        return {
            **super().state_dict(),
            "noise_table": self.rollouts.noise_table.state_dict(),
            "steps_dropped": self.rollouts.steps_made - self._trained_steps,
            "expected": self._expected,
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Continue to count, with the same noise."""
        self.rollouts.noise_table.load_state_dict(state["noise_table"])
        self._expected = state["expected"]
        self._trained_steps = self.rollouts.steps_made - state["steps_dropped"]


STATISTICS_STEPS, STATISTICS_ENVS = 128, 8
"""Steps of each environment per rollout of the untrained policy, and how many environments: not
`runner.concurrency`, on which no number depends."""


class ESBuilder(AlgorithmBuilder[ESAlgorithmConfig]):
    """Builds a population of perturbed policies, and the learner of their returns.

    Args:
        context: Everything that the algorithm is built from.

    Raises:
        ConfigError: If the environments are not those of gymnasium.
    """

    def __init__(self, context: BuildContext[ESAlgorithmConfig]) -> None:
        super().__init__(context)
        if not context.env.has_single_form:
            raise ConfigError(
                "env.backend",
                "evolution strategies give every episode its own seed, which only single "
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
        """Number of members that play at the same time, at most as many as an update uses."""
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
        if isinstance(model, JointModel):
            self._check_agents(model)
        if self.algorithm.action_noise_stddev and not num_reals(acting(model)):
            raise ConfigError(
                "algorithm.action_noise_stddev",
                f"no part of {self.spaces[1]} is a real number; expected 0",
                self.algorithm.action_noise_stddev,
            )
        super().prepare(model)
        self.rollouts.begin(model, self.model_maker())

    def _check_agents(self, model: nn.Module) -> None:
        """Refuse settings that are for one agent only."""
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
        """Gather statistics of observations in separate environments unless the model has them."""
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
        frozen: Ids of policies that are not trained.
    """
    model = build_policy()
    for policy in frozen:
        modules_of(model)[policy].requires_grad_(False)
    if deterministic:
        for module in model.modules():
            if isinstance(module, Policy) and module.free_params is not None:
                module.free_params.requires_grad_(module.distribution.free_params_move_mode)
    return model
