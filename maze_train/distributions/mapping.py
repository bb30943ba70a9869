"""Mapping from action spaces to families of distributions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from gymnasium.spaces import Dict, Tuple

from maze_train.distributions.base import Distribution
from maze_train.distributions.bernoulli import Bernoulli
from maze_train.distributions.beta import Beta
from maze_train.distributions.categorical import Categorical, MultiCategorical
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.joint import JointDistribution
from maze_train.errors import ConfigError, one_of
from maze_train.spaces.describe import flat_spaces
from maze_train.targets import TARGET, build_target

if TYPE_CHECKING:
    from gymnasium import Space


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
"""The families that configuration knows by name."""

REMOVED: Mapping[str, str] = {
    "clipped_gaussian": "this second name was removed: use diagonal_gaussian",
    "truncated_gaussian": "this family was removed: use beta or squashed_gaussian, which keep "
    "to the bounds as well, or diagonal_gaussian, which clips to them",
}
"""Names of earlier versions, and what to use in place of them."""

DEFAULTS: Mapping[str, str] = {
    "Box": "diagonal_gaussian",
    "Discrete": "categorical",
    "MultiBinary": "bernoulli",
    "MultiDiscrete": "multi_categorical",
}
"""The family of each type of space, unless it is overridden."""


KEY = "model.distributions"


def family_class(name: str, key: str = KEY) -> type[Distribution]:
    """The class of a family that configuration knows by name.

    Args:
        name: One of `FAMILIES`.
        key: Dotted name of the setting that names it, for error messages.

    Raises:
        ConfigError: If there is no such family.
    """
    _check_name(key, name)
    return FAMILIES[name]


def distribution_for(
    action_space: Space[Any], overrides: Mapping[str, Override] | None = None
) -> Distribution:
    """The distribution over the actions of a space: a joint one for Dict and Tuple spaces.

    The family of a part is the override under its own key (such as `steer` or `arm/0`), else the
    override under the name of the type of its space (such as `Box`), else the default of that type.
    A family named by `_target_` is called with the space first.

    Args:
        action_space: Box, Discrete, MultiDiscrete, MultiBinary, or any nesting of Dict and Tuple
            over these.
        overrides: Families by the key of a part or the name of a space type.

    Returns:
        A family bound to the space.

    Raises:
        ConfigError: If an override is not a known family, or is not a family at all, names no part,
            does not fit its space, or is set up wrongly.
        SpaceError: If a space is of another kind, or its family can not handle its bounds.
    """
    given = dict(overrides or {})
    for key, override in given.items():
        _check_override(f"{KEY}.{key}", override)
    spaces = flat_spaces(action_space)
    _check_keys(given, spaces)
    parts: dict[str, Distribution] = {}
    for part_key, space in spaces.items():
        type_name = _type_name(space)
        key = part_key if part_key in given else type_name
        override = given.get(key, DEFAULTS[type_name])
        parts[part_key] = _build_family(f"{KEY}.{key}", override, space)
    if not isinstance(action_space, (Dict, Tuple)):
        return parts[""]
    joint: Distribution = JointDistribution(parts)
    return joint


def _check_keys(overrides: Mapping[str, Override], spaces: Mapping[str, Space[Any]]) -> None:
    """Refuse overrides that are neither a type of space nor a part of this one."""
    types = dict.fromkeys([*DEFAULTS, *map(_type_name, spaces.values())])
    allowed = [*types, *(key for key in spaces if key)]
    for key in overrides:
        if key not in allowed:
            raise ConfigError(
                f"{KEY}.{key}",
                "there is no such action or type of space; " + one_of(key, allowed),
            )


def _type_name(space: Space[Any]) -> str:
    """The name in `DEFAULTS` of a leaf's type, also for subclasses."""
    names = [base.__name__ for base in type(space).__mro__]
    return next(name for name in names if name in DEFAULTS)


def _check_override(key: str, override: Any) -> None:
    """Refuse what is neither a known name nor a mapping that names a family."""
    name = override
    if isinstance(override, Mapping):
        if TARGET in override:
            return
        key, name = f"{key}.name", override.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            key,
            f"expected the name of a family ({', '.join(FAMILIES)}) or a mapping with _target_",
            name,
        )
    _check_name(key, name)


def _check_name(key: str, name: str) -> None:
    """Refuse the name of a family that does not exist, or not any more."""
    if name in REMOVED:
        raise ConfigError(key, REMOVED[name], name)
    if name not in FAMILIES:
        raise ConfigError(key, f"there is no such family; {one_of(name, FAMILIES)}", name)


def _build_family(key: str, override: Override, space: Space[Any]) -> Distribution:
    """Build what an override names for one space; `key` is the override's place in the config."""
    if isinstance(override, Mapping) and TARGET in override:
        built: Distribution = build_target(override, space, key=key, kind=Distribution)
        return built
    settings = {"name": override} if isinstance(override, str) else dict(override)
    name = settings.pop("name")
    family = family_class(name)
    wanted = family.space_type
    if wanted is not None and not isinstance(space, wanted):
        raise ConfigError(
            key, f"{name} needs a {wanted.__name__} space, the action space is {space}"
        )
    known = list(inspect.signature(family).parameters)[1:]
    for setting, value in settings.items():
        if setting not in known:
            problem = one_of(setting, known) if known else "it has no settings"
            raise ConfigError(f"{key}.{setting}", f"{name} has no such setting; {problem}", value)
    try:
        return family(space, **settings)  # type: ignore[call-arg]  # signatures differ by family
    except ConfigError as error:
        raise error.below(key) from None
