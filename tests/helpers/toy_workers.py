"""Workers for tests of pools."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.core.errors import ConfigError
from maze_train.workers.pool import Worker, WorkerContext

if TYPE_CHECKING:
    from pathlib import Path

SPACES = "observations", "actions"


class ToyWorker(Worker):
    """Worker that executes calls and fails on request.

    Args:
        folder: Directory for the file `closed<number>-<process>`, created when it is closed.
        first: How the first worker fails in its constructor; the file `begun` marks it.
        context: Context of the worker.
    """

    def __init__(self, folder: Path, first: str, context: WorkerContext) -> None:
        self.folder, self.context = folder, context
        if first and not (folder / "begun").exists():
            (folder / "begun").touch()
            self.fail(first)
        self.memory: Any = None
        self.drawn = global_draws()

    def draws(self) -> list[Any]:
        """Return values of the global generators, drawn in the constructor and now."""
        return [*self.drawn, *global_draws()]

    def close(self) -> None:
        """Create a file."""
        (self.folder / f"closed{self.context.index}-{os.getpid()}").touch()

    def echo(self, *words: Any) -> Any:
        """Return the index of the worker and the words."""
        return self.context.index, *words

    def process(self) -> int:
        """Return the process id."""
        return os.getpid()

    def nothing(self) -> None:
        """Return None."""

    def fail(self, how: str) -> None:
        """Fail in the given way."""
        if how == "raise":
            raise RuntimeError("the wheel came off")
        if how == "refuse":
            raise ConfigError("wheels", "expected four", 3)
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(600.0)

    def walk(self, steps: int, seconds: float = 0.0) -> int:
        """Count steps one by one, each of which takes `seconds`."""
        for _ in range(steps):
            time.sleep(seconds)
            self.context.count(1)
        return steps

    def map(self, memory: Any) -> None:
        """Map shared memory."""
        self.memory = np.frombuffer(memory.buffer, np.uint8)

    def write(self, place: int, number: int) -> None:
        """Write into the shared memory."""
        self.memory[place] = number

    def written(self) -> list[Any]:
        """Return the slice of the memory that this worker may write."""
        return [] if self.memory is None else [self.memory[self.context.index :][:1]]

    def read(self) -> list[int]:
        """Return all values of the memory."""
        return list(map(int, self.memory))


def global_draws() -> list[float]:
    """Return a value of the global generators of Python and NumPy."""
    return [random.random(), np.random.random()]  # noqa: NPY002


def local_class() -> Any:
    """Return an instance of a class that cannot be imported."""

    class Local:
        value = 5

    return Local()
