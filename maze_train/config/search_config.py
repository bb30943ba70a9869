"""The configuration of a search for settings: ranges, trials, and what decides between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from maze_train.config.loading import load_settings, merged, named_option, set_dotted
from maze_train.config.options import list_options
from maze_train.config.train_config import TrainConfig
from maze_train.core.checks import absolute_path, check_at_least, check_fields
from maze_train.core.conversion import Settings, UnknownKeyError, convert, field_of_key, join
from maze_train.core.errors import ConfigError, nearest

GROUP = "search"
LINEAR = "linear_"
"""Beginning of a schedule that falls from a value to 0."""


@dataclass(kw_only=True)
class SearchRange(Settings):
    """Values of one setting that trials may have: from `low` to `high`, or one of `choices`."""

    low: int | float | None = None
    """Smallest value."""

    high: int | float | None = None
    """Largest value; integers are drawn where the setting is one."""

    log: bool = False
    """Whether the logarithm is drawn uniformly; needs `low` > 0, without `step`."""

    step: int | float | None = None
    """Distance between two values, counted from `low`; null: any value, or any integer."""

    linear: bool = False
    """Whether the value is that at which a linear schedule begins, which falls to 0."""

    choices: list[Any] | None = None
    """All values, instead of `low` and `high`."""

    @classmethod
    def from_list(cls, choices: list[Any] | tuple[Any, ...]) -> SearchRange:
        """The range of a plain list: these values."""
        return cls(choices=list(choices))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choices is not None:
            others = [f.name for f in fields(self) if f.name != "choices"]
            given = [name for name in others if getattr(self, name) not in (None, False)]
            if given or not self.choices:
                problem = "expected either choices, at least one, or low and high"
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
            raise ConfigError("low", "expected a number > 0, since log is true", low)
        if self.step is not None and (self.step <= 0 or self.log):
            raise ConfigError("step", "expected a number > 0, and log: false", self.step)


@dataclass(kw_only=True)
class SearchConfig(Settings):
    """Everything that defines a search, in addition to the settings of its runs."""

    search: dict[str, Any] = field(default_factory=dict)
    """Ranges by setting, `search.algorithm.lr={low: 1e-4, high: 1e-2, log: true}` or, of some
    values, `search.algorithm.gamma=[0.95,0.99]`; `search=<name>`: those of a file, such as
    `search=ppo`; null takes a setting out."""

    n_trials: int = 20
    """Trials of the study, those included that it has already. >= 1."""

    n_jobs: int = 1
    """Trials at a time, each in its own process; 0: one per core. >= 0."""

    gpus: list[int] = field(default_factory=list)
    """GPUs of which the trials see one each in turn (CUDA_VISIBLE_DEVICES); none: all of them."""

    n_seeds: int = 1
    """Runs of a trial, one after the other, with the seeds `seed`, `seed` + 1 and so on (`seed` by
    default 0); their mean is its value. The first one decides whether it is pruned. >= 1."""

    study: str | None = None
    """Directory of the study; one that holds a study continues with it. null:
    outputs/studies/<env>-<algorithm>."""

    metric: str | None = None
    """Column of metrics.csv that decides; null: the one that selects the best policy
    (`evaluation.metric`)."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether a larger or a smaller value is better; auto: as for the selection of policies."""

    value: Literal["best", "final"] = "best"
    """Value of a run: the best one of the metric, or the last one."""

    sampler: str | dict[str, Any] = "tpe"
    """Sampler of Optuna that chooses settings, by the first part of its name (`tpe`, `random`,
    `gp`, `qmc` ...), or with arguments: `{name: tpe, n_startup_trials: 5}`."""

    pruner: str | dict[str, Any] = "median"
    """Pruner of Optuna that ends hopeless trials, like `sampler`; nop: none. Its steps are percents
    of a run, 5 apart; `median` prunes from 30 % on (`n_warmup_steps`), after 5 trials
    (`n_startup_trials`)."""

    begin_with_given: bool = True
    """Whether the first trial has the settings as they are without a search, if they lie in the
    ranges."""

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
        """Ranges by the dotted names of settings."""
        return ranges_of(self.search)


def ranges_of(node: Mapping[str, Any], path: str = "") -> dict[str, SearchRange]:
    """The ranges in mappings within each other, by dotted names.

    Raises:
        ConfigError: If one is wrong.
    """
    found: dict[str, SearchRange] = {}
    for key, value in node.items():
        name = join(path, key)
        if isinstance(value, dict) and not field_of_key(SearchRange).keys() & value.keys():
            found.update(ranges_of(value, name))
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = convert(value, SearchRange, join(GROUP, name))
    return found


def _merged(ranges: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Ranges by dotted names as nested mappings; later ones change earlier ones.

    Raises:
        ConfigError: If they are no mapping, or a part of a list is changed.
    """
    if not isinstance(ranges, dict):
        raise ConfigError(GROUP, "expected ranges by setting", ranges)
    found: dict[str, Any] = {}
    for key, value in [*ranges.items(), *changes.items()]:
        is_group = isinstance(value, dict) and not field_of_key(SearchRange).keys() & value.keys()
        node: dict[str, Any] = {} if is_group else found
        try:
            set_dotted(node, key, value)
        except ConfigError as error:
            problem = "changes a part of a range that has none: give the whole range"
            raise ConfigError(join(GROUP, key), problem, value) from error
        found = merged(found, node)
    return found


def without_search(overrides: Sequence[str]) -> list[str]:
    """The settings of runs among those of a user on the command line."""
    own = field_of_key(SearchConfig)
    words = [word.lstrip("+") for word in overrides]
    return [word for word in words if re.split(r"[.=]", word.lstrip("~"))[0] not in own]


def load_search_config(node: Mapping[str, Any]) -> tuple[SearchConfig, dict[str, Any]]:
    """The configuration of a search, and the values that its runs have in common.

    Args:
        node: Values by the names of the fields of `SearchConfig` and of `TrainConfig`. `search` may
            be the name of an option.

    Raises:
        ConfigError: If a key is unknown, or a setting of the search is wrong.
    """
    own_keys, others = field_of_key(SearchConfig), field_of_key(TrainConfig)
    own: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    for key, value in node.items():
        name, dot, rest = key.partition(".")
        if name not in own_keys and name not in others:
            allowed = [*own_keys, *others]
            meant = nearest(name, allowed, count=1)
            raise UnknownKeyError("", key, value, allowed, meant)
        if name == GROUP and dot:
            ranges[rest] = value
        else:
            (own if name in own_keys else settings)[key] = value
    if isinstance(own.get(GROUP), str):
        own[GROUP] = named_option(GROUP, own[GROUP])
    if ranges:
        own[GROUP] = _merged(own.get(GROUP) or {}, ranges)
    if own.get(GROUP) is None:
        own.pop(GROUP, None)
    for key in ("run_dir", "resume"):
        if settings.pop(key, None) is not None:
            problem = "trials have directories in that of the study, and continue with it"
            raise ConfigError(key, f"{problem}: leave it out, and name study=<directory>")
    return load_settings(SearchConfig, own), settings
