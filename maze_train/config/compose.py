"""Composition of settings: the option files of `conf/` by Hydra, then the values that were given.

The command line is composed by Hydra alone (`hydra_input`). Both ways give the same configuration.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, get_args, get_origin

from maze_train.config.options import describe_options, list_options, read_option, shipped_root
from maze_train.config.other_names import other_names, ours_for
from maze_train.config.removed import check_removed, without_removed
from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import (
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
    written,
)
from maze_train.core.errors import ConfigError, did_you_mean, nearest
from maze_train.core.plain_yaml import load_yaml
from maze_train.core.targets import TARGET, InlineObject, is_within, target_name

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

ENV_OPTIONS = ("default", "id")
"""Shipped options of the group `env` that are not ids of environments."""

HIDDEN = "moved"
"""Setting of resumed runs that messages do not list."""

VARS = "vars"
"""Top-level key for values of the user, which only interpolations read."""

PLAIN = (str, bool, int, float, os.PathLike)

LOCK = threading.Lock()
"""Held while `options` changes the global version base of Hydra."""


@dataclass(frozen=True)
class Composed:
    """Settings of a command."""

    values: dict[str, Any]
    """Nested values of all settings."""

    given: frozenset[str]
    """Dotted names of the settings that the user set, including those set to their default."""


def compose(command: str, given: Mapping[str, Any]) -> Composed:
    """Compose the settings of a command from option names and values.

    Args:
        command: Name of the primary config, such as `train`.
        given: Values as for `load_config`; not modified.

    Raises:
        ConfigError: If an option does not exist, or a dotted key addresses a value that is not a
            mapping.
    """
    choices, others = choices_in(command, given)
    values = deepcopy(options(command, tuple(sorted(choices.items()))))
    return Composed(nested(others, values), names_in(choices, others))


def choices_in(command: str, given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the options by group that settings select, and the other settings.

    Args:
        command: Name of the primary config.
        given: Values as for `load_config`; not modified.

    Raises:
        ConfigError: If an option does not exist.
    """
    choices: dict[str, str] = {}
    changes: dict[str, Any] = {}  # Of the options that mappings select by `name`.
    others: dict[str, Any] = {}
    for key, value in given.items():
        node = builtin(value)
        if key in CHOICES and isinstance(node, Mapping) and "name" in node and TARGET not in node:
            changes |= {join(key, name): entry for name, entry in node.items() if name != "name"}
            node = str(node["name"])
        if key not in groups_of(command) or not isinstance(node, str):
            others[key] = node
        elif key == "env" and node not in ENV_OPTIONS:
            others[key] = {"id": node}
        elif read_option(key, node) is None:
            raise unknown_option(key, node)
        else:
            choices[key] = node
    return choices, {**changes, **others}


def composed_by_hydra(
    command: str, values: Mapping[str, Any], given: Mapping[str, Any]
) -> Composed:
    """Return the settings that Hydra composed for a command line.

    Files of the user may contain names of options in place of sections; these are composed here.

    Args:
        command: Name of the primary config.
        values: The composed values.
        given: The settings that the user set, by dotted name.
    """
    names = names_in({}, given)
    if choices_in(command, values) != ({}, values):
        return Composed(compose(command, values).values, names)
    return Composed(nested({key: values[key] for key in values if key != VARS}), names)


def names_in(choices: Mapping[str, str], others: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted names of the settings that the user set, see `choices_in`."""
    given = (_given_in(key, value) for key, value in others.items() if not is_within(key, [VARS]))
    return frozenset(choices).union(*given)


def _given_in(key: str, value: object) -> set[str]:
    """Return the dotted names of the values in a section.

    A section with all of its settings was composed or stored, so they were not set by the user.
    """
    if not isinstance(value, Mapping) or not value:
        return {key}
    section = section_of(TrainConfig.hints().get(key))
    if section is not None and field_of_key(section).keys() <= value.keys():
        return set()
    return set().union(*(_given_in(join(key, name), entry) for name, entry in value.items()))


@cache
def groups_of(command: str) -> frozenset[str]:
    """Return the groups in the defaults list of a primary config."""
    text = shipped_root().joinpath(f"{command}.yaml").read_text(encoding="utf-8")
    entries = load_yaml(text)["defaults"]
    bases = (entry for entry in entries if isinstance(entry, str) and entry != "_self_")
    groups = frozenset(key for entry in entries if isinstance(entry, Mapping) for key in entry)
    return groups.union(*map(groups_of, bases))


@cache  # A composition takes 0.1 s.
def options(command: str, choices: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Compose the shipped option files of a command by Hydra.

    `hydra.compose` raises an error inside an application of Hydra; its loader does not.

    Args:
        command: Name of the primary config.
        choices: Options by group.
    """
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra.core.plugins import Plugins
    from hydra.types import RunMode
    from hydra.version import VersionBase
    from omegaconf import OmegaConf

    Plugins.instance()  # Registers the kinds of sources.
    search_path = ConfigSearchPathImpl()
    search_path.append("hydra", "pkg://hydra.conf")
    search_path.append("main", "pkg://maze_train.conf")
    search_path.append("schema", "structured://")
    words = [f"{group}={name}" for group, name in choices]
    with LOCK:
        before = VersionBase.instance().version_base  # Of an application of the user.
        version.setbase("1.3")
        try:
            config = ConfigLoaderImpl(search_path).load_configuration(command, words, RunMode.RUN)
        finally:
            VersionBase.instance().version_base = before
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def nested(
    given: Mapping[str, Any], values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Merge sections and values by dotted name into nested values, except `vars`.

    Python objects are replaced by nodes, see `named`.

    Raises:
        ConfigError: If a dotted key addresses a value that is not a mapping.
    """
    node = {key: named(value, key) for key, value in given.items()}
    found = merged(values, {key: value for key, value in node.items() if "." not in key})
    for key, value in node.items():
        if "." in key:
            set_dotted(found, key, value)
    found.pop(VARS, None)
    return found


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


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into nested values recursively; values that are not mappings are replaced."""
    found = dict(values)
    for key, value in changes.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merged(old, value)
        found[key] = value
    return found


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
        ConfigError: If keys are unknown, a value has the wrong type or is out of range, values
            contradict each other, or no algorithm is chosen.
    """
    return build_config(compose("train", node))


def build_config(composed: Composed) -> TrainConfig:
    """Return the configuration of a run from composed settings, see `load_config`."""
    config = load_settings(TrainConfig, composed.values)
    config.given = composed.given
    return config


def load_settings(cls: type[SettingsT], node: Mapping[str, Any]) -> SettingsT:
    """Build the configuration of a command from nested values.

    Raises:
        ConfigError: If settings are invalid (see `load_config`), or a required option is missing.
    """
    values, removed = without_removed(node)
    check_removed(removed)
    check_keys(cls, values)
    for field in fields(cls):
        own = values.get(field.name)
        if field.name not in CHOICES or isinstance(own, Settings) or TARGET in (own or ()):
            continue
        if field.default_factory is MISSING:
            raise ConfigError(field.name, f"choose one: {field.name}=<name>{_listing(field.name)}")
        if isinstance(own, Mapping):
            values[field.name] = {TARGET: dotted_name(field.default_factory), **own}
    try:
        return build_dataclass(cls, values)
    except ConfigError as error:
        place = place_of(error.key).partition("[")[0]
        path = SHORT_NAMES.get(place, {}).get(str(error.value).lower())
        if path is None:
            raise
        remedy = partial(written, value=path, in_list=place not in SINGLE)
        raise ConfigError(error.key, error.problem, error.value, remedy) from None


def check_keys(cls: type[Settings], values: Mapping[str, Any]) -> None:
    """Raise ConfigError if nested values contain unknown keys; the message lists all of them."""
    unknown = [
        (join(path, key), value, [name for name in field_of_key(section) if name != HIDDEN])
        for section, node, path in sections_in(cls, values)
        for key, value in node.items()
        if key not in field_of_key(section)
    ]
    if not unknown:
        return
    known, lines = list(keys_of(cls, values)), []
    for key, _, allowed in unknown:
        hint = did_you_mean(meant_by(key, known, allowed), "", " ")
        others = "" if len(unknown) > 1 else f"allowed: {', '.join(allowed)}"
        lines.append("; ".join(filter(None, ["unknown", f"{hint}{others}".strip()])))
    (first, value, _), *more = unknown
    if first == PRESETS and isinstance(value, Mapping):
        lines[0] = "its settings are nested below `experiment`; begin the file with the line "
        lines[0] += "`# @package _global_`"
    text = [
        f"\n{key} = {value!r}: {line}"
        for (key, value, _), line in zip(more, lines[1:], strict=True)
    ]
    raise ConfigError(first, lines[0] + "".join(text), value)


def meant_by(key: str, known: Collection[str], allowed: Collection[str]) -> list[str]:
    """Return the settings that an unknown key may mean.

    Args:
        key: Dotted name of the unknown key.
        known: Dotted names of all settings.
        allowed: Names of the settings in the section of the key.
    """
    section, _, word = key.rpartition(".")
    close = [join(section, name) for name in nearest(word, allowed, count=1)]
    # Misspelt names of other libraries count if no setting has a similar name.
    meant = [name for name in ours_for(word, 1.0 if close else 0.85) if name in known]
    if not meant:
        meant = [name for name in known if name.rpartition(".")[2] == word]
        if "kwargs" in allowed and not close:
            meant.insert(0, join(section, f"kwargs.{word}"))
    others = ours_for(word)
    if not others and not close:
        others = [name for name in other_names() if name.endswith(f".{word}")]
    choice = {"runner": "with runner=local"}
    others = [
        f"{name} ({choice.get(name.partition('.')[0], 'not available for this choice')})"
        for name in others
    ]
    return meant or others or close


def sections_in(
    hint: object, value: object, path: str = ""
) -> Iterator[tuple[type[Settings], Mapping[str, Any], str]]:
    """Yield the mappings of sections in a value, each with its class and its dotted name.

    Args:
        hint: Type hint of the value.
        value: Nested values.
        path: Dotted name of the value.
    """
    section = section_of(hint)
    if section is not None and isinstance(value, Mapping):
        node = dict(value)
        if TARGET in node and TARGET not in field_of_key(section):
            section = subclass_named(node.pop(TARGET), section, join(path, TARGET))
        yield section, node, path
        for name, inner in section.hints().items():
            key = key_of_field(name)
            yield from sections_in(inner, node.get(key), join(path, key))
    elif get_origin(hint) is dict and isinstance(value, Mapping):
        for key, entry in value.items():
            yield from sections_in(get_args(hint)[1], entry, join(path, key))
    elif get_origin(hint) is list and isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            yield from sections_in(get_args(hint)[0], entry, f"{path}[{i}]")


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


def section_of(hint: object) -> type[Settings] | None:
    """Return the settings class X of a type hint `X` or `X | None`; None for other hints."""
    arms = [arm for arm in get_args(hint) or (hint,) if arm is not type(None)]
    is_section = len(arms) == 1 and isinstance(arms[0], type) and issubclass(arms[0], Settings)
    return arms[0] if is_section else None


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
