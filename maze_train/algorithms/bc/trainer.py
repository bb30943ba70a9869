"""The trainer of behavioral cloning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.bc.learner import BCBatch
from maze_train.errors import TrainingError
from maze_train.training.events import TimeEvents
from maze_train.training.trainer import Trainer
from maze_train.types import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maze_train.data.batch_loader import BatchLoader
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress


METRICS_INTERVAL = 16
"""Minibatches from one look at the actions to the next: it takes as long as a gradient step."""


class BCTrainer(Trainer):
    """Takes minibatches of recorded transitions and learns from them.

    The steps that it counts are those that it learned from, each time anew: no environment is
    stepped.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The policy that the learner updates.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        loader: Gives the minibatches.
        fingerprints: Digests that tell the parts of the data from others.
    """

    def __init__(self, *args: Any, loader: BatchLoader, fingerprints: Sequence[str] = ()) -> None:
        super().__init__(*args)
        self.loader = loader
        self._fingerprints = list(fingerprints)

    @property
    def epoch_length(self) -> int:
        """Updates per epoch: those of a pass over the data, unless the settings say otherwise."""
        return self.algorithm_config.epoch_length or self.loader.batches_per_pass

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """One gradient step on the next minibatch."""
        started = time.perf_counter()
        is_measured = self._updates_in_epoch % METRICS_INTERVAL == 0
        batch = BCBatch(*self.loader.next(), is_measured=is_measured)
        loaded = time.perf_counter()
        statistics.merge(self.learners.update(batch, progress))
        statistics.record(TimeEvents.collect_s, loaded - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - loaded)
        return len(tree_leaves(batch.actions)[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers: that of every trainer, and the loader's."""
        own = {"loader": self.loader.state_dict(), "fingerprints": self._fingerprints}
        return {**super().state_dict(), **own}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Continue with the next minibatch.

        Raises:
            TrainingError: If the data are others than those of the checkpoint.
        """
        if state["fingerprints"] != self._fingerprints:
            raise TrainingError("the data are not those that this run learned from")
        self.loader.load_state_dict(state["loader"])
