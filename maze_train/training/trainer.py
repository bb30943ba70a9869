"""The training loop: epochs of updates, evaluation, model selection, metrics, checkpoints."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol

import torch
from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector, turns_of
from maze_train.collect.episodes import ReportedInfos
from maze_train.core.checks import check_at_least
from maze_train.core.errors import CallbackError, ConfigError, EnvError, TrainingError
from maze_train.core.events import Statistics
from maze_train.core.files import atomic_write
from maze_train.core.notices import notify
from maze_train.core.run_directory import MetricsRow, RunDirectory
from maze_train.core.seeding import Seeds
from maze_train.core.signals import Interrupted, Interruption
from maze_train.core.state_files import dumps, loads
from maze_train.core.targets import locate
from maze_train.core.types import Array
from maze_train.envs.building import close_quietly
from maze_train.envs.calls import EnvCalls
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory, env_name
from maze_train.envs.faults import separate_processes
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import LearnerGroupConfig, Progress
from maze_train.learner.group import LearnerGroup
from maze_train.learner.learner import Learner
from maze_train.learner.ranks import OneRank, Ranks
from maze_train.nets.config import ModelConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.spaces.agents import agent_spaces
from maze_train.tracking.config import TrackingConfig
from maze_train.tracking.run_log import RunLog
from maze_train.tracking.tracker import EVAL_RETURN, MetricsWriter, RunInfo, Tracker
from maze_train.training.callbacks import Callback, Callbacks
from maze_train.training.changes import ChangedSettings
from maze_train.training.checkpoints import Checkpoint, CheckpointStore
from maze_train.training.config import (
    DRY_RUN_STEPS,
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    PolicyConfig,
)
from maze_train.training.contexts import UpdateProfiler, check_fits
from maze_train.training.environments import build_vector_env
from maze_train.training.evaluators import (
    BestModelSelection,
    Evaluator,
    RolloutEvaluator,
    check_metric,
    metric_of,
)
from maze_train.training.events import TimeEvents
from maze_train.training.generators import generator_states, generators_kept, load_generator_states
from maze_train.training.models import learner_with_frozen, make_model, modules_of
from maze_train.training.outcome import Limits, Position, TrainingSummary, crosses
from maze_train.workers.backends import ThisProcess, WorkerBackend

if TYPE_CHECKING:
    from typing import Self

    from maze_train.collect.actors import DistributedActors
    from maze_train.data.turns import TurnOptions


LOG = logging.getLogger(__package__)

PROGRESS = (
    "epoch",
    "updates",
    "env_steps",
    "wall_time_s",
    "final_eval_return_mean",
    "_updates_in_epoch",
    "_epoch_began_s",
    "_epoch_began_steps",
)
"""Attributes of a trainer that describe the training progress."""

MAX_IDLE = 100
"""Maximum number of consecutive rollouts in which a policy without statistics never acts."""

MAX_LOST_UPDATES = 1_000
"""Maximum number of consecutive updates without a valid transition."""


class RunnerSettings(Protocol):
    """Settings of a runner that an algorithm reads; see `RunnerConfig`."""

    concurrency: int
    envs_per_actor: int
    max_wall_time_s: float
    dataset: str | dict[str, Any] | None
    fast_dev_run: bool


class RunSettings(Protocol):
    """Settings of a run that an algorithm reads; see `TrainConfig`."""

    env: EnvConfig
    model: ModelConfig
    policies: dict[str, PolicyConfig]
    policies_to_train: list[str] | None
    algorithm: AlgorithmConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    learner_group: LearnerGroupConfig
    tracking: TrackingConfig
    total_steps: int | None

    @property
    def runner(self) -> RunnerSettings:
        """Settings of the runner."""
        ...


class Source(Protocol):
    """Source of experience: environments, actors, members of a population, or a dataset."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        ...


def _note_once() -> Callable[[str], None]:
    """Return a function that prints each note once."""
    return cache(lambda text: notify(f"note: {text}"))


@dataclass(kw_only=True)
class Run:
    """Objects of a run, in the order in which `run.build.build_run` creates them.

    Only the settings, a model and learners are required to train without a run directory:

        Run(config=load_config(settings), model=model, learners=LearnerGroup(learner))
    """

    config: RunSettings
    """The configuration, with all defaults."""

    ranks: Ranks = field(default_factory=OneRank)
    """The processes of the run."""

    seeds: Seeds = field(default_factory=lambda: Seeds(0))
    """Seeds of named random streams."""

    closing: ExitStack = field(default_factory=ExitStack)
    """Closes the objects registered here at the end of the run, in reverse order."""

    notify: Callable[[str], None] = field(default_factory=_note_once)
    """Prints a note for the user, each text once."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of the learner and its models."""

    backend: WorkerBackend = field(default_factory=ThisProcess)
    """Backend of the workers: this process, other processes, or Ray."""

    run_dir: Path = field(default_factory=Path)
    """Directory of the run, which might not exist yet."""

    log: RunLog = field(default_factory=RunLog)
    """Copies the messages for the user to a file in the run directory."""

    is_new: bool = True
    """Whether the run is not resumed."""

    has_checkpoint: bool = False
    """Whether the run resumes from a checkpoint."""

    read_checkpoint: Callable[[], Checkpoint | None] = lambda: None
    """Reads the checkpoint to resume from; returns None without a checkpoint."""

    env_calls: EnvCalls = field(default_factory=EnvCalls)
    """Environment method calls requested by callbacks."""

    infos: ReportedInfos = field(default_factory=ReportedInfos)
    """Treats missing values of final infos."""

    source: Source = None  # type: ignore[assignment]  # set by `build_run`
    """Source of experience."""

    model: nn.Module = None  # type: ignore[assignment]  # set by `build_run`
    """The policies and critics."""

    learners: LearnerGroup = None  # type: ignore[assignment]  # set by `build_run`
    """Learners that update the weights."""

    selection_metric: str = EVAL_RETURN
    """Metric that selects the best policy."""

    evaluator: Evaluator | None = None
    """Evaluates the policy during training; None: the training return selects the best policy."""

    final_evaluator: Evaluator | None = None
    """Plays the test after training; None: no test."""

    writers: list[MetricsWriter] = field(default_factory=list)
    """Writers of metrics."""

    callbacks: list[Callback] = field(default_factory=list)
    """Callbacks of the run."""

    interruption: Interruption = field(default_factory=Interruption)
    """Handles signals."""

    limits: Limits = None  # type: ignore[assignment]  # default: limits of the configuration
    """Limits at which training stops."""

    trainer: Trainer = None  # type: ignore[assignment]  # set by `build_run`
    """Runs the training loop."""

    text: str = ""
    """The configuration as text."""

    directory: RunDirectory = field(default_factory=lambda: RunDirectory(Path()))
    """The locked directory of the run."""

    store: CheckpointStore | None = None
    """Checkpoints of the directory."""

    checkpoints: CheckpointStore | None = None
    """Checkpoints that the trainer writes: `store`; None: no checkpoints."""

    checkpoint: Checkpoint | None = None
    """Checkpoint whose state was restored."""

    past_rows: tuple[MetricsRow, ...] = ()
    """Rows of metrics before the checkpoint."""

    has_damaged_metrics: bool = False
    """Whether the table of metrics of the resumed run is damaged."""

    model_selection: BestModelSelection | None = None
    """Stores the best policy; None: not stored."""

    profiler: UpdateProfiler = field(default_factory=lambda: UpdateProfiler(None, Path()))
    """Profiles updates."""

    tracker: Tracker = field(default_factory=lambda: Tracker([], RunInfo()))
    """Records the metrics; by default, in `history` only."""

    def __post_init__(self) -> None:
        config = self.config
        self.limits = self.limits or Limits(
            n_epochs=config.algorithm.n_epochs,
            total_steps=config.total_steps or 0,
            patience=config.algorithm.patience,
            max_wall_time_s=config.runner.max_wall_time_s,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.closing.__exit__(*error)

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.source.spaces

    @property
    def env(self) -> MazeVectorEnv:
        """The environments of this process, if they are the source of experience."""
        assert isinstance(self.source, MazeVectorEnv)
        return self.source

    @property
    def env_factory(self) -> EnvFactory:
        """Factory of single environments, with the device of this process."""
        env = self.config.env
        if env.device is not None:
            env = replace(env, device=self.ranks.device(env.device, "env.device"))
        return EnvFactory(env)

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
        if training and self.ranks.count > 1:
            total_envs, num_envs = num_envs, num_envs // self.ranks.count
            first_env = num_envs * self.ranks.rank
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

    def env_maker(
        self, backend: WorkerBackend, *, training: bool = True
    ) -> Callable[..., MazeVectorEnv]:
        """Return `build_vector_env` with the arguments that are the same for the whole run.

        The numbers of environments remain to be passed. Workers can unpickle the function.

        Args:
            backend: Backend of the workers of the environments.
            training: See `make_env`.
        """
        return partial(
            build_vector_env,
            self.env_factory if training else self.env_factory.for_evaluation(),
            backend,
            self.config.algorithm.on_non_finite_step,
            max_episode_steps=self.config.evaluation.max_episode_steps,
            can_be_restored=training and self.config.checkpoint.is_on,
            device=self.device,
            info_keys=self.config.tracking.info_keys,
        )

    def make_actors(self, num_actors: int, num_envs: int, **workers: Any) -> DistributedActors:
        """Build actors, each with a copy of the policy, that are closed at the end of the run.

        Args:
            num_actors: Number of actors.
            num_envs: Number of environments per actor.
            **workers: Further arguments of `DistributedActors`.
        """
        from maze_train.collect.actors import DistributedActors

        make: Callable[..., DistributedActors] = DistributedActors
        if self.ranks.is_shared:
            from maze_train.collect.gathering import GatheringActors

            make = partial(GatheringActors, self.ranks)
        make_env = partial(self.env_maker(ThisProcess()), num_envs, device="cpu")
        calls = self.env_calls.training
        actors = make(make_env, num_actors, num_envs, self.backend, calls=calls, **workers)
        self.closing.callback(close_quietly, actors)
        return actors

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a function that builds the model with the same initial weights on each call."""
        make = make_model
        if agent_spaces(*self.spaces) is not None:
            from maze_train.training.multi_agent_models import make_joint_model as make
        config = self.config
        seed = self.seeds.integer("model")
        return partial(make, config.algorithm, config.model, config.policies, *self.spaces, seed)

    def make_learner(self, *args: object, **kwargs: object) -> Learner[Any, Any, Any]:
        """Build the learner of the model, given further arguments of its class.

        Frozen policies are added without optimizers.

        Raises:
            ConfigError: If snapshots are configured but the algorithm does not support them.
        """
        config = self.config
        algorithm, policies, chosen = config.algorithm, config.policies, config.policies_to_train
        for policy, own in policies.items():
            if own.opponents is not None and not algorithm.has_snapshots:
                problem = (
                    f"{algorithm.name} does not support self-play against snapshots; use none, or "
                    "an algorithm with has_snapshots"
                )
                raise ConfigError(f"policies.{policy}.opponents", problem, own.opponents.draw)
        make: Callable[..., Learner[Any, Any, Any]] = locate(
            algorithm.learner_class, "algorithm.learner_class"
        )
        if policies or chosen is not None:
            make = partial(learner_with_frozen, make, policies, chosen)
        return make(modules_of(self.model), algorithm, *args, **kwargs)

    def make_collector(
        self,
        num_steps: int,
        acting: nn.Module,
        *,
        env: MazeVectorEnv | None = None,
        training: bool = True,
        records_log_probs: bool = False,
        turns: TurnOptions | None = None,
    ) -> Collector:
        """Build a collector for the environments of this process, or for actors.

        Args:
            num_steps: Steps per environment and rollout; fewer in a dry run.
            acting: Acting model of one or all agents.
            env: Environments; None: the source of experience.
            training: Whether to collect for training; otherwise for initial statistics, with other
                random streams and without calls of callbacks in the environments.
            records_log_probs: Whether rollouts of multi-agent training contain log-probabilities.
            turns: Arguments of `TurnSplitter` for multi-agent training.

        Raises:
            ConfigError: If a rollout does not fit into memory.
        """
        config, ranks = self.config, self.ranks
        stream = "" if training else "normalization/"
        # Third-party vector environments take one seed for all environments.
        is_shared = config.env.backend == "gymnasium" or ranks.is_first
        stream = stream if is_shared else ranks.stream(stream)
        steps = min(num_steps, DRY_RUN_STEPS) if config.runner.fast_dev_run else num_steps
        settings: dict[str, Any] = {
            "env_seed": self.seeds.integer(f"{stream}episodes"),
            "action_seed": self.seeds.integer(f"{stream}actions"),
            "allow_new_episodes": config.checkpoint.allow_new_episodes,
            "info_keys": config.tracking.info_keys,
        }
        collector: Collector
        if config.runner.envs_per_actor:
            from maze_train.collect.actors import ActorCollector

            def forget(lost: Array) -> None:
                envs = torch.from_numpy(lost)
                self.learners.foreach_learner(lambda learner: learner.forget_episodes(envs))

            actors: Any = self.source
            maker = self.model_maker()
            collector = ActorCollector(actors, acting, maker, steps, on_lost=forget, **settings)
        else:
            env = env or self.env
            check_fits(env, steps, ranks)
            make = RolloutCollector
            if config.env.backend != "gymnasium":
                from maze_train.collect.simulators import collector_class

                make = collector_class(env)
            calls = self.env_calls.training
            collector = make(env, steps, device=self.device, calls=calls, **settings)
            if ranks.is_shared:
                from maze_train.collect.gathering import GatheringCollector

                collector = GatheringCollector(ranks, collector)
        if training:
            self.env_calls.in_training_envs.append(collector.make_calls)
        if agent_spaces(*self.spaces) is not None:
            joint: Any = acting
            splitter = turns_of(joint, **(turns or {}))
            collector.split_turns(splitter, records_log_probs=records_log_probs)
        return collector

    def make_evaluator(self, n_episodes: int, stream: str) -> RolloutEvaluator:
        """Build an evaluator that plays `n_episodes` episodes seeded from a named stream."""
        config, is_test = self.config.evaluation, stream != "evaluation"
        evaluator = RolloutEvaluator(
            partial(self.make_env, training=False),
            n_episodes,
            concurrency=config.num_envs(self.config.runner.concurrency),
            seed=self.seeds.integer(stream),
            deterministic=config.deterministic,
            info_keys=self.config.tracking.info_keys,
            is_guarded=config.max_episode_steps is None,
            notes_zero_sum=not (config.opponents or config.metric or is_test),
            calls=self.env_calls.evaluation,
            infos=self.infos,
        )
        if self.ranks.is_first and not is_test:  # Only the first process evaluates.
            self.env_calls.in_evaluation_envs.append(evaluator.make_calls)
        return evaluator

    def begin_statistics(
        self,
        normalizers: Mapping[str, ObservationNormalizer | None],
        num_steps: int,
        acting: nn.Module,
        *,
        make_env: Callable[[], MazeVectorEnv] | None = None,
        turns: TurnOptions | None = None,
        records_log_probs: bool = False,
    ) -> None:
        """Collect observation statistics before training if a normaliser has too few.

        Training then starts with new episodes.

        Args:
            normalizers: Normaliser of each module; None for a module without one.
            num_steps: Steps per environment and rollout.
            acting: Acting model.
            make_env: Builds separate environments, closed afterwards; None: the source of
                experience is used.
            turns: See `make_collector`.
            records_log_probs: See `make_collector`.

        Raises:
            TrainingError: If all steps of a rollout were dropped, or a policy without statistics
                did not act in `MAX_IDLE` rollouts.
        """
        waiting = {key: n for key, n in normalizers.items() if n and (n.is_waiting or not n.frozen)}
        env: MazeVectorEnv | None = None
        collector: Collector | None = None
        idle = 0
        while few := {key for key, own in waiting.items() if own.is_waiting}:
            if collector is None:
                env = make_env() if make_env else None
                collector = self.make_collector(
                    num_steps,
                    acting,
                    env=env,
                    training=False,
                    records_log_probs=records_log_probs,
                    turns=turns,
                )
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
        if env is not None:
            close_quietly(env)
        for own in waiting.values():
            if own.config.mode == "estimated":
                own.freeze()


class Trainer(ABC):
    """Runs the training loop of an algorithm.

    An epoch consists of `epoch_length` updates, an evaluation and model selection (if due), and a
    row of metrics. Subclasses implement `update_once` and `build`. `build_run` calls the class
    methods in the order in which they are defined. Additional constructor arguments of subclasses
    are keyword-only.

    Args:
        run: Objects of the run, with learners and model; the others are read when needed.
    """

    step_label: ClassVar[str] = RunInfo().step_label
    """Name of the unit in which steps are counted, for messages."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Raise TypeError with a hint for calls such as `PPO("MlpPolicy", "CartPole-v1")`."""
        if args and not isinstance(args[0], Run):
            given = [*args[1:], *kwargs.values(), "CartPole-v1"]
            env = next(value for value in given if isinstance(value, str))
            name = cls.__name__.removesuffix("Trainer")
            raise TypeError(
                f"{name} cannot be created directly. To train and to act:\n"
                "    from maze_train import train\n"
                f'    result = train("{env}", "{name.lower()}", total_steps=100_000)\n'
                "    action = result.policy.act(observation)"
            )
        return super().__new__(cls)

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = ChangedSettings(run.config.algorithm)
        self.learners = run.learners
        self.model = run.model
        self.callbacks = Callbacks(run.callbacks, self)
        self.epoch = 0
        self.updates = 0
        self.env_steps = 0
        self.wall_time_s = 0.0
        self.final_eval_return_mean = math.nan
        self.stop_reason = ""
        self.has_started = False
        """Whether `on_run_start` of all callbacks succeeded, in this or an earlier process."""
        self.exact = True
        """Whether the results are identical to the results of an uninterrupted run."""
        self._score: float | None = None
        self._resumed_at = 0.0
        self._updates_in_epoch = self._lost_updates = self._last_epoch = 0
        self._epoch_began_s = 0.0
        self._epoch_began_steps = 0
        self.statistics = Statistics()
        # Metrics of an epoch that has not been evaluated yet.
        self._row: dict[str, float] | None = None
        # Environment steps at the last evaluation, and the metrics of evaluations in this epoch.
        self._evaluated_at = 0
        self._evaluated: dict[str, float] = {}

    @classmethod
    def make_source(cls, run: Run) -> Source:
        """Build the source of experience: environments, or actors with `runner.envs_per_actor`."""
        num_envs, per_actor = run.config.runner.concurrency, run.config.runner.envs_per_actor
        if not per_actor:
            return run.make_env(num_envs)
        num_actors = num_envs // per_actor
        return run.make_actors(
            num_actors,
            per_actor,
            num_workers=run.backend.num_workers(num_actors),
            can_be_restored=run.config.checkpoint.is_on or run.backend.may_restart,
        )

    @classmethod
    def model_maker(cls, run: Run) -> Callable[[], nn.Module]:
        """Return a function that builds the model with the same initial weights on each call."""
        return run.model_maker()

    @classmethod
    def make_learner(cls, run: Run) -> Learner[Any, Any, Any]:
        """Build the learner that updates the weights of the model."""
        return run.make_learner(device=run.device, seed=run.seeds.integer("minibatches"))

    @classmethod
    def make_evaluators(cls, run: Run) -> list[Evaluator]:
        """Build the evaluators of the policy, except user-defined evaluators."""
        n_episodes = run.config.evaluation.n_episodes
        return [run.make_evaluator(n_episodes, "evaluation")] if n_episodes else []

    @classmethod
    def make_final_evaluator(cls, run: Run) -> Evaluator | None:
        """Build the evaluator of the test after training; None without a test.

        Raises:
            ConfigError: If the run has no environment.
        """
        n_episodes = run.config.evaluation.final_episodes
        return run.make_evaluator(n_episodes, "final test") if n_episodes else None

    @classmethod
    def task_name(cls, run: Run) -> str:
        """Return the name of the task, used in run names."""
        return env_name(run.config.env)

    @classmethod
    def selection_metric(cls, run: Run) -> str:
        """Return the metric that selects the best policy; called after `make_learner`."""
        return run.config.evaluation.selection_metric

    @classmethod
    @abstractmethod
    def build(cls, run: Run) -> Self:
        """Build the trainer with its collectors and buffers; called after all other methods."""

    def before_training(self) -> None:  # noqa: B027 (optional)
        """Prepare environments and statistics before the first update."""

    @property
    def algorithm_config(self) -> AlgorithmConfig:
        """The current settings of the algorithm."""
        return self.settings.current

    def set(self, key: str, value: object) -> None:
        """Change a setting of the algorithm; see `TrainingView.set`."""
        limits = self.run.limits
        is_limited = limits.total_steps or limits.max_wall_time_s or self._last_epoch
        apply, modules = self.learners.change_settings, self.learners.first.modules
        self.settings.change(key, value, bool(is_limited), apply, modules)

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps environments in this process; None without such a collector."""
        return None

    def connect_callbacks(self) -> None:
        """Connect callbacks that define `on_step` to the collector.

        Raises:
            ConfigError: If this process does not step environments.
        """
        names = self.callbacks.defining("on_step")
        if names and self.stepping is None:
            problem = "not available with actors, es, impala and bc; use on_rollout_end"
            raise ConfigError("on_step", problem, names[0])
        if names and self.stepping is not None:
            self.stepping.on_step = lambda batch: self.callbacks.call("on_step", seen=batch)

    @property
    def epoch_length(self) -> int:
        """Updates per epoch."""
        return self.algorithm_config.epoch_length

    @abstractmethod
    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Collect experience and update once; return the number of environment steps."""

    def check_lost(self, num_samples: int) -> None:
        """Raise an error if too many consecutive updates had no transitions.

        Args:
            num_samples: Number of transitions of an update.

        Raises:
            TrainingError: If `MAX_LOST_UPDATES` consecutive updates had no transition.
        """
        self._lost_updates = 0 if num_samples else self._lost_updates + 1
        if self._lost_updates == MAX_LOST_UPDATES:
            raise TrainingError(
                f"{MAX_LOST_UPDATES} consecutive updates had no valid transition: at the beginning "
                "of each episode, the environments return non-finite values or their workers fail"
            )

    def train(self, n_epochs: int | None = None) -> TrainingSummary:
        """Train until a limit is reached.

        Args:
            n_epochs: Epochs to train in this call, >= 1, in place of `limits.n_epochs`; the other
                limits apply.

        Raises:
            ConfigError: If there is no limit.
            Interrupted: If a signal was received. Raised after a checkpoint was saved, or
                immediately if the signal was sent twice.
        """
        if n_epochs is not None:
            check_at_least("n_epochs", n_epochs, 1)
        elif not any(asdict(self.run.limits).values()):
            raise ConfigError("limits", "no limit is set, so training would never end; set a limit")
        self.connect_callbacks()
        self._resumed_at = self._now() - self.wall_time_s
        last_epoch = self.run.limits.n_epochs if n_epochs is None else self.epoch + n_epochs
        self._last_epoch = last_epoch
        with self.run.interruption.deferred(), self.callbacks.running(last_epoch):
            try:
                self._run_epochs(last_epoch)
            except (Interrupted, CallbackError) as stop:
                stop.is_common = stop.is_common or not stop.at_once
                if self.run.checkpoints is not None and not stop.at_once:
                    stop.checkpoint = self._save_checkpoint(within_epoch=True)
                raise
        return self.summary()

    def _run_epochs(self, last_epoch: int) -> None:
        ended = self.epoch + (self._row is not None)
        self.stop_reason = self._limit_reached(last_epoch, ended)
        self._call("on_run_start")
        self.callbacks.check_all()
        self.has_started = True
        # Finish an interrupted epoch even if its last update reached a limit.
        while self._row is not None or self._updates_in_epoch or not self.stop_reason:
            if self._row is None:
                self._update_for_an_epoch(last_epoch)
                self._row = self._closed_row(last_epoch)
            self._finish_epoch(self._row)
            if self.run.checkpoints is not None and self.run.checkpoints.is_due(self.epoch):
                self._save_checkpoint()
            self._check()
        if self.run.checkpoints is not None:
            self._save_checkpoint()

    def _update_for_an_epoch(self, last_epoch: int) -> None:
        """Run the remaining updates of the current epoch."""
        length = self.epoch_length
        self._evaluate_within_epoch(length)  # Repeat an evaluation that was interrupted.
        while self._updates_in_epoch < length and not self.stop_reason:
            with self.run.profiler.around(self.updates + 1):
                steps_before = self.env_steps
                self.env_steps += self.update_once(self.progress(last_epoch), self.statistics)
            self.updates += 1
            self._updates_in_epoch += 1
            self._score = None  # The score of earlier weights.
            self.wall_time_s = self._now() - self._resumed_at
            self.stop_reason = self.stop_reason or self._limit_reached()
            self._call("on_update_end")
            if not self.stop_reason:
                self.run.tracker.advance(self._updates_in_epoch / length, self.env_steps)
            self._dump_if_due(steps_before)
            self._evaluate_within_epoch(length)
            store = self.run.checkpoints
            if store is not None and store.is_overdue(steps_before, self.env_steps):
                self._save_checkpoint(within_epoch=True)
            self._check()

    def _dump_if_due(self, steps_before: int) -> None:
        selection = self.run.model_selection
        if selection is not None and crosses(
            selection.dump_interval_steps, steps_before, self.env_steps
        ):
            selection.dump(self.env_steps, self.epoch + 1)

    def _evaluate_within_epoch(self, length: int) -> None:
        """Evaluate between two updates of an epoch if the interval in steps has passed."""
        is_within = 0 < self._updates_in_epoch < length and not self.stop_reason
        if self.run.config.evaluation.interval_steps and is_within:
            self._evaluate_if_due(self.statistics.reduce())

    def _closed_row(self, last_epoch: int) -> dict[str, float]:
        """Return the metrics of the updates of an epoch."""
        self.learners.foreach_learner(lambda learner: learner.check_weights())
        row: dict[str, float] = {
            "epoch": self.epoch + 1,
            "updates": self.updates,
            "env_steps": self.env_steps,
            **self.statistics.reduce(),
        }
        self.statistics.clear()
        # Select by a training metric first, since the last epoch is always evaluated.
        self._select(row)
        self.stop_reason = self.stop_reason or self._limit_reached(last_epoch, self.epoch + 1)
        return row

    def _finish_epoch(self, closed: dict[str, float]) -> None:
        """Evaluate the policy and write the metrics row of the epoch."""
        metrics = self._evaluate_if_due(closed)
        row = {**closed, **self._evaluated, **metrics}
        self._call("on_epoch_end", row)
        for name in metrics.keys() - self._evaluated.keys():
            del row[name]  # Result of an earlier epoch.
        if self.stop_reason and not metrics:
            self._evaluate_if_due(closed)  # A callback stopped training after the check.
            row.update(self._evaluated)
        row.update(self.settings.metrics(self.progress(self._last_epoch)))
        self.wall_time_s = self._now() - self._resumed_at
        row[TimeEvents.epoch_s.tag] = seconds = self.wall_time_s - self._epoch_began_s
        row[TimeEvents.total_s.tag] = self.wall_time_s
        seconds -= row.get("train/compile_s", 0.0)
        row[TimeEvents.steps_per_second.tag] = (self.env_steps - self._epoch_began_steps) / seconds
        self.epoch += 1
        self.run.tracker.write(row)
        self._row, self._evaluated = None, {}
        self._updates_in_epoch = 0
        self._epoch_began_s, self._epoch_began_steps = self.wall_time_s, self.env_steps

    def _limit_reached(self, last_epoch: int = 0, epochs: int = -1) -> str:
        """Return the name of the limit that was reached, or an empty string.

        Args:
            last_epoch: Epoch after which training ends; 0: none.
            epochs: Number of finished epochs; -1: within an epoch, which ignores patience and
                `last_epoch`.
        """
        reached = self.run.limits.reached(self.env_steps, self.wall_time_s, last_epoch, epochs)
        selection = self.run.model_selection
        if not reached and epochs > 0 and selection is not None:
            return "patience" if selection.patience_is_exhausted(self.run.limits.patience) else ""
        return reached

    def _save_checkpoint(self, within_epoch: bool = False) -> Path | None:
        """Write a checkpoint; return its path, or None if writing failed.

        Raises:
            TrainingError: If a weight is not finite. The last checkpoint is kept.
        """
        assert self.run.checkpoints is not None
        started = time.perf_counter()
        within_epoch = within_epoch and (self._row is not None or self._updates_in_epoch > 0)
        if self.run.checkpoints.holds(self.epoch, self.updates, within_epoch):
            return self.run.checkpoints.latest
        self.learners.foreach_learner(lambda learner: learner.check_weights())
        self.run.tracker.sync()
        counters = (self.epoch, self.updates, self.env_steps)
        position = Position(*counters, self._score, within_epoch)
        path = self.run.checkpoints.save(self.state_dict(), position)
        self.statistics.record(TimeEvents.checkpoint_s, time.perf_counter() - started)
        if path is not None:
            LOG.debug("saved %s in %.3f s", path, time.perf_counter() - started)
            self._call("on_checkpoint")
        return path

    def _check(self) -> None:
        """Raise a pending error or signal; call only while the training state is consistent."""
        self.run.interruption.check()
        self.callbacks.check_all()

    def _call(self, hook: str, row: dict[str, float] | None = None) -> None:
        """Call a method of all callbacks, then call the environments as requested by callbacks.

        Checkpoints are written later, so they contain no failed call.

        Raises:
            ConfigError: If callbacks request different changes in different processes.
        """
        self.callbacks.call(hook, row)
        self.callbacks.agree(hook)
        self.run.env_calls.make()

    def _now(self) -> float:
        """Return the time in the first process in seconds, so that all processes stop together."""
        return self.run.ranks.first(time.perf_counter)

    def _evaluate_if_due(self, row: dict[str, float]) -> dict[str, float]:
        """Evaluate if an evaluation is due, and pass the score to the model selection."""
        steps = self.run.config.evaluation.interval_steps
        if steps:
            due = crosses(steps, self._evaluated_at, self.env_steps)
            due = due or (bool(self.stop_reason) and self._evaluated_at < self.env_steps)
        else:
            due = (self.epoch + 1) % self.run.config.evaluation.interval == 0 or bool(
                self.stop_reason
            )
        if not due:
            return {}
        metrics: dict[str, float] = {}
        selection = self.run.model_selection
        if self.run.evaluator is not None:
            started = time.perf_counter()
            metrics = self._evaluate_unless_interrupted(self.run.evaluator)
            self._evaluated_at = self.env_steps
            if steps:
                metrics["eval/env_steps"] = self.env_steps
            self._select(metrics)
            self._call("on_evaluation_end", metrics)
            self._evaluated.update(metrics)
            before = self._evaluated.get(TimeEvents.evaluate_s.tag, 0.0)
            self._evaluated[TimeEvents.evaluate_s.tag] = before + time.perf_counter() - started
        if selection is not None and not selection.updates:
            check_metric(self.run.selection_metric, {*row, *metrics}, self.model)
        return metrics

    def _evaluate_unless_interrupted(self, evaluator: Evaluator) -> dict[str, float]:
        """Evaluate; restore the state of the evaluator after a signal or an error in user code."""
        state = deepcopy(evaluator.state_dict())
        try:
            with self.run.interruption.immediate():
                return self.evaluate()
        except (Interrupted, CallbackError):
            evaluator.load_state_dict(state)
            raise

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current policy, without any effect on training."""
        if self.run.evaluator is None:
            return {}
        with generators_kept():
            metrics = self.run.evaluator.evaluate(self.model)
        self._keep_return(metrics)
        return metrics

    def _keep_return(self, metrics: dict[str, float]) -> None:
        self.final_eval_return_mean = metrics.get("eval/episode_return_mean", math.nan)

    def _select(self, metrics: dict[str, float]) -> None:
        """Pass the score to the model selection if the metrics contain it."""
        selection, wanted = self.run.model_selection, self.run.selection_metric
        score = metric_of(metrics, wanted)
        if selection is None or score is None:
            return
        if wanted not in metrics and not selection.updates:
            check_metric(wanted, metrics, self.model)
            notify(f"note: no episode has reported is_success, so {wanted} is 0")
        self._score = score
        selection.update(score, self.epoch + 1)
        if not self.stop_reason and selection.patience_is_exhausted(self.run.limits.patience):
            self.stop_reason = "patience"

    def progress(self, last_epoch: int = 0) -> Progress:
        """Return the progress of training before the next update."""
        last_update = last_epoch * self.epoch_length
        done = self.run.limits.share(self.env_steps, self.wall_time_s, self.updates, last_update)
        return Progress(self.env_steps, self.updates, self.epoch, done)

    def summary(self) -> TrainingSummary:
        """Return the outcome so far."""
        selection = self.run.model_selection
        return TrainingSummary(
            stop_reason=self.stop_reason,
            epochs=self.epoch,
            updates=self.updates,
            env_steps=self.env_steps,
            wall_time_s=self.wall_time_s,
            steps_per_second=self.env_steps / self.wall_time_s if self.wall_time_s else 0.0,
            best_metric=math.nan if selection is None else selection.best_score,
            best_epoch=0 if selection is None else selection.best_epoch,
            final_eval_return_mean=self.final_eval_return_mean,
            exact=self.exact,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the complete training state; call between two updates."""
        selection, evaluator = self.run.model_selection, self.run.evaluator
        called = self.callbacks.state_dict()
        return {
            **({"callbacks": self.run.ranks.state(called)} if called else {}),
            **({"env_calls": self.run.env_calls.state_dict()} if self.run.env_calls else {}),
            "learners": self.learners.state_dict(),
            "model_selection": None if selection is None else selection.state_dict(),
            "evaluator": None if evaluator is None else deepcopy(evaluator.state_dict()),
            "statistics": self.statistics.state_dict(),
            "row": self._row,
            "evaluated": (self._evaluated_at, self._evaluated),
            "progress": {name: getattr(self, name) for name in PROGRESS},
            "exact": self.exact,
            "has_started": self.has_started,
            "infos": sorted(self.run.infos.seen),
            "settings": self.settings.state_dict(),
            "generators": self.run.ranks.state(generator_states()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`."""
        generators = self.run.ranks.own_state(state["generators"])
        # Settings are applied before the learners are loaded, so that rates of `adaptive_kl` are
        # restored, and again after, so that new values replace weights (SAC's fixed temperatures).
        were_given = "settings" in state and self.settings.load_state_dict(state["settings"])
        if self.settings.are_changed:
            self.learners.change_settings(self.algorithm_config)
        self.learners.load_state_dict(state["learners"])
        if were_given:
            self.learners.change_settings(self.algorithm_config)
        if self.run.model_selection is not None and state["model_selection"] is not None:
            self.run.model_selection.load_state_dict(state["model_selection"])
        if self.run.evaluator is not None and state["evaluator"] is not None:
            self.run.evaluator.load_state_dict(state["evaluator"])
        called = self.run.ranks.own_state(state["callbacks"]) if "callbacks" in state else ()
        self.callbacks.load_state_dict(called)
        if "env_calls" in state:
            self.run.env_calls.load_state_dict(state["env_calls"])
        self.statistics.load_state_dict(state["statistics"])
        self._row = state["row"]
        self._evaluated_at, self._evaluated = state.get("evaluated", (0, {}))
        for name in PROGRESS:
            setattr(self, name, state["progress"][name])
        # Checkpoints of earlier versions lack both entries.
        self.exact = bool(state.get("exact", True))
        self.has_started = bool(state.get("has_started", self.updates))
        self.run.infos.seen.clear()
        self.run.infos.seen.update(state.get("infos", ()))
        self.load_experience(state)
        # Restored last, since restoring other parts may draw random numbers.
        load_generator_states(generators)

    def load_experience(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Restore the state of the source of experience."""

    def save_state(self, file_path: str | Path | BinaryIO) -> None:
        """Write `state_dict` to a file of tensors and plain values."""
        data: bytes = dumps(self.state_dict())
        target = Path(file_path) if isinstance(file_path, str) else file_path
        with atomic_write(target) if isinstance(target, Path) else nullcontext(target) as file:
            file.write(data)

    def load_state(self, file_path: str | Path | BinaryIO) -> None:
        """Restore the state from a file written by `save_state`; loading does not run code.

        Raises:
            RunDirectoryError: If the file is damaged.
        """
        if isinstance(file_path, (str, Path)):
            state = loads(Path(file_path).read_bytes(), file_path)
        else:
            state = loads(file_path.read())
        self.load_state_dict(state)
