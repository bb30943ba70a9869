from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import (
    BOX,
    BOX_ACTION,
    WITH_WAITING,
    Step,
    Stream,
    added,
    assert_equal_to,
    everything,
    filled,
    make,
    rollout_of,
    rollout_of_one,
)
from reference_replay import KINDS as ROWS

import maze_train.data.replay_memory as replay_memory
from maze_train.core.errors import ConfigError, RunDirectoryError, ShapeError, TrainingError
from maze_train.core.state_files import dumps, loads
from maze_train.core.types import leaves_by_key, tree_map
from maze_train.data.replay import UniformReplayBuffer
from maze_train.data.replay_memory import ReplayLayout

STACKS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 5),
        "padding": st.sampled_from(["repeat", "zero", "random"]),
        "skipping": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        "ends": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    }
)
EXPERIENCE = {
    "rows": st.integers(1, 12),
    "n_steps": st.integers(1, 5),
    "kind": st.sampled_from(["box", "dict", "stacks"]),
    "stacks": STACKS,
    "seed": st.integers(0, 2**32 - 1),
}


def made(rows, num_envs, n_steps, kind, stacks, seed, **settings):
    """Return a buffer, its reference and a stream of experience; of stacks for kind `stacks`."""
    own = stacks if kind == "stacks" else {"ends": stacks["ends"]}
    return make(rows, num_envs, kind, n_steps=n_steps, seed=seed, stream={**own, **settings})


@settings(max_examples=120, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    lengths=st.lists(st.integers(-1, 15), min_size=1, max_size=8),
    kinds=st.sampled_from([ROWS, WITH_WAITING]),
    **EXPERIENCE,
)
def test_transitions_match_the_reference(lengths, **experience):
    """Transitions match for all kinds of ends, gaps, waiting agents and several ring turns.

    Stacks of frames match for any padding and frame skipping.
    """
    buffer, reference, stream = made(**experience)
    for _ in added(buffer, reference, stream, lengths):
        expected = reference.transitions()
        assert len(buffer) == len(expected)
        assert_equal_to(everything(buffer), expected)


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(
        st.sampled_from(["step", "step", "step", "rollout", "interrupt"]), min_size=1, max_size=30
    ),
    **EXPERIENCE,
)
def test_single_steps_and_rollouts_match(events, **experience):
    """Single steps and rollouts of one environment match, with interruptions after episode ends."""
    kinds = ("terminated", "truncated")
    buffer, reference, stream = made(num_envs=1, kinds=kinds, **experience)
    for event in events:
        if event == "interrupt":
            for owner in (buffer, reference, stream):
                owner.interrupt()
            continue
        if event == "rollout":
            tuple(added(buffer, reference, stream, [3]))
        else:
            step = stream.step(0)
            next_obs = stream.obs[0] if step.final_obs is None else step.final_obs
            buffer.add_rollout(rollout_of_one(step, next_obs))
            reference.add([[step], [Step(next_obs)]])
            if step.terminated or step.truncated:
                buffer.interrupt()
                reference.interrupt()
        assert_equal_to(everything(buffer), reference.transitions())


COLUMNS = ("obs", "actions", "rewards", "discounts", "next_obs", "indices")


def assert_same_samples(found, expected):
    """Assert that batches are identical, including dtypes."""
    for name in COLUMNS:
        leaves = (leaves_by_key(getattr(batch, name)) for batch in (found, expected))
        torch.testing.assert_close(*leaves, rtol=0, atol=0)


def test_replay_samples_are_uniform():
    """All transitions are equally likely, and invalid rows are not sampled."""
    buffer, reference, _ = filled(20, 2, "dict")
    assert len(reference.transitions()) == len(buffer) < 40
    indices = buffer.sample_batch(20_000).indices
    counts = torch.bincount(indices, minlength=buffer._memory.ring.size).numpy()
    valid = np.unique(everything(buffer).indices.numpy())
    assert counts.sum() == counts[valid].sum()
    expected = 20_000 / len(valid)
    # Chi-squared test with about 30 degrees of freedom: the 99.9% quantile is 59.7.
    assert ((counts[valid] - expected) ** 2 / expected).sum() < 59.7


def test_replay_batch_contains_the_transitions_at_its_indices():
    """A batch contains the transitions at its indices, with repetitions, in order."""
    buffer, _, _ = filled(20, 2, "dict", n_steps=3)
    batch, whole = buffer.sample_batch(200), everything(buffer)
    place = {int(index): i for i, index in enumerate(whole.indices)}
    picked = torch.tensor([place[int(index)] for index in batch.indices])
    assert batch.weights is None
    assert batch.rewards.dtype == batch.discounts.dtype == torch.float32
    columns = {name: tree_map(lambda x: x[picked], getattr(whole, name)) for name in COLUMNS}
    assert_same_samples(batch, replace(whole, **columns))
    assert batch.obs["image"].dtype == torch.uint8
    assert batch.actions["move"].dtype == torch.int64


def test_replay_storages_return_equal_samples(tmp_path):
    """All storages return equal samples, and files are unlinked."""
    batches = []
    for storage in ("memory", "disk", "device"):
        settings = {"storage": storage, "directory": tmp_path, "n_steps": 2}
        batches.append(filled(20, 2, "dict", **settings)[0].sample_batch(100))
    assert not list(tmp_path.iterdir())
    for batch in batches[1:]:
        assert_same_samples(batch, batches[0])


def test_an_observation_is_stored_once():
    """HalfCheetah requires 97 bytes per transition, within 2% of the minimum and as estimated."""
    space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    action = torch.zeros(6)
    for num_envs in (1, 8):
        buffer = UniformReplayBuffer(50_000, space, action, num_envs=num_envs)
        assert buffer.nbytes == ReplayLayout(50_000, space, action, num_envs=num_envs).nbytes
        assert 0 <= buffer.nbytes / 50_000 / (4 * (17 + 6 + 1) + 1) - 1 < 0.02
    image = spaces.Dict({"image": spaces.Box(0, 255, (84, 84), np.uint8)})
    assert ReplayLayout(1000, image, action).nbytes == 1001 * (84 * 84 + 24 + 4 + 1)


@pytest.mark.parametrize("storage", everyday(1, ["memory", "disk", "device"]))
def test_a_frame_is_stored_once(storage, tmp_path):
    """Each row stores one frame, and each episode start stores a whole stack."""
    settings = {"storage": storage, "directory": tmp_path}
    stacks = {"n": 4, "padding": "repeat", "skipping": 0.0, "ends": 0.0}
    buffer, reference, stream = make(1000, 2, "stacks", stream=stacks, **settings)
    assert buffer.nbytes == 1004 * 2 * (2 * 3 + 1 + 4 + 8 + 4 + 1)
    sizes = {"num_envs": 2, "frame_stack": {"image": 4}}
    assert buffer.nbytes == ReplayLayout(2000, stream.space, BOX_ACTION, **sizes).nbytes
    for _ in added(buffer, reference, stream, [50] * 30):
        is_kept = buffer._memory.head <= 1000
        assert len(buffer._memory._stacks["image"].kept) == (2 if is_kept else 0)
    assert_equal_to(everything(buffer), reference.transitions())


def test_stacks_may_be_stored_whole():
    """Rollouts with stacks can be added to a buffer without `frame_stack`."""
    buffer, reference, stream = make(10, 2, "stacks", frame_stack={})
    for _ in added(buffer, reference, stream, [14]):
        assert_equal_to(everything(buffer), reference.transitions())
    assert everything(buffer).obs["image"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_size": 0}, "buffer_size = 0: expected a number >= 1"),
        ({"num_envs": 0}, "num_envs = 0: expected a number >= 1"),
        ({"n_steps": 0}, "n_steps = 0: expected a number >= 1"),
        ({"gamma": 1.1}, r"gamma = 1.1: expected a number in \[0, 1\]"),
        ({"storage": "dsik"}, "storage = 'dsik': expected one of .* did you mean 'disk'"),
        ({"storage": "disk"}, "directory = None: required for storage=disk"),
        ({"frame_stack": {"": 3}}, r"frame_stack = {'': 3}: expected observations of shape \[3,"),
        ({"frame_stack": {"a": 2}}, "frame_stack = {'a': 2}: .* under 'a'"),
    ],
)
def test_invalid_buffer_settings_raise(change, message):
    """The error contains the setting and what is expected."""
    settings = {"buffer_size": 10, "observation_space": BOX, "actions": BOX_ACTION, **change}
    with pytest.raises(ConfigError, match=message):
        UniformReplayBuffer(**settings)


def test_what_does_not_fit_is_refused():
    """Wrong shapes, missing observations and an empty buffer raise errors."""
    buffer, _, _ = make(10, 2)
    with pytest.raises(TrainingError, match="the replay buffer is empty"):
        buffer.sample_batch(1)
    steps = Stream(np.random.default_rng(0), 3).steps(2)
    with pytest.raises(ShapeError, match="3 environments, the replay buffer expects 2"):
        buffer.add_rollout(rollout_of(steps))
    _, _, stream = make(10, 2, "dict")
    with pytest.raises(ShapeError, match=r"one step of obs has the shapes .*image"):
        buffer.add_rollout(rollout_of(stream.steps(2), stream.space, stream.action))
    steps = Stream(np.random.default_rng(0), 2, ends=1.0, kinds=("truncated",)).steps(2)
    for row in steps:
        row[1].final_obs = None
    with pytest.raises(ShapeError, match=r"step 0 of environment 1 was truncated: .* final_obs"):
        buffer.add_rollout(rollout_of(steps))
    step = Stream(np.random.default_rng(0), 1).step(0)
    with pytest.raises(ShapeError, match=r"obs has the shapes .* next_obs"):
        rollout_of_one(step, {"": np.zeros(5, np.float32)})
    lone, _, _ = make(10, 1)
    stream = Stream(np.random.default_rng(0), 1, ends=1.0, kinds=("ignored",))
    lone.add_rollout(rollout_of(stream.steps(9)))  # all rows are ignored
    assert len(buffer) == len(lone) == 0
    with pytest.raises(TrainingError, match="empty"):
        lone.sample_batch(1)


# -- states ----------------------------------------------------------------------------------------


KINDS = ("box", "dict", "stacks")


class Store:
    """Store that reads each version of a segment once."""

    def __init__(self):
        self.contents = {}
        self.num_read = 0

    def through(self, state):
        """Return a state as it is read from files."""
        found = {}
        for name, part in state["segments"].items():
            known = self.contents.get((name, part.version))
            self.num_read += known is None
            found[name, part.version] = content = part.read()
            np.testing.assert_equal(content, known or content)
        self.contents = found  # a resumed checkpoint contains exactly these segments
        return loads(dumps(state))


def versions(buffer):
    """Return the versions of segments by name."""
    return {name: part.version for name, part in buffer.state_dict()["segments"].items()}


@pytest.fixture
def small_segments(monkeypatch):
    """Make segments of about two rows."""
    monkeypatch.setattr(replay_memory, "SEGMENT_NBYTES", 80)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", everyday(1, range(6)))
def test_saved_again_and_again_a_buffer_goes_on_as_it_was(small_segments, kind, seed):
    """Only changed segments are read, and samples are bit-for-bit identical in all ring turns.

    The reserved memory may be too small, too large, or none.
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
        if rng.random() < 0.5:  # the buffer contains other experience
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
    """A new row changes its segment and the neighbouring ones only."""
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


def test_a_state_does_not_depend_on_the_storage(tmp_path):
    """A state can be moved from memory to disk to the device."""
    buffer, reference, _ = filled(20, 2, "stacks", lengths=(30, 15))
    for storage in ("disk", "device", "memory"):
        other, _, _ = make(20, 2, "stacks", storage=storage, directory=tmp_path)
        other.load_state_dict(Store().through(buffer.state_dict()))
        assert_equal_to(everything(other), reference.transitions())
        buffer = other


def test_another_buffer_is_refused():
    """Another layout or a damaged segment raises an error, and the buffer does not change."""
    buffer, _, stream = make(20, 2)
    buffer.add_rollout(rollout_of(stream.steps(5)))
    state = buffer.state_dict()
    for changes, text in (
        ((30, 2), r"another layout: rows is 30, saved as 20. Use"),
        ((20, 2, "dict"), r"obs/image is uint8 \[2, 3\], saved as missing"),
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
