"""Exported policies of every family: accuracy, file size, and speed compared with `load_policy`.

    python benchmarks/export.py --work outputs/export

Each family is trained for a few thousand steps and exported in every format. Existing runs are not
repeated. Speeds are medians over rounds in which all formats take turns.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train import RolloutGenerator, load_policy, make_env, train
from maze_train.spaces.describe import unflatten_value
from maze_train.tools.export import FORMATS, PolicyStep, played_observations

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, ROUNDS, SECONDS = 4_096, 7, 0.1
BATCHES = (1, 64)


class Yard(gymnasium.Env[Any, Any]):
    """Drive to the middle of a yard; observations are position, gear and an action mask."""

    actions: ClassVar = {
        "choice": spaces.Discrete(4),
        "choices": spaces.MultiDiscrete([3, 4]),
        "hybrid": spaces.Dict({"push": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(3)}),
    }

    def __init__(self, kind: str = "hybrid", masked: bool = False) -> None:
        self.action_space = self.actions[kind]
        self.masked = masked
        parts: dict[str, spaces.Space[Any]] = {
            "at": spaces.Box(-np.inf, np.inf, (6,), np.float64),
            "gear": spaces.Discrete(3),
        }
        if masked:
            parts["action_mask"] = spaces.MultiBinary(4)
        self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start at a random position."""
        super().reset(seed=seed)
        self.at, self.steps = self.np_random.normal(50.0, 10.0, 6), 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply the action."""
        push = action["push"] if isinstance(action, dict) else np.atleast_1d(action) - 1.5
        self.at[: len(push)] += push
        self.at += self.np_random.normal(0.0, 1.0, 6)
        self.steps += 1
        return self.observe(), -float(np.abs(self.at).mean()), False, self.steps == 100, {}

    def observe(self) -> dict[str, Any]:
        """Return position, gear and mask."""
        found: dict[str, Any] = {"at": self.at.copy(), "gear": self.np_random.integers(3)}
        if self.masked:
            found["action_mask"] = (self.np_random.random(4) < 0.5).astype(np.int8)
            found["action_mask"][self.steps % 4] = 1
        return found


def yard(**kwargs: Any) -> dict[str, Any]:
    """Return the settings of the environment `Yard`."""
    return {"_target_": "export.Yard", "kwargs": kwargs}


LSTM = {"memory": {"cell": "lstm", "size": 64}}
RUNNING = {"normalization": {"mode": "running"}}
FAMILIES: dict[str, dict[str, Any]] = {
    "PPO, vectors": {"env": "CartPole-v1"},
    "PPO, images of Atari": {"env": "ALE/Pong-v5"},
    "PPO, LSTM": {"env": "CartPole-v1", "model": LSTM},
    "PPO, Dict with normaliser, hybrid": {"env": yard(), "model": RUNNING},
    "PPO, masks": {"env": yard(kind="choice", masked=True), "model": RUNNING},
    "PPO, MultiDiscrete": {"env": yard(kind="choices")},
    "SAC": {"env": "Pendulum-v1", "algorithm": "sac"},
    "TD3": {"env": "Pendulum-v1", "algorithm": "td3"},
    "DQN": {"env": "CartPole-v1", "algorithm": "dqn"},
    "ES": {"env": "CartPole-v1", "algorithm": "es"},
    "BC, hybrid": {"env": yard(), "algorithm": "bc"},
    "PPO, two agents with masks": {"env": "pettingzoo:classic/tictactoe_v3"},
}


def main() -> None:
    """Train, export, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/export"))
    parser.add_argument("--only", nargs="*", default=list(FAMILIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| Family | Largest difference | kB | load_policy | {' | '.join(FORMATS)} |")
    print(f"| {' | '.join(['---'] * (4 + len(FORMATS)))} |")
    for name in args.only:
        run_dir = args.work / "".join(c if c.isalnum() else "_" for c in name)
        if not (run_dir / "summary.json").exists():
            teach(FAMILIES[name], run_dir)
        print(f"| {name} | {' | '.join(figures(run_dir))} |", flush=True)


def teach(settings: dict[str, Any], run_dir: Path) -> None:
    """Train a short run."""
    settings = {"total_steps": STEPS, "seed": 0, "evaluation": {"n_episodes": 1}, **settings}
    if settings.get("algorithm") == "bc":
        with RolloutGenerator(Yard) as generator:
            settings["runner"] = {"dataset": generator.rollout(20)}
    train(run_dir=str(run_dir), **settings, **{"tracking.progress": "quiet"})


def figures(run_dir: Path) -> list[str]:
    """Return the cells of a row: largest difference, sizes by format, actions per second."""
    trust, policy = ["export"], load_policy(run_dir)
    env = lambda: make_env(run_dir, trust=trust)  # noqa: E731  # like user code
    rows, step = played_observations(env, policy), PolicyStep(policy)
    exports = {
        kind: policy.export(run_dir / f"policy{way.suffix}", kind, observations=rows)
        for kind, way in FORMATS.items()
    }
    speeds: list[list[str]] = [[] for _ in range(1 + len(exports))]
    for n in BATCHES:
        leaves = {key: leaf[:n] for key, leaf in rows.items()}
        observations = unflatten_value(policy.observation_space, leaves.get("", leaves))
        inputs = step.inputs(leaves, torch.zeros(n, step.state_size))
        calls: list[Callable[[], Any]] = [partial(policy.act, observations)]
        for kind, export in exports.items():
            calls.append(partial(FORMATS[kind].load(export.path.read_bytes()), inputs))
        for cells, rate in zip(speeds, rates(calls), strict=True):
            cells.append(f"{float(f'{n * rate:.2g}'):,.0f}")
    return [
        f"{max(export.differences.largest for export in exports.values()):.0e}",
        ", ".join(f"{export.path.stat().st_size / 1e3:.0f}" for export in exports.values()),
        *(" / ".join(cells) for cells in speeds),
    ]


def rates(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the median calls per second of each function; the functions take turns."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, own in zip(calls, found, strict=True):
            for _ in range(20):
                call()
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < SECONDS:
                call()
                count += 1
            own.append(count / (time.perf_counter() - began))
    return [float(np.median(own)) for own in found]


if __name__ == "__main__":
    main()
