"""Check that environments are reproducible, in parallel with the first updates of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import MazeTrainError
from maze_train.envs.factory import EnvFactory
from maze_train.envs.pooled import NEW_EPISODES
from maze_train.run.examination import Findings, examine, notes, replay_difference
from maze_train.run.probe import Probe
from maze_train.training.builder import AlgorithmBuilder
from maze_train.workers.backends import ThisProcess

LIMIT_S = 30.0
"""Timeout of the check in seconds."""

WAIT_S = 1.0
"""Maximum time in seconds, since the start of the check, that a finished run waits for the
result."""


class Examination:
    """Examines an environment in a disposable process, in parallel with the first updates.

    Args:
        work: Function that runs in this process and returns messages for the user.
        notify: Prints a line.
    """

    def __init__(self, work: Callable[[], Sequence[str]], notify: Callable[[str], None]) -> None:
        self._work, self._notify = work, notify
        self._probe: Probe[Sequence[str]] | None = None
        self._began = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager of the run: waits briefly for the result and closes the process."""
        try:
            yield
            if self._probe is not None:
                self._look(max(0.0, self._began + WAIT_S - time.monotonic()))
        finally:
            if self._probe is not None:
                self._probe.close()

    @contextmanager
    def update(self, number: int) -> Iterator[None]:
        """Start the examination in the first update; report its findings when available."""
        if self._probe is None:
            self._began = time.monotonic()
            self._probe = Probe(self._work, LIMIT_S)
        yield
        self._look(0.0)

    def _look(self, wait_s: float) -> None:
        """Report the findings once."""
        if self._probe is not None and not self._probe.is_over:
            for line in self._probe.result(wait_s) or ():
                self._notify(line)


def examination_of(
    config: TrainConfig, builder: AlgorithmBuilder[Any], notify: Callable[[str], None]
) -> Examination:
    """Return the examination of the environment of a run.

    Args:
        config: Configuration of the run.
        builder: Builder of the algorithm.
        notify: Prints a line.
    """
    backend = builder.context.backend
    num_envs, n_episodes = builder.num_envs, config.evaluation.n_episodes
    workers = backend.num_workers(num_envs)
    num_eval_envs = min(n_episodes, config.evaluation.concurrency or num_envs)
    counts = (num_envs, num_eval_envs, 0 if isinstance(backend, ThisProcess) else workers)
    is_put_back = config.checkpoint.is_on and not config.checkpoint.allow_new_episodes
    work = partial(examined, builder.context.env_factory, counts, is_put_back)
    return Examination(work, notify)


def examined(
    factory: EnvFactory, counts: tuple[int, int, int], is_resumed_exactly: bool
) -> list[str]:
    """Examine an environment; return messages for the user.

    Args:
        factory: Builds an environment.
        counts: Numbers of training environments, evaluation environments and worker processes (0:
            all environments are in one process).
        is_resumed_exactly: Whether a resumed run must restore the state of its environments.
    """
    difference, findings = "", Findings()
    try:
        difference = replay_difference(factory) if is_resumed_exactly else ""
        findings = examine(factory)
    except MazeTrainError:
        pass  # The environment cannot be examined.
    lines = notes(findings, *counts)
    if difference:
        lines.append(
            "the same seed and actions lead to another episode in this environment "
            f"({difference}), so the run cannot be resumed exactly. {NEW_EPISODES}"
        )
    return lines
