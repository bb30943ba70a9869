"""Checkpoints: their schedule; written whole or not at all, verified when read.

checkpoints/
    latest                          name of the newest checkpoint, and the sha256 of its manifest
    epoch_000025/                   after 25 epochs
    epoch_000025_update_000253/     within the 26th epoch, after 253 updates
        MANIFEST.json               counters, versions, digests
        state.safetensors           see `state_files`
        part_<...>.safetensors      large pieces of the state, see `checkpoint_files`

Names that begin with a dot are work in progress, of a process whose number is at the end:
`.tmp-` is being written, `.old-` is being replaced by a checkpoint of the same name, `.trash-` is
being removed.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from maze_train.core.checks import check_one_of
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import (
    check_held,
    fsync_directory,
    process_runs,
    read_regular,
    write_synced,
)
from maze_train.core.notices import warn
from maze_train.data.state_files import dumps
from maze_train.training.checkpoint_files import (
    MANIFEST,
    MIGRATIONS,
    SCHEMA,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maze_train.training.outcome import Position


__all__ = ["MIGRATIONS", "SCHEMA", "Checkpoint", "CheckpointInfo", "CheckpointStore"]

LATEST = "latest"


def _is_that(path: Path, name: str, sha256: str) -> bool:
    """Whether a checkpoint has a manifest of this digest."""
    with suppress(DamagedError, RunDirectoryError):
        return read_manifest(path, name).sha256 == sha256
    return False


class CheckpointStore:
    """The checkpoints of one run. One process writes (see `locks.exclusive`), any may read.

    Args:
        directory: `<run directory>/checkpoints`; made by the first `save` if the run directory is
            there.
        config: Which checkpoints are kept; None: the usual ones.
        mode: `max` if larger scores are better, `min` if smaller ones are.
        settings: Configuration of the run as text, which every checkpoint keeps.
        warn: Takes what went wrong without ending the run; by default it is printed on stderr.

    Raises:
        ConfigError: If there is no such mode.
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
        """Parts of the checkpoint that was written or loaded last."""

    # -- writing ---------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint; it is on disk when this returns, or nothing of it is.

        A checkpoint of the same name is replaced. A process that is killed at any moment leaves the
        checkpoints from before, or these and the new one. Then old checkpoints are removed, and
        those of a branch that was left: with more epochs or updates than this one.

        Each `StatePart` of the state is its own file. One that has the version of the part in
        its place in the checkpoint that was written or loaded last is not read: the two checkpoints
        share the file. All others are read and written one after the other.

        Args:
            state: Content that `load` gives back, see `state_files.dumps`.
            position: Where training stands.

        Returns:
            Where the checkpoint is; None after a warning if the disk did not take it.

        Raises:
            TypeError: If the state holds something that cannot be stored.
            ValueError: If it has tens of thousands of parts.
        """
        try:
            check_held(self.directory)
            self._put_back_interrupted()
            self._write(state, position)
        except OSError as error:
            self._warn(
                f"checkpoint {self.directory / position.name} could not be written: {error}; "
                f"{self._last_good()}; training continues"
            )
            return None
        self._remove_old(position)
        return self.directory / position.name

    def _write(self, state: dict[str, Any], position: Position) -> None:
        """Write the files, move them into place, and point to them; or leave all as it was."""
        if not self.directory.is_dir():
            self.directory.mkdir()
            fsync_directory(self.directory.parent)
        name = position.name
        work, final, old = self._work("tmp", name), self.directory / name, self._work("old", name)
        pointer, target = self._work("tmp", LATEST), (name, "")
        self._discard(work)
        try:
            work.mkdir()
            files = FilesWriter(work, final, self._parts)
            files.write(STATE, dumps(state, files.write_part))
            files.write(MANIFEST, make_manifest(files.digests, position, self._settings))
            target = (name, files.digests[MANIFEST].sha256)
            fsync_directory(work)
            if final.exists():
                os.rename(final, old)
            os.rename(work, final)
            work = final
            fsync_directory(self.directory)
            self._point(pointer, target)
        except BaseException:
            with suppress(OSError):
                pointer.unlink(missing_ok=True)
            if work == final and self._pointer() == target:
                raise  # the new one counts already
            self._discard(work)
            with suppress(OSError):
                if old.exists():
                    os.rename(old, final)
            raise
        self._parts = files.parts
        with suppress(OSError):  # the pointer is in its place
            fsync_directory(self.directory)
        self._discard(old)

    def _work(self, kind: str, name: str) -> Path:
        return self.directory / f".{kind}-{name}-{os.getpid()}"

    def _discard(self, path: Path) -> str:
        """Remove a directory if it is there; no one sees a half of it. Returns what failed."""
        trash = self._work("trash", path.name.lstrip("."))
        try:
            if path.exists():
                with suppress(OSError):
                    shutil.rmtree(trash, ignore_errors=True)
                    os.rename(path, trash)
                    path = trash
                shutil.rmtree(path)
        except OSError as error:
            return str(error)
        return ""

    def _last_good(self) -> str:
        names = [info.path.name for info in self.list()]
        pointer = self._pointer()
        if pointer is not None and pointer[0] in names:
            return f"the last good one is still {pointer[0]}"
        return f"the last good one is still {names[-1]}" if names else "there is no earlier one"

    def _remove_old(self, last: Position) -> None:
        """Remove what is neither among the newest nor among the best up to the last checkpoint."""
        present, unknown = self._survey()
        infos = [
            info for info in present if info.epoch <= last.epoch and info.updates <= last.updates
        ]
        newest = sorted(infos, key=lambda info: (info.path.name == last.name, *info.order))
        scored = [info for info in infos if info.score is not None]
        best = sorted(scored, key=lambda info: (-self._sign * (info.score or 0.0), info.order))
        kept = {
            info.path
            for info in (*newest[-self.config.keep_last :], *best[: self.config.keep_best])
        }
        for path in self._directories():
            if path not in kept | unknown and (problem := self._discard(path)):
                self._warn(f"the old checkpoint {path} could not be removed: {problem}")

    def clean(self) -> None:
        """Remove what processes left that did not end by themselves; call it before training."""
        with suppress(OSError):
            self._put_back_interrupted()
        for path, _, pid in (*self._leftovers("tmp"), *self._leftovers("trash")):
            if pid == os.getpid() or not process_runs(pid):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()

    def _put_back_interrupted(self) -> None:
        """A checkpoint that was about to be replaced takes its place again."""
        for path, name, pid in self._leftovers("old"):
            if pid == os.getpid() or not process_runs(pid):
                if (self.directory / name).exists():
                    self._discard(path)
                else:
                    os.rename(path, self.directory / name)

    def _leftovers(self, kind: str) -> Iterator[tuple[Path, str, int]]:
        """Work in progress: path, name of the checkpoint, process."""
        for path in self._paths():
            if found := re.fullmatch(rf"\.{kind}-(.+)-(\d+)", path.name):
                yield path, found[1], int(found[2])

    def point_to(self, info: CheckpointInfo) -> None:
        """Let `latest` name a checkpoint from which the run continues; later ones are left behind.

        Raises:
            OSError: If the disk does not take it.
        """
        target = (info.path.name, info.sha256)
        if self._pointer() == target:
            return
        self._point(self._work("tmp", LATEST), target)
        fsync_directory(self.directory)

    def _point(self, pointer: Path, target: tuple[str, str]) -> None:
        write_synced(pointer, f"{' '.join(target)}\n".encode())
        os.replace(pointer, self.directory / LATEST)

    # -- reading ---------------------------------------------------------------------------------

    def load(self, name: str | None = None) -> Checkpoint | None:
        """Load the newest undamaged checkpoint: every file of it is as it was written.

        The one that `latest` names comes first, then those before it; without a valid `latest` all
        of them, the newest first. A warning names each damaged one.

        Args:
            name: Name of a checkpoint; then only that one is loaded.

        Returns:
            The checkpoint; None without any checkpoint.

        Raises:
            RunDirectoryError: If all are damaged, the one asked for is damaged or missing, or one
                was written by a newer version.
        """
        found = self._load_newest() if name is None else self._load_named(name)
        if found is not None:
            self._parts = found.parts
        return found

    def _load_newest(self) -> Checkpoint | None:
        candidates = self._candidates()
        pointer = self._pointer()
        if not candidates and pointer is None and not (self.directory / LATEST).exists():
            return None
        if pointer is None:
            self._warn(f"{self.directory / LATEST} is missing or damaged: looking at all of them")
        names = tuple(candidates) if pointer is None else self._order(*pointer, candidates)
        for candidate in names:
            path = candidates.get(candidate, self.directory / candidate)
            try:
                return read_checkpoint(path, candidate)
            except DamagedError as problem:
                self._warn(f"checkpoint {path} is damaged and left out: {problem}")
        raise RunDirectoryError(
            f"{self.directory} holds no checkpoint that is whole ({len(names)} damaged): remove "
            f"the directory to train from the beginning, or restore it from a copy"
        )

    def _load_named(self, name: str) -> Checkpoint:
        path = self._candidates().get(name)
        if path is None:
            present = ", ".join(self._candidates()) or "none"
            raise RunDirectoryError(
                f"{self.directory} has no checkpoint {name!r}; there: {present}"
            )
        try:
            return read_checkpoint(path, name)
        except DamagedError as problem:
            raise RunDirectoryError(f"checkpoint {path} is damaged: {problem}") from problem

    def _order(self, target: str, sha256: str, candidates: dict[str, Path]) -> tuple[str, ...]:
        """The names in the order in which they are tried, given what `latest` says."""
        try:
            fits = target in candidates and (
                read_manifest(candidates[target], target).sha256 == sha256
            )
        except DamagedError:
            fits = True  # of the two, this is the one that is known to be damaged
        if not fits:
            meant = next((n for n, path in candidates.items() if _is_that(path, n, sha256)), None)
            if meant is None and target in candidates:
                self._warn(f"{self.directory / LATEST} is damaged: looking at all of them")
                return tuple(candidates)
            if meant is not None:
                self._warn(f"{self.directory / LATEST} is damaged: it means {meant}, not {target}")
                target = meant
        return (target, *(name for name in candidates if sort_key(name) < sort_key(target)))

    def _pointer(self) -> tuple[str, str] | None:
        """Name and digest of the manifest that `latest` holds; None if it is not valid."""
        path = self.directory / LATEST
        try:
            text = read_regular(path, 1000).decode("ascii")
        except (OSError, UnicodeDecodeError):
            return None
        found = re.fullmatch(r"(\S+) ([0-9a-f]{64})\n", text)
        return (found[1], found[2]) if found and sort_key(found[1]) else None

    def _paths(self) -> tuple[Path, ...]:
        try:
            return tuple(sorted(self.directory.iterdir()))
        except OSError:
            return ()

    def _directories(self) -> tuple[Path, ...]:
        return tuple(path for path in self._paths() if sort_key(path.name) and path.is_dir())

    def _candidates(self) -> dict[str, Path]:
        """Checkpoints by name, newest first, with those that a killed process was to replace."""
        found = {name: path for path, name, _ in self._leftovers("old") if sort_key(name)}
        found |= {path.name: path for path in self._directories()}
        return dict(sorted(found.items(), key=lambda item: sort_key(item[0]), reverse=True))

    def _survey(self) -> tuple[tuple[CheckpointInfo, ...], set[Path]]:
        """Read all manifests, the oldest first; returns also checkpoints that may still be whole.

        Of these nothing can be known: the disk does not answer, or a newer version wrote them.
        """
        infos, unknown = [], set()
        for path in self._directories():
            try:
                infos.append(read_manifest(path, path.name))
            except RunDirectoryError:
                unknown.add(path)
            except DamagedError as problem:
                if isinstance(problem.__cause__, OSError):
                    unknown.add(path)
        return tuple(sorted(infos, key=lambda info: info.order)), unknown

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Manifests of the checkpoints, the oldest first; damaged ones are left out."""
        return self._survey()[0]


class Checkpoints:
    """Says when a checkpoint is due, and writes it.

    Args:
        store: Where they are written; its settings say when.
        resumed: The checkpoint from which the run continues, which need not be written again.
    """

    def __init__(self, store: CheckpointStore, resumed: Checkpoint | None = None) -> None:
        self._store = store
        self._saved_at = time.monotonic()
        self.latest = None if resumed is None else resumed.path
        """The last checkpoint that was written, or from which the run continues."""
        self._position: Position | None = resumed

    def is_due(self, epoch: int) -> bool:
        """Whether the epoch that just ended, the first is 1, ends with a checkpoint."""
        interval = self._store.config.interval
        return (interval > 0 and epoch % interval == 0) or self.is_overdue()

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is longer ago than the settings allow."""
        minutes = self._store.config.interval_minutes
        return minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * minutes

    def holds(self, epoch: int, updates: int, within_epoch: bool) -> bool:
        """Whether the last checkpoint was taken at this position."""
        last, here = self._position, (epoch, updates, within_epoch)
        return last is not None and here == (last.epoch, last.updates, last.within_epoch)

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint.

        Args:
            state: The state of the trainer.
            position: Where training stands.

        Returns:
            Its directory; None if it could not be written.
        """
        path = self._store.save(state, position)
        self._saved_at = time.monotonic()
        if path is not None:
            self.latest, self._position = path, position
        return path
