"""Settings of the algorithm that callbacks change during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from maze_train.core.conversion import (
    CHANGES,
    IN_RUN,
    config_to_dict,
    key_of_field,
    replaced,
    when_changeable,
)
from maze_train.core.errors import ConfigError, one_of
from maze_train.learner.config import Progress, Schedule, is_adaptive, scheduled_value
from maze_train.training.config import AlgorithmConfig

SECTION = "algorithm"


class ChangedSettings:
    """Settings of the algorithm, including changes by callbacks.

    Args:
        config: Settings at the start, or on resume.

    Attributes:
        current: The current settings.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self._given = self.current = config
        self._changed: set[str] = set()

    @property
    def are_changed(self) -> bool:
        """Whether a setting was changed."""
        return bool(self._changed)

    @property
    def changed(self) -> dict[str, Any]:
        """Values of the changed settings by name, as plain values."""
        if not self._changed:
            return {}
        return {k: x for k, x in changeable(self.current).items() if k in self._changed}

    def change(
        self,
        key: str,
        value: Any,
        has_progress: bool,
        apply: Callable[[AlgorithmConfig], object] = lambda config: None,
    ) -> None:
        """Change a setting.

        Args:
            key: Dotted name, such as `algorithm.entropy_coef`.
            value: New value, as in a configuration.
            has_progress: Whether the length of the run is known, for schedules.
            apply: Passes settings to the learners. If this function raises an error, the current
                settings are passed again and kept.

        Raises:
            ConfigError: If the setting must not change during training, or the value is invalid.
        """
        section, _, name = key.partition(".")
        names = list(changeable(self.current))
        if section != SECTION or name not in names:
            when, reason = when_changeable(self.current, name if section == SECTION else "")
            only = "may only change on resume" if when else "may not change while a run trains"
            problem = f"{only}; {one_of(name, names)} (section {SECTION})"
            raise ConfigError(key, reason or problem, value)
        config = replaced(self.current, {name: value}, SECTION)
        new = config.value_of(name)
        by_progress = isinstance(new, Schedule) and new.by == "progress" and not is_adaptive(new)
        if by_progress and not has_progress:
            problem = "the length of the run is unknown: use a number, or by: env_steps or updates"
            raise ConfigError(key, problem, value)
        try:
            apply(config)
        except BaseException:
            apply(self.current)
            raise
        self.current = config
        self._changed.add(name)

    def metrics(self, progress: Progress) -> dict[str, float]:
        """Return the current values of all changed settings that are numbers or schedules."""
        values = {name: self.current.value_of(name) for name in sorted(self._changed)}
        return {
            f"settings/{name}": float(scheduled_value(value, progress))
            for name, value in values.items()
            if value is not None and not is_adaptive(value)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the initial values of settings that may change, and the changed values."""
        return {"given": changeable(self._given), "changed": self.changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Repeat saved changes, except for settings with a new value on resume.

        Returns:
            Whether the current settings differ from the saved settings.
        """
        given = changeable(self._given)
        before: dict[str, Any] = {**state["given"], **state["changed"]}
        kept = {
            name: value
            for name, value in state["changed"].items()
            if name in given and given[name] == state["given"].get(name)
        }
        self.current = replaced(self._given, kept, SECTION)
        self._changed = set(kept)
        return changeable(self.current) != before


def changeable(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings that may change during training, as plain values keyed by name."""
    names = [f.name for f in fields(config) if f.metadata.get(CHANGES) == IN_RUN[CHANGES]]
    plain = config_to_dict(config)
    return {name: plain[key_of_field(name)] for name in names if name not in config.fixed_settings}
