"""Environments of PufferLib (Suarez, 2024, arXiv:2406.12905) as simulators of tensors.

The setting `env.kwargs.name` names module and class: `pufferlib.ocean.breakout.breakout:Breakout`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

Tensor = torch.Tensor


class Puffer:
    """A vector environment of PufferLib, which steps in C and resets itself.

    Args:
        num_envs: Number of environments; each has one agent.
        name: Its module and class, `package.module:Class`.
        **kwargs: Its other arguments.
    """

    def __init__(self, num_envs: int, name: str, **kwargs: Any) -> None:
        module, _, class_name = name.partition(":")
        make = getattr(importlib.import_module(module), class_name)
        self.env = make(num_envs=num_envs, **kwargs)
        self.num_envs = self.env.num_agents
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Begin an episode everywhere."""
        return torch.from_numpy(self.env.reset(seed)[0]), {}

    def step(self, actions: Tensor) -> Any:
        """Step everywhere: the arrays, which the next step overwrites, share their memory."""
        *arrays, _ = self.env.step(actions.numpy())
        return *map(torch.from_numpy, arrays), {}

    def close(self) -> None:
        """Free the memory of the environments."""
        self.env.close()
