"""From observations to vectors of floats, by the space of each observation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.errors import SpaceError
from maze_train.nets.blocks import MLP

if TYPE_CHECKING:
    from maze_train.nets.blocks import InputGradient
    from maze_train.types import Tensor, TensorTree

__all__ = ["BoxEncoder", "DictEncoder", "OneHotEncoder", "encoder_for"]


class BoxEncoder(nn.Module):
    """Box and MultiBinary observations, flattened; bytes are scaled to [0, 1] by their upper bound.

    Maps `[..., *space.shape]` to `[..., output_size]`.
    """

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        super().__init__()
        self.output_size = math.prod(space.shape)
        self.dims = len(space.shape)
        is_bytes = isinstance(space, spaces.Box) and space.dtype == np.uint8
        highest = float(space.high.max(initial=0)) if is_bytes else 0.0  # type: ignore[union-attr]  # a Box
        self.scale = 1 / highest if highest > 1 else None

    def forward(self, obs: Tensor) -> Tensor:
        """Flatten, convert, scale."""
        if not obs.is_floating_point():
            obs = obs.to(torch.get_default_dtype())
        if self.scale is not None:
            obs = obs.mul_(self.scale)  # a new tensor: bytes were converted above
        if self.dims == 1:
            return obs
        return obs.unsqueeze(-1) if self.dims == 0 else obs.flatten(-self.dims)


class OneHotEncoder(nn.Module):
    """Discrete and MultiDiscrete observations as concatenated one-hot vectors.

    Maps `[..., *space.shape]` integers to `[..., output_size]`.
    """

    shifts: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        counts = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        counts = counts.ravel().astype(np.int64)
        starts = np.broadcast_to(np.asarray(space.start).ravel(), counts.shape)
        self.dims = len(space.shape or ())
        self.output_size = int(counts.sum())
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        # Both shifts in one addition: from values to positions in the concatenated vector.
        self.register_buffer("shifts", torch.as_tensor(offsets - starts), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """One-hot vectors, `[..., output_size]`."""
        values = obs.unsqueeze(-1) if self.dims == 0 else obs.flatten(-self.dims)
        positions = values.long() + self.shifts
        zeros = torch.zeros(
            (*positions.shape[:-1], self.output_size),
            dtype=torch.get_default_dtype(),
            device=obs.device,
        )
        return zeros.scatter_(-1, positions, 1.0)


class DictEncoder(nn.Module):
    """Dict observations: one branch per key (a linear layer and a nonlinearity), joined.

    Args:
        space: Flat Dict space.
        branch_size: Units of each branch.
        nonlinearity: Name of the nonlinearity of the branches.
        orthogonal: Whether weights are initialised orthogonally.
    """

    def __init__(
        self, space: spaces.Dict, branch_size: int, nonlinearity: str, orthogonal: bool
    ) -> None:
        super().__init__()
        self.keys = list(space.spaces)
        encoders = [leaf_encoder(space[key], key) for key in self.keys]
        self.encoders = nn.ModuleList(encoders)
        self.branches = nn.ModuleList(
            MLP(encoder.output_size, [branch_size], nonlinearity, orthogonal=orthogonal)
            for encoder in encoders
        )
        self.branch_size = branch_size
        self.output_size = branch_size * len(self.keys)

    def forward(self, obs: TensorTree) -> Tensor:
        """Features of all keys, `[..., len(keys) * branch_size]`."""
        inputs = self._inputs(obs)
        return torch.cat(
            [branch(x) for branch, x in zip(self.branches, inputs, strict=True)], dim=-1
        )

    def _inputs(self, obs: TensorTree) -> list[Tensor]:
        assert isinstance(obs, dict)
        return [encoder(obs[key]) for key, encoder in zip(self.keys, self.encoders, strict=True)]

    def vjp(self, obs: TensorTree) -> tuple[Tensor, InputGradient]:
        """Features `[N, ...]` without a graph, and the function that writes gradients."""
        branches = [
            cast("MLP", branch).vjp(x)
            for branch, x in zip(self.branches, self._inputs(obs), strict=True)
        ]

        def gradient(grad: Tensor, of_input: bool) -> Tensor | None:
            parts = torch.split(grad, self.branch_size, dim=-1)
            for (_, part_gradient), part in zip(branches, parts, strict=True):
                part_gradient(part.contiguous(), False)
            return None

        return torch.cat([features for features, _ in branches], dim=-1), gradient


def leaf_encoder(space: spaces.Space[object], key: str = "") -> BoxEncoder | OneHotEncoder:
    """The encoder of one leaf of an observation space.

    Raises:
        SpaceError: If the space is of a kind that no network reads.
    """
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return BoxEncoder(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotEncoder(space)
    where = f" (key {key!r})" if key else ""
    raise SpaceError(
        f"observation space {space}{where}: expected Box, Discrete, MultiDiscrete, MultiBinary, or "
        "a Dict of these; convert it with an observation wrapper (env.wrappers)"
    )


def encoder_for(
    space: spaces.Space[object], branch_size: int, nonlinearity: str, orthogonal: bool
) -> BoxEncoder | OneHotEncoder | DictEncoder:
    """The encoder of a flat observation space, with the attribute `output_size`."""
    if isinstance(space, spaces.Dict):
        return DictEncoder(space, branch_size, nonlinearity, orthogonal)
    return leaf_encoder(space)
