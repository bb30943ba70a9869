from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.data.rollout import RolloutStorage
from maze_train.types import leaves_by_key, tree_leaves, tree_map

BOX = spaces.Box(-10.0, 10.0, (2,), np.float64)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "level": spaces.Discrete(9)})
T, B = 4, 3


def obs_of(space, row):
    """Observations that know their row and environment."""
    if space is BOX:
        return np.array([[row / 3, env] for env in range(B)])
    image = np.full((B, 2, 2), 50 * row, np.uint8)
    return {"image": image, "level": np.array([row + env for env in range(B)])}


def discrete(t):
    """Actions of a step."""
    return torch.tensor([t, t + 1, t + 2])


def parts(t):
    """Actions of several parts."""
    return {"gear": discrete(t), "force": torch.full((B, 2), 0.5 * t)}


def fill(storage, make_actions=discrete, valid=None):
    """Write T steps; the environment uses the memory of its observations again."""
    memory = obs_of(storage.space, 0)

    def obs(row):
        for key, leaf in leaves_by_key(obs_of(storage.space, row)).items():
            leaves_by_key(memory)[key][...] = leaf
        return memory

    storage.start(obs(0))
    for t in range(storage.num_steps):
        storage.write_actions(t, make_actions(t))
        flags = np.array([env == t for env in range(B)]), np.array([env == 2 for env in range(B)])
        rewards = np.array([t + env / 8 for env in range(B)])
        storage.write_step(t, obs(t + 1), rewards, *flags, (valid or {}).get(t))
    return storage.rollout()


@pytest.mark.parametrize(("space", "actions"), [(BOX, discrete), (DICT, parts)])
def test_every_row_holds_its_step(space, actions):
    """Row t is what was written at step t, in the types that networks compute with."""
    rollout = fill(RolloutStorage(space, T, B), actions)
    dtypes = {"image": torch.uint8, "level": torch.int64, "": torch.float32}
    for key, leaf in leaves_by_key(rollout.obs).items():
        expected = np.stack([leaves_by_key(obs_of(space, row))[key] for row in range(T + 1)])
        assert torch.equal(leaf, torch.from_numpy(expected).to(dtypes[key]))
    for key, leaf in leaves_by_key(rollout.actions).items():
        assert torch.equal(leaf, torch.stack([leaves_by_key(actions(t))[key] for t in range(T)]))
    assert rollout.rewards.tolist() == [[t, t + 0.125, t + 0.25] for t in range(T)]
    assert rollout.terminated.tolist() == [[env == t for env in range(B)] for t in range(T)]
    assert rollout.truncated.tolist() == [[env == 2 for env in range(B)] for _ in range(T)]
    assert rollout.rewards.dtype is torch.float32
    assert rollout.terminated.dtype is rollout.truncated.dtype is torch.bool
    assert (rollout.num_steps, rollout.num_samples) == (T, T * B)


def test_memory_is_allocated_once():
    """The second rollout lies where the first one lay; no copy is made for its own device."""
    storage = RolloutStorage(DICT, T, B)
    first = fill(storage)
    names = ("obs", "actions", "rewards", "terminated", "truncated")
    places = {n: [x.data_ptr() for x in tree_leaves(getattr(first, n))] for n in names}
    second = fill(storage, lambda t: discrete(t) + 10)
    for name in names:
        assert [x.data_ptr() for x in tree_leaves(getattr(second, name))] == places[name]
    assert int(second.actions.min()) == 10
    assert second.to(torch.device("cpu")) is second
    moved = second.to(torch.device("meta"))
    for name in (*names, "final_positions"):
        assert all(leaf.device.type == "meta" for leaf in tree_leaves(getattr(moved, name)))


@pytest.mark.parametrize("space", [BOX, DICT])
def test_final_observations_know_their_place(space):
    """Copies, in the order of writing, at position t * B + b; a new rollout has none of them."""
    storage = RolloutStorage(space, T, B)
    empty = fill(storage)
    memory = tree_map(lambda x: np.array(x[1]), obs_of(space, 1))
    storage.write_final_obs(0, 2, memory)
    for key, leaf in leaves_by_key(memory).items():
        leaf[...] = leaves_by_key(obs_of(space, 3))[key][0]
    storage.write_final_obs(3, 1, memory)
    for leaf in tree_leaves(memory):
        leaf[...] = 5
    rollout = storage.rollout()
    assert rollout.final_positions.tolist() == [0 * B + 2, 3 * B + 1]
    assert rollout.final_positions.dtype is torch.int64
    for key, leaf in leaves_by_key(rollout.final_obs).items():
        stored = leaves_by_key(rollout.obs)[key]
        assert torch.equal(leaf, torch.stack([stored[1, 1], stored[3, 0]]))
    for rollout in (empty, fill(storage)):
        assert rollout.final_positions.shape == (0,)
        for final, obs in zip(*map(tree_leaves, (rollout.final_obs, rollout.obs)), strict=True):
            assert (final.shape, final.dtype) == ((0, *obs.shape[2:]), obs.dtype)


def test_a_new_rollout_forgets_invalid_rows():
    """It has those that it was given itself; without any there is no column."""
    storage = RolloutStorage(BOX, T, B)
    first = np.array([False, True, True])
    for valid in ({1: first}, {3: ~first}):
        expected = [valid[t].tolist() if t in valid else [True] * B for t in range(T)]
        assert fill(storage, valid=valid).valid.tolist() == expected
    assert fill(storage).valid is None
