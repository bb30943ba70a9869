"""Builders of model, learner, evaluators and trainer of an algorithm, and their context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.collect.episodes import ReportedInfos
from maze_train.core.errors import ConfigError, EnvError, TrainingError
from maze_train.core.seeding import Seeds
from maze_train.core.targets import locate
from maze_train.envs.building import close_quietly
from maze_train.envs.calls import EnvCalls
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory, env_name
from maze_train.envs.faults import separate_processes
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners
from maze_train.learner.parallel import SingleProcess
from maze_train.nets.config import ModelConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.spaces.agents import agent_spaces
from maze_train.tracking.config import TrackingConfig
from maze_train.training.checkpoints import Checkpoint
from maze_train.training.config import (
    DRY_RUN_STEPS,
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    PolicyConfig,
)
from maze_train.training.contexts import check_fits
from maze_train.training.environments import build_vector_env
from maze_train.training.evaluators import Evaluator, RolloutEvaluator
from maze_train.training.features import AgentParts, BuildFeatures
from maze_train.training.models import learner_with_frozen, make_model, modules_of
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer
from maze_train.workers.backends import ThisProcess, WorkerBackend

if TYPE_CHECKING:
    from maze_train.data.turns import TurnOptions

MAX_IDLE = 100
"""Maximum number of consecutive rollouts in which a policy without statistics never acts."""


class RunnerSettings(Protocol):
    """Settings of a runner that an algorithm reads; see `RunnerConfig`."""

    concurrency: int
    envs_per_actor: int
    dataset: str | dict[str, Any] | None
    fast_dev_run: bool


class RunSettings(Protocol):
    """Settings of a run that an algorithm reads; see `TrainConfig`."""

    env: EnvConfig
    model: ModelConfig
    policies: dict[str, PolicyConfig]
    policies_to_train: list[str] | None
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    learner_group: LearnerGroupConfig
    tracking: TrackingConfig
    total_steps: int | None

    @property
    def runner(self) -> RunnerSettings:
        """Settings of the runner."""
        ...


Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[Config]):
    """Settings and services of a run for the builder of an algorithm.

    Attributes:
        config: Settings of the run.
        algorithm: Settings of the algorithm.
        env_factory: Factory of single environments, with the device of this process.
        backend: Backend of the workers: this process, other processes, or Ray.
        seeds: Seeds of named random streams.
        device: Device of the learner and its models.
        run_dir: Directory of the run, which might not exist yet.
        features: Optional parts selected by the settings.
        has_checkpoint: Whether the run resumes from a checkpoint.
        read_checkpoint: Reads the checkpoint to resume from; returns None without a checkpoint.
        env_calls: Environment method calls requested by callbacks.
        processes: Processes of the run.
        closing: Closes the objects registered here at the end of the run.
        infos: Treats missing values of final infos.
        notify: Prints a line for the user.
    """

    config: RunSettings
    algorithm: Config
    env_factory: EnvFactory
    backend: WorkerBackend
    seeds: Seeds
    device: torch.device
    run_dir: Path
    features: BuildFeatures
    has_checkpoint: bool = False
    read_checkpoint: Callable[[], Checkpoint | None] = lambda: None
    env_calls: EnvCalls = field(default_factory=EnvCalls)
    processes: SingleProcess = field(default_factory=SingleProcess)
    closing: ExitStack = field(default_factory=ExitStack)
    infos: ReportedInfos = field(default_factory=ReportedInfos)
    notify: Callable[[str], None] = print

    def make_env(
        self, num_envs: int, *, training: bool = True, keeps_terminal_obs: bool = False
    ) -> MazeVectorEnv:
        """Build vector environments that are closed at the end of the run.

        Args:
            num_envs: Number of environments; for training, over all processes of the run.
            training: Whether the environments are used for training; otherwise for evaluation,
                without wrappers that change rewards or episode ends.
            keeps_terminal_obs: Whether final observations of terminated episodes are stored.
        """
        first_env = total_envs = 0
        if training and self.processes.count > 1:
            total_envs, num_envs = num_envs, num_envs // self.processes.count
            first_env = num_envs * self.processes.rank
        make = self.env_maker(self.backend, training=training)
        try:
            env = make(num_envs, first_env, total_envs, keeps_terminal_obs=keeps_terminal_obs)
        except EnvError as error:
            if training or self.backend.num_workers(2) > 1:
                raise
            remedy = separate_processes(self.config.runner.concurrency)
            raise EnvError(
                f"{error}; this process already has training environments: if the simulator "
                f"supports only one instance per process, {remedy}"
            ) from error
        env.notify = self.notify
        simulator = env.simulator
        is_saved = training and self.config.checkpoint.is_on
        if is_saved and simulator and not simulator.can_be_restored:
            self.notify(
                f"{simulator.name} has no state_dict and load_state_dict, so a resumed run "
                "begins new episodes; resuming requires checkpoint.allow_new_episodes=true"
            )
        self.closing.callback(close_quietly, env)
        return env

    def evaluation_envs(self) -> Callable[[int], MazeVectorEnv]:
        """Return a function that builds a number of evaluation environments.

        With `evaluation.asynchronous`, the function is called in the process of the evaluations.
        """
        if self.config.evaluation.asynchronous:
            return self.env_maker(ThisProcess(), training=False)
        return partial(self.make_env, training=False)

    def env_maker(
        self, backend: WorkerBackend, *, training: bool = True
    ) -> Callable[..., MazeVectorEnv]:
        """Return `build_vector_env` with the arguments that are the same for the whole run.

        The numbers of environments remain to be passed.

        Args:
            backend: Backend of the workers of the environments.
            training: See `make_env`.
        """
        return partial(
            build_vector_env,
            self.env_factory if training else self.env_factory.for_evaluation(),
            backend,
            self.algorithm.on_non_finite_step,
            make_other=self.features.make_vector_env,
            max_episode_steps=self.config.evaluation.max_episode_steps,
            can_be_restored=training and self.config.checkpoint.is_on,
            device=self.device,
            info_keys=self.config.tracking.info_keys,
        )


class AlgorithmBuilder(ABC, Generic[Config]):
    """Builds the model, the learner and the trainer of an algorithm.

    The runner calls `build_model`, `prepare`, `build_evaluators`, `build_trainer` and
    `before_training`, in this order; `build` calls all of these except `before_training`.
    `AlgorithmConfig.builder_class` names the builder of an algorithm.

    Args:
        context: Settings and services of the run.

    Attributes:
        algorithm: Settings of the algorithm.
        learners: The learners, created by `prepare`.
    """

    learners: Learners

    def __init__(self, context: BuildContext[Config]) -> None:
        self.context = context
        self.algorithm = context.algorithm
        self._env: MazeVectorEnv | None = None

    @property
    def config(self) -> RunSettings:
        """Settings of the run."""
        return self.context.config

    @abstractmethod
    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Return additional arguments of the trainer by name.

        Args:
            model: Result of `build_model`, after `prepare`.
        """

    def prepare(self, model: nn.Module) -> None:
        """Build learner, replay buffer and actors.

        Called before the run directory is created, so that a failure leaves no directory.

        Raises:
            ConfigError: If a configured component has the wrong type or is incompatible with the
                run.
        """
        context = self.context
        learner = self.build_learner(model)
        make_group, settings = context.features.make_group, context.config.learner_group
        self.learners = (
            Learners(learner, settings)
            if make_group is None
            else make_group(learner, settings, context.backend)
        )
        context.closing.callback(self.learners.shutdown)

    def learner_maker(self) -> Callable[..., Learner[Any, Any, Any]]:
        """Return a function that builds the learner from modules and further arguments.

        Raises:
            ConfigError: If snapshots are configured but the algorithm does not support them.
        """
        algorithm, policies = self.algorithm, self.config.policies
        chosen = self.config.policies_to_train
        for policy, own in policies.items():
            if own.opponents is not None and not algorithm.has_snapshots:
                problem = (
                    f"{algorithm.name} does not support self-play against snapshots; use none, or "
                    "an algorithm with has_snapshots"
                )
                raise ConfigError(f"policies.{policy}.opponents", problem, own.opponents.draw)
        make_learner: Callable[..., Learner[Any, Any, Any]] = locate(
            algorithm.learner_class, "algorithm.learner_class"
        )
        if policies or chosen is not None:
            make_learner = partial(learner_with_frozen, make_learner, policies, chosen)
        return make_learner

    def build_learner(self, model: nn.Module) -> Learner[Any, Any, Any]:
        """Build the learner that updates the weights of the model."""
        device, seed = self.context.device, self.context.seeds.integer("minibatches")
        make_learner = self.learner_maker()
        return make_learner(modules_of(model), self.algorithm, device=device, seed=seed)

    def before_training(self, trainer: Trainer) -> None:
        """Prepare environments and statistics before the first update."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.env.env_observation_space, self.env.single_action_space

    @cached_property
    def agents(self) -> AgentParts | None:
        """Parts for multi-agent training; None for a single agent."""
        if agent_spaces(*self.spaces) is None:
            return None
        return self.context.features.agents()

    @property
    def keeps_terminal_obs(self) -> bool:
        """Whether final observations of terminated episodes are stored (and must be finite)."""
        return False

    @property
    def num_envs(self) -> int:
        """Number of environments in `env`."""
        return self.config.runner.concurrency

    @property
    def total_envs(self) -> int:
        """Number of environments in all processes: the batch dimension of a rollout."""
        return self.env.num_envs * self.context.processes.count

    @property
    def task_name(self) -> str:
        """Name of the task, used in run names."""
        return env_name(self.config.env)

    @property
    def step_label(self) -> str:
        """Name of the unit in which steps are counted, for messages."""
        return "environment steps"

    @property
    def selection_metric(self) -> str:
        """Metric that selects the best policy; for some algorithms, call `prepare` first."""
        return self.config.evaluation.selection_metric

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a function that builds the model with the same initial weights on each call."""
        context = self.context
        return partial(
            make_model if self.agents is None else self.agents.make_model,
            self.algorithm,
            context.config.model,
            context.config.policies,
            *self.spaces,
            context.seeds.integer("model"),
        )

    def build_model(self) -> nn.Module:
        """Build the model for the spaces of the environment; has no side effects."""
        return self.model_maker()()

    def build_trainer(self, model: nn.Module, services: TrainerServices) -> Trainer:
        """Build the trainer with its source of experience.

        Args:
            model: Result of `build_model`, after `prepare`.
            services: Tracker, evaluator, model selection, limits, checkpoints.
        """
        trainer: Trainer = locate(self.algorithm.trainer_class, "algorithm.trainer_class")(
            self.algorithm, self.learners, model, services, **self.trainer_parts(model)
        )
        return trainer

    def build(self, services: TrainerServices) -> Trainer:
        """Build model, learner and trainer."""
        model = self.build_model()
        self.prepare(model)
        return self.build_trainer(model, services)

    def build_evaluators(self) -> list[Evaluator]:
        """Build the evaluators of the policy, except user-defined evaluators."""
        n_episodes = self.config.evaluation.n_episodes
        if not n_episodes:
            return []
        evaluator = self._build_evaluator(n_episodes, "evaluation", self.context.evaluation_envs())
        if self.context.processes.is_first:  # Only the first process evaluates.
            self.context.env_calls.in_evaluation_envs.append(evaluator.make_calls)
        return [evaluator]

    def build_final_evaluator(self) -> Evaluator | None:
        """Build the evaluator of the final test; None if `evaluation.final_episodes` is 0.

        Raises:
            ConfigError: If the run has no environment.
        """
        n_episodes = self.config.evaluation.final_episodes
        make_env = partial(self.context.make_env, training=False)
        return self._build_evaluator(n_episodes, "final test", make_env) if n_episodes else None

    def _build_evaluator(
        self, n_episodes: int, stream: str, make_env: Callable[[int], MazeVectorEnv]
    ) -> RolloutEvaluator:
        """Build an evaluator that plays `n_episodes` episodes seeded from a named stream."""
        config = self.config.evaluation
        return RolloutEvaluator(
            make_env,
            n_episodes,
            concurrency=config.concurrency,
            seed=self.context.seeds.integer(stream),
            deterministic=config.deterministic,
            info_keys=self.config.tracking.info_keys,
            is_guarded=config.max_episode_steps is None,
            calls=self.context.env_calls.evaluation,
            infos=self.context.infos,
        )

    @property
    def records_log_probs(self) -> bool:
        """Whether rollouts of multi-agent training contain log-probabilities."""
        return False

    @property
    def turn_options(self) -> TurnOptions:
        """Arguments of `TurnSplitter` for multi-agent training."""
        return {}

    def make_collector(
        self, num_steps: int, acting: nn.Module, *, training: bool = True
    ) -> Collector:
        """Build a collector for the environments of this process, or for actors.

        Args:
            num_steps: Steps per environment and rollout; fewer in a dry run.
            acting: Acting model of one or all agents.
            training: Whether to collect for training; otherwise for initial statistics, with other
                random streams and without calls of callbacks in the environments.

        Raises:
            ConfigError: If a rollout does not fit into memory.
        """
        context, config = self.context, self.config
        stream = "" if training else "normalization/"
        # Third-party vector environments take one seed for all environments.
        is_shared = config.env.backend == "gymnasium" or context.processes.is_first
        stream = stream if is_shared else context.processes.stream(stream)
        steps = min(num_steps, DRY_RUN_STEPS) if config.runner.fast_dev_run else num_steps
        settings: dict[str, Any] = {
            "env_seed": context.seeds.integer(f"{stream}episodes"),
            "action_seed": context.seeds.integer(f"{stream}actions"),
            "allow_new_episodes": config.checkpoint.allow_new_episodes,
            "info_keys": config.tracking.info_keys,
        }
        collector: Collector
        if context.features.actors is not None:
            collector = context.features.actors.make_collector(self, acting, steps, settings)
        else:
            check_fits(self.env, steps, context.processes)
            find_class = context.features.collector_class
            collector_class = RolloutCollector if find_class is None else find_class(self.env)
            settings["calls"] = context.env_calls.training
            collector = collector_class(self.env, steps, device=context.device, **settings)
            if context.features.gather is not None:
                collector = context.features.gather(collector)
        if training:
            context.env_calls.in_training_envs.append(collector.make_calls)
        if self.agents is not None:
            splitter = self.agents.turns_of(acting, **self.turn_options)
            collector.split_turns(splitter, records_log_probs=self.records_log_probs)
        return collector

    @property
    def env(self) -> MazeVectorEnv:
        """The environments or actors that collect experience; built on first use."""
        if self._env is None:
            actors = self.context.features.actors
            self._env = (
                self.context.make_env(self.num_envs, keeps_terminal_obs=self.keeps_terminal_obs)
                if actors is None
                else actors.make(self)
            )
        return self._env

    @property
    def has_actors(self) -> bool:
        """Whether actors collect the experience, each with a policy copy and environments."""
        return self.context.features.actors is not None

    def close_env(self) -> None:
        """Close `env`; the next access builds new environments."""
        env, self._env = self._env, None
        if env is not None:
            close_quietly(env)

    def begin_statistics(
        self,
        normalizers: Mapping[str, ObservationNormalizer | None],
        num_steps: int,
        acting: nn.Module,
    ) -> None:
        """Collect observation statistics before training if a normaliser has too few.

        Training then starts with new episodes.

        Args:
            normalizers: Normaliser of each module; None for a module without one.
            num_steps: Steps per environment and rollout.
            acting: Acting model.

        Raises:
            TrainingError: If all steps of a rollout were dropped, or a policy without statistics
                did not act in `MAX_IDLE` rollouts.
        """
        waiting = {key: n for key, n in normalizers.items() if n and (n.is_waiting or not n.frozen)}
        collector: Collector | None = None
        idle = 0
        while few := {key for key, own in waiting.items() if own.is_waiting}:
            collector = collector or self.make_collector(num_steps, acting, training=False)
            experience, episodes = collector.collect(acting)
            episodes.check_steps(" before training")
            idle = 0 if few & experience.keys() else idle + 1
            if idle == MAX_IDLE:
                raise TrainingError(
                    f"no observation statistics for {', '.join(sorted(few))}: no agent of the "
                    f"policy acted in {idle} rollouts before training; set normalization.mode=none "
                    "in the model of the policy (policies.<id>.model)"
                )
            for key, rollout in experience.items():
                if own := waiting.get(key):
                    own.update(rollout.to(own.mean.device).acted_on(own.keys))
        for own in waiting.values():
            if own.config.mode == "estimated":
                own.freeze()


def make_builder(context: BuildContext[Any]) -> AlgorithmBuilder[Any]:
    """Return the builder selected by the settings of the algorithm.

    Raises:
        ConfigError: If `builder_class` is not a builder.
    """
    path = context.algorithm.builder_class
    builder_class = locate(path, key="algorithm")
    if not (isinstance(builder_class, type) and issubclass(builder_class, AlgorithmBuilder)):
        problem = "builder_class: expected a subclass of maze_train.AlgorithmBuilder"
        raise ConfigError("algorithm", problem, path)
    return builder_class(context)
