"""Layout of the actions and parameters of continuous families over a box."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.distributions.base import Constant, env_dtype
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.spaces import Box

    from maze_train.distributions.base import Distribution
    from maze_train.types import Array, Tensor


class VectorLayout:
    """Conversion between vectors [..., D] and actions [..., *space.shape]."""

    def __init__(self, space: Space[Any]) -> None:
        self._shape = space.shape or ()
        self.size = math.prod(self._shape)
        if not self.size:
            raise SpaceError(f"the action space {space} holds no number: leave it out")

    def to_box(self, vectors: Tensor) -> Tensor:
        """[..., D] -> [..., *space.shape]."""
        if len(self._shape) == 1:
            return vectors
        return vectors.reshape((*vectors.shape[:-1], *self._shape))

    def to_vector(self, actions: Tensor) -> Tensor:
        """[..., *space.shape] -> [..., D]."""
        if len(self._shape) == 1:
            return actions
        batch = actions.shape[: actions.dim() - len(self._shape)]
        return actions.reshape((*batch, self.size))


class BoxBounds:
    """Bounds and data type of a box.

    `centre` and `half_width` scale its elements to [-1, 1]; they are 0 and 1 where a bound is
    infinite, and the half width is 1 where an interval is a point.
    """

    def __init__(self, space: Box) -> None:
        self._env_dtype = env_dtype(space)
        self._is_integer = not self._env_dtype.is_floating_point
        # float32 can not hold the bounds of an int32 box; float64 holds all but those of int64.
        self.work_dtype = torch.float64 if self._is_integer else self._env_dtype
        self._low = Constant(_inner_bound(space.low, towards=np.inf))
        self._high = Constant(_inner_bound(space.high, towards=-np.inf))
        # Halved before the difference, which overflows for the widest bounds.
        low, high = space.low.astype(np.float64) / 2, space.high.astype(np.float64) / 2
        is_finite = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(is_finite, low, -0.5), np.where(is_finite, high, 0.5)
        half_width = np.where(low < high, high - low, 1.0)
        self.centre, self.half_width = Constant(high + low), Constant(half_width)
        self.log_scale = float(np.log(half_width).sum())
        """Σ_i log((high_i - low_i) / 2)."""

    def fit(self, values: Tensor) -> Tensor:
        """Values of `work_dtype` clipped to the bounds, rounded if integer, as the box has them."""
        if self._is_integer:
            values = values.round()
        return self.clip(values).to(self._env_dtype)

    def clip(self, values: Tensor) -> Tensor:
        """Values clipped to the bounds."""
        return values.clamp(self._low.like(values), self._high.like(values))

    def to_unit(self, values: Tensor) -> Tensor:
        """Values scaled to [-1, 1] where both bounds are finite, [..., *space.shape]."""
        return (values - self.centre.like(values)) / self.half_width.like(values)


class BoxScale:
    """The affine map c + h v of v in [-1, 1] to the finite bounds of a box.

    c = (high + low) / 2 and h = (high - low) / 2, per dimension.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    def __init__(self, family: type[Distribution], space: Box) -> None:
        _check_intervals(family, space)
        self._bounds = BoxBounds(space)
        self.work_dtype, self.log_scale = self._bounds.work_dtype, self._bounds.log_scale
        self.log_width = self.log_scale + math.prod(space.shape) * math.log(2.0)
        """Σ_i log(high_i - low_i)."""

    def to_bounds(self, values: Tensor) -> Tensor:
        """Values of `work_dtype` in [-1, 1] as the box has them, rounded in an integer one."""
        centre, half_width = self._bounds.centre.like(values), self._bounds.half_width.like(values)
        # Rounding errors can leave the bounds by a last digit, which strict environments refuse.
        return self._bounds.fit(torch.addcmul(centre, half_width, values))

    def from_bounds(self, actions: Tensor) -> Tensor:
        """The values v of actions of the environment, float64."""
        return self._bounds.to_unit(actions.to(torch.float64))


def _inner_bound(bound: Array, towards: float) -> Array:
    """A bound as float64; where that type can not hold it, the next number inside the box."""
    values = bound.astype(np.float64)
    if not np.issubdtype(bound.dtype, np.integer):
        return values
    pairs = zip(values.flat, bound.flat, strict=True)
    outside = [int(v) < int(b) if towards > 0 else int(v) > int(b) for v, b in pairs]
    return np.where(np.reshape(outside, bound.shape), np.nextafter(values, towards), values)


def _check_intervals(family: type[Distribution], space: Box) -> None:
    """Refuse a box that [-1, 1] can not be scaled to."""
    name = family.__name__
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise SpaceError(
            f"{name} needs finite bounds, the action space is {space}: give the space finite "
            "bounds, or set model.distributions.Box=diagonal_gaussian"
        )
    if not (space.low < space.high).all():
        raise SpaceError(
            f"{name} needs low < high in every dimension, the action space is {space}: remove the "
            "constant dimensions, or set model.distributions.Box=diagonal_gaussian"
        )
