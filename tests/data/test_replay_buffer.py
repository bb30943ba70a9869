from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_replay import (
    BOX,
    BOX_ACTION,
    DICT,
    DICT_ACTION,
    ReferenceReplay,
    Step,
    Stream,
    added,
    assert_equal_to,
    everything,
    rollout_of,
    transition_of,
)

from maze_train.data.replay import UniformReplayBuffer, replay_nbytes
from maze_train.errors import ConfigError, ShapeError, TrainingError
from maze_train.trees import leaves_by_key, tree_map

GAMMA = 0.9
SPACES = {"box": (BOX, BOX_ACTION), "dict": (DICT, DICT_ACTION)}


def make(rows, num_envs, n_steps=1, kind="box", **settings):
    """A buffer, its reference and experience for both."""
    space, action = SPACES[kind]
    settings = {"gamma": GAMMA, "n_steps": n_steps, **settings}
    buffer = UniformReplayBuffer(rows * num_envs, space, action, num_envs=num_envs, **settings)
    return buffer, ReferenceReplay(rows, num_envs, n_steps, GAMMA)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    n_steps=st.integers(1, 5),
    kind=st.sampled_from(["box", "dict"]),
    ends=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    lengths=st.lists(st.integers(-1, 15), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_transition_is_that_of_the_reference(
    rows, num_envs, n_steps, kind, ends, lengths, seed
):
    """Ends of all kinds, ignored rows, interruptions, several turns of the ring."""
    buffer, reference = make(rows, num_envs, n_steps, kind)
    stream = Stream(np.random.default_rng(seed), num_envs, *SPACES[kind], ends)
    for _ in added(buffer, reference, stream, lengths):
        expected = reference.transitions()
        assert len(buffer) == len(expected)
        assert_equal_to(everything(buffer), expected)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 12),
    n_steps=st.integers(1, 5),
    kind=st.sampled_from(["box", "dict"]),
    events=st.lists(
        st.sampled_from(["step", "step", "step", "jump and step", "rollout", "interrupt"]),
        min_size=1,
        max_size=30,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_single_transitions_and_rollouts_mix(rows, n_steps, kind, events, seed):
    """Steps that follow one another, steps from elsewhere, and rollouts, of a lone environment."""
    buffer, reference = make(rows, 1, n_steps, kind)
    stream = Stream(
        np.random.default_rng(seed), 1, *SPACES[kind], kinds=("terminated", "truncated")
    )
    last = None
    for event in events:
        if event == "interrupt":
            for owner in (buffer, reference, stream):
                owner.interrupt()
            last = None
            continue
        if event == "rollout":
            (steps,) = added(buffer, reference, stream, [3])
            last = steps[-2][0]
        else:
            if event == "jump and step":
                stream.interrupt()
                jumped_after(last, reference)
            last = stream.step(0)
            next_obs = stream.obs[0] if last.final_obs is None else last.final_obs
            buffer.add_transition(transition_of(last, next_obs))
            reference.add([[last], [Step(next_obs)]])
        assert_equal_to(everything(buffer), reference.transitions())


def jumped_after(last, reference):
    """Begin a row of its own after a jump, unless the step before ended its episode."""
    if last is not None and not (last.terminated or last.truncated):
        reference.interrupt()


SEED = {"seed": 1}


def filled(**settings):
    """A buffer with some experience."""
    buffer, reference = make(20, 2, kind="dict", **settings)
    stream = Stream(np.random.default_rng(0), 2, *SPACES["dict"])
    for _ in added(buffer, reference, stream, (7, 30, 5)):
        pass
    return buffer, reference


COLUMNS = ("obs", "actions", "rewards", "discounts", "next_obs", "indices")


def assert_same_samples(found, expected):
    """Refuse another bit or data type."""
    for name in COLUMNS:
        leaves = (leaves_by_key(getattr(batch, name)) for batch in (found, expected))
        torch.testing.assert_close(*leaves, rtol=0, atol=0)


def test_samples_are_uniform():
    """Each of the transitions is equally likely; rows that are none never come."""
    buffer, reference = filled()
    assert len(reference.transitions()) == len(buffer) < 40
    indices = buffer.sample_batch(20_000).indices
    counts = torch.bincount(indices, minlength=buffer._memory.ring.size).numpy()
    valid = np.unique(everything(buffer).indices.numpy())
    assert counts.sum() == counts[valid].sum()
    expected = 20_000 / len(valid)
    # Chi-square with about 30 degrees of freedom: its 99.9 % quantile is 59.7.
    assert ((counts[valid] - expected) ** 2 / expected).sum() < 59.7


def test_samples_are_what_lies_at_their_indices():
    """A batch with repetitions, in the order that the generator gave."""
    buffer, _ = filled(n_steps=3)
    batch, whole = buffer.sample_batch(200), everything(buffer)
    place = {int(index): i for i, index in enumerate(whole.indices)}
    picked = torch.tensor([place[int(index)] for index in batch.indices])
    assert batch.weights is None
    assert batch.rewards.dtype == batch.discounts.dtype == torch.float32
    columns = {name: tree_map(lambda x: x[picked], getattr(whole, name)) for name in COLUMNS}
    assert_same_samples(batch, replace(whole, **columns))
    assert batch.obs["image"].dtype == torch.uint8
    assert batch.actions["move"].dtype == torch.int64


def test_storages_give_equal_samples(tmp_path):
    """Wherever the columns lie; files have no name, so none is left."""
    batches = []
    for storage in ("memory", "disk", "device"):
        directory = tmp_path if storage == "disk" else None
        buffer, _ = filled(storage=storage, directory=directory, n_steps=2)
        batches.append(buffer.sample_batch(100))
    assert not list(tmp_path.iterdir())
    for batch in batches[1:]:
        assert_same_samples(batch, batches[0])


def test_the_seed_decides():
    """Equal seeds give equal samples, others do not."""
    drawn = [filled(**settings)[0].sample_batch(50).indices for settings in ({}, {}, SEED)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_an_observation_is_stored_once():
    """HalfCheetah: 97 bytes per transition, which is the least, within 2 %; known beforehand."""
    space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    action = torch.zeros(6)
    for num_envs in (1, 8):
        buffer = UniformReplayBuffer(50_000, space, action, num_envs=num_envs)
        assert buffer.nbytes == replay_nbytes(50_000, space, action, num_envs=num_envs)
        assert 0 <= buffer.nbytes / 50_000 / (4 * (17 + 6 + 1) + 1) - 1 < 0.02
    image = spaces.Dict({"image": spaces.Box(0, 255, (84, 84), np.uint8)})
    assert replay_nbytes(1000, image, action) == 1001 * (84 * 84 + 24 + 4 + 1)


def test_observations_are_beside_only_where_they_must():
    """Not after terminal steps, and not where a step leads to what comes next."""
    buffer, reference = make(100, 1)
    stream = Stream(np.random.default_rng(0), 1, ends=1.0, kinds=("terminated", "both"))
    for _ in added(buffer, reference, stream, [20]):
        assert len(buffer._memory._final_obs) == 0
    stream = Stream(np.random.default_rng(0), 1, ends=0.0)
    for _ in range(20):
        step = stream.step(0)
        buffer.add_transition(transition_of(step, stream.obs[0]))
        assert len(buffer._memory._final_obs) == 0


def test_final_observations_take_memory_for_those_in_the_ring_only():
    """Every step truncated, for many turns of the ring."""
    buffer, reference = make(10, 2)
    stream = Stream(np.random.default_rng(0), 2, ends=1.0, kinds=("truncated",))
    for _ in added(buffer, reference, stream, [3] * 100):
        assert len(buffer._memory._final_obs) <= 20
        assert buffer._memory._final_obs.nbytes <= 4 * 26 * (8 + 8)
    assert_equal_to(everything(buffer), reference.transitions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_size": 0}, "buffer_size = 0: expected a number >= 1"),
        ({"num_envs": 0}, "num_envs = 0: expected a number >= 1"),
        ({"n_steps": 0}, "n_steps = 0: expected a number >= 1"),
        ({"gamma": 1.1}, r"gamma = 1.1: expected a number in \[0, 1\]"),
        ({"storage": "dsik"}, "storage = 'dsik': expected one of .* did you mean 'disk'"),
        ({"storage": "disk"}, "directory = None: storage=disk needs a directory"),
        ({"frame_stack": {"": 3}}, r"frame_stack = {'': 3}: expected observations of shape \[3,"),
        ({"frame_stack": {"a": 2}}, "frame_stack = {'a': 2}: .* under 'a'"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    """The message names the setting and what is expected."""
    settings = {"buffer_size": 10, "observation_space": BOX, "actions": BOX_ACTION, **change}
    with pytest.raises(ConfigError, match=message):
        UniformReplayBuffer(**settings)


def test_what_does_not_fit_is_refused():
    """Experience of other shapes or numbers of environments, or with a gap; no experience."""
    buffer, _ = make(10, 2)
    with pytest.raises(TrainingError, match="the replay buffer is empty"):
        buffer.sample_batch(1)
    steps = Stream(np.random.default_rng(0), 3).steps(2)
    with pytest.raises(ShapeError, match="3 environments, the replay buffer expects 2"):
        buffer.add_rollout(rollout_of(steps))
    steps = Stream(np.random.default_rng(0), 2, DICT, DICT_ACTION).steps(2)
    with pytest.raises(ShapeError, match=r"one step of obs has the shapes .*image"):
        buffer.add_rollout(rollout_of(steps, DICT, DICT_ACTION))
    steps = Stream(np.random.default_rng(0), 2, ends=1.0, kinds=("truncated",)).steps(2)
    for row in steps:
        row[1].final_obs = None
    with pytest.raises(ShapeError, match=r"step 0 of environment 1 was truncated: .* final_obs"):
        buffer.add_rollout(rollout_of(steps))
    step = Stream(np.random.default_rng(0), 1).step(0)
    with pytest.raises(ConfigError, match="num_envs = 2: add_transition is for 1 environment"):
        buffer.add_transition(transition_of(step, step.obs))
    lone, _ = make(10, 1)
    with pytest.raises(ShapeError, match=r"obs has the shapes .* next_obs"):
        lone.add_transition(transition_of(step, {"": np.zeros(5, np.float32)}))
    stream = Stream(np.random.default_rng(0), 1, ends=1.0, kinds=("ignored",))
    lone.add_rollout(rollout_of(stream.steps(9)))  # all rows are ignored
    assert len(buffer) == len(lone) == 0
    with pytest.raises(TrainingError, match="empty"):
        lone.sample_batch(1)
