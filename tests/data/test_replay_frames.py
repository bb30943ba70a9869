from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import (
    BOX_ACTION,
    ReferenceReplay,
    StackStream,
    Step,
    added,
    assert_equal_to,
    everything,
    transition_of,
)

from maze_train.data.frames import FrameMemory
from maze_train.data.replay import UniformReplayBuffer, replay_nbytes

GAMMA = 0.9


def with_stacks(rollout, space):
    """The same rollout with its frames stored once."""
    images = rollout.obs["image"].numpy()
    memory = FrameMemory(space, *images.shape[:2])
    memory.start(images[0])
    for row, image in enumerate(images[1:], start=1):
        memory.write(row, image)
    return replace(rollout, obs={**rollout.obs, "image": memory.stacks()})


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 12),
    num_envs=st.integers(1, 3),
    n=st.integers(1, 5),
    n_steps=st.integers(1, 3),
    padding=st.sampled_from(["repeat", "zero", "random"]),
    skipping=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    ends=st.sampled_from([0.0, 0.1, 0.5]),
    are_stacks=st.booleans(),
    lengths=st.lists(st.integers(-1, 15), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_stacks_come_back_as_they_were(
    rows, num_envs, n, n_steps, padding, skipping, ends, are_stacks, lengths, seed
):
    """Whatever an episode begins with, however frames are skipped, in every turn of the ring."""
    stream = StackStream(np.random.default_rng(seed), num_envs, n, padding, skipping, ends=ends)
    reference = ReferenceReplay(rows, num_envs, n_steps, GAMMA)
    buffer = UniformReplayBuffer(
        rows * num_envs,
        stream.space,
        BOX_ACTION,
        num_envs=num_envs,
        n_steps=n_steps,
        gamma=GAMMA,
        frame_stack={"image": n},
    )
    change = partial(with_stacks, space=stream.image) if are_stacks else None
    for _ in added(buffer, reference, stream, lengths, change):
        assert_equal_to(everything(buffer), reference.transitions())


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    n=st.integers(1, 4),
    events=st.lists(st.sampled_from(["step", "step", "rollout"]), min_size=1, max_size=20),
    seed=st.integers(0, 2**32 - 1),
)
def test_single_transitions_with_stacks(rows, n, events, seed):
    """One by one, with ends of both kinds, and rollouts in between."""
    kinds = ("terminated", "truncated")
    stream = StackStream(np.random.default_rng(seed), 1, n, "repeat", 0.1, kinds=kinds)
    reference = ReferenceReplay(rows, 1, 1, GAMMA)
    buffer = UniformReplayBuffer(
        rows, stream.space, BOX_ACTION, gamma=GAMMA, frame_stack={"image": n}
    )
    for event in events:
        if event == "rollout":
            for _ in added(buffer, reference, stream, [3]):
                pass
        else:
            step = stream.step(0)
            next_obs = stream.obs[0] if step.final_obs is None else step.final_obs
            buffer.add_transition(transition_of(step, next_obs))
            reference.add([[step], [Step(next_obs)]])
        assert_equal_to(everything(buffer), reference.transitions())


@pytest.mark.parametrize("storage", ["memory", "disk", "device"])
def test_a_frame_is_stored_once(storage, tmp_path):
    """Per row one frame, and a whole stack where an episode begins."""
    stream = StackStream(np.random.default_rng(0), 2, 4, "repeat", 0.0, ends=0.0)
    buffer = UniformReplayBuffer(
        2000,
        stream.space,
        BOX_ACTION,
        num_envs=2,
        frame_stack={"image": 4},
        storage=storage,
        directory=tmp_path,
    )
    per_row = 2 * (2 * 3 + 1 + 4 + 8 + 4 + 1)
    assert buffer.nbytes == 1004 * per_row
    assert buffer.nbytes == replay_nbytes(
        2000, stream.space, BOX_ACTION, num_envs=2, frame_stack={"image": 4}
    )
    reference = ReferenceReplay(1000, 2, 1, 0.99)
    change = partial(with_stacks, space=stream.image)
    for _ in added(buffer, reference, stream, [50] * 30, change):
        assert len(buffer._memory._stacks["image"].kept) == (
            2 if buffer._memory.head <= 1000 else 0
        )
    assert_equal_to(everything(buffer), reference.transitions())


def test_stacks_may_be_stored_whole():
    """A rollout with stacks fits a buffer that was not told of them."""
    stream = StackStream(np.random.default_rng(0), 2, 3, "zero", 0.0)
    buffer = UniformReplayBuffer(20, stream.space, BOX_ACTION, num_envs=2, gamma=GAMMA)
    reference = ReferenceReplay(10, 2, 1, GAMMA)
    for _ in added(buffer, reference, stream, [14], partial(with_stacks, space=stream.image)):
        assert_equal_to(everything(buffer), reference.transitions())
    assert everything(buffer).obs["image"].dtype == torch.uint8
