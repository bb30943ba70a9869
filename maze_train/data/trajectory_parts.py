"""Episodes laid end to end, one array per leaf: the parts of a data set of trajectories."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.trajectories import (
    Trajectory,
    arrays_of,
    check_shapes,
    checked_trajectory,
    leaf_specs,
    trees_of,
)
from maze_train.errors import DatasetError, ShapeError, SpaceError
from maze_train.spaces.actions import checked_actions
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gymnasium import spaces

    from maze_train.data.trajectories import LeafSpec
    from maze_train.types import Array, ArrayTree


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
        leaf_specs(self.observation_space, self.action_space)

    @property
    def specs(self) -> dict[str, LeafSpec]:
        """The arrays of a part by name."""
        return leaf_specs(self.observation_space, self.action_space)


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
    specs = metadata.specs
    collected: list[Trajectory] = []
    nbytes, number = 0, -1
    for number, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Trajectory):
            kind = type(trajectory).__name__
            raise DatasetError(f"{name}: item {number} is a {kind}: expected a Trajectory")
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
    arrays = arrays_of(part)
    try:
        check_shapes(part.name, arrays, specs, part.lengths.tolist())
    except ShapeError as error:
        raise DatasetError(str(error)) from error
    for name, spec in specs.items():
        if (dtype := arrays[name].dtype) != spec.dtype:
            raise DatasetError(f"{part.name}: {name} is {dtype}, expected {spec.dtype}")


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
