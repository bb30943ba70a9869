"""Selection of the distribution for an action space, and joint distributions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import torch
from gymnasium import Space
from gymnasium.spaces import Dict, Tuple

from maze_train.core.errors import ConfigError, SpaceError, one_of
from maze_train.core.targets import TARGET, build_target
from maze_train.core.types import Device, Shape, Tensor
from maze_train.distributions.base import Distribution
from maze_train.distributions.beta import Beta
from maze_train.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.spaces.describe import check_categories, flat_spaces


class JointDistribution(Distribution):
    """Product of independent components: p(a) = Π_k p_k(a_k), for Dict and Tuple action spaces.

    Actions are a flat mapping with one tensor per component. Log-probabilities, entropies and KL
    divergences are sums over the components. `params` are the network outputs of every component,
    in the order of the components, followed by the state-independent parameters of every component.

    Args:
        parts: Single-component distributions; keys of nested spaces are joined by `/`.

    Raises:
        SpaceError: If there are no components.
    """

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        if not parts:
            raise SpaceError("a joint distribution requires at least one part, the space has none")
        self._parts = dict(parts)
        families = self._parts.values()
        self.param_size = sum(part.param_size for part in families)
        self.noise_size = sum(part.noise_size for part in families)
        self.free_param_size = sum(part.free_param_size for part in families)
        self.free_params_move_mode = any(
            part.free_param_size > 0 and part.free_params_move_mode for part in families
        )
        self._noise_sizes = [part.noise_size for part in families]
        self._net_sizes = [part.param_size - part.free_param_size for part in families]
        self._free_sizes = [part.free_param_size for part in families]

    @property
    def parts(self) -> dict[str, Distribution]:
        """Components by key, which define shapes and dtypes of the actions."""
        return self._parts

    def initial_free_params(self) -> Tensor:
        """Return initial state-independent parameters of every component, [free_param_size]."""
        return torch.cat([part.initial_free_params() for part in self.parts.values()])

    def limit_free_params(self, params: Tensor) -> None:
        """Clamp the state-independent parameters of every component to their limits, in place."""
        for part, own in zip(
            self._parts.values(), params.split_with_sizes(self._free_sizes), strict=True
        ):
            part.limit_free_params(own)

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample the concatenated noise of all components, [*shape, noise_size]."""
        draws = [part.draw_noise(shape, generator, device) for part in self.parts.values()]
        return torch.cat(draws, dim=-1)

    def sample(self, params: Tensor, noise: Tensor) -> dict[str, Any]:
        """Sample the actions of every component independently."""
        return {
            key: part.sample(own, own_noise)
            for (key, part), own, own_noise in zip(
                self.parts.items(), self.split(params), self.split_noise(noise), strict=True
            )
        }

    def mode(self, params: Tensor) -> dict[str, Any]:
        """Return the most probable actions of every component."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        return {key: part.mode(own) for (key, part), own in pairs}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Σ_k log p_k(a_k), [...]."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        return _total([part.log_prob(own, actions[key]) for (key, part), own in pairs])

    def entropy(self, params: Tensor) -> Tensor:
        """Sum of the entropies of the components, [...]."""
        pairs = zip(self.parts.values(), self.split(params), strict=True)
        return _total([part.entropy(own) for part, own in pairs])

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_k KL(p_k || q_k), [...]."""
        pairs = zip(self.split(params_p), self.split(params_q), strict=True)
        parts = zip(self.parts.values(), pairs, strict=True)
        return _total([part.kl(own_p, own_q) for part, (own_p, own_q) in parts])

    def log_prob_and_entropy(
        self, params: Tensor, actions: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Sums of log-probabilities and of entropies over the components, each [...]."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        both = [part.log_prob_and_entropy(own, actions[key]) for (key, part), own in pairs]
        return _total([log_prob for log_prob, _ in both]), _total([entropy for _, entropy in both])

    def to_env(self, actions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Convert each component to the environment's action; the mapping stays flat."""
        return {key: part.to_env(actions[key]) for key, part in self.parts.items()}

    def from_env(self, actions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Convert each component of a flat environment action to the agent's action."""
        return {key: part.from_env(actions[key]) for key, part in self.parts.items()}

    def split(self, params: Tensor) -> list[Tensor]:
        """Return the params of every component, each [..., param_size of the component]."""
        if not self.free_param_size:
            return list(params.split_with_sizes(self._net_sizes, -1))
        pieces = params.split_with_sizes(self._net_sizes + self._free_sizes, -1)
        count = len(self.parts)
        return [
            torch.cat((net, free), dim=-1) if size else net
            for net, free, size in zip(
                pieces[:count], pieces[count:], self._free_sizes, strict=True
            )
        ]

    def split_noise(self, noise: Tensor) -> list[Tensor]:
        """Return the noise of every component, each [..., noise_size of the component]."""
        return list(noise.split_with_sizes(self._noise_sizes, -1))


def _total(terms: list[Tensor]) -> Tensor:
    """Sum of tensors of equal shape, without stacking them."""
    return reduce(torch.add, terms)


Override: TypeAlias = str | Mapping[str, Any]
"""A family: its name, `{name: ..., **settings}`, or `{_target_: my_package.Family, **settings}`."""

FAMILIES: Mapping[str, type[Distribution]] = {
    "bernoulli": Bernoulli,
    "beta": Beta,
    "categorical": Categorical,
    "diagonal_gaussian": DiagonalGaussian,
    "multi_categorical": MultiCategorical,
    "squashed_gaussian": SquashedGaussian,
}
"""Families that can be configured by name."""

DEFAULTS: Mapping[str, str] = {
    "Box": "diagonal_gaussian",
    "Discrete": "categorical",
    "MultiBinary": "bernoulli",
    "MultiDiscrete": "multi_categorical",
}
"""Default family of each type of space."""


KEY = "model.distributions"


def distribution_for(
    action_space: Space[Any], overrides: Mapping[str, Override] | None = None
) -> Distribution:
    """Build the distribution for an action space; a joint distribution for Dict and Tuple spaces.

    The family of a component is the override for its key (such as `steer` or `arm/0`), otherwise
    the override for the type of its space (such as `Box`), otherwise the default for this type. A
    family given by `_target_` is called with the space as first argument.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple spaces of these,
            with any nesting.
        overrides: Families by key of a component or name of a space type.

    Returns:
        The family, bound to the space.

    Raises:
        ConfigError: If an override is not a family, does not match any component or space type,
            does not support its space, or has invalid settings.
        SpaceError: If a space type is not supported, or the family does not support its bounds.
    """
    given = dict(overrides or {})
    for key, override in given.items():
        _check_override(f"{KEY}.{key}", override)
    spaces = flat_spaces(action_space)
    _check_keys(given, spaces)
    parts: dict[str, Distribution] = {}
    for part_key, space in spaces.items():
        check_categories(f"action space{f' (key {part_key!r})' if part_key else ''}", space)
        type_name = _type_name(space)
        key = part_key if part_key in given else type_name
        override = given.get(key, DEFAULTS[type_name])
        parts[part_key] = _build_family(f"{KEY}.{key}", override, space)
    if not isinstance(action_space, (Dict, Tuple)):
        return parts[""]
    joint: Distribution = JointDistribution(parts)
    return joint


def _check_keys(overrides: Mapping[str, Override], spaces: Mapping[str, Space[Any]]) -> None:
    """Raise if an override matches neither a type of space nor an action component."""
    types = dict.fromkeys([*DEFAULTS, *map(_type_name, spaces.values())])
    allowed = [*types, *(key for key in spaces if key)]
    for key in overrides:
        if key not in allowed:
            raise ConfigError(
                f"{KEY}.{key}",
                "there is no such action or type of space; " + one_of(key, allowed),
            )


def _type_name(space: Space[Any]) -> str:
    """Return the key in `DEFAULTS` for the type of a leaf, including subclasses."""
    names = [base.__name__ for base in type(space).__mro__]
    return next(name for name in names if name in DEFAULTS)


def _check_override(key: str, override: object) -> None:
    """Raise if the override is neither a known name nor a mapping with a family."""
    name = override
    if isinstance(override, Mapping):
        if TARGET in override:
            return
        if "name" not in override:
            example = f"{{name: <family>, {', '.join(map(str, override)) or 'key'}: ...}}"
            problem = f"the family is missing: {example}; families: {', '.join(FAMILIES)}"
            raise ConfigError(key, problem, dict(override))
        key, name = f"{key}.name", override["name"]
    if not isinstance(name, str):
        raise ConfigError(
            key,
            f"expected the name of a family ({', '.join(FAMILIES)}) or a mapping with _target_",
            name,
        )
    if name not in FAMILIES:
        raise ConfigError(key, f"there is no such family; {one_of(name, FAMILIES)}", name)


def _build_family(key: str, override: Override, space: Space[Any]) -> Distribution:
    """Build the family for one space; `key` is the path of the override in the configuration."""
    if isinstance(override, Mapping) and TARGET in override:
        built: Distribution = build_target(override, space, key=key, kind=Distribution)
        return built
    settings = {"name": override} if isinstance(override, str) else dict(override)
    name = settings.pop("name")
    family = FAMILIES[name]
    build: Callable[..., Distribution] = family  # Signatures differ by family.
    wanted = family.space_type
    if wanted is not None and not isinstance(space, wanted):
        raise ConfigError(
            key, f"{name} requires a {wanted.__name__} space, the action space is {space}"
        )
    known = list(inspect.signature(family).parameters)[1:]
    for setting, value in settings.items():
        if setting not in known:
            problem = one_of(setting, known) if known else "it has no settings"
            raise ConfigError(f"{key}.{setting}", f"{name} has no such setting; {problem}", value)
    try:
        return build(space, **settings)
    except ConfigError as error:
        raise error.below(key) from None
