"""The state that an environment gives of itself.

An environment may offer `state_dict()` and `load_state_dict(state)`; it is then asked for its state
instead of being replayed. Every layer around it has to offer them too, or to be one that is known
here. A state consists of plain values and arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import wrappers as known

from maze_train.envs.monitoring import gives_state, layers_of
from maze_train.errors import EnvError

if TYPE_CHECKING:
    import gymnasium


STATELESS = (
    known.ClipAction,
    known.ClipReward,
    known.DtypeObservation,
    known.FilterObservation,
    known.FlattenObservation,
    known.GrayscaleObservation,
    known.OrderEnforcing,
    known.PassiveEnvChecker,
    known.RescaleAction,
    known.RescaleObservation,
    known.ReshapeObservation,
    known.ResizeObservation,
)
"""Wrappers of gymnasium that remember nothing but what a reset with a seed brings back."""

REMEMBERED: dict[type[Any], tuple[str, ...]] = {
    known.TimeLimit: ("_elapsed_steps",),
    **dict.fromkeys(STATELESS, ()),
}
"""Attributes in which known wrappers remember; those of this package name them in `remembers`."""


def offers_own_state(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether the environment and all its wrappers can give their state."""
    *around, inner = layers_of(env)
    return gives_state(inner) and all(
        gives_state(layer) or remembered_by(layer) is not None for layer in around
    )


def own_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """The state of an environment that offers it, as plain values and copies of arrays.

    Raises:
        EnvError: If the state holds anything else.
    """
    names, states = [], []
    for layer in layers_of(env):
        name = type(layer).__name__
        if gives_state(layer):
            state = layer.state_dict()
        else:
            state = {key: getattr(layer, key) for key in remembered_by(layer) or ()}
        names.append(name)
        states.append(plain_copy(state, f"{name}.state_dict()"))
    return {"layers": names, "states": states}


def load_own_state(env: gymnasium.Env[Any, Any], state: Any) -> None:
    """Give an environment the state that it had; layer by layer, from the inside out.

    Args:
        env: The environment, after a reset with the seed of the episode.
        state: Result of `own_state`.

    Raises:
        EnvError: If the state is of an environment with other layers.
    """
    layers = list(layers_of(env))
    names = [type(layer).__name__ for layer in layers]
    given = state.get("layers") if isinstance(state, dict) else None
    states = state.get("states") if isinstance(state, dict) else None
    if given != names or not isinstance(states, list) or len(states) != len(names):
        raise EnvError(
            f"its own state is of the layers {given}, but it consists of {names}: restore it with "
            "the same wrappers"
        )
    for layer, part in zip(reversed(layers), reversed(states), strict=True):
        if gives_state(layer):
            layer.load_state_dict(plain_copy(part, "state"))
            continue
        for key in remembered_by(layer) or ():
            restore_attribute(layer, key, part[key])


def restore_attribute(layer: Any, name: str, value: Any) -> None:
    """Set an attribute; arrays by key are overwritten, because others hold them too."""
    if not isinstance(value, dict):
        setattr(layer, name, value)
        return
    for key, array in getattr(layer, name).items():
        array[...] = value[key]


def remembered_by(layer: Any) -> tuple[str, ...] | None:
    """The attributes in which a known wrapper remembers; None for others."""
    # Of the very class: a subclass may remember more.
    found: tuple[str, ...] | None = vars(type(layer)).get("remembers")
    return REMEMBERED.get(type(layer)) if found is None else found


def plain_copy(value: Any, path: str) -> Any:
    """A deep copy of plain values, lists, tuples, dicts with keys of text, and arrays of numbers.

    Args:
        value: The value to copy.
        path: Name in messages.

    Raises:
        EnvError: If there is anything else in it, naming its path.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(plain_copy(part, f"{path}[{i}]") for i, part in enumerate(value))
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain_copy(part, f"{path}[{key!r}]") for key, part in value.items()}
    raise EnvError(
        f"{path} is {type(value).__name__} {str(value)[:80]!r}: expected None, bool, int, float, "
        "str, lists, dicts with keys of text, or numpy arrays of numbers"
    )
