"""Settings of the runners, and the configuration of a whole run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maze_train.core.checks import MOST_THREADS, absolute_path, check_at_least, check_fields
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.targets import Given, check_targets, locate
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import GradientSettings, LearnerGroupConfig, Schedule
from maze_train.nets.config import ModelConfig
from maze_train.tracking.config import TrackingConfig
from maze_train.training.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    PolicyConfig,
)

if TYPE_CHECKING:
    from maze_train.workers.places import Place


AUTO = "auto"
"""Value of `resume`: continue the run in `run_dir` if there is one."""

CHOOSE_ENV = "choose one: env=<registered id> or env._target_=<your class or factory>"


@dataclass(kw_only=True)
class RunnerConfig(Settings):
    """Base of the settings of a runner: where a run takes place."""

    name: ClassVar[str] = ""
    """Name of the runner, as in `runner=<name>`."""

    place_class: ClassVar[str] = "maze_train.workers.places.ThisProcess"
    """Dotted path of the `Place` where workers live."""

    concurrency: int = 0
    """Environments that collect experience in parallel; 0: the number that suits the algorithm, 8
    or for ES 64. >= 0."""

    envs_per_actor: int = 0
    """Environments of each actor of A2C and PPO, a divisor of `concurrency`; an actor is a copy of
    the policy that collects whole rollouts where its environments are, with one exchange per
    update. Numbers depend on it, not on how many workers share out the actors. 0: no actors; the
    policy of the learner acts in all environments, with one exchange per step. >= 0."""

    torch_threads: int = 1
    """Threads of PyTorch in the learner; more than 1 pays for large networks and batches only;
    0: leave PyTorch's own choice. In [0, 1024]."""

    max_wall_time_s: float = 0.0
    """Seconds after which training stops (at the end of an update), those before a run was
    continued included; 0: no limit."""

    deterministic: bool = False
    """Whether PyTorch uses deterministic algorithms only, so that a GPU gives the same numbers
    again; slower. An operation that has none ends the run with an error."""

    detect_anomaly: bool = False
    """Whether autograd looks for NaN at each step back, and names the operation that it comes from;
    several times slower."""

    dataset: str | dict[str, Any] | None = None
    """Recorded episodes, for algorithms that learn from them (bc): a directory,
    `minari:<id of a Minari data set>`, or `{_target_: my_package.function, key: value}`, which
    gives a `maze_train.TrajectoryDataset`."""

    check_repeatability: Literal["auto", "never"] = "auto"
    """Whether a new run examines its environment in a throw-away process beside the first updates:
    whether it repeats an episode from its seed and actions, which an exact resume needs, and what
    environments of one process share. auto: on Linux, unless the run has a single environment."""

    fast_dev_run: bool = False
    """One short iteration of everything (collect, update, evaluate, write), as a trial: a few steps
    of each environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dataset, str):
            self.dataset = absolute_path("dataset", self.dataset)
        check_fields(self, 0, "concurrency", "envs_per_actor", "max_wall_time_s")
        check_fields(self, 0, "torch_threads", maximum=MOST_THREADS)

    def place(self) -> Place:
        """The place where the workers of the run live; it gets what not all runners have."""
        shared = {field.name for field in fields(RunnerConfig)}
        own = [field.name for field in fields(self) if field.name not in shared]
        settings = {name.replace("worker_timeout", "timeout"): getattr(self, name) for name in own}
        place: Place = locate(self.place_class)(**settings)
        return place


@dataclass(kw_only=True)
class DevRunnerConfig(RunnerConfig):
    """Everything in one process: the easiest to debug, and the fastest for cheap environments."""

    name: ClassVar[str] = "dev"


@dataclass(kw_only=True)
class RemoteRunnerConfig(RunnerConfig):
    """Base of the settings of runners whose workers live elsewhere."""

    n_workers: int = 0
    """Processes that step environments, several environments each; 0: one per core (`ray`: the
    number that there is room for)."""

    worker_timeout_s: float = 300.0
    """Seconds without an answer after which a worker counts as hung. > 0."""

    on_worker_failure: Literal["fail", "restart"] = "fail"
    """Reaction when a worker raises, dies or hangs: fail: the run ends; restart: the worker is
    started again and its environments are put back where they were, or, where that fails too, begin
    new episodes, and the lost ones are counted; learners repeat the update."""

    max_worker_restarts: int = 10
    """Restarts of workers, of training or of an evaluator, after which the run ends. >= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_workers", "max_worker_restarts")
        check_at_least("worker_timeout_s", self.worker_timeout_s, 1e-3)


@dataclass(kw_only=True)
class LocalRunnerConfig(RemoteRunnerConfig):
    """Environments in worker processes on the cores of this machine; same numbers as `dev`."""

    name: ClassVar[str] = "local"
    place_class: ClassVar[str] = "maze_train.workers.process_pool.LocalProcesses"

    start_method: Literal["forkserver", "spawn", "fork"] = "forkserver"
    """Start method of worker processes."""


@dataclass(kw_only=True)
class TrainConfig(Settings):
    """Everything that defines a training run."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment: `env=<registered id>`, or `env._target_=<class or factory>`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The networks."""

    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    """Policies by id, where the environment has several agents, such as `{wolf: {agents: [wolf_*]},
    sheep: {agents: [sheep], model: {hidden_sizes: [32]}}}`; empty: agents with the same spaces
    share one."""

    policies_to_train: list[str] | None = None
    """Ids of the policies that learn; null: all that are not frozen."""

    algorithm: AlgorithmConfig
    """The algorithm: `algorithm=<name>`."""

    runner: RunnerConfig = field(default_factory=DevRunnerConfig)
    """Place of the run: `runner=<name>`."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation and selection of the best policy."""

    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    """Progress display and files of metrics."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints; a run can be continued from them."""

    learner_group: LearnerGroupConfig = field(default_factory=LearnerGroupConfig)
    """The learners."""

    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """Called while the run continues, each `{_target_: my_package.MyCallback, key: value}`; for
    example `{_target_: maze_train.StopAtReturn, threshold: 475}`."""

    seed: int | None = None
    """Seed of every random stream, >= 0; null: drawn at the start and written to config.yaml."""

    total_steps: int | None = None
    """Environment steps after which training stops, at the end of an update; 0: no limit; null:
    100,000, or no limit for bc, which counts the recorded steps that it learned from."""

    run_dir: str | None = None
    """Directory of the run; null: outputs/<env>-<algorithm>-<runner>/<date>_<time>, and in a sweep
    (-m) <directory of the sweep>/<number of the job>."""

    base_run: str | None = None
    """Directory of a run, or of a saved policy, whose policy training starts from, such as one of
    bc, with its networks; a critic is taken over where there is one of the same kind. `<run>@final`
    and `<run>@epoch_<n>` name other policies than the best one, hf://<owner>/<name> one on the
    Hugging Face hub. null: new weights."""

    resume: str | None = None
    """Directory of a run that is continued, or of one of its checkpoints; auto: continue the run in
    run_dir if there is one, else start it; null: start a new run."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package, PyTorch and gymnasium that the configuration of the run in
    `resume` or `base_run` may import if another user made it, such as `[my_envs, my_nets]`: their
    code is run."""

    moved: list[str] = field(default_factory=list)
    """Settings whose files or runs have moved, such as `[env.kwargs.net_file]`: on resume they may
    name another place. Not needed if the content is the same as when the run began."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_experience()
        if self.seed is not None:
            check_at_least("seed", self.seed, 0)
        check_targets("callbacks", self.callbacks)
        if self.resume == AUTO and self.run_dir is None:
            raise ConfigError("resume", "needs a fixed directory: set run_dir", self.resume)
        self._directories()
        total_steps = self._total_steps
        check_at_least("total_steps", total_steps, 0)
        limits = (total_steps, self.algorithm.n_epochs, self.algorithm.patience)
        if not any(limits) and not self.runner.max_wall_time_s:
            raise ConfigError(
                "total_steps",
                "nothing would end this run; set total_steps, algorithm.n_epochs, "
                "algorithm.patience or runner.max_wall_time_s",
                total_steps,
            )
        self._check_fits_algorithm()
        try:
            self.algorithm.check_concurrency(self._concurrency)
        except ConfigError as error:
            raise error.below("algorithm") from None

    def check_start(self) -> None:
        """Refuse to train where nothing would be learned, or schedules have no end that is known.

        What such a run has left, its policy and its checkpoints, can be read all the same.

        Raises:
            ConfigError: If the run is too short, or a schedule goes by the share of a run that only
                patience ends.
        """
        algorithm = self.algorithm
        if not self.runner.fast_dev_run:
            algorithm.check_total_steps(self._total_steps, self._concurrency)
        if self._total_steps or algorithm.n_epochs or self.runner.max_wall_time_s:
            return
        settings = {"algorithm": algorithm}
        if isinstance(algorithm, GradientSettings):
            for module_id in algorithm.overrides:
                settings[f"algorithm.overrides.{module_id}"] = algorithm.for_module(module_id)
        for place, own in settings.items():
            for key, value in own.values_over_time.items():
                is_known = not isinstance(value, Schedule) or value.by != "progress"
                if is_known or len({*value.values}) == 1:
                    continue
                raise ConfigError(
                    f"{place}.{key}",
                    "goes by the share of the run, which is not known where only "
                    "algorithm.patience ends it: set total_steps, the most steps that it may take, "
                    "or a value that stays as it is or goes by env_steps or updates",
                    value.points,
                )

    def _check_fits_algorithm(self) -> None:
        """Refuse learners and actors that the algorithm does not have."""
        algorithm, learners, actors = self.algorithm, self.learner_group, self.runner.envs_per_actor
        name, concurrency = algorithm.name, self._concurrency
        for key, value, is_wrong, problem in (
            (
                "learner_group.n_learners",
                learners.n_learners,
                learners.n_learners > 1 and not algorithm.can_share_minibatches,
                f"{name} needs one learner: its workers do the work; expected 1",
            ),
            (
                "learner_group.device",
                learners.device,
                learners.device not in (None, "cpu", "auto") and not algorithm.uses_accelerators,
                f"{name} has no gradients of networks that a GPU could compute; expected cpu",
            ),
            (
                "learner_group.queue_size",
                learners.queue_size,
                learners.queue_size and not algorithm.can_learn_meanwhile,
                f"{name} acts with the weights that learn, and waits for each update; expected 0, "
                "or algorithm=impala",
            ),
            (
                "runner.envs_per_actor",
                actors,
                actors and not algorithm.can_have_actors,
                f"a2c and ppo have such actors, {name} has not; expected 0",
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

    def with_defaults(self) -> TrainConfig:
        """A copy with the defaults of the algorithm filled in, and directories as absolute paths.

        An environment may change the working directory.
        """
        filled: dict[str, Any] = self._directories()
        filled["runner"] = replace(self.runner, concurrency=self._concurrency)
        models = (self.model, *(policy.model for policy in self.policies.values()))
        is_recurrent = any(model is not None and model.rnn is not None for model in models)
        filled["algorithm"] = self.algorithm.with_model_defaults(is_recurrent)
        return replace(self, total_steps=self._total_steps, **filled)

    @property
    def _total_steps(self) -> int:
        given = self.total_steps
        return self.algorithm.default_total_steps if given is None else given

    @property
    def _concurrency(self) -> int:
        return self.runner.concurrency or self.algorithm.default_concurrency

    def _directories(self) -> dict[str, Any]:
        """The directories that are named, as absolute paths."""
        named = {key: getattr(self, key) for key in ("run_dir", "base_run", "resume")}
        return {
            key: absolute_path(key, name)
            for key, name in named.items()
            if name is not None and (key, name) != ("resume", AUTO)
        }

    def _check_experience(self) -> None:
        """Refuse an algorithm without its source of experience, or with another one."""
        name, dataset = self.algorithm.name, self.runner.dataset
        if self.algorithm.learns_from == "dataset":
            if dataset is None:
                raise ConfigError(
                    "runner.dataset",
                    f"{name} learns from recorded episodes: set it to the directory of a data set "
                    "(`maze-run -cn rollout ... record=true` writes one) or to minari:<id>",
                )
            return
        if self.env.id is None and self.env.target is None:
            raise ConfigError("env", CHOOSE_ENV)
        is_made = isinstance(self.env.target, Given) and self.env.target.is_made()
        for key in ("n_episodes", "final_episodes") if is_made else ():
            if getattr(self.evaluation, key):
                problem = (
                    "the vector environment that was given is for training alone; expected 0, or a "
                    "class or function that makes one, with env.backend=native"
                )
                raise ConfigError(f"evaluation.{key}", problem, getattr(self.evaluation, key))
        if self.evaluation.metric.startswith("validation/") and not self.evaluation.evaluators:
            problem = f"not reported: {name} has no validation data; leave it out"
            raise ConfigError("evaluation.metric", problem, self.evaluation.metric)
        if dataset is not None:
            raise ConfigError(
                "runner.dataset",
                f"{name} learns in environments: leave it out, or choose algorithm=bc",
                dataset,
            )


@dataclass(kw_only=True)
class RayRunnerConfig(RemoteRunnerConfig):
    """Workers as actors of a Ray cluster, on one machine or many; same numbers as `dev`."""

    name: ClassVar[str] = "ray"
    place_class: ClassVar[str] = "maze_train.workers.ray_pool.RayPlace"

    address: str = "auto"
    """`local`: starts Ray on this machine for the run; `<head>:<port>`: a cluster that runs;
    `auto`: that of this machine, or of RAY_ADDRESS; without one as `local`."""

    cpus_per_worker: float = 1.0
    """CPUs of the cluster that are reserved for a worker, > 0."""

    gpus_per_worker: float = 0.0
    """GPUs that are reserved for a worker, or a part of one. >= 0."""

    cpus_per_learner: float = 1.0
    """CPUs that are reserved for a learner of `learner_group`, but the first one, which is in the
    process of the run. > 0."""

    gpus_per_learner: float = 0.0
    """GPUs that are reserved for such a learner. >= 0."""

    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How workers are placed: PACK: on few machines; SPREAD: on many; STRICT_PACK: on one;
    STRICT_SPREAD: one on each."""

    working_dir: str | None = None
    """Folder with your own modules, which is sent to all machines; null: they are installed there,
    or lie in a folder that the machines share."""

    worker_output: bool = False
    """Whether what workers print, and what Ray reports of its machines, appears on the console."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cpus_per_worker", "cpus_per_learner"):
            check_at_least(name, getattr(self, name), 1e-3)
        check_fields(self, 0, "gpus_per_worker", "gpus_per_learner")
        if self.working_dir is not None:
            self.working_dir = absolute_path("working_dir", self.working_dir)
        if self.address.startswith("ray://"):
            raise ConfigError(
                "address",
                "a client outside of the cluster is not supported: start the run on one of its "
                "machines, or with `ray job submit`; expected auto, local or <head>:<port>",
                self.address,
            )
