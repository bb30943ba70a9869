"""Hugging Face Hub repositories, which can be used in place of run directories.

`hf://<owner>/<repository>` refers to the newest policy of a repository, and
`hf://<owner>/<repository>@<revision>` refers to the policy at a branch, a tag or a commit.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from maze_train.core.checks import expanded
from maze_train.core.errors import RunDirectoryError
from maze_train.core.names import POLICY_FILES
from maze_train.core.notices import notify
from maze_train.core.targets import import_extra

MAX_NBYTES = 1 << 32
"""Maximum total size of the files of a policy, in bytes."""

HUB = "hf://"
WORD = r"\w[\w.-]*"  # Excludes `..`.
REPOSITORY = re.compile(rf"{WORD}/{WORD}", re.ASCII)
BRANCH = re.compile(rf"{WORD}(?:/{WORD})*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Return whether a name refers to a Hub repository instead of a directory."""
    return str(name).startswith(HUB)


def local_directory(name: str | os.PathLike[str]) -> Path:
    """Return the local directory of a name; repositories are downloaded, see `fetched`."""
    return fetched(str(name)) if is_on_hub(name) else Path(expanded(name))


def at_commit(name: str, directory: Path) -> str:
    """Return the repository name and commit of a downloaded directory."""
    return f"{name.partition('@')[0]}@{directory.name}"


def hub_package() -> ModuleType:
    """Import and return `huggingface_hub`.

    The types of connection errors depend on the installed version.

    Raises:
        MissingExtraError: If the package is not installed.
    """
    needed = ("huggingface_hub", "hub", "the Hugging Face hub")
    import_extra(*needed, "huggingface_hub.errors")  # Not imported by the package itself.
    return import_extra(*needed)


def fetched(name: str) -> Path:
    """Download the files of a policy (and no other files) to the Hub cache; return the directory.

    If the Hub is unreachable, an earlier download is used, with a note. Commits that are already in
    the cache are not downloaded again.

    Args:
        name: `hf://<owner>/<repository>[@<revision>]`.

    Raises:
        MissingExtraError: If the extra `hub` is not installed.
        RunDirectoryError: If the name is malformed, the repository or revision does not exist, the
            files are too large, or the Hub is unreachable without an earlier download.
    """
    repo_id, at, branch = name.removeprefix(HUB).partition("@")
    revision = branch if at else None
    if not REPOSITORY.fullmatch(repo_id) or (at and not BRANCH.fullmatch(branch)):
        raise RunDirectoryError(
            f"{name} is not a repository: expected {HUB}<owner>/<repository>, optionally followed "
            "by @ and a branch, tag or commit"
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
        problem = "the repository does not exist or is private: log in with `hf auth login`"
        raise RunDirectoryError(f"{name}: {problem}, or set HF_TOKEN") from error
    except package.errors.RevisionNotFoundError as error:
        raise RunDirectoryError(f"{name}: the repository has no revision {revision}") from error
    except RunDirectoryError:
        raise
    except Exception as error:  # Connection errors, time-outs, an outage, or HF_HUB_OFFLINE.
        problem = f"cannot download {name}: {first_line(error)}"
        found = _earlier(package, known)
        if found is None:
            remedy = "there is no earlier download in the cache"
            raise RunDirectoryError(f"{problem}; {remedy}") from error
    notify(f"note: {problem}; using commit {found.name[:12]} from the cache")
    return found


def _earlier(package: ModuleType, known: dict[str, Any]) -> Path | None:
    """Return an earlier download, or None if there is no complete download."""
    with suppress(Exception):
        found = Path(package.snapshot_download(**known, local_files_only=True))
        return found if all((found / file).exists() for file in POLICY_FILES) else None
    return None


def _check_size(name: str, files: list[Any]) -> None:
    """Raise if a policy is too large to download."""
    size = sum(file.size or 0 for file in files if file.rfilename in POLICY_FILES)
    if size > MAX_NBYTES:
        problem = f"the policy has {size:,} bytes; the limit is {MAX_NBYTES:,}"
        raise RunDirectoryError(f"{name}: {problem}")


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{text and f': {text}'}"
