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
    from collections.abc import Mapping, Sequence

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
        loaders: Give the minibatches of each policy, by its id; all of them are at the same place.
        fingerprints: Digests that tell the parts of the data from others.
    """

    def __init__(
        self, *args: Any, loaders: Mapping[str, BatchLoader], fingerprints: Sequence[str] = ()
    ) -> None:
        super().__init__(*args)
        self.loaders = dict(loaders)
        self._fingerprints = list(fingerprints)

    @property
    def epoch_length(self) -> int:
        """Updates per epoch: those of a pass over the data, unless the settings say otherwise.

        Of several policies, the pass of the one with the most data.
        """
        passes = [loader.batches_per_pass for loader in self.loaders.values()]
        return self.algorithm_config.epoch_length or max(passes)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """One gradient step on the next minibatch of each policy."""
        started = time.perf_counter()
        is_measured = self._updates_in_epoch % METRICS_INTERVAL == 0
        batches = {
            policy: BCBatch(*loader.next(), is_measured=is_measured)
            for policy, loader in self.loaders.items()
        }
        loaded = time.perf_counter()
        statistics.merge(self.learners.update(batches, progress))
        statistics.record(TimeEvents.collect_s, loaded - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - loaded)
        return sum(len(tree_leaves(batch.actions)[0]) for batch in batches.values())

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers: that of every trainer, and the loader's."""
        place = next(iter(self.loaders.values())).state_dict()
        own = {"loader": place, "fingerprints": self._fingerprints}
        return {**super().state_dict(), **own}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Continue with the next minibatch.

        Raises:
            TrainingError: If the data are others than those of the checkpoint.
        """
        if state["fingerprints"] != self._fingerprints:
            raise TrainingError("the data are not those that this run learned from")
        for loader in self.loaders.values():
            loader.load_state_dict(state["loader"])
