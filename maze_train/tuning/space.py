"""The settings that trials have: ranges that are checked, and Optuna's distributions of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.comparison.table import short
from maze_train.config.search_config import GROUP, LINEAR, SearchRange
from maze_train.config.writing import config_to_dict
from maze_train.conversion import join
from maze_train.errors import ConfigError
from maze_train.runners.pipeline import configure

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from optuna.distributions import BaseDistribution

    from maze_train.config.train_config import TrainConfig


def text_of(value: Any) -> str:
    """A value as on the command line; of an object that has no text there, its class."""
    plain = str(value) if isinstance(value, str) else value
    try:
        text: str = yaml.safe_dump([plain], default_flow_style=True, width=math.inf)
    except yaml.representer.RepresenterError:
        return f"<{type(value).__name__}>"
    return text.strip()[1:-1]


def shown(text: str) -> str:
    """A value for people: a number, also one that begins a schedule, with four digits."""
    number = text.removeprefix(LINEAR)
    return text[: len(text) - len(number)] + short(number)


def short_names(keys: Collection[str]) -> dict[str, str]:
    """Names for people by setting: the last part, where it belongs to one setting."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


class Space:
    """The ranges of a search, checked against the settings of its runs.

    Args:
        ranges: Ranges by dotted name of the setting.
        settings: Values of the other settings, as `configure` takes them.

    Raises:
        ConfigError: If there is no such setting, or it does not take the ends of its range or one
            of its choices.
    """

    def __init__(self, ranges: Mapping[str, SearchRange], settings: Mapping[str, Any]) -> None:
        self.ranges = dict(ranges)
        self._settings = settings
        self._choices = {
            key: {text_of(choice): choice for choice in found.choices or ()}
            for key, found in self.ranges.items()
        }
        self._as_set: dict[str, dict[str, str]] = {}  # texts of choices by those of the settings
        self.distributions = {key: self._distribution(key) for key in self.ranges}
        """Distributions of Optuna by setting; choices are texts."""

    def texts(self, key: str) -> list[str]:
        """The choices of a setting as texts; empty: it has a range."""
        return list(self._choices[key])

    def number(self, key: str, text: str) -> float:
        """The number that a text stands for, of a setting with a range."""
        return float(text.removeprefix(LINEAR))

    def settings_of(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a trial by dotted name, from Optuna's parameters."""
        return {key: self._setting(key, params[key]) for key in self.ranges}

    def given(self, config: TrainConfig) -> dict[str, Any]:
        """Optuna's parameters for the settings as they are.

        Raises:
            ConfigError: If one does not lie in its range.
        """
        values, params = config_to_dict(config), {}
        for key, found in self.ranges.items():
            value = _select(values, key)
            if found.linear and isinstance(value, str):
                value = float(value.removeprefix(LINEAR))
            if found.low is None or found.high is None:
                params[key] = self._as_set[key].get(text_of(value))
                is_in = params[key] is not None
            else:
                params[key] = value
                is_in = isinstance(value, int | float) and found.low <= value <= found.high
            if not is_in:
                raise ConfigError(key, "lies outside of its range", value)
        return params

    def _setting(self, key: str, value: Any) -> Any:
        if self._choices[key]:
            return self._choices[key][value]
        return f"{LINEAR}{value!r}" if self.ranges[key].linear else value

    def _distribution(self, key: str) -> BaseDistribution:
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        found = self.ranges[key]
        if self._choices[key]:
            self._as_set[key] = {text_of(self._accepted(key, t)): t for t in self._choices[key]}
            return CategoricalDistribution(list(self._choices[key]))
        assert found.low is not None
        assert found.high is not None
        ends = [self._accepted(key, end) for end in (found.low, found.high)]
        step = found.step
        if all(isinstance(end, int) for end in (*ends, 1 if step is None else step)):
            return IntDistribution(int(ends[0]), int(ends[1]), found.log, int(step or 1))
        return FloatDistribution(float(found.low), float(found.high), found.log, step)

    def _accepted(self, key: str, value: Any) -> Any:
        """A value as the configuration has it.

        Raises:
            ConfigError: If it is refused.
        """
        setting = self._setting(key, value)
        try:
            return _select(config_to_dict(configure({**self._settings, key: setting})), key)
        except ConfigError as error:
            problem = f"a run does not take it: {error}"
            raise ConfigError(join(GROUP, key), problem, setting) from error


def _select(node: Any, key: str) -> Any:
    """The value of a setting by dotted name; None where there is none."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node
