"""Checkpoints of a run: schedule, atomic writes and verified reads.

checkpoints/
    latest                          name of the checkpoint to resume from
    epoch_000025/                   after 25 epochs
    epoch_000025_update_000253/     within the 26th epoch, after 253 updates
        MANIFEST.json               counters, versions, digests
        state.pt                    see `state_files`
        part_<digest>.pt            large pieces of the state (see `core.state.StatePart`)
    epoch_000026-2/                 after 26 epochs, again in a resumed run

Only the file `latest` is ever replaced. A process that writes or removes a checkpoint uses a
temporary name `.tmp-<name>-<process ID>`. The file of an unchanged part is a hard link to the file
of an earlier checkpoint, which takes almost no time or space. The file remains if the earlier
checkpoint is removed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from maze_train.core.checks import check_one_of
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import (
    DamagedError,
    FileDigest,
    atomic_write,
    fsync_directory,
    process_runs,
    read_regular,
    remove_leftovers,
    seal,
    undamaged,
    unseal,
    verified_blocks,
    versions,
    write_synced,
)
from maze_train.core.folders import check_guarded, make_folders
from maze_train.core.names import LATEST
from maze_train.core.notices import warn
from maze_train.core.state import StatePart
from maze_train.core.state_files import TreePath, check_content, dumps, loads
from maze_train.learner.ranks import OneRank, Ranks
from maze_train.training.config import CheckpointConfig
from maze_train.training.outcome import Position, crosses

MANIFEST, STATE = "MANIFEST.json", "state.pt"
MAX_MANIFEST_BYTES = 10_000_000

KINDS: Mapping[str, type] = MappingProxyType(
    {"epoch": int, "updates": int, "env_steps": int, "within_epoch": bool, "settings": str}
)
"""Types of the values in a manifest."""

SCHEMA = 3
"""Version of the file format and of the contents of a state."""

NAME = re.compile(r"epoch_([0-9]{6,18})(?:_update_([0-9]{6,18}))?(?:-([0-9]{1,9}))?")
"""Pattern of directory names: epoch, update, and a number if the name was already used."""


@dataclass(frozen=True)
class PartFile:
    """File that contains one component of a checkpoint."""

    directory: Path
    """Directory of the checkpoint."""

    digest: FileDigest

    @property
    def name(self) -> str:
        """File name, derived from the digest of the content."""
        return f"part_{self.digest.sha256[:32]}.pt"

    def read(self) -> dict[str, Any]:
        """Read the file and verify its digest.

        Raises:
            RunDirectoryError: If the file is damaged or missing.
        """
        try:
            data = b"".join(verified_blocks(self.directory / self.name, self.digest))
        except DamagedError as error:
            raise RunDirectoryError(f"checkpoint {self.directory} is damaged: {error}") from error
        return loads(data, self.directory / self.name)


Parts: TypeAlias = "Mapping[tuple[TreePath, str], PartFile]"
"""Part files, indexed by the path in the state and the version of the part."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(Position):
    """Contents of a checkpoint manifest."""

    path: Path
    files: dict[str, FileDigest]
    settings: str
    """Configuration of the run as text."""

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        """Sort key that orders the checkpoints of a run by time."""
        return self.epoch, self.updates, sort_key(self.path.name)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointInfo):
    """An undamaged checkpoint, with its saved state."""

    state: dict[str, Any] = field(repr=False, compare=False)

    parts: Parts = field(repr=False, compare=False)
    """Files of the parts of the state."""


def sort_key(name: str) -> tuple[int, ...]:
    """Return a sort key by epoch, update and number; empty for other names."""
    found = NAME.fullmatch(name)
    return (int(found[1]), int(found[2] or -1), int(found[3] or 1)) if found else ()


def make_manifest(files: Mapping[str, FileDigest], position: Position, settings: str = "") -> bytes:
    """Return the manifest of a new checkpoint.

    Raises:
        ValueError: If there are too many files to read back.
    """
    score = position.score
    content = {
        "schema": SCHEMA,
        "versions": dict(versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "epoch": int(position.epoch),
        "updates": int(position.updates),
        "env_steps": int(position.env_steps),
        "within_epoch": bool(position.within_epoch),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "files": {name: {"sha256": x.sha256, "bytes": x.nbytes} for name, x in files.items()},
        "bytes": sum(item.nbytes for item in files.values()),
        "settings": settings,
    }
    if len(manifest := seal(content)) > MAX_MANIFEST_BYTES:
        raise ValueError(
            f"a checkpoint cannot have {len(files)} files; use fewer, larger parts of the state"
        )
    return manifest


def read_manifest(path: Path) -> CheckpointInfo:
    """Read the manifest of the checkpoint in `path`.

    Raises:
        DamagedError: If the manifest is missing or damaged, or belongs to a different checkpoint.
        RunDirectoryError: If the checkpoint was written by an incompatible version.
    """
    if not path.is_dir():
        raise DamagedError("the directory is missing")
    with undamaged(path / MANIFEST):
        data = read_regular(path / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        content = unseal(data)
    except ValueError as error:
        raise DamagedError(f"{MANIFEST}: {error}") from error
    try:
        info = _info(path, content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST}: invalid content ({error!r})") from error
    if path.name.partition("-")[0] != info.name:
        raise DamagedError(f"{MANIFEST} belongs to {info.name}")
    return info


def _info(path: Path, content: dict[str, Any]) -> CheckpointInfo:
    """Check the content of a manifest and return it as a `CheckpointInfo`."""
    schema, score = content["schema"], content["score"]
    if type(schema) is not int or schema < 1:
        raise ValueError(f"schema {schema!r}")
    if schema != SCHEMA:
        version = content["versions"]["maze_train"]
        remedy = f"resume the run with maze_train {version}, or start a new run"
        raise RunDirectoryError(
            f"checkpoint {path} was written by maze_train {version} with schema {schema}, this "
            f"version reads schema {SCHEMA}: "
            f"{'install a newer maze_train' if schema > SCHEMA else remedy}"
        )
    files = {n: FileDigest(item["sha256"], item["bytes"]) for n, item in content["files"].items()}
    values = {key: content[key] for key in KINDS}
    if (
        STATE not in files
        or any(not re.fullmatch(r"[\w-][\w.-]*", name) for name in files)
        or any(type(item.nbytes) is not int for item in files.values())
        or any(type(values[key]) is not kind for key, kind in KINDS.items())
        or any(values[key] < 0 for key, kind in KINDS.items() if kind is int)
        or type(score) not in (type(None), float)
        or not math.isfinite(score or 0.0)
    ):
        raise ValueError("a value is of the wrong type")
    return CheckpointInfo(**values, score=score, path=path, files=files)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in `path` and verify all of its files.

    Parts are verified immediately, and read and verified again on access.

    Raises:
        DamagedError: If a file is missing or damaged.
        RunDirectoryError: If the checkpoint was written by an incompatible version.
    """
    info = read_manifest(path)
    for file_name, expected in info.files.items():
        if file_name != STATE:
            for _ in verified_blocks(path / file_name, expected):
                pass
    parts = {}

    def open_part(tree_path: TreePath, version: str, file_name: str) -> StatePart:
        check_content(file_name in info.files, f"the part {file_name!r} is not in {MANIFEST}")
        file = PartFile(path, info.files[file_name])
        check_content(file.name == file_name, f"{file_name} is not a part")
        parts[tree_path, version] = file
        return StatePart(version, file.read)

    data = b"".join(verified_blocks(path / STATE, info.files[STATE]))
    try:
        state = loads(data, STATE, open_part)
    except RunDirectoryError as error:
        raise DamagedError(str(error)) from error
    return Checkpoint(**vars(info), state=state, parts=parts)


class FilesWriter:
    """Writes the files of one checkpoint; syncs the files to disk, but not the directory.

    Args:
        directory: Empty directory to write to.
        final: Final name of the directory.
        earlier: Written or verified parts of an earlier checkpoint. Parts with the same path and
            version have the same content.
    """

    def __init__(self, directory: Path, final: Path, earlier: Parts) -> None:
        self._directory = directory
        self._final = final
        self._earlier = earlier
        self.digests: dict[str, FileDigest] = {}
        self.parts: dict[tuple[TreePath, str], PartFile] = {}

    def write(self, name: str, data: bytes) -> None:
        """Write a file; raises OSError if writing fails."""
        write_synced(self._directory / name, data)
        self.digests[name] = FileDigest.of(data)

    def write_part(self, path: TreePath, part: StatePart) -> str:
        """Write a part of the state, or link the earlier file; return the file name.

        Raises:
            TypeError: If the part contains an unsupported type.
            OSError: If writing fails.
        """
        key = (path, part.version)
        file = self._earlier.get(key)
        if file is None or not self._share(file):
            data = dumps(part.read())
            file = PartFile(self._final, FileDigest.of(data))
            if file.name not in self.digests:
                write_synced(self._directory / file.name, data)
        self.digests[file.name] = file.digest
        self.parts[key] = PartFile(self._final, file.digest)
        return file.name

    def _share(self, file: PartFile) -> bool:
        """Link or copy a file of an earlier checkpoint; return whether the file was undamaged."""
        source, target = file.directory / file.name, self._directory / file.name
        if file.name in self.digests:
            return True
        try:
            if os.lstat(source).st_size == file.digest.nbytes:
                os.link(source, target)
                return True
        except OSError:  # Hard links are not supported, or the file has too many.
            # On network file systems, the link may exist despite the error.
            with suppress(FileNotFoundError):
                target.unlink()
        try:
            write_synced(target, b"".join(verified_blocks(source, file.digest)))
        except DamagedError:
            return False
        return True


class CheckpointStore:
    """Checkpoints of one run. Only one process may write (see `core.files.exclusive`).

    Args:
        directory: `<run directory>/checkpoints`; created by `save` if the run directory exists.
        config: Settings; None: default settings.
        mode: `max` if larger scores are better, `min` if smaller scores are better.
        settings: Configuration of the run as text, stored in every checkpoint.
        warn: Reports errors that do not stop the run; prints to stderr by default.
        ranks: Ranks of the run; only rank 0 writes. None: a single rank.

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
        ranks: Ranks | None = None,
    ) -> None:
        check_one_of("mode", mode, ("max", "min"))
        self._ranks = OneRank() if ranks is None else ranks
        self.directory = directory
        self.config = config or CheckpointConfig()
        self._settings = settings
        self._sign = 1.0 if mode == "max" else -1.0
        self._warn = warn
        self._parts: Parts = {}  # Parts of the last checkpoint written or loaded.
        self.latest: Path | None = None
        """Path of the last checkpoint written or loaded."""
        self._position: Position | None = None
        self._saved_at = time.monotonic()

    def is_due(self, epoch: int) -> bool:
        """Return whether a checkpoint is due after epoch `epoch`, counted from 1."""
        interval = 0 if self.config.interval_steps else self.config.interval
        return (interval > 0 and epoch % interval == 0) or self.is_overdue()

    def is_overdue(self, steps_before: int = 0, steps: int = 0) -> bool:
        """Return whether a multiple of `interval_steps` or the limit `interval_minutes` was passed.

        Args:
            steps_before: Environment steps before the update.
            steps: Environment steps after the update.

        Returns:
            The result of rank 0, since clocks may differ.
        """
        minutes = self.config.interval_minutes
        return self._ranks.first(
            lambda: (
                crosses(self.config.interval_steps, steps_before, steps)
                or (minutes > 0 and time.monotonic() - self._saved_at >= 60.0 * minutes)
            )
        )

    def holds(self, epoch: int, updates: int, within_epoch: bool) -> bool:
        """Return whether the last checkpoint was written at this point of training."""
        last, here = self._position, (epoch, updates, within_epoch)
        return last is not None and here == (last.epoch, last.updates, last.within_epoch)

    def save(self, state: dict[str, Any], position: Position) -> Path | None:
        """Write a checkpoint atomically and sync it to disk.

        If the process is killed while writing, the previous checkpoints remain valid. After
        writing, old checkpoints are removed, including the checkpoints of an abandoned branch (at
        the same or a later point of training).

        Each `StatePart` is written to a separate file. If the version of a part is the same as in
        the last written or loaded checkpoint, both checkpoints share the file, and the part is not
        read. Other parts are read and written one by one.

        Args:
            state: State to save, see `state_files.dumps`.
            position: Training progress.

        Returns:
            Path of the checkpoint; None (after a warning) if writing failed.

        Raises:
            TypeError: If the state contains an unsupported type.
            ValueError: If the state has too many parts (tens of thousands).
        """
        saved = self._ranks.first(lambda: str(self._save(state, position) or ""))
        if not saved:
            return None
        self.latest, self._position = Path(saved), position
        return self.latest

    def _save(self, state: dict[str, Any], position: Position) -> Path | None:
        try:
            check_guarded(self.directory)
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
        """Write the files, rename the directory, update `latest`; undo everything on failure."""
        if not self.directory.is_dir():
            self.directory.mkdir()  # Parents are not created: the run may have been removed.
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
            if self._pointer() != final.name:  # `latest` may already name the new checkpoint.
                with suppress(OSError):
                    self._remove(final)
            raise
        self._parts = files.parts
        with suppress(OSError):  # The pointer has been written.
            fsync_directory(self.directory)
        return final

    def _unused(self, name: str) -> Path:
        """Return an unused path; an abandoned branch may already use the plain name."""
        path, number = self.directory / name, 1
        while path.exists():
            number += 1
            path = self.directory / f"{name}-{number}"
        return path

    def _work(self, path: Path) -> Path:
        return path.with_name(f".tmp-{path.name}-{os.getpid()}")

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint atomically; raises OSError on failure."""
        work = self._work(path)
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # For example, on a full disk.
            os.rename(path, work)
            path = work
        shutil.rmtree(path)

    def _last_good(self) -> str:
        names, pointer = [info.path.name for info in self.list()], self._pointer()
        last = pointer if pointer in names else names[-1] if names else None
        return f"the last valid checkpoint is {last}" if last else "no checkpoint exists"

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
        """Remove files left by killed processes; call before training."""
        if not self._ranks.is_first:
            return
        remove_leftovers(self.directory)
        for path in self.directory.glob(".tmp-*"):
            found = re.fullmatch(r"\.tmp-.+-(\d+)", path.name)
            if found and (int(found[1]) == os.getpid() or not process_runs(int(found[1]))):
                shutil.rmtree(path, ignore_errors=True)

    def point_to(self, info: CheckpointInfo) -> None:
        """Write the checkpoint to resume from to `latest`, which abandons later checkpoints."""
        if self._pointer() != info.path.name:
            self._point_to(info.path.name)
            fsync_directory(self.directory)
        self.latest, self._position = info.path, info

    def _point_to(self, name: str) -> None:
        if not self._ranks.is_first:
            return
        with atomic_write(self.directory / LATEST) as file:
            file.write(f"{name}\n".encode())

    def load(self, name: str | None = None) -> Checkpoint | None:
        """Load the newest undamaged checkpoint; all files are verified.

        Tries the checkpoint named by `latest` first, then earlier checkpoints. Without a valid
        `latest`, tries all checkpoints, newest first. Prints a warning for each damaged checkpoint.

        Args:
            name: Name of the checkpoint to load; None: the newest.

        Returns:
            The checkpoint; None if there is no checkpoint.

        Raises:
            RunDirectoryError: If all checkpoints are damaged, the checkpoint `name` is damaged or
                missing, or the checkpoint was written by an incompatible version.
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
            self._warn(f"{self.directory / LATEST} is {found}; trying all checkpoints")
        for path in paths:
            try:
                return read_checkpoint(path)
            except DamagedError as problem:
                self._warn(f"checkpoint {path} is damaged and skipped: {problem}")
        raise RunDirectoryError(
            f"{self.directory} has no undamaged checkpoint ({len(paths)} damaged); remove "
            f"the directory to train from the beginning, or restore it from a backup"
        )

    def _in_order(self) -> tuple[tuple[Path, ...], bool]:
        """Return directories in the order of `load`, and whether `latest` is valid."""
        paths, target = self._directories()[::-1], self._pointer()
        named = [path for path in paths if path.name == target]
        if named:
            place = sort_key(named[0].name)[:2]
            paths = (*named, *(path for path in paths if sort_key(path.name)[:2] < place))
        return paths, bool(named)

    def find(self, name: str | None = None) -> CheckpointInfo | None:
        """Return the manifest of the newest checkpoint with an undamaged manifest, if any.

        Only manifests are read. `load` returns an earlier checkpoint if a different file is
        damaged.
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
        """Return the content of `latest`; None if the content is not the name of a checkpoint."""
        try:
            words = read_regular(self.directory / LATEST, 1000).decode("ascii").split()
        except (OSError, UnicodeDecodeError):
            return None
        return words[0] if words and sort_key(words[0]) else None

    def _directories(self) -> tuple[Path, ...]:
        """Return the directories of all checkpoints, including damaged ones, oldest first."""
        paths = self.directory.glob("epoch_*")
        found = [path for path in paths if sort_key(path.name) and path.is_dir()]
        return tuple(sorted(found, key=lambda path: sort_key(path.name)))

    def _survey(self) -> tuple[tuple[CheckpointInfo, ...], set[Path]]:
        """Return all manifests, oldest first, and the paths of checkpoints that cannot be read.

        A checkpoint may be undamaged but unreadable: after a disk error, or if a different version
        wrote the checkpoint.
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
