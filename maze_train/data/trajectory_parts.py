"""Episodes laid end to end, one array per leaf: what a data set of trajectories consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.replay_columns import leaves_by_key
from maze_train.data.trajectories import Trajectory
from maze_train.data.trajectory_episodes import Column, ends_of
from maze_train.errors import DatasetError, SpaceError
from maze_train.spaces.actions import checked_actions
from maze_train.spaces.describe import FlatView
from maze_train.trees import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gymnasium import spaces

    from maze_train.data.trajectory_episodes import Episode
    from maze_train.types import Array, ArrayTree

__all__ = [
    "PART_NBYTES",
    "DatasetMetadata",
    "TrajectoryPart",
    "check_content",
    "check_part",
    "columns_of",
    "joined_parts",
    "make_part",
]

PART_NBYTES = 64 * 2**20
"""Size from which episodes become a part."""

CHECKED_NBYTES = 1 << 20
"""Bytes of an array that are checked at once."""


@dataclass(frozen=True)
class DatasetMetadata:
    """Properties that all episodes of a data set share.

    Raises:
        SpaceError: If a space has a leaf that can not be described.
    """

    observation_space: spaces.Space[Any]
    """Observation space of one environment, nested."""

    action_space: spaces.Space[Any]
    """Action space of one environment, nested."""

    env: dict[str, Any] = field(default_factory=dict)
    """The environment (`id`, `kwargs` and the like), as plain values."""

    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy that acted, as plain values."""

    def __post_init__(self) -> None:
        for space in (self.observation_space, self.action_space):
            FlatView(space)


def columns_of(metadata: DatasetMetadata) -> tuple[Column, ...]:
    """The arrays of a part: leaves of observations and actions in the order of the spaces, rewards.

    Raises:
        SpaceError: If a space can not be flattened.
    """
    columns = []
    groups = (("obs", metadata.observation_space), ("actions", metadata.action_space))
    for group, space in groups:
        view = FlatView(space)
        for number, (key, leaf) in enumerate(view.leaves.items()):
            file = f"{group}.npy" if view.is_single else f"{group}.{number}.npy"
            dtype, shape = np.dtype(leaf.dtype), tuple(leaf.shape or ())
            columns.append(Column(group, key, file, dtype, shape, leaf))
    columns.append(Column("rewards", "", "rewards.npy", np.dtype(np.float64), (), None))
    return tuple(columns)


@dataclass(frozen=True, eq=False)
class TrajectoryPart:
    """A number of whole episodes, laid end to end.

    Step t of episode k is row `starts[k] + t` of actions and rewards, and its observation is row
    `starts[k] + k + t` of `obs`.
    """

    obs: ArrayTree
    """Observations, T + 1 of each episode, `[steps + episodes, ...]`; one flat mapping for a Dict
    or Tuple space."""

    actions: ArrayTree
    """Actions of the environment, `[steps, ...]`."""

    rewards: Array
    """`[steps]` float64."""

    lengths: Array
    """Steps of each episode, `[episodes]` int64, each >= 1."""

    terminated: Array
    """`[episodes]` bool."""

    truncated: Array
    """`[episodes]` bool."""

    seeds: list[int | None]
    """Seed of each episode; None: unknown."""

    name: str
    """Origin of the part, for messages."""

    env: dict[str, Any] = field(default_factory=dict)
    """The environment of these episodes, as plain values; empty: unknown, as in manifests
    of earlier versions."""

    policy: dict[str, Any] = field(default_factory=dict)
    """Settings of the policy that acted in these episodes, likewise."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Steps of all episodes."""
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Bytes of observations, actions and rewards."""
        trees = (self.obs, self.actions, self.rewards)
        return sum(leaf.nbytes for tree in trees for leaf in tree_leaves(tree))

    @cached_property
    def starts(self) -> Array:
        """First step of each episode, and the number of all steps, `[episodes + 1]` int64."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def returns(self) -> Array:
        """Return of each episode, `[episodes]` float64."""
        rows = zip(self.starts[:-1], self.starts[1:], strict=True)
        return np.array([self.rewards[start:stop].sum() for start, stop in rows], np.float64)

    def episode(self, index: int) -> Trajectory:
        """One episode, whose arrays are views.

        Raises:
            ShapeError: If it holds a number that is not finite.
        """
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        seed = self.seeds[index]
        return Trajectory(
            obs=tree_map(lambda x: x[start + index : stop + index + 1], self.obs),
            actions=tree_map(lambda x: x[start:stop], self.actions),
            rewards=self.rewards[start:stop],
            terminated=bool(self.terminated[index]),
            truncated=bool(self.truncated[index]),
            seed=seed,
        )


def make_part(
    columns: Sequence[Column],
    arrays: Sequence[Array],
    ends: dict[str, list[Any]],
    name: str,
    *,
    env: dict[str, Any],
    policy: dict[str, Any],
) -> TrajectoryPart:
    """A part of arrays that lie as columns do.

    Args:
        columns: The arrays of the data set.
        arrays: One per column.
        ends: Lists `lengths`, `terminated`, `truncated` and `seeds`, an entry per episode.
        name: Where it came from.
        env: The environment.
        policy: Settings of the policy that acted.

    Raises:
        DatasetError: If these do not fit together.
    """
    leaves: dict[str, dict[str, Array]] = {"obs": {}, "actions": {}}
    for column, array in zip(columns[:-1], arrays[:-1], strict=True):
        leaves[column.group][column.key] = array
    part = TrajectoryPart(
        obs=_tree(leaves["obs"]),
        actions=_tree(leaves["actions"]),
        rewards=arrays[-1],
        lengths=np.array(ends["lengths"], np.int64),
        terminated=np.array(ends["terminated"], np.bool_),
        truncated=np.array(ends["truncated"], np.bool_),
        seeds=ends["seeds"],
        name=name,
        env=env,
        policy=policy,
    )
    check_part(part, columns)
    return part


def _tree(leaves: dict[str, Array]) -> ArrayTree:
    return leaves.get("", leaves)


def joined_parts(
    metadata: DatasetMetadata, episodes: Iterable[Episode], name: str
) -> Iterator[TrajectoryPart]:
    """Lay episodes end to end, in memory: a part for every `PART_NBYTES`, and for what is left.

    An episode is let go of when its part is made, so all of them are never in memory twice.

    Raises:
        DatasetError: If there are none.
    """
    columns = columns_of(metadata)
    collected: list[Episode] = []
    nbytes = num_parts = 0
    for episode in episodes:
        collected.append(episode)
        nbytes += episode.nbytes
        if nbytes >= PART_NBYTES:
            part = _joined(columns, collected, metadata, name)
            collected, nbytes, num_parts = [], 0, num_parts + 1
            yield part
    if collected:
        yield _joined(columns, collected, metadata, name)
    elif not num_parts:
        raise DatasetError(f"{name} holds no episodes: expected at least one")


def _joined(
    columns: Sequence[Column], episodes: Sequence[Episode], metadata: DatasetMetadata, name: str
) -> TrajectoryPart:
    arrays = [
        np.concatenate([episode.arrays[i] for episode in episodes]) for i in range(len(columns))
    ]
    ends = ends_of(episodes)
    return make_part(columns, arrays, ends, name, env=metadata.env, policy=metadata.policy)


def check_part(part: TrajectoryPart, columns: Sequence[Column]) -> None:
    """Refuse a part whose arrays are not those of the spaces and lengths; contents are not read.

    Raises:
        DatasetError: If keys, shapes, data types or numbers of episodes are others.
    """
    counts = {len(x) for x in (part.lengths, part.seeds, part.terminated, part.truncated)}
    if counts == {0} or len(counts) != 1 or part.lengths.min() < 1:
        raise DatasetError(
            f"{part.name}: expected one length >= 1, one seed and two flags for each of at least "
            f"one episode"
        )
    found = {
        (group, key): leaf
        for group in ("obs", "actions", "rewards")
        for key, leaf in leaves_by_key(getattr(part, group)).items()
    }
    wanted = [(column.group, column.key) for column in columns]
    if set(found) != set(wanted):
        raise DatasetError(f"{part.name}: has the arrays {list(found)}, expected {wanted}")
    lengths = part.lengths.tolist()
    for column in columns:
        array = found[column.group, column.key]
        shape = (column.num_rows(lengths), *column.shape)
        if array.shape != shape or array.dtype != column.dtype:
            raise DatasetError(
                f"{part.name}: {column.name} is {array.dtype}{list(array.shape)}, expected "
                f"{column.dtype}{list(shape)}"
            )


def check_content(part: TrajectoryPart, columns: Sequence[Column]) -> None:
    """Read a part, and refuse numbers that are not finite, or are none of a space.

    Raises:
        DatasetError: Naming the array and the row.
    """
    for column in columns:
        array = leaves_by_key(getattr(part, column.group))[column.key]
        step = max(1, CHECKED_NBYTES // max(1, column.row_nbytes))
        for row in range(0, len(array), step):
            block = array[row : row + step]
            if column.dtype.kind == "f" and not np.isfinite(block).all():
                row += int(np.argwhere(~np.isfinite(block))[0, 0])
                raise DatasetError(
                    f"{part.name}: {column.name}[{row}] = {array[row]}: expected finite numbers"
                )
            if column.checked_space is not None:
                try:
                    checked_actions(column.name, block, len(block), column.checked_space)
                except SpaceError as error:
                    raise DatasetError(
                        f"{part.name}, counted from row {row}: {error}; the data set does not fit "
                        f"its own space of {column.group}"
                    ) from error
