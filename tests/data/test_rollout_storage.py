from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train.data.rollout import RolloutStorage
from maze_train.trees import tree_leaves, tree_map

BOX = spaces.Box(-10.0, 10.0, (2,), np.float64)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "level": spaces.Discrete(9)})
T, B = 4, 3


def box_obs(row):
    """Observations that know their row and environment."""
    return np.array([[row, env] for env in range(B)], np.float64)


def dict_obs(row):
    """The same as a flat mapping."""
    return {
        "image": np.full((B, 2, 2), 50 * row, np.uint8),
        "level": np.array([row + env for env in range(B)]),
    }


def fill(storage, make_obs, make_actions, reuse=False):
    """Write T steps; observations come from one buffer that is overwritten, if told so."""
    buffer = make_obs(0)

    def obs(row):
        if not reuse:
            return make_obs(row)
        new = make_obs(row)
        if isinstance(buffer, dict):
            for key in buffer:
                buffer[key][:] = new[key]
        else:
            buffer[:] = new
        return buffer

    storage.start(obs(0))
    for t in range(storage.num_steps):
        storage.write_actions(t, make_actions(t))
        flags = np.array([env == t for env in range(B)]), np.array([env == 2 for env in range(B)])
        storage.write_step(t, obs(t + 1), np.array([t + env / 8 for env in range(B)]), *flags)
    return storage.rollout()


def discrete(t):
    """Actions of a step."""
    return torch.tensor([t, t + 1, t + 2])


@pytest.mark.parametrize("reuse", [False, True])
def test_every_row_holds_its_step(reuse):
    """Row t is what was written at step t, also when the environment reuses its buffers."""
    rollout = fill(RolloutStorage(BOX, T, B), box_obs, discrete, reuse)
    assert rollout.obs.shape == (T + 1, B, 2)
    for row in range(T + 1):
        assert rollout.obs[row].tolist() == box_obs(row).tolist()
    assert rollout.actions.tolist() == [[t, t + 1, t + 2] for t in range(T)]
    assert rollout.rewards.tolist() == [[t, t + 0.125, t + 0.25] for t in range(T)]
    assert rollout.terminated.tolist() == [[env == t for env in range(B)] for t in range(T)]
    assert rollout.truncated.tolist() == [[env == 2 for env in range(B)] for _ in range(T)]
    assert (rollout.num_steps, rollout.num_samples) == (T, T * B)


def test_float64_environments_are_stored_as_float32():
    """Observations and rewards are kept in the type that networks compute with."""
    rollout = fill(RolloutStorage(BOX, T, B), lambda r: box_obs(r) / 3, discrete)
    assert rollout.obs.dtype is rollout.rewards.dtype is torch.float32
    assert rollout.obs[1, 1].tolist() == [float(np.float32(1 / 3))] * 2
    assert rollout.terminated.dtype is rollout.truncated.dtype is torch.bool


@pytest.mark.parametrize("reuse", [False, True])
def test_dict_observations_and_actions(reuse):
    """Each key has a tensor of its own, in the type of its space."""

    def actions(t):
        return {"gear": torch.tensor([t, 0, 1]), "force": torch.full((B, 2), 0.5 * t)}

    rollout = fill(RolloutStorage(DICT, T, B), dict_obs, actions, reuse)
    assert rollout.obs["image"].dtype is torch.uint8
    assert rollout.obs["image"].shape == (T + 1, B, 2, 2)
    assert rollout.obs["image"][:, 0, 0, 0].tolist() == [0, 50, 100, 150, 200]
    assert rollout.obs["level"].tolist() == [[r, r + 1, r + 2] for r in range(T + 1)]
    assert rollout.actions["gear"].dtype is torch.int64
    assert rollout.actions["gear"].tolist() == [[t, 0, 1] for t in range(T)]
    assert rollout.actions["force"].shape == (T, B, 2)
    assert rollout.actions["force"][3].tolist() == [[1.5, 1.5]] * B


def test_memory_is_allocated_once():
    """The second rollout lies where the first one lay."""
    storage = RolloutStorage(DICT, T, B)
    first = fill(storage, dict_obs, discrete)
    names = ("obs", "actions", "rewards", "terminated", "truncated")
    places = {n: [x.data_ptr() for x in tree_leaves(getattr(first, n))] for n in names}
    second = fill(storage, dict_obs, lambda t: discrete(t) + 10)
    for name in names:
        assert [x.data_ptr() for x in tree_leaves(getattr(second, name))] == places[name]
    assert int(second.actions.min()) == 10


def test_final_observations_know_their_place():
    """Final observations are copies, in the order of writing, at position t * B + b."""
    storage = RolloutStorage(BOX, T, B)
    storage.start(box_obs(0))
    last = np.array([7.0, 1 / 3])
    for t in range(T):
        storage.write_actions(t, discrete(t))
        zeros = np.zeros(B, bool)
        storage.write_step(t, box_obs(t + 1), np.zeros(B), zeros, zeros)
        if t in (0, 3):
            last[0] = t
            storage.write_final_obs(t, 2, last)
    last[:] = 99.0
    rollout = storage.rollout()
    assert rollout.final_positions.tolist() == [0 * B + 2, 3 * B + 2]
    assert rollout.final_positions.dtype is torch.int64
    assert rollout.final_obs.dtype is torch.float32
    assert rollout.final_obs.tolist() == [[0, np.float32(1 / 3)], [3, np.float32(1 / 3)]]


def test_final_observations_of_a_dict():
    """Each key has its final observations; scalars of Discrete spaces too."""
    storage = RolloutStorage(DICT, 1, B)
    storage.start(dict_obs(0))
    storage.write_actions(0, discrete(0))
    storage.write_step(0, dict_obs(1), np.zeros(B), np.zeros(B, bool), np.ones(B, bool))
    for env in (0, 1):
        final = {"image": np.full((2, 2), 9 + env, np.uint8), "level": np.int64(env)}
        storage.write_final_obs(0, env, final)
    final_obs = storage.rollout().final_obs
    assert final_obs["image"].shape == (2, 2, 2)
    assert final_obs["image"].dtype is torch.uint8
    assert final_obs["level"].tolist() == [0, 1]


@pytest.mark.parametrize(("space", "make_obs"), [(BOX, box_obs), (DICT, dict_obs)])
def test_a_new_rollout_forgets_final_observations(space, make_obs):
    """Final observations of one rollout do not come up in the next; none are an empty tensor."""
    storage = RolloutStorage(space, T, B)
    fill(storage, make_obs, discrete)
    storage.write_final_obs(0, 0, tree_map(lambda x: x[0], make_obs(0)))
    assert len(storage.rollout().final_positions) == 1
    rollout = fill(storage, make_obs, discrete)
    assert rollout.final_positions.shape == (0,)
    for final, obs in zip(tree_leaves(rollout.final_obs), tree_leaves(rollout.obs), strict=True):
        assert final.shape == (0, *obs.shape[2:])
        assert final.dtype is obs.dtype


def test_a_new_rollout_forgets_ignored_rows():
    """Only those that it was told itself are ignored; without any there is no column."""
    storage = RolloutStorage(BOX, T, B)
    first = np.array([True, False, False])
    for ignored in ({1: first}, {3: ~first}, {}):
        storage.start(box_obs(0))
        for t in range(T):
            storage.write_actions(t, discrete(t))
            flags = np.zeros((2, B), bool)
            storage.write_step(t, box_obs(t + 1), np.zeros(B), *flags, ignored.get(t))
        rollout = storage.rollout()
        if not ignored:
            assert rollout.ignored is None
            continue
        nothing = [False] * B
        expected = [ignored[t].tolist() if t in ignored else nothing for t in range(T)]
        assert rollout.ignored.tolist() == expected


def test_a_rollout_on_its_device_is_itself():
    """No copy is made where none is needed; another device gets all columns."""
    rollout = fill(RolloutStorage(DICT, T, B), dict_obs, discrete)
    assert rollout.to(torch.device("cpu")) is rollout
    moved = rollout.to(torch.device("meta"))
    for name in ("obs", "actions", "rewards", "terminated", "truncated", "final_positions"):
        assert all(leaf.device.type == "meta" for leaf in tree_leaves(getattr(moved, name)))
