"""Rollouts side by side, and the part of a rollout that some environments are."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from maze_train.data.frames import FrameStacks
from maze_train.data.rollout import Rollout
from maze_train.errors import ShapeError
from maze_train.types import as_tree, leaves_by_key, tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.types import Tensor


ENV_DIM = {
    **dict.fromkeys(("rewards", "terminated", "truncated", "actions", "obs"), 1),
    **dict.fromkeys(("hidden_states", "log_probs", "valid"), 1),
    **dict.fromkeys(("weights_seq_no", "replayed"), 0),
}
"""Columns, and the dimension in which their environments lie."""

FLAGS = {"valid": True, "replayed": False}
"""Columns that a rollout has only where not all rows or environments have this value."""


def join_rollouts(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout of the environments of several, in their order, in memory of its own.

    Rollouts of B_1, ..., B_k environments become one of B = B_1 + ... + B_k. Final observations
    are in the order of the rollouts, and within each in its own; the positions say where they
    belong: t * B_i + b becomes t * B + B_1 + ... + B_{i-1} + b.

    Args:
        rollouts: Rollouts of the same T and of the same observations and actions, at least one; B
            may differ. Where `valid` or `replayed` is None for some of them only, it is true or
            false for these.

    Raises:
        ShapeError: If T, shapes, dtypes or keys differ, or only some of them have `hidden_states`,
            `log_probs` or `weights_seq_no`.
    """
    if not rollouts:
        raise ShapeError("there are no rollouts to join: expected at least one")
    columns: dict[str, Any] = {}
    for name, dim in [*ENV_DIM.items(), ("final_obs", 0)]:
        parts = [getattr(rollout, name) for rollout in rollouts]
        missing = [i for i, part in enumerate(parts) if part is None]
        if len(missing) == len(parts):
            continue
        if missing and name not in FLAGS:
            raise ShapeError(f"rollouts {missing} have no {name}: expected it in all or in none")
        for i in missing:
            flags = rollouts[i].terminated
            parts[i] = torch.full_like(flags if dim else flags[0], FLAGS[name])
        columns[name] = _joined(name, parts, dim)
    return Rollout(final_positions=_joined_positions(rollouts), **columns)


def select_envs(rollout: Rollout, envs: slice) -> Rollout:
    """The part of a rollout that consecutive environments are.

    It shares the memory of the rollout; only what is renumbered (positions, frames of stacks) and
    the final observations are copies.

    Args:
        rollout: T steps of B environments.
        envs: Which of them, at least one.

    Raises:
        ShapeError: If these are no consecutive environments of the rollout.
    """
    first, stop, step = envs.indices(rollout.num_envs)
    if step != 1 or stop <= first:
        raise ShapeError(
            f"envs = {envs}: expected at least one of the {rollout.num_envs} environments, in "
            "steps of 1"
        )
    positions = rollout.final_positions
    steps = positions.div(rollout.num_envs, rounding_mode="floor")
    owners = positions - steps * rollout.num_envs
    chosen = (owners >= first) & (owners < stop)
    part = slice(first, stop)
    columns: dict[str, Any] = {
        name: tree_map(partial(_columns, part, dim), column)
        for name, dim in ENV_DIM.items()
        if (column := getattr(rollout, name)) is not None
    }
    return Rollout(
        final_obs=tree_map(lambda leaf: leaf[chosen], rollout.final_obs),
        final_positions=(steps * (stop - first) + owners - first)[chosen],
        **columns,
    )


def without_unused_frames(stacks: FrameStacks) -> FrameStacks:
    """The same observations, without the frames that none of them consists of.

    It shares memory with `stacks` where these are the last ones, as `FrameMemory` leaves them.
    """
    numbers = stacks.numbers
    is_used = torch.zeros(len(stacks.frames), dtype=torch.bool, device=numbers.device)
    is_used.index_fill_(0, numbers.flatten(), True)
    count = int(is_used.sum())
    if is_used[:count].all():
        return FrameStacks(stacks.frames[:count], numbers, stacks.num_envs)
    new_numbers = is_used.cumsum(0) - 1
    return FrameStacks(stacks.frames[is_used], new_numbers[numbers], stacks.num_envs)


def _columns(envs: slice, dim: int, leaf: Tensor | FrameStacks) -> Tensor | FrameStacks:
    """The part of `[rows, B, ...]` or, with `dim` 0, of `[B]` that some environments are."""
    if not isinstance(leaf, FrameStacks):
        return leaf[:, envs] if dim else leaf[envs]
    numbers = leaf.numbers.view(*leaf.shape[:3])[:, envs]
    return FrameStacks(leaf.frames, numbers.flatten(0, 1), envs.stop - envs.start)


def _joined_positions(rollouts: Sequence[Rollout]) -> Tensor:
    """Positions t * B + b of the final observations of all rollouts."""
    sizes = [rollout.num_envs for rollout in rollouts]
    offsets = accumulate(sizes, initial=0)
    total = sum(sizes)
    parts = []
    for rollout, size, offset in zip(rollouts, sizes, offsets, strict=False):
        steps = rollout.final_positions.div(size, rounding_mode="floor")
        parts.append(rollout.final_positions + steps * (total - size) + offset)
    return torch.cat(parts)


def _joined(name: str, trees: Sequence[Any], dim: int) -> Any:
    """Trees joined leaf by leaf along a dimension."""
    leaves = [leaves_by_key(tree) for tree in trees]
    for i, found in enumerate(leaves):
        if found.keys() != leaves[0].keys():
            raise ShapeError(
                f"{name} of rollout {i} has the keys {list(found)}, that of rollout 0 has "
                f"{list(leaves[0])}: expected the same"
            )
    joined = {
        key: _joined_leaf(
            f"{name}[{key!r}]" if key else name, [found[key] for found in leaves], dim
        )
        for key in leaves[0]
    }
    return as_tree(joined, isinstance(trees[0], dict))


def _joined_leaf(name: str, parts: list[Any], dim: int) -> Any:
    forms = [_form(part, dim) for part in parts]
    for i, form in enumerate(forms):
        if form != forms[0]:
            raise ShapeError(
                f"{name} of rollout {i} is {form}, that of rollout 0 is {forms[0]}: expected the "
                "same, apart from the size *"
            )
    if isinstance(parts[0], FrameStacks):
        return _joined_stacks(parts)
    return torch.cat(parts, dim)


def _form(leaf: Tensor | FrameStacks, dim: int) -> tuple[str, list[int | str], torch.dtype]:
    """Properties that must agree: the type, the shape but for the joined dimension, the dtype."""
    dtype = leaf.frames.dtype if isinstance(leaf, FrameStacks) else leaf.dtype
    return type(leaf).__name__, [*leaf.shape[:dim], "*", *leaf.shape[dim + 1 :]], dtype


def _joined_stacks(parts: list[FrameStacks]) -> FrameStacks:
    """Stacks `[rows, envs, n, *frame]` side by side."""
    parts = [without_unused_frames(part) for part in parts]
    offsets = accumulate((len(part.frames) for part in parts), initial=0)
    numbers = [
        part.numbers.view(*part.shape[:3]) + offset
        for part, offset in zip(parts, offsets, strict=False)
    ]
    return FrameStacks(
        torch.cat([part.frames for part in parts]),
        torch.cat(numbers, 1).flatten(0, 1),
        sum(part.num_envs for part in parts),
    )
