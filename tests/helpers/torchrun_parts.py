"""Callbacks and environments that tests use in processes of torchrun."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium

from maze_train import Callback, TrainingView

RANK = int(os.environ.get("RANK", "0"))


class EndsProcess(Callback):
    """Callback that sends a signal to one rank after an update, in the first attempt only.

    Args:
        rank: Rank of the process.
        update: Number of updates after which the signal is sent.
        number: Signal number.
    """

    def __init__(self, rank: int, update: int, number: int = signal.SIGKILL) -> None:
        self.rank, self.update, self.number = rank, update, number

    def on_update_end(self, run: TrainingView) -> None:
        """Send the signal."""
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first and self.rank == RANK and run.progress.updates == self.update:
            os.kill(os.getpid(), self.number)


class Fails(Callback):
    """Callback that raises an error in one rank."""

    def on_update_end(self, run: TrainingView) -> None:
        """Raise an error."""
        if RANK == 1:
            raise RuntimeError("only here")


class FailingEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that raises an error in one rank."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        """Raise an error in rank 1."""
        if RANK == 1:
            raise ValueError("the robot fell over")
        return super().step(action)
