"""Fixed arrays of families."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from maze_train.types import Array, Tensor

__all__ = ["Constant"]


class Constant:
    """A fixed array of a family, available on whatever device and in whatever type it meets.

    A family does not know where its parameters will live, so it copies at first use and keeps the
    copy: the hot loops never convert.

    Args:
        values: The array; floating values are best given in float64.
    """

    def __init__(self, values: Array) -> None:
        self._values = torch.from_numpy(np.array(values))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """The values on the device and in the type of `other`."""
        return self.on(other.device, other.dtype)

    def on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The values on `device` as `dtype`."""
        copy = self._copies.get((device, dtype))
        if copy is None:
            copy = self._copies[(device, dtype)] = self._values.to(device, dtype)
        return copy
