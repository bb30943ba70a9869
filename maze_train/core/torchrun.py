"""Environment variables of processes started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from maze_train.core.errors import ConfigError

LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Environment variable set only by torchrun, not by other launchers."""


@dataclass(frozen=True)
class TorchrunVariables:
    """Position of a process in a torchrun job."""

    rank: int
    """Rank of this process among all processes, from 0."""
    count: int
    """Number of processes on all machines."""
    local_rank: int
    """Rank of this process on its machine, which selects the GPU."""
    local_count: int
    """Number of processes on this machine."""
    attempt: int
    """Number of earlier attempts (`--max-restarts`)."""
    host: str
    """Address of the torchrun store."""
    port: int
    """Port of the torchrun store."""
    is_stored: bool
    """Whether torchrun runs the store; otherwise rank 0 does."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> TorchrunVariables | None:
        """Return the values of the variables; None if torchrun did not start this process.

        Raises:
            ConfigError: If a variable is missing or not a number.
        """
        if LAUNCHED not in variables:
            return None

        def number(name: str, least: int = 0) -> int:
            text = variables.get(name, "")
            if not text.isdecimal() or int(text) < least:
                problem = f"expected a number, since {LAUNCHED} is set: unset {LAUNCHED} to train "
                raise ConfigError(name, f"{problem}in one process, or start it by torchrun", text)
            return int(text)

        return cls(
            rank=number("RANK"),
            count=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK"),
            local_count=number("LOCAL_WORLD_SIZE", 1),
            attempt=number("TORCHELASTIC_RESTART_COUNT"),
            host=variables.get("MASTER_ADDR", ""),
            port=number("MASTER_PORT", 1),
            is_stored=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def rank_label(variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of a torchrun process, for error messages; empty for other processes."""
    if LAUNCHED not in variables:
        return ""
    return f"rank {variables.get('RANK')} of {variables.get('WORLD_SIZE')}: "
