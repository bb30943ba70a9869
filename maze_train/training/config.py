"""Settings that every algorithm and every run has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from maze_train.core.checks import absolute_path, check_at_least, check_fields, check_positive
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.targets import TARGET, check_targets, is_target
from maze_train.learner.config import Schedule, check_schedule
from maze_train.nets.config import ModelConfig

SMALLER_IS_BETTER = ("box_mean_abs_deviation", "discrete_action_rank")
"""Metrics with better smaller values, in addition to losses."""


RANDOM = "random"
"""Policy whose actions are uniform over the legal ones."""


RANDOM_OPPONENT = MappingProxyType({RANDOM: RANDOM})
"""Value of `evaluation.opponents` where the rewards of agents cancel, unless settings say more."""


TRIAL_STEPS = 10
"""Most steps that an environment makes for one part of a trial (`runner.fast_dev_run`)."""

TRIAL_BATCH = 256
"""Most samples of a minibatch of a trial."""


SNAPSHOT = "@"
"""Stands in the ids of snapshots between that of the policy and a number."""


@dataclass(kw_only=True)
class OpponentsConfig(Settings):
    """Earlier versions of a policy, its snapshots, against which it plays in training."""

    add_every: int = 10
    """Epochs from one snapshot to the next; 0: the win rate alone says it. The first one is the
    policy that training begins with."""

    at_win_rate: float = 0.0
    """Share of points against the snapshots, since the last one was added, at which the next one
    is: 1 for an episode with a larger return than the opponent (of its team, see `env.teams`), 0.5
    for an equal one; 0: never."""

    least_episodes: int = 50
    """Episodes against snapshots that this share needs. >= 1."""

    keep: int = 20
    """Newest snapshots that are kept. >= 1."""

    draw: Literal["latest", "uniform", "by_strength"] = "uniform"
    """Rule by which opponents are drawn: the newest snapshot; all alike; by_strength: with weight
    (1 - w)^2, where w is the share of points against it."""

    share: float = 0.5
    """Share of the episodes against snapshots; in the others the policy plays all seats. From 0
    to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "add_every", "at_win_rate", "share")
        check_fields(self, 1, "keep", "least_episodes")
        for key in ("at_win_rate", "share"):
            if getattr(self, key) > 1:
                raise ConfigError(key, "expected a number from 0 to 1", getattr(self, key))
        if not self.add_every and not self.at_win_rate:
            problem = "no snapshot would be added; set it, or at_win_rate"
            raise ConfigError("add_every", problem, self.add_every)


@dataclass(kw_only=True)
class PolicyConfig(Settings):
    """One of the policies of an environment with several agents."""

    agents: list[str] = field(default_factory=list)
    """Agents that the policy acts for: their names, or patterns such as `agent_*`."""

    model: ModelConfig | None = None
    """The networks, where they differ from those of `model`; null: they do not."""

    source: str | dict[str, Any] | None = None
    """Origin of the policy. null: new networks; the directory of a run, or of a saved policy: its
    networks and weights, with `:<policy>` at the end if it has several (`<run>:wolf`); random:
    legal actions, all as likely; `{_target_: my_package.MyPolicy, key: value}`: called with
    observation and action space of the agents, and gives a module that acts, or what has a method
    `act(observation)`, or a function of one observation."""

    frozen: bool = False
    """Whether the policy stays as it is; one without networks always does."""

    opponents: OpponentsConfig | None = None
    """Earlier versions of the policy that play some of its agents in training, such as
    `{add_every: 10, draw: uniform}`; null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents is not None and (self.frozen or self.source == RANDOM):
            problem = "a policy that does not learn has no earlier versions; leave it out"
            raise ConfigError("opponents", problem, self.opponents.draw)
        if not self.agents:
            raise ConfigError("agents", "expected at least one agent, such as [agent_0]", [])
        if isinstance(self.source, dict) and not is_target(self.source):
            raise ConfigError("source", f"expected the key {TARGET}", self.source)
        if self.run is not None:
            self.source = absolute_path("source", self.run)
        elif self.source is not None and self.model is not None:
            problem = "a policy of this source has no networks to set up; leave it out"
            raise ConfigError("model", problem, self.source)

    @property
    def is_fixed(self) -> bool:
        """Whether the policy cannot learn, as far as the settings say it."""
        return self.frozen or (self.source is not None and self.run is None)

    @property
    def run(self) -> str | None:
        """Directory of the run, or of the saved policy, that it comes from; None: of none."""
        is_run = isinstance(self.source, str) and self.source != RANDOM
        return str(self.source) if is_run else None


@dataclass(kw_only=True)
class AlgorithmConfig(Settings):
    """Base of the settings of an algorithm.

    An algorithm says by dotted path which classes carry it out, so that reading a configuration
    imports none of them.
    """

    name: ClassVar[str] = ""
    """Name of the algorithm, as in `algorithm=<name>`."""

    learner_class: ClassVar[str] = ""
    """Dotted path of the `Learner` of the algorithm."""

    trainer_class: ClassVar[str] = ""
    """Dotted path of the `Trainer` of the algorithm."""

    model_builder: ClassVar[str] = ""
    """Dotted path of a function of model config, observation space, action space, seed, and
    `model_settings`."""

    model_resolver: ClassVar[str] = "maze_train.nets.template.resolve"
    """Dotted path of a function of model config and flat observation space that fills in the
    settings which are null."""

    builder_class: ClassVar[str] = ""
    """Dotted path of the `AlgorithmBuilder` of the algorithm, which builds all of it."""

    default_concurrency: ClassVar[int] = 8
    """Environments that collect experience in parallel, unless `runner.concurrency` says it."""

    default_total_steps: ClassVar[int] = 100_000
    """Environment steps after which training stops, unless `total_steps` says it; 0: no limit."""

    least_epoch_length: ClassVar[int] = 1
    """Least value of `epoch_length`."""

    learns_from: ClassVar[Literal["env", "dataset"]] = "env"
    """Source of experience: an environment, or recorded episodes; with these, an environment serves
    evaluations only and may be missing."""

    learns_for_several_agents: ClassVar[bool] = False
    """Whether environments may have several agents."""

    has_snapshots: ClassVar[bool] = False
    """Whether policies may play against their snapshots (`policies.<id>.opponents`)."""

    uses_accelerators: ClassVar[bool] = True
    """Whether the learner may be on a GPU; otherwise `auto` is the CPU."""
    can_share_minibatches: ClassVar[bool] = True
    """Whether losses are means over samples, which several learners can share out."""

    can_have_actors: ClassVar[bool] = False
    """Whether actors may collect its rollouts (`runner.envs_per_actor`)."""

    can_learn_meanwhile: ClassVar[bool] = False
    """Whether updates may be made while experience is collected, with its own weights."""

    n_epochs: int = 0
    """Epochs after which training stops; 0: no limit (another limit ends the run)."""

    epoch_length: int = 10
    """Updates per epoch; evaluation, model selection and metrics come once an epoch. >= 1."""

    patience: int = 0
    """Evaluations without a new best after which training stops; 0: never."""

    on_non_finite: Literal["raise", "skip", "zero"] = "raise"
    """Reaction where an observation, reward, loss or gradient is NaN or infinite: raise: the run
    ends with an error that names it; skip: the episode or the gradient step is left out and
    counted; zero: as skip, but of a gradient only the entries that are not finite count 0."""

    device: str = "cpu"
    """Device of the learner: cpu, cuda, cuda:1, mps, or auto (an accelerator if there is one)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_epochs", "patience")
        check_fields(self, self.least_epoch_length, "epoch_length")
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda", "mps", "xpu"):
            raise ConfigError("device", "expected cpu, cuda, cuda:<i>, mps or auto", self.device)

    def with_model_defaults(self, is_recurrent: bool) -> Self:
        """Return the settings with the defaults that depend on the model filled in.

        Args:
            is_recurrent: Whether a policy has recurrent layers.
        """
        return self

    def _check_positive(self, *keys: str) -> None:
        """Refuse numbers that are not above 0; schedules may end at 0, and None is accepted."""
        for key in keys:
            value = getattr(self, key)
            if isinstance(value, Schedule):
                check_schedule(key, value, check_at_least, 0.0)
            elif value is not None:
                check_positive(key, value)

    def _check_targets(self, *keys: str) -> None:
        """Refuse mappings that name no class, and an optimizer with its own learning rate."""
        for key in keys:
            node = getattr(self, key)
            if isinstance(node, dict) and TARGET not in node:
                raise ConfigError(key, f"expected the key {TARGET}", node)
            if key == "optimizer" and "lr" in node:
                raise ConfigError("optimizer.lr", "set algorithm.lr instead", node["lr"])

    @property
    def on_non_finite_step(self) -> Literal["raise", "skip"]:
        """Reaction to numbers of an environment that are not finite."""
        return "raise" if self.on_non_finite == "raise" else "skip"

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments for the builder of the model in addition to the model settings, by name."""
        return {}

    @property
    def values_over_time(self) -> dict[str, Any]:
        """Settings by key, among them all that may be schedules, with their defaults filled in."""
        return vars(self)

    def shortened(self) -> AlgorithmConfig:
        """The settings of a trial: one short epoch of everything."""
        return replace(self, n_epochs=1, epoch_length=1)

    def check_total_steps(self, total_steps: int, concurrency: int) -> None:
        """Refuse a run of that many steps of all environments; 0: no limit."""

    def start_notes(self, concurrency: int) -> Iterable[str]:
        """The lines about these settings that a run begins with."""
        return ()

    def check_concurrency(self, concurrency: int) -> None:
        """Refuse settings that do not fit `concurrency` parallel environments."""


@dataclass(kw_only=True)
class EvaluationConfig(Settings):
    """Settings of evaluations, and of the choice of the best policy."""

    n_episodes: int = 10
    """Episodes per evaluation; 0: no evaluation, the training return selects the best policy."""

    interval: int = 1
    """Epochs from one evaluation to the next; there is always one at the end. >= 1."""

    concurrency: int = 10
    """Environments stepped at the same time during an evaluation, at most one per episode. >= 1."""

    max_episode_steps: int | None = None
    """Steps after which an episode of an evaluation is truncated and counts as far as it came,
    >= 0; a smaller limit of the environment remains in force. null: the limit of the environment,
    or 30,000 if it declares none; 0: no limit but that of the environment."""

    final_episodes: int = 0
    """Episodes that the last and the best policy play each after training, with their own seeds,
    for the numbers that one reports: those of the best evaluation are too good, since it was
    chosen. 0: none."""

    deterministic: bool = True
    """Whether the most likely action is taken; false: actions are sampled."""

    metric: str = ""
    """Metric that selects the best policy, such as `eval/episode_length_mean` or
    `eval/<agent>/episode_return_mean`. Default: `eval/episode_return_mean`; with `opponents`
    `eval/vs_<name>/return_mean` of the first one."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether a larger or a smaller metric is better; auto: a smaller one for losses, deviations
    and ranks (`.../loss`, `box_mean_abs_deviation`, `discrete_action_rank`), else a larger one."""

    dump_interval: int = 0
    """Evaluations from one dump of the policy (`policies/epoch_<n>`) to the next; 0: none."""

    evaluators: list[dict[str, Any]] = field(default_factory=list)
    """Further evaluators, each `{_target_: my_package.MyEvaluator, key: value}`: built with these
    keys and called with the policy; the numbers that it returns appear among the metrics."""

    opponents: dict[str, Any] = field(default_factory=dict)
    """Policies by name against which those that learn play after each evaluation, in every seat
    (that of an agent, or those of a team, see `env.teams`), `n_episodes` each: `{first: <run>,
    random: random}`, as in `policies.<id>.source`; metrics are `eval/vs_<name>/win_rate`,
    `draw_rate`, `loss_rate` and `return_mean`. Empty: `{random: random}` where rewards of several
    agents cancel and `metric` is not set, else none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "n_episodes", "final_episodes", "dump_interval")
        if self.max_episode_steps is not None:
            check_at_least("max_episode_steps", self.max_episode_steps, 0)
        check_fields(self, 1, "interval", "concurrency")
        self._check_opponents()
        if self.metric:
            check_selection(self)
        check_targets("evaluators", self.evaluators)

    def _check_opponents(self) -> None:
        """Refuse a value that is no opponent; directories become absolute paths."""
        if self.opponents and not self.n_episodes:
            raise ConfigError("opponents", "needs n_episodes > 0", list(self.opponents))
        found = {}
        for name, source in self.opponents.items():
            key = f"opponents.{name}"
            if not (isinstance(source, str) or is_target(source)):
                problem = "expected random, the directory of a run, or the key _target_"
                raise ConfigError(key, problem, source)
            is_run = isinstance(source, str) and source != RANDOM
            found[name] = absolute_path(key, source) if is_run else source
        self.opponents = found

    @property
    def selection_metric(self) -> str:
        """The metric that selects the best policy, with the default filled in."""
        if self.opponents and not self.metric:
            return f"eval/vs_{next(iter(self.opponents))}/return_mean"
        prefix = "eval" if self.n_episodes > 0 else "train"
        return self.metric or f"{prefix}/episode_return_mean"

    def metric_of_run(self, has_env: bool, losses: Sequence[str]) -> str:
        """Return the metric that selects the best policy: a loss if no episodes are played.

        Args:
            has_env: Whether the run has an environment.
            losses: Losses on recorded episodes, the deciding one first; empty: the run learns from
                an environment.
        """
        is_played = has_env and self.n_episodes
        return self.selection_metric if self.metric or is_played or not losses else losses[0]

    def selection_mode(self, metric: str) -> Literal["max", "min"]:
        """Whether a larger or a smaller value of a metric is better."""
        if self.mode != "auto":
            return self.mode
        names = metric.split("/")[1:]  # those of a policy, or of a part of an action, among them
        is_less = any(name.endswith("loss") or name in SMALLER_IS_BETTER for name in names)
        return "min" if is_less or names[-1:] == ["loss_rate"] else "max"


@dataclass(kw_only=True)
class CheckpointConfig(Settings):
    """Settings of checkpoints; a run can be continued from them."""

    interval: int = 1
    """Epochs from one checkpoint to the next; 0: none at the ends of epochs."""

    interval_minutes: float = 0.0
    """Minutes after which there is a checkpoint at the latest, also within an epoch; 0: no limit.
    With both intervals 0 there are no checkpoints; otherwise one is always written at the end, and
    one when a signal ends the run."""

    keep_last: int = 2
    """Newest checkpoints that are kept. >= 1."""

    keep_best: int = 0
    """Checkpoints with the best scores that are kept in addition. >= 0."""

    allow_new_episodes: bool = False
    """Whether environments that cannot be put back where they were begin new episodes when a run
    is continued; otherwise that is an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "interval", "interval_minutes", "keep_best")
        check_at_least("keep_last", self.keep_last, 1)

    @property
    def is_on(self) -> bool:
        """Whether there are checkpoints."""
        return self.interval > 0 or self.interval_minutes > 0


OF_EPISODES = (
    "episode_return_mean",
    "episode_return_std",
    "episode_return_min",
    "episode_return_max",
    "episode_length_mean",
    "episodes",
    "success_rate",
)
"""Metrics of a `RolloutEvaluator`, each after its prefix."""

AGAINST_OPPONENTS = ("win_rate", "draw_rate", "loss_rate", "return_mean")
"""Metrics against an opponent, each after `eval/vs_<name>/`."""

OF_AGENT = ("eval/{}/episode_return_mean", "eval/{}/success_rate")
"""Metrics of one of several agents, by its name."""

OPEN = ("train/", "validation/", "league/", "eval/info/")
"""Beginnings of metrics that the settings do not tell: the first evaluation shows whether they are
reported."""


def evaluation_metrics(config: EvaluationConfig, agents: Iterable[str] = ()) -> list[str]:
    """Names of the metrics of evaluations, without those of own evaluators.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents, where there are several.
    """
    if not config.n_episodes:
        return []
    known = [f"eval/{name}" for name in OF_EPISODES]
    known += [name.format(agent) for agent in agents for name in OF_AGENT]
    return known + [
        f"eval/vs_{foe}/{name}" for foe in config.opponents for name in AGAINST_OPPONENTS
    ]


def check_selection(config: EvaluationConfig, agents: Sequence[str] | None = None) -> None:
    """Refuse a metric for the best policy that nothing would report, as far as it is known.

    Args:
        config: Settings of evaluations.
        agents: Names of the agents; none: there is one without a name; None: not known yet.

    Raises:
        ConfigError: If it is not one of those that are reported.
    """
    metric = config.metric
    if not metric or config.evaluators or metric.startswith(OPEN):
        return
    known = evaluation_metrics(config, ["<agent>"] if agents is None else agents)
    of_agent = "|".join(name.format(".+") for name in OF_AGENT)
    may_be_of_agent = agents is None and known and re.fullmatch(of_agent, metric)
    if metric not in known and not may_be_of_agent:
        is_return = re.search("return|rew", metric) is not None  # most likely the mean of it
        means = [name for name in known if is_return and name.endswith("return_mean")]
        hint = did_you_mean(means[:1] or nearest(metric, known, count=1), "", " ")
        reported = ", ".join(known) or "train/... only, without evaluation episodes"
        key = "metric" if agents is None else "evaluation.metric"
        raise ConfigError(key, f"not reported; {hint}reported: {reported}", metric)
