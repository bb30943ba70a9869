"""PufferLib environments (Suarez, 2024, arXiv:2406.12905) as tensor simulators.

Set `env.kwargs.name` to the module and class: `pufferlib.ocean.breakout.breakout:Breakout`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

Tensor = torch.Tensor


class Puffer:
    """PufferLib vector environment, implemented in C, with automatic resets.

    Args:
        num_envs: Number of environments; each has one agent.
        name: Module and class, `package.module:Class`.
        **kwargs: Additional arguments of the class.
    """

    def __init__(self, num_envs: int, name: str, **kwargs: Any) -> None:
        module, _, class_name = name.partition(":")
        make = getattr(importlib.import_module(module), class_name)
        self.env = make(num_envs=num_envs, **kwargs)
        self.num_envs = self.env.num_agents
        self.single_observation_space = self.env.single_observation_space
        self.single_action_space = self.env.single_action_space

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Reset all environments."""
        return torch.from_numpy(self.env.reset(seed)[0]), {}

    def step(self, actions: Tensor) -> Any:
        """Step all environments; the returned arrays are overwritten by the next step."""
        *arrays, _ = self.env.step(actions.numpy())
        return *map(torch.from_numpy, arrays), {}

    def close(self) -> None:
        """Free the memory of the environments."""
        self.env.close()
