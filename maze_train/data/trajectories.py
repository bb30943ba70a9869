"""Recorded episodes and dataset parts, with validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from maze_train.core.errors import DatasetError, ShapeError, SpaceError
from maze_train.core.types import Array, ArrayTree, leaves_by_key, tree_map
from maze_train.spaces.columns import Columns, Spec, column_name, leaves_of
from maze_train.spaces.describe import flat_spaces
from maze_train.spaces.masks import checked_actions

GROUPS = ("obs", "actions", "rewards")
REWARD = spaces.Box(-np.inf, np.inf, (), np.float64)

Leaves: TypeAlias = Mapping[str, spaces.Space[Any]]
"""Space of one row of each array, by name; see `leaf_spaces`."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    """Observations, actions and rewards of one or more consecutive episodes."""

    obs: ArrayTree
    actions: ArrayTree
    rewards: Array

    @property
    def arrays(self) -> dict[str, Array]:
        """Observations, actions and rewards by name: `obs`, or `obs/goal` for a leaf."""
        groups = zip(GROUPS, (self.obs, self.actions, self.rewards), strict=True)
        return {
            column_name(group, key): leaf
            for group, tree in groups
            for key, leaf in leaves_by_key(tree).items()
        }

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.rewards)

    @property
    def nbytes(self) -> int:
        """Size of observations, actions and rewards in bytes."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class Trajectory(_Recorded):
    """Recorded episode, or part of an episode, of T >= 1 steps.

    Attributes:
        obs: Observations before each action and after the last action, `[T + 1, ...]`; a flat
            mapping for a Dict or Tuple space.
        actions: Actions of the environment, `[T, ...]`.
        rewards: Rewards after each action, `[T]`.
        terminated: Whether the last step led to a terminal state.
        truncated: Whether the episode was truncated (time limit) after the last step.
        seed: Seed of the environment reset; None: unknown.

    Raises:
        ShapeError: If lengths are inconsistent, or a value is not finite.
    """

    terminated: bool
    truncated: bool
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1 or not len(self.rewards):
            shape = list(self.rewards.shape)
            raise ShapeError(f"rewards have the shape {shape}, expected [T] with T >= 1")
        for name, array in self.arrays.items():
            length = self.num_steps + name.startswith("obs")
            if array.shape[:1] != (length,):
                raise ShapeError(
                    f"{name} has the shape {list(array.shape)}, expected [{length}, ...] for "
                    f"{self.num_steps} rewards"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.argwhere(~np.isfinite(array))[0, 0])
                raise ShapeError(f"{name}[{row}] = {array[row]}: expected finite values")

    @property
    def episode_return(self) -> float:
        """Undiscounted return in float64."""
        return float(self.rewards.sum(dtype=np.float64))


def groups_of(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return observations, actions and rewards as trees, given arrays keyed by name."""
    return {
        group: arrays[group] if group in arrays else leaves_of(arrays, group) for group in GROUPS
    }


def leaf_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> dict[str, spaces.Space[Any]]:
    """Return the space of one row of each array by name: `obs`, or `obs/goal` for a leaf.

    Raises:
        SpaceError: If a space cannot be flattened.
    """
    found = {
        column_name(group, key): leaf
        for group, space in (("obs", observation_space), ("actions", action_space))
        for key, leaf in flat_spaces(space).items()
    }
    return {**found, "rewards": REWARD}


def row_columns(leaves: Leaves) -> Columns:
    """Return the columns of one row, in native byte order."""
    columns = Columns.of(leaves, stored=False)
    return Columns({k: Spec(s.shape, s.dtype.newbyteorder("=")) for k, s in columns.items()})


def is_checked(name: str, leaf: spaces.Space[Any]) -> bool:
    """Return whether values are checked against the space: actions and discrete observations."""
    return name.startswith("actions") or not isinstance(leaf, spaces.Box)


def check_shapes(
    name: str,
    arrays: Mapping[str, Array],
    columns: Columns,
    lengths: Sequence[int],
) -> None:
    """Check the names and shapes of arrays.

    Raises:
        ShapeError: If names or shapes differ.
    """
    if arrays.keys() != columns.keys():
        raise ShapeError(f"{name} has the arrays {list(arrays)}, expected {list(columns)}")
    for key, spec in columns.items():
        rows = sum(lengths) + len(lengths) * key.startswith("obs")
        found, shape = list(arrays[key].shape), [rows, *spec.shape]
        if found != shape:
            raise ShapeError(f"{name}: {key} has the shape {found}, expected {shape}")


def checked_trajectory(trajectory: Trajectory, leaves: Leaves, name: str) -> Trajectory:
    """Return a copy of an episode, converted to the dtypes of the spaces.

    Floats may lose precision; integers must be exactly representable.

    Args:
        trajectory: The episode.
        leaves: See `leaf_spaces`.
        name: Name for error messages.

    Raises:
        ShapeError: If keys or shapes do not match the spaces.
        SpaceError: If an array cannot be converted to the dtype of its space, or an action or a
            discrete observation is not in its space.
    """
    arrays = {key: np.asarray(array) for key, array in trajectory.arrays.items()}
    columns = row_columns(leaves)
    check_shapes(name, arrays, columns, [trajectory.num_steps])
    # Use the order of the spaces.
    arrays = {key: arrays[key] for key in leaves}
    for key, leaf in leaves.items():
        label, array = f"{name}: {key}", arrays[key]
        if is_checked(key, leaf):
            array = checked_actions(label, array, len(array), leaf)
        arrays[key] = _converted(array, columns[key].dtype, label)
    return Trajectory(
        **groups_of(arrays),
        terminated=bool(trajectory.terminated),
        truncated=bool(trajectory.truncated),
        seed=None if trajectory.seed is None else int(trajectory.seed),
    )


def _converted(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return a copy converted to `dtype`. Integers must be representable, and floats finite."""
    copy: Array
    if array.dtype == dtype:
        copy = array.copy()
        return copy
    both_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    is_number = array.dtype.kind in "fiub"
    if not is_number or not (both_integers or np.can_cast(array.dtype, dtype, "same_kind")):
        raise SpaceError(
            f"{name} has dtype {array.dtype}, which cannot be converted to {dtype}, the dtype of "
            f"the space: convert the array, or correct the space"
        )
    with np.errstate(all="ignore"):
        copy = array.astype(dtype, order="C")
        if array.dtype.kind == "f":
            fits = np.isfinite(copy)
        else:
            fits = (copy == array) & (copy.astype(array.dtype) == array)
    if not fits.all():
        row = int(np.argwhere(~fits)[0, 0])
        raise SpaceError(f"{name}[{row}] = {array[row]} cannot be converted to {dtype}")
    return copy


PART_NBYTES = 64 * 2**20
"""Minimum size of a part in bytes."""

CHECKED_NBYTES = 1 << 20
"""Chunk size of content checks in bytes."""


@dataclass(frozen=True)
class DatasetMetadata:
    """Spaces, environment and policy of a dataset.

    Attributes:
        observation_space: Observation space of one environment, nested.
        action_space: Action space of one environment, nested.
        env: Settings of the environment (`id`, `kwargs`, ...), as plain values.
        policy: Settings of the behaviour policy, as plain values.

    Raises:
        SpaceError: If a space has an unsupported leaf.
    """

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        leaf_spaces(self.observation_space, self.action_space)

    @property
    def leaves(self) -> dict[str, spaces.Space[Any]]:
        """See `leaf_spaces`."""
        return leaf_spaces(self.observation_space, self.action_space)


@dataclass(frozen=True, eq=False)
class TrajectoryPart(_Recorded):
    """Concatenated episodes.

    Step t of episode k is row `starts[k] + t` of actions and rewards, and row `starts[k] + k + t`
    of `obs`.

    Attributes:
        obs: T + 1 observations per episode, `[steps + episodes, ...]`; a flat mapping for a Dict or
            Tuple space.
        actions: Actions of the environment, `[steps, ...]`.
        rewards: `[steps]` float64.
        lengths: Steps of each episode, `[episodes]` int64, each >= 1.
        terminated: `[episodes]` bool.
        truncated: `[episodes]` bool.
        seeds: Seed of each episode; None: unknown.
        name: Origin of the part, for error messages.
        env: Environment of these episodes, as plain values; empty: unknown.
        policy: Policy of these episodes, as plain values; empty: unknown.
    """

    lengths: Array
    terminated: Array
    truncated: Array
    seeds: list[int | None]
    name: str
    env: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @cached_property
    def starts(self) -> Array:
        """First step of each episode, then the total number of steps, `[episodes + 1]` int64."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    @cached_property
    def returns(self) -> Array:
        """Return of each episode, `[episodes]` float64."""
        rows = zip(self.starts[:-1], self.starts[1:], strict=True)
        return np.array([self.rewards[start:stop].sum() for start, stop in rows], np.float64)

    def episode(self, index: int) -> Trajectory:
        """Return one episode; its arrays are views.

        Raises:
            ShapeError: If a value is not finite.
        """
        start, stop = int(self.starts[index]), int(self.starts[index + 1])
        return Trajectory(
            obs=tree_map(lambda x: x[start + index : stop + index + 1], self.obs),
            actions=tree_map(lambda x: x[start:stop], self.actions),
            rewards=self.rewards[start:stop],
            terminated=bool(self.terminated[index]),
            truncated=bool(self.truncated[index]),
            seed=self.seeds[index],
        )


def joined(episodes: Sequence[Trajectory], metadata: DatasetMetadata, name: str) -> TrajectoryPart:
    """Concatenate results of `checked_trajectory` into a part."""
    arrays = [episode.arrays for episode in episodes]
    return TrajectoryPart(
        **groups_of({key: np.concatenate([x[key] for x in arrays]) for key in arrays[0]}),
        lengths=np.array([episode.num_steps for episode in episodes], np.int64),
        terminated=np.array([episode.terminated for episode in episodes]),
        truncated=np.array([episode.truncated for episode in episodes]),
        seeds=[episode.seed for episode in episodes],
        name=name,
        env=metadata.env,
        policy=metadata.policy,
    )


def joined_parts(
    trajectories: Iterable[Trajectory], metadata: DatasetMetadata, name: str
) -> Iterator[TrajectoryPart]:
    """Validate episodes, and concatenate them into parts of at least `PART_NBYTES`.

    The last part may be smaller. To limit peak memory, episodes are released when their part is
    created.

    Raises:
        DatasetError: If there are no episodes.
        ShapeError: See `checked_trajectory`.
        SpaceError: See `checked_trajectory`.
    """
    leaves = metadata.leaves
    collected: list[Trajectory] = []
    nbytes, number = 0, -1
    for number, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            kind = type(trajectory).__name__
            raise DatasetError(f"{name}: item {number} is a {kind}: expected a Trajectory")
        collected.append(checked_trajectory(trajectory, leaves, f"{name}: trajectory {number}"))
        nbytes += collected[-1].nbytes
        if nbytes >= PART_NBYTES:
            part = joined(collected, metadata, name)
            collected, nbytes = [], 0
            yield part
    if collected:
        yield joined(collected, metadata, name)
    elif number < 0:
        raise DatasetError(f"{name} contains no episodes: expected at least one")


def check_part(part: TrajectoryPart, leaves: Leaves) -> None:
    """Check that the arrays of a part match the spaces, without reading their values.

    Raises:
        DatasetError: If names, shapes, dtypes or episode counts differ.
    """
    shapes = {x.shape for x in (part.lengths, part.terminated, part.truncated)}
    if shapes != {(len(part.seeds),)} or not part.seeds or part.lengths.min() < 1:
        raise DatasetError(
            f"{part.name}: expected one length >= 1, one seed and two flags per episode, and at "
            f"least one episode"
        )
    arrays, columns = part.arrays, row_columns(leaves)
    try:
        check_shapes(part.name, arrays, columns, part.lengths.tolist())
    except ShapeError as error:
        raise DatasetError(str(error)) from error
    for name, spec in columns.items():
        if (dtype := arrays[name].dtype) != spec.dtype:
            raise DatasetError(f"{part.name}: {name} is {dtype}, expected {spec.dtype}")


def check_content(part: TrajectoryPart, leaves: Leaves) -> None:
    """Check that all values of a part are finite and in their spaces.

    Raises:
        DatasetError: If a value is invalid. The message names the array and the row.
    """
    for name, array in part.arrays.items():
        leaf, is_float = leaves[name], array.dtype.kind == "f"
        step = max(1, CHECKED_NBYTES * len(array) // max(1, array.nbytes))
        for row in range(0, len(array), step):
            block = array[row : row + step]
            if is_float and not np.isfinite(block).all():
                row += int(np.argwhere(~np.isfinite(block))[0, 0])
                raise DatasetError(
                    f"{part.name}: {name}[{row}] = {array[row]}: expected finite values"
                )
            if is_checked(name, leaf):
                try:
                    checked_actions(name, block, len(block), leaf)
                except SpaceError as error:
                    raise DatasetError(
                        f"{part.name}, rows from {row}: {error}; the dataset does not match "
                        f"its space of {name.partition('/')[0]}"
                    ) from error
