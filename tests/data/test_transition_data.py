"""Transitions of recorded episodes, for all kinds of storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from trajectory_cases import NESTED, random_trajectories

from maze_train.algorithms.bc.data import TransitionData, split_episodes
from maze_train.core.errors import SpaceError
from maze_train.data.trajectories import DatasetMetadata, Trajectory
from maze_train.data.trajectory_dataset import TrajectoryDataset
from maze_train.distributions.mapping import distribution_for
from maze_train.spaces.agents import AgentSpaces

LINE = spaces.Box(-np.inf, np.inf, (1,), np.float32)
GRIP = spaces.Discrete(5, start=3)
SEEN = spaces.Dict({"x": spaces.Tuple((LINE, spaces.Discrete(3)))})
GRIPS = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(4)))


def numbered(lengths, metadata, per_part=100):
    """Return episodes whose observations are 1000 k + t and whose actions count t mod 5."""
    parts = []
    for first in range(0, len(lengths), per_part):
        trajectories = [
            Trajectory(
                obs=(1000.0 * k + np.arange(n + 1, dtype=np.float32))[:, None],
                actions=3 + np.arange(n) % 5,
                rewards=np.ones(n),
                terminated=False,
                truncated=True,
            )
            for k, n in list(enumerate(lengths))[first : first + per_part]
        ]
        parts += TrajectoryDataset.from_trajectories(trajectories, metadata).parts
    return TrajectoryDataset(parts, metadata)


def all_of(data, size):
    """Return observations and actions of all transitions, read in blocks of `size`."""
    blocks = list(data.blocks(size * (4 + 8)))
    assert max(len(obs) for obs, _ in blocks) == min(size, data.num_samples)
    return torch.cat([obs for obs, _ in blocks]), torch.cat([actions for _, actions in blocks])


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("per_part", [1, 2, 100])
def test_transitions_of_selected_episodes_are_in_order(in_memory, per_part):
    """Transitions are in order, without final observations, and with the agent's actions."""
    dataset = numbered([3, 1, 4, 2], DatasetMetadata(LINE, GRIP), per_part)
    from_env = distribution_for(GRIP, {}).from_env
    data = TransitionData(dataset, np.array([0, 2, 3]), from_env)
    if in_memory:
        data.load()
    assert data.num_samples == 9
    wanted = [0, 1, 2, 2000, 2001, 2002, 2003, 3000, 3001]
    for size in (1, 4, 100):
        obs, actions = all_of(data, size)
        assert obs.flatten().tolist() == wanted
        assert actions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    obs, actions = data.batch(torch.tensor([8, 0, 5, 5]))
    assert obs.flatten().tolist() == [3001, 0, 2002, 2002]
    assert actions.tolist() == [1, 0, 2, 2]
    assert obs.dtype == torch.float32


@pytest.mark.parametrize("in_memory", [True, False])
def test_transitions_of_dict_spaces_keep_dtypes(in_memory):
    """Images are stored as bytes and float64 as float32; action components stay separate."""
    trajectories = random_trajectories(NESTED, GRIPS, (4, 2))
    dataset = TrajectoryDataset.from_trajectories(trajectories, DatasetMetadata(NESTED, GRIPS))
    from_env = distribution_for(GRIPS, {}).from_env
    data = TransitionData(dataset, np.array([0, 1]), from_env)
    if in_memory:
        data.load()
    obs, actions = data.batch(torch.tensor([5, 1]))
    dtypes = {"goal": torch.int64, "robot/0": torch.float32, "robot/1/camera": torch.uint8}
    assert {key: leaf.dtype for key, leaf in obs.items()} == dtypes
    steps = ((trajectories[1], 1), (trajectories[0], 1))
    speeds = np.stack([x.obs["robot/0"][t] for x, t in steps])
    cameras = np.stack([x.obs["robot/1/camera"][t] for x, t in steps])
    assert obs["goal"].tolist() == [x.obs["goal"][t] for x, t in steps]
    np.testing.assert_allclose(obs["robot/0"].numpy(), speeds, rtol=1e-6)
    np.testing.assert_array_equal(obs["robot/1/camera"].numpy(), cameras)
    assert actions["0"].tolist() == [x.actions["0"][t] for x, t in steps]
    assert data.num_bytes == 6 * (8 + 4 * 4 + 8 * 9 * 3 + 8 + 8)


@pytest.mark.parametrize("in_memory", [True, False])
def test_transitions_of_agents_exclude_waiting_steps(in_memory):
    """Transitions are ordered by agent within each part, without steps in which the agent waits."""
    several = AgentSpaces({"a": LINE, "b": LINE, "c": SEEN}, {"a": GRIP, "b": GRIP, "c": GRIPS})
    joint = several.observation_space, several.action_space
    acts = [[[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 0]], [[1, 1, 0], [0, 1, 1], [0, 0, 0]]]
    dataset = joint_episodes(acts, DatasetMetadata(*joint))

    def data(agents, episodes=(0, 1)):
        from_env = distribution_for(several.actions[agents[0]], {}).from_env
        found = TransitionData(dataset, np.array(episodes), from_env, agents=agents)
        if in_memory:
            found.load()
        return found

    both = data(["b", "a"])
    obs, actions = both.batch(torch.arange(both.num_samples))
    # Observations are 100 times the episode, plus 10 times the agent, plus the step.
    assert obs.flatten().tolist() == [11, 12, 0, 2, 110, 111, 100]
    assert actions.tolist() == [(x + x // 10) % 5 for x in (11, 12, 0, 2, 110, 111, 100)]
    places = [both.place(k) for k in range(both.num_samples)]
    assert places == [
        *((0, 1, "b"), (0, 2, "b"), (0, 0, "a"), (0, 2, "a")),
        *((1, 0, "b"), (1, 1, "b"), (1, 0, "a")),
    ]
    obs, actions = data(["c"]).batch(torch.tensor([2, 0]))
    assert obs["x/0"].flatten().tolist() == [121, 20]
    assert obs["x/1"].tolist() == [121 % 3, 20 % 3]
    assert actions["0"].tolist() == [133 % 3, 22 % 3]
    assert actions["1"].tolist() == [133 % 4, 22 % 4]
    assert data(["a"], [1]).num_samples == 1
    assert data(["c"], [1]).place(0) == (1, 1, "c")


def joint_episodes(acts, metadata):
    """Return episodes of several agents, one part each, with the given flags of each step."""
    parts = []
    for k, flags in enumerate(acts):
        flags = np.array(flags, np.int8)
        number = {a: 100.0 * k + 10 * i + np.arange(len(flags)) for i, a in enumerate("abc")}
        line = {a: x.astype(np.float32)[:, None] for a, x in number.items()}
        done = {a: (x + x // 10)[:-1].astype(np.int64) for a, x in number.items()}
        obs = {"agents/a": line["a"], "agents/b": line["b"], "agents/c/x/0": line["c"]}
        obs["agents/c/x/1"] = number["c"].astype(np.int64) % 3
        obs["acts"] = flags
        obs["rewards"] = np.zeros(flags.shape, np.float32)
        obs["terminated"] = obs["truncated"] = np.zeros_like(flags)
        actions = {"a": 3 + done["a"] % 5, "b": 3 + done["b"] % 5}
        actions |= {"c/0": done["c"] % 3, "c/1": done["c"] % 4}
        rewards = np.zeros(len(flags) - 1)
        episode = Trajectory(obs, actions, rewards, terminated=True, truncated=False)
        parts += TrajectoryDataset.from_trajectories([episode], metadata).parts
    return TrajectoryDataset(parts, metadata)


def test_transitions_with_invalid_actions_raise():
    """Invalid actions raise SpaceError, also if the file was not verified."""
    actions = spaces.Discrete(9)
    dataset = numbered([3], DatasetMetadata(LINE, actions))
    part = dataset.parts[0]
    part.actions[1] = 100
    data = TransitionData(dataset, np.array([0]), distribution_for(actions, {}).from_env)
    with pytest.raises(SpaceError, match="100"):
        data.batch(torch.arange(3))


# -- the split --------------------------------------------------------------------------------


@given(
    num_episodes=st.integers(1, 300),
    percentage=st.floats(0, 99.9),
    seed=st.integers(0, 2**32),
)
def test_train_validation_split_partitions_episodes(num_episodes, percentage, seed):
    """Splits are ordered and disjoint, and at least one episode is used for training."""
    train, validation = split_episodes(num_episodes, percentage, seed)
    assert sorted([*train, *validation]) == list(range(num_episodes))
    assert (np.diff(train) > 0).all()
    assert (np.diff(validation) > 0).all()
    assert len(train) >= 1
    assert abs(len(validation) - num_episodes * percentage / 100) <= 1
    if percentage > 0 and num_episodes > 1:
        assert len(validation) >= 1


def test_train_validation_split_depends_on_the_seed():
    """Splits depend on the seed only."""
    first, again, other = (split_episodes(50, 20, seed)[1].tolist() for seed in (1, 1, 2))
    assert first == again != other
