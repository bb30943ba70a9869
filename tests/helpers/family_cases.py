"""Cases of all distribution families, with random parameters and PyTorch equivalents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from torch import distributions as td
from torch.distributions import transforms as tt

from maze_train.distributions.mapping import distribution_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.distributions.base import Distribution

LOW = np.array([[-1.0, 0.0], [-5.0, 2.0]], np.float32)
HIGH = np.array([[1.0, 0.5], [5.0, 30.0]], np.float32)
ONE_SIDED = Box(
    np.array([-1, -np.inf, -np.inf], np.float32), np.array([np.inf, 2, np.inf], np.float32)
)
DEPENDENT = {"name": "diagonal_gaussian", "state_dependent_std": True, "initial_log_std": -0.5}
FREE = {"name": "squashed_gaussian", "state_dependent_std": False}
COUNTED = MultiDiscrete([[2, 3], [4, 1]], dtype=np.int32, start=[[0, 5], [-1, 1]])

CASES: dict[str, tuple[Any, Any]] = {
    "bernoulli": ("bernoulli", MultiBinary(3)),
    "bernoulli n-d": ("bernoulli", MultiBinary((2, 2))),
    "beta n-d": ("beta", Box(LOW, HIGH)),
    "beta scalar": ("beta", Box(-1.0, 1.0, ())),
    "categorical": ("categorical", Discrete(4, start=2)),
    "clipped": ("diagonal_gaussian", Box(-1.0, 1.0, (2,))),
    "gaussian n-d": ("diagonal_gaussian", Box(LOW, HIGH)),
    "gaussian one-sided": ("diagonal_gaussian", ONE_SIDED),
    "gaussian dependent": (DEPENDENT, Box(-1.0, 2.0, ())),
    "multi_categorical": ("multi_categorical", COUNTED),
    "multi_categorical even": ("multi_categorical", MultiDiscrete([3, 3])),
    "squashed n-d": ("squashed_gaussian", Box(LOW, HIGH)),
    "squashed free": (FREE, Box(-3.0, 1.0, (2,))),
}
CONTINUOUS = [name for name, (_, space) in CASES.items() if isinstance(space, Box)]
DISCRETE = [name for name in CASES if name not in CONTINUOUS]
BOUNDED = [
    name for name, (_, space) in CASES.items() if isinstance(space, Box) and space.is_bounded()
]
UNCLIPPED = [name for name in BOUNDED if name.startswith(("beta", "squashed"))]


def build(case: str) -> tuple[Distribution, Any]:
    """Return the family of a case and its space."""
    override, space = CASES[case]
    return distribution_for(space, {type(space).__name__: override}), space


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal float64 values for a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw(family: Distribution, params: torch.Tensor, seed: int = 0) -> Any:
    """Return samples for params [..., param_size]."""
    generator = torch.Generator().manual_seed(seed)
    return family.sample(params, family.draw_noise(params.shape[:-1], generator))


def torch_parts(case: str, params: torch.Tensor) -> Iterator[td.Distribution]:
    """Yield PyTorch distributions of the components of one action for params [n, D], in float64.

    For the squashed and beta families, they are distributions of the environment's action.
    """
    space = CASES[case][1]
    if isinstance(space, MultiDiscrete):
        for part in params.split(space.nvec.ravel().tolist(), -1):
            yield td.Categorical(logits=part)
        return
    if isinstance(space, Discrete):
        yield td.Categorical(logits=params)
        return
    if isinstance(space, MultiBinary):
        yield from (td.Bernoulli(logits=logit) for logit in params.unbind(-1))
        return
    low, high = (torch.from_numpy(x.astype(np.float64)).flatten() for x in (space.low, space.high))
    for i, (a, b) in enumerate(
        zip(*(half.unbind(-1) for half in params.chunk(2, -1)), strict=True)
    ):
        if case.startswith("beta"):
            alpha, beta = (1 + torch.nn.functional.softplus(x) for x in (a, b))
            scale = tt.AffineTransform(low[i], high[i] - low[i])
            yield td.TransformedDistribution(td.Beta(alpha, beta), [scale])
            continue
        normal = td.Normal(a, (b - 0.5 if case == "gaussian dependent" else b).exp())
        if not case.startswith("squashed"):
            yield normal
            continue
        scale = tt.AffineTransform((high[i] + low[i]) / 2, (high[i] - low[i]) / 2)
        yield td.TransformedDistribution(normal, [tt.TanhTransform(cache_size=1), scale])
