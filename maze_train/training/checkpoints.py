"""Checkpoints of a run: schedule, atomic writes and verified reads.

checkpoints/
    latest                          name of the checkpoint from which the run continues
    epoch_000025/                   after 25 epochs
    epoch_000025_update_000253/     within the 26th epoch, after 253 updates
        MANIFEST.json               counters, versions, digests
        state.pt                    see `state_files`
        part_<...>.pt               large pieces of the state, see `checkpoint_files`
    epoch_000026-2/                 after 26 epochs, of a run resumed from an earlier checkpoint

Only `latest` is ever replaced. Names that begin with `.tmp-` are in progress (being written or
removed) by the process whose ID is at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from maze_train.core.checks import check_one_of
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import (
    atomic_write,
    fsync_directory,
    process_runs,
    read_regular,
    remove_leftovers,
)
from maze_train.core.folders import check_held, make_folders
from maze_train.core.notices import warn
from maze_train.core.state_files import dumps
from maze_train.training.checkpoint_files import (
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointInfo,
    DamagedError,
    FilesWriter,
    Parts,
    make_manifest,
    read_checkpoint,
    read_manifest,
    sort_key,
)
from maze_train.training.config import CheckpointConfig
from maze_train.training.outcome import Position

__all__ = ["Checkpoint", "CheckpointInfo", "CheckpointStore"]

LATEST = "latest"


class CheckpointStore:
    """Checkpoints of one run; one process writes (see `core.files.exclusive`), any may read.

    Args:
        directory: `<run directory>/checkpoints`; created by the first `save` if the run directory
            exists.
        config: Which checkpoints to keep; None: default settings.
        mode: `max` if larger scores are better, `min` if smaller ones are.
        settings: Configuration of the run as text, stored in every checkpoint.
        warn: Reports errors that do not stop the run; the default prints to stderr.

    Raises:
        ConfigError: If `mode` is invalid.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig | None = None,
        *,
        mode: str = "max",
        settings: str = "",
        warn: Callable[[str], None] = warn,
    ) -> None:
        check_one_of("mode", mode, ("max", "min"))
        self.directory = directory
        self.config = config or CheckpointConfig()
        self._settings = settings
        self._sign = 1.0 if mode == "max" else -1.0
        self._warn = warn
        self._parts: Parts = {}
        """Parts of the checkpoint last written or loaded."""
        self.latest: Path | None = None
        """Checkpoint last written, or from which the run was resumed."""
        self._position: Position | None = None
        self._saved_at = time.monotonic()

    def is_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after epoch `epoch`, counted from 1."""
        interval = self.config.interval
        return (interval > 0 and epoch % interval == 0) or self.is_overdue()

    def is_overdue(self) -> bool:
        """Return whether `interval_minutes` have passed since the last checkpoint."""
        minutes = self.config.interval_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * minutes

    def holds(self, epoch: int, updates: int, within_epoch: bool) -> bool:
        """Return whether the last checkpoint was taken at this position."""
        last, here = self._position, (epoch, updates, within_epoch)
        return last is not None and here == (last.epoch, last.updates, last.within_epoch)

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint atomically; it is on disk when this returns.

        If the process is killed, either the previous checkpoints remain, or also the new one. After
        writing, old checkpoints are removed, and checkpoints of an abandoned branch (at the same or
        a later position).

        Each `StatePart` is written to a separate file. If its version is the same as in the last
        written or loaded checkpoint, both checkpoints share the file and the part is not read.
        Other parts are read and written one by one.

        Args:
            state: State that `load` returns, see `state_files.dumps`.
            position: Position of training.

        Returns:
            Path of the checkpoint; None (after a warning) if writing failed.

        Raises:
            TypeError: If the state contains an unsupported type.
            ValueError: If the state has too many parts (tens of thousands).
        """
        try:
            check_held(self.directory)
            path = self._write(state, position)
        except OSError as error:
            self._warn(
                f"checkpoint {self.directory / position.name} could not be written: {error}; "
                f"{self._last_good()}; training continues"
            )
            return None
        finally:
            self._saved_at = time.monotonic()
        self.latest, self._position = path, position
        self._remove_old(position, path)
        return path

    def _write(self, state: dict[str, Any], position: Position) -> Path:
        """Write the files, move them into place, update `latest`; undo everything on failure."""
        if not self.directory.is_dir():
            self.directory.mkdir()  # Without parents, because the run may have been removed.
            fsync_directory(self.directory.parent)
        final = self._unused(position.name)
        work = self._work(final)
        shutil.rmtree(work, ignore_errors=True)
        try:
            make_folders(work)
            files = FilesWriter(work, final, self._parts)
            files.write(STATE, dumps(state, files.write_part))
            files.write(MANIFEST, make_manifest(files.digests, position, self._settings))
            fsync_directory(work)
            os.rename(work, final)
            fsync_directory(self.directory)
            self._point_to(final.name)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            if self._pointer() != final.name:  # Otherwise the new checkpoint is already in use.
                with suppress(OSError):
                    self._remove(final)
            raise
        self._parts = files.parts
        with suppress(OSError):  # The pointer has been written.
            fsync_directory(self.directory)
        return final

    def _unused(self, name: str) -> Path:
        """Return an unused path; an abandoned branch may have used the plain name."""
        path, number = self.directory / name, 1
        while path.exists():
            number += 1
            path = self.directory / f"{name}-{number}"
        return path

    def _work(self, path: Path) -> Path:
        return path.with_name(f".tmp-{path.name}-{os.getpid()}")

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint atomically.

        Raises:
            OSError: If the checkpoint does not exist or cannot be removed.
        """
        work = self._work(path)
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # For example, on a full disk.
            os.rename(path, work)
            path = work
        shutil.rmtree(path)

    def _last_good(self) -> str:
        names = [info.path.name for info in self.list()]
        pointer = self._pointer()
        if pointer in names:
            return f"the last good one is still {pointer}"
        return f"the last good one is still {names[-1]}" if names else "there is no earlier one"

    def _remove_old(self, last: Position, path: Path) -> None:
        """Remove checkpoints that are neither among the newest nor among the best."""
        present, unknown = self._survey()
        infos = [
            info
            for info in present
            if info.epoch <= last.epoch
            and info.updates <= last.updates
            and (info.path == path or info.name != last.name)
        ]
        newest = sorted(infos, key=lambda info: (info.path == path, *info.order))
        scored = [info for info in infos if info.score is not None]
        best = sorted(scored, key=lambda info: (-self._sign * (info.score or 0.0), info.order))
        kept = {
            info.path
            for info in (*newest[-self.config.keep_last :], *best[: self.config.keep_best])
        }
        for old in self._directories():
            if old not in kept | unknown:
                try:
                    self._remove(old)
                except OSError as error:
                    self._warn(f"the old checkpoint {old} could not be removed: {error}")

    def clean(self) -> None:
        """Remove files left by killed processes; call it before training."""
        remove_leftovers(self.directory)
        for path in self._paths():
            found = re.fullmatch(r"\.tmp-.+-(\d+)", path.name)
            if found and (int(found[1]) == os.getpid() or not process_runs(int(found[1]))):
                shutil.rmtree(path, ignore_errors=True)

    def point_to(self, info: CheckpointInfo) -> None:
        """Make `latest` name the checkpoint to resume from; later ones become an abandoned branch.

        Raises:
            OSError: If writing fails.
        """
        if self._pointer() != info.path.name:
            self._point_to(info.path.name)
            fsync_directory(self.directory)
        self.latest, self._position = info.path, info

    def _point_to(self, name: str) -> None:
        with atomic_write(self.directory / LATEST) as file:
            file.write(f"{name}\n".encode())

    def load(self, name: str | None = None) -> Checkpoint | None:
        """Load the newest undamaged checkpoint; all files are verified.

        Tries the checkpoint named by `latest` first, then earlier ones; without a valid `latest`,
        all checkpoints, newest first. A warning is printed for each damaged checkpoint.

        Args:
            name: Name of the only checkpoint to try; None: see above.

        Returns:
            The checkpoint; None without any checkpoint.

        Raises:
            RunDirectoryError: If all checkpoints are damaged, the named one is damaged or missing,
                or one was written by another version.
        """
        found = self._load_newest() if name is None else self._load_named(name)
        if found is not None:
            self._parts = found.parts
        return found

    def _load_newest(self) -> Checkpoint | None:
        paths, is_named = self._in_order()
        if not is_named:
            if not paths and not (self.directory / LATEST).exists():
                return None
            target = self._pointer()
            found = "missing or damaged" if target is None else f"{target}, which does not exist"
            self._warn(f"{self.directory / LATEST} is {found}: looking at all checkpoints")
        for path in paths:
            try:
                return read_checkpoint(path)
            except DamagedError as problem:
                self._warn(f"checkpoint {path} is damaged and skipped: {problem}")
        raise RunDirectoryError(
            f"{self.directory} has no undamaged checkpoint ({len(paths)} damaged): remove "
            f"the directory to train from the beginning, or restore it from a copy"
        )

    def _in_order(self) -> tuple[tuple[Path, ...], bool]:
        """Return directories in the order of `load`, and whether `latest` names one of them."""
        paths, target = self._directories()[::-1], self._pointer()
        named = [path for path in paths if path.name == target]
        if named:
            place = sort_key(named[0].name)[:2]
            paths = (*named, *(path for path in paths if sort_key(path.name)[:2] < place))
        return paths, bool(named)

    def find(self, name: str | None = None) -> CheckpointInfo | None:
        """Return the manifest of the checkpoint that `load` would load.

        Only manifests are read, so `load` returns an earlier checkpoint if another file is damaged.

        Args:
            name: Name of a checkpoint; None: the checkpoint to resume from.

        Returns:
            The manifest; None if the checkpoint does not exist or its manifest is unreadable.
        """
        for path in self._in_order()[0] if name is None else self._directories():
            if name in (None, path.name):
                with suppress(DamagedError, RunDirectoryError):
                    return read_manifest(path)
        return None

    def _load_named(self, name: str) -> Checkpoint:
        found = {path.name: path for path in self._directories()[::-1]}
        if name not in found:
            present = ", ".join(found) or "none"
            raise RunDirectoryError(
                f"{self.directory} has no checkpoint {name!r}; available: {present}"
            )
        try:
            return read_checkpoint(found[name])
        except DamagedError as problem:
            raise RunDirectoryError(f"checkpoint {found[name]} is damaged: {problem}") from problem

    def _pointer(self) -> str | None:
        """Return the content of `latest`; None if it is not the name of a checkpoint."""
        try:
            words = read_regular(self.directory / LATEST, 1000).decode("ascii").split()
        except (OSError, UnicodeDecodeError):
            return None
        return words[0] if words and sort_key(words[0]) else None

    def _paths(self) -> tuple[Path, ...]:
        try:
            return tuple(self.directory.iterdir())
        except OSError:
            return ()

    def _directories(self) -> tuple[Path, ...]:
        """Return the directories of all checkpoints, including damaged ones, oldest first."""
        found = [path for path in self._paths() if sort_key(path.name) and path.is_dir()]
        return tuple(sorted(found, key=lambda path: sort_key(path.name)))

    def _survey(self) -> tuple[tuple[CheckpointInfo, ...], set[Path]]:
        """Read all manifests, oldest first; also return unreadable ones that may be undamaged.

        These are unreadable because of a disk error or because another version wrote them.
        """
        infos, unknown = [], set()
        for path in self._directories():
            try:
                infos.append(read_manifest(path))
            except RunDirectoryError:
                unknown.add(path)
            except DamagedError as problem:
                if isinstance(problem.__cause__, OSError):
                    unknown.add(path)
        return tuple(sorted(infos, key=lambda info: info.order)), unknown

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return the manifests of all undamaged checkpoints, oldest first."""
        return self._survey()[0]
