"""Custom callbacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze_train import Callback


class Diary(Callback):
    """Callback that records its calls, counts updates, and adds the count to the metrics.

    Args:
        fails_in: Name of the method that raises an error.
        at: Number of updates after which it raises.
        records: Whether it adds metrics.
    """

    def __init__(self, fails_in: str = "", at: int = 0, records: bool = True) -> None:
        self.fails_in, self.at, self.records = fails_in, at, records
        self.calls: list[str] = []
        self.updates = 0

    def note(self, name: str, run: Any) -> None:
        self.calls.append(name)
        np.random.rand()  # noqa: NPY002 (must not affect training)
        if name == self.fails_in and run.progress.updates >= self.at:
            raise ZeroDivisionError(f"at update {run.progress.updates}")

    def on_run_start(self, run: Any) -> None:
        self.note("on_run_start", run)

    def on_update_end(self, run: Any) -> None:
        self.updates += 1
        if self.records:
            run.record("updates", self.updates)
        self.note("on_update_end", run)

    def on_epoch_end(self, run: Any) -> None:
        if self.records:
            run.record("return", run.metrics["eval/episode_return_mean"])
        self.note("on_epoch_end", run)

    def on_checkpoint(self, run: Any) -> None:
        assert run.checkpoint.is_dir()
        self.note("on_checkpoint", run)

    def on_run_end(self, run: Any) -> None:
        (run.run_dir / "diary.txt").write_text(f"{self.updates} {run.stop_reason}\n")
        self.note("on_run_end", run)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.calls = state["updates"], state["calls"]


class Changes(Callback):
    """Callback that changes settings after updates.

    Args:
        changes: Lists of an update number, the name of a setting and its new value.
    """

    def __init__(self, changes: list[Any]) -> None:
        self.changes = changes

    def on_update_end(self, run: Any) -> None:
        for update, key, value in self.changes:
            if update == run.progress.updates:
                run.set(f"algorithm.{key}", value)


class Logs(Callback):
    """Callback that logs an image, a histogram, a video and a text after evaluations."""

    def on_evaluation_end(self, run: Any) -> None:
        run.log_image("image", np.linspace(0, 1, 12).reshape(3, 4))
        run.log_histogram("values", next(run.model.parameters()))
        run.log_video("video", np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3), fps=5)
        run.log_text("text", f"**{run.progress.env_steps}**")


class StopAtReturn(Callback):
    """Callback that stops training once the mean evaluation return is high enough."""

    def __init__(self, least: float) -> None:
        self.least = least

    def on_epoch_end(self, run: Any) -> None:
        if run.metrics.get("eval/episode_return_mean", -np.inf) >= self.least:
            run.stop("enough")


class StopAt(Callback):
    """Callback that stops training after an update; its state is the list of updates seen."""

    def __init__(self, update: int, reason: str = "enough") -> None:
        self.update, self.reason = update, reason
        self.seen: list[int] = []

    def on_update_end(self, run: Any) -> None:
        self.seen.append(run.progress.updates)
        if run.progress.updates == self.update:
            run.stop(self.reason)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.update, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["at"] == self.update
        self.seen = state["seen"]
