"""The layers of a wrapped environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["continuing_layers", "gives_state", "layers_of"]


def layers_of(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """The wrappers of an environment from the outside in, then the environment itself."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def continuing_layers(env: gymnasium.Env[Any, Any]) -> list[Any]:
    """The layers whose next reset may go on with the game that is running.

    They have the attribute `goes_on`: whether it will. Setting it to False makes it begin anew.
    """
    return [layer for layer in layers_of(env) if hasattr(layer, "goes_on")]


def gives_state(layer: Any) -> bool:
    """Whether a layer gives its state itself."""
    return all(callable(getattr(layer, name, None)) for name in ("state_dict", "load_state_dict"))
