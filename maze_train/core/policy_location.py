"""Location of a saved policy: a run, a version of a run, a directory or a Hub repository."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from maze_train.core.errors import ConfigError, did_you_mean
from maze_train.core.hub import local_directory
from maze_train.core.names import BEST, CONFIG, POLICIES, WEIGHTS
from maze_train.core.run_directory import RunDirectory, checkpoint_name


@dataclass(frozen=True)
class PolicyLocation:
    """Location of a saved policy: `<run>`, `<run>@<version>` or the directory of the policy.

    Attributes:
        run: Run that saved the policy.
        directory: Directory of the policy or of a checkpoint, or of the run if `version` is set.
        version: Version to look up in the checkpoints; empty if the directory is known.
    """

    run: RunDirectory
    directory: Path
    version: str = ""

    @classmethod
    def named(cls, name: str | os.PathLike[str]) -> PolicyLocation:
        """Return the location of a policy; Hub repositories are downloaded.

        Raises:
            RunDirectoryError: If the download fails, see `core.hub.fetched`.
        """
        path = local_directory(name)
        run, at, version = str(path).rpartition("@")
        if RunDirectory(path).best.is_dir():
            return cls(RunDirectory(path), RunDirectory(path).best)
        if path.exists() or not at:
            return cls(RunDirectory.of_policy(path), path)
        return cls(RunDirectory(Path(run)), Path(run), version)

    @property
    def is_checkpoint(self) -> bool:
        """Whether the policy is part of a checkpoint."""
        return checkpoint_name(self.directory) is not None

    @property
    def settings(self) -> Path:
        """Directory with the configuration."""
        return self.run.path if self.is_checkpoint else self.directory

    def check_files(self, name: str) -> None:
        """Check that the configuration exists, and that the policy exists if `version` is not set.

        Args:
            name: Name of the policy in the settings.

        Raises:
            ConfigError: If a file is missing.
        """
        needed = [CONFIG] if self.version or self.is_checkpoint else [CONFIG, WEIGHTS]
        for file in needed:
            if not (self.settings / file).is_file():
                raise ConfigError(
                    "run",
                    f"there is no saved policy: expected the directory of a run with {BEST}/, or "
                    f"one of its {POLICIES}/epoch_<n>, with {file}{policy_nearby(self.settings)}",
                    name,
                )


def policy_nearby(directory: Path) -> str:
    """Return a hint: the best policy of a parent run, or that the directory does not exist."""
    for parent in directory.parents[:2]:
        if (parent / BEST / WEIGHTS).is_file():
            return did_you_mean([parent / BEST])
    return "" if directory.exists() else "; there is no such directory"
