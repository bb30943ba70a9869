"""Selection of distributions by type of space and by component, and errors."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from maze_train.core.errors import ConfigError, SpaceError
from maze_train.distributions.categorical import Bernoulli, Categorical, MultiCategorical
from maze_train.distributions.gaussian import DiagonalGaussian, SquashedGaussian
from maze_train.distributions.mapping import DEFAULTS, FAMILIES, JointDistribution, distribution_for
from maze_train.spaces.describe import LEAF_TYPES

BOX, DISCRETE = Box(-1.0, 1.0, (2,)), Discrete(2)
NESTED = Dict({"a": Tuple([BOX, DISCRETE]), "steer": BOX})


class Sticky(Categorical):
    """User-defined distribution with a setting."""

    def __init__(self, space: Any, bonus: float = 0.0) -> None:
        super().__init__(space)
        self.bonus = bonus


def not_a_family(space: Any) -> str:
    """Callable that does not return a distribution."""
    return str(space)


class SubBox(Box):
    """Subclass of Box."""


@pytest.mark.parametrize(
    ("space", "family"),
    [
        (BOX, DiagonalGaussian),
        (SubBox(-1.0, 1.0, (2,)), DiagonalGaussian),
        (DISCRETE, Categorical),
        (MultiDiscrete([2, 3]), MultiCategorical),
        (MultiBinary((2, 3)), Bernoulli),
        (NESTED, JointDistribution),
        (Tuple([BOX]), JointDistribution),
    ],
)
def test_default_distribution_exists_for_every_space(space: Any, family: type) -> None:
    """Every supported space has a default distribution."""
    assert type(distribution_for(space)) is family


def test_distribution_overrides_of_components_take_precedence() -> None:
    """Settings of a type apply to all its components; settings of a component take precedence."""
    override = {"Box": {"name": "squashed_gaussian", "state_dependent_std": False}}
    squashed, gaussian = SquashedGaussian, DiagonalGaussian
    for more, families in (
        ({}, [squashed, Categorical, squashed]),
        ({"a/0": "diagonal_gaussian"}, [gaussian, Categorical, squashed]),
    ):
        joint = distribution_for(NESTED, {**override, **more})
        assert isinstance(joint, JointDistribution)
        assert [type(part) for part in joint.parts.values()] == families
        assert joint.free_param_size == 4


def test_custom_distribution_gets_space_and_settings() -> None:
    """`_target_` is called with the space and the other keys as settings."""
    override = {"_target_": f"{__name__}.Sticky", "bonus": 0.5}
    family = distribution_for(DISCRETE, {"Discrete": override})
    assert type(family).__name__ == "Sticky"
    assert family.bonus == 0.5  # type: ignore[attr-defined]


def test_every_leaf_type_has_a_default_distribution() -> None:
    """Every leaf type has a default, and every default is in the table."""
    assert sorted(DEFAULTS) == sorted(leaf.__name__ for leaf in LEAF_TYPES)
    assert set(DEFAULTS.values()) <= set(FAMILIES)


@pytest.mark.parametrize(
    ("space", "overrides", "message"),
    [
        (BOX, {"box": "squashed_gaussian"}, "box: there is no such action or type of space; "),
        (NESTED, {"steeer": "squashed_gaussian"}, "steeer: there is no such action or type of"),
        (BOX, {"MultiDiscrete": "squashed_gausian"}, "MultiDiscrete = 'squashed_gausian': there"),
        (BOX, {"Box": {"state_dependent_std": True}}, "Box = {'state_dependent_std': True}: the"),
        (DISCRETE, {"Discrete": "diagonal_gaussian"}, "Discrete: diagonal_gaussian requires a Box"),
        (
            BOX,
            {"Box": {"name": "beta", "log_std_min": -5}},
            "Box.log_std_min = -5: beta has no such",
        ),
        (
            BOX,
            {"Box": {"name": "squashed_gaussian", "log_std_mn": -5}},
            "Box.log_std_mn = -5: squashed_gaussian has no such setting; ",
        ),
        (
            BOX,
            {"Box": {"name": "squashed_gaussian", "log_std_min": 3.0}},
            "Box.log_std_min = 3.0: expected less than log_std_max=2",
        ),
        (
            DISCRETE,
            {"Discrete": {"_target_": f"{__name__}.not_a_family"}},
            "Discrete = 'str': expected a maze_train.Distribution",
        ),
    ],
)
def test_invalid_distribution_overrides_raise(
    space: Any, overrides: dict[str, Any], message: str
) -> None:
    """The error contains the key, the value and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        distribution_for(space, overrides)
    assert str(caught.value).startswith(f"model.distributions.{message}")


@pytest.mark.parametrize("space", [Text(4), Dict({"x": Text(4)})])
def test_unsupported_action_space_raises(space: Any) -> None:
    """The error lists the supported spaces."""
    with pytest.raises(SpaceError, match=r"Box, Discrete, MultiDiscrete or MultiBinary"):
        distribution_for(space)
