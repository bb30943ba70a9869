"""Devices and threads of this machine."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["find_device", "torch_threads"]


def find_device(name: str) -> torch.device:
    """The device of a name in the configuration.

    Raises:
        ConfigError: If PyTorch does not find it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("algorithm.device", f"not usable here: {reason}", name) from error
    return device


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the threads of PyTorch for the time of a run."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
