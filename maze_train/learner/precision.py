"""Precision of matrix products."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from maze_train.checks import check_one_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["matmul_precision"]


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Compute products of float32 matrices with this precision in the block.

    Args:
        name: `highest`: float32; `high`: factors rounded to TensorFloat-32 or to two bfloat16
            numbers each, where the device can; `medium`: factors rounded to bfloat16. Sums are
            float32.

    Raises:
        ConfigError: If there is no such precision; PyTorch would only warn.
    """
    check_one_of("precision", name, ("highest", "high", "medium"))
    before = torch.get_float32_matmul_precision()
    if name == before:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
