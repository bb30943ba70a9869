"""Settings of the algorithm that callbacks change during training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
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
from maze_train.core.errors import ConfigError, did_you_mean, one_of
from maze_train.learner.config import Progress, Schedule, is_adaptive, scheduled_value
from maze_train.training.config import AlgorithmConfig

SECTION = "algorithm"
OVERRIDES = "overrides."
"""Prefix of the names of settings of single modules."""


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
        value: object,
        has_progress: bool,
        apply: Callable[[AlgorithmConfig], object] = lambda config: None,
        module_ids: Collection[str] = (),
    ) -> None:
        """Change a setting.

        Args:
            key: Dotted name, such as `algorithm.entropy_coef`, or `algorithm.overrides.wolf.lr` for
                a single module.
            value: New value, as in a configuration.
            has_progress: Whether the length of the run is known, for schedules.
            apply: Passes settings to the learners. If this function raises an error, the current
                settings are passed again and kept.
            module_ids: IDs of all modules.

        Raises:
            ConfigError: If the setting must not change during training, or the value is invalid.
        """
        section, _, path = key.partition(".")
        module_id, name = split(path)
        if module_id and module_id not in module_ids:
            problem = f"no such module; {one_of(module_id, module_ids)}. Agents have no settings"
            raise ConfigError(key, f"{problem}: change those of their policy", value)
        own = of_module(self.current, module_id)
        names = list(changeable(own))
        if section != SECTION or name not in names:
            when, reason = when_changeable(own, name if section == SECTION else "")
            if section != SECTION and (meant := key.rpartition(".")[2]) in names:
                reason = f"unknown; did you mean {SECTION}.{meant}?"
            only = "may only change on resume" if when else "may not change while a run trains"
            problem = f"{only}; {one_of(name, names)} (section {SECTION})"
            raise ConfigError(key, reason or problem, value)
        config = changed_config(self.current, {path: value})
        new = of_module(config, module_id).value_of(name)
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
        self._changed.add(path)

    def value(self, key: str, progress: Progress) -> float | None:
        """Return the current value of a setting; None for a learning rate that adapts to the KL.

        Args:
            key: Dotted name, see `change`.
            progress: Progress of training.

        Raises:
            ConfigError: If there is no such setting, or its value is not a number.
        """
        section, _, path = key.partition(".")
        module_id, name = split(path)
        own = of_module(self.current, module_id)
        numbers = [
            known
            for known in own.hints()
            if isinstance(own.value_of(known), float | int | Schedule)
            and not isinstance(own.value_of(known), bool)
        ]
        if section != SECTION or name not in numbers:
            meant = [f"{SECTION}.{key.rpartition('.')[2]}"] if section != SECTION else []
            hint = did_you_mean([m for m in meant if m.partition(".")[2] in numbers], "", " ")
            problem = f"not a number of the algorithm; {hint}{one_of(name, numbers)}"
            raise ConfigError(key, problem)
        value = own.value_of(name)
        return None if is_adaptive(value) else float(scheduled_value(value, progress))

    def metrics(self, progress: Progress) -> dict[str, float]:
        """Return the current values of all changed settings that are numbers or schedules."""
        values = {}
        for module_id, name in map(split, sorted(self._changed)):
            tag = f"{module_id}/{name}" if module_id else name
            values[tag] = of_module(self.current, module_id).value_of(name)
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
            if (name in given or split(name)[0]) and given.get(name) == state["given"].get(name)
        }
        self.current = changed_config(self._given, kept)
        self._changed = set(kept)
        return changeable(self.current) != before


def changeable(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings that may change during training, as plain values keyed by name.

    The names of overridden settings of modules are `overrides.<module_id>.<name>`.
    """
    names = [f.name for f in fields(config) if f.metadata.get(CHANGES) == IN_RUN[CHANGES]]
    plain = config_to_dict(config)
    found = {name: plain[key_of_field(name)] for name in names if name not in config.fixed_settings}
    for module_id, own in overrides_of(config).items():
        may_change = changeable(of_module(config, module_id))
        found |= {f"{OVERRIDES}{module_id}.{k}": x for k, x in own.items() if k in may_change}
    return found


def split(path: str) -> tuple[str, str]:
    """Split the name of a setting into the module ID, empty for all modules, and the field."""
    if not path.startswith(OVERRIDES):
        return "", path
    module_id, _, name = path.removeprefix(OVERRIDES).rpartition(".")
    return module_id, name


def overrides_of(config: AlgorithmConfig) -> Mapping[str, Mapping[str, Any]]:
    """Return the overrides of modules; empty for algorithms without overrides."""
    return config.gradient_settings().overrides


def of_module(config: AlgorithmConfig, module_id: str) -> AlgorithmConfig:
    """Return the settings of a module, or the shared settings if `module_id` is empty."""
    return config.for_module(module_id) if module_id else config


def changed_config(config: AlgorithmConfig, changes: Mapping[str, Any]) -> AlgorithmConfig:
    """Return settings with changes, keyed by name.

    Raises:
        ConfigError: If a value is invalid, or a setting cannot be set per module.
    """
    node: dict[str, Any] = {}
    overrides = {module_id: dict(own) for module_id, own in overrides_of(config).items()}
    for path, value in changes.items():
        module_id, name = split(path)
        if module_id:
            overrides.setdefault(module_id, {})[name] = value
            node["overrides"] = overrides
        else:
            node[name] = value
    return replaced(config, node, SECTION)
