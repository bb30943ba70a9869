"""The settings that decide the results of a run, and digests of the files that they name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.config.writing import config_to_dict
from maze_train.core.conversion import TUPLE, is_within
from maze_train.core.files import LOCK, read_regular
from maze_train.core.names import DIGESTS
from maze_train.training.config import RANDOM

FREE = (
    "algorithm.device",
    "algorithm.n_epochs",
    "algorithm.on_damaged",
    "algorithm.on_non_finite",
    "algorithm.patience",
    "algorithm.replay_buffer_storage",
    "algorithm.storage",
    "callbacks",
    "checkpoint",
    "evaluation.dump_interval",
    "evaluation.final_episodes",
    "learner_group",
    "moved",
    "resume",
    "run_dir",
    "runner",
    "total_steps",
    "tracking",
    "trust",
)
"""Settings, and sections of settings, that may differ: where a run takes place, how long, and what
it writes."""

FIXED = ("runner.concurrency", "runner.envs_per_actor", "runner.fast_dev_run")
"""Settings within these that may not."""

MOST_HASHED_NBYTES, MOST_FILES_NBYTES = 1 << 26, 1 << 20
"""Most bytes of which a digest is made, and of the file that keeps them."""


def matters(key: str, config: TrainConfig) -> bool:
    """Whether another value of a setting would change the results."""
    if key in FIXED:
        return True
    if key == "evaluation.concurrency":
        # Random numbers are drawn for all at once.
        sources = [own.source for own in config.policies.values()]
        is_random = RANDOM in (*sources, *config.evaluation.opponents.values())
        return is_random or not config.evaluation.deterministic
    return not is_within(key, FREE)


def leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by dotted name; lists and tuples are settings, too."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and TUPLE in value:
            value = value[TUPLE]  # once stored as a list
        if isinstance(value, Mapping):
            found.update(leaves(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def are_texts(value: Any) -> bool:
    """Whether a value is a list of texts that is not empty."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(entry, str) for entry in value)
    )


def place_of_name(name: str) -> Path | None:
    """The file or directory that a text names, also that of `<run>@<version>` and `<run>:<policy>`.

    None: it names none. Words such as `auto` are no names of files.
    """
    for place in (name, name.rpartition("@")[0], name.rpartition(":")[0]):
        if (os.sep in place or Path(place).suffix) and Path(place).exists():
            return Path(place)
    return None


def content_digest(names: str | list[str]) -> str:
    """SHA-256 of the files that a setting names; empty: it names none, or they are large."""
    digest, left = hashlib.sha256(), MOST_HASHED_NBYTES
    for name in [names] if isinstance(names, str) else names:
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
    """Digests of the files and runs that settings name which may not change on resume."""
    found = {
        key: content_digest(value)
        for key, value in leaves(config_to_dict(config)).items()
        if (isinstance(value, str) or are_texts(value)) and matters(key, config)
    }
    return {key: digest for key, digest in found.items() if digest}


def digests_of_run(directory: Path) -> dict[str, str]:
    """The digests that a run kept when it began; none if they cannot be read."""
    try:
        found = json.loads(read_regular(directory / DIGESTS, MOST_FILES_NBYTES))
        return {str(key): str(digest) for key, digest in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
