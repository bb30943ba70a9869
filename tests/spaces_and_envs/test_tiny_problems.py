"""Every kind of space, each with A2C and PPO: the best return is found, with one set of settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_problems import ORDERS, QUESTIONS, STEPS

from maze_train import train

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 128}
A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 8, "epoch_length": 50}
BOTH = pytest.mark.parametrize("algorithm", [A2C, PPO], ids=["a2c", "ppo"])

TOLERANCE = 0.15
"""What continuous actions may miss in an episode: 0.05 in each entry."""

TABLE = Path(__file__).parents[2] / "docs" / "spaces.md"


def best_return(tmp_path: Path, env: Any, algorithm: dict[str, Any], **overrides: Any) -> float:
    """The best mean return of 60 greedy episodes in 30 000 steps of training."""
    result = train(
        env=env,
        algorithm={**algorithm, "lr": "linear_0.003"},
        evaluation={"n_episodes": 60, "concurrency": 60},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        total_steps=30_000,
        seed=0,
        run_dir=str(tmp_path / "run"),
        **overrides,
    )
    return float(result.best_metric)


@pytest.mark.learning
@BOTH
@pytest.mark.parametrize("space", QUESTIONS)
def test_observations(tmp_path: Path, space: str, algorithm: dict[str, Any]) -> None:
    """All questions are answered rightly."""
    assert best_return(tmp_path, QUESTIONS[space], algorithm) == STEPS


@pytest.mark.learning
@BOTH
@pytest.mark.parametrize("space", ORDERS)
def test_actions(tmp_path: Path, space: str, algorithm: dict[str, Any]) -> None:
    """All orders are followed: discrete parts exactly, continuous ones to within 0.05."""
    is_exact = not any(word in space for word in ("Box", "Dict")) or "integer" in space
    wanted = STEPS if is_exact else STEPS - TOLERANCE
    assert best_return(tmp_path, ORDERS[space], algorithm) >= wanted
