"""Episodes laid end to end, one array per leaf: the parts of a data set of trajectories."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze_train.data.trajectories import Trajectory
from maze_train.errors import DatasetError, ShapeError, SpaceError
from maze_train.spaces.actions import checked_actions
from maze_train.spaces.describe import flat_spaces
from maze_train.trees import leaves_by_key, tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from maze_train.types import Array, ArrayTree

__all__ = [
    "PART_NBYTES",
    "DatasetMetadata",
    "LeafSpec",
    "TrajectoryPart",
    "arrays_of",
    "check_content",
    "check_part",
    "checked_trajectory",
    "joined",
    "joined_parts",
    "leaf_specs",
    "trees_of",
]

PART_NBYTES = 64 * 2**20
"""Size from which episodes become a part."""

CHECKED_NBYTES = 1 << 20
"""Bytes of an array that are checked at once."""

GROUPS = ("obs", "actions", "rewards")
REWARD = spaces.Box(-np.inf, np.inf, (), np.float64)


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
        leaf_specs(self)


@dataclass(frozen=True)
class LeafSpec:
    """One array of a part: a leaf of observations or actions, or the rewards."""

    group: str
    """`obs`, `actions` or `rewards`."""

    space: spaces.Space[Any]
    """Space of one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Data type of the rows, in the byte order of the machine."""
        dtype: np.dtype[Any] = np.dtype(self.space.dtype).newbyteorder("=")
        return dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.space.shape or ())

    @property
    def is_checked(self) -> bool:
        """Whether values have to lie in the space: actions and discrete observations."""
        return self.group == "actions" or not isinstance(self.space, spaces.Box)

    def array_shape(self, lengths: Iterable[int]) -> tuple[int, ...]:
        """Shape for episodes of these lengths: T rows each, for observations T + 1."""
        return (sum(length + (self.group == "obs") for length in lengths), *self.shape)


def leaf_specs(metadata: DatasetMetadata) -> dict[str, LeafSpec]:
    """The arrays of a part by name, such as `obs` or, for a leaf of a Dict or Tuple, `obs/goal`.

    Raises:
        SpaceError: If a space can not be flattened.
    """
    named = {"obs": metadata.observation_space, "actions": metadata.action_space}
    specs = {
        _name(group, key): LeafSpec(group, leaf)
        for group, space in named.items()
        for key, leaf in flat_spaces(space).items()
    }
    return {**specs, "rewards": LeafSpec("rewards", REWARD)}


def _name(group: str, key: str) -> str:
    return f"{group}/{key}" if key else group


def arrays_of(episodes: Trajectory | TrajectoryPart) -> dict[str, Array]:
    """The arrays of an episode or a part by name; `trees_of` is the inverse."""
    return {
        _name(group, key): leaf
        for group in GROUPS
        for key, leaf in leaves_by_key(getattr(episodes, group)).items()
    }


def trees_of(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Observations, actions and rewards from arrays by name."""
    trees: dict[str, Any] = {group: {} for group in GROUPS}
    for name, array in arrays.items():
        group, _, key = name.partition("/")
        if key:
            trees[group][key] = array
        else:
            trees[group] = array
    return trees


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
    """The environment of these episodes, as plain values; empty: unknown."""

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
        return sum(array.nbytes for array in arrays_of(self).values())

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
        return Trajectory(
            obs=tree_map(lambda x: x[start + index : stop + index + 1], self.obs),
            actions=tree_map(lambda x: x[start:stop], self.actions),
            rewards=self.rewards[start:stop],
            terminated=bool(self.terminated[index]),
            truncated=bool(self.truncated[index]),
            seed=self.seeds[index],
        )


def checked_trajectory(
    trajectory: Trajectory, specs: Mapping[str, LeafSpec], name: str
) -> Trajectory:
    """Copy an episode into the data types of its spaces.

    Floats may lose digits to the data type of the space; integers have to stay the same.

    Args:
        trajectory: The episode.
        specs: The arrays of the data set.
        name: Name in messages.

    Raises:
        ShapeError: If keys or shapes are not those of the spaces.
        SpaceError: If an array is of another kind than its leaf, a number does not fit its data
            type, or an action or a discrete observation is none of its space.
    """
    found = arrays_of(trajectory)
    if found.keys() != specs.keys():
        raise ShapeError(f"{name} has the arrays {list(found)}, expected {list(specs)}")
    arrays = {}
    for key, spec in specs.items():
        label, array = f"{name}: {key}", np.asarray(found[key])
        shape = spec.array_shape([trajectory.num_steps])
        if array.shape != shape:
            raise ShapeError(f"{label} has the shape {list(array.shape)}, expected {list(shape)}")
        if spec.is_checked:
            array = checked_actions(label, array, len(array), spec.space)
        arrays[key] = _converted(array, spec.dtype, label)
    return Trajectory(
        **trees_of(arrays),
        terminated=bool(trajectory.terminated),
        truncated=bool(trajectory.truncated),
        seed=None if trajectory.seed is None else int(trajectory.seed),
    )


def _converted(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """A copy in another data type, in which integers have the same value and floats are finite."""
    copy: Array
    if array.dtype == dtype:
        copy = array.copy()
        return copy
    both_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    is_number = array.dtype.kind in "fiub"
    if not is_number or not (both_integers or np.can_cast(array.dtype, dtype, "same_kind")):
        raise SpaceError(
            f"{name} has the data type {array.dtype}, which can not be kept as {dtype}, the data "
            f"type of the space: convert it, or correct the space"
        )
    with np.errstate(all="ignore"):
        copy = array.astype(dtype, order="C")
        if array.dtype.kind == "f":
            fits = np.isfinite(copy)
        else:
            fits = (copy == array) & (copy.astype(array.dtype) == array)
    if not fits.all():
        row = int(np.argwhere(~fits)[0, 0])
        raise SpaceError(f"{name}[{row}] = {array[row]} can not be kept as {dtype}")
    return copy


def joined(episodes: Sequence[Trajectory], metadata: DatasetMetadata, name: str) -> TrajectoryPart:
    """One part of episodes that `checked_trajectory` gave."""
    arrays = [arrays_of(episode) for episode in episodes]
    return TrajectoryPart(
        **trees_of({key: np.concatenate([x[key] for x in arrays]) for key in arrays[0]}),
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
    """Check episodes and lay them end to end: a part for every `PART_NBYTES`, and for the rest.

    An episode is released when its part is made, so all of them are never in memory twice.

    Raises:
        DatasetError: If there are none.
        ShapeError: See `checked_trajectory`, as for the next.
        SpaceError: If numbers do not fit the spaces.
    """
    specs = leaf_specs(metadata)
    collected: list[Trajectory] = []
    nbytes, number = 0, -1
    for number, trajectory in enumerate(trajectories):
        collected.append(checked_trajectory(trajectory, specs, f"{name}: trajectory {number}"))
        nbytes += collected[-1].nbytes
        if nbytes >= PART_NBYTES:
            part = joined(collected, metadata, name)
            collected, nbytes = [], 0
            yield part
    if collected:
        yield joined(collected, metadata, name)
    elif number < 0:
        raise DatasetError(f"{name} holds no episodes: expected at least one")


def check_part(part: TrajectoryPart, specs: Mapping[str, LeafSpec]) -> None:
    """Refuse a part whose arrays are not those of the spaces and lengths; contents are not read.

    Raises:
        DatasetError: If names, shapes, data types or numbers of episodes are others.
    """
    shapes = {x.shape for x in (part.lengths, part.terminated, part.truncated)}
    if shapes != {(len(part.seeds),)} or not part.seeds or part.lengths.min() < 1:
        raise DatasetError(
            f"{part.name}: expected one length >= 1, one seed and two flags for each of at least "
            f"one episode"
        )
    found = arrays_of(part)
    if found.keys() != specs.keys():
        raise DatasetError(
            f"{part.name}: has the arrays {list(found)}, expected {list(specs)} as in the spaces"
        )
    lengths = part.lengths.tolist()
    for name, spec in specs.items():
        array, shape = found[name], spec.array_shape(lengths)
        if array.shape != shape or array.dtype != spec.dtype:
            raise DatasetError(
                f"{part.name}: {name} is {array.dtype}{list(array.shape)}, expected "
                f"{spec.dtype}{list(shape)}"
            )


def check_content(part: TrajectoryPart, specs: Mapping[str, LeafSpec]) -> None:
    """Read a part, and refuse numbers that are not finite, or are none of a space.

    Raises:
        DatasetError: Naming the array and the row.
    """
    for name, array in arrays_of(part).items():
        spec = specs[name]
        step = max(1, CHECKED_NBYTES // max(1, prod(spec.shape) * spec.dtype.itemsize))
        for row in range(0, len(array), step):
            block = array[row : row + step]
            if spec.dtype.kind == "f" and not np.isfinite(block).all():
                row += int(np.argwhere(~np.isfinite(block))[0, 0])
                raise DatasetError(
                    f"{part.name}: {name}[{row}] = {array[row]}: expected finite numbers"
                )
            if spec.is_checked:
                try:
                    checked_actions(name, block, len(block), spec.space)
                except SpaceError as error:
                    raise DatasetError(
                        f"{part.name}, counted from row {row}: {error}; the data set does not fit "
                        f"its own space of {spec.group}"
                    ) from error
