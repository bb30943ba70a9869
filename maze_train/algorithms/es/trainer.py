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
from maze_train.collect.row_policies import num_reals
from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.events import Statistics
from maze_train.envs.building import close_quietly
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.learner.config import Progress, scheduled_value
from maze_train.learner.learners import Learners
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import acting
from maze_train.nets.joint import JointModel, members_of
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import Policy
from maze_train.training.builder import AlgorithmBuilder, BuildContext
from maze_train.training.config import AlgorithmConfig
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer

MAX_LOST = 10
"""Maximum number of lost pairs per update, as a multiple of the required episodes or finished
pairs."""


class ESTrainer(Trainer):
    """Trainer for evolution strategies, which alternates population evaluations and updates.

    In each update, the pairs 0, 1, 2, ... of the iteration are used until `n_rollouts_per_update`
    episodes and `n_timesteps_per_update` steps are reached. Pairs with a lost episode are skipped.
    See `ESLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The policy being trained.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        rollouts: Evaluates the population; `begin` must have been called with `model`.
    """

    algorithm_config: ESAlgorithmConfig

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: Learners,
        model: nn.Module,
        services: TrainerServices,
        *,
        rollouts: ESDistributedRollouts,
    ) -> None:
        super().__init__(config, learners, model, services)
        self.rollouts = rollouts
        self._expected = self.algorithm_config.n_rollouts_per_update // 2
        self._trained_steps = 0
        sizes = {policy: trained_size(own) for policy, own in modules_of(self.model).items()}
        self._sizes = {policy: size for policy, size in sizes.items() if size}

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Evaluate the pairs of an iteration, and update the policy."""
        started = time.perf_counter()
        noise_stddev = scheduled_value(self.algorithm_config.noise_stddev, progress)
        episodes = FinishedEpisodes()
        pairs = self._play(noise_stddev, episodes)
        played = time.perf_counter()
        episodes.record(statistics, self.infos)
        self.callbacks.call("on_rollout_end")
        statistics.merge(self.learners.update(self._populations(pairs), progress))
        num_steps = sum(pair.num_steps for pair in pairs)
        self._trained_steps += num_steps
        dropped = self.rollouts.pool.steps_made - self._trained_steps
        statistics.record(ESEvents.noise_stddev, noise_stddev)
        statistics.record(PopulationEvents.steps_dropped, float(dropped))
        statistics.record(TimeEvents.collect_s, played - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - played)
        return num_steps

    def _populations(self, pairs: list[ESRolloutResult]) -> dict[str, EvaluatedPopulation]:
        """Return the evaluated population for each policy."""
        table, members = self.rollouts.noise_table, members_of(self.model)
        found, offset = {}, 0
        for policy, size in self._sizes.items():
            found[policy] = EvaluatedPopulation(pairs, table, members.get(policy, ()), offset)
            offset += size
        return found

    def _play(self, noise_stddev: float, episodes: FinishedEpisodes) -> list[ESRolloutResult]:
        """Evaluate the pairs for the next update."""
        config = self.algorithm_config
        restarts = self.rollouts.pool.worker_restarts
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
                    episodes.successes.append(member.success)
                    returns = {agent: [own] for agent, own in member.agent_returns.items()}
                    add_lists(episodes.agent_returns, returns)
                enough = 2 * len(pairs) >= config.n_rollouts_per_update
                if enough and num_steps >= config.n_timesteps_per_update:
                    break
        self._expected = pair.pair + 1
        episodes.worker_restarts = self.rollouts.pool.worker_restarts - restarts
        return pairs

    def _check_lost(self, lost: int, found: int) -> None:
        """Raise if far too many episodes are lost."""
        needed = self.algorithm_config.n_rollouts_per_update
        if lost > MAX_LOST * max(needed, found):
            raise TrainingError(
                f"an update of {needed} episodes lost {lost} pairs of "
                "episodes because of non-finite observations or rewards: fix the environment"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer, the noise table and the counters."""
        return {
            **super().state_dict(),
            "noise_table": self.rollouts.noise_table.state_dict(),
            "steps_dropped": self.rollouts.pool.steps_made - self._trained_steps,
            "expected": self._expected,
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the counters, and check the noise table."""
        self.rollouts.noise_table.load_state_dict(state["noise_table"])
        self._expected = state["expected"]
        self._trained_steps = self.rollouts.pool.steps_made - state["steps_dropped"]


STATISTICS_STEPS, STATISTICS_ENVS = 128, 8
"""Steps per environment and number of environments for the initial observation statistics.
These values are constants, so that results do not depend on `runner.concurrency`."""


class ESBuilder(AlgorithmBuilder[ESAlgorithmConfig]):
    """Builder of the population and the learner of evolution strategies.

    Args:
        context: Configuration, seeds, device and factories of the run.

    Raises:
        ConfigError: If the environment backend is not gymnasium.
    """

    def __init__(self, context: BuildContext[ESAlgorithmConfig]) -> None:
        super().__init__(context)
        if not context.config.env.has_single_form:
            raise ConfigError(
                "env.backend",
                "evolution strategies seed each episode separately, which requires single "
                "environments; expected gymnasium",
                context.config.env.backend,
            )

    @cached_property
    def rollouts(self) -> ESDistributedRollouts:
        """Workers that evaluate the population, closed at the end of the run."""
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
            context.backend,
            on_non_finite=config.on_non_finite_step,
            calls=context.env_calls.training,
        )
        context.env_calls.in_training_envs.append(rollouts.pool.make_calls)
        context.closing.callback(close_quietly, rollouts)
        return rollouts

    def _check_table_fits(self) -> None:
        """Raise if the noise table exceeds the available memory."""
        needed = self.algorithm.noise_table_size * NOISE_NBYTES
        free = available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"the noise table requires {readable_nbytes(needed)}, but {readable_nbytes(free)} "
                "of memory are free: reduce this setting",
                self.algorithm.noise_table_size,
            )

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.rollouts.pool.spaces

    @property
    def num_envs(self) -> int:
        """Number of environments for the initial observation statistics."""
        return STATISTICS_ENVS

    @property
    def num_slots(self) -> int:
        """Number of concurrent members; at most the population size."""
        count = self.config.runner.concurrency
        if self.algorithm.n_timesteps_per_update:
            return count
        return min(count, self.algorithm.n_rollouts_per_update)

    def member_env_factory(self) -> Callable[[], gymnasium.Env[Any, Any]]:
        """Return a factory of environments for members."""
        limit, factory = self.algorithm.max_steps, self.context.env_factory
        return BoundedEnvFactory(factory, limit) if limit else factory

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a factory of the policy, always with the same initial weights."""
        frozen = [key for key, own in self.config.policies.items() if own.frozen]
        return partial(build_member, super().model_maker(), self.algorithm.deterministic, frozen)

    def prepare(self, model: nn.Module) -> None:
        """Build the learner, and pass the policy to the population."""
        if isinstance(model, JointModel):
            self._check_agents(model)
        if self.algorithm.action_noise_stddev and not num_reals(acting(model)):
            raise ConfigError(
                "algorithm.action_noise_stddev",
                f"{self.spaces[1]} has no real-valued part; expected 0",
                self.algorithm.action_noise_stddev,
            )
        super().prepare(model)
        self.rollouts.begin(model, self.model_maker())

    def _check_agents(self, model: nn.Module) -> None:
        """Raise if a setting is set that requires a single-agent environment."""
        if find_normalizer(model) is not None:
            problem = "es does not normalize observations with multiple agents; expected none"
            mode = self.config.model.normalization.mode
            raise ConfigError("model.normalization.mode", problem, mode)
        chosen = self.config.policies_to_train
        if chosen is not None:
            problem = "es trains all policies that are not frozen; set policies.<id>.frozen=true"
            raise ConfigError("policies_to_train", problem, chosen)

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the population."""
        return {"rollouts": self.rollouts}

    def before_training(self, trainer: Trainer) -> None:
        """Collect observation statistics in separate environments if the model has none."""
        model = trainer.model
        self.begin_statistics({DEFAULT_MODULE: find_normalizer(model)}, STATISTICS_STEPS, model)
        self.close_env()


def build_member(
    build_policy: Callable[[], nn.Module], deterministic: bool, frozen: Sequence[str] = ()
) -> nn.Module:
    """Build the policy of the members.

    Args:
        build_policy: Builds the configured policy.
        deterministic: Whether members take the most likely action. If True, state-independent
            parameters that do not affect the mode are frozen.
        frozen: Ids of frozen policies.
    """
    model = build_policy()
    for policy in frozen:
        modules_of(model)[policy].requires_grad_(False)
    if deterministic:
        for module in model.modules():
            if isinstance(module, Policy) and module.free_params is not None:
                module.free_params.requires_grad_(module.distribution.free_params_move_mode)
    return model
