"""Trees of tensors for spaces, and the entries of each agent in flat joint mappings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.core.errors import SpaceError
from maze_train.core.types import (
    Array,
    ArrayTree,
    T,
    Tensor,
    TensorTree,
    as_tree,
    leaves_by_key,
    tree_map,
)
from maze_train.spaces.agents import ACTS, AGENTS
from maze_train.spaces.columns import Columns, leaves_of, storage_dtype
from maze_train.spaces.describe import is_mask_key

FIRST_INEXACT = 2.0**24
"""Integers above this value are rounded in float32."""

MIN_LEVELS = 16
"""Minimum number of float32 values between the smallest and the largest observed value."""


def large_floats(space: spaces.Space[Any], obs: ArrayTree) -> dict[str, Array]:
    """Return copies of float64 leaves `[n, ...]` with values of at least `FIRST_INEXACT`, by key.

    Only leaves that are stored as float32 are included.
    """
    leaves = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    return {
        key: array.copy()
        for key, array in leaves_by_key(obs).items()
        if array.dtype == np.float64 and storage_dtype(leaves[key]) == np.float32
        if np.abs(array).max(initial=0.0) >= FIRST_INEXACT
    }


def check_resolution(first: Mapping[str, Array], later: ArrayTree) -> None:
    """Raise if changes of an observation, such as a time stamp, are lost in float32.

    Args:
        first: Result of `large_floats`.
        later: Observations of a later step.

    Raises:
        SpaceError: If the change of an entry spans fewer than `MIN_LEVELS` float32 values.
    """
    for key, array in first.items():
        both = np.concatenate([array, leaves_by_key(later)[key]])
        spread, largest = np.ptp(both, axis=0), np.abs(both).max(axis=0)
        step = np.spacing(largest.astype(np.float32))
        is_lost = (largest >= FIRST_INEXACT) & (spread > 0) & (spread < MIN_LEVELS * step)
        if not is_lost.any():
            continue
        index = tuple(int(i) for i in np.argwhere(is_lost)[0])
        name = f"the observation {key!r}" if key else "the observation"
        place = f"entry {list(index)} of {name}" if index else name
        raise SpaceError(
            f"{place} is about {largest[index]:.10g} and changes by {spread[index]:.3g}, but "
            f"floats are stored in float32, whose spacing at this value is {step[index]:.3g}: "
            "subtract an offset in a wrapper (env.wrappers), or declare its space with "
            "dtype=np.int64 and set model.normalization.mode=running"
        )


def zeros_for(space: spaces.Space[Any], shape: tuple[int, ...]) -> TensorTree:
    """Return zero observations of a flat space, `[*shape, *space.shape]`, one tensor per key."""
    leaves = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    arrays = Columns.of(leaves).batched(*shape).arrays()
    return as_tree({key: torch.from_numpy(x) for key, x in arrays.items()}, "" not in arrays)


def sampled_for(space: spaces.Space[Any], n: int) -> TensorTree:
    """Return deterministic sample observations of a flat space, `[n, *space.shape]` per key.

    Box samples are standard normal, clipped to the bounds: with very wide bounds, uniform samples
    would be useless as network inputs.
    """
    return tree_map(lambda leaf: _sampled(leaf, n), _leaves(space))


def _sampled(space: spaces.Space[Any], n: int) -> torch.Tensor:
    if isinstance(space, spaces.Box):
        samples = np.random.default_rng(0).standard_normal((n, *space.shape))
        return _tensor(space, np.clip(samples, space.low, space.high))
    space = copy.deepcopy(space)
    space.seed(0)
    return _tensor(space, np.stack([space.sample() for _ in range(n)]))


def as_tensors(space: spaces.Space[Any], tree: ArrayTree) -> TensorTree:
    """Copy arrays to tensors, each in the storage dtype of its space."""
    if isinstance(tree, dict):
        assert isinstance(space, spaces.Dict)
        return {key: _tensor(space[key], array) for key, array in tree.items()}
    return _tensor(space, tree)


def _tensor(space: spaces.Space[Any], array: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=storage_dtype(space)))


def _leaves(space: spaces.Space[Any]) -> spaces.Space[Any] | dict[str, spaces.Space[Any]]:
    """Return the leaves of a flat space."""
    return dict(space.spaces) if isinstance(space, spaces.Dict) else space


JOINT = "/joint"
"""Key prefix of the joint observations in the input of a centralised critic; keys of observation
spaces never begin with it."""

OWN_LEAF = "/own"
"""Key of the agent's observation if it is a single leaf."""

JOINT_ACTS, JOINT_AGENT = f"{JOINT}/{ACTS}", f"{JOINT}/agent"
"""Keys for the flags of acting agents and for the agent's own index."""


def part_of(tree: Mapping[str, Any], name: str) -> Any:
    """Return the entry `name` of a flat mapping: a leaf, or a mapping of leaves."""
    leaves = leaves_of(tree, name)
    return as_tree(leaves, "" not in leaves)


def parts_by_name(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Split a flat mapping by the first component of its keys; see `part_of`."""
    found: dict[str, Any] = {}
    for key, leaf in tree.items():
        name, slash, below = key.partition("/")
        if slash:
            found.setdefault(name, {})[below] = leaf
        else:
            found[name] = leaf
    return found


def flat_space_of(
    observation_space: spaces.Dict, agent: str, *, is_centralized: bool = False
) -> spaces.Space[Any]:
    """Return the flat observation space of one agent.

    Args:
        observation_space: Flat joint observation space.
        agent: Name of the agent.
        is_centralized: Whether to add the inputs of a centralised critic; see `with_joint`.
    """
    part = part_of(part_of(observation_space.spaces, AGENTS), agent)
    if is_centralized:
        part = {**_own_leaves(part), **seen_by_critic(observation_space.spaces)}
    return spaces.Dict(part) if isinstance(part, dict) else part


def is_seen_by_critics(key: str) -> bool:
    """Return whether a joint leaf is a critic input; masks, rewards and ends are excluded."""
    top, _, below = key.partition("/")
    return top == ACTS or (top == AGENTS and not is_mask_key(below.partition("/")[2]))


def joint_view(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the critic inputs of a flat joint observation, with the prefix `JOINT`."""
    return with_name(JOINT, {k: leaf for k, leaf in tree.items() if is_seen_by_critics(k)})


def seen_by_critic(joint: Mapping[str, spaces.Space[Any]]) -> dict[str, spaces.Space[Any]]:
    """Return the spaces of the additional inputs of a centralised critic."""
    count = spaces.Discrete((joint[ACTS].shape or (0,))[0])
    return {**joint_view(joint), JOINT_AGENT: count}


def with_joint(own: object, joint: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Add the inputs of a centralised critic to the observation of an agent, `[T, E, ...]`.

    Args:
        own: The observation.
        joint: Result of `joint_view`.
        number: Index of the agent.
    """
    numbers = torch.full(joint[JOINT_ACTS].shape[:2], number)
    return {**_own_leaves(own), **joint, JOINT_AGENT: numbers}


def without_joint(obs: TensorTree) -> TensorTree:
    """Return the agent's own observation, without the inputs of a centralised critic."""
    if not isinstance(obs, dict):
        return obs
    own = {key: leaf for key, leaf in obs.items() if not key.startswith(JOINT)}
    return own.get(OWN_LEAF, own)


def _own_leaves(own: object) -> dict[str, Any]:
    return {key or OWN_LEAF: leaf for key, leaf in leaves_by_key(own).items()}


def with_name(name: str, part: T | dict[str, T]) -> dict[str, T]:
    """Return a flat mapping with the entry `name`; the inverse of `part_of`."""
    if isinstance(part, dict):
        return {f"{name}/{key}": leaf for key, leaf in part.items()}
    return {name: part}


def joined(parts: Sequence[TensorTree], dim: int = 0) -> TensorTree:
    """Concatenate trees of the same structure along a dimension."""
    if len(parts) == 1:
        return parts[0]
    trees = [leaves_by_key(part) for part in parts]
    leaves = {key: torch.cat([tree[key] for tree in trees], dim) for key in trees[0]}
    return as_tree(leaves, isinstance(parts[0], dict))


def stacked(parts: Sequence[TensorTree]) -> TensorTree:
    """Stack trees of the same structure along a new first dimension."""
    trees = [leaves_by_key(part) for part in parts]
    leaves = {key: torch.stack([tree[key] for tree in trees]) for key in trees[0]}
    return as_tree(leaves, isinstance(parts[0], dict))


def unstacked(tree: TensorTree) -> list[TensorTree]:
    """Split a tree along the first dimension into trees of views; the inverse of `stacked`."""
    columns = {key: leaf.unbind() for key, leaf in leaves_by_key(tree).items()}
    rows = zip(*columns.values(), strict=True)
    return [as_tree(dict(zip(columns, row, strict=True)), isinstance(tree, dict)) for row in rows]
