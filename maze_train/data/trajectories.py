"""Recorded episodes, and how they are laid side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.data.rollout import Rollout
from maze_train.errors import ShapeError
from maze_train.spaces.actions import checked_actions
from maze_train.spaces.describe import flat_spaces
from maze_train.spaces.tensors import zeros_for
from maze_train.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gymnasium import spaces

    from maze_train.types import Array, ArrayTree, Tensor, TensorTree

__all__ = ["Trajectory", "trajectories_as_rollout"]


@dataclass(frozen=True)
class Trajectory:
    """One episode of T >= 1 steps, or a piece of one, as the environment gave it.

    Raises:
        ShapeError: If lengths do not agree, or a number is not finite.
    """

    obs: ArrayTree
    """Observations before each action and after the last one, `[T + 1, ...]`; one flat mapping for
    a Dict or Tuple space."""

    actions: ArrayTree
    """Actions of the environment, `[T, ...]`."""

    rewards: Array
    """Rewards after each action, `[T]`."""

    terminated: bool
    """Whether the last step led to a terminal state."""

    truncated: bool
    """Whether the episode was cut off (time limit) after the last step."""

    seed: int | None = None
    """Seed that the environment was reset with; None: unknown."""

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1 or not len(self.rewards):
            shape = list(self.rewards.shape)
            raise ShapeError(f"rewards have the shape {shape}, expected [T] with T >= 1")
        for name, tree, length in (
            ("rewards", self.rewards, self.num_steps),
            ("obs", self.obs, self.num_steps + 1),
            ("actions", self.actions, self.num_steps),
        ):
            for key, leaf in _named(name, tree):
                if leaf.shape[:1] != (length,):
                    raise ShapeError(
                        f"{key} has the shape {list(leaf.shape)}, expected [{length}, ...] for "
                        f"{self.num_steps} rewards"
                    )
                if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
                    row = int(np.argwhere(~np.isfinite(leaf))[0, 0])
                    raise ShapeError(f"{key}[{row}] = {leaf[row]}: expected finite numbers")

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of observations, actions and rewards."""
        trees = (self.obs, self.actions, self.rewards)
        return sum(leaf.nbytes for tree in trees for leaf in tree_leaves(tree))

    @property
    def episode_return(self) -> float:
        """Sum of the rewards, not discounted, in float64."""
        return float(self.rewards.sum(dtype=np.float64))


def trajectories_as_rollout(
    trajectories: Iterable[Trajectory],
    num_envs: int,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    from_env: Callable[[TensorTree], TensorTree],
) -> Rollout | None:
    """All trajectories as one rollout of B environments.

    They are laid end to end and cut into B columns of one length; what is left of the last ones is
    ignored. What is not terminated counts as truncated: its last observation is bootstrapped from.

    Args:
        trajectories: Episodes, in the order in which they are laid down.
        num_envs: B.
        observation_space: Flat observation space of one environment.
        action_space: Its action space.
        from_env: Turns actions of the environment into the agent's own: `Distribution.from_env`.

    Returns:
        The rollout; None if there are no trajectories.

    Raises:
        ShapeError: If observations or actions do not have the shape of their space.
        SpaceError: If an action is none of the space.
    """
    episodes = list(trajectories)
    if not episodes:
        return None
    shape = (-(-sum(episode.num_steps for episode in episodes) // num_envs), num_envs)
    obs = zeros_for(observation_space, (shape[0] + 1, num_envs))
    actions: TensorTree | None = None
    rewards = torch.zeros(shape)
    terminated, truncated = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
    ignored = torch.ones(shape, dtype=torch.bool)
    cut: dict[int, TensorTree] = {}
    stop = 0
    for number, episode in enumerate(episodes):
        name, start, stop = f"trajectory {number}", stop, stop + episode.num_steps
        own_obs = tree_map(_tensor, episode.obs)
        own_actions = from_env(_checked_actions(f"{name}: actions", episode, action_space))
        if actions is None:
            actions = tree_map(lambda x: x.new_zeros((*shape, *x.shape[1:])), own_actions)
        for env, rows, steps in _pieces(start, stop, shape[0]):
            # The first observation of an episode takes the place of the last one of that above.
            place = (slice(rows.start, rows.stop + 1), env)
            part = _rows(own_obs, slice(steps.start, steps.stop + 1))
            _write(obs, place, part, f"{name}: obs")
            _write(actions, (rows, env), _rows(own_actions, steps), f"{name}: actions")
            rewards[rows, env] = _tensor(episode.rewards[steps]).float()
            ignored[rows, env] = False
        env, row = divmod(stop - 1, shape[0])
        terminated[row, env], truncated[row, env] = episode.terminated, not episode.terminated
        if not episode.terminated:
            cut[row * num_envs + env] = tree_map(lambda x: x[-1].clone(), own_obs)
    final_obs = zeros_for(observation_space, (len(cut),))
    for k, last_obs in enumerate(cut.values()):
        _write(final_obs, (k,), last_obs, "obs")
    assert actions is not None
    return Rollout(
        obs=obs,
        actions=actions,
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        final_obs=final_obs,
        final_positions=torch.tensor(list(cut), dtype=torch.int64),
        ignored=ignored if ignored.any() else None,
    )


def _rows(tree: TensorTree, rows: slice) -> TensorTree:
    return tree_map(lambda x: x[rows], tree)


def _pieces(start: int, stop: int, length: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield pieces of steps laid end to end into columns: column, rows, steps of the episode."""
    at = start
    while at < stop:
        env, row = divmod(at, length)
        count = min(length - row, stop - at)
        yield env, slice(row, row + count), slice(at - start, at - start + count)
        at += count


def _checked_actions(name: str, episode: Trajectory, space: spaces.Space[Any]) -> TensorTree:
    """The actions of an episode, which have to be ones of the space."""
    leaves = flat_spaces(space)
    found = episode.actions if isinstance(episode.actions, dict) else {"": episode.actions}
    if found.keys() != leaves.keys():
        raise ShapeError(f"{name} have the parts {list(found)}, expected {list(leaves)}")
    checked = {
        key: _tensor(
            checked_actions(f"{name}[{key!r}]" if key else name, part, episode.num_steps, leaf)
        )
        for (key, leaf), part in ((item, found[item[0]]) for item in leaves.items())
    }
    return checked if isinstance(episode.actions, dict) else checked[""]


def _write(tree: TensorTree, place: tuple[Any, ...], values: TensorTree, name: str) -> None:
    """Write the leaves of `values` into places of those of `tree`."""
    targets = {key: leaf[place] for key, leaf in _named(name, tree)}
    found = dict(_named(name, values))
    for key in {**targets, **found}:
        shapes = [list(x[key].shape) if key in x else "nothing" for x in (found, targets)]
        if shapes[0] != shapes[1]:
            raise ShapeError(f"{key} has the shape {shapes[0]}, expected {shapes[1]}")
        targets[key].copy_(found[key])


def _named(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their names."""
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, leaf in tree.items():
        yield f"{name}[{key!r}]", leaf


def _tensor(array: Array) -> Tensor:
    # A copy: arrays of data sets may be read-only, which PyTorch does not know.
    return torch.from_numpy(np.array(array, order="C"))
