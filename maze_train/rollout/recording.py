"""Records an episode while it is played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.trajectories import Trajectory
from maze_train.spaces.describe import flat_spaces

if TYPE_CHECKING:
    from maze_train.envs.slots import EnvSlots
    from maze_train.types import Array, ArrayTree

__all__ = ["EpisodeRecording"]


class EpisodeRecording:
    """Observations and actions of an episode, copied step by step.

    Observations and actions have the types of their spaces, rewards are float64.

    Args:
        slots: The environments; the episode has just begun in one of them.
        slot: Which one.
    """

    def __init__(self, slots: EnvSlots, slot: int) -> None:
        self._seed = slots.seeds[slot]
        self._obs: dict[str, list[Array]] = {key: [] for key in slots.obs}
        spaces = flat_spaces(slots.single_action_space)
        self._dtypes = {key: np.dtype(leaf.dtype) for key, leaf in spaces.items()}
        self._actions: dict[str, list[Array]] = {key: [] for key in spaces}
        self._rewards: list[float] = []
        self.observe(slots, slot)

    def observe(self, slots: EnvSlots, slot: int) -> None:
        """Take in what is observed now."""
        for key, column in slots.obs.items():
            self._obs[key].append(column[slot].copy())

    def act(self, actions: ArrayTree, slot: int) -> None:
        """Take in the action of the next step.

        Args:
            actions: As the environments get them, `[rows, ...]` by leaf.
            slot: Which row.
        """
        columns = actions if isinstance(actions, dict) else {"": actions}
        for key, taken in self._actions.items():
            taken.append(np.array(columns[key][slot], self._dtypes[key]))

    def reward(self, reward: float) -> None:
        """Take in the reward of the step."""
        self._rewards.append(reward)

    def trajectory(
        self, last_obs: dict[str, Array], *, terminated: bool, truncated: bool
    ) -> Trajectory:
        """The whole episode.

        Args:
            last_obs: Observation after the last step, by leaf.
            terminated: Whether the last step led to a terminal state.
            truncated: Whether the episode was cut off after it.
        """
        obs = {key: np.stack([*found, last_obs[key]]) for key, found in self._obs.items()}
        actions = {key: np.stack(taken) for key, taken in self._actions.items()}
        return Trajectory(
            obs=_tree(obs),
            actions=_tree(actions),
            rewards=np.array(self._rewards, np.float64),
            terminated=terminated,
            truncated=truncated,
            seed=self._seed,
        )


def _tree(columns: dict[str, Any]) -> ArrayTree:
    """The lone leaf, or all by key."""
    tree: ArrayTree = columns.get("", columns)
    return tree
