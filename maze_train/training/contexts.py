"""Contexts in which a run trains and tests; at their ends everything is as it was before."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from maze_train.errors import TrainingError
from maze_train.files import atomic_write
from maze_train.learner.modes import CUBLAS, REPEATABLE
from maze_train.notices import warn
from maze_train.training.services import Contexts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ANOMALY = (
    *("runner.detect_anomaly", "returned nan values"),
    "the warning before this shows the line that called it",
)
NOT_DETERMINISTIC = (
    *("runner.deterministic", "deterministic_algorithms"),
    "choose other layers, or set runner.deterministic=false",
)
"""Setting, words of the errors of PyTorch that it leads to, and the remedy."""


class RunContexts(Contexts):
    """Contexts with modes of PyTorch, and a profiler.

    Args:
        run_dir: Directory of the run, in which `profile/` is.
        deterministic: Whether operations that are not deterministic are errors.
        detect_anomaly: Whether autograd looks for the operation that a NaN comes from.
        profile: First and last update, from 1, that are profiled; None: none.
    """

    def __init__(
        self, run_dir: Path, *, deterministic: bool, detect_anomaly: bool, profile: list[int] | None
    ) -> None:
        self._deterministic = deterministic
        self._detect_anomaly = detect_anomaly
        first, last = profile or (0, 0)
        self._profiler = UpdateProfiler(
            first, last, run_dir / "profile" / f"updates_{first}_{last}.json"
        )

    @contextmanager
    def training(self) -> Iterator[None]:
        """Deterministic algorithms, anomaly detection; at the end the trace is written.

        Raises:
            TrainingError: If there is an operation without a deterministic algorithm, or with NaN.
        """
        with ExitStack() as stack:
            stack.enter_context(self.testing())
            if self._detect_anomaly:
                stack.enter_context(_explained(*ANOMALY))
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            stack.callback(self._profiler.stop)
            yield

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Deterministic algorithms.

        Raises:
            TrainingError: If there is an operation that has none.
        """
        with ExitStack() as stack:
            if self._deterministic:
                stack.enter_context(_explained(*NOT_DETERMINISTIC))
                stack.enter_context(_deterministic())
            yield

    def update(self, number: int) -> AbstractContextManager[None]:
        """The profiler, in its updates."""
        return self._profiler.around(number)


@contextmanager
def _explained(key: str, words: str, remedy: str) -> Iterator[None]:
    """Name the setting for which PyTorch raises an error that has these words, and the remedy."""
    try:
        yield
    except RuntimeError as error:
        if words not in str(error):
            raise
        raise TrainingError(f"{key} = True: {error}; {remedy}") from error


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    is_new = CUBLAS not in os.environ
    os.environ.setdefault(CUBLAS, REPEATABLE)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        if is_new:
            del os.environ[CUBLAS]


class UpdateProfiler:
    """Profiles some updates, and writes a trace that Chrome and Perfetto show.

    Args:
        first: Number of the first update, from 1.
        last: Number of the last one.
        path: The file of the trace.
    """

    def __init__(self, first: int, last: int, path: Path) -> None:
        self.first = first
        self.last = last
        self.path = path
        self._profile: torch.profiler.profile | None = None

    def around(self, number: int) -> AbstractContextManager[None]:
        """The context of the update of a number."""
        return self._watched(number) if self.first <= number <= self.last else nullcontext()

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        if self._profile is None:
            self._profile = torch.profiler.profile()
            self._profile.start()
        with torch.profiler.record_function(f"update {number}"):
            yield
        if number == self.last:
            self.stop()

    def stop(self) -> None:
        """Write the trace of what was watched so far; again does nothing."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        try:
            with atomic_write(self.path) as file:
                profile.export_chrome_trace(file.name)
        except (OSError, RuntimeError) as error:  # training is worth more than a trace
            warn(f"{self.path} could not be written: {error}")
