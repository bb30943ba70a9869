from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_cases import FLOATS, random_trajectory

from maze_train.algorithms.off_policy.demonstrations import trajectories_as_rollout
from maze_train.core.errors import ShapeError, SpaceError
from maze_train.core.types import leaves_by_key, tree_map
from maze_train.data.trajectories import Trajectory
from maze_train.distributions.mapping import distribution_for

DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 3), np.uint8), "level": spaces.Discrete(9)})
ACTIONS = spaces.Discrete(8, start=1)


def minus_one(actions):
    """Return actions counted from 0, as the agent does."""
    return tree_map(lambda x: x.to(torch.int64) - 1, actions)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    num_envs=st.integers(1, 4),
    has_keys=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_trajectories_become_rollouts_with_all_transitions(lengths, num_envs, has_keys, seed):
    """Each transition appears once with the right final observation, for any number of columns."""
    space = DICT if has_keys else FLOATS
    episodes = [random_trajectory(space, ACTIONS, n, seed + k) for k, n in enumerate(lengths)]
    if has_keys:  # Dict keys in another order
        episodes[::2] = [replace(e, obs=dict(reversed(e.obs.items()))) for e in episodes[::2]]
    rollout = trajectories_as_rollout(iter(episodes), num_envs, space, ACTIONS, minus_one)
    num_steps = -(-sum(lengths) // num_envs)
    assert (rollout.num_samples, rollout.num_steps) == (sum(lengths), num_steps)
    finals = {position: k for k, position in enumerate(rollout.final_positions.tolist())}
    places = [divmod(number, num_steps)[::-1] for number in range(sum(lengths))]
    steps = [(trajectory, t) for trajectory in episodes for t in range(trajectory.num_steps)]
    for (row, env), (trajectory, t) in zip(places, steps, strict=True):
        is_last = t == trajectory.num_steps - 1
        assert rollout.actions[row, env] == trajectory.actions[t] - 1
        assert rollout.rewards[row, env] == np.float32(trajectory.rewards[t])
        assert rollout.terminated[row, env] == (is_last and trajectory.terminated)
        assert rollout.truncated[row, env] == (is_last and not trajectory.terminated)
        k = finals.pop(row * num_envs + env, None)
        assert (k is not None) == is_last
        for key, leaf in leaves_by_key(trajectory.obs).items():
            obs = leaves_by_key(rollout.obs)[key]
            after = obs[row + 1, env] if k is None else leaves_by_key(rollout.final_obs)[key][k]
            assert obs[row, env].tolist() == leaf[t].tolist()
            assert after.tolist() == leaf[t + 1].tolist()
    assert not finals
    assert trajectories_as_rollout([], num_envs, space, ACTIONS, minus_one) is None


def test_trajectory_actions_are_converted_by_the_distribution():
    """Actions of several components are converted by the distribution; arrays may be read-only."""
    space = spaces.Dict({"move": spaces.Discrete(3, start=1), "turn": spaces.Box(-2.0, 2.0, (2,))})
    distribution = distribution_for(space)
    actions = {"move": np.array([1, 3]), "turn": np.array([[0.0, 1.0], [-1.0, 0.5]], np.float32)}
    obs = np.zeros((3, 3))
    for array in (obs, *actions.values()):
        array.setflags(write=False)
    recorded = Trajectory(obs, actions, np.ones(2), terminated=True, truncated=False)
    rollout = trajectories_as_rollout([recorded], 1, FLOATS, space, distribution.from_env)
    assert rollout.actions["move"].tolist() == [[0], [2]]
    back = distribution.to_env(rollout.actions)
    assert np.allclose(back["turn"][:, 0].numpy(), actions["turn"], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.ones((3, 1))}, r"rewards have the shape \[3, 1\], expected \[T\]"),
        ({"rewards": np.ones(0)}, r"rewards have the shape \[0\], expected \[T\] with T >= 1"),
        ({"rewards": np.array([0, np.nan, 0])}, r"rewards\[1\] = nan: expected finite"),
        ({"obs": np.zeros((3, 2))}, r"obs has the shape \[3, 2\], expected \[4, ...\] for 3"),
        ({"obs": {"a": np.zeros(4), "b": np.zeros(3)}}, r"obs/b has the shape \[3\]"),
        ({"obs": np.full((4, 2), np.inf)}, r"obs\[0\] = \[inf inf\]: expected finite"),
        ({"actions": np.full(3, np.nan)}, r"actions\[0\] = nan: expected finite"),
        ({"actions": np.zeros(4)}, r"actions has the shape \[4\], expected \[3, ...\] for 3"),
    ],
)
def test_invalid_trajectories_raise(change, message):
    """The error contains the field and what is expected."""
    fields = {"obs": np.zeros((4, 2)), "actions": np.zeros(3), "rewards": np.zeros(3), **change}
    with pytest.raises(ShapeError, match=message):
        Trajectory(**fields, terminated=True, truncated=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"obs": np.zeros((4, 2))}, ShapeError, r"obs has the shape \[4, 2\], expected \[4, 3\]"),
        ({"obs": {"image": np.zeros((4, 2))}}, ShapeError, r"has the arrays \['obs/image'"),
        ({"actions": np.ones((3, 2), int)}, ShapeError, "actions has the shape"),
        ({"actions": np.array([1, 9, 1])}, SpaceError, "actions: 9 for observation 1"),
        ({"actions": np.array([1, 0, 1])}, SpaceError, "actions: 0 for observation 1"),
    ],
)
def test_trajectories_outside_their_space_raise(change, error, message):
    """The error contains the trajectory and the invalid shape or action."""
    good = random_trajectory(FLOATS, ACTIONS)
    with pytest.raises(error, match=f"trajectory 1:? {message}"):
        trajectories_as_rollout([good, replace(good, **change)], 2, FLOATS, ACTIONS, minus_one)
