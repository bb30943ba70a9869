"""Settings that affect the results of a run, and digests of their files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.conversion import TUPLE, config_to_dict, when_changeable
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import LOCK, read_json
from maze_train.core.names import DIGESTS
from maze_train.training.config import RANDOM

MAX_HASHED_NBYTES, MAX_FILES_NBYTES = 1 << 26, 1 << 20
"""Maximum number of bytes to hash per setting, and maximum size of the file with the digests."""


def matters(key: str, config: TrainConfig) -> bool:
    """Return whether a setting affects the results and must not change on resume.

    Fields marked as `IN_RUN` or `ON_RESUME` may change.
    """
    if key == "evaluation.concurrency":
        # Random actions are sampled for all environments at once, so they depend on `concurrency`.
        sources = [own.source for own in config.policies.values()]
        is_random = RANDOM in (*sources, *config.evaluation.opponents.values())
        return is_random or not config.evaluation.deterministic
    return not when_changeable(config, key)[0]


def leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten settings to dotted names; lists and tuples are leaves."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and TUPLE in value:
            value = value[TUPLE]  # Older versions stored tuples as lists.
        if isinstance(value, Mapping):
            found.update(leaves(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def texts_of(value: object) -> list[str]:
    """Convert a string or a list of strings to a list of strings; empty for other values."""
    entries = value if isinstance(value, list) else [value]
    texts = [entry for entry in entries if isinstance(entry, str)]
    return texts if len(texts) == len(entries) else []


def place_of_name(name: str) -> Path | None:
    """Return the path in `<path>`, `<run>@<version>` or `<run>:<policy>`.

    Returns None if the path does not exist. A plain word such as `auto` is never treated as a path.
    """
    for place in (name, name.rpartition("@")[0], name.rpartition(":")[0]):
        if (os.sep in place or Path(place).suffix) and Path(place).exists():
            return Path(place)
    return None


def content_digest(names: list[str]) -> str:
    """Return the SHA-256 digest of files; empty if files are missing or too large."""
    digest, left = hashlib.sha256(), MAX_HASHED_NBYTES
    for name in names:
        try:
            root = place_of_name(name)
            if root is None:
                return ""
            is_file = root.is_file()
            paths = [root] if is_file else sorted(root.rglob("*")) if root.is_dir() else []
            files = [path for path in paths if path.is_file() and path.name != LOCK]
            left -= sum(path.stat().st_size for path in files)
            if not files or left < 0:
                return ""
            for path in files:
                name = "" if is_file else path.relative_to(root).as_posix()
                digest.update(f"{name}\n".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            return ""
    return digest.hexdigest()


def digests_of_files(config: TrainConfig) -> dict[str, str]:
    """Return the digests of files and runs in settings that must not change on resume."""
    found = {
        key: content_digest(texts)
        for key, value in leaves(config_to_dict(config)).items()
        if (texts := texts_of(value)) and matters(key, config)
    }
    return {key: digest for key, digest in found.items() if digest}


def digests_of_run(directory: Path) -> dict[str, str]:
    """Return the digests stored at the start of a run; empty if they cannot be read."""
    with suppress(RunDirectoryError):
        found = read_json(directory / DIGESTS, MAX_FILES_NBYTES)
        return {str(key): str(digest) for key, digest in found.items()}
    return {}
