"""Parts other than environments that a user writes and names by `_target_`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from maze_train import (
    Categorical,
    Evaluator,
    MetricsWriter,
    PPOAlgorithmConfig,
    PPOLearner,
    ValueTransform,
)


class OwnNet(torch.nn.Module):
    """A network of one's own, for policy, critic or trunk."""

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
    """A network with a wrong number of outputs."""

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return super().forward(obs)[..., :1]


class LastAction(Categorical):
    """A distribution whose most likely action is always the last one."""

    def mode(self, params: torch.Tensor) -> torch.Tensor:
        return torch.full(params.shape[:-1], params.shape[-1] - 1)


class Halved(ValueTransform):
    """h(x) = x / 2; counts how often it is asked."""

    calls: ClassVar[int] = 0

    def transform_value(self, x: Any) -> torch.Tensor:
        Halved.calls += 1
        return torch.as_tensor(x) / 2

    def transform_value_inv(self, x: Any) -> torch.Tensor:
        return torch.as_tensor(x) * 2


class CountingEvaluator(Evaluator):
    """Reports how often it was called."""

    closed: ClassVar[int] = 0

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls = 0

    def evaluate(self, policy: Any) -> dict[str, float]:
        self.calls += 1
        return {"own/calls": self.scale * self.calls}

    def close(self) -> None:
        CountingEvaluator.closed += 1


class LineWriter(MetricsWriter):
    """Appends the number of the epoch to a file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, row: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{row['epoch']}\n")


@dataclass(kw_only=True)
class OwnPPOConfig(PPOAlgorithmConfig):
    """PPO with a setting of its own."""

    name: ClassVar[str] = "own_ppo"
    learner_class: ClassVar[str] = "own_parts.OwnPPOLearner"

    penalty: float = 0.1
    """Something that the learner reads."""


class OwnPPOLearner(PPOLearner):
    """Notes its setting in each update."""

    seen: ClassVar[list[float]] = []

    def before_gradient_based_update(self, progress: Any, statistics: Any) -> None:
        super().before_gradient_based_update(progress, statistics)
        OwnPPOLearner.seen.append(self.config.penalty)  # type: ignore[attr-defined]  # OwnPPOConfig
