"""Stacks of the last n frames in a replay buffer, with the newest frame of each row stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from maze_train.data.frames import FrameStacks
from maze_train.data.replay_columns import KeptObservations

if TYPE_CHECKING:
    from maze_train.data.replay_columns import Column, Spec
    from maze_train.types import Array, Tensor


class FrameColumn:
    """Stacks `[n, *frame]`, newest frame last, put together from the frames of n rows.

    Where a stack does not go on from the one in the row before (an episode begins, or a wrapper
    took several steps at once), it is stored separately as a whole. The `depth` of a row says how
    many rows back that was, at most n - 1: its stack consists of the newest frames of as many rows,
    and of what the whole stack has to give.

    Args:
        n: Frames per stack.
        frames: Column of the newest frames.
        depths: Column of the depths, uint8, in memory.
        spec: Shape `[n, *frame]` and dtype of a stack.
    """

    def __init__(self, n: int, frames: Column, depths: Column, spec: Spec) -> None:
        self.n = n
        self.kept = KeptObservations({"": spec})
        self._frames = frames
        self._depths = depths
        self._depth_entries = depths.entries.numpy()
        self._ring = frames.ring

    def write(self, first: int, stacks: Tensor | FrameStacks, begin: int, continues: bool) -> None:
        """Write the stacks `[rows, envs, n, *frame]` from a row on.

        Args:
            first: The row that the first of them is written to.
            stacks: Observations.
            begin: The first of them that is written.
            continues: Whether that one is what the row holds already.
        """
        num_envs = self._ring.num_envs
        newest, goes_on = _newest_frames(stacks)
        begins = np.ones((len(newest) - begin, num_envs), bool)
        begins[1:] = ~goes_on[begin:]
        numbers = np.arange(len(begins))[:, None]
        begin_numbers = np.where(begins, numbers, -self.n)
        if continues:
            begins[0] = False
            begin_numbers[0] = -self._depth_entries.reshape(-1, num_envs)[
                first % self._ring.num_slots
            ].astype(np.int64)
        else:
            self.kept.drop_from(first * num_envs)
        depths = numbers - np.maximum.accumulate(begin_numbers, axis=0)
        self._depths.write(first, torch.from_numpy(depths.clip(max=self.n - 1)))
        self._frames.write(first, newest, begin)
        whole = np.flatnonzero(begins)
        picked = torch.from_numpy(whole + begin * num_envs)
        kept = stacks.flatten(0, 1).index_select(0, picked).numpy()
        self.kept.append(first * num_envs + whole, {"": kept})

    def gather(self, positions: Array) -> Tensor:
        """Stacks `[k, n, *frame]` of the positions `[k]`."""
        n, num_envs, size = self.n, self._ring.num_envs, self._ring.size
        # Entries before the first row are replaced below; any entry will do.
        window = (positions[:, None] + np.arange(1 - n, 1) * num_envs) % len(self._frames.entries)
        frames = self._frames.gather(window.ravel())
        stacks = frames.view(-1, n, *frames.shape[1:])
        depths = self._depth_entries.take(positions % size)
        short = np.flatnonzero(depths < n - 1)
        if short.size:
            depth = depths[short].astype(np.int64)
            whole = self.kept.gather(positions[short] - depth * num_envs)[""]
            which, ages = np.nonzero(np.arange(n) < (n - depth)[:, None])
            older = whole[which, ages + depth[which]].to(frames.device)
            stacks[torch.from_numpy(short[which]), torch.from_numpy(ages)] = older
        return stacks


def _newest_frames(stacks: Tensor | FrameStacks) -> tuple[Tensor, Array]:
    """Newest frames `[rows, envs, *frame]`; whether stacks go on, `[rows - 1, envs]`."""
    rows, num_envs, n = stacks.shape[:3]
    if isinstance(stacks, FrameStacks):
        # Frames with one number are equal, and `FrameMemory` numbers those of stacks that go on so.
        numbers = stacks.numbers.view(rows, num_envs, n)
        newest = stacks.frames.index_select(0, numbers[..., -1].flatten())
        newest = newest.view(rows, num_envs, *newest.shape[1:])
        return newest, (numbers[1:, :, :-1] == numbers[:-1, :, 1:]).all(-1).numpy()
    same = stacks[1:, :, :-1] == stacks[:-1, :, 1:]
    return stacks[:, :, -1], same.flatten(2).all(-1).numpy()
