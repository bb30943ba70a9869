"""Settings of learners and optimizers, and schedules of settings that change during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from maze_train.core.checks import (
    MAX_THREADS,
    check_at_least,
    check_between,
    check_fields,
    check_positive,
)
from maze_train.core.conversion import IN_RUN, ON_RESUME, Settings, replaced
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET

if TYPE_CHECKING:
    from typing import Self


PREFIX = "linear_"
ADAPTIVE = "adaptive_kl"
ADAPTIVE_TARGET, ADAPTIVE_START = 0.01, 1e-3
ADAPTIVE_FACTOR = 1.5
"""Factor by which an adaptive learning rate changes."""


@dataclass(kw_only=True)
class Schedule(Settings):
    """Schedule of a setting that changes linearly or piecewise linearly during training.

    `linear_0.001` decreases from 0.001 to 0 over the run; `{start: 0.001, end: 0.0001}` changes
    from `start` to `end`; `{points: [[0, 0.001], [0.5, 0.0001]], by: progress}` interpolates
    between points; `[[0, 0.001], [50_000, 0.0001]]` interpolates between environment steps.
    `adaptive_kl`, `adaptive_kl_0.02` and `{adaptive_kl: 0.02, start: 0.001}` adapt the learning
    rate of PPO to the KL divergence of each update; see `learner.optimizers.adapted_rate`.
    """

    start: float | None = None
    """Value at the first update. With `adaptive_kl`, null selects 0.001."""

    end: float | None = None
    """Value at the end of the run (after the last update)."""

    points: list[list[float]] | None = None
    """Pairs [x, value] with increasing x, instead of `start` and `end`. The value is constant
    before the first point and after the last point."""

    by: Literal["progress", "env_steps", "updates"] = "progress"
    """Unit of x: fraction of the run in [0, 1], environment steps, or updates."""

    adaptive_kl: float | None = None
    """Target KL divergence (> 0) of an adaptive learning rate of PPO. The rate is decreased if the
    divergence exceeds twice the target, and increased if the divergence is below half of the
    target. null: not adaptive."""

    min: float = 1e-5
    """Minimum learning rate with `adaptive_kl`, > 0."""

    max: float = 1e-2
    """Maximum learning rate with `adaptive_kl`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive_kl is not None:
            self._begin_adaptive(self.adaptive_kl)
            return
        for key, value, default in (
            ("min", self.min, Schedule.min),
            ("max", self.max, Schedule.max),
        ):
            if value != default:
                raise ConfigError(key, "has no effect without adaptive_kl", value)
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
            raise ConfigError("points", "x values must be increasing", self.points)
        if not (xs[0] >= 0 and (self.by != "progress" or xs[-1] <= 1)):
            raise ConfigError(
                "points",
                "expected x in [0, 1]; with by: env_steps or by: updates, x >= 0",
                self.points,
            )

    def _begin_adaptive(self, target: float) -> None:
        """Check the settings of `adaptive_kl` and set the initial value to `start`."""
        if self.end is not None or self.points is not None or self.by != "progress":
            raise ConfigError(ADAPTIVE, "cannot be combined with end, points and by", target)
        check_positive(ADAPTIVE, target)
        check_positive("min", self.min)
        check_at_least("max", self.max, self.min)
        self.start = ADAPTIVE_START if self.start is None else self.start
        check_between("start", self.start, self.min, self.max)
        self.points, self.by = [[0.0, self.start]], "updates"

    @classmethod
    def from_short_form(cls, value: object) -> Schedule | None:
        """Build a schedule from a text or a list, see `from_text` and `from_list`."""
        if callable(value):
            problem = (
                "functions cannot be stored with a run: use linear_<start>, pairs [[steps, value], "
                "...], or run.set in a callback"
            )
            raise ConfigError("", problem, value)
        if isinstance(value, str):
            return cls.from_text(value)
        return cls.from_list(value) if isinstance(value, (list, tuple)) else None

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse a short form: `linear_<start>`, `adaptive_kl` or `adaptive_kl_<target>`.

        Raises:
            ConfigError: If the text is not a valid short form.
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
        """Create a schedule from points by environment steps, `[[0, v0], [t1, v1], ...]`.

        Raises:
            ConfigError: If the points are invalid.
        """
        with suppress(TypeError, ValueError):
            pairs = [[float(x), float(value)] for x, value in points]
            if pairs and pairs[0][0] == 0.0 and all(a < b for (a, _), (b, _) in pairwise(pairs)):
                return cls(points=pairs, by="env_steps")
        raise ConfigError(
            "",
            "expected pairs [environment steps, value] with steps increasing from 0, such as "
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

    def to_plain(self, hint: object) -> object:
        """Return the short form of the schedule, or the fields if there is no short form."""
        short = str(self)
        if short != repr(self):
            return short
        if self.adaptive_kl is not None:
            bounds = {"min": self.min, "max": self.max}
            return {ADAPTIVE: self.adaptive_kl, "start": self.start, **bounds}
        if self.start is not None:
            return {"start": self.start, "end": self.end}
        return {"points": [list(point) for point in self.points or ()], "by": self.by}

    @property
    def values(self) -> list[float]:
        """Values at the points, for range checks."""
        return [value for _, value in self.points or ()]


def is_adaptive(setting: float | Schedule | None) -> bool:
    """Return whether a setting is an adaptive learning rate."""
    return isinstance(setting, Schedule) and setting.adaptive_kl is not None


def check_schedule(
    key: str, value: float | Schedule, check: Callable[..., None], *bounds: float
) -> None:
    """Apply a range check to a constant or to each value of a (non-adaptive) schedule."""
    if is_adaptive(value):
        raise ConfigError(
            key,
            f"{ADAPTIVE} is only supported for algorithm.lr of ppo; "
            "expected a number, linear_<start>, or a schedule such as {start: 0.001, end: 0}",
            str(value),
        )
    values = value.values if isinstance(value, Schedule) else [value]
    for number in values:
        check(key, number, *bounds)


@dataclass(kw_only=True)
class LearnerGroupConfig(Settings):
    """Settings of the learner group."""

    n_learners: int = 1
    """Number of data-parallel learners, in [1, 1024]. Each learner computes the gradients of a
    shard of every minibatch; results match a single learner up to rounding. The first learner runs
    in the main process, the others in separate processes, with the settings of `runner=local`."""

    device: str | None = None
    """Device of the learners and of the acting networks; null: `algorithm.device`. `cuda`: one GPU
    per learner."""

    n_cpus_per_learner: int = 0
    """Number of PyTorch threads per learner during updates, in [0, 1024]; 0 selects
    `runner.torch_threads`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "n_learners", maximum=MAX_THREADS)
        check_fields(self, 0, "n_cpus_per_learner", maximum=MAX_THREADS)


@dataclass(frozen=True, slots=True)
class Progress:
    """Training progress before an update.

    All fields are 0 in the first update, so a schedule starts at its first value. `fraction` stays
    below 1, so a learning rate that is annealed to 0 remains positive.
    """

    env_steps: int = 0
    """Environment steps used in earlier updates."""

    updates: int = 0
    """Number of finished updates."""

    epoch: int = 0
    """Number of finished epochs."""

    fraction: float = 0.0
    """Fraction of the run that is done, in [0, 1); 0 if the length of the run is unknown."""


def scheduled_value(setting: float | Schedule, progress: Progress) -> float:
    """Return the current value of a setting, which may be a schedule.

    y_i + f (y_{i+1} - y_i) with f = (x - x_i) / (x_{i+1} - x_i) for x in [x_i, x_{i+1}], constant
    before the first point and after the last. Values at points are exact, and segments between
    equal values are exactly constant.
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


@dataclass(kw_only=True)
class Freeze(Settings):
    """Rule that freezes parameters in some or all updates; short form: `trunk` (in all updates).

    Updates are counted from 0. With `period`, the rule repeats: `{params: [policy], period: 10,
    stop: 5}` and `{params: [critic], period: 10, start: 5}` train critic and policy alternately for
    5 updates each.
    """

    params: list[str] = field(default_factory=list)
    """Names of parameters or submodules, or patterns with `*`."""

    start: int = 0
    """First update in which the parameters are frozen, >= 0."""

    stop: int | None = None
    """First update in which the parameters are trained again; null: never."""

    period: int = 0
    """Number of updates after which the rule repeats; 0: never."""

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
    def from_short_form(cls, value: object) -> Freeze | None:
        """Build a rule that freezes the parameters with this name in all updates."""
        return cls(params=[value]) if isinstance(value, str) else None

    def holds(self, updates: int) -> bool:
        """Return whether the parameters are frozen in update number `updates`."""
        number = updates % self.period if self.period else updates
        return self.start <= number and (self.stop is None or number < self.stop)


@dataclass(kw_only=True)
class OptimizerSettings(Settings):
    """Settings of every learner; `GradientSettings` adds settings of gradient-based learners."""

    module_settings: ClassVar[tuple[str, ...]] = ("lr", "optimizer", "max_grad_norm")
    """Additional settings that can be overridden per module."""

    learning_rates: ClassVar[tuple[str, ...]] = ("lr",)
    """All settings that are learning rates; `lr_scheduler` changes them."""

    adaptive_settings: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that may be `adaptive_kl`."""

    lr: float | Schedule = field(default=1e-3, metadata=IN_RUN)
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (decays to 0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {TARGET: "torch.optim.Adam"})
    """Optimizer class and its arguments except the learning rate. Parameters without a gradient
    have the gradient 0, as after `zero_grad(set_to_none=False)`."""

    max_grad_norm: float = field(default=0.0, metadata=IN_RUN)
    """Maximum gradient norm (or value, see `grad_clip_by`), >= 0; 0: no clipping."""

    on_non_finite: Literal["raise", "skip", "zero"] = field(default="raise", metadata=ON_RESUME)
    """What to do if an observation, reward, loss or gradient is NaN or infinite: raise: stop with
    an error that names the value; skip: drop (and count) the episode or the gradient step; zero:
    like skip, but replace non-finite gradient entries by 0 and apply the gradient step."""

    def _check_positive(self, *keys: str) -> None:
        """Raise ConfigError for values <= 0; None and schedules that end at 0 are allowed."""
        for key in keys:
            value: float | Schedule | None = self.value_of(key)
            if is_adaptive(value) and key in self.adaptive_settings:
                continue
            if isinstance(value, Schedule):
                check_schedule(key, value, check_at_least, 0.0)
            elif value is not None:
                check_positive(key, value)

    def _check_targets(self, *keys: str) -> None:
        """Raise ConfigError for mappings without `_target_`, and for optimizers with `lr`."""
        for key in keys:
            node: object = self.value_of(key)
            if not isinstance(node, Mapping):
                continue
            if TARGET not in node:
                raise ConfigError(key, f"expected the key {TARGET}", node)
            if key == "optimizer" and "lr" in node:
                raise ConfigError("optimizer.lr", "set algorithm.lr instead", node["lr"])

    @property
    def accumulated_minibatches(self) -> int:
        """Number of minibatches per gradient step."""
        return 1

    def gradient_settings(self) -> GradientSettings:
        """Return `GradientSettings` with these settings and the defaults of all other settings."""
        return GradientSettings(
            lr=self.lr,
            optimizer=self.optimizer,
            max_grad_norm=self.max_grad_norm,
            on_non_finite=self.on_non_finite,
        )

    def for_module(self, module_id: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """Return the settings of a module.

        Args:
            module_id: ID of the module.
            overrides: Settings of this module; None: the overrides in the configuration, if any.

        Raises:
            ConfigError: If a setting is unknown, cannot be set per module, or has an invalid value.
        """
        return self._with_overrides(module_id, overrides or {})

    def _with_overrides(self, module_id: str, own: Mapping[str, Any]) -> Self:
        key = f"overrides.{module_id}"
        settings = replaced(self, own, key)
        bases = reversed(type(self).__mro__)
        known = dict.fromkeys(n for base in bases for n in vars(base).get("module_settings", ()))
        for name in own:
            if name not in known:
                problem = f"cannot be set per module; these settings can: {', '.join(known)}"
                raise ConfigError(f"{key}.{name}", problem, own[name])
        return settings


@dataclass(kw_only=True)
class GradientSettings(OptimizerSettings):
    """Settings of all gradient-based algorithms."""

    module_settings: ClassVar[tuple[str, ...]] = ("lr_scheduler", "grad_clip_by")

    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """Quantity limited by `max_grad_norm`: the norm of the whole gradient, the norm of each
    parameter's gradient, or the absolute value of each entry."""

    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of matrix products in updates: `highest`: float32; `medium`: bfloat16 factors with
    float32 accumulation, about twice as fast on processors that support bfloat16; `high`: a
    precision in between, on GPUs; null: PyTorch's current setting."""

    lr_scheduler: dict[str, Any] | None = None
    """PyTorch learning-rate scheduler; requires a constant `lr`. Stepped after each update
    (off-policy algorithms: after each gradient step), such as
    `{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 100}`; null: no scheduler."""

    lr_factors: dict[str, float] = field(default_factory=dict)
    """Factors (>= 0) of the learning rate by name of a parameter or submodule, such as `{trunk:
    0.1, critic: 2}`. If several names match a parameter, the first one applies."""

    freeze: list[Freeze] = field(default_factory=list)
    """Parameters to freeze in all updates (`[trunk]`) or in some updates
    (`[{params: [trunk], stop: 100}]`). The optimizer state of frozen parameters is unchanged."""

    loss_function: dict[str, Any] | None = None
    """Custom loss that replaces the loss of the algorithm: `{_target_: my_package.my_loss, key:
    value}`. The function is called with learner, module ID, minibatch, statistics, and these
    keyword arguments."""

    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Data type of networks during loss computation (mixed precision). `float16` uses loss scaling
    and skips steps whose gradient overflows. Weights and optimizer state keep their dtype."""

    compile: Literal["none", "forward", "update"] = "none"
    """Use of `torch.compile`: `none`; `forward`: compile the forward pass of each network in a
    loss; `update`: compile each loss including the backward pass. Compilation replaces analytic
    gradients and requires a C++ compiler."""

    gradients: Literal["auto", "autograd"] = "auto"
    """Computation of gradients: `auto`: without autograd if the network and the loss have analytic
    gradients (faster for small networks, identical up to rounding); `autograd`: always with
    autograd. Custom losses, hooks and anomaly detection always select autograd."""

    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizer and loss settings of individual modules, keyed by ID, such as `{opponent: {lr:
    0.001, max_grad_norm: 1}}`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, node in (
            ("loss_function", self.loss_function),
            ("lr_scheduler", self.lr_scheduler),
        ):
            if node is not None and TARGET not in node:
                raise ConfigError(key, f"expected the key {TARGET}", node)
        for module_id in self.overrides:
            self.for_module(module_id)
        for name, factor in self.lr_factors.items():
            check_at_least(f"lr_factors.{name}", factor, 0.0)

    @property
    def fixed_settings(self) -> dict[str, str]:
        """Settings that cannot change during a run, with the reason; see `Settings`."""
        if self.lr_scheduler is None:
            return super().fixed_settings
        reason = "algorithm.lr_scheduler changes the learning rate; set a schedule instead"
        return dict.fromkeys(self.learning_rates, reason)

    def gradient_settings(self) -> GradientSettings:
        """Return self."""
        return self

    def for_module(self, module_id: str, overrides: Mapping[str, Any] | None = None) -> Self:
        """Return the settings of a module; None selects the configured overrides."""
        own = self.overrides.get(module_id, {}) if overrides is None else overrides
        return replace(self, overrides={})._with_overrides(module_id, own)
