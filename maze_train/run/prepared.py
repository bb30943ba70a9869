"""A run before it starts: its configuration, its initial state, its optional parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze_train.config.train_config import TrainConfig
    from maze_train.run.base_policy import BasePolicy
    from maze_train.run.features import Features
    from maze_train.training.checkpoints import CheckpointInfo


@dataclass(frozen=True)
class PreparedRun:
    """A checked configuration, and what the run begins with."""

    config: TrainConfig
    """The configuration, with a seed and all defaults."""

    features: Callable[[], Features]
    """Returns the optional parts that the configuration asks for; imports them."""

    resumed_dir: Path | None = None
    """Directory of the run that is continued; None: a new run."""

    checkpoint: CheckpointInfo | None = None
    """Checkpoint at which the run continues; None: it begins at step 0."""

    bases: tuple[BasePolicy, ...] = ()
    """Policies whose weights training starts from; none: new weights, or those of a checkpoint."""
