"""Short runs and their files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import yaml

from maze_train import train

QUIET: dict[str, Any] = {
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}
SMALL: dict[str, Any] = {
    "runner.concurrency": 2,
    "algorithm.n_rollout_steps": 16,
    "evaluation.n_episodes": 2,
    "model.hidden_sizes": [8],
    "seed": 1,
    "total_steps": 192,
    "tracking.progress": "quiet",
    "tracking.plot": False,
}
PPO: dict[str, Any] = {
    "algorithm": "ppo",
    "algorithm.batch_size": 16,
    "algorithm.epoch_length": 2,
    "algorithm.n_optimization_epochs": 3,
}
A2C: dict[str, Any] = {"algorithm": "a2c", "algorithm.epoch_length": 2}
SAC: dict[str, Any] = {
    "algorithm": "sac",
    "algorithm.epoch_length": 8,
    "algorithm.n_rollout_steps": 4,
    "algorithm.batch_size": 8,
    "algorithm.initial_buffer_size": 32,
    "algorithm.replay_buffer_size": 1000,
    "algorithm.update_to_data_ratio": 0.25,
}
IMPALA: dict[str, Any] = {
    "algorithm": "impala",
    "algorithm.epoch_length": 3,
    "algorithm.n_rollout_steps": 8,
    "algorithm.num_actors": 2,
    "algorithm.actors_batch_size": 2,
    "algorithm.lr": 0.002,
    "runner.concurrency": 4,
    "tracking.tensorboard": False,
}
ES: dict[str, Any] = {
    "algorithm": "es",
    "algorithm.epoch_length": 2,
    "algorithm.n_rollouts_per_update": 8,
    "algorithm.n_epochs": 3,
    "algorithm.noise_table_size": 200_000,
    "runner.concurrency": 4,
    "evaluation.n_episodes": 3,
    "evaluation.max_episode_steps": 100,
    "model.hidden_sizes": [6],
    "total_steps": 0,
    "tracking.tensorboard": False,
}
ALGORITHMS = {"ppo": PPO, "a2c": A2C, "sac": SAC, "impala": IMPALA, "es": ES}

FORK = {"runner": "local", "runner.start_method": "fork"}
"""Worker processes that start quickly, because they inherit all imports."""


def settings(algorithm: str = "ppo", **overrides: Any) -> dict[str, Any]:
    """Return the settings of a short run on a toy environment."""
    env = {"_target_": "own_envs.SpacesEnv"}
    found = {"env": env, **SMALL, **ALGORITHMS[algorithm], "run_dir": "run", **overrides}
    if algorithm == "es":
        found.pop("algorithm.n_rollout_steps")
    return found


def short_run(run_dir: str | Path | None = "run", algorithm: str = "ppo", **overrides: Any) -> Any:
    """Train with the settings of `settings`."""
    return train(**settings(algorithm, **overrides, run_dir=run_dir))


def rows(run_dir: str | Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv as text, without times."""
    with (Path(run_dir) / "metrics.csv").open() as file:
        return [
            {name: cell for name, cell in row.items() if not name.startswith("time/")}
            for row in csv.DictReader(file)
        ]


def summary(run_dir: str | Path) -> dict[str, Any]:
    """Return the content of summary.json."""
    found: dict[str, Any] = json.loads((Path(run_dir) / "summary.json").read_text())
    return found


def written_config(run_dir: str) -> dict[str, Any]:
    """Return the content of config.yaml."""
    found: dict[str, Any] = yaml.safe_load(Path(run_dir, "config.yaml").read_text())
    return found


def everything(path: Path) -> list[str]:
    """Return all files and directories below a path."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def file_contents(path: str | Path) -> dict[Path, bytes]:
    """Return all files below a path with their contents."""
    return {p: p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}
