from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from reference_replay import (
    added,
    assert_equal_to,
    everything,
    filled,
    make,
    rollout_of,
)

import maze_train.data.replay_memory as replay_memory
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.data.replay import UniformReplayBuffer
from maze_train.data.state_files import dumps, loads

KINDS = ("box", "dict", "stacks")


class Store:
    """Keeps what was read of the segments of a state, and does not read it again."""

    def __init__(self):
        self.contents = {}
        self.num_read = 0

    def through(self, state):
        """The state as it is read from files."""
        found = {}
        for name, part in state["segments"].items():
            known = self.contents.get((name, part.version))
            self.num_read += known is None
            found[name, part.version] = content = part.read()
            np.testing.assert_equal(content, known or content)
        self.contents = found  # A checkpoint that is continued holds these, and no others.
        return loads(dumps(state))


def versions(buffer):
    """Versions of segments by name."""
    return {name: part.version for name, part in buffer.state_dict()["segments"].items()}


@pytest.fixture
def small_segments(monkeypatch):
    """Segments of about two rows."""
    monkeypatch.setattr(replay_memory, "SEGMENT_NBYTES", 80)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", everyday(3, range(12)))
def test_saved_again_and_again_a_buffer_goes_on_as_it_was(small_segments, kind, seed):
    """Segments are read where they changed; samples are equal bit for bit, in all turns.

    Whatever memory was reserved: for less than comes, for more than there is room, or none.
    """
    rng = np.random.default_rng(seed)
    rows, num_envs = int(rng.integers(1, 14)), int(rng.integers(1, 4))
    buffer, reference, stream = make(rows, num_envs, kind, n_steps=2)
    buffer.reserve(int(rng.integers(0, 20)))
    store = Store()
    for length in rng.integers(-1, 8, 14):
        for _ in added(buffer, reference, stream, [length]):
            pass
        state = store.through(buffer.state_dict())
        loaded, _, other_stream = make(rows, num_envs, kind, n_steps=2)
        loaded.reserve(int(rng.integers(0, 20)))
        if rng.random() < 0.5:  # a buffer that holds something else
            loaded.add_rollout(rollout_of(other_stream.steps(5), stream.space, stream.action))
        loaded.load_state_dict(state)
        assert len(loaded) == len(buffer)
        assert versions(loaded) == versions(buffer)
        if len(buffer):
            assert_equal_to(everything(loaded), reference.transitions())
            ours, theirs = buffer.sample_batch(20), loaded.sample_batch(20)
            assert torch.equal(ours.indices, theirs.indices)
            assert torch.equal(ours.rewards, theirs.rewards)
        if rng.random() < 0.3:
            buffer = loaded


def test_what_did_not_change_is_not_read_again(small_segments):
    """One row more touches the segments of that row and of the rows next to it."""
    buffer, _, stream = make(100, 2)
    store = Store()

    def num_read_after(owner, *lengths):
        before = store.num_read
        for length in lengths:
            owner.add_rollout(rollout_of(stream.steps(length)))
        state = store.through(owner.state_dict())
        return store.num_read - before, state

    assert num_read_after(buffer, 40)[0] == 41
    assert num_read_after(buffer)[0] == 0
    assert num_read_after(buffer, 1)[0] == 3
    num_read_after(buffer, *[30] * 10)
    count, state = num_read_after(buffer, 1)
    assert count <= 4
    loaded, _, _ = make(100, 2)
    loaded.load_state_dict(state)
    assert num_read_after(loaded, 1)[0] <= 4


@pytest.mark.parametrize(("buffer_size", "segments"), [(1000, 1), (100_000, 5), (10_000_000, 256)])
def test_segments_are_about_two_mebibytes_and_at_most_256(buffer_size, segments):
    """The memory of a large buffer is taken when it is written, so this one costs none."""
    space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    buffer = UniformReplayBuffer(buffer_size, space, torch.zeros(6))
    memory = buffer._memory
    assert abs(len(memory._versions) - segments) <= 1
    assert len(memory._versions) <= 256
    assert memory._segment_slots * (len(memory._versions) - 1) < memory.ring.num_slots
    assert memory._segment_slots * len(memory._versions) >= memory.ring.num_slots
    assert buffer.state_dict()["segments"] == {}


def test_a_state_does_not_depend_on_the_storage(tmp_path):
    """From memory to disk to the device."""
    buffer, reference, _ = filled(20, 2, "stacks", lengths=(30, 15))
    for storage in ("disk", "device", "memory"):
        other, _, _ = make(20, 2, "stacks", storage=storage, directory=tmp_path)
        other.load_state_dict(Store().through(buffer.state_dict()))
        assert_equal_to(everything(other), reference.transitions())
        buffer = other


def test_another_buffer_is_refused():
    """One of another layout, or with a damaged segment; the buffer stays as it was."""
    buffer, _, stream = make(20, 2)
    buffer.add_rollout(rollout_of(stream.steps(5)))
    state = buffer.state_dict()
    for changes, text in (
        ((30, 2), r"another layout: rows is 30 here and was 20. Continue"),
        ((20, 2, "dict"), r"obs/image is uint8 \[2, 3\] here and was missing"),
    ):
        other, _, _ = make(*changes)
        with pytest.raises(ConfigError, match=text):
            other.load_state_dict(state)
        assert len(other) == 0
    (part,) = state["segments"].values()
    for damage in ({"rewards": None}, {"rewards": np.zeros((3, 2), np.float32)}):
        damaged = replace(part, read=lambda damage=damage: part.read() | damage)
        with pytest.raises(RunDirectoryError, match=r"segment 0 .* expected rewards as float32"):
            make(20, 2)[0].load_state_dict({**state, "segments": {"000": damaged}})
