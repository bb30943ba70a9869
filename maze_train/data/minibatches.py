"""Shuffled minibatches in which every sample appears exactly once per pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.types import Tensor

__all__ = ["minibatch_indices"]


def minibatch_indices(
    num_samples: int, batch_size: int, generator: torch.Generator, device: torch.device
) -> Iterator[Tensor]:
    """One pass over `num_samples` samples in random order.

    The last minibatch is smaller when the sizes do not divide; no sample is repeated or left out.

    Args:
        num_samples: N, >= 1.
        batch_size: Samples per minibatch, >= 1.
        generator: Source of the order, on the CPU: the order is the same on every device.
        device: Where the indices are needed.

    Yields:
        Indices into the samples, `[<= batch_size]` int64.
    """
    order = torch.randperm(num_samples, generator=generator).to(device)
    yield from torch.split(order, batch_size)
