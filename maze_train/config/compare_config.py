"""The configuration of a comparison: runs, the metric, and where the tables go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from maze_train.checks import absolute_path, check_at_least
from maze_train.config.loading import build_config, values_by_field
from maze_train.conversion import convert_fields
from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(kw_only=True)
class CompareConfig:
    """Everything that defines a comparison of runs."""

    runs: list[str] = field(default_factory=list)
    """Directories of runs, directories that hold some at any depth (such as that of a sweep), and
    patterns with `*`."""

    output: str | None = None
    """Directory of the tables and the picture; null: outputs/comparisons/<date>_<time>. Those of a
    comparison before are replaced."""

    metric: str | None = None
    """Column of metrics.csv that is compared; null: the one that selected the best policy, or where
    runs differ in it the mean return of evaluation, or of training if there is none."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether a larger or a smaller value is better; auto: as for the selection of policies, with
    their setting where the metric is that of the runs."""

    threshold: float | dict[str, float] | None = None
    """Value of the metric for which steps and time until a run first reaches it are given; also one
    for each environment: `{CartPole-v1: 475, Pendulum-v1: -200}`."""

    ignore: list[str] = field(default_factory=list)
    """Settings, and sections of settings, in which runs may differ and are the same all the same,
    such as `[runner, env.kwargs.port]`."""

    bounds: dict[str, list[float]] = field(default_factory=dict)
    """Values that count as 0 and as 1 by environment, `{CartPole-v1: [22, 500]}`: adds a table over
    these environments together."""

    unfinished: bool = False
    """Whether runs that failed, were interrupted, or have not ended count as far as they came."""

    n_resamples: int = 10_000
    """Bootstrap samples of an interval. >= 100."""

    def threshold_in(self, env: str) -> float | None:
        """The threshold in an environment; None: there is none."""
        return self.threshold.get(env) if isinstance(self.threshold, dict) else self.threshold

    def __post_init__(self) -> None:
        convert_fields(self)
        if not [name for name in self.runs if name.strip()]:
            problem = "expected directories of runs, such as runs=[outputs/a,outputs/b*]"
            raise ConfigError("runs", problem, self.runs)
        if self.output is not None:
            self.output = absolute_path("output", self.output)
        check_at_least("n_resamples", self.n_resamples, 100)
        levels = self.threshold if isinstance(self.threshold, dict) else {"": self.threshold}
        for env, level in levels.items():
            if level is not None:
                key = f"threshold.{env}" if env else "threshold"
                check_at_least(key, level, float("-inf"))
        for env, ends in self.bounds.items():
            if len(ends) != 2 or ends[0] == ends[1]:
                problem = "expected two values that differ: those that count as 0 and as 1"
                raise ConfigError(f"bounds.{env}", problem, ends)


def load_compare_config(node: Mapping[str, Any]) -> CompareConfig:
    """The configuration of a comparison from plain values; `runs` may be a single one.

    Raises:
        ConfigError: If a key is unknown, or a value has a wrong type or is out of range.
    """
    values = dict(node)
    if isinstance(values.get("runs"), str):
        values["runs"] = [values["runs"]]
    return build_config(CompareConfig, values_by_field(CompareConfig, values))
