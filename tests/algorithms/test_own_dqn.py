"""A custom off-policy algorithm requires no changes of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from maze_train import load_policy, train

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: dict[str, Any] = {
    "algorithm": {
        "_target_": "own_dqn.DQNConfig",
        "lr": 2e-3,
        "tau": 0.05,
        "gamma": 0.95,
        "batch_size": 64,
        "initial_buffer_size": 200,
        "epoch_length": 250,
        "temperature": 0.5,
    },
    "runner.concurrency": 4,
    "evaluation.n_episodes": 5,
    "tracking": {"progress": "quiet", "plot": False, "tensorboard": False},
    "seed": 1,
}


def run(name: str, **changes: Any) -> Any:
    """A short run."""
    return train("CartPole-v1", **{**SETTINGS, "run_dir": name, **changes})


@pytest.mark.learning
@pytest.mark.exhaustive
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the trainer, the builder and the buffer that SAC has."""
    monkeypatch.chdir(tmp_path)
    result = run("run", total_steps=3000)
    assert result.best_metric >= 100
    assert result.history[-1]["train/td_loss"] > 0
    assert load_policy("run", ["own_dqn"]).act(np.zeros(4)) in (0, 1)


def test_it_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints hold targets, buffer and counters."""
    monkeypatch.chdir(tmp_path)
    short = {"algorithm.epoch_length": 25, "evaluation.n_episodes": 1, "total_steps": 200}
    short["algorithm.initial_buffer_size"] = 50
    whole = run("whole", **short)
    run("part", **short, **{"algorithm.n_epochs": 1})
    rest = train(resume="part", trust=["own_dqn"], **{"algorithm.n_epochs": 0})
    for row, other in zip(whole.history, rest.history, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith("time/")} == {
            k: v for k, v in other.items() if not k.startswith("time/")
        }
