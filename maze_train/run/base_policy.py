"""Initialize training from the policy of an earlier run: networks, weights, statistics."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from maze_train.config.stored import PARTS_OF_POLICY, settings_of_run
from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import ConfigError, RunDirectoryError, SpaceError
from maze_train.core.run_directory import RunDirectory
from maze_train.core.targets import locate
from maze_train.core.types import Tensor
from maze_train.distributions.mapping import DEFAULTS
from maze_train.nets.config import ModelConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.run.saved_policies import SavedPolicy, load_weights, read_saved_policy, read_source
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import check_same_spaces
from maze_train.training.models import (
    POLICY_SETTINGS,
    modules_of,
    policy_settings,
    spaces_of_policies,
)
from maze_train.training.multi_agent_models import policies_of_agents

WeightsByPart: TypeAlias = "dict[str, dict[str, Tensor]]"

KEY = "base_run"

POLICY_PARTS = ("normalizer", "trunk", "rnn", "policy")
"""Names of the submodules that form the policy of a model."""

CRITIC_PARTS = ("value_head", "critic", "critics", "target_critics")
"""Names of the submodules that form the critic. Other submodules, such as temperatures, are not
transferred."""

CRITIC_SETTINGS = ("critic", "value_transform", "value_support")
"""Model settings that define the meaning of critic outputs; sizes follow from the weights."""

FREE_SETTINGS = ("orthogonal_init",)
"""Settings of weight initialization; they have no effect with a base policy."""

ONLY_PART = {"normalization": "normalization.mode"}
"""Setting that decides whether a section was set to its default, by section."""

OWNER = re.compile(r"policies\.[^.]+\.")
"""Prefix of the weights of a policy in multi-agent models."""

PLAIN_WORD = re.compile(r"[A-Za-z_][\w.]*")
"""Text that needs no quotes on the `maze-run` command line."""


class BasePolicy:
    """Policy of an earlier run that initializes a run or one of its policies.

    Args:
        config: Configuration of the new run.
        policy: ID of the policy with this `source`; None: `base_run` is used.

    Attributes:
        key: Setting that names the run.
        directory: Directory of the earlier run.
        is_frozen: Whether the policy is frozen.
    """

    def __init__(self, config: TrainConfig, policy: str | None = None) -> None:
        own = None if policy is None else config.policies[policy]
        self.config, self.policy = config, policy
        self.key = KEY if own is None else f"policies.{policy}.source"
        self.directory = str(config.base_run if own is None else own.run)
        self.is_frozen = own is not None and own.frozen

    @cached_property
    def saved(self) -> SavedPolicy:
        """The policy with the configuration of its run; read on first use.

        Raises:
            ConfigError: If the policy is missing, or its configuration cannot be read.
        """
        try:
            read = read_saved_policy if self.policy is None else read_source
            return read(self.directory, self.config.trust, self.config)
        except RunDirectoryError as error:
            raise self._refusal(str(error)) from error
        except ConfigError as error:
            problem = f"the configuration of its policy cannot be read: {error}"
            raise self._refusal(problem) from error

    def with_networks(self, resumed_dir: Path | None) -> TrainConfig:
        """Return the configuration of the new run with the networks of the policy.

        Policy settings in `model` are replaced by the settings of the base policy, including the
        defaults of its algorithm. Settings that the user set, also to a default, must equal the
        settings of the base policy, except for weight initialization and observation statistics.

        Args:
            resumed_dir: Directory of a resumed run, whose stored networks are used (the base policy
                may have been removed); None: a new run.

        Raises:
            ConfigError: If the policy is missing, a setting differs, or the algorithm does not
                support the policy.
        """
        given, defaults = self.model_of(self.config), ModelConfig()
        section = "model" if self.policy is None else f"policies.{self.policy}.model"
        named = {
            name: value
            for name in POLICY_SETTINGS
            if (value := given.value_of(name)) != defaults.value_of(name)
            or self.config.is_given(f"{section}.{ONLY_PART.get(name, name)}")
        }
        if resumed_dir is not None:
            stored = settings_of_run(RunDirectory(resumed_dir).config, self.config, PARTS_OF_POLICY)
            own = {name: self.model_of(stored).value_of(name) for name in POLICY_SETTINGS}
        else:
            config = self.saved.config
            own = policy_settings(config.model, config.algorithm, self.saved.spaces)
            self._check_can_learn(own)
            self._check_settings(named, own)
            if (given.centralized_critic or own["critic_obs"]) and own["shared_trunk"]:
                own["shared_trunk"] = None  # Recurrent and image policies share no trunk.
        try:
            model = replace(given, **{**own, **named})
            if self.policy is None:
                return replace(self.config, model=model)
            policies = {**self.config.policies}
            policies[self.policy] = replace(policies[self.policy], model=model)
            return replace(self.config, policies=policies)
        except ConfigError as error:
            raise error.below("model") from None

    def model_of(self, config: TrainConfig) -> ModelConfig:
        """Return the settings of the networks into which the weights are loaded."""
        if self.policy is None:
            return config.model
        own, defaults = config.policies[self.policy].model, ModelConfig()
        unsaid = {name: defaults.value_of(name) for name in POLICY_SETTINGS}
        return replace(config.model, **unsaid) if own is None else own

    def check_spaces(self, own_spaces: tuple[Any, Any]) -> None:
        """Check that the policy matches the spaces of the environment, before building a model.

        Args:
            own_spaces: Observation and action space of one environment.

        Raises:
            ConfigError: If the policy is missing, or its spaces differ.
        """
        wanted, owner = own_spaces, "the environment"
        if self.policy is not None:
            several = agent_spaces(*own_spaces)
            if several is None:
                return  # Building the model reports this error.
            owners = policies_of_agents(several, self.config.policies)
            owner = next(agent for agent, policy in owners.items() if policy == self.policy)
            wanted = several.of(owner)
        problem = f"its policy has the {{kind}} space {{found}}, {owner} has {{wanted}}"
        check_same_spaces(self.key, problem, self.saved.spaces, wanted, self.directory)

    def take_over(self, model: nn.Module) -> str:
        """Load the weights of the policy and its observation statistics into a model.

        The new policy must compute the same function. `model.normalization.mode` of the new run
        determines whether statistics are updated. Critics and their targets are loaded if the saved
        model has critics of the same kind. Other parts, such as temperatures, are not changed.

        Args:
            model: Model to train; changed in place.

        Returns:
            Message that lists the loaded and the newly initialized parts.

        Raises:
            ConfigError: If the policy is missing, or its networks do not match.
        """
        if self.policy is not None:
            model = modules_of(model)[self.policy]
        found, wanted = _by_part(self.saved.weights), _by_part(model.state_dict())
        self._check_weights(found, wanted)
        own = self.model_of(self.config)
        parts, base = [*POLICY_PARTS], self.saved.config.model
        scaled = [c.algorithm.scales_rewards for c in (self.saved.config, self.config)]
        same = all(base.value_of(name) == own.value_of(name) for name in CRITIC_SETTINGS)
        if same and scaled[0] == scaled[1]:
            parts.extend(CRITIC_PARTS)
        taken = [
            part for part in wanted if _kind(part) in parts and _fits(found.get(part), wanted[part])
        ]
        chosen = {name: value for part in taken for name, value in found[part].items()}
        # Target networks that are not saved start as copies of the loaded networks.
        copied = [part for part in taken if _target(part) in {*wanted} - {*taken}]
        for part in copied:
            chosen |= {_target(name): value for name, value in found[part].items()}
        taken.extend(map(_target, copied))
        try:
            load_weights(model, {**model.state_dict(), **chosen}, Path(self.directory))
        except RunDirectoryError as error:
            raise self._refusal(str(error)) from error
        for normalizer in model.modules():
            if isinstance(normalizer, ObservationNormalizer):
                is_estimated = own.normalization.mode == "estimated" and bool(normalizer.count > 0)
                normalizer.frozen.fill_(self.is_frozen or is_estimated)
        new = [part for part in wanted if part not in taken]
        text = f"{self.key}: loaded {', '.join(taken)}"
        return f"{text}; new: {', '.join(new)}" if new else text

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(self.key, problem, self.directory)

    def _check_can_learn(self, settings: dict[str, Any]) -> None:
        """Raise ConfigError if the algorithm does not support the networks of the base policy.

        The message names the first unsupported setting.
        """
        algorithm, spaces = self.config.algorithm, self.saved.spaces
        build_model = locate(algorithm.model_builder)
        # The default of shared_trunk depends on rnn; the error should then name rnn.
        settings = {**settings, "shared_trunk": self.saved.config.model.shared_trunk}
        try:
            if algorithm.learns_from == "dataset" and settings["rnn"] is not None:
                problem = f"{algorithm.name} learns from single transitions"
                raise ConfigError("model.rnn", problem)
            for own in spaces_of_policies(spaces):
                build_model(ModelConfig(**settings), *own, seed=0, **algorithm.model_settings)
        except (ConfigError, SpaceError) as error:
            key = error.key if isinstance(error, ConfigError) else "distributions"
            name = key.removeprefix("model.").partition(".")[0]
            problem = f"{algorithm.name} cannot learn with its policy ({error})"
            if name in settings:
                fitting = policy_settings(ModelConfig(), algorithm, spaces)[name]
                problem += f": train the base with {_overrides({name: fitting})}"
            raise self._refusal(problem) from error

    def _check_settings(self, named: dict[str, Any], own: dict[str, Any]) -> None:
        """Check that the settings are equal; networks of equal shape may differ in function."""
        here, there = _one_by_one(named), _one_by_one(own)
        differing = [name for name in here if name in there and _differs(here[name], there[name])]
        if differing:
            found = [
                f"{name}: {_text(there[name])} there, {_text(here[name])} here"
                for name in differing
            ]
            raise self._refusal(
                f"its policy does not fit the networks of this run ({'; '.join(found)}); remove "
                "these settings to use the values of the base, or set "
                f"{_overrides({name: there[name] for name in differing})}"
            )

    def _check_weights(self, found: WeightsByPart, wanted: WeightsByPart) -> None:
        """Check that the weights have the same names and shapes."""
        for part in {**found, **wanted}:
            saved, own = found.get(part, {}), wanted.get(part, {})
            if _kind(part) not in POLICY_PARTS or _fits(saved, own):
                continue
            shapes = [
                (name, _shape(saved.get(name)), _shape(own.get(name)))
                for name in sorted({*saved, *own})
            ]
            differing = [f"{name}: {a} there, {b} here" for name, a, b in shapes if a != b]
            shown = "; ".join(differing[:3]) + ("; ..." if len(differing) > 3 else "")
            raise self._refusal(
                f"the weights of its policy do not fit the networks of this run ({shown}): "
                f"{self.saved.advice(self.config.algorithm, self.model_of(self.config))}"
            )


def _one_by_one(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect actions, with normalisation settings flattened."""
    found = {name: value for name, value in settings.items() if name not in FREE_SETTINGS}
    normalization = found.pop("normalization", None)
    if normalization is not None:
        is_on = normalization.mode != "none"
        found["normalization.mode"] = "running" if is_on else "none"
        if is_on:
            found["normalization.clip"] = normalization.clip
            found["normalization.exclude"] = normalization.exclude
    return found


def _differs(one: object, other: object) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):  # Distribution families.
        return {**DEFAULTS, **one} != {**DEFAULTS, **other}
    return bool(one != other)


def _overrides(settings: Mapping[str, Any]) -> str:
    """Format settings of a model for the command line."""
    return shlex.join(f"model.{name}={_text(value)}" for name, value in settings.items())


def _text(value: object) -> str:
    """Format a value for the command line."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, str) and PLAIN_WORD.fullmatch(value):
        return value
    return json.dumps(value)


def _by_part(weights: Mapping[str, Tensor]) -> WeightsByPart:
    parts: WeightsByPart = {}
    for name, value in weights.items():
        owner, rest = _split(name)
        parts.setdefault(owner + rest.partition(".")[0], {})[name] = value
    return parts


def _split(name: str) -> tuple[str, str]:
    """Split a name into policy prefix (empty for a single policy) and the rest."""
    found = OWNER.match(name)
    return (found.group(), name[found.end() :]) if found else ("", name)


def _kind(part: str) -> str:
    """Return the name of a part without its policy."""
    return _split(part)[1]


def _target(name: str) -> str:
    """Return the name of the target of a part or weight."""
    owner, rest = _split(name)
    return f"{owner}target_{rest}"


def _fits(found: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor]) -> bool:
    found = found or {}
    same_names = found.keys() == wanted.keys()
    return same_names and all(found[name].shape == wanted[name].shape for name in wanted)


def _shape(value: Tensor | None) -> str:
    return "nothing" if value is None else str(list(value.shape))
