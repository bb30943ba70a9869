from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from reference_replay import FRAME, StackStream

from maze_train.data.frames import FrameMemory


def stacked_rollout(rng, num_rows, num_envs, n, padding, share):
    """Rows of stacks `[rows, B, n, *FRAME]`; a share of them begins an episode."""
    stream = StackStream(rng, num_envs, n, padding, 0.0, ends=share)
    rows = stream.steps(num_rows - 1)
    return np.array([[step.obs["image"] for step in row] for row in rows])


def write(memory, stacks):
    """Write all rows."""
    memory.start(stacks[0])
    for row, stack in enumerate(stacks[1:], start=1):
        memory.write(row, stack)


@pytest.mark.parametrize(("padding", "share"), [("repeat", 0.2), ("random", 0.0)])
def test_every_frame_is_stored_once(padding, share):
    """Rows of frames, the past of the first stacks, and nothing for repeated frames."""
    memory = FrameMemory(spaces.Box(0, 255, (4, *FRAME), np.uint8), 33, 2)
    write(memory, stacked_rollout(np.random.default_rng(0), 33, 2, 4, padding, share))
    assert len(memory.stacks().numbers.unique()) == 33 * 2 + (0 if padding == "repeat" else 6)
    assert memory.nbytes <= (33 * 2 + 2 * 6) * 6


def test_a_wrapper_may_skip_observations():
    """Stacks that continue by two frames are stored as they are; rounding keeps no frame twice."""
    space = spaces.Box(-np.inf, np.inf, (4, 1), np.float64)
    memory = FrameMemory(space, 9, 1)
    frames = np.random.default_rng(0).standard_normal(40)
    rows = [frames[start : start + 4].reshape(1, 4, 1) for start in (*range(5), 6, 8, 10, 12)]
    write(memory, rows)
    expected = torch.from_numpy(np.concatenate(rows)).float()
    assert torch.equal(memory.stacks()[0:9], expected)
    assert len(memory.stacks().numbers.unique()) == 9 + 3 + 4
