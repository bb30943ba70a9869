"""Data sets of recorded episodes on disk, written part by part.

docs/trajectories.md describes the format.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from maze_train.checks import check_positive
from maze_train.data.trajectory_episodes import checked_episode
from maze_train.data.trajectory_files import (
    DATASET,
    differences,
    metadata_text,
    nearby,
    part_paths,
    read_metadata,
    write_part,
)
from maze_train.data.trajectory_parts import PART_NBYTES, columns_of
from maze_train.errors import DatasetError
from maze_train.files import (
    atomic_write,
    fsync_directory,
    process_runs,
    remove_leftovers,
    write_synced,
)
from maze_train.spaces.serialize import space_to_dict

if TYPE_CHECKING:
    from types import TracebackType

    from maze_train.data.trajectories import Trajectory
    from maze_train.data.trajectory_episodes import Episode
    from maze_train.data.trajectory_parts import DatasetMetadata

__all__ = ["TrajectoryWriter"]

PART_SECONDS = 60.0

WORK = re.compile(r"\.part-(.*)-([0-9]+)-[0-9]+")
"""A part that is being written: host, process, number."""

NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class TrajectoryWriter:
    """Creates a data set, or appends to one.

    Episodes are copied into memory, and written as a part when they have `part_nbytes`, or when an
    episode is added and the first of them is older than `part_seconds`. A part is complete or not
    there; what a killed process had not written is lost, nothing else. Several writers may append
    to one data set at a time.

    As a context manager it writes what is left at the end of the block, also after an exception;
    otherwise `close` does.

    Args:
        directory: The data set. It is created where it is missing; an existing one has to have the
            same spaces. Its `dataset.json` stays; each part has the `env` and `policy` of its own
            writer, and a warning says where they differ from `dataset.json`.
        metadata: Spaces, and what is known of environment and policy.
        part_nbytes: Size from which a part is written, in bytes, > 0.
        part_seconds: Age of the first episode in memory from which a part is written, in seconds,
            > 0. It is looked at when an episode is added.

    Raises:
        ConfigError: If `part_nbytes` or `part_seconds` is not > 0.
        DatasetError: If the data set has other spaces, is damaged, can not be created, or the
            directory holds something else.
        SpaceError: If a space can not be saved.
    """

    def __init__(
        self,
        directory: str | Path,
        metadata: DatasetMetadata,
        *,
        part_nbytes: int = PART_NBYTES,
        part_seconds: float = PART_SECONDS,
    ) -> None:
        check_positive("part_nbytes", part_nbytes)
        check_positive("part_seconds", part_seconds)
        self.directory = Path(directory)
        self.metadata = metadata
        self._part_nbytes = part_nbytes
        self._part_seconds = part_seconds
        self._columns = columns_of(metadata)
        self._episodes: list[Episode] = []
        self._nbytes = 0
        self._oldest_at = 0.0
        self._num_episodes = 0
        self._num_steps = 0
        self._closed = False
        text = metadata_text(metadata)
        try:
            self._create(text)
            self._remove_leftovers()
        except OSError as error:
            raise DatasetError(f"{self.directory} can not be written: {error}") from error

    def _create(self, text: bytes) -> None:
        """Write `dataset.json`, or compare the spaces with those that are there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / DATASET
        if not path.exists():
            others = [item.name for item in self.directory.iterdir() if item.name[0] != "."]
            if others and DATASET not in others:  # it may have come meanwhile
                raise DatasetError(
                    f"{self.directory} holds {sorted(others)[:5]} and no {DATASET}: choose a data "
                    f"set, or a directory that is new or empty{nearby(self.directory)}"
                )
            if _write_new(path, text):
                return
        found = read_metadata(self.directory)
        for name in ("observation_space", "action_space"):
            spaces = [getattr(x, name) for x in (found, self.metadata)]
            if space_to_dict(spaces[0]) != space_to_dict(spaces[1]):
                raise DatasetError(
                    f"the data set {self.directory} has the {name} {spaces[0]}, these episodes "
                    f"have {spaces[1]}: choose another directory"
                )
        if others := differences(found, self.metadata):
            message = f"warning: the data set {self.directory} began with {'; '.join(others)}"
            print(f"{message} (each part has its own)", file=sys.stderr, flush=True)

    def _remove_leftovers(self) -> None:
        """Remove what processes of this machine left that are dead."""
        remove_leftovers(self.directory)
        for path in self.directory.iterdir():
            found = WORK.fullmatch(path.name)
            if found and found[1] == socket.gethostname() and not process_runs(int(found[2])):
                shutil.rmtree(path, ignore_errors=True)

    @property
    def num_episodes(self) -> int:
        """Episodes that were added, written or not yet."""
        return self._num_episodes

    @property
    def num_steps(self) -> int:
        """Steps of these episodes."""
        return self._num_steps

    def add(self, trajectory: Trajectory) -> None:
        """Add one episode; its arrays are copied.

        Numbers are kept in the data types of the spaces, rewards as float64.

        Raises:
            ShapeError: If keys or shapes are not those of the spaces.
            SpaceError: If an array is of another kind than its leaf, an integer or the size of a
                float does not fit the data type, or an action is none of the space.
            DatasetError: If the writer is closed, or a part can not be written; then its episodes
                are kept, and `flush` tries again.
        """
        if self._closed:
            raise DatasetError(f"the writer of {self.directory} is closed: open another one")
        episode = checked_episode(trajectory, self._columns, f"trajectory {self._num_episodes}")
        now = monotonic()
        if not self._episodes:
            self._oldest_at = now
        self._episodes.append(episode)
        self._nbytes += episode.nbytes
        self._num_episodes += 1
        self._num_steps += episode.length
        is_old = now - self._oldest_at >= self._part_seconds
        if is_old or self._nbytes >= self._part_nbytes:
            self.flush()

    def flush(self) -> None:
        """Write the episodes in memory as a part; nothing if there are none.

        Raises:
            DatasetError: If the disk does not take them. They stay in memory.
        """
        if not self._episodes:
            return
        work: Path | None = None
        try:
            work = self._make_work_directory()
            write_part(work, self._columns, self._episodes, self.metadata)
            self._put_in_place(work)
            self._forget()
            fsync_directory(self.directory)
        except OSError as error:
            count = len(self._episodes)
            state = f"{count} episodes are still in memory" if count else "it may be lost"
            raise DatasetError(
                f"a part of {self.directory} could not be written: {error}; {state}"
            ) from error
        finally:
            if work is not None and work.exists():
                shutil.rmtree(work, ignore_errors=True)
            elif work is not None:  # it has its name, even if a signal came right after that
                self._forget()

    def _forget(self) -> None:
        """Drop the episodes in memory, which are written."""
        self._episodes = []
        self._nbytes = 0

    def _make_work_directory(self) -> Path:
        number = 0
        while True:
            name = f".part-{socket.gethostname()}-{os.getpid()}-{number}"
            with suppress(FileExistsError):
                (self.directory / name).mkdir()
                return self.directory / name
            number += 1

    def _put_in_place(self, work: Path) -> None:
        """Name a part that is complete by the next number that nobody has taken."""
        number = max(part_paths(self.directory), default=-1) + 1
        while True:
            try:
                os.rename(work, self.directory / f"part-{number:06d}")
                return
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise
            number += 1

    def close(self) -> None:
        """Write what is left. A second call does nothing.

        Raises:
            DatasetError: If the disk does not take it; the writer is then still open.
        """
        self.flush()
        self._closed = True

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _write_new(path: Path, data: bytes) -> bool:
    """Write a file that is complete or not there; False: another process was first."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(beside, data)
        os.link(beside, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with atomic_write(path) as file:  # there are file systems without links
            file.write(data)
    finally:
        beside.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True
