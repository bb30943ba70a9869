"""The learner of a run, restored from one of its checkpoints."""

from __future__ import annotations

from typing import Any

from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import RunDirectoryError
from maze_train.learner.learner import Learner
from maze_train.run.resuming import fitting
from maze_train.run.train import make_runner
from maze_train.training.generators import generators_kept
from maze_train.training.league import make_snapshots


def restored_learner(config: TrainConfig) -> Learner[Any, Any, Any]:
    """Return the learner of a run with the state of its checkpoint.

    Raises:
        RunDirectoryError: If there is no checkpoint, or all checkpoints are damaged.
    """
    runner = make_runner(config)
    checkpoint, builder = runner.read_checkpoint(), runner.builder
    if checkpoint is None:
        raise RunDirectoryError(f"{runner.resumed_dir} has no checkpoint to load the learner from")
    with runner, generators_kept():
        model = builder.build_model()
        if runner.config.algorithm.learns_from == "dataset":
            builder.prepare(model)  # The loss depends on the data.
        learner = builder.build_learner(model)
    with fitting(checkpoint):
        state = checkpoint.state["learners"]["learner"]
        if learner.modules.keys() != state["modules"].keys():
            make_snapshots(learner, state["modules"])
        learner.load_state_dict(state)
    return learner
