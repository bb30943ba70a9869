"""Which process steps the environments makes no difference to any number."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday

from maze_train import train

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NOT_COMPARED = ("time/", "population/")
"""Clocks, and what depends on which process is faster."""

ENVS: dict[str, dict[str, Any]] = {
    "discrete": {"id": "CartPole-v1"},
    "continuous": {"id": "Pendulum-v1", "max_episode_steps": 30},
    "dict": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "box"}},
}
STEPS: dict[str, Any] = {"n_rollout_steps": 20}
COLLECTED: dict[str, dict[str, Any]] = {
    "es": {"n_rollouts_per_update": 10, "noise_table_size": 20_000, "max_steps": 20}
}
OWN: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.batch_size": 32},
    "sac": {
        "algorithm.batch_size": 16,
        "algorithm.initial_buffer_size": 100,
        "algorithm.update_to_data_ratio": 0.5,
        "model.hidden_sizes": [16],
    },
}


def metrics(run_dir: Path, env: str, algorithm: str, **runner: Any) -> list[dict[str, str]]:
    """What a run with five environments writes to metrics.csv, times aside."""
    train(
        env=ENVS[env],
        algorithm={"name": algorithm, "epoch_length": 2, **COLLECTED.get(algorithm, STEPS)},
        runner={"concurrency": 5, **runner},
        evaluation={"n_episodes": 3, "concurrency": 2},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        seed=11,
        total_steps=600,
        run_dir=str(run_dir),
        **OWN.get(algorithm, {}),
    )
    with (run_dir / "metrics.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if not name.startswith(NOT_COMPARED)}
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "sac", "es"])
@pytest.mark.parametrize("env", everyday(1, ENVS))
def test_the_local_runner_writes_the_metrics_of_the_dev_runner(
    tmp_path: Path, env: str, algorithm: str
) -> None:
    """Equal metrics.csv, to the last digit, with 1, 2 and 3 workers; nothing is left behind."""
    expected = metrics(tmp_path / "dev", env, algorithm, name="dev")
    assert len(expected) >= 2
    assert float(expected[-1]["train/episodes"]) > 0
    for n_workers in (1, 2, 3):
        run_dir = tmp_path / f"local{n_workers}"
        assert metrics(run_dir, env, algorithm, name="local", n_workers=n_workers) == expected
