"""Data sets of recorded episodes: mapped files, those of Minari, and functions of the user."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import numpy as np

from maze_train.core.checks import check_one_of, expanded
from maze_train.core.errors import DatasetError
from maze_train.core.notices import warn
from maze_train.core.types import Array
from maze_train.data.trajectories import (
    DatasetMetadata,
    Trajectory,
    TrajectoryPart,
    check_part,
    joined_parts,
)
from maze_train.data.trajectory_files import (
    LIMITS,
    metadata_of,
    part_files,
    read_content,
    read_part,
)


class TrajectoryDataset(Sequence[Trajectory]):
    """Recorded episodes. They are read where they are used if they were opened with `mmap`.

    An index gives a `Trajectory` whose arrays are views (read-only where files are mapped), a slice
    a list of them.

    Args:
        parts: The episodes, at least one part.
        metadata: Spaces, environment and policy.

    Raises:
        DatasetError: If there is no part, or one does not fit the spaces.
    """

    def __init__(self, parts: Iterable[TrajectoryPart], metadata: DatasetMetadata) -> None:
        self.parts = tuple(parts)
        self.metadata = metadata
        if not self.parts:
            raise DatasetError("a data set without episodes: expected at least one part")
        leaves = metadata.leaves
        for part in self.parts:
            check_part(part, leaves)
        counts = np.cumsum([part.num_episodes for part in self.parts])
        self._stops: list[int] = counts.tolist()

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        mmap: bool = True,
        verify: bool = True,
        on_damaged: Literal["raise", "skip"] = "raise",
    ) -> TrajectoryDataset:
        """Open a data set that a `TrajectoryWriter` wrote.

        Sizes of all files are compared with `dataset.json`, shapes and data types of all arrays
        with the spaces.

        Args:
            directory: The data set.
            mmap: Whether files of 1 MiB and more are mapped into memory, and read where they are
                used; otherwise they are read now. Each of them stays open. Smaller files are read
                now in both cases, so that many small parts take no open files.
            verify: Whether every file is read once, and compared with its digest; numbers that are
                not finite and actions that are not among the space are then refused as well.
            on_damaged: `raise`: a part that is damaged is an error; `skip`: it is left out with a
                warning.

        Raises:
            ConfigError: If `on_damaged` is neither.
            DatasetError: If the directory is no data set, is of another version, has no episodes,
                or is damaged.
        """
        check_one_of("on_damaged", on_damaged, ("raise", "skip"))
        path = Path(expanded(directory))
        parts, damaged = [], 0
        try:
            content = read_content(path)
            metadata = metadata_of(path, content)
            leaves = metadata.leaves
            for file, entry in part_files(path, content):
                try:
                    parts.append(read_part(file, entry, leaves, mmap=mmap, verify=verify))
                except DatasetError as error:
                    if on_damaged == "raise":
                        raise DatasetError(
                            f"{error}; leave damaged parts out with on_damaged=skip"
                        ) from error
                    damaged += 1
                    warn(f"{error}; {file.name} is left out")
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error}{_remedy(error)}") from error
        if not parts:
            problem = f"all {damaged} parts are damaged" if damaged else "it has no episodes"
            raise DatasetError(f"the data set {path} cannot be used: {problem}")
        return cls(parts, metadata)

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Iterable[Trajectory],
        metadata: DatasetMetadata,
        name: str = "trajectories",
    ) -> TrajectoryDataset:
        """A data set in memory, of one part for every 64 MiB.

        Args:
            trajectories: The episodes, which are copied. Those of a generator are in memory
                once, apart from the last 64 MiB.
            metadata: Spaces, environment and policy.
            name: Name in messages.

        Raises:
            DatasetError: If there are no episodes.
            ShapeError: If keys or shapes are not those of the spaces.
            SpaceError: If numbers do not fit the spaces, see `TrajectoryWriter.add`.
        """
        return cls(joined_parts(trajectories, metadata, name), metadata)

    @cached_property
    def lengths(self) -> Array:
        """Steps of each episode, `[N]` int64."""
        return np.concatenate([part.lengths for part in self.parts])

    @cached_property
    def returns(self) -> Array:
        """Return of each episode, `[N]` float64."""
        return np.concatenate([part.returns for part in self.parts])

    @property
    def seeds(self) -> list[int | None]:
        """Seed of each episode; None: unknown."""
        return [seed for part in self.parts for seed in part.seeds]

    @property
    def num_steps(self) -> int:
        """Steps of all episodes."""
        return sum(part.num_steps for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of observations, actions and rewards."""
        return sum(part.nbytes for part in self.parts)

    def __len__(self) -> int:
        return self._stops[-1]

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self._episode(number) for number in range(len(self))[index]]
        return self._episode(range(len(self))[index])

    def __iter__(self) -> Iterator[Trajectory]:
        for part in self.parts:
            for index in range(part.num_episodes):
                yield part.episode(index)

    def _episode(self, number: int) -> Trajectory:
        k = bisect_right(self._stops, number)
        return self.parts[k].episode(number - (self._stops[k - 1] if k else 0))


def _remedy(error: OSError) -> str:
    """Name the remedy for a limit of the system."""
    if error.errno not in LIMITS:
        return ""
    return (
        "; allow more open files (ulimit -n), or copy the episodes into a data set of larger parts "
        "(docs/trajectories.md)"
    )
