"""Single-agent models, and learners with frozen policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from gymnasium import spaces
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.targets import locate
from maze_train.distributions.mapping import DEFAULTS
from maze_train.learner.learner import Learner
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import ActingModel
from maze_train.nets.config import ModelConfig
from maze_train.nets.policy_model import CRITIC_SETTINGS, input_space, policy_space, without_critic
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import flat_space, flat_spaces
from maze_train.training.config import AlgorithmConfig, PolicyConfig

POLICY_SETTINGS = tuple(
    setting.name for setting in fields(ModelConfig) if setting.name not in CRITIC_SETTINGS
)
"""Model settings that describe the policy."""


def learner_with_frozen(
    make_learner: Callable[..., Learner[Any, Any, Any]],
    policies: Mapping[str, PolicyConfig],
    chosen: Sequence[str] | None,
    modules: Mapping[str, nn.Module],
    algorithm: AlgorithmConfig,
    *args: object,
    **kwargs: object,
) -> Learner[Any, Any, Any]:
    """Build a learner in which some policies are frozen.

    Args:
        make_learner: Builds the learner from the trainable modules.
        policies: Settings of the policies, keyed by ID.
        chosen: IDs in `policies_to_train`; None: all trainable policies.
        modules: All policies, keyed by ID.
        algorithm: Settings of the algorithm.
        *args: Further positional arguments of `make_learner`.
        **kwargs: Further keyword arguments of `make_learner`.

    Raises:
        ConfigError: If a chosen or configured policy does not exist or cannot be trained, or no
            policy would be trained.
    """
    frozen = {
        key
        for key, own in policies.items()
        if own.frozen or not any(True for _ in modules[key].parameters())
    }
    free = [key for key in modules if key not in frozen]
    for key in free if chosen is None else chosen:
        if key not in free:
            problem = "is frozen or has no weights" if key in frozen else "no such policy"
            named = ", ".join(free) or "none"
            raise ConfigError("policies_to_train", f"{problem}; trainable policies: {named}", key)
    for key in algorithm.gradient_settings().overrides:
        if key in frozen:
            problem = f"is frozen or has no weights; trainable policies: {', '.join(free)}"
            raise ConfigError("algorithm.overrides", problem, key)
    if not (free if chosen is None else chosen):
        problem = "no policy would be trained; at least one must have networks and not be frozen"
        raise ConfigError("policies_to_train", problem, chosen)
    trained = {key: module for key, module in modules.items() if key in free}
    learner = make_learner(trained, algorithm, *args, **kwargs)
    for key in modules:
        if key in frozen:
            learner.add_module(key, modules[key], frozen=True)
    learner.policies_to_train = chosen
    return learner


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by ID: the policies of all agents, or the model itself."""
    return (isinstance(model, ActingModel) and model.by_policy) or {DEFAULT_MODULE: model}


def model_maker(algorithm: AlgorithmConfig) -> Callable[..., nn.Module]:
    """Return the function that builds a model from network settings, spaces and a seed."""
    path = locate(algorithm.model_builder, "algorithm.model_builder")
    return partial(path, **algorithm.model_settings)


def make_model(
    algorithm: AlgorithmConfig,
    config: ModelConfig,
    policies: Mapping[str, PolicyConfig],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
) -> nn.Module:
    """Build the model of an algorithm for an environment with one agent.

    Raises:
        ConfigError: If there are multi-agent settings, or a network cannot be built.
    """
    for key, value in (
        ("policies", list(policies)),
        ("model.centralized_critic", config.centralized_critic),
    ):
        if value:
            raise ConfigError(key, "only for multi-agent environments; remove this setting", value)
    return model_maker(algorithm)(config, observation_space, action_space, seed)


def policy_settings(
    model: ModelConfig, algorithm: AlgorithmConfig, own_spaces: tuple[Any, Any]
) -> dict[str, Any]:
    """Return the settings of a policy by name with the defaults of an algorithm.

    Args:
        model: Settings of the model.
        algorithm: Algorithm that provides the defaults.
        own_spaces: Observation and action space of one environment.

    Raises:
        SpaceError: If a space is not supported.
    """
    resolve = locate(algorithm.model_resolver)
    each = spaces_of_policies(own_spaces)
    inputs = [policy_space(model, input_space(flat_space(observed))) for observed, _ in each]
    critic_obs = model.critic_obs
    if model.centralized_critic or critic_obs:  # The policy was built without a critic.
        model = without_critic(model)
    resolved = [resolve(model, space) for space in inputs]
    settings: dict[str, Any] = {}
    for name in POLICY_SETTINGS:
        first, *others = (own.value_of(name) for own in resolved)
        # A default that differs between agents is applied when the policies are built.
        settings[name] = model.value_of(name) if any(first != own for own in others) else first
    families = dict(settings["distributions"])
    # Only Box spaces have defaults that depend on the algorithm.
    actions = [leaf for _, space in each for leaf in flat_spaces(space).values()]
    if any(isinstance(leaf, spaces.Box) for leaf in actions):
        families.setdefault("Box", DEFAULTS["Box"])
    else:
        families.pop("Box", None)
    return {**settings, "distributions": families, "critic_obs": critic_obs}


def spaces_of_policies(own_spaces: tuple[Any, Any]) -> list[tuple[Any, Any]]:
    """Return observation and action space of each agent."""
    several = agent_spaces(*own_spaces)
    return [own_spaces] if several is None else [several.of(agent) for agent in several.agents]


def with_networks(
    settings: Mapping[str, Any],
    model: ModelConfig,
    algorithm: AlgorithmConfig,
    own_spaces: tuple[Any, Any],
) -> dict[str, Any]:
    """Return the settings of a run with the defaults of the networks, such as `hidden_sizes`.

    Unknown defaults of custom networks remain null.

    Args:
        settings: All settings as plain values.
        model: Section `model` of the settings.
        algorithm: Algorithm that provides the defaults.
        own_spaces: Observation and action space of one environment.
    """
    known = policy_settings(model, algorithm, own_spaces) if model.policy is None else {}
    own = {
        key: known.get(key) if value is None else value for key, value in settings["model"].items()
    }
    return {**settings, "model": own}
