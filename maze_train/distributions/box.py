"""What continuous families know of the box that they act in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from maze_train.checks import check_between
from maze_train.distributions.base import Constant, env_dtype
from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from gymnasium.spaces import Box

    from maze_train.types import Array, Tensor

__all__ = ["BoxBounds", "BoxLayout"]


class BoxLayout:
    """Where params hold mean and log σ, and how vectors [..., D] relate to a box's shape."""

    def __init__(
        self,
        space: Box,
        state_dependent_std: bool,
        initial_log_std: float,
        log_std_min: float,
        log_std_max: float,
    ) -> None:
        _check_settings(state_dependent_std, initial_log_std, log_std_min, log_std_max)
        self.size = math.prod(space.shape)
        self.initial_log_std = float(initial_log_std)
        self._shape = space.shape
        self._state_dependent = state_dependent_std
        self._limits = (float(log_std_min), float(log_std_max))

    def split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log σ, each [..., D]."""
        mean, log_std = params.chunk(2, -1)
        # Only a network's output is clamped: beyond a limit the gradient of a clamp is 0, which a
        # network leaves through its other inputs, but a free parameter would be stuck for good.
        if self._state_dependent:
            if self.initial_log_std:
                log_std = log_std + self.initial_log_std
            log_std = log_std.clamp(*self._limits)
        return mean, log_std

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
    """Bounds and data type of a box."""

    def __init__(self, space: Box) -> None:
        self._env_dtype = env_dtype(space)
        self._is_integer = not self._env_dtype.is_floating_point
        # float32 can not hold the bounds of an int32 box; float64 holds all but those of int64.
        self.work_dtype = torch.float64 if self._is_integer else self._env_dtype
        self._low = Constant(_inner_bound(space.low, towards=np.inf))
        self._high = Constant(_inner_bound(space.high, towards=-np.inf))

    def fit(self, values: Tensor) -> Tensor:
        """Values of `work_dtype` clipped to the bounds, rounded if integer, as the box has them."""
        if self._is_integer:
            values = values.round()
        return values.clamp(self._low.like(values), self._high.like(values)).to(self._env_dtype)


def _inner_bound(bound: Array, towards: float) -> Array:
    """A bound as float64; where that type can not hold it, the next number inside the box."""
    values = bound.astype(np.float64)
    if not np.issubdtype(bound.dtype, np.integer):
        return values
    pairs = zip(values.flat, bound.flat, strict=True)
    outside = [int(v) < int(b) if towards > 0 else int(v) > int(b) for v, b in pairs]
    return np.where(np.reshape(outside, bound.shape), np.nextafter(values, towards), values)


def _check_settings(
    state_dependent_std: bool, initial_log_std: float, log_std_min: float, log_std_max: float
) -> None:
    """Refuse settings of a wrong type or range; keys are relative to the family."""
    if not isinstance(state_dependent_std, bool):
        raise ConfigError("state_dependent_std", "expected true or false", state_dependent_std)
    settings = {"log_std_min": log_std_min, "log_std_max": log_std_max}
    for key, value in {**settings, "initial_log_std": initial_log_std}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(key, "expected a number", value)
        # The variance at these limits is still an ordinary float32 number.
        check_between(key, value, -40.0, 40.0)
    if log_std_min >= log_std_max:
        raise ConfigError(
            "log_std_min", f"expected less than log_std_max={log_std_max:g}", log_std_min
        )
    if state_dependent_std:
        check_between("initial_log_std", initial_log_std, log_std_min, log_std_max)
