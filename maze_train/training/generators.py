"""Global random generators, which environments and networks (dropout) may use."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from maze_train.core.errors import TrainingError

LOCKS: dict[int, Any] = {}
"""Locks of the generators by process ID; the thread of the active run holds the lock. A forked
process uses a separate lock."""


@contextmanager
def generators_of_run(seed: int) -> Iterator[None]:
    """Seed the generators of Python, NumPy and PyTorch and reserve them for this thread.

    Raises:
        TrainingError: If a run is active in another thread.
    """
    lock = LOCKS.setdefault(os.getpid(), threading.RLock())
    if not lock.acquire(blocking=False):
        raise TrainingError(
            "another run in this process uses the global random generators of Python, NumPy and "
            "PyTorch; wait until it has ended, or start each run in a separate process "
            "(multiprocessing, or the command maze-run)"
        )
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        yield
    finally:
        lock.release()


def generator_states() -> dict[str, Any]:
    """Return the generator states as plain values, arrays and tensors."""
    version, state, gauss = random.getstate()
    is_on_gpu = torch.cuda.is_initialized()
    return {
        "python": (version, np.array(state, np.uint32), gauss),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if is_on_gpu else [],
    }


def load_generator_states(states: dict[str, Any]) -> None:
    """Restore the generators, except GPU generators if the number of GPUs has changed."""
    version, state, gauss = states["python"]
    random.setstate((version, tuple(state.tolist()), gauss))
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generator states at the end of the block."""
    states = generator_states()
    try:
        yield
    finally:
        load_generator_states(states)
