"""Settings of a hyperparameter search: ranges, trials, and the metric to optimize."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeGuard

from maze_train.config.compose import VARS, compose, load_settings, merged, set_dotted
from maze_train.config.options import list_options
from maze_train.config.train_config import TrainConfig
from maze_train.core.checks import absolute_path, check_at_least, check_fields
from maze_train.core.conversion import Settings, convert, field_of_key, join, unknown_key
from maze_train.core.errors import ConfigError

GROUP = "search"
LINEAR = "linear_"
"""Prefix of a schedule that decreases linearly from a value to 0."""


@dataclass(kw_only=True)
class SearchRange(Settings):
    """Search space of one setting: a range from `low` to `high`, or a list of `choices`."""

    low: int | float | None = None
    """Lower bound (inclusive)."""

    high: int | float | None = None
    """Upper bound (inclusive). Integer settings are sampled as integers."""

    log: bool = False
    """Whether to sample on a logarithmic scale; requires `low` > 0 and no `step`."""

    step: int | float | None = None
    """Step size between values, starting at `low`; null: continuous (or all integers)."""

    linear: bool = False
    """Whether to use the sampled value as the start of a linear schedule that decreases to 0."""

    choices: list[Any] | None = None
    """List of allowed values, instead of `low` and `high`."""

    @classmethod
    def from_short_form(cls, value: object) -> SearchRange | None:
        """Build a range from a list of choices."""
        return cls(choices=list(value)) if isinstance(value, (list, tuple)) else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices is not None:
            others = [f.name for f in fields(self) if f.name != "choices"]
            given = [name for name in others if vars(self)[name] not in (None, False)]
            if given or not self.choices:
                problem = "expected either a list of choices, or low and high"
                raise ConfigError("choices", problem, self.choices)
            return
        low, high = self.low, self.high
        if low is None or high is None:
            problem = "expected {low: a, high: b}, such as {low: 1e-4, high: 1e-2, log: true}"
            raise ConfigError("low" if low is None else "high", f"{problem}, or choices", None)
        check_at_least("low", low, float("-inf"))
        if not low < high < float("inf"):
            raise ConfigError("high", f"expected a number > low = {low}", high)
        if self.log and low <= 0:
            raise ConfigError("low", "expected a number > 0 because log is true", low)
        if self.step is not None and (self.step <= 0 or self.log):
            raise ConfigError("step", "expected a number > 0, and log: false", self.step)


@dataclass(kw_only=True)
class SearchConfig(Settings):
    """Settings of `maze-run search`, in addition to the settings of its runs."""

    search: dict[str, Any] = field(default_factory=dict)
    """Search space by setting: a range `search.algorithm.lr={low: 1e-4, high: 1e-2, log: true}`, or
    a list `search.algorithm.gamma=[0.95,0.99]`. `search=<name>` loads ranges from a file, such as
    `search=ppo`; null removes a setting."""

    n_trials: int = 20
    """Total number of trials in the study, including existing ones (>= 1)."""

    n_jobs: int = 1
    """Number of parallel trials, each in a separate process (>= 0); 0: one per core."""

    gpus: list[int] = field(default_factory=list)
    """GPU indices (CUDA_VISIBLE_DEVICES), assigned to trials round-robin, one per trial; empty: all
    GPUs are visible to every trial."""

    n_seeds: int = 1
    """Number of runs per trial (>= 1), executed sequentially with seeds `seed`, `seed` + 1, ...
    (`seed` defaults to 0). The value of the trial is the mean over its runs. Only the first run can
    be pruned."""

    study: str | None = None
    """Directory of the study; an existing study is resumed. null:
    outputs/studies/<env>-<algorithm>."""

    metric: str | None = None
    """Column of metrics.csv to optimize; null: the metric that selects the best policy
    (`evaluation.metric`)."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether to maximize (max) or minimize (min) the metric; auto: use `evaluation.mode`."""

    value: Literal["test", "best", "final"] = "test"
    """Value of a run. test: the return of the best policy in `evaluation.final_episodes` episodes
    after training that its selection did not use (by default 20; final for metrics without
    episodes); final: the last value of the metric; best: the best value, which is biased upwards,
    since it is a maximum over noisy evaluations."""

    sampler: str | dict[str, Any] = "tpe"
    """Optuna sampler: the first part of the class name (`tpe`, `random`, `gp`, `qmc`, ...), or a
    mapping with arguments: `{name: tpe, n_startup_trials: 5}`."""

    pruner: str | dict[str, Any] = "median"
    """Optuna pruner that stops unpromising trials, in the format of `sampler`; nop: no pruning.
    Steps are percentages of a run, reported every 5 %. `median` starts at 30 % of a run
    (`n_warmup_steps`), after 5 trials (`n_startup_trials`)."""

    begin_with_given: bool = True
    """Whether the first trial uses the configured settings, if they lie within the ranges."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "n_trials", "n_seeds")
        check_at_least("n_jobs", self.n_jobs, 0)
        if self.study is not None:
            self.study = absolute_path("study", self.study)
        if not self.ranges:
            known = ", ".join(f"search={name}" for name in list_options(GROUP))
            problem = f"expected ranges: {known}, or search.<setting>={{low: a, high: b}}"
            raise ConfigError(GROUP, problem, self.search)

    @property
    def ranges(self) -> dict[str, SearchRange]:
        """Ranges by dotted name of the setting."""
        return ranges_of(self.search)


def ranges_of(node: Mapping[str, Any], path: str = "") -> dict[str, SearchRange]:
    """Flatten nested mappings of ranges to dotted names.

    Raises:
        ConfigError: If a range is invalid.
    """
    found: dict[str, SearchRange] = {}
    for key, value in node.items():
        name = join(path, key)
        if _is_group(value):
            found.update(ranges_of(value, name))
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = convert(value, SearchRange, join(GROUP, name))
    return found


def _is_group(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value contains ranges by name, instead of the fields of one range."""
    own = field_of_key(SearchRange).keys()
    return isinstance(value, Mapping) and not own & value.keys()


def _merged(ranges: object, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes by dotted name into the ranges; returns nested mappings.

    Raises:
        ConfigError: If `ranges` is not a mapping, or a change addresses a part of a list.
    """
    if not isinstance(ranges, Mapping):
        raise ConfigError(GROUP, "expected ranges by setting", ranges)
    found: dict[str, Any] = {}
    for key, value in [*ranges.items(), *changes.items()]:
        node: dict[str, Any] = {} if _is_group(value) else found
        try:
            set_dotted(node, key, value)
        except ConfigError as error:
            problem = "cannot change a part of a list; set the whole range"
            raise ConfigError(join(GROUP, key), problem, value) from error
        found = merged(found, node)
    return found


def without_search(overrides: Sequence[str]) -> list[str]:
    """Return the user's overrides without the settings of the search."""
    own = field_of_key(SearchConfig)
    words = [word.lstrip("+") for word in overrides]
    return [word for word in words if re.split(r"[.=]", word.lstrip("~"))[0] not in own]


def load_search_config(node: Mapping[str, Any]) -> tuple[SearchConfig, dict[str, Any]]:
    """Return the configuration of a search, and the settings common to all runs.

    Args:
        node: Values by field of `SearchConfig` and `TrainConfig`. `search` may be the name of an
            option.

    Raises:
        ConfigError: If a key is unknown, or a setting of the search is invalid.
    """
    own_keys, others = field_of_key(SearchConfig), field_of_key(TrainConfig)
    own: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    for key, value in node.items():
        name, dot, rest = key.partition(".")
        if name == VARS:
            continue
        if name not in own_keys and name not in others:
            raise unknown_key(key, value, [*own_keys, *others])
        if name == GROUP and dot:
            ranges[rest] = value
        else:
            (own if name in own_keys else settings)[key] = value
    if isinstance(own.get(GROUP), str):
        own[GROUP] = compose("search", {GROUP: own[GROUP]}).values[GROUP]
    if ranges:
        own[GROUP] = _merged(own.get(GROUP) or {}, ranges)
    if own.get(GROUP) is None:
        own.pop(GROUP, None)
    for key in ("run_dir", "resume"):
        if settings.pop(key, None) is not None:
            problem = "trials are stored in the study directory and resumed with the study"
            raise ConfigError(key, f"{problem}; remove it, and set study=<directory>")
    return load_settings(SearchConfig, own), settings
