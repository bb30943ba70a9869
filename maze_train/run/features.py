"""Parts that only some runs have, as the runner uses them; `run/assembly.py` chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from maze_train.config.train_config import TrainConfig
from maze_train.core.run_directory import MetricsRow
from maze_train.envs.vector import MazeVectorEnv
from maze_train.training.builder import AlgorithmBuilder
from maze_train.training.checkpoints import Checkpoint, CheckpointStore
from maze_train.training.evaluators import Evaluator
from maze_train.training.features import BuildFeatures
from maze_train.training.trainer import Contexts, Trainer


class Continuation(Protocol):
    """Continues a run from a checkpoint."""

    def checkpoint(self, store: CheckpointStore, run_dir: Path) -> Checkpoint | None:
        """Load the checkpoint at which the run continues; None: it has none."""
        ...

    def load(self, trainer: Trainer, checkpoint: Checkpoint) -> None:
        """Give the trainer the state of the checkpoint."""
        ...

    def past_rows(self, run_dir: Path, checkpoint: Checkpoint) -> tuple[MetricsRow, ...]:
        """Return the metrics up to the checkpoint."""
        ...


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional parts of a run."""

    building: BuildFeatures
    """Optional parts of the algorithm."""

    make_native_env: Callable[..., MazeVectorEnv]
    """Makes the vector form of registered environments, to compare speeds; see
    `make_foreign_env`."""

    examine: Callable[[Contexts, AlgorithmBuilder[Any], Callable[[str], None]], Contexts] | None
    """Adds the examination of the environment to the contexts of a run; the last argument prints a
    line. None: the environment is not examined."""

    with_random_opponent: Callable[[TrainConfig], TrainConfig]
    """Adds a random opponent if nothing else can select the best policy; for several agents."""

    opponent_evaluator: Callable[[TrainConfig, AlgorithmBuilder[Any]], Evaluator]
    """Returns the evaluator that `evaluation.opponents` asks for."""

    continuation: Continuation | None
    """Continues the run; None: a new run."""

    how_to_continue: Callable[[Path | None, TrainConfig], str]
    """Returns the command that continues the run in a directory."""
