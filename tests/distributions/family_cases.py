"""One case or more of every family, and random numbers for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from maze_train.distributions.mapping import distribution_for

if TYPE_CHECKING:
    from maze_train.distributions.base import Distribution

LOW = np.array([[-1.0, 0.0], [-5.0, 2.0]], np.float32)
HIGH = np.array([[1.0, 0.5], [5.0, 30.0]], np.float32)
ONE_SIDED = Box(
    np.array([-1, -np.inf, -np.inf], np.float32), np.array([np.inf, 2, np.inf], np.float32)
)

CASES: dict[str, tuple[str, Any]] = {
    "bernoulli": ("bernoulli", MultiBinary(3)),
    "bernoulli n-d": ("bernoulli", MultiBinary((2, 2))),
    "beta": ("beta", Box(-2.0, 3.0, (3,))),
    "beta n-d": ("beta", Box(LOW, HIGH)),
    "beta scalar": ("beta", Box(-1.0, 1.0, ())),
    "categorical": ("categorical", Discrete(4, start=2)),
    "clipped": ("clipped_gaussian", Box(-1.0, 1.0, (2,))),
    "gaussian n-d": ("diagonal_gaussian", Box(LOW, HIGH)),
    "gaussian one-sided": ("diagonal_gaussian", ONE_SIDED),
    "multi_categorical": ("multi_categorical", MultiDiscrete([[2, 3], [4, 1]])),
    "squashed n-d": ("squashed_gaussian", Box(LOW, HIGH)),
}
CONTINUOUS = [name for name, (_, space) in CASES.items() if isinstance(space, Box)]
DISCRETE = [name for name in CASES if name not in CONTINUOUS]
BOUNDED = [
    name for name, (_, space) in CASES.items() if isinstance(space, Box) and space.is_bounded()
]


def build(case: str) -> tuple[Distribution, Any]:
    """The family of a case and its space."""
    name, space = CASES[case]
    return distribution_for(space, {type(space).__name__: name}), space


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal float64 numbers of a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw(family: Distribution, params: torch.Tensor, seed: int = 0) -> Any:
    """Samples for params [..., param_size]."""
    generator = torch.Generator().manual_seed(seed)
    return family.sample(params, family.draw_noise(params.shape[:-1], generator))
