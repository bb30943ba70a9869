"""Build configuration dataclasses from plain nested values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from maze_train.config.options import describe_options, list_options, read_option
from maze_train.config.other_names import ours_for
from maze_train.config.removed import check_removed, without_removed
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import (
    Known,
    Scalar,
    Settings,
    SettingsT,
    build_dataclass,
    builtin,
    dotted_name,
    field_of_key,
    join,
    key_of_field,
    subclass_named,
    unknown_key,
    written,
)
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.plain_yaml import load_yaml
from maze_train.core.targets import TARGET, InlineObject, target_name

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "env": "gymnasium.Env",
        "env.wrappers": "gymnasium.Wrapper",
        "env.training_wrappers": "gymnasium.Wrapper",
        "model.policy": "torch.nn.Module",
        "model.critic": "torch.nn.Module",
        "model.trunk": "torch.nn.Module",
        "model.value_transform": "maze_train.ValueTransform",
        "model.distributions": "maze_train.Distribution",
        "algorithm.policy_wrapper": "torch.nn.Module",
        "algorithm.optimizer": "torch.optim.Optimizer",
        "algorithm.lr_scheduler": "torch.optim.lr_scheduler.LRScheduler",
        "algorithm.loss": "maze_train.BCLoss",
        "algorithm.replay_buffer": "maze_train.BaseReplayBuffer",
        "algorithm.initial_sampling_policy": "maze_train.RandomPolicy",
        "algorithm.initial_demonstration_trajectories": "maze_train.TrajectoryDataset",
        "policies.source": "torch.nn.Module",
        "runner.dataset": "maze_train.TrajectoryDataset",
        "evaluation.evaluators": "maze_train.Evaluator",
        "evaluation.opponents": "torch.nn.Module",
        "tracking.writers": "maze_train.MetricsWriter",
        "callbacks": "maze_train.Callback",
    }
)
"""Components that are named by dotted path in a configuration, with their base classes. Components
are instantiated on use; all other nodes with a target are settings, which are built immediately."""

OF_SEVERAL = ("model.distributions", "evaluation.opponents")
"""Components with a mapping of nodes by name."""

FUNCTIONS = ("algorithm.loss_function",)
"""Components that are functions and are not instantiated."""

DATA = ("runner.dataset", "algorithm.initial_demonstration_trajectories")
"""Components that may be lists of episodes."""

OF_ONE = re.compile(
    r"^policies\.[^.]+\.(?=model\b)|(?<=^policies)\.[^.]+(?=\.source\b)"
    r"|(?<=^algorithm)\.overrides\.[^.]+"
)
"""Pattern of the part of a key that selects one policy or one module."""

PRESETS = "experiment"
"""Group of the presets."""

CHOICES = ("algorithm", "runner")
"""Sections whose options have different classes."""

SHORT_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "algorithm.optimizer": {
            name.lower(): f"torch.optim.{name}"
            for name in ("Adagrad", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD")
        },
        "algorithm.lr_scheduler": {
            name.lower(): f"torch.optim.lr_scheduler.{name}"
            for name in ("CosineAnnealingLR", "ExponentialLR", "LinearLR", "StepLR")
        },
        "tracking.writers": {
            "wandb": "maze_train.WandbWriter",
            "mlflow": "maze_train.MLflowWriter",
        },
    }
)
"""Dotted paths to suggest for short class names, by component and short name."""

SINGLE = ("algorithm.optimizer", "algorithm.lr_scheduler")
"""Components in `SHORT_NAMES` with a single node instead of a list."""

VARS = "vars"
"""Top-level key for values of the user, which only interpolations read."""

PLAIN = (str, bool, int, float, os.PathLike)


def named(node: object, key: str = "") -> object:
    """Return settings in which Python objects are replaced by nodes `{_target_: name}`.

    Classes, functions and instances are replaced if the key is a component or ends with `_target_`.
    Other objects are kept and cause an error when the settings are built.

    Args:
        node: Nested values that may contain such objects; not modified.
        key: Dotted key of the node.
    """
    node = builtin(node)
    if isinstance(node, Mapping):
        return {name: named(value, join(key, str(name))) for name, value in node.items()}
    place = place_of(key).partition("[")[0]
    if type(node) in (list, tuple) and place not in DATA:
        assert isinstance(node, (list, tuple))
        return type(node)(named(value, f"{key}[{i}]") for i, value in enumerate(node))
    is_plain = node is None or isinstance(node, (*PLAIN, Scalar))
    if is_plain or (is_dataclass(node) and not isinstance(node, type)):
        return node
    if key.endswith(f".{TARGET}"):
        return InlineObject(node)
    if place == "env" and not callable(node):
        return node  # Instances cannot be replicated for parallel environments.
    if place in (*PARTS, *FUNCTIONS) or place.rpartition(".")[0] in OF_SEVERAL:
        return {TARGET: InlineObject(node)}
    return node


def place_of(key: str) -> str:
    """Return a key without the part that selects one policy or one module."""
    return OF_ONE.sub("", key)


def load_config(node: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a run.

    Args:
        node: Values by field of `TrainConfig`, as a dict or as a `DictConfig` of OmegaConf.
            Sections (`env`, `algorithm`, `runner`, `model`, ...) can be mappings, the name of an
            option (`"ppo"`; for `env` also a registered id), or dataclass instances. A mapping for
            `algorithm` or `runner` contains a class as `_target_` or an option as `name`. Dotted
            keys set single values: `{"algorithm": "ppo", "algorithm.lr": 1e-3}`. `experiment`
            selects a preset; other values override the preset. `vars` is ignored.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type or is out of range, values
            contradict each other, or no algorithm is chosen.
    """
    values = nested_values(TrainConfig, node)
    if values.get("algorithm") is None:
        allowed = field_of_key(TrainConfig)
        unknown = [key for key in values if key not in allowed]
        if unknown:  # The key of the algorithm may be misspelt.
            raise unknown_key(unknown[0], values[unknown[0]], allowed)
        raise choose_one("algorithm")
    return load_settings(TrainConfig, values)


def nested_values(cls: type[Settings], node: Mapping[str, Any]) -> dict[str, Any]:
    """Expand option names, presets and dotted keys into nested values by field.

    Python objects are replaced by their names, see `named`.

    Args:
        cls: The class of the whole configuration.
        node: Values as for `load_config`; not modified.

    Raises:
        ConfigError: If an option does not exist, or a dotted key addresses a value that is not a
            mapping.
    """
    node = {key: named(value, key) for key, value in node.items()}
    values = {key: value for key, value in node.items() if "." not in key}
    options = {
        key: named_option(key, values.pop(key))
        for key, hint in cls.hints().items()
        if isinstance(values.get(key), str) and section_of(hint) is not None
    }
    if cls is TrainConfig and isinstance(values.get(PRESETS), str):
        options = named_option(PRESETS, values.pop(PRESETS), options)
    values = merged(options, values)
    for key, value in node.items():
        if "." in key:
            set_dotted(values, key, value)
    values.pop(VARS, None)
    return values


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into nested values recursively; values that are not mappings are replaced."""
    found = dict(values)
    for key, value in changes.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        found[key] = value
    return found


def load_settings(cls: type[SettingsT], node: Mapping[str, Any]) -> SettingsT:
    """Build the configuration of a command from values in the format of `load_config`.

    Adds `_target_` to `algorithm` and `runner`. The error for an unknown key suggests keys with the
    same name in other sections, or the setting that corresponds to the name in a different library.

    Raises:
        ConfigError: If a setting is invalid (see `load_config`), or a required option is missing.
    """
    values, removed = without_removed(nested_values(cls, node))
    check_removed(removed)
    for field in fields(cls):
        if field.name in CHOICES and isinstance(values.get(field.name), Mapping):
            values[field.name] = _with_target(field, values[field.name])
    try:
        return build_dataclass(cls, values)
    except ConfigError as error:
        if isinstance(error.remedy, Known):
            raise _with_meant(error, error.remedy, cls, values) from None
        place = place_of(error.key).partition("[")[0]
        path = SHORT_NAMES.get(place, {}).get(str(error.value).lower())
        if path is None:
            raise
        remedy = partial(written, value=path, in_list=place not in SINGLE)
        raise ConfigError(error.key, error.problem, error.value, remedy) from None


def _with_meant(
    error: ConfigError, known: Known, cls: type[Settings], values: Mapping[str, Any]
) -> ConfigError:
    """Return the error for an unknown key, with suggestions."""
    if error.key == PRESETS and isinstance(error.value, Mapping):
        problem = "its settings are nested below `experiment`; begin the file with the line "
        return ConfigError(error.key, f"{problem}`# @package _global_`", error.value)
    section, _, word = error.key.rpartition(".")
    keys = list(keys_of(cls, values))
    # Misspelt names of other libraries count if no setting has a similar name.
    cutoff = 1.0 if nearest(word, known.allowed, count=1) else 0.85
    meant = [key for key in ours_for(word, cutoff) if key in keys]
    if not meant:
        meant = [key for key in keys if key.rpartition(".")[2] == word]
        if "kwargs" in known.allowed and not nearest(word, known.allowed, count=1):
            meant.insert(0, join(section, f"kwargs.{word}"))
    if not meant:
        meant = [f"{key} (not available for this choice)" for key in ours_for(word)]
    remedy = replace(known, meant=tuple(meant))
    return ConfigError(error.key, error.problem, error.value, remedy)


def keys_of(cls: type[Settings], values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of all settings; `values` selects the classes of the sections."""
    for name, hint in cls.hints().items():
        key = join(path, key_of_field(name))
        yield key
        section, node = section_of(hint), values.get(key_of_field(name))
        if section is None:
            continue
        if isinstance(node, Settings):
            section = type(node)
        elif isinstance(node, Mapping) and TARGET in node and TARGET not in field_of_key(section):
            section = subclass_named(node[TARGET], section, join(key, TARGET))
        yield from keys_of(section, node if isinstance(node, Mapping) else {}, key)


def choose_one(group: str) -> ConfigError:
    """Return the error for a missing choice, with a list of all options and descriptions."""
    return ConfigError(group, f"choose one: {group}=<name>{_listing(group)}")


def unknown_option(group: str, name: str, folders: Iterable[str] = ()) -> ConfigError:
    """Return the error for an unknown option, with the closest name and a list of all options."""
    folders = list(folders)
    path = target_name(name)
    close = [f"{group}.{TARGET}={path}"] if path else nearest(name, list_options(group, folders), 1)
    hint = did_you_mean(close, "", " ")
    return ConfigError(group, f"no such option; {hint}available:{_listing(group, folders)}", name)


def _listing(group: str, folders: Iterable[str] = ()) -> str:
    options = describe_options(group, folders)
    width = max(map(len, options), default=0)
    return "".join(f"\n  {name:<{width}}  {text}".rstrip() for name, text in options.items())


def named_option(
    group: str, name: str, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the settings of an option, merged with its defaults list as in Hydra.

    Args:
        group: The group.
        name: Name of the option; a preset selects options of other groups.
        given: Options selected by the user, by group; they replace the options of a preset.

    Raises:
        ConfigError: If there is no such option.
    """
    text = read_option(group, name)
    if text is None:
        if group == "env":
            return {"id": name}
        raise unknown_option(group, name)
    content: dict[str, Any] = load_yaml(text)
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", ()):
        if isinstance(entry, Mapping):  # `override /<group>: <name>`, in a preset.
            choices = {key.rpartition("/")[2]: option for key, option in entry.items()}
            new = choices.keys() - given.keys()
            values.update({key: named_option(key, choices[key]) for key in new})
        elif entry != "_self_":  # Inherits from an option of the same group.
            values = merged(values, named_option(group, entry))
    return merged({**values, **given}, content)


def set_dotted(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value of a dotted key; the nested mappings along the path are copied."""
    *parents, last = key.split(".")
    node = values
    for depth, parent in enumerate(parents):
        child = node.get(parent)
        if child is not None and not isinstance(child, Mapping):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(key, f"{path} is {child!r} and has no keys", value)
        node[parent] = dict(child or {})
        node = node[parent]
    node[last] = value


def section_of(hint: object) -> type[Settings] | None:
    """Return the settings class X of a type hint `X` or `X | None`; None for other hints."""
    arms = [arm for arm in get_args(hint) or (hint,) if arm is not type(None)]
    is_section = len(arms) == 1 and isinstance(arms[0], type) and issubclass(arms[0], Settings)
    return arms[0] if is_section else None


def _with_target(field: Field[Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add `_target_` to the node of a choice; by default, the default class of the field."""
    if TARGET in node:
        return node
    if "name" in node:
        own = {key: value for key, value in node.items() if key != "name"}
        return {**named_option(field.name, str(node["name"])), **own}
    if field.default_factory is MISSING:
        raise choose_one(field.name)
    return {TARGET: dotted_name(field.default_factory), **node}
