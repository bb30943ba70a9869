"""Parts of the flat trees of several agents: found below a name, put there, joined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from gymnasium import spaces

from maze_train.spaces.agents import AGENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from maze_train.types import Tensor, TensorTree


def part_of(tree: Mapping[str, Any], name: str) -> Any:
    """The part of a flat mapping below a name: a leaf, or the mapping of those below it."""
    if name in tree:
        return tree[name]
    start = f"{name}/"
    return {key[len(start) :]: leaf for key, leaf in tree.items() if key.startswith(start)}


def flat_space_of(observation_space: spaces.Dict, agent: str) -> spaces.Space[Any]:
    """The flat observation space of one agent, of the flat one of all of them."""
    part = part_of(part_of(observation_space.spaces, AGENTS), agent)
    return spaces.Dict(part) if isinstance(part, dict) else part


def with_name(name: str, part: Any) -> dict[str, Any]:
    """The flat mapping whose part below a name is `part`; the inverse of `part_of`."""
    if isinstance(part, dict):
        return {f"{name}/{key}": leaf for key, leaf in part.items()}
    return {name: part}


def joined(parts: Sequence[TensorTree], dim: int = 0) -> TensorTree:
    """Trees of the same form, one after the other along a dimension."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {
            key: torch.cat([cast("dict[str, Tensor]", part)[key] for part in parts], dim)
            for key in first
        }
    return torch.cat(cast("list[Tensor]", list(parts)), dim)
