"""Records of each start of a run: its settings, and its environment in `environment.json`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

import torch

from maze_train.config.results import digests_of_files
from maze_train.config.stored import write_config
from maze_train.config.train_config import TrainConfig
from maze_train.config.trust import modules_to_trust, names_in
from maze_train.core.errors import RunDirectoryError
from maze_train.core.files import atomic_write, writable
from maze_train.core.names import DIGESTS
from maze_train.core.notices import warn
from maze_train.core.run_directory import RunDirectory
from maze_train.core.secrets import without_secrets
from maze_train.core.targets import SCRIPT, InlineObject
from maze_train.core.text import json_text

MAX_DIFF_CHARS = 1 << 18
"""Maximum length of a recorded diff; longer diffs are truncated."""

GIT_TIMEOUT_S = 5.0
"""Timeout of each git command in seconds; after a timeout, no diff is recorded."""


class Repository(TypedDict):
    """State of a git repository that contains code of the run."""

    directory: str
    commit: str
    branch: str
    diff: str | None
    """Changes to tracked files since the commit; None if they were not recorded."""


class Start(TypedDict):
    """Record of a start of a run (new or resumed)."""

    time: str
    command: list[str]
    working_directory: str
    seed: int | None
    checkpoint: str | None
    """Checkpoint that the run was resumed from."""
    host: str
    platform: str
    cpus: int | None
    gpus: list[str]
    python: str
    packages: dict[str, str]
    repositories: list[Repository]


def record_start(run: RunDirectory, config: TrainConfig, text: str, checkpoint: str | None) -> None:
    """Write the settings of a start, and append a record of the start to `environment.json`.

    For a new run, the digests of the files named in the settings are also written. If
    `environment.json` cannot be written, a warning is printed.

    Args:
        run: Directory of the run; must be locked.
        config: Configuration of the run.
        text: `config` as text.
        checkpoint: Name of the checkpoint that the run is resumed from.

    Raises:
        ConfigError: If the settings or the digests cannot be written.
    """
    digests = None if checkpoint else digests_of_files(config)
    if digests:
        with writable("run_dir", run.path), atomic_write(run.path / DIGESTS) as file:
            file.write(json_text(digests, indent=1).encode())
    write_config(run.path, text)
    try:
        starts = [*run.read_starts(), _this_start(config, checkpoint)]
        with atomic_write(run.environment) as file:
            file.write((json_text({"starts": starts}, indent=1) + "\n").encode())
    except (OSError, RunDirectoryError) as error:
        warn(f"{run.environment}: this start is not recorded: {error}")


def _this_start(config: TrainConfig, checkpoint: str | None) -> Start:
    # Reading the name of an unused GPU would create a CUDA context.
    is_used = bool(torch.cuda.is_initialized())
    accelerators = range(torch.cuda.device_count() if is_used else 0)
    return Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=without_secrets(sys.orig_argv),
        working_directory=os.getcwd(),
        seed=config.seed,
        checkpoint=checkpoint,
        host=platform.node(),
        platform=platform.platform(),
        cpus=os.cpu_count(),
        gpus=[torch.cuda.get_device_name(i) for i in accelerators],
        python=platform.python_version(),
        packages=dict(installed_packages()),
        repositories=_repositories(_code_directories(config), with_diff=config.tracking.git_diff),
    )


@cache
def installed_packages() -> Mapping[str, str]:
    """Return the version of each installed package by name, without importing packages."""
    # Directory names suffice; reading the metadata of each package takes 0.2 s.
    found: dict[str, str] = {}
    for entry in reversed(sys.path):  # Packages of the first entry are imported.
        for path in sorted(Path(entry).glob("*.dist-info")) if os.path.isdir(entry) else ():
            name, _, version = path.stem.rpartition("-")
            found |= {name: version} if name else {}
    return MappingProxyType(dict(sorted(found.items())))


def _code_directories(config: TrainConfig) -> list[str]:
    """Return the directories that contain code of the run, this package last."""
    inline = [path.module for _, path, _ in names_in(config) if isinstance(path, InlineObject)]
    roots = {name.partition(".")[0]: None for name in (*modules_to_trust(config), *inline)}
    script = os.path.dirname(vars(sys.modules[SCRIPT]).get("__file__") or "")
    is_command = script == sysconfig.get_path("scripts")  # Such as `maze-run`.
    directories = [os.getcwd(), *([] if is_command else [script])]
    for root in roots:
        with suppress(ImportError, ValueError):  # Names without a module, and the main script.
            spec = find_spec(root)
            directories += (spec and spec.submodule_search_locations) or []
            directories.append(os.path.dirname((spec and spec.origin) or ""))
    directories.append(os.path.dirname(__file__))
    return [directory for directory in dict.fromkeys(directories) if os.path.isdir(directory)]


def _repositories(directories: Iterable[str], with_diff: bool) -> list[Repository]:
    """Return the state of the git repositories that contain the directories."""
    found: dict[str, Repository] = {}
    for directory in directories:
        head = _git(directory, "rev-parse", "--show-toplevel", "HEAD", "--abbrev-ref", "HEAD")
        if head is None or head.count("\n") != 3 or head.split("\n")[0] in found:
            continue  # The directory is not in a repository, or there is no commit.
        top, commit, branch = head.splitlines()
        diff = _diff(top) if with_diff else None
        if diff is not None and len(diff) > MAX_DIFF_CHARS:
            diff = f"{diff[:MAX_DIFF_CHARS]}\n[truncated, {len(diff):,} characters]\n"
        found[top] = Repository(directory=top, commit=commit, branch=branch, diff=diff)
    return list(found.values())


def _diff(top: str) -> str | None:
    """Return the changes since the last commit, without running programs of the repository."""
    names = _git(top, "config", "-z", "--name-only", "--list")
    filters = {name.rpartition(".")[0] for name in (names or "").split("\0")}
    filters = {name for name in filters if name.startswith("filter.")}
    if names is None or any("=" in name for name in filters):  # `git -c` cannot set such a name.
        return None
    overrides = [
        word
        for name in sorted(filters)
        for key, value in (("clean", ""), ("smudge", ""), ("process", ""), ("required", "false"))
        for word in ("-c", f"{name}.{key}={value}")
    ]
    # A diff of the files in a submodule would run git with the submodule's configuration.
    options = ("--no-ext-diff", "--no-textconv", "--submodule=short", "--ignore-submodules=dirty")
    return _git(top, *overrides, "diff", *options, "HEAD")


def _git(directory: str, *words: str) -> str | None:
    """Run git without hooks, locks, configured programs and network; None if git fails."""
    safe = {"GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
    command = ["git", "-C", directory, "-c", "core.fsmonitor=false", *words]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            env={**os.environ, **safe},
            stdin=subprocess.DEVNULL,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
