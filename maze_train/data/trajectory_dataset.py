"""Datasets of recorded episodes, in memory or memory-mapped."""

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
    """Sequence of recorded episodes.

    Indexing returns a `Trajectory` whose arrays are views (read-only if memory-mapped); slicing
    returns a list.

    Args:
        parts: Parts that contain the episodes; at least one part.
        metadata: Spaces, environment and policy.

    Raises:
        DatasetError: If there are no parts, or a part does not match the spaces.
    """

    def __init__(self, parts: Iterable[TrajectoryPart], metadata: DatasetMetadata) -> None:
        self.parts = tuple(parts)
        self.metadata = metadata
        if not self.parts:
            raise DatasetError("the dataset has no episodes: expected at least one part")
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
        """Open a dataset written by a `TrajectoryWriter`.

        File sizes are checked against `dataset.json`; shapes and dtypes are checked against the
        spaces.

        Args:
            directory: Directory of the dataset.
            mmap: Whether to memory-map files of at least 1 MiB. Smaller files are always read into
                memory, because mapped files remain open.
            verify: Whether to read every file and check that the digest matches, values are finite,
                and actions are in the action space.
            on_damaged: `raise` an error for a damaged part, or `skip` the part with a warning.

        Raises:
            ConfigError: If `on_damaged` is invalid.
            DatasetError: If the directory is not a dataset, or if the dataset is empty, damaged, or
                in an unsupported format version.
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
                            f"{error}; use on_damaged=skip to skip damaged parts"
                        ) from error
                    damaged += 1
                    warn(f"{error}; {file.name} is skipped")
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error}{_remedy(error)}") from error
        if not parts:
            problem = f"all {damaged} parts are damaged" if damaged else "there are no episodes"
            raise DatasetError(f"the dataset {path} cannot be used: {problem}")
        return cls(parts, metadata)

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Iterable[Trajectory],
        metadata: DatasetMetadata,
        name: str = "trajectories",
    ) -> TrajectoryDataset:
        """Create a dataset in memory, with parts of about 64 MiB.

        Args:
            trajectories: The episodes, which are copied. With a generator, the peak memory exceeds
                the size of the dataset by about 64 MiB.
            metadata: Spaces, environment and policy.
            name: Name for error messages.

        Raises:
            DatasetError: If there are no episodes.
            ShapeError: If keys or shapes do not match the spaces.
            SpaceError: If values are not in the spaces, see `TrajectoryWriter.add`.
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
        """Total number of steps."""
        return sum(part.num_steps for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Size of observations, actions and rewards in bytes."""
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
    """Return a hint if the error was caused by a limit of the operating system."""
    if error.errno not in LIMITS:
        return ""
    return (
        "; increase the limit of open files (ulimit -n), or copy the episodes to a dataset with "
        "larger parts (docs/datasets.md)"
    )
