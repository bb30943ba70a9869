"""Rollouts in memory that processes share: one writes, another reads."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces

from maze_train.data.frames import FrameStacks
from maze_train.data.joining import without_unused_frames
from maze_train.data.replay_columns import Spec
from maze_train.data.rollout import Rollout
from maze_train.errors import ShapeError
from maze_train.spaces.tensors import storage_dtype
from maze_train.types import Tensor, as_tree, leaves_by_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.data.rollout import StoredTree
    from maze_train.types import Array, TensorTree

__all__ = ["RolloutLayout", "RolloutSlot"]

PAGE = 4096
"""Slots begin on pages of their own, so that writing to one takes no memory of the others."""

CACHE_LINE = 64
"""Every column begins on a cache line of its own."""

OPTIONAL = ("valid", "log_probs", "weights_seq_no")
"""Columns that a rollout may have or not, in the order in which the header says so."""


class RolloutLayout:
    """Layout of a rollout of T steps of B environments in a slot of memory.

    It follows from the arguments alone, so processes that know these agree on it. A slot has room
    for the worst case: every step truncated, every stack of n frames without a frame of another.
    Pages of shared memory that are never touched cost nothing, so this takes addresses, not memory.

    Args:
        observation_space: Flat observation space of one environment.
        actions: One action of the agent, `[...]`: shapes and dtypes are used.
        num_steps: T.
        num_envs: B.
        frame_stack: Observations that are stacks of the last n frames, as in `RolloutStorage`.
        state_size: Size S of the memory of the policy; 0: it has none.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        actions: TensorTree,
        num_steps: int,
        num_envs: int,
        *,
        frame_stack: Mapping[str, int] | None = None,
        state_size: int = 0,
    ) -> None:
        self.num_envs = num_envs
        self.has_obs_keys = isinstance(observation_space, spaces.Dict)
        self.has_action_keys = isinstance(actions, dict)
        obs = {
            key: Spec(tuple(part.shape or ()), storage_dtype(part))
            for key, part in _parts(observation_space).items()
        }
        stacked = [key for key in obs if key in (frame_stack or {})]
        steps, rows = (num_steps, num_envs), (num_steps + 1, num_envs)
        integers, floats, flags = np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.bool_)
        specs = {"header": Spec((1 + len(OPTIONAL) + len(stacked),), integers)}
        for key, (shape, dtype) in obs.items():
            if key in stacked:
                positions = rows[0] * rows[1]
                specs[f"numbers/{key}"] = Spec((positions, shape[0]), integers)
                specs[f"frames/{key}"] = Spec((positions * shape[0], *shape[1:]), dtype)
            else:
                specs[f"obs/{key}"] = Spec((*rows, *shape), dtype)
        for key, action in leaves_by_key(actions).items():
            specs[f"actions/{key}"] = Spec((*steps, *action.shape), action.cpu().numpy().dtype)
        specs["rewards"] = specs["log_probs"] = Spec(steps, floats)
        specs["terminated"] = specs["truncated"] = specs["valid"] = Spec(steps, flags)
        if state_size:
            specs["hidden_states"] = Spec((*rows, state_size), floats)
        specs["weights_seq_no"] = Spec((num_envs,), integers)
        specs["final_positions"] = Spec((num_steps * num_envs,), integers)
        for key, (shape, dtype) in obs.items():
            specs[f"final_obs/{key}"] = Spec((num_steps * num_envs, *shape), dtype)
        self.obs_keys = list(obs)
        self._specs = specs
        self._starts = [
            *accumulate((_padded(spec.nbytes, CACHE_LINE) for spec in specs.values()), initial=0)
        ]
        self.nbytes = _padded(self._starts[-1], PAGE)
        """Bytes of one slot, a multiple of the size of a page."""

    def slots(self, memory: Any) -> list[RolloutSlot]:
        """As many slots as fit into memory that has a `buffer` of `nbytes` bytes."""
        count = memory.nbytes // self.nbytes
        return [self.slot(memory.buffer, i * self.nbytes) for i in range(count)]

    def slot(self, memory: Any, offset: int) -> RolloutSlot:
        """A slot of `nbytes` bytes.

        Args:
            memory: Writable buffer, kept alive by the slot.
            offset: First byte, a multiple of the size of a page.
        """
        columns = {}
        for (name, (shape, dtype)), start in zip(self._specs.items(), self._starts, strict=False):
            array: Array = np.ndarray(shape, dtype, memory, offset + start)
            columns[name] = torch.from_numpy(array)
        return RolloutSlot(self, columns)


class RolloutSlot:
    """Memory for one rollout; made by `RolloutLayout.slot`.

    How many final observations and frames there are, and which of the optional columns, is written
    in a header. Who may read or write when is agreed elsewhere.

    Args:
        layout: How rollouts lie in it.
        columns: Views of the memory by name.
    """

    def __init__(self, layout: RolloutLayout, columns: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._header = columns["header"].numpy()
        self._obs: dict[str, Tensor | FrameStacks] = {
            key: columns[f"obs/{key}"]
            if f"obs/{key}" in columns
            else FrameStacks(columns[f"frames/{key}"], columns[f"numbers/{key}"], layout.num_envs)
            for key in layout.obs_keys
        }
        self._final_obs = {key: columns[f"final_obs/{key}"] for key in layout.obs_keys}
        self._final_positions = columns["final_positions"]
        self._actions = {
            name.removeprefix("actions/"): column
            for name, column in columns.items()
            if name.startswith("actions/")
        }
        whole = ("rewards", "terminated", "truncated", "hidden_states")
        self._whole = {name: columns[name] for name in whole if name in columns}
        self._optional = {name: columns[name] for name in OPTIONAL}
        self._absent = ["replayed"] if "hidden_states" in columns else ["replayed", "hidden_states"]

    def write(self, rollout: Rollout) -> None:
        """Copy a rollout here, in place of the one before.

        Numbers become those of the dtypes of the layout. Of stacks of frames only those frames are
        copied that occur in them.

        Args:
            rollout: A rollout of the layout, on any device; `replayed` is None.

        Raises:
            ShapeError: If a column is not one of the layout; the slot is to be written again then.
        """
        for name in self._absent:
            if getattr(rollout, name) is not None:
                raise ShapeError(
                    f"the rollout has the column {name}, the slot expects None: leave it out, or "
                    "make the layout with the state_size of the rollouts"
                )
        count = len(rollout.final_positions)
        for name, target in self._whole.items():
            _copy(name, target, getattr(rollout, name))
        optional = {name: getattr(rollout, name) for name in OPTIONAL}
        for name, column in optional.items():
            if column is not None:
                _copy(name, self._optional[name], column)
        frames_used = self._write_obs(rollout.obs)
        _copy_leaves("actions", self._actions, rollout.actions)
        _copy("final_positions", self._final_positions[:count], rollout.final_positions)
        final_obs = {key: leaf[:count] for key, leaf in self._final_obs.items()}
        _copy_leaves("final_obs", final_obs, rollout.final_obs)
        present = [column is not None for column in optional.values()]
        self._header[:] = [count, *present, *frames_used]

    def _write_obs(self, obs: StoredTree) -> list[int]:
        """Copy observations; returns how many frames the stacks have."""
        leaves = _checked_leaves("obs", self._obs, obs)
        frames_used = []
        for key, place in self._obs.items():
            name = _named("obs", key)
            if not isinstance(place, FrameStacks):
                _copy(name, place, leaves[key])
                continue
            if not isinstance(leaves[key], FrameStacks):
                raise ShapeError(
                    f"{name} is a {type(leaves[key]).__name__}, the slot expects FrameStacks: its "
                    "layout has to be made with the frame_stack of the rollouts"
                )
            stacks = without_unused_frames(leaves[key])
            frames_used.append(len(stacks.frames))
            _copy(f"{name}.numbers", place.numbers, stacks.numbers)
            _copy(f"{name}.frames", place.frames[: frames_used[-1]], stacks.frames)
        return frames_used

    def rollout(self) -> Rollout:
        """The rollout that was written last: views of the slot, valid until the next is written."""
        count, *numbers = self._header.tolist()
        frames_used = iter(numbers[len(OPTIONAL) :])
        obs = {
            key: FrameStacks(leaf.frames[: next(frames_used)], leaf.numbers, leaf.num_envs)
            if isinstance(leaf, FrameStacks)
            else leaf
            for key, leaf in self._obs.items()
        }
        final_obs = {key: leaf[:count] for key, leaf in self._final_obs.items()}
        present = zip(self._optional.items(), numbers[: len(OPTIONAL)], strict=True)
        return Rollout(
            obs=as_tree(obs, self._layout.has_obs_keys),
            actions=as_tree(dict(self._actions), self._layout.has_action_keys),
            final_obs=as_tree(final_obs, self._layout.has_obs_keys),
            final_positions=self._final_positions[:count],
            **self._whole,
            **{name: column for (name, column), is_there in present if is_there},
        )


def _parts(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    return dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}


def _padded(nbytes: int, unit: int) -> int:
    """`nbytes` rounded up to whole units."""
    return -(-nbytes // unit) * unit


def _named(name: str, key: str) -> str:
    return f"{name}[{key!r}]" if key else name


def _checked_leaves(name: str, expected: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    """The leaves of a tree, which have to be those of the layout."""
    leaves = leaves_by_key(tree)
    if leaves.keys() != expected.keys():
        raise ShapeError(
            f"{name} has the keys {list(leaves)}, the slot expects {list(expected)}: its layout "
            "has to be made with the spaces of the rollouts"
        )
    return leaves


def _copy_leaves(name: str, targets: Mapping[str, Tensor], tree: TensorTree) -> None:
    leaves = _checked_leaves(name, targets, tree)
    for key, target in targets.items():
        _copy(_named(name, key), target, leaves[key])


def _copy(name: str, target: Tensor, source: Any) -> None:
    if not isinstance(source, Tensor) or source.shape != target.shape:
        found = list(source.shape) if isinstance(source, Tensor) else type(source).__name__
        raise ShapeError(
            f"{name} has the shape {found}, the slot expects {list(target.shape)}: its layout has "
            "to be made with the spaces, num_steps, num_envs, frame_stack and state_size of the "
            "rollouts"
        )
    target.copy_(source)
