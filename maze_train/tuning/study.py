"""A study of Optuna in a directory, and the sampler and pruner that the settings name."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from maze_train.comparison.runs import is_within
from maze_train.config.search_config import GROUP
from maze_train.config.writing import LOADER, MAX_BYTES, check_plain, writable
from maze_train.errors import ConfigError, RunDirectoryError, did_you_mean, nearest
from maze_train.extras import import_extra
from maze_train.files import atomic_write, open_own, read_regular
from maze_train.tracking.services import flattened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from optuna.storages import BaseStorage
    from optuna.study import Study


STUDY = "search"
"""Name of the study in its journal."""

JOURNAL_FILE, SETTINGS_FILE = "study.journal", "study.yaml"
DEFAULTS = {"median": {"n_warmup_steps": 30}}
"""Arguments of samplers and pruners that differ from those of Optuna."""

MAY_DIFFER = ("tracking", "checkpoint", "trust")
"""Sections of settings that change no value of a trial."""


def optuna() -> Any:
    """The package Optuna, which tells failures only.

    Raises:
        MissingExtraError: If it is not installed.
    """
    package = import_extra("optuna", "optuna", "a search")
    package.logging.set_verbosity(package.logging.ERROR)
    return package


def open_journal(directory: Path) -> BaseStorage:
    """The storage of the study in a directory; each process opens its own.

    Raises:
        RunDirectoryError: If the file can not be read, or holds another journal.
    """
    storages = optuna().storages
    path = directory / JOURNAL_FILE
    with reading_journal(directory):
        os.close(open_own(path, os.O_RDWR))  # Optuna follows links
        storage: BaseStorage = storages.JournalStorage(
            storages.journal.JournalFileBackend(str(path))
        )
    return storage


@contextmanager
def reading_journal(directory: Path) -> Iterator[None]:
    """Let what a journal holds, and Optuna does not expect, be an error of the study's directory.

    Raises:
        RunDirectoryError: If reading it fails in the block.
    """
    damages = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
    try:
        yield
    except (*damages, RuntimeError, AssertionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise RunDirectoryError(f"{directory / JOURNAL_FILE} can not be read: {problem}") from error


def release_journal(directory: Path) -> None:
    """Remove the lock that a process which was killed left on a journal, and Optuna waits for.

    Nobody else may use the directory.

    Raises:
        RunDirectoryError: If it can not be removed.
    """
    lock = directory / f"{JOURNAL_FILE}.lock"
    try:
        lock.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"{lock} can not be removed: {error}; remove it") from error


def open_study(storage: BaseStorage, mode: str) -> Study:
    """The study in a storage, which begins if there is none.

    Args:
        storage: The storage.
        mode: `max` or `min`: whether larger or smaller values are better.
    """
    study: Study = optuna().create_study(
        storage=storage, study_name=STUDY, direction=f"{mode}imize", load_if_exists=True
    )
    return study


def check_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write what the trials of a study have in common, or compare it with what was written.

    Raises:
        ConfigError: If the study in the directory is one of other settings.
        RunDirectoryError: If the file is damaged.
    """
    path = directory / SETTINGS_FILE
    text = yaml.safe_dump(dict(settings), sort_keys=False)
    if not path.exists():
        with writable("study", directory), atomic_write(path) as file:
            file.write(text.encode())
        return
    try:
        text_before = read_regular(path, MAX_BYTES).decode()
        check_plain(text_before)
        before = flattened(yaml.load(text_before, LOADER))
    except (OSError, ValueError, ArithmeticError, yaml.YAMLError, AttributeError) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    now = flattened(yaml.safe_load(text))
    for key in before | now:
        if key not in before and not key.startswith(f"{GROUP}."):
            continue  # a setting of a newer version
        if str(before.get(key)) != str(now.get(key)) and not is_within(key, MAY_DIFFER):
            problem = f"the study in {directory} has {before.get(key)}; to go on with it, set it "
            problem += "so; else name another directory: study=<directory>"
            raise ConfigError(key, problem, now.get(key))


def part_named(kind: str, node: str | Mapping[str, Any], seed: int | None = None) -> Any:
    """A sampler or pruner of Optuna.

    Args:
        kind: `sampler` or `pruner`.
        node: First part of the name of its class, or a mapping with `name` and its arguments.
        seed: For a class that takes one; added to that of the arguments.

    Raises:
        ConfigError: If there is none of that name, or it does not take the arguments.
    """
    given: dict[str, Any] = {"name": node} if isinstance(node, str) else dict(node)
    name, module = str(given.pop("name", "")), getattr(optuna(), f"{kind}s")
    suffix = kind.capitalize()
    classes = {
        key.removesuffix(suffix).lower(): getattr(module, key)
        for key in dir(module)
        if key.endswith(suffix) and not key.startswith("Base")
    }
    cls = classes.get(name.lower())
    if cls is None:
        hint = did_you_mean(nearest(name, classes, count=1), "", " ")
        raise ConfigError(kind, f"unknown; {hint}allowed: {', '.join(classes)}", name)
    if seed is not None and "seed" in inspect.signature(cls).parameters:
        given["seed"] = int(given.get("seed") or 0) + seed
    try:
        return cls(**{**DEFAULTS.get(name.lower(), {}), **given})
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(kind, str(error).replace(".__init__()", ""), node) from error
