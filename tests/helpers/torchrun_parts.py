"""Callbacks and environments that tests use in processes of torchrun."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from maze_train import Callback, MetricsWriter, RunInfo, TrainingView

RANK = int(os.environ.get("RANK", "0"))


class OfOneRank:
    """Has a state that only the same rank accepts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the rank of the process."""
        return {"rank": RANK}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise an error if the state belongs to another process."""
        if state != self.state_dict():
            raise ValueError(f"rank {RANK} received the state of another process: {state}")


class ZeroPolicy(OfOneRank):
    """Policy whose actions are zero."""

    def act(self, observations: Any) -> Any:
        """Return one action per observation."""
        return np.zeros((len(observations), 1), np.float32)


class EndsProcess(OfOneRank, Callback):
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


class SlowWriter(MetricsWriter):
    """Writes a file some time after the end of the run."""

    def start(self, run: RunInfo) -> None:
        """Store the directory."""
        self.path = run.run_dir / "finished"

    def write(self, row: Mapping[str, float]) -> None:
        """Do nothing."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the file."""
        time.sleep(3.0)
        self.path.touch()


class Steers(Callback):
    """Calls environments, changes a setting, and stops after the second checkpoint.

    Args:
        stops: Rank that stops the run.
        differs: Rank whose requests in the second update differ.
        request: Kind of the request that differs.
    """

    def __init__(self, stops: int = 0, differs: int = -1, request: str = "call_envs") -> None:
        self.stops, self.differs, self.request = stops, differs, request

    def on_update_end(self, run: TrainingView) -> None:
        """Request changes that affect the next updates."""
        update = run.progress.updates
        value = update + 0.5 * (update == 2 and self.differs == RANK)
        if self.request == "set":
            run.set("algorithm.entropy_coef", value / 100)
            return
        run.set("algorithm.entropy_coef", update / 100)
        run.call_envs("set_gravity", np.array(9.8 + value), evaluate=True)

    def on_checkpoint(self, run: TrainingView) -> None:
        """Stop the run."""
        if self.stops == RANK and run.progress.epoch == 2:
            run.stop("enough")


class PlanetEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole with variable gravity."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def set_gravity(self, value: Any) -> None:
        """Set the gravity."""
        inner: Any = self.unwrapped
        inner.gravity = float(value)


class UnequalEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose actions depend on the rank."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.action_space = gymnasium.spaces.Discrete(1 + RANK)


class FailingEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that raises an error in one rank."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        """Raise an error in rank 1."""
        if RANK == 1:
            raise ValueError("the robot fell over")
        return super().step(action)
