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
    """Does what it is reported, and fails in every way.

    Args:
        folder: Where it leaves the file `closed<number>-<process>` when it is closed.
        first: How the first worker that finds no file `begun` in the folder fails at once.
        context: Where it lives.
    """

    def __init__(self, folder: Path, first: str, context: WorkerContext) -> None:
        self.folder, self.context = folder, context
        if first and not (folder / "begun").exists():
            (folder / "begun").touch()
            self.fail(first)
        self.memory: Any = None
        self.drawn = global_draws()

    def draws(self) -> list[Any]:
        """Values that the global generators gave when the worker was made, and give now."""
        return [*self.drawn, *global_draws()]

    def close(self) -> None:
        """Leave a file."""
        (self.folder / f"closed{self.context.index}-{os.getpid()}").touch()

    def echo(self, *words: Any) -> Any:
        """The words, and who says them."""
        return self.context.index, *words

    def process(self) -> int:
        """The process in which it lives."""
        return os.getpid()

    def nothing(self) -> None:
        """Nothing to tell."""

    def fail(self, how: str) -> None:
        """Fail."""
        if how == "raise":
            raise RuntimeError("the wheel came off")
        if how == "refuse":
            raise ConfigError("wheels", "expected four", 3)
        if how == "exit":
            os._exit(7)
        if how == "hang":
            time.sleep(600.0)

    def walk(self, steps: int, seconds: float = 0.0) -> int:
        """Count steps one by one, each of which takes a while."""
        for _ in range(steps):
            time.sleep(seconds)
            self.context.count(1)
        return steps

    def map(self, memory: Any) -> None:
        """Keep memory."""
        self.memory = np.frombuffer(memory.buffer, np.uint8)

    def write(self, place: int, number: int) -> None:
        """Write into it."""
        self.memory[place] = number

    def written(self) -> list[Any]:
        """The memory, a part of which it may have written."""
        return [] if self.memory is None else [self.memory[self.context.index :][:1]]

    def read(self) -> list[int]:
        """All numbers in it."""
        return list(map(int, self.memory))


def global_draws() -> list[float]:
    """A value of the global generators of Python and NumPy."""
    return [random.random(), np.random.random()]  # noqa: NPY002


def local_class() -> Any:
    """An object of a class without a name that can be imported."""

    class Local:
        value = 5

    return Local()
