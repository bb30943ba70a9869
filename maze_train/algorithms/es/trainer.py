"""Trainer of evolution strategies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

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
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import acting
from maze_train.nets.joint import JointModel, members_of
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import Policy
from maze_train.training.contexts import available_memory, readable_nbytes
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Run, Trainer

if TYPE_CHECKING:
    from typing import Self

MAX_LOST = 10
"""Maximum number of lost pairs per update, as a multiple of the required episodes or finished
pairs."""


STATISTICS_STEPS, STATISTICS_ENVS = 128, 8
"""Steps per environment and number of environments for the initial observation statistics.
These values are constants, so that results do not depend on `runner.concurrency`."""


class ESTrainer(Trainer):
    """Trainer for evolution strategies, which alternates population evaluations and updates.

    In each update, the pairs 0, 1, 2, ... of the iteration are used until `n_rollouts_per_update`
    episodes and `n_timesteps_per_update` steps are reached. Pairs with a lost episode are skipped.
    See `ESLearner`.

    Args:
        run: Objects of the run, with the learners and the policy.
        rollouts: Evaluates the population; `begin` must have been called with the policy.
    """

    algorithm_config: ESAlgorithmConfig

    def __init__(self, run: Run, *, rollouts: ESDistributedRollouts) -> None:
        super().__init__(run)
        self.rollouts = rollouts
        self._expected = self.algorithm_config.n_rollouts_per_update // 2
        self._trained_steps = 0
        sizes = {policy: trained_size(own) for policy, own in modules_of(self.model).items()}
        self._sizes = {policy: size for policy, size in sizes.items() if size}

    @classmethod
    def make_source(cls, run: Run) -> ESDistributedRollouts:
        """Build the workers that evaluate the population."""
        config = settings_of(run)
        needed = config.noise_table_size * NOISE_NBYTES
        free = available_memory(torch.device("cpu"))
        if free is not None and needed > free:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"the noise table requires {readable_nbytes(needed)}, but {readable_nbytes(free)} "
                "of memory are free: reduce this setting",
                config.noise_table_size,
            )
        table = SharedNoiseTable(config.noise_table_size, run.seeds.integer("noise_table"))
        run.closing.callback(table.close)
        num_slots = run.config.runner.concurrency
        if not config.n_timesteps_per_update:  # At most one environment per member.
            num_slots = min(num_slots, config.n_rollouts_per_update)
        factory, limit = run.env_factory, config.max_steps
        rollouts = ESDistributedRollouts(
            BoundedEnvFactory(factory, limit) if limit else factory,
            num_slots,
            table,
            MemberSettings(
                seed=run.seeds.integer("population"),
                deterministic=config.deterministic,
                action_noise_stddev=config.action_noise_stddev,
            ),
            run.backend,
            on_non_finite=config.on_non_finite_step,
            calls=run.env_calls.training,
        )
        run.env_calls.in_training_envs.append(rollouts.pool.make_calls)
        run.closing.callback(close_quietly, rollouts)
        return rollouts

    @classmethod
    def model_maker(cls, run: Run) -> Callable[[], nn.Module]:
        """Return a function that builds the policy, always with the same initial weights."""
        frozen = [key for key, own in run.config.policies.items() if own.frozen]
        return partial(build_member, run.model_maker(), settings_of(run).deterministic, frozen)

    @classmethod
    def make_learner(cls, run: Run) -> Learner[Any, Any, Any]:
        """Build the learner.

        Raises:
            ConfigError: If a setting does not fit the spaces or the agents.
        """
        noise = settings_of(run).action_noise_stddev
        if isinstance(run.model, JointModel):
            if find_normalizer(run.model) is not None:
                problem = "es does not normalize observations with multiple agents; expected none"
                mode = run.config.model.normalization.mode
                raise ConfigError("model.normalization.mode", problem, mode)
            chosen = run.config.policies_to_train
            if chosen is not None:
                problem = "es trains all policies that are not frozen; set "
                problem += "policies.<id>.frozen=true"
                raise ConfigError("policies_to_train", problem, chosen)
        if noise and not num_reals(acting(run.model)):
            problem = f"{run.spaces[1]} has no real-valued part; expected 0"
            raise ConfigError("algorithm.action_noise_stddev", problem, noise)
        return super().make_learner(run)

    @classmethod
    def build(cls, run: Run) -> Self:
        """Pass the policy to the population."""
        rollouts = run.source
        assert isinstance(rollouts, ESDistributedRollouts)
        rollouts.begin(run.model, cls.model_maker(run))
        return cls(run, rollouts=rollouts)

    def before_training(self) -> None:
        """Collect observation statistics in separate environments if the model has none."""
        normalizers = {DEFAULT_MODULE: find_normalizer(self.model)}
        make_env = partial(self.run.make_env, STATISTICS_ENVS)
        self.run.begin_statistics(normalizers, STATISTICS_STEPS, self.model, make_env=make_env)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Evaluate the pairs of an iteration, and update the policy."""
        started = time.perf_counter()
        noise_stddev = scheduled_value(self.algorithm_config.noise_stddev, progress)
        episodes = FinishedEpisodes()
        pairs = self._play(noise_stddev, episodes)
        played = time.perf_counter()
        episodes.record(statistics, self.run.infos)
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
            self.learners.weights_seq_no, noise_stddev, self._expected, self.run.interruption.check
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


def settings_of(run: Run) -> ESAlgorithmConfig:
    """Return the settings of evolution strategies."""
    config = run.config.algorithm
    assert isinstance(config, ESAlgorithmConfig)
    return config


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
