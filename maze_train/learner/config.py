"""Settings that change during training, and the progress that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maze_train.core.checks import (
    MOST_THREADS,
    check_at_least,
    check_between,
    check_fields,
    check_positive,
)
from maze_train.core.conversion import Settings, replaced
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET

if TYPE_CHECKING:
    from typing import Self


PREFIX = "linear_"
ADAPTIVE = "adaptive_kl"
ADAPTIVE_TARGET, ADAPTIVE_START = 0.01, 1e-3
ADAPTIVE_FACTOR = 1.5
"""Factor of a step of an adaptive learning rate."""


@dataclass(kw_only=True)
class Schedule(Settings):
    """A setting that changes during training: linear between two values, or piecewise linear.

    `linear_0.001` falls from 0.001 to 0 over the run; `{start: 0.001, end: 0.0001}` goes from
    `start` to `end`; `{points: [[0, 0.001], [0.5, 0.0001]], by: progress}` interpolates between
    points; `[[0, 0.001], [50_000, 0.0001]]` does so by environment steps. `adaptive_kl`,
    `adaptive_kl_0.02` and `{adaptive_kl: 0.02, start: 0.001}` are learning rates of PPO that follow
    the divergence of the policy; see `adapted`.
    """

    start: float | None = None
    """Value at the first update; with `adaptive_kl` null is 0.001."""

    end: float | None = None
    """Value that is reached at the end of the run (after its last update)."""

    points: list[list[float]] | None = None
    """Pairs [x, value] with growing x, instead of `start` and `end`; constant before and after."""

    by: Literal["progress", "env_steps", "updates"] = "progress"
    """Unit of x: the share of the run in [0, 1], environment steps, or updates."""

    adaptive_kl: float | None = None
    """Divergence > 0 at which a learning rate of PPO aims: above twice of it the rate falls, below
    half of it the rate grows. null: the value does not depend on it."""

    min: float = 1e-5
    """Least value with `adaptive_kl`, > 0."""

    max: float = 1e-2
    """Largest value with `adaptive_kl`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive_kl is not None:
            self._begin_adaptive(self.adaptive_kl)
            return
        for key in ("min", "max"):
            if getattr(self, key) != getattr(Schedule, key):
                raise ConfigError(key, "needs adaptive_kl; leave it out", getattr(self, key))
        if self.points is None:
            if self.start is None or self.end is None or self.by != "progress":
                raise ConfigError(
                    "",
                    "expected {start: 0.001, end: 0} or {points: [[0, 0.001], [50000, 0]], "
                    "by: env_steps}",
                )
            self.points = [[0.0, self.start], [1.0, self.end]]
        elif self.start is not None or self.end is not None:
            raise ConfigError("points", "cannot be combined with start and end", self.points)
        if not self.points or any(len(point) != 2 for point in self.points):
            raise ConfigError("points", "expected a list of pairs [x, value]", self.points)
        xs = [x for x, _ in self.points]
        if any(a >= b for a, b in pairwise(xs)):
            raise ConfigError("points", "expected growing x", self.points)
        if not (xs[0] >= 0 and (self.by != "progress" or xs[-1] <= 1)):
            raise ConfigError(
                "points",
                "expected x in [0, 1]; with by: env_steps or by: updates, x >= 0",
                self.points,
            )

    def _begin_adaptive(self, target: float) -> None:
        """Check the settings of `adaptive_kl`; until a divergence is known the value is `start`."""
        if self.end is not None or self.points is not None or self.by != "progress":
            raise ConfigError(ADAPTIVE, "cannot be combined with end, points and by", target)
        check_positive(ADAPTIVE, target)
        check_positive("min", self.min)
        check_at_least("max", self.max, self.min)
        self.start = ADAPTIVE_START if self.start is None else self.start
        check_between("start", self.start, self.min, self.max)
        self.points, self.by = [[0.0, self.start]], "updates"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """The schedule of a short form: `linear_<start>`, `adaptive_kl` or `adaptive_kl_<target>`.

        Raises:
            ConfigError: If the text is not such a form.
        """
        if text == ADAPTIVE:
            return cls(adaptive_kl=ADAPTIVE_TARGET)
        with suppress(ValueError):
            if text.startswith(PREFIX):
                return cls(start=float(text.removeprefix(PREFIX)), end=0.0)
            if text.startswith(f"{ADAPTIVE}_"):
                return cls(adaptive_kl=float(text.removeprefix(f"{ADAPTIVE}_")))
        raise ConfigError("", "expected a number, linear_<start>, or a schedule", text)

    @classmethod
    def from_list(cls, points: Sequence[Any]) -> Schedule:
        """The schedule of points by environment steps, `[[0, v0], [t1, v1], ...]`.

        Raises:
            ConfigError: If they are not such points.
        """
        with suppress(TypeError, ValueError):
            pairs = [[float(x), float(value)] for x, value in points]
            if pairs and pairs[0][0] == 0.0 and all(a < b for (a, _), (b, _) in pairwise(pairs)):
                return cls(points=pairs, by="env_steps")
        raise ConfigError(
            "",
            "expected pairs [environment steps, value] with growing steps from 0, such as "
            "[[0, 1e-3], [100_000, 1e-4]]",
            points,
        )

    def __str__(self) -> str:
        short = f"{ADAPTIVE}_{self.adaptive_kl!r}"
        if self.adaptive_kl is not None and self == Schedule.from_text(short):
            return short
        if self.start is not None and self.end == 0:
            return f"{PREFIX}{self.start!r}"
        return repr(self)

    def to_plain(self, hint: Any) -> Any:
        """Return the short form if there is one, else the fields that make the schedule."""
        short = str(self)
        if short != repr(self):
            return short
        if self.adaptive_kl is not None:
            return {name: getattr(self, name) for name in (ADAPTIVE, "start", "min", "max")}
        if self.start is not None:
            return {"start": self.start, "end": self.end}
        return {"points": [list(point) for point in self.points or ()], "by": self.by}

    def adapted(self, rate: float, divergence: float) -> float:
        """The learning rate after a minibatch, with the target t = `adaptive_kl`.

        max(min, rate / 1.5) if d > 2 t;  min(max, 1.5 rate) if 0 < d < t / 2;  else the same rate.

        Args:
            rate: Rate before, in [`min`, `max`].
            divergence: d, the estimated divergence of the policy from the one that acted.

        Source: Schulman et al. (2017), arXiv:1707.06347, section 4, whose penalty is doubled and
        halved by d; for the learning rate with these numbers: Rudin et al. (2022),
        arXiv:2109.11978, appendix.
        """
        assert self.adaptive_kl is not None
        if divergence > 2.0 * self.adaptive_kl:
            return max(self.min, rate / ADAPTIVE_FACTOR)
        if 0.0 < divergence < 0.5 * self.adaptive_kl:
            return min(self.max, rate * ADAPTIVE_FACTOR)
        return rate

    @property
    def values(self) -> list[float]:
        """The values at the points, for range checks."""
        return [value for _, value in self.points or ()]


def is_adaptive(setting: float | Schedule | None) -> bool:
    """Whether a setting follows the divergence of the policy."""
    return isinstance(setting, Schedule) and setting.adaptive_kl is not None


def check_schedule(
    key: str, value: float | Schedule, check: Callable[..., None], *bounds: float
) -> None:
    """Apply a range check to a number, or to each value of a schedule that needs no divergence."""
    if is_adaptive(value):
        raise ConfigError(
            key,
            f"{ADAPTIVE} is for algorithm.lr of ppo, which measures how far its policy moves; "
            "expected a number, linear_<start>, or a schedule such as {start: 0.001, end: 0}",
            str(value),
        )
    values = value.values if isinstance(value, Schedule) else [value]
    for number in values:
        check(key, number, *bounds)


@dataclass(kw_only=True)
class LearnerGroupConfig(Settings):
    """Settings of the learners of a run."""

    n_learners: int = 1
    """Learners that share out the samples of each minibatch; the numbers are those of one learner.
    One is in the main process, each other one in a separate process, with the settings of
    `runner=local`. In [1, 1024]."""

    device: str | None = None
    """Device of the learners, with the networks that act; null: `algorithm.device`. `cuda`: each
    learner has its own GPU, in their order."""

    n_cpus_per_learner: int = 0
    """Threads of PyTorch of each learner during updates; 0: `runner.torch_threads`. In [0,
    1024]."""

    queue_size: int = 0
    """Batches of impala that may wait for the learners, which then learn while the next one is
    gathered; 0: each update is waited for. >= 0."""

    drop_when_full: bool = False
    """Whether a batch is dropped and counted when the queue is full; otherwise it waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "n_learners", maximum=MOST_THREADS)
        check_fields(self, 0, "n_cpus_per_learner", maximum=MOST_THREADS)
        check_fields(self, 0, "queue_size")
        if self.drop_when_full and not self.queue_size:
            problem = "nothing waits, so nothing is dropped; expected false, or a queue_size"
            raise ConfigError("drop_when_full", problem, self.drop_when_full)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training before an update.

    The first update of a run sees zeros, so a schedule starts at its first value; the last one sees
    a fraction below 1, so a learning rate that falls to 0 is never 0.
    """

    env_steps: int = 0
    """Environment steps that earlier updates learned from."""

    updates: int = 0
    """Updates made."""

    epoch: int = 0
    """Epochs finished."""

    fraction: float = 0.0
    """Share of the run that is done, in [0, 1); 0 when no limit is known."""


def scheduled_value(setting: float | Schedule, progress: Progress) -> float:
    """The value of a setting now; a number is its own schedule.

    y_i + f (y_{i+1} - y_i) with f = (x - x_i) / (x_{i+1} - x_i) for x in [x_i, x_{i+1}], constant
    before the first point and after the last. Values at points are exact, and equal ones give a
    constant bit for bit.
    """
    if not isinstance(setting, Schedule):
        return setting
    x = {
        "progress": progress.fraction,
        "env_steps": float(progress.env_steps),
        "updates": float(progress.updates),
    }[setting.by]
    points = setting.points or []
    for (left_x, left), (right_x, right) in pairwise(points):
        if x < right_x:
            fraction = max(0.0, (x - left_x) / (right_x - left_x))
            return left + fraction * (right - left)
    return points[-1][1]


def with_values(config: Any, names: Sequence[str], progress: Progress) -> Any:
    """Settings with the values that schedules of these names have now; the same, without any."""
    found = {name: getattr(config, name) for name in names}
    if not any(isinstance(value, Schedule) for value in found.values()):
        return config
    config = copy(config)
    for name, value in found.items():
        setattr(config, name, scheduled_value(value, progress))
    return config


def number(setting: float | Schedule) -> float:
    """The value of a setting that `Learner.config_of` gives, where schedules have values."""
    assert not isinstance(setting, Schedule)
    return setting


@dataclass(kw_only=True)
class Freeze(Settings):
    """Parameters that stay as they are in some updates; `trunk` alone: the trunk, in all of them.

    Updates count from 0. With a `period`, `start` and `stop` hold in every one again: `{params:
    [policy], period: 10, stop: 5}` and `{params: [critic], period: 10, start: 5}` let critic and
    policy learn in turns, 5 updates each.
    """

    params: list[str] = field(default_factory=list)
    """Names of parameters or of parts that hold them, or patterns of these with `*`."""

    start: int = 0
    """First update in which they are frozen. >= 0."""

    stop: int | None = None
    """First update in which they learn again; null: none."""

    period: int = 0
    """Updates after which `start` and `stop` come again; 0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "start", "period")
        if not self.params:
            raise ConfigError("params", "expected names of parameters, such as [trunk]", [])
        if self.stop is not None:
            check_at_least("stop", self.stop, self.start + 1)
        last = max(self.start + 1, self.stop or 0)
        if 0 < self.period < last:
            raise ConfigError("period", f"expected at least {last}, or 0", self.period)

    @classmethod
    def from_text(cls, text: str) -> Freeze:
        """The short form: a name, frozen in all updates."""
        return cls(params=[text])

    def holds(self, updates: int) -> bool:
        """Whether the parameters are frozen in the update after `updates` others."""
        number = updates % self.period if self.period else updates
        return self.start <= number and (self.stop is None or number < self.stop)


@dataclass(kw_only=True)
class GradientSettings(Settings):
    """Settings that every algorithm has which follows the gradient of a loss."""

    module_settings: ClassVar[tuple[str, ...]] = (
        *("lr", "lr_scheduler", "optimizer", "max_grad_norm", "grad_clip_by"),
    )
    """Settings, in addition to those of its bases, that a module may override."""

    lr_scheduler: dict[str, Any] | None = None
    """Scheduler of PyTorch of a learning rate that is a number, called after each update (with a
    replay buffer: after each gradient step):
    `{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 100}`; null: none."""

    lr_factors: dict[str, float] = field(default_factory=dict)
    """Factors of the learning rate by name of a parameter, or of a part that holds some, such as
    `{trunk: 0.1, critic: 2}`; the first name that fits counts. >= 0."""

    freeze: list[Freeze] = field(default_factory=list)
    """Parameters that do not learn, always (`[trunk]`) or in some updates (`[{params: [trunk],
    stop: 100}]`); they and their moments do not change."""

    loss_function: dict[str, Any] | None = None
    """A loss that takes the place of the algorithm's: `{_target_: my_package.my_loss, key: value}`,
    a function of learner, module id, minibatch and statistics, and of these keys."""

    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Type in which networks compute while losses are made; `float16`: losses are scaled, and steps
    whose gradient overflows are left out. Weights and moments keep their type."""

    compile: Literal["none", "forward", "update"] = "none"
    """Compiled part, in place of gradients by hand: the `forward` passes of networks in losses, or
    for an `update` each loss as a whole, with its gradient; it needs a C++ compiler."""

    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of single modules by id, in place of those of all, such as `{opponent: {lr: 0.001,
    max_grad_norm: 1}}`: those of optimizers and of losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("loss_function", "lr_scheduler"):
            node = getattr(self, key)
            if node is not None and TARGET not in node:
                raise ConfigError(key, f"expected the key {TARGET}", node)
        for module_id in self.overrides:
            self.for_module(module_id)
        for name, factor in self.lr_factors.items():
            check_at_least(f"lr_factors.{name}", factor, 0.0)

    def for_module(self, module_id: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """The settings of a module.

        Args:
            module_id: Its id.
            overrides: Its own settings; None: those of `overrides`.

        Raises:
            ConfigError: If one is unknown, is not one of a module, or has a wrong value.
        """
        own = self.overrides.get(module_id, {}) if overrides is None else overrides
        settings: Self = settings_for_module(self, module_id, own)
        return settings


def gradient_settings(config: Any) -> GradientSettings:
    """The `GradientSettings` of an algorithm; those that any other object has by these names."""
    if isinstance(config, GradientSettings):
        return config
    names = {f.name for f in fields(GradientSettings) if hasattr(config, f.name)} - {"overrides"}
    return GradientSettings(**{name: getattr(config, name) for name in names})


def settings_for_module(config: Any, module_id: str, own: Mapping[str, Any]) -> Any:
    """Settings of an algorithm, of any class, with the overrides of one module.

    Raises:
        ConfigError: If one is unknown, is not a setting of a module, or has a wrong value.
    """
    key = f"overrides.{module_id}"
    if isinstance(config, GradientSettings):
        config = replaced(replace(config, overrides={}), own, key)
    bases = (GradientSettings, *reversed(type(config).__mro__))
    known = dict.fromkeys(name for base in bases for name in vars(base).get("module_settings", ()))
    for name in own:
        if name not in known:
            problem = f"is a setting of all modules; those of one are: {', '.join(known)}"
            raise ConfigError(f"{key}.{name}", problem, own[name])
    if isinstance(config, GradientSettings):
        return config
    shared = {name: getattr(config, name) for name in dir(config) if not name.startswith("__")}
    return SimpleNamespace(**{**shared, **own})
