"""Typed user program: `make check` checks with mypy that user code needs no casts or ignores.

Classes of users narrow the types of arguments, and use results without a cast.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import maze_train
from maze_train.collect.fixed_policies import BatchPolicy
from maze_train.core.step_end import StepBatch
from maze_train.core.types import TensorTree
from maze_train.simulators.simulator import Simulator

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Image = npt.NDArray[np.uint8]
Step = tuple[Floats, float, bool, bool, dict[str, Any]]


class Threshold:
    """Policy for batches."""

    def act(self, observations: Floats) -> Ints:
        return (observations[:, 0] > 0).astype(np.int64)


class LogSoftmax:
    """Distribution for V-trace."""

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        return params.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


class Network(maze_train.PolicyModel):
    """Policy of a Box or Discrete action space."""

    def log_probs(self, params: Tensor, actions: Tensor) -> Tensor:
        return super().log_probs(params, actions.clamp(min=0))

    def to_env(self, actions: Tensor) -> TensorTree:
        return super().to_env(actions.clamp(min=0))


class Grid(gymnasium.Env[Floats, int]):
    """Environment with an attribute."""

    size = 3

    def step(self, action: int) -> Step:
        return np.zeros(self.size, np.float32), 0.0, False, False, {}


class Slippery(maze_train.MonitoringWrapper):
    """Wrapper with another step."""

    def step(self, action: int) -> Any:
        return super().step(action + 1)


class Levels(maze_train.DiscretizeActionsWrapper):
    """Wrapper with another conversion of actions."""

    def action(self, action: int) -> Floats:
        found: Floats = super().action(action)
        return found


class Batch(maze_train.PooledVectorEnv):
    """Vector environment with a checked step."""

    def step_async(self, actions: Ints) -> None:
        super().step_async(actions.clip(0))

    def set_attr(self, name: str, values: list[int]) -> None:
        super().set_attr(name, values)

    def close_extras(self, timeout: int | None = None, **kwargs: Any) -> None:
        super().close_extras(**kwargs)


class Heap(maze_train.MultiAgentEnv):
    """Multi-agent environment with an image."""

    def render(self) -> Image:
        return np.zeros((2, 2, 3), np.uint8)


class Falling(Simulator):
    """Simulator with an image."""

    height: Tensor

    def reset(self, seed: int) -> Tensor:
        return self.height

    def _step(self, actions: TensorTree) -> StepBatch[Tensor]:
        raise NotImplementedError

    def render(self) -> Image:
        return np.zeros((2, 2, 3), np.uint8)


class Score(maze_train.Evaluator):
    """Evaluator that reads results of the policy."""

    def evaluate(self, policy: maze_train.TrainedPolicy) -> dict[str, float]:
        observations = np.zeros((2, 4), np.float32)
        action: int = policy.act(observations[0])
        actions, _ = policy.predict(observations)
        value: float = policy.values(observations[0])
        return {
            "action": float(action + actions[0]),
            "value": value + float(policy.values(observations).mean()),
            "left": float(policy.probabilities(observations)[0, 1]),
        }


class Grow(maze_train.Callback):
    """Callback that changes environments."""

    def on_update_end(self, run: maze_train.TrainingView) -> None:
        run.call_envs("grow", 3, factor=np.zeros(2))


def heights(simulator: Simulator, policy: BatchPolicy, joint: maze_train.JointEnv) -> float:
    """Use results whose types the environment defines."""
    stones: int = joint.get_wrapper_attr("stones")
    red = simulator.render()[0, 0, 0] + joint.render()[0, 0, 0]
    return float(red + simulator.called.height[0] + policy.act(np.zeros((2, 4)))[0] + stones)


def main(simulator: Simulator, joint: maze_train.JointEnv) -> None:
    """Use environments and policies."""
    envs = maze_train.SequentialVectorEnv([Grid] * 2)
    envs.reset(seed=[1, 2], options={"size": 3})
    _, rewards, *_ = envs.step(envs.action_space.sample())
    sizes = [size + 1 for size in envs.call("size")]
    assert rewards[0] + sum(sizes) + sum(envs.get_attr("size"))
    heights(simulator, Threshold(), joint)
    maze_train.RolloutGenerator(Grid, policy=Threshold())
    logits, taken = torch.zeros(5, 2, 3), torch.zeros(5, 2, dtype=torch.long)
    maze_train.log_probs_from_logits_and_actions_and_spaces(logits, taken, LogSoftmax())
