"""Settings shared by all algorithms and runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from maze_train.core.checks import absolute_path, check_at_least, check_fields
from maze_train.core.conversion import ON_RESUME, Settings
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.targets import TARGET, check_targets, is_target
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import OptimizerSettings
from maze_train.nets.config import ModelConfig

SMALLER_IS_BETTER = ("box_mean_abs_deviation", "discrete_action_rank")
"""Metrics for which smaller values are better, in addition to losses."""

RANDOM = "random"
"""Name of the policy that samples uniformly from the legal actions."""

RANDOM_OPPONENT = MappingProxyType({RANDOM: RANDOM})
"""Default of `evaluation.opponents` in zero-sum environments."""

DRY_RUN_STEPS = 10
"""Maximum number of steps per environment in a dry run (`runner.fast_dev_run`)."""

TRIAL_BATCH = 256
"""Maximum minibatch size in a dry run."""


SNAPSHOT = "@"
"""Separator between policy ID and number in the IDs of snapshots."""


@dataclass(kw_only=True)
class OpponentsConfig(Settings):
    """Settings of self-play against snapshots (earlier versions) of a policy."""

    add_every: int = 10
    """Epochs between snapshots; 0: snapshots are only added by `at_win_rate`. The first snapshot is
    the initial policy."""

    at_win_rate: float = 0.0
    """Win rate at which the next snapshot is added, over the episodes since the last snapshot; 0:
    never. A win is an episode in which the return (of the team, see `env.teams`) exceeds the return
    of the opponent; a draw counts 0.5."""

    least_episodes: int = 50
    """Minimum number of episodes against snapshots to compute the win rate (>= 1)."""

    keep: int = 20
    """Number of newest snapshots to keep (>= 1)."""

    draw: Literal["latest", "uniform", "by_strength"] = "uniform"
    """Sampling of opponents: latest: the newest snapshot; uniform: all with equal probability;
    by_strength: with weight (1 - w)^2, where w is the win rate against the snapshot."""

    share: float = 0.5
    """Fraction of episodes against snapshots, in [0, 1]; in the other episodes, the policy controls
    all agents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "add_every")
        check_fields(self, 0, "at_win_rate", "share", maximum=1)
        check_fields(self, 1, "keep", "least_episodes")
        if not self.add_every and not self.at_win_rate:
            problem = "no snapshots would be added; set add_every or at_win_rate"
            raise ConfigError("add_every", problem, self.add_every)


@dataclass(kw_only=True)
class PolicyConfig(Settings):
    """Settings of a policy in a multi-agent environment."""

    agents: list[str] = field(default_factory=list)
    """Agents that the policy controls: names, or patterns such as `agent_*`."""

    model: ModelConfig | None = None
    """Network settings that replace `model` for this policy; null: use `model`."""

    source: str | dict[str, Any] | None = None
    """Source of the policy. null: new networks; directory of a run or of a saved policy: load
    networks and weights, with `:<policy>` appended if the run has several policies (`<run>:wolf`);
    random: sample uniformly from the legal actions; `{_target_: my_package.MyPolicy, key: value}`:
    a function of the observation and action space of the agents that returns an acting module, an
    object with a method `act(observation)`, or a function of one observation."""

    frozen: bool = False
    """Whether the policy is frozen. Policies without networks are always frozen."""

    opponents: OpponentsConfig | None = None
    """Self-play against earlier versions of the policy, which control some of its agents in
    training, such as `{add_every: 10, draw: uniform}`; null: no self-play."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None and (self.frozen or self.source == RANDOM):
            problem = "this policy is not trained, so it has no earlier versions; use null"
            raise ConfigError("opponents", problem, self.opponents.draw)
        if not self.agents:
            raise ConfigError("agents", "expected at least one agent, such as [agent_0]", [])
        if isinstance(self.source, dict) and not is_target(self.source):
            raise ConfigError("source", f"expected the key {TARGET}", self.source)
        if self.run is not None:
            self.source = absolute_path("source", self.run)
        elif self.source is not None and self.model is not None:
            problem = "policies from this source have no networks to configure; use null"
            raise ConfigError("model", problem, self.source)

    @property
    def is_fixed(self) -> bool:
        """Whether the settings exclude training of the policy."""
        return self.frozen or (self.source is not None and self.run is None)

    @property
    def run(self) -> str | None:
        """Directory of the run or saved policy that `source` names, if any."""
        is_run = isinstance(self.source, str) and self.source != RANDOM
        return str(self.source) if is_run else None


@dataclass(kw_only=True)
class AlgorithmConfig(OptimizerSettings):
    """Base class of the settings of an algorithm.

    Classes are referenced by dotted path, so that reading a configuration does not import them.
    """

    name: ClassVar[str] = ""
    """Name of the algorithm, as in `algorithm=<name>`."""

    learner_class: ClassVar[str] = ""
    """Dotted path of the `Learner` of the algorithm."""

    trainer_class: ClassVar[str] = ""
    """Dotted path of the `Trainer` of the algorithm."""

    model_builder: ClassVar[str] = ""
    """Dotted path of a function that builds the model from model config, observation space, action
    space, seed, and `model_settings`."""

    model_resolver: ClassVar[str] = "maze_train.nets.template.resolve"
    """Dotted path of a function that replaces null settings by defaults, given the model config and
    the flat observation space."""

    default_concurrency: ClassVar[int] = 8
    """Default of `runner.concurrency`."""

    default_total_steps: ClassVar[int] = 100_000
    """Default of `total_steps`; 0: no limit."""

    least_epoch_length: ClassVar[int] = 1
    """Minimum value of `epoch_length`."""

    learns_from: ClassVar[Literal["env", "dataset"]] = "env"
    """Source of experience: an environment or a dataset. With a dataset, the environment is
    optional and only used for evaluation."""

    supports_multi_agent: ClassVar[bool] = False
    """Whether the algorithm supports multi-agent environments."""

    has_snapshots: ClassVar[bool] = False
    """Whether the algorithm supports self-play against snapshots (`policies.<id>.opponents`)."""

    uses_accelerators: ClassVar[bool] = True
    """Whether the learner supports accelerators; otherwise `auto` selects the CPU."""
    can_share_minibatches: ClassVar[bool] = True
    """Whether losses are means over samples, so that minibatches can be sharded over several
    learners."""

    without_torchrun: ClassVar[str] = "its trainer does not exchange experience between processes"
    """Reason why the algorithm does not support torchrun; empty: supported."""

    shared_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that must be multiples of the number of torchrun processes."""

    can_have_actors: ClassVar[bool] = False
    """Whether the algorithm supports actors (`runner.envs_per_actor`)."""

    n_epochs: int = field(default=0, metadata=ON_RESUME)
    """Maximum number of epochs; 0: no limit (another limit must be set)."""

    epoch_length: int = 10
    """Updates per epoch (>= 1). Each epoch ends with evaluation, model selection and one row of
    metrics."""

    patience: int = field(default=0, metadata=ON_RESUME)
    """Number of evaluations without improvement after which training stops; 0: never."""

    device: str = field(default="cpu", metadata=ON_RESUME)
    """Device of the learner: cpu, cuda, cuda:1, mps, or auto (an accelerator if available)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_epochs", "patience")
        check_fields(self, self.least_epoch_length, "epoch_length")
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda", "mps", "xpu"):
            raise ConfigError("device", "expected cpu, cuda, cuda:<i>, mps or auto", self.device)

    def with_model_defaults(self, is_recurrent: bool) -> Self:
        """Return the settings with defaults that depend on the model.

        Args:
            is_recurrent: Whether a policy has recurrent layers.
        """
        return self

    @property
    def on_non_finite_step(self) -> Literal["raise", "skip"]:
        """Reaction to non-finite values of an environment, see `on_non_finite`."""
        return "raise" if self.on_non_finite == "raise" else "skip"

    @property
    def scales_rewards(self) -> bool | Literal["large"]:
        """Whether critics learn from scaled rewards; `large`: only large rewards are scaled."""
        return False

    @property
    def model_settings(self) -> dict[str, Any]:
        """Return additional keyword arguments for the model builder."""
        return {}

    @property
    def values_over_time(self) -> dict[str, Any]:
        """Return all settings with defaults filled in, including all possible schedules."""
        return vars(self)

    def shortened(self) -> AlgorithmConfig:
        """Return the settings of a dry run: one short epoch."""
        return replace(self, n_epochs=1, epoch_length=1)

    def check_total_steps(self, total_steps: int, concurrency: int) -> None:
        """Raise ConfigError if `total_steps` is too small for the settings; 0: no limit."""

    def steps_per_update(self, concurrency: int) -> int:
        """Return the environment steps of an update; 0 if unknown."""
        return 0

    def start_notes(self, concurrency: int) -> Iterable[str]:
        """Return notes about these settings to print at the start of a run."""
        return ()

    def check_run(self, env: EnvConfig, models: Mapping[str, ModelConfig]) -> None:
        """Raise ConfigError if the settings do not support the environment or the networks.

        Args:
            env: Settings of the environment.
            models: Settings of the networks by name, `model` and `policies.<id>.model`.
        """

    def check_concurrency(self, concurrency: int) -> None:
        """Raise ConfigError if the settings do not support `concurrency` parallel environments."""


@dataclass(kw_only=True)
class EvaluationConfig(Settings):
    """Settings of evaluation and model selection."""

    n_episodes: int = 10
    """Episodes per evaluation. 0 disables evaluation; the best policy is then selected by the
    training return."""

    interval: int = 1
    """Epochs between evaluations (>= 1); the last epoch is always evaluated."""

    interval_steps: int = 0
    """Environment steps between evaluations (>= 0), instead of `interval`. The policy is evaluated
    after the update that reaches a multiple; an update must not be longer. If an epoch has several
    evaluations, the row of metrics contains the last evaluation. 0: use `interval`."""

    concurrency: int = 0
    """Number of parallel environments during evaluation (>= 0), at most one per episode; 0 selects
    `runner.concurrency`, at most 10."""

    max_episode_steps: int | None = None
    """Maximum length of an evaluation episode (>= 0), in addition to the limit of the environment.
    null: 30,000 if the environment declares no limit; 0: no additional limit. The return of a
    truncated episode is the sum of rewards so far."""

    final_episodes: int = field(default=0, metadata=ON_RESUME)
    """Number of test episodes after training for both the last and the best policy, with separate
    seeds; 0: no test. Report these results: the best evaluation score is biased upwards, since this
    score is a maximum over evaluations."""

    deterministic: bool = True
    """Whether to take the most likely action. If false, actions are sampled."""

    metric: str = ""
    """Metric that selects the best policy, such as `eval/episode_length_mean` or
    `eval/<agent>/episode_return_mean`. Default: `eval/episode_return_mean`; with `opponents`,
    `eval/vs_<name>/return_mean` of the first opponent."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether to maximize or minimize the metric; auto: minimize losses, errors and ranks
    (`.../loss`, `box_mean_abs_deviation`, `discrete_action_rank`), maximize all others."""

    dump_interval: int = field(default=0, metadata=ON_RESUME)
    """Number of evaluations between dumps of the policy (`policies/epoch_<n>`); 0: no dumps."""

    dump_interval_steps: int = field(default=0, metadata=ON_RESUME)
    """Environment steps between dumps of the policy (`policies/step_<n>`, >= 0), instead of
    `dump_interval`; 0: use `dump_interval`."""

    evaluators: list[dict[str, Any]] = field(default_factory=list)
    """Custom evaluators, each `{_target_: my_package.MyEvaluator, key: value}` with keyword
    arguments of the constructor. Each evaluator is called with the policy, and the returned values
    are added to the metrics."""

    opponents: dict[str, Any] = field(default_factory=dict)
    """Opponents by name for multi-agent evaluation, such as `{first: <run>, random: random}`;
    values as in `policies.<id>.source`. The trained policies play `n_episodes` episodes against
    each opponent as each team (see `env.teams`; without teams, as each agent). Metrics are
    `eval/vs_<name>/win_rate`, `draw_rate`, `loss_rate` and `return_mean`. Set them in zero-sum
    games, where the mean return over agents is constant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_episodes", "final_episodes", "dump_interval", "concurrency")
        check_fields(self, 0, "interval_steps", "dump_interval_steps")
        check_one_interval(self, "interval", 1)
        check_one_interval(self, "dump_interval", 0)
        if self.max_episode_steps is not None:
            check_at_least("max_episode_steps", self.max_episode_steps, 0)
        check_fields(self, 1, "interval")
        self._check_opponents()
        if self.metric:
            check_selection(self)
        check_targets("evaluators", self.evaluators)

    def num_envs(self, concurrency: int) -> int:
        """Return the number of environments, given `runner.concurrency`."""
        return self.concurrency or min(concurrency, 10)

    def _check_opponents(self) -> None:
        """Check the opponents, and make their directories absolute."""
        if self.opponents and not self.n_episodes:
            raise ConfigError("opponents", "requires n_episodes > 0", list(self.opponents))
        found: dict[str, str | dict[str, Any]] = {}
        for name, source in self.opponents.items():
            key = f"opponents.{name}"
            if isinstance(source, str):
                found[name] = source if source == RANDOM else absolute_path(key, source)
            elif is_target(source):
                found[name] = source
            else:
                problem = "expected random, the directory of a run, or the key _target_"
                raise ConfigError(key, problem, source)
        self.opponents = found

    @property
    def selection_metric(self) -> str:
        """Metric that selects the best policy, with the default applied."""
        if self.opponents and not self.metric:
            return f"eval/vs_{next(iter(self.opponents))}/return_mean"
        prefix = "eval" if self.n_episodes > 0 else "train"
        return self.metric or f"{prefix}/episode_return_mean"

    def metric_of_run(self, has_env: bool, losses: Sequence[str]) -> str:
        """Return the metric that selects the best policy; without evaluation episodes, a loss.

        Args:
            has_env: Whether the run has an environment.
            losses: Losses on the dataset, of which the first is used for selection; empty if an
                environment is used for training.
        """
        is_played = has_env and self.n_episodes
        return self.selection_metric if self.metric or is_played or not losses else losses[0]

    def selection_mode(self, metric: str) -> Literal["max", "min"]:
        """Return whether larger or smaller values of a metric are better."""
        if self.mode != "auto":
            return self.mode
        names = metric.split("/")[1:]  # `train/<policy>/<part>/<name>` has several names.
        is_less = any(name.endswith("loss") or name in SMALLER_IS_BETTER for name in names)
        return "min" if is_less or names[-1:] == ["loss_rate"] else "max"


@dataclass(kw_only=True)
class CheckpointConfig(Settings):
    """Settings of checkpoints for resuming runs."""

    interval: int = 1
    """Epochs between checkpoints; 0: no checkpoints at the ends of epochs."""

    interval_steps: int = 0
    """Environment steps between checkpoints (>= 0), instead of `interval`. A checkpoint is written
    after the update that reaches a multiple, also within an epoch. 0: use `interval`."""

    interval_minutes: float = 0.0
    """Maximum time between checkpoints in minutes, also within an epoch; 0: no limit. If all
    intervals are 0, checkpoints are disabled. Otherwise, a checkpoint is also written at the end of
    the run and after a signal."""

    keep_last: int = 2
    """Number of newest checkpoints to keep (>= 1)."""

    keep_best: int = 0
    """Number of additional checkpoints with the best scores to keep (>= 0)."""

    allow_new_episodes: bool = False
    """Whether a resumed run may start new episodes in environments whose state cannot be restored.
    If false, resuming such a run fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "interval", "interval_steps", "interval_minutes", "keep_best")
        check_one_interval(self, "interval", 1, 0)
        check_at_least("keep_last", self.keep_last, 1)

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are written."""
        return self.interval > 0 or self.interval_steps > 0 or self.interval_minutes > 0


def check_one_interval(settings: Settings, key: str, *defaults: int) -> None:
    """Raise ConfigError if an interval is set both in epochs and in steps."""
    values = vars(settings)
    if values[f"{key}_steps"] and values[key] not in defaults:
        problem = f"cannot be combined with {key} = {values[key]}; set one of the two"
        raise ConfigError(f"{key}_steps", problem, values[f"{key}_steps"])


@dataclass(kw_only=True)
class StageConfig(Settings):
    """Stage of a curriculum: start condition, and changes to the environments."""

    steps: int | None = None
    """Number of environment steps (> 0) after which the stage begins, at the end of an update."""

    above: float | None = None
    """The stage begins when the mean of the metric in the previous stage is at least this value."""

    below: float | None = None
    """The stage begins when the mean of the metric in the previous stage is at most this value."""

    back: float | None = None
    """The curriculum returns to the previous stage when the mean of the metric in this stage is at
    most (with `above`) or at least (with `below`) this value. null: never."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes of the environments to set, such as `{size: 5}`."""

    calls: dict[str, Any] = field(default_factory=dict)
    """Methods of the environments to call, each with an argument, a list of arguments, or a mapping
    of keyword arguments, such as `{set_level: 3, set_wind: {speed: 1.5}}`."""

    @property
    def has_condition(self) -> bool:
        """Whether the stage has a condition: `steps`, `above` or `below`."""
        return any(x is not None for x in (self.steps, self.above, self.below))

    @property
    def names(self) -> set[str]:
        """Names of the attributes and methods."""
        return {*self.attributes, *self.calls}

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(x is not None for x in (self.steps, self.above, self.below)) > 1:
            raise ConfigError("", "set only one of steps, above and below")
        if self.steps is not None:
            check_at_least("steps", self.steps, 1)
        if self.back is None:
            return
        is_between = (self.above is not None and self.back < self.above) or (
            self.below is not None and self.back > self.below
        )
        if not is_between:
            raise ConfigError("back", "expected less than above, or more than below", self.back)


@dataclass(kw_only=True)
class CurriculumConfig(Settings):
    """Settings of a curriculum: changes of the training environments in stages."""

    metric: str = "train/success_rate"
    """Metric that decides when stages with `above` or `below` begin."""

    window: int = 3
    """Number of most recent epochs of a stage over which the metric is averaged (>= 1). Epochs
    without this metric are skipped."""

    evaluate: bool = False
    """Whether to also change evaluation environments. If false, they keep their initial
    settings."""

    stages: list[StageConfig] = field(default_factory=list)
    """The stages in order, each `{steps: 20000}` or `{above: 0.8}`, optionally `back: 0.3`, with
    `attributes: {size: 5}` or `calls: {set_level: 3}`. The first stage begins at the start of the
    run and has no condition. Empty: no curriculum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("window", self.window, 1)
        goes_back, steps = any(stage.back is not None for stage in self.stages), 0
        for i, stage in enumerate(self.stages):
            key = f"stages[{i}]"
            if stage.has_condition != (i > 0):
                found = "has no" if i else "has a"
                problem = (
                    f"{found} condition (steps, above or below); required for all but the first "
                    "stage"
                )
                raise ConfigError(key, problem)
            if stage.steps is not None and stage.steps <= steps:
                raise ConfigError(f"{key}.steps", f"expected more than {steps}", stage.steps)
            steps = stage.steps or steps
            if i and not stage.names:
                raise ConfigError(key, "has no effect; set attributes or calls")
            if goes_back and stage.names != self.stages[0].names:
                problem = (
                    "with `back`, all stages must set the same names as the first stage: "
                    f"{sorted(self.stages[0].names)}"
                )
                raise ConfigError(key, problem, sorted(stage.names))


OF_EPISODES = (
    "episode_return_mean",
    "episode_return_std",
    "episode_return_min",
    "episode_return_max",
    "episode_length_mean",
    "episodes",
    "success_rate",
)
"""Metrics of a `RolloutEvaluator`, without prefix."""

AGAINST_OPPONENTS = ("win_rate", "draw_rate", "loss_rate", "return_mean")
"""Metrics against an opponent, without the prefix `eval/vs_<name>/`."""

OF_AGENT = ("eval/{}/episode_return_mean", "eval/{}/success_rate")
"""Metrics of an agent in multi-agent training, without its name."""

OPEN = ("train/", "validation/", "league/", "eval/info/")
"""Prefixes of metrics that can only be checked at the first evaluation."""


def evaluation_metrics(config: EvaluationConfig, agents: Iterable[str] = ()) -> list[str]:
    """Return the names of evaluation metrics, except metrics of custom evaluators.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents in multi-agent training.
    """
    if not config.n_episodes:
        return []
    known = [f"eval/{name}" for name in OF_EPISODES]
    known += [name.format(agent) for agent in agents for name in OF_AGENT]
    return known + [
        f"eval/vs_{foe}/{name}" for foe in config.opponents for name in AGAINST_OPPONENTS
    ]


def check_selection(config: EvaluationConfig, agents: Sequence[str] | None = None) -> None:
    """Check the selection metric against the metrics that are known before training.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents; empty: single agent; None: unknown.

    Raises:
        ConfigError: If the metric will not be reported.
    """
    metric = config.metric
    if not metric or config.evaluators or metric.startswith(OPEN):
        return
    known = evaluation_metrics(config, ["<agent>"] if agents is None else agents)
    of_agent = "|".join(name.format(".+") for name in OF_AGENT)
    may_be_of_agent = agents is None and known and re.fullmatch(of_agent, metric)
    if metric not in known and not may_be_of_agent:
        is_return = re.search("return|rew", metric) is not None  # Probably a mean return.
        means = [name for name in known if is_return and name.endswith("return_mean")]
        hint = did_you_mean(means[:1] or nearest(metric, known, count=1), "", " ")
        reported = ", ".join(known) or "only train/... (there are no evaluation episodes)"
        key = "metric" if agents is None else "evaluation.metric"
        raise ConfigError(key, f"not reported; {hint}reported: {reported}", metric)
