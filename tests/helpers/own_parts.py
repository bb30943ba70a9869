"""Custom components other than environments, named by `_target_`."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from maze_train import (
    Categorical,
    Evaluator,
    MetricsWriter,
    PPOAlgorithmConfig,
    PPOLearner,
    Trajectory,
    UniformReplayBuffer,
    ValueTransform,
)


class OwnNet(torch.nn.Module):
    """Custom network, for policy, critic or trunk."""

    def __init__(self, observation_space: Any, output_size: int, width: int = 7) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(observation_space.shape[0], width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, output_size),
        )

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(obs)
        return output


class NarrowNet(OwnNet):
    """Network with a wrong number of outputs."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs)[..., :1]


class LastAction(Categorical):
    """Distribution whose mode is always the last action."""

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return torch.full(params.shape[:-1], params.shape[-1] - 1)


class Halved(ValueTransform):
    """h(x) = x / 2; counts its calls."""

    calls: ClassVar[int] = 0

    def transform_value(self, x: Any) -> torch.Tensor:
        Halved.calls += 1
        return torch.as_tensor(x) / 2

    def transform_value_inv(self, x: Any) -> torch.Tensor:
        return torch.as_tensor(x) * 2


class CountingEvaluator(Evaluator):
    """Evaluator that returns its number of calls."""

    closed: ClassVar[int] = 0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls = 0

    def evaluate(self, policy: Any) -> dict[str, float]:
        self.calls += 1
        return {"own/calls": self.scale * self.calls}

    def close(self) -> None:
        CountingEvaluator.closed += 1


class Numbers(Evaluator):
    """Evaluator that returns the given value."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def evaluate(self, policy: Any) -> dict[str, float]:
        return self.given  # type: ignore[no-any-return]  # or none of these


class LineWriter(MetricsWriter):
    """Writer that appends the epoch number to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, row: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{row['epoch']}\n")


@dataclass(kw_only=True)
class OwnPPOConfig(PPOAlgorithmConfig):
    """PPO with a custom setting."""

    name: ClassVar[str] = "own_ppo"
    learner_class: ClassVar[str] = "own_parts.OwnPPOLearner"

    penalty: float = 0.1
    """Value that the learner reads."""


class OwnPPOLearner(PPOLearner):
    """Learner that records its setting at each update."""

    seen: ClassVar[list[float]] = []

    def before_gradient_based_update(self, progress: Any, statistics: Any) -> None:
        super().before_gradient_based_update(progress, statistics)
        OwnPPOLearner.seen.append(self.config.penalty)  # type: ignore[attr-defined]  # OwnPPOConfig


class DiaryEnv(gymnasium.Env[Any, Any]):
    """Environment that logs all steps; episodes of 1 to 6 steps are terminated, truncated, or both.

    Args:
        directory: Each environment writes a file there, with one line per episode start
            and per step.
        action: `box` or `tuple`.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    ACTION_SPACES: ClassVar[dict[str, Any]] = {
        "box": lambda: spaces.Box(-0.5, 0.25, (2,), np.float32),
        "tuple": lambda: spaces.Tuple(
            (spaces.Discrete(3, start=1), spaces.Box(-2.0, 1.0, (1,), np.float32))
        ),
    }

    def __init__(self, directory: str, action: str = "box") -> None:
        self.action_space = self.ACTION_SPACES[action]()
        self.path = Path(directory) / f"{uuid.uuid4()}.jsonl"

    def note(self, **what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def observe(self) -> Any:
        return np.array([self.np_random.standard_normal(), self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(1, 7))
        self.ends = [(True, False), (False, True), (True, True)][int(self.np_random.integers(3))]
        obs = self.observe()
        self.note(obs=obs.tolist())
        return obs, {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        terminated, truncated = self.ends if self.t == self.length else (False, False)
        obs, reward = self.observe(), float(self.np_random.standard_normal())
        parts = action if isinstance(action, tuple) else (action,)
        numbers = np.concatenate([np.ravel(part) for part in parts]).tolist()
        self.note(action=numbers, reward=reward, obs=obs.tolist(), ends=[terminated, truncated])
        return obs, reward, terminated, truncated, {}


def diaries(directory: Path) -> list[tuple[int, dict[tuple[float, ...], Any]]]:
    """Return, for each environment, the number of steps and the transitions by observation."""
    found = []
    for path in directory.iterdir():
        transitions: dict[tuple[float, ...], Any] = {}
        obs: tuple[float, ...] = ()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if "action" in entry:
                discount = 0.0 if entry["ends"][0] else 0.9
                transitions[obs] = (entry["action"], entry["reward"], discount, entry["obs"])
            obs = tuple(entry["obs"])
        found.append((len(transitions), transitions))
    return found


class KeptReplay(UniformReplayBuffer):
    """Replay buffer that tests can inspect after a run."""

    made: ClassVar[list[KeptReplay]] = []

    def __init__(self, *args: Any, bound: float = 1.0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.bound = bound
        self.interruptions = 0
        KeptReplay.made.append(self)

    def interrupt(self) -> None:
        super().interrupt()
        self.interruptions += 1


class AlwaysFirst:
    """Policy for Discrete spaces that records the number of observations it receives."""

    seen: ClassVar[list[int]] = []

    def __init__(self, action: int = -1) -> None:
        self.action = action

    def act(self, observations: Any) -> Any:
        AlwaysFirst.seen.append(len(observations))
        return np.full(len(observations), self.action)


def demonstrations(n_episodes: int, reward: float = 100.0) -> list[Trajectory]:
    """Return episodes of `own_envs.SpacesEnv` with three steps each."""
    return [
        Trajectory(
            obs=np.full((4, 3), 0.25 * i, np.float32),
            actions=np.array([-1, 0, 1]),
            rewards=np.full(3, reward + i),
            terminated=i % 2 == 0,
            truncated=False,
        )
        for i in range(n_episodes)
    ]


def own_loss(
    learner: Any, module_id: str, batch: Any, statistics: Any, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return the scaled loss of the algorithm as one named term."""
    return {"own": scale * learner.compute_loss_for_module(module_id, batch, statistics)}
