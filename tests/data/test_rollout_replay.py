"""Replay of rollouts: storage, sampling, and checkpoints."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from cases import sweep
from rollouts_compared import assert_same_rollouts
from test_rollout_slots import KINDS, B, T, every_kind, random_rollout

from maze_train.algorithms.impala.replay import RolloutReplay
from maze_train.core.state_files import dumps, loads
from maze_train.core.types import tree_leaves
from maze_train.data.rollout import join_rollouts, select_envs

BOX = KINDS["box"]


def marked(number, kind=BOX, actors=1, **settings):
    """Return joined rollouts of actors, whose rewards are their marks: 10, 11, ..."""
    rollout = join_rollouts(
        [random_rollout(kind, 100 * number + i, **settings) for i in range(actors)]
    )
    marks = torch.arange(actors).repeat_interleave(B) + 10 * number
    return replace(rollout, rewards=torch.ones(T, 1) * marks)


def of_rollouts(row):
    """Return one value per rollout; the values of its environments must be equal."""
    numbers = row.reshape(-1, B)
    assert (numbers == numbers[:, :1]).all()
    return numbers[:, 0].tolist()


def marks_of(batch):
    """Return the mark of each rollout in a batch."""
    assert (batch.rewards == batch.rewards[0]).all()
    return of_rollouts(batch.rewards[0])


def as_saved(replay):
    """Return a state after serialization."""
    return loads(dumps(replay.state_dict()))


@pytest.mark.parametrize(("size", "actors"), [(1, 1), (3, 1), (5, 2), (2, 3), (100, 2)])
@pytest.mark.parametrize("num_replayed", [1, 4])
def test_batches(size, actors, num_replayed):
    """A batch has new rollouts, then sampled stored ones; the oldest are dropped first."""
    replay = RolloutReplay(size, num_replayed, B, seed=3)
    generator, kept = torch.Generator().manual_seed(3), []
    before = torch.get_rng_state()
    for number in range(12):
        rollout = marked(number, actors=actors)
        batch = replay.mix(rollout)
        new = marks_of(rollout)
        expected = list(new)
        if kept:
            picks = torch.randint(len(kept), (num_replayed,), generator=generator)
            expected += [kept[i] for i in picks.tolist()]
        assert marks_of(batch) == expected
        if kept:
            flags = [False] * actors + [True] * num_replayed
            assert of_rollouts(batch.replayed) == flags
        assert batch.num_samples == int(batch.valid.sum()) < batch.rewards.numel()
        assert (batch is rollout) is (not kept)
        kept = [*kept, *new][-size:]
        assert len(replay) == len(kept)
    assert torch.equal(torch.get_rng_state(), before)


@every_kind
@sweep("optional", [False, True])
def test_what_is_kept_is_what_was_new(kind, optional):
    """Stored rollouts keep every column; only the flag `replayed` changes."""
    first = marked(1, kind, 2, optional=optional)
    seen = set()
    for seed in range(9):
        replay = RolloutReplay(9, 1, B, seed)
        replay.mix(first)
        batch = replay.mix(marked(2, kind, optional=optional))
        owner = int(marks_of(batch)[1]) - 10
        found = select_envs(batch, slice(B, 2 * B))
        assert found.replayed.tolist() == [True] * B
        expected = select_envs(first, slice(owner * B, (owner + 1) * B))
        assert_same_rollouts(replace(found, replayed=None), expected)
        seen.add(owner)
    assert seen == {0, 1}


@every_kind
@pytest.mark.parametrize("optional", [False, True])
def test_a_state_goes_on_exactly(kind, optional):
    """A loaded replay returns the same batches, drops the same rollouts and has the same state."""

    def mixed(replay, numbers):
        return [replay.mix(marked(i, kind, 2, optional=optional)) for i in numbers]

    replay = RolloutReplay(5, 3, B, seed=1)
    mixed(replay, range(4))
    state = as_saved(replay)
    other = RolloutReplay(5, 3, B, seed=2)
    mixed(other, range(90, 92))
    other.load_state_dict(state)
    assert len(other) == 5
    for found, expected in zip(mixed(other, range(4, 9)), mixed(replay, range(4, 9)), strict=True):
        assert_same_rollouts(found, expected)
    assert dumps(other.state_dict()) == dumps(replay.state_dict())


def zero_all(columns):
    """Overwrite all tensors in a mapping of columns."""
    for column in columns.values():
        for leaf in [] if column is None else tree_leaves(column):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()


def test_what_is_kept_is_memory_of_its_own():
    """Stored rollouts are copies: writing to a batch or to a state does not change them."""
    replay = RolloutReplay(1, 1, B, seed=1)
    replay.mix(marked(1))
    batch = replay.mix(marked(2))
    kept = dumps(replay.state_dict())
    zero_all({field.name: getattr(batch, field.name) for field in fields(batch)})
    for part in replay.state_dict()["rollouts"].values():
        zero_all(part.read())
    assert dumps(replay.state_dict()) == kept
