"""Repositories of the Hugging Face hub, named where the directory of a run may be named.

`hf://<owner>/<repository>` is the newest policy there, `hf://<owner>/<repository>@<revision>` that
of a branch, a tag or a commit.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from maze_train.core.checks import expanded
from maze_train.core.errors import RunDirectoryError
from maze_train.core.notices import notify
from maze_train.core.targets import import_extra

POLICY_FILES = ("policy.pt", "spaces.json", "config.yaml", "score.json")
"""Files of a saved policy. Nothing else is downloaded, whatever else a repository holds."""

MAX_NBYTES = 1 << 32
"""Bytes of these files together, at most."""

HUB = "hf://"
WORD = r"\w[\w.-]*"  # no part of a path that leads upwards
REPOSITORY = re.compile(rf"{WORD}/{WORD}", re.ASCII)
BRANCH = re.compile(rf"{WORD}(?:/{WORD})*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a repository, and not of a directory."""
    return str(name).startswith(HUB)


def local_directory(name: str | os.PathLike[str]) -> Path:
    """The directory that a name leads to; that of a repository is a download, see `fetched`."""
    return fetched(str(name)) if is_on_hub(name) else Path(expanded(name))


def at_commit(name: str, directory: Path) -> str:
    """The name of a repository at the commit that was downloaded into a directory."""
    return f"{name.partition('@')[0]}@{directory.name}"


def hub_package() -> Any:
    """The package of the hub; its errors are those of the HTTP library that its version uses.

    Raises:
        MissingExtraError: If it is not installed.
    """
    needed = ("huggingface_hub", "hub", "the Hugging Face hub")
    import_extra(*needed, "huggingface_hub.errors")  # the package imports its modules late
    return import_extra(*needed)


def fetched(name: str) -> Path:
    """The files of a policy in a repository, in the cache of the hub's library.

    If the hub cannot be reached, an earlier download is used, and a line says so. For a
    commit that was, the hub is not asked.

    Args:
        name: `hf://<owner>/<repository>[@<revision>]`.

    Raises:
        MissingExtraError: If the extra `hub` is not installed.
        RunDirectoryError: If the name is malformed, repository or revision are not there, the files
            are too large, or the hub cannot be reached and there is no earlier download.
    """
    repo_id, at, branch = name.removeprefix(HUB).partition("@")
    revision = branch if at else None
    if not REPOSITORY.fullmatch(repo_id) or (at and not BRANCH.fullmatch(branch)):
        raise RunDirectoryError(
            f"{name} names no repository: expected {HUB}<owner>/<repository>, and if it is not the "
            "newest policy, @ and a branch, a tag or a commit"
        )
    package = hub_package()
    known = {"repo_id": repo_id, "revision": revision, "allow_patterns": list(POLICY_FILES)}
    found = _earlier(package, known) if COMMIT.fullmatch(branch) else None
    if found is not None:
        return found
    try:
        info = package.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        _check_size(name, info.siblings or [])
        return Path(package.snapshot_download(**known))
    except package.errors.RepositoryNotFoundError as error:
        problem = "there is no such repository, or it is private: log in by `hf auth login`"
        raise RunDirectoryError(f"{name}: {problem}, or set HF_TOKEN") from error
    except package.errors.RevisionNotFoundError as error:
        raise RunDirectoryError(f"{name}: the repository has no revision {revision}") from error
    except RunDirectoryError:
        raise
    except Exception as error:  # connections, time-outs, a hub that is down, HF_HUB_OFFLINE
        problem = f"the hub does not give {name}: {first_line(error)}"
        found = _earlier(package, known)
        if found is None:
            remedy = "it was not downloaded before, so it needs a connection once"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    notify(f"note: {problem}; commit {found.name[:12]} is used, which was downloaded before")
    return found


def _earlier(package: Any, known: dict[str, Any]) -> Path | None:
    """Return the earlier download; None if it is missing or incomplete."""
    with suppress(Exception):
        found = Path(package.snapshot_download(**known, local_files_only=True))
        return found if all((found / file).exists() for file in POLICY_FILES) else None
    return None


def _check_size(name: str, files: list[Any]) -> None:
    """Refuse a policy that would fill the disk, before any of it is downloaded."""
    size = sum(file.size or 0 for file in files if file.rfilename in POLICY_FILES)
    if size > MAX_NBYTES:
        problem = f"the policy has {size:,} bytes: at most {MAX_NBYTES:,} are downloaded"
        raise RunDirectoryError(f"{name}: {problem}")


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its text."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{text and f': {text}'}"
