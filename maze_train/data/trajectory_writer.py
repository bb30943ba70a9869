"""Data sets of recorded episodes on disk, written part by part.

docs/trajectories.md describes the format.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_positive
from maze_train.data.trajectories import checked_trajectory
from maze_train.data.trajectory_files import (
    DATASET,
    VERSION,
    append_part,
    metadata_of,
    nearby,
    new_content,
    read_content,
    write_content,
)
from maze_train.data.trajectory_parts import PART_NBYTES, joined
from maze_train.errors import DatasetError, RunDirectoryError
from maze_train.files import remove_leftovers
from maze_train.locks import exclusive
from maze_train.notices import warn

if TYPE_CHECKING:
    from maze_train.data.trajectories import Trajectory
    from maze_train.data.trajectory_parts import DatasetMetadata


PART_SECONDS = 60.0


class TrajectoryWriter:
    """Creates a data set, or appends to one.

    Episodes are copied into memory, and written as a part when they have `part_nbytes`, or when an
    episode is added and the first of them is older than `part_seconds`. A part is complete or not
    there; a killed process loses the episodes that it had not written, nothing else. One writer may
    use a data set at a time, from its creation until `close`.

    As a context manager it writes the remaining episodes at the end of the block, also after an
    exception; otherwise `close` does.

    Args:
        directory: The data set. It is created where it is missing; an existing one has to have the
            same spaces. `dataset.json` keeps its `env` and `policy`; each part has those of its
            own writer, and a warning says where they differ from `dataset.json`.
        metadata: Spaces, and what is known of environment and policy.
        part_nbytes: Size from which a part is written, in bytes, > 0. Writing it takes about twice
            that in memory, in addition to the episodes.
        part_seconds: Age of the first episode in memory from which a part is written, in seconds,
            > 0. It is looked at when an episode is added.

    Raises:
        ConfigError: If `part_nbytes` or `part_seconds` is not > 0.
        DatasetError: If another writer uses the data set, it has other spaces, is damaged or of
            version 1 of the format, can not be created, or the directory holds something else.
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
        self._specs = metadata.specs
        self._episodes: list[Trajectory] = []
        self._nbytes = 0
        self._oldest_at = 0.0
        self.num_episodes = 0
        """Episodes that were added, written or not yet."""
        self.num_steps = 0
        """Steps of these episodes."""
        self._closed = False
        content = new_content(metadata)
        with ExitStack() as lock:
            self._content = self._opened(content, lock)
            self._lock = lock.pop_all()

    def _opened(self, content: dict[str, Any], lock: ExitStack) -> dict[str, Any]:
        """Lock the data set and create it, or compare it with `content`; returns what it holds."""
        path = self.directory / DATASET
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            others = [item.name for item in self.directory.iterdir() if item.name[0] != "."]
            if others and not path.exists():
                raise DatasetError(
                    f"{self.directory} holds {sorted(others)[:5]} and no {DATASET}: choose a data "
                    f"set, or a directory that is new or empty{nearby(self.directory)}"
                )
            lock.enter_context(exclusive(self.directory, "writes to"))
            remove_leftovers(self.directory)
            if not path.exists():
                write_content(self.directory, content)
                return content
        except RunDirectoryError as error:
            raise DatasetError(str(error)) from error
        except OSError as error:
            raise DatasetError(f"{self.directory} can not be written: {error}") from error
        found = read_content(self.directory)
        self._compare(found, content)
        return found

    def _compare(self, found: dict[str, Any], content: dict[str, Any]) -> None:
        """Refuse a data set of other spaces; warn of another environment or policy."""
        if found["version"] < VERSION:
            raise DatasetError(
                f"the data set {self.directory} has version {found['version']} of the format, "
                f"which is only read: copy its episodes into a new one (docs/trajectories.md)"
            )
        theirs = metadata_of(self.directory, found)
        for name in ("observation_space", "action_space"):
            if found[name] != content[name]:
                raise DatasetError(
                    f"the data set {self.directory} has the {name} {getattr(theirs, name)}, these "
                    f"episodes have {getattr(self.metadata, name)}: choose another directory"
                )
        changes = []
        for name in ("env", "policy"):
            old, new = (
                {k: json.dumps(v, sort_keys=True) for k, v in x[name].items()}
                for x in (found, content)
            )
            keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            if keys:
                pair = [{k: x[name][k] for k in keys if k in x[name]} for x in (found, content)]
                changes.append(f"{name} {pair[0]}, now {pair[1]}")
        if changes:
            began = f"the data set {self.directory} began with {'; '.join(changes)}"
            warn(f"{began} (each part has its own)")

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
        name = f"trajectory {self.num_episodes}"
        episode = checked_trajectory(trajectory, self._specs, name)
        now = monotonic()
        if not self._episodes:
            self._oldest_at = now
        self._episodes.append(episode)
        self._nbytes += episode.nbytes
        self.num_episodes += 1
        self.num_steps += episode.num_steps
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
        part = joined(self._episodes, self.metadata, str(self.directory))
        try:
            content = append_part(self.directory, self._content, part)
        except OSError as error:
            raise DatasetError(
                f"a part of {self.directory} could not be written: {error}; "
                f"{len(self._episodes)} episodes are still in memory"
            ) from error
        # No signal comes between these: an episode is neither lost nor written twice.
        self._content, self._episodes, self._nbytes = content, [], 0

    def close(self) -> None:
        """Write the remaining episodes, and let others write. A second call does nothing.

        Raises:
            DatasetError: If the disk does not take them; the writer is then still open.
        """
        self.flush()
        self._closed = True
        self._lock.close()

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
