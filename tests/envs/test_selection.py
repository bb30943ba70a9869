from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from maze_train import ConfigError, SelectEntriesWrapper, SpaceError


def test_entries_are_left_in_the_given_order():
    """Values, bounds and dtype are those of the entries."""
    plain, env = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    selected = SelectEntriesWrapper(env, [2, 0])
    obs, _ = plain.reset(seed=3)
    assert selected.reset(seed=3)[0].tolist() == obs[[2, 0]].tolist()
    assert selected.step(1)[0].tolist() == plain.step(1)[0][[2, 0]].tolist()
    assert np.array_equal(selected.observation_space.high, plain.observation_space.high[[2, 0]])
    assert selected.observation_space.dtype == np.float32
    assert selected.observation_space.contains(obs[[2, 0]])


@pytest.mark.parametrize("indices", [[], [4], [-1], [0.5]])
def test_wrong_indices(indices):
    """They are named with their range."""
    with pytest.raises(ConfigError, match=r"indices.*from 0 to 3"):
        SelectEntriesWrapper(gymnasium.make("CartPole-v1"), indices)


def test_other_spaces():
    """Only vectors have entries."""
    with pytest.raises(SpaceError, match="vectors"):
        SelectEntriesWrapper(gymnasium.make("FrozenLake-v1"), [0])
