"""The policy of an earlier run as the beginning of training: its networks, weights, statistics."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.spaces import Box

from maze_train.config.stored import CONFIG_FILE, PARTS_OF_POLICY, settings_of_run
from maze_train.distributions.mapping import DEFAULTS, family_class
from maze_train.errors import ConfigError, RunDirectoryError, SpaceError
from maze_train.nets.building import input_space
from maze_train.nets.config import ModelConfig
from maze_train.nets.population import find_normalizer
from maze_train.runners.saved_policies import SavedPolicy, load_weights, read_saved_policy
from maze_train.spaces.compare import check_same_spaces
from maze_train.spaces.describe import flat_space, flat_spaces
from maze_train.targets import TARGET, locate

if TYPE_CHECKING:
    from torch import nn

    from maze_train.config.train_config import TrainConfig
    from maze_train.training.config import AlgorithmConfig
    from maze_train.types import Tensor

__all__ = ["TakenOver", "check_base_spaces", "take_over", "with_base_model"]

KEY = "base_run"

POLICY_PARTS = ("normalizer", "trunk", "memory", "policy")
"""Parts of a model that make up its policy; all models name them alike."""

CRITIC_PARTS = ("value_head", "critic", "critics", "target_critics")
"""Parts that judge. Nothing else is taken over: temperatures are settings of the new run."""

POLICY_SETTINGS = (
    "hidden_sizes",
    "activation",
    "shared_trunk",
    "image_encoder",
    "memory",
    "normalization",
    "branch_size",
    "orthogonal_init",
    "distributions",
    "policy",
    "trunk",
)
"""Settings of a model that describe its policy."""

CRITIC_SETTINGS = ("critic", "value_transform", "value_support")
"""Settings that say what the numbers of a critic mean; its sizes are seen in its weights."""

FREE_SETTINGS = ("orthogonal_init", "normalization.n_steps")
"""Settings of how weights and statistics begin: here they begin with those of the base."""

PLAIN_WORD = re.compile(r"[A-Za-z_][\w.]*")
"""Text that needs no quotes on the command line of `maze-run`."""


@dataclass(frozen=True)
class TakenOver:
    """Parts of the model that a run takes from its base.

    Attributes:
        taken: Parts of the model with the weights of the base.
        new: The other parts that have weights.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{KEY}: took over {', '.join(self.taken)}"
        return f"{text}; new: {', '.join(self.new)}" if self.new else text


def with_base_model(config: TrainConfig, resumed_dir: Path | None) -> TrainConfig:
    """The configuration of a run with a base, with the networks of its policy.

    Where no setting of `model` about the policy is given, all of these become what they were in the
    base, with the defaults of its algorithm filled in. Where one is given, all stay as they are,
    and `take_over` says what does not fit.

    Args:
        config: The configuration; `base_run` is set.
        resumed_dir: Directory of a run that is continued, which has its networks already; its base
            may be gone. None: a new run.

    Raises:
        ConfigError: If there is no policy, or the algorithm can not learn with it.
    """
    assert config.base_run is not None
    given, defaults = config.model, ModelConfig()
    if any(getattr(given, name) != getattr(defaults, name) for name in POLICY_SETTINGS):
        return config
    if resumed_dir is not None:
        stored = settings_of_run(resumed_dir / CONFIG_FILE, config, PARTS_OF_POLICY)
        own: dict[str, Any] = {name: getattr(stored.model, name) for name in POLICY_SETTINGS}
    else:
        saved = _read(config)
        own = policy_settings(saved.config.model, saved.config.algorithm, _spaces(saved))
        _check_can_learn(config, own, saved)
    try:
        model = replace(given, **own)
    except ConfigError as error:
        raise error.below("model") from None
    return replace(config, model=model)


def check_base_spaces(config: TrainConfig, own_spaces: tuple[Any, Any]) -> None:
    """Refuse a base with other spaces, before a model is built for those of the environment.

    Args:
        config: Configuration of the new run.
        own_spaces: Observation and action space of one environment.

    Raises:
        ConfigError: If there is no policy, or its spaces are others.
    """
    assert config.base_run is not None
    problem = "its policy has the {kind} space {found}, the environment has {wanted}"
    saved = _read(config)
    check_same_spaces(KEY, problem, _spaces(saved), own_spaces, config.base_run)


def take_over(config: TrainConfig, model: nn.Module) -> TakenOver:
    """Write the weights of the policy that `base_run` names into a model.

    The policy has to be the same function entirely, with its statistics of observations. Whether
    these change from now on is what `model.normalization.mode` of the new run says. A critic is
    taken over where the saved model has one of the same kind, with its targets; other parts, such
    as temperatures, stay as they are.

    Args:
        config: Configuration of the new run, whose spaces are those of its base.
        model: The model to be trained; changed in place.

    Raises:
        ConfigError: If there is no policy, or its networks do not fit.
    """
    assert config.base_run is not None
    directory = config.base_run
    saved = _read(config)
    _check_settings(config, saved)
    found, wanted = _by_part(saved.weights), _by_part(model.state_dict())
    _check_weights(directory, found, wanted)
    parts, base = [*POLICY_PARTS], saved.config.model
    if all(getattr(base, name) == getattr(config.model, name) for name in CRITIC_SETTINGS):
        parts.extend(CRITIC_PARTS)
    taken = [part for part in wanted if part in parts and _fits(found.get(part, {}), wanted[part])]
    chosen = {name: value for part in taken for name, value in found[part].items()}
    try:
        load_weights(model, {**model.state_dict(), **chosen}, Path(directory))
    except RunDirectoryError as error:
        raise ConfigError(KEY, str(error), directory) from error
    normalizer = find_normalizer(model)
    if normalizer is not None:
        is_estimated = config.model.normalization.mode == "estimated"
        normalizer.frozen.fill_(is_estimated and bool(normalizer.count > 0))
    return TakenOver(tuple(taken), tuple(part for part in wanted if part not in taken))


def policy_settings(
    model: ModelConfig, algorithm: AlgorithmConfig, spaces: tuple[Any, Any]
) -> dict[str, Any]:
    """The settings of a policy by name, with the defaults of an algorithm filled in.

    Args:
        model: Settings of the model.
        algorithm: Whose defaults these are.
        spaces: Observation and action space of one environment.

    Raises:
        SpaceError: If a space can not be described.
    """
    observation_space, action_space = spaces
    resolve = locate(algorithm.model_resolver)
    resolved: ModelConfig = resolve(model, input_space(flat_space(observation_space)))
    settings = {name: getattr(resolved, name) for name in POLICY_SETTINGS}
    families = dict(resolved.distributions)
    # Of all types of spaces, only this one has defaults that differ between algorithms.
    if any(isinstance(leaf, Box) for leaf in flat_spaces(action_space).values()):
        families.setdefault("Box", DEFAULTS["Box"])
    else:
        families.pop("Box", None)
    return {**settings, "distributions": families}


def _read(config: TrainConfig) -> SavedPolicy:
    directory = config.base_run
    assert directory is not None
    try:
        return read_saved_policy(directory, config.trust, config)
    except RunDirectoryError as error:
        raise ConfigError(KEY, str(error), directory) from error
    except ConfigError as error:
        problem = f"the configuration of its policy can not be read: {error}"
        raise ConfigError(KEY, problem, directory) from error


def _spaces(saved: SavedPolicy) -> tuple[Any, Any]:
    return saved.observation_space, saved.action_space


# -- whether an algorithm can learn with a policy ------------------------------------------------


def _check_can_learn(config: TrainConfig, settings: dict[str, Any], saved: SavedPolicy) -> None:
    """Refuse networks that the algorithm does not build, and say how to train the base instead.

    Settings that are refused are replaced by the defaults of the algorithm, one after the other,
    until the model can be built: then all of them are known.
    """
    algorithm = config.algorithm
    defaults = {name: getattr(ModelConfig(), name) for name in POLICY_SETTINGS}
    changed: dict[str, Any] = {}
    first: ConfigError | SpaceError | None = None
    if algorithm.learns_from == "dataset" and settings["memory"] is not None:
        first = ConfigError("model.memory", f"{algorithm.name} learns from single transitions")
        changed = {name: defaults[name] for name in ("memory", "shared_trunk")}
    while (error := _refusal(algorithm, {**settings, **changed}, saved)) is not None:
        name = "distributions"
        if isinstance(error, ConfigError):
            name = error.key.removeprefix("model.").partition(".")[0]
        if name in changed or name not in settings:
            problem = f"{algorithm.name} can not build its policy: {error}"
            raise ConfigError(KEY, problem, config.base_run) from error
        first, changed[name] = first or error, defaults[name]
    if first is None:
        return
    own = policy_settings(ModelConfig(), algorithm, _spaces(saved))
    raise ConfigError(
        KEY,
        f"{algorithm.name} can not learn with its policy ({first}): train the base with "
        f"{_overrides({name: own[name] for name in changed})}",
        config.base_run,
    ) from first


def _refusal(
    algorithm: AlgorithmConfig, settings: dict[str, Any], saved: SavedPolicy
) -> ConfigError | SpaceError | None:
    """Error that says why an algorithm builds no such policy; None: it does."""
    build_model = locate(algorithm.model_builder)
    try:
        build_model(ModelConfig(**settings), *_spaces(saved), seed=0, **algorithm.model_settings)
    except (ConfigError, SpaceError) as error:
        return error
    return None


# -- whether a policy is the same function --------------------------------------------------------


def _check_settings(config: TrainConfig, saved: SavedPolicy) -> None:
    """Refuse networks with other settings: with weights of equal shapes they act otherwise."""
    spaces = _spaces(saved)
    base = policy_settings(saved.config.model, saved.config.algorithm, spaces)
    there = _one_by_one(base)
    here = _one_by_one(policy_settings(config.model, config.algorithm, spaces))
    differing = [name for name in there if not _is_same(name, there, here)]
    if not differing:
        return
    _check_can_learn(config, base, saved)
    told = [f"{name}: {_text(there[name])} there, {_text(here[name])} here" for name in differing]
    raise ConfigError(
        KEY,
        f"its policy does not fit the networks of this run ({'; '.join(told)}): set "
        f"{_overrides({name: there[name] for name in differing})}, or leave out all settings of "
        "model that are about the policy: then they are those of the base",
        config.base_run,
    )


def _one_by_one(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a policy, those of the normalisation one by one."""
    found = {name: value for name, value in settings.items() if name != "normalization"}
    for name, value in asdict(settings["normalization"]).items():
        found[f"normalization.{name}"] = value
    return found


def _is_same(name: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Whether a setting makes no difference between two policies."""
    mode = "normalization.mode"
    is_normalised: tuple[bool, bool] = there[mode] != "none", here[mode] != "none"
    if name == mode:
        return is_normalised[0] is is_normalised[1]
    if name in FREE_SETTINGS or (name.startswith("normalization.") and not all(is_normalised)):
        return True
    one, other = there[name], here[name]
    if name == "distributions":
        one, other = _families(one), _families(other)
    return bool(one == other)


def _families(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Families of distributions in one form: defaults of settings are filled in."""
    found: dict[str, Any] = {}
    for key, override in {**DEFAULTS, **overrides}.items():
        if isinstance(override, Mapping) and TARGET in override:
            found[key] = dict(override)
            continue
        given = {"name": override} if isinstance(override, str) else dict(override)
        family = family_class(given.pop("name"))
        parameters = signature(family).parameters.values()
        settings = {p.name: p.default for p in parameters if p.default is not p.empty} | given
        if not settings.get("state_dependent_std"):
            settings.pop("initial_log_std", None)  # where weights begin, and these are there
        found[key] = (family, settings)
    return found


def _overrides(settings: Mapping[str, Any]) -> str:
    """Settings of a model as one types them after `maze-run`."""
    words = (f"model.{name}={_text(value)}" for name, value in settings.items())
    return " ".join(shlex.quote(word) if re.search(r"[\s{}'\"]", word) else word for word in words)


def _text(value: Any) -> str:
    """A value as the command line reads it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str) and PLAIN_WORD.fullmatch(value):
        return value
    return json.dumps(value)


# -- weights --------------------------------------------------------------------------------------


def _by_part(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for name, value in weights.items():
        parts.setdefault(name.partition(".")[0], {})[name] = value
    return parts


def _fits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    same_names = found.keys() == wanted.keys()
    return same_names and all(found[name].shape == wanted[name].shape for name in wanted)


def _check_weights(
    directory: str,
    found: Mapping[str, Mapping[str, Tensor]],
    wanted: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse other weights under equal settings, as networks of a user and wrappers may have."""
    for part in POLICY_PARTS:
        saved, own = found.get(part, {}), wanted.get(part, {})
        if _fits(saved, own):
            continue
        differing = [
            f"{name}: {_shape(saved.get(name))} there, {_shape(own.get(name))} here"
            for name in sorted({*saved, *own})
            if _shape(saved.get(name)) != _shape(own.get(name))
        ]
        raise ConfigError(
            KEY,
            f"the weights of its policy do not fit those of this run ({'; '.join(differing[:3])}"
            f"{'; ...' if len(differing) > 3 else ''}): both need the same networks of your own "
            "(model.policy, model.trunk) and no algorithm.policy_wrapper",
            directory,
        )


def _shape(value: Tensor | None) -> str:
    return "nothing" if value is None else str(list(value.shape))
