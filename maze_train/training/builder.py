"""Contract by which an algorithm builds itself: what it gets, and what it has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from maze_train.envs.factory import BoundedEnvFactory, EnvFactory, env_name
from maze_train.errors import ConfigError
from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.group import LearnerGroup
from maze_train.nets.config import ModelConfig
from maze_train.rollout.collector import RolloutCollector
from maze_train.spaces.agents import agent_spaces
from maze_train.targets import locate
from maze_train.training.config import (
    TRIAL_STEPS,
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    PolicyConfig,
)
from maze_train.training.environments import build_vector_env, close_quietly
from maze_train.training.models import learner_maker, make_model, modules_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from gymnasium import Env
    from torch import nn

    from maze_train.envs.config import EnvConfig
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.learner.learner import Learner
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.rollout.acting import ActingModel, RecurrentModel
    from maze_train.rollout.turn_collector import TurnCollector
    from maze_train.seeding import Seeds
    from maze_train.training.checkpoints import Checkpoint
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.services import TrainerServices
    from maze_train.training.trainer import Trainer
    from maze_train.workers.places import Place


EVALUATOR = "maze_train.training.evaluators.RolloutEvaluator"
"""Found where a run evaluates its policy."""

TURN_COLLECTOR = "maze_train.rollout.turn_collector.TurnCollector"
"""Found where there are several agents."""

ACTORS = "maze_train.training.actors.build_actors"
ACTOR_COLLECTOR = "maze_train.training.actors.build_actor_collector"
"""Found where actors collect rollouts."""

BEGIN_STATISTICS = "maze_train.training.observation_statistics.begin_statistics"
"""Found where observations are normalised."""

Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(frozen=True, kw_only=True)
class BuildContext(Generic[Config]):
    """Everything that an algorithm may ask for when it builds itself.

    Attributes:
        algorithm: Settings of the algorithm.
        env: Settings of the environments.
        env_factory: Builds single environments.
        place: Where workers live: this process, or processes of this machine.
        seeds: Gives a seed for each named stream of random numbers.
        device: Where the learner and its models live.
        concurrency: Environments that collect experience in parallel.
        envs_per_actor: Environments that a copy of the policy acts in; 0: there are no copies.
        learner_group: Settings of learners that share out minibatches.
        run_dir: Directory of the run, which need not exist yet.
        model: Settings of the networks.
        policies: Settings of the policies by id, where there are several agents.
        policies_to_train: Ids of those that learn; None: all that are not frozen.
        evaluation: Settings of evaluations.
        checkpoint: Settings of checkpoints.
        total_steps: Environment steps after which training stops; 0: no limit.
        info_keys: Keys of last infos whose numbers are metrics.
        dataset: Recorded episodes, for algorithms that learn from them.
        is_trial: Whether the run is a short trial of everything.
        has_checkpoint: Whether the run goes on from a checkpoint, which brings the experience.
        read_checkpoint: Reads that checkpoint; None: there is none.
        closing: Closes at the end of the run what is registered here.
        tell: Shows a line to the user.
    """

    algorithm: Config
    env: EnvConfig
    env_factory: EnvFactory
    place: Place
    seeds: Seeds
    device: torch.device
    concurrency: int
    run_dir: Path
    model: ModelConfig = field(default_factory=ModelConfig)
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    policies_to_train: list[str] | None = None
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    envs_per_actor: int = 0
    total_steps: int = 0
    info_keys: Sequence[str] = ()
    dataset: str | dict[str, Any] | None = None
    learner_group: LearnerGroupConfig = field(default_factory=LearnerGroupConfig)
    is_trial: bool = False
    has_checkpoint: bool = False
    read_checkpoint: Callable[[], Checkpoint | None] = lambda: None
    closing: ExitStack = field(default_factory=ExitStack)
    tell: Callable[[str], None] = print

    def make_env(self, num_envs: int, *, training: bool = True) -> MazeVectorEnv:
        """Vector environments, closed at the end of the run.

        Args:
            num_envs: How many.
            training: Whether they are for training, where rewards and ends of episodes may be
                changed, or for evaluation.
        """
        limit = 0 if training else self.evaluation.max_episode_steps
        factory: Callable[[], Env[Any, Any]] = self.env_factory
        if not training:
            factory = self.env_factory.for_evaluation()
            factory = BoundedEnvFactory(factory, limit) if limit else factory
        env = build_vector_env(
            [factory] * num_envs,
            self.env,
            self.place,
            self.algorithm.on_non_finite_step,
            training=training,
            max_episode_steps=limit,
        )
        env.tell = self.tell
        self.closing.callback(close_quietly, env)
        return env

    def make_collector(
        self, env: MazeVectorEnv, num_steps: int, stream: str = ""
    ) -> RolloutCollector:
        """A collector of rollouts.

        Args:
            env: The environments.
            num_steps: Steps of each environment per rollout; fewer in a trial.
            stream: Name that gives the collector random numbers of its own.
        """
        return RolloutCollector(
            env,
            min(num_steps, TRIAL_STEPS) if self.is_trial else num_steps,
            env_seed=self.seeds.integer(f"{stream}episodes"),
            action_seed=self.seeds.integer(f"{stream}actions"),
            device=self.device,
            allow_new_episodes=self.checkpoint.allow_new_episodes,
            info_keys=self.info_keys,
        )


class AlgorithmBuilder(ABC, Generic[Config]):
    """Builds the model, the learner and the trainer of an algorithm.

    A run calls `build_model`, `prepare`, `build_evaluators`, `build_trainer` and `before_training`,
    in this order; `build` does all but the last one. The settings of an algorithm name their
    builder: `AlgorithmConfig.builder_class`.

    Args:
        context: Everything that the algorithm is built from.

    Attributes:
        algorithm: Settings of the algorithm.
        learners: The learners; there from `prepare` on.
    """

    learners: LearnerGroup

    def __init__(self, context: BuildContext[Config]) -> None:
        self.context = context
        self.algorithm = context.algorithm
        self._env: MazeVectorEnv | None = None

    # -- what a subclass says ----------------------------------------------------------------------

    @abstractmethod
    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Arguments of the trainer besides settings, learners, model and services, by name.

        Args:
            model: Result of `build_model`, after `prepare`.
        """

    def prepare(self, model: nn.Module) -> None:
        """Build what may fail before there is a run directory: learner, replay buffer, actors.

        Raises:
            ConfigError: If a part that the configuration names is none, or does not fit.
        """
        context = self.context
        learner = self.build_learner(model)
        self.learners = LearnerGroup(learner, context.learner_group, context.place)
        context.closing.callback(self.learners.shutdown)

    def build_learner(self, model: nn.Module) -> Learner[Any, Any, Any]:
        """The learner that changes the weights of the model."""
        context = self.context
        make_learner = learner_maker(self.algorithm, context.policies, context.policies_to_train)
        seed = context.seeds.integer("minibatches")
        return make_learner(modules_of(model), self.algorithm, device=context.device, seed=seed)

    def before_training(self, trainer: Trainer) -> None:
        """Prepare environments and statistics before the first update."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.env.env_observation_space, self.env.single_action_space

    @property
    def num_envs(self) -> int:
        """Number of environments in `env`."""
        return self.context.concurrency

    @property
    def task_name(self) -> str:
        """Name of the task, in names of runs."""
        return env_name(self.context.env)

    @property
    def step_label(self) -> str:
        """Name of the counted steps, for people."""
        return "environment steps"

    @property
    def selection_metric(self) -> str:
        """Metric that selects the best policy; may need `prepare`."""
        return self.context.evaluation.selection_metric

    # -- what all have -----------------------------------------------------------------------------

    def model_maker(self) -> Callable[[], nn.Module]:
        """Return a builder of the model, with the same initial weights each time."""
        context = self.context
        return partial(
            make_model,
            self.algorithm,
            context.model,
            context.policies,
            *self.spaces,
            context.seeds.integer("model"),
        )

    def build_model(self) -> nn.Module:
        """The model for the spaces of the environment; it has no effect on anything else."""
        return self.model_maker()()

    def build_trainer(self, model: nn.Module, services: TrainerServices) -> Trainer:
        """The trainer with its source of experience.

        Args:
            model: Result of `build_model`, after `prepare`.
            services: Tracker, evaluator, model selection, limits, checkpoints.
        """
        trainer: Trainer = locate(self.algorithm.trainer_class)(
            self.algorithm, self.learners, model, services, **self.trainer_parts(model)
        )
        return trainer

    def build(self, services: TrainerServices) -> Trainer:
        """Build model, learner and trainer: everything before training."""
        model = self.build_model()
        self.prepare(model)
        return self.build_trainer(model, services)

    def build_evaluators(self) -> list[Evaluator]:
        """Build the evaluators of the policy, without those of the user."""
        n_episodes = self.context.evaluation.n_episodes
        return [self._build_evaluator(n_episodes, "evaluation")] if n_episodes else []

    def build_final_evaluator(self) -> Evaluator | None:
        """Build what tests policies after training; None: there is no test.

        Raises:
            ConfigError: If there is nothing to play in.
        """
        n_episodes = self.context.evaluation.final_episodes
        return self._build_evaluator(n_episodes, "final test") if n_episodes else None

    def _build_evaluator(self, n_episodes: int, stream: str) -> Evaluator:
        """What plays so many episodes with the seeds of a named stream."""
        config = self.context.evaluation
        evaluator: Evaluator = locate(EVALUATOR)(
            lambda num_envs: self.context.make_env(num_envs, training=False),
            n_episodes,
            concurrency=config.concurrency,
            seed=self.context.seeds.integer(stream),
            deterministic=config.deterministic,
            info_keys=self.context.info_keys,
        )
        return evaluator

    def make_collector(
        self, num_steps: int, acting: ActingModel | RecurrentModel, stream: str = "", **turns: Any
    ) -> RolloutCollector | TurnCollector:
        """A collector on the environments of this process.

        Args:
            num_steps: Steps of each environment per rollout; fewer in a trial.
            acting: Chooses the actions, of one agent or of several.
            stream: Name that gives the collector random numbers of its own.
            **turns: Arguments of `TurnCollector`, where there are several agents.
        """
        context = self.context
        collector = (
            locate(ACTOR_COLLECTOR)(self, num_steps, acting, stream)
            if context.envs_per_actor
            else context.make_collector(self.env, num_steps, stream)
        )
        if agent_spaces(*self.spaces) is None:
            return collector
        several: TurnCollector = locate(TURN_COLLECTOR)(collector, acting, **turns)
        return several

    @property
    def env(self) -> MazeVectorEnv:
        """The environments, or actors, that collect experience; made when first used."""
        if self._env is None:
            context = self.context
            actors = locate(ACTORS)(self) if context.envs_per_actor else None
            self._env = actors or context.make_env(self.num_envs)
        return self._env

    @property
    def source(self) -> Any:
        """The environments, or actors, that collected experience; None: there are none."""
        return self._env

    def close_env(self) -> None:
        """Close `env`; its next use makes new ones."""
        env, self._env = self._env, None
        if env is not None:
            close_quietly(env)

    def begin_statistics(
        self,
        normalizers: Mapping[str, ObservationNormalizer | None],
        num_steps: int,
        acting: ActingModel | RecurrentModel,
    ) -> None:
        """Take statistics of observations before training, if there are too few yet.

        Training begins with new episodes.

        Args:
            normalizers: Normaliser of each module that takes them; None: it has none.
            num_steps: Steps of each environment per rollout.
            acting: Chooses the actions.

        Raises:
            TrainingError: If every step of a rollout was lost, or nobody acts of whom there are too
                few; else this would never end.
        """
        waiting = {
            key: own
            for key, own in normalizers.items()
            if own and (own.is_waiting or not own.frozen)
        }
        if waiting:
            make_collector = partial(self.make_collector, num_steps, acting, "normalization/")
            locate(BEGIN_STATISTICS)(waiting, make_collector, acting)


def make_builder(context: BuildContext[Any]) -> AlgorithmBuilder[Any]:
    """The builder that the settings of an algorithm name.

    Raises:
        ConfigError: If it is none, or they name a runner, as before there were builders.
    """
    old = getattr(context.algorithm, "runner_class", None)
    if old is not None:
        raise ConfigError(
            "algorithm",
            "runner_class is no longer read; expected builder_class, the name of a subclass of "
            "maze_train.AlgorithmBuilder",
            old,
        )
    path = context.algorithm.builder_class
    builder_class = locate(path, key="algorithm")
    if not (isinstance(builder_class, type) and issubclass(builder_class, AlgorithmBuilder)):
        problem = "builder_class: expected a subclass of maze_train.AlgorithmBuilder"
        raise ConfigError("algorithm", problem, path)
    return builder_class(context)
