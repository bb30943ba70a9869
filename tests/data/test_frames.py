from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import FRAME, StackStream

from maze_train.data.frames import FrameMemory
from maze_train.data.rollout import RolloutStorage


def stacked_rollout(rng, num_rows, num_envs, n, padding, share, skipping=0.0):
    """Rows of stacks `[rows, B, n, *FRAME]`; a share of them begins an episode."""
    stream = StackStream(rng, num_envs, n, padding, skipping, ends=share)
    rows = stream.steps(num_rows - 1)
    return np.array([[step.obs["image"] for step in row] for row in rows])


def write(memory, stacks):
    """Write all rows."""
    memory.start(stacks[0])
    for row, stack in enumerate(stacks[1:], start=1):
        memory.write(row, stack)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["repeat", "zero", "random"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 2**32 - 1),
)
def test_stacks_come_back_as_they_were(num_rows, num_envs, n, padding, share, skipping, seed):
    """Whatever an episode begins with, also in the second rollout of one memory."""
    rng = np.random.default_rng(seed)
    space = spaces.Box(0, 255, (n, *FRAME), np.uint8)
    memory = FrameMemory(space, num_rows, num_envs)
    for _ in range(2):
        stacks = stacked_rollout(rng, num_rows, num_envs, n, padding, share, skipping)
        write(memory, stacks)
        found = memory.stacks()
        assert found.shape == stacks.shape
        flat = torch.from_numpy(stacks).flatten(0, 1)
        assert torch.equal(found[0 : len(flat)], flat)
        positions = torch.from_numpy(rng.permutation(len(flat)))
        assert torch.equal(found.index_select(0, positions), flat[positions])


@pytest.mark.parametrize(("padding", "share"), [("repeat", 0.2), ("random", 0.0)])
def test_every_frame_is_stored_once(padding, share):
    """Rows of frames, the past of the first stacks, and nothing for repeated frames."""
    memory = FrameMemory(spaces.Box(0, 255, (4, *FRAME), np.uint8), 33, 2)
    write(memory, stacked_rollout(np.random.default_rng(0), 33, 2, 4, padding, share))
    assert len(memory.stacks().numbers.unique()) == 33 * 2 + (0 if padding == "repeat" else 6)
    assert memory.nbytes <= (33 * 2 + 2 * 6) * 6


def test_a_rollout_with_stacks():
    """Part of a Dict is stacked: the storage gives both kinds of leaves by position."""
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, (3, 2), np.uint8), "speed": spaces.Box(-1.0, 1.0, (1,))}
    )
    storage = RolloutStorage(space, 2, 2, frame_stack={"image": 3})

    def obs(row):
        frames = np.stack([np.arange(row, row + 3) + 10 * env for env in range(2)])
        image = np.stack([frames, frames], -1).astype(np.uint8)
        return {"image": image, "speed": np.full((2, 1), row / 10, np.float32)}

    flags = np.zeros(2, bool)
    storage.start(obs(0))
    for t in range(2):
        acting = storage.acting_obs(t)
        assert np.array_equal(acting["image"].numpy(), obs(t)["image"])
        assert np.array_equal(acting["speed"].numpy(), obs(t)["speed"])
        storage.write_actions(t, torch.zeros(2))
        storage.write_step(t, obs(t + 1), np.zeros(2), flags, flags)
    rollout = storage.rollout()
    assert list(rollout.obs) == ["image", "speed"]
    expected = np.concatenate([obs(row)["image"] for row in range(3)])
    assert np.array_equal(rollout.flat_obs()["image"][0:6].numpy(), expected)
    assert rollout.acted_on(["image"])["image"].shape == (4, 3, 2)
    assert rollout.to(torch.device("cpu")) is rollout


def test_a_wrapper_may_skip_observations():
    """Stacks that go on by two frames are stored as they are; rounding keeps no frame twice."""
    space = spaces.Box(-np.inf, np.inf, (4, 1), np.float64)
    memory = FrameMemory(space, 9, 1)
    frames = np.random.default_rng(0).standard_normal(40)
    rows = [frames[start : start + 4].reshape(1, 4, 1) for start in (*range(5), 6, 8, 10, 12)]
    write(memory, rows)
    expected = torch.from_numpy(np.concatenate(rows)).float()
    assert torch.equal(memory.stacks()[0:9], expected)
    assert len(memory.stacks().numbers.unique()) == 9 + 3 + 4
