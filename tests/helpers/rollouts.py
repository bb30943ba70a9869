"""Short rollouts and their files."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from maze_train import run_rollout

RANDOM: dict[str, Any] = {"policy": "random", "env": "CartPole-v1"}


def play(**settings: Any) -> Any:
    """Run a short rollout."""
    return run_rollout(**{"n_episodes": 5, "progress": "quiet", "output_dir": "out", **settings})


def rows(directory: str | Path = "out") -> list[dict[str, str]]:
    """Return the rows of evaluation.csv."""
    with Path(directory, "evaluation.csv").open() as file:
        return list(csv.DictReader(file))


def numbers() -> list[int]:
    """Return the episode numbers in evaluation.csv."""
    return [int(row["number"]) for row in rows()]
