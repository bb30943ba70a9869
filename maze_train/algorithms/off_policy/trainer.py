"""Trainer of algorithms with a replay buffer, and its buffers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from gymnasium import Env, Space

from maze_train.algorithms.off_policy.config import BUFFERS, OffPolicyConfig
from maze_train.algorithms.off_policy.demonstrations import read_demonstrations
from maze_train.algorithms.off_policy.learner import ReplayEvents, ReplayTimeEvents
from maze_train.algorithms.off_policy.random_agents import RandomAgents
from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.collect.fixed_policies import RandomPolicy, WrappedPolicy
from maze_train.core.errors import ConfigError, SpaceError, TrainingError
from maze_train.core.events import Event, Statistics
from maze_train.core.notices import notify
from maze_train.core.targets import TARGET, build_target, locate, member_of
from maze_train.core.types import Tensor, TensorTree, tree_map
from maze_train.data.replay import BaseReplayBuffer, Transitions
from maze_train.data.replay_memory import ReplayLayout
from maze_train.data.rollout import Rollout
from maze_train.distributions.base import Distribution
from maze_train.envs.building import close_quietly
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.learner.apis import Explores
from maze_train.learner.config import Progress, Schedule, scheduled_value
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.joint import JointModel
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import ActionMasking
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.tensors import flat_space_of
from maze_train.training.contexts import available_disk, available_memory, each_of, readable_nbytes
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Run, Source, Trainer

if TYPE_CHECKING:
    from typing import Self

    from maze_train.data.turns import TurnOptions


class OffPolicy(Trainer):
    """Base class of trainers with a replay buffer.

    The gradient steps for the transitions of an update run in the next update, in parallel with the
    environment steps. Results are identical to sequential execution. See `OffPolicyLearner`.

    Args:
        run: Objects of the run, with the learners and the model, which also acts.
        collector: Collects rollouts.
        replay_buffers: Replay buffers, keyed by module id.
        initial_policy: Policy for the warm-up, which ends after `initial_buffer_size` transitions
            (with multiple agents: environment steps).
    """

    algorithm_config: OffPolicyConfig
    model: Any

    def __init__(
        self,
        run: Run,
        *,
        collector: Collector,
        replay_buffers: Mapping[str, BaseReplayBuffer],
        initial_policy: RandomPolicy | WrappedPolicy | RandomAgents,
    ) -> None:
        super().__init__(run)
        self.collector = collector
        self.replay_buffers = replay_buffers
        self.gradient_steps = 0
        self._initial_policy = initial_policy
        self._has_statistics = find_normalizer(self.model) is not None
        self._stored = self.stored
        # Number of transitions that count towards `gradient_steps_due`.
        self._learned_from = 0

    @classmethod
    def make_source(cls, run: Run) -> Source:
        """Build the environments, which store final observations if the replay buffer does."""
        num_envs = run.config.runner.concurrency
        return run.make_env(num_envs, keeps_terminal_obs=buffer_class(run).keeps_terminal_obs)

    @classmethod
    def build(cls, run: Run) -> Self:
        """Build the replay buffers, the warm-up policy and the collector."""
        parts = ReplayParts(run)
        buffers, initial_policy = parts.build_buffers(), initial_policy_of(run)
        parts.add_demonstrations(buffers)
        if run.config.checkpoint.is_on:
            size = readable_nbytes(parts.nbytes)
            notify(f"note: checkpoints include the replay buffer (up to {size})")
        keeps = buffer_class(run).keeps_terminal_obs
        collector = run.make_collector(
            settings_of(run).n_rollout_steps, run.model, turns=turn_options(run)
        )
        collector.keeps_terminal_obs |= keeps
        return cls(
            run,
            collector=collector,
            replay_buffers=buffers,
            initial_policy=initial_policy,
        )

    def before_training(self) -> None:
        """Collect initial observation statistics if required."""
        run, modules = self.run, modules_of(self.model)
        normalizers = {key: find_normalizer(modules[key]) for key in self.replay_buffers}
        if any(normalizers.values()):
            # The state of the trainer's policy is part of the run, so a separate policy is used.
            policy = initial_policy_of(run)
            run.begin_statistics(normalizers, 100, policy, turns=turn_options(run))

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps the environments; None with actors."""
        return self.collector.stepping

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Step the environments, and take the gradient steps that are due."""
        started = time.perf_counter()
        update_s = 0.0

        def learn() -> None:
            nonlocal update_s
            update_s = self._learn(progress, statistics)

        if self._fills_buffer:
            rollouts, episodes = self.collector.collect(self._initial_policy)
        else:
            rollouts, episodes = self.collector.collect(self.model, overlap=learn)
        episodes.record(statistics, self.run.infos)
        steps: int = episodes.steps
        self.check_lost(steps)
        for key in rollouts.keys() & self.replay_buffers.keys():
            self.replay_buffers[key].add_rollout(rollouts[key])
        self._stored += steps
        if not self._fills_buffer:
            self._learned_from += steps
        if self._has_statistics:  # Without statistics, learners do not need rollouts.
            self.learners.foreach_learner(lambda learner: learner.observe(rollouts))
        self.callbacks.call("on_rollout_end", seen=rollouts)
        statistics.record(ReplayEvents.size, float(self.stored))
        statistics.record(TimeEvents.collect_s, time.perf_counter() - started - update_s)
        statistics.record(TimeEvents.env_s, self.collector.env_s)
        statistics.record(TimeEvents.update_s, update_s)
        return steps

    def explore(
        self, how: Event, setting: float | Schedule, progress: Progress, statistics: Statistics
    ) -> None:
        """Set the amount of exploration of the models.

        For modules that are not trained, the exploration parameter is set to 0.

        Args:
            how: Event that records the exploration parameter.
            setting: Value or schedule.
            progress: Training progress.
            statistics: Statistics of the update.
        """
        value, learner = scheduled_value(setting, progress), self.learners.first
        for key, module in modules_of(self.model).items():
            if isinstance(module, Explores):  # Excludes policies without networks.
                module.set_exploration(value if learner.may_learn(key) else 0.0)
        statistics.record(how, value)

    @property
    def stored(self) -> int:
        """Number of transitions that can be sampled."""
        return sum(map(len, self.replay_buffers.values()))

    @property
    def _fills_buffer(self) -> bool:
        return self._stored < self.algorithm_config.initial_buffer_size

    @property
    def gradient_steps_due(self) -> int:
        """Number of gradient steps that are due."""
        due = int(self._learned_from * self.algorithm_config.update_to_data_ratio)
        return due - self.gradient_steps

    def _learn(self, progress: Progress, statistics: Statistics) -> float:
        """Take the gradient steps that are due, and return the duration in seconds."""
        started = time.perf_counter()
        sample_s = 0.0
        for buffer in self.replay_buffers.values():
            buffer.set_progress(progress.fraction)
        for _ in range(self.gradient_steps_due):
            before = time.perf_counter()
            batches = {
                key: buffer.sample_batch(self.algorithm_config.batch_size)
                for key, buffer in self.replay_buffers.items()
                if len(buffer)
            }
            sample_s += time.perf_counter() - before
            results = self.learners.update(batches, progress)
            statistics.merge(results)
            self.gradient_steps += 1
            for key, batch in batches.items():
                if batch.weights is not None and self.learners.first.may_learn(key):
                    errors = results.kept.get("td_errors", {}).get(key)
                    self._update_priorities(self.replay_buffers[key], batch, errors)
        picks = self.gradient_steps * self.algorithm_config.batch_size / self._stored
        statistics.record(ReplayEvents.samples_per_transition, picks)
        statistics.record(ReplayTimeEvents.sample_s, sample_s)
        return time.perf_counter() - started

    def _update_priorities(
        self, buffer: BaseReplayBuffer, batch: Transitions, errors: Tensor | None
    ) -> None:
        """Pass the TD errors of the last gradient step to a prioritized replay buffer."""
        if errors is None:
            raise TrainingError(
                "prioritized replay requires TD errors, but this loss does not report them: call "
                'statistics.keep("td_errors", |Q - y|), [n], in the loss, or set '
                "algorithm.replay_buffer=uniform"
            )
        # Errors of a skipped gradient step are not finite.
        finite = errors.isfinite()
        buffer.update_priorities(batch.indices[finite], errors[finite])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of trainer, collector and replay buffers; call between updates."""
        return {
            **super().state_dict(),
            "collector": self.collector.state_dict(),
            "replay_buffer": {key: own.state_dict() for key, own in self.replay_buffers.items()},
            "initial_policy": self.run.ranks.state(self._initial_policy.policy_state()),
            "transitions": (self._stored, self._learned_from, self.gradient_steps),
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the replay buffers and the environments."""
        for key, buffer in self.replay_buffers.items():
            buffer.load_state_dict(state["replay_buffer"][key])
        initial_policy = self.run.ranks.own_state(state["initial_policy"])
        self._initial_policy.load_policy_state(initial_policy)
        self._stored, self._learned_from, self.gradient_steps = state["transitions"]
        lost = torch.from_numpy(self.collector.load_state_dict(state["collector"]))
        self.exact = self.exact and self.collector.is_exact
        if lost.any():
            for buffer in self.replay_buffers.values():
                buffer.interrupt()


class OffPolicyModel(Protocol):
    """Additional attributes of an `ActingModel`, required for the warm-up."""

    masking: ActionMasking | None
    """Action masking, if any."""

    @property
    def distribution(self) -> Distribution:
        """Distribution of the actions."""
        ...


@dataclass(frozen=True)
class ModuleSource:
    """Description of the experience of a module."""

    model: OffPolicyModel
    observation_space: Space[Any]
    """Flat observation space."""
    num_envs: int
    """Number of rollout columns: environments, or agents in all environments."""
    size: int
    """Maximum number of transitions in the replay buffer."""

    @property
    def actions(self) -> TensorTree:
        """Example action of the agent, filled with zeros."""
        family = self.model.distribution
        params, noise = torch.zeros(family.param_size), torch.zeros(family.noise_size)
        return tree_map(torch.zeros_like, family.sample(params, noise))


def settings_of(run: Run) -> OffPolicyConfig:
    """Return the settings of an algorithm with a replay buffer."""
    config = run.config.algorithm
    assert isinstance(config, OffPolicyConfig)
    return config


def buffer_class(run: Run) -> type[BaseReplayBuffer]:
    """Return the class of the replay buffers; the base class if a function builds the buffers."""
    key = f"algorithm.replay_buffer.{TARGET}"
    found = locate(settings_of(run).replay_buffer_node[TARGET], key)
    kind = found if isinstance(found, type) else type(found)
    return kind if issubclass(kind, BaseReplayBuffer) else BaseReplayBuffer


def turn_options(run: Run) -> TurnOptions:
    """Return the options of turns, which continue the columns of earlier rollouts in the buffer."""
    return {"at_end": True, "keeps_terminal_obs": buffer_class(run).keeps_terminal_obs}


def initial_policy_of(run: Run) -> RandomPolicy | WrappedPolicy | RandomAgents:
    """Build the warm-up policy."""
    config, model = settings_of(run), cast(Any, run.model)
    node, repeat = config.initial_sampling_policy, config.initial_action_repeat
    several = agent_spaces(*run.spaces)
    if several is not None:
        return RandomAgents(model, several, run.learners.first.may_learn, repeat)
    if node is None:
        return RandomPolicy(model.distribution, run.spaces[1], model.masking, repeat=repeat)
    key = "algorithm.initial_sampling_policy"
    given = build_target(node, key=key)
    if not callable(member_of(given, "act")):
        raise ConfigError(key, "expected an object with a method act(observations)", node)
    return WrappedPolicy(given, model.distribution, *run.spaces)


class ReplayParts:
    """Replay buffers and demonstrations of a run, and forecasts of their size.

    Args:
        run: Objects of the run, with the model and the environments.

    Raises:
        ConfigError: If the replay buffers exceed their storage, or a setting requires a
            single-agent environment.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = settings_of(run)
        self._has_agents = agent_spaces(*run.spaces) is not None
        self._total_envs = run.env.num_envs * run.ranks.count
        if self._has_agents:
            self._check_for_agents()
        self._demonstrations = self._read_demonstrations()
        self._sources = self._sources_of(run.model)
        self._check_buffers_fit()

    def build_buffers(self) -> dict[str, BaseReplayBuffer]:
        """Build the replay buffers by module id.

        Raises:
            ConfigError: If a configured class has the wrong type.
        """
        buffers = {
            key: self._build_buffer(source, f"replay/{key}" if self._has_agents else "replay")
            for key, source in self._sources.items()
        }
        for buffer in buffers.values():
            buffer.use_environment(self._single_env)
        return buffers

    def _check_for_agents(self) -> None:
        """Raise if a setting that requires a single-agent environment is set."""
        config = self._config
        for key, value in (
            ("initial_demonstration_trajectories", config.initial_demonstration_trajectories),
            ("initial_sampling_policy", config.initial_sampling_policy),
        ):
            if value is not None:
                problem = "not supported for multi-agent environments; expected null"
                raise ConfigError(f"algorithm.{key}", problem, value)

    def _sources_of(self, model: Any) -> dict[str, ModuleSource]:
        """Return the source of experience of each module with a replay buffer."""
        space: Any = self._run.env.single_observation_space
        num_envs = self._total_envs
        if not isinstance(model, JointModel):
            size = self._reached_size()
            return {DEFAULT_MODULE: ModuleSource(model, space, num_envs, size)}
        models: dict[str, Any] = model.by_policy
        return {
            policy: ModuleSource(
                models[policy],
                flat_space_of(space, agents[0]),
                num_envs * len(agents),
                self._reached_size(len(agents)),
            )
            for policy, agents in model.members.items()
            if agents
            and member_of(models[policy], "update_targets")  # Other models are never trained.
        }

    def _read_demonstrations(self) -> Rollout | None:
        """Return the demonstrations for the replay buffer of a new run."""
        run, source = self._run, self._config.initial_demonstration_trajectories
        if source is None or run.has_checkpoint:
            return None
        distribution = cast(OffPolicyModel, run.model).distribution
        return read_demonstrations(source, run.env, self._total_envs, distribution)

    def add_demonstrations(self, buffers: Mapping[str, BaseReplayBuffer]) -> None:
        """Add the demonstrations, if any, to the replay buffer and the observation statistics."""
        rollout = self._demonstrations
        if rollout is None:
            return
        buffer = buffers[DEFAULT_MODULE]
        buffer.add_rollout(rollout)
        buffer.interrupt()
        if len(buffer) < rollout.num_samples:
            raise ConfigError(
                "algorithm.replay_buffer_size",
                f"too small for the demonstrations: {len(buffer)} of their {rollout.num_samples} "
                "transitions fit; increase this setting",
                self._config.replay_buffer_size,
            )
        normalizer = find_normalizer(self._run.model)
        if normalizer and not normalizer.count:  # The statistics of a base run are kept.
            normalizer.update(rollout.to(self._run.device).acted_on(normalizer.keys))

    def _reached_size(self, num_agents: int = 1) -> int:
        """Return the maximum number of transitions in a buffer for `num_agents` agents."""
        size, total_steps = self._config.replay_buffer_size, self._run.config.total_steps
        if not total_steps:
            return size
        is_unknown = self._config.initial_demonstration_trajectories and self._run.has_checkpoint
        if is_unknown:  # The number of demonstrations of a resumed run is unknown.
            return size
        update = self._total_envs * self._config.n_rollout_steps
        reached = -(-total_steps // update) * update
        if self._demonstrations is not None:  # Rows before collection starts.
            reached += self._demonstrations.rewards.numel() + self._total_envs
        return min(size, reached * num_agents)

    @property
    def nbytes(self) -> int:
        """Maximum size of the replay buffers in bytes."""
        entry_nbytes, nbytes = buffer_class(self._run).entry_nbytes, 0
        for source in self._sources.values():
            layout = ReplayLayout(
                source.size,
                source.observation_space,
                source.actions,
                num_envs=source.num_envs,
                frame_stack=self._run.env.frame_stack,
            )
            nbytes += layout.nbytes + layout.ring.size * entry_nbytes
        return nbytes

    def _check_buffers_fit(self) -> None:
        """Raise if the replay buffers would exceed the available memory or disk space."""
        storage = self._config.replay_buffer_storage
        device = self._run.device if storage == "device" else torch.device("cpu")
        count = self._run.ranks.local_count
        free = (
            available_disk(self._buffer_dir, count)
            if storage == "disk"
            else available_memory(device, count)
        )
        if free is not None and self.nbytes > free:
            problem = f"{readable_nbytes(free)} are free ({storage}){each_of(count)}"
            raise self._too_large(problem)

    def _too_large(self, problem: str) -> ConfigError:
        """Return the error for a replay buffer that exceeds its storage."""
        needed = readable_nbytes(self.nbytes)
        size = sum(source.size for source in self._sources.values())
        remedy = "set algorithm.replay_buffer_storage=disk"
        if self._config.replay_buffer_storage == "disk":
            remedy = "set run_dir to a directory on a larger disk"
        return ConfigError(
            "algorithm.replay_buffer_size",
            f"the replay buffer requires {needed} for {size:,} transitions, but "
            f"{problem}: reduce this setting, or {remedy}",
            self._config.replay_buffer_size,
        )

    def _single_env(self) -> Env[Any, Any]:
        """Return an environment in this process for a buffer."""
        if self._run.config.env.backend != "gymnasium":
            key = "algorithm.replay_buffer"
            problem = "requires a gymnasium environment: set env.backend=gymnasium"
            raise ConfigError(key, problem, self._config.replay_buffer)
        env = PooledVectorEnv([self._run.env_factory])
        self._run.closing.callback(close_quietly, env)
        calls = self._run.env_calls
        calls.in_helpers.append(partial(env.make_calls, calls.training))
        return env.envs[0]

    @property
    def _buffer_dir(self) -> Path:
        """Directory for files of a replay buffer: the run directory, or an existing parent."""
        run_dir = self._run.run_dir
        return next(place for place in (run_dir, *run_dir.parents) if place.is_dir())

    def _build_buffer(self, source: ModuleSource, stream: str) -> BaseReplayBuffer:
        config = self._config
        try:
            buffer: BaseReplayBuffer = build_target(
                config.replay_buffer_node,
                config.replay_buffer_size,
                source.observation_space,
                source.actions,
                key="algorithm.replay_buffer",
                kind=BaseReplayBuffer,
                num_envs=source.num_envs,
                seed=self._run.seeds.integer(stream),
                n_steps=config.n_step_returns,
                gamma=config.gamma,
                frame_stack=self._run.env.frame_stack,
                storage=config.replay_buffer_storage,
                directory=self._buffer_dir,
                device=self._run.device,
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
            raise self._too_large(f"the allocation failed: {error}") from error
        except OSError as error:
            problem = f"cannot create the replay buffer: {error}"
            storage = config.replay_buffer_storage
            raise ConfigError("algorithm.replay_buffer_storage", problem, storage) from error
        return buffer
