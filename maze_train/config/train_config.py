"""Settings of the runners, and the configuration of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maze_train.core.checks import MAX_THREADS, absolute_path, check_at_least, check_fields
from maze_train.core.conversion import NEW_RUN, NO_SETTING, ON_RESUME, Settings
from maze_train.core.errors import ConfigError
from maze_train.core.names import VALIDATION_LOSS
from maze_train.core.targets import InlineObject, check_targets, is_within, locate
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import GradientSettings, LearnerGroupConfig, Schedule
from maze_train.nets.config import ModelConfig
from maze_train.tracking.config import TrackingConfig
from maze_train.training.config import (
    DRY_RUN_STEPS,
    AlgorithmConfig,
    CheckpointConfig,
    CurriculumConfig,
    EvaluationConfig,
    PolicyConfig,
)

if TYPE_CHECKING:
    from maze_train.workers.backends import WorkerBackend


AUTO = "auto"
"""Value of `resume`: resume the run in `run_dir` if it exists."""

CHOOSE_ENV = "choose one: env=<registered id> or env._target_=<your class or factory>"


@dataclass(kw_only=True)
class RunnerConfig(Settings):
    """Base class of the settings of a runner, which executes a run."""

    name: ClassVar[str] = ""
    """Name of the runner, as in `runner=<name>`."""

    backend_class: ClassVar[str] = "maze_train.workers.backends.ThisProcess"
    """Dotted path of the `WorkerBackend` that creates the workers."""

    concurrency: int = field(default=0, metadata=NEW_RUN)
    """Number of parallel environments (>= 0); 0 selects 8 (64 for ES)."""

    envs_per_actor: int = field(default=0, metadata=NEW_RUN)
    """Environments per actor for A2C and PPO (>= 0), a divisor of `concurrency`. An actor has a
    copy of the policy and collects whole rollouts in a worker, with one exchange per update.
    Results depend on this setting, but not on the assignment of actors to workers. 0: no actors;
    the learner's policy acts in all environments, with one exchange per step."""

    torch_threads: int = 1
    """PyTorch threads in the learner, in [0, 1024]. Values above 1 are only faster for large
    networks and batches. 0: PyTorch's default."""

    max_wall_time_s: float = 0.0
    """Maximum training time in seconds, including the time before the run was resumed; training
    stops at the end of an update. 0: no limit."""

    deterministic: bool = False
    """Whether to use only deterministic PyTorch algorithms, for reproducible results on a GPU. This
    is slower, and operations without a deterministic implementation raise an error."""

    detect_anomaly: bool = False
    """Whether to enable autograd anomaly detection: a NaN in the backward pass raises an error with
    the name of the operation. Updates are several times slower."""

    dataset: str | dict[str, Any] | None = None
    """Dataset for algorithms that learn from recorded episodes (bc): a directory,
    `minari:<id of a Minari dataset>`, or `{_target_: my_package.function, key: value}` with a
    function that returns a `maze_train.TrajectoryDataset`."""

    fast_dev_run: bool = field(default=False, metadata=NEW_RUN)
    """Smoke test: one short epoch (collection, update, evaluation, checkpoint) with a few steps per
    environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dataset, str):
            self.dataset = absolute_path("dataset", self.dataset)
        check_fields(self, 0, "concurrency", "envs_per_actor", "max_wall_time_s")
        check_fields(self, 0, "torch_threads", maximum=MAX_THREADS)

    def make_backend(self) -> WorkerBackend:
        """Create the backend of the workers from the settings of this runner."""
        shared = {field.name for field in fields(RunnerConfig)}
        own = [field.name for field in fields(self) if field.name not in shared]
        settings = {name.replace("worker_timeout", "timeout"): vars(self)[name] for name in own}
        backend: WorkerBackend = locate(self.backend_class)(**settings)
        return backend


@dataclass(kw_only=True)
class DevRunnerConfig(RunnerConfig):
    """Everything in one process: easy to debug, and fastest for cheap environments."""

    name: ClassVar[str] = "dev"


@dataclass(kw_only=True)
class RemoteRunnerConfig(RunnerConfig):
    """Base class of settings of runners with workers in other processes."""

    n_workers: int = 0
    """Number of worker processes that step environments; 0: one per core (`ray`: as many as the
    cluster has resources for)."""

    worker_timeout_s: float = 300.0
    """Time in seconds (> 0) without a reply after which a worker is killed."""

    on_worker_failure: Literal["fail", "restart"] = "fail"
    """What to do if a worker raises an error, dies or hangs: fail: stop the run; restart: restart
    the worker and restore its environments. If an environment cannot be restored, its episode is
    dropped (and counted), and a new episode starts. If a learner fails, the update is repeated."""

    max_worker_restarts: int = 10
    """Maximum number of worker restarts (>= 0), separately for training and for each evaluator. The
    next failure stops the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_workers", "max_worker_restarts")
        check_at_least("worker_timeout_s", self.worker_timeout_s, 1e-3)


@dataclass(kw_only=True)
class LocalRunnerConfig(RemoteRunnerConfig):
    """Environments in worker processes on this machine; results are the same as with `dev`."""

    name: ClassVar[str] = "local"
    backend_class: ClassVar[str] = "maze_train.workers.process_pool.LocalProcesses"

    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    """Start method of worker processes."""


@dataclass(kw_only=True)
class TrainConfig(Settings):
    """Configuration of a training run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment: `env=<registered id>`, or `env._target_=<class or factory>`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The networks."""

    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """Policies of multi-agent environments, keyed by id, such as `{wolf: {agents: [wolf_*]},
    sheep: {agents: [sheep], model: {hidden_sizes: [32]}}}`; empty: agents with identical spaces
    share a policy."""

    policies_to_train: list[str] | None = None
    """Ids of the policies to train; null: all policies that are not frozen."""

    algorithm: AlgorithmConfig
    """The algorithm: `algorithm=<name>`."""

    runner: RunnerConfig = field(default_factory=DevRunnerConfig, metadata=ON_RESUME)
    """Runner (`runner=<name>`), which executes the run in one process, in several processes, or on
    Ray."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation and selection of the best policy."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig, metadata=ON_RESUME)
    """Progress display and metrics writers."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=ON_RESUME)
    """Checkpoints for resuming the run."""

    learner_group: LearnerGroupConfig = field(
        default_factory=LearnerGroupConfig, metadata=ON_RESUME
    )
    """Number of learners, their devices, and their queue."""

    callbacks: list[dict[str, Any]] = field(default_factory=list, metadata=ON_RESUME)
    """Callbacks invoked during training, each `{_target_: my_package.MyCallback, key: value}`, such
    as `{_target_: maze_train.StopAtReturn, threshold: 475}`."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Changes to the environments in stages."""

    seed: int | None = None
    """Seed of all random number generators (>= 0); null: drawn at the start and written to
    config.yaml."""

    total_steps: int | None = field(default=None, metadata=ON_RESUME)
    """Number of environment steps of training (for bc, recorded steps); training stops at the end
    of an update. 0: no limit; null: 100,000 (no limit for bc)."""

    run_dir: str | None = field(default=None, metadata=ON_RESUME)
    """Directory of the run; null: outputs/<env>-<algorithm>-<runner>/<date>_<time>, and in a sweep
    (-m) <sweep directory>/<job number>."""

    base_run: str | None = None
    """Policy from which training starts, for example a policy trained with bc: a run directory
    (selects the best policy), the directory of a saved policy, `<run>@final`, `<run>@epoch_<n>`, or
    hf://<owner>/<name> for a policy on the Hugging Face hub. The networks of the run have the
    architecture of this policy; critic weights are loaded if both critics are of the same kind.
    null: new weights."""

    resume: str | None = field(default=None, metadata=ON_RESUME)
    """Run to resume: a run directory, or the directory of a checkpoint; latest: the newest run in
    outputs/; auto: the run in run_dir if it exists, otherwise a new run; null: a new run."""

    trust: list[str] = field(default_factory=list, metadata=ON_RESUME)
    """Modules other than this package, PyTorch and gymnasium that the configuration of the run in
    `resume` or `base_run` may import if you did not create the run, such as `[my_envs, my_nets]`.
    Their code is executed."""

    moved: list[str] = field(default_factory=list, metadata=ON_RESUME)
    """Settings whose files or runs have moved, such as `[env.kwargs.net_file]`; the paths in these
    settings may change on resume. Not needed if the content is unchanged since the run started."""

    given: frozenset[str] = field(
        default=frozenset(), repr=False, compare=False, metadata=NO_SETTING
    )
    """Dotted names of the settings that the user set, also to their default. Not a setting."""

    def is_given(self, key: str) -> bool:
        """Return whether the user set a setting, or a part of it, also to its default."""
        return any(is_within(name, [key]) for name in self.given)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_experience()
        if self.seed is not None:
            check_at_least("seed", self.seed, 0)
        check_targets("callbacks", self.callbacks)
        if self.resume == AUTO and self.run_dir is None:
            raise ConfigError("resume", "requires a fixed directory; set run_dir", self.resume)
        self._fill_in()
        check_at_least("total_steps", self.total_steps or 0, 0)
        limits = (self.total_steps, self.algorithm.n_epochs, self.algorithm.patience)
        if not any(limits) and not self.runner.max_wall_time_s:
            raise ConfigError(
                "total_steps",
                "no limit is set, so the run would never end; set total_steps, algorithm.n_epochs, "
                "algorithm.patience or runner.max_wall_time_s",
                self.total_steps,
            )
        self._check_fits_algorithm()
        try:
            self.algorithm.check_concurrency(self.runner.concurrency)
        except ConfigError as error:
            raise error.below("algorithm") from None

    def check_start(self) -> None:
        """Check that the run is long enough for training, and that all schedules have a known end.

        This check is not part of `__post_init__`, so that results of earlier runs can be loaded.

        Raises:
            ConfigError: If the run is too short, or a schedule depends on the progress of a run
                without a limit other than `algorithm.patience`.
        """
        algorithm, interval = self.algorithm, self.evaluation.interval_steps
        if not self.runner.fast_dev_run:
            algorithm.check_total_steps(self.total_steps or 0, self.runner.concurrency)
        steps = algorithm.steps_per_update(self.runner.concurrency)
        if 0 < interval < steps and not self.resume:
            problem = f"shorter than an update of {steps:,} steps; use at least {steps:,}"
            raise ConfigError("evaluation.interval_steps", problem, interval)
        if self.total_steps or algorithm.n_epochs or self.runner.max_wall_time_s:
            return
        settings = {"algorithm": algorithm}
        if isinstance(algorithm, GradientSettings):
            for module_id in algorithm.overrides:
                settings[f"algorithm.overrides.{module_id}"] = algorithm.for_module(module_id)
        for section, own in settings.items():
            for key, value in own.values_over_time.items():
                is_known = not isinstance(value, Schedule) or value.by != "progress"
                if is_known or len({*value.values}) == 1:
                    continue
                raise ConfigError(
                    f"{section}.{key}",
                    "the schedule depends on the progress of the run, which is unknown if "
                    "algorithm.patience is the only limit; set total_steps, or use a constant "
                    "value or a schedule by env_steps or updates",
                    value.points,
                )

    def _check_fits_algorithm(self) -> None:
        """Check that the algorithm supports the settings of learners and actors."""
        algorithm, learners, actors = self.algorithm, self.learner_group, self.runner.envs_per_actor
        name, concurrency = algorithm.name, self.runner.concurrency
        for key, value, is_wrong, problem in (
            (
                "learner_group.n_learners",
                learners.n_learners,
                learners.n_learners > 1 and not algorithm.can_share_minibatches,
                f"{name} supports a single learner (its workers run in parallel); expected 1",
            ),
            (
                "learner_group.device",
                learners.device,
                learners.device not in (None, "cpu", "auto") and not algorithm.uses_accelerators,
                f"{name} computes no gradients and does not use a GPU; expected cpu",
            ),
            (
                "curriculum.stages",
                len(self.curriculum.stages),
                self.curriculum.stages and algorithm.learns_from != "env",
                f"{name} does not use environments in training; expected none",
            ),
            (
                "runner.envs_per_actor",
                actors,
                actors and not algorithm.can_have_actors,
                f"{name} does not support actors, only a2c and ppo do; expected 0",
            ),
            (
                "runner.envs_per_actor",
                actors,
                actors and concurrency % actors,
                f"expected a divisor of runner.concurrency = {concurrency}",
            ),
        ):
            if is_wrong:
                raise ConfigError(key, problem, value)

    def _fill_in(self) -> None:
        """Fill in the defaults of the algorithm and absolute directories.

        Relative paths are resolved because an environment may change the working directory.
        """
        for key in ("run_dir", "base_run", "resume"):
            name = vars(self)[key]
            if name is not None and (key, name) != ("resume", AUTO):
                setattr(self, key, absolute_path(key, name))
        if self.total_steps is None:
            self.total_steps = self.algorithm.default_total_steps
        if not self.runner.concurrency:
            concurrency = self.algorithm.default_concurrency
            self.runner = replace(self.runner, concurrency=concurrency)
        models = (self.model, *(policy.model for policy in self.policies.values()))
        is_recurrent = any(model is not None and model.rnn is not None for model in models)
        self.algorithm = self.algorithm.with_model_defaults(is_recurrent)

    @property
    def selection_metric(self) -> str:
        """Metric that selects the best policy."""
        has_env = self.env.id is not None or self.env.target is not None
        losses = [VALIDATION_LOSS] * (self.algorithm.learns_from == "dataset")
        return self.evaluation.metric_of_run(has_env, losses)

    def shortened(self) -> TrainConfig:
        """Return a copy with the shortened settings of a dry run (`runner.fast_dev_run`)."""
        if not self.runner.fast_dev_run:
            return self
        evaluation = self.evaluation
        limit = min(evaluation.max_episode_steps or DRY_RUN_STEPS, DRY_RUN_STEPS)
        return replace(
            self,
            algorithm=self.algorithm.shortened(),
            evaluation=replace(
                evaluation,
                n_episodes=min(2, evaluation.n_episodes),
                final_episodes=min(2, evaluation.final_episodes),
                max_episode_steps=limit,
            ),
            model=self.model.shortened(),
            policies={
                key: replace(policy, model=policy.model and policy.model.shortened())
                for key, policy in self.policies.items()
            },
        )

    def _check_experience(self) -> None:
        """Check that either an environment or a dataset is set, as the algorithm requires."""
        name, dataset = self.algorithm.name, self.runner.dataset
        if self.algorithm.learns_from == "dataset":
            if dataset is None:
                raise ConfigError(
                    "runner.dataset",
                    f"{name} learns from recorded episodes; set the directory of a dataset "
                    "(written by `maze-run rollout ... record=true`) or minari:<id>",
                )
            return
        if self.env.id is None and self.env.target is None:
            raise ConfigError("env", CHOOSE_ENV)
        is_instance = isinstance(self.env.target, InlineObject) and self.env.target.is_instance()
        for key in ("n_episodes", "final_episodes") if is_instance else ():
            if vars(self.evaluation)[key]:
                problem = (
                    "an instance of a vector environment is only used for training; use 0, or pass "
                    "a class or function that creates the environment, with env.backend=native"
                )
                raise ConfigError(f"evaluation.{key}", problem, vars(self.evaluation)[key])
        if self.evaluation.metric.startswith("validation/") and not self.evaluation.evaluators:
            problem = f"not reported: {name} has no validation data; remove this setting"
            raise ConfigError("evaluation.metric", problem, self.evaluation.metric)
        if dataset is not None:
            raise ConfigError(
                "runner.dataset",
                f"{name} trains in environments; remove this setting, or use algorithm=bc",
                dataset,
            )


@dataclass(kw_only=True)
class RayRunnerConfig(RemoteRunnerConfig):
    """Workers as Ray actors, on one machine or a cluster; results are the same as with `dev`."""

    name: ClassVar[str] = "ray"
    backend_class: ClassVar[str] = "maze_train.cluster.pool.RayBackend"

    address: str = "auto"
    """Ray cluster: `local`: start Ray on this machine for the run; `<head>:<port>`: a running
    cluster; `auto`: RAY_ADDRESS or the cluster of this machine, otherwise the same as `local`."""

    cpus_per_worker: float = 1.0
    """CPUs reserved per worker (> 0)."""

    gpus_per_worker: float = 0.0
    """GPUs reserved per worker (>= 0, may be fractional)."""

    cpus_per_learner: float = 1.0
    """CPUs reserved per learner of `learner_group` (> 0), except the first learner, which runs in
    the main process."""

    gpus_per_learner: float = 0.0
    """GPUs reserved per learner (>= 0), except the first learner."""

    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Placement of workers: PACK: on few machines; SPREAD: on many machines; STRICT_PACK: on one
    machine; STRICT_SPREAD: one worker per machine."""

    working_dir: str | None = None
    """Directory with your modules, which Ray copies to all machines. null: the modules must be
    installed on all machines or be in a shared directory."""

    worker_output: bool = False
    """Whether to show the output of workers and Ray's messages on the console."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus_per_worker", "cpus_per_learner"):
            check_at_least(name, vars(self)[name], 1e-3)
        check_fields(self, 0, "gpus_per_worker", "gpus_per_learner")
        if self.working_dir is not None:
            self.working_dir = absolute_path("working_dir", self.working_dir)
        if self.address.startswith("ray://"):
            raise ConfigError(
                "address",
                "Ray Client is not supported; start the run on a machine of the cluster, or with "
                "`ray job submit`; expected auto, local or <head>:<port>",
                self.address,
            )
