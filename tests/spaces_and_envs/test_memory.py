"""What was seen some steps ago: a policy with a memory recalls it, one without can only guess."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tiny_problems import Recall

from maze_train import train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.learning

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 128}
A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 16, "epoch_length": 25}
BOTH = pytest.mark.parametrize("algorithm", [A2C, PPO], ids=["a2c", "ppo"])

GUESSING = 1 / Recall.SIGNALS
EPISODES = 60


def best_return(
    tmp_path: Path, algorithm: dict[str, Any], memory: dict[str, Any] | None, steps: int, **keys: Any
) -> float:
    """The best mean return of 60 greedy episodes."""
    result = train(
        env=Recall,
        algorithm={**algorithm, "lr": "linear_0.003", **keys},
        model={"hidden_sizes": [32], "memory": memory},
        evaluation={"n_episodes": EPISODES, "concurrency": 20},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        total_steps=steps,
        seed=0,
        run_dir=str(tmp_path / "run"),
    )
    return float(result.best_metric)


@BOTH
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_memory_recalls_the_signal(tmp_path: Path, cell: str, algorithm: dict[str, Any]) -> None:
    """Every signal is named rightly in the end."""
    assert best_return(tmp_path, algorithm, {"cell": cell, "size": 32}, 50_000) == 1.0


@BOTH
def test_without_a_memory_it_can_only_be_guessed(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """The best is to name the same signal always: 1 / 3, and what chance adds to 60 episodes."""
    assert best_return(tmp_path, algorithm, None, 20_000) < GUESSING + 0.15
