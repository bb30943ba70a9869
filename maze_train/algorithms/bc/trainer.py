"""Trainer of behavioral cloning."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.bc.build import Recordings, fingerprints
from maze_train.algorithms.bc.data import BatchLoader
from maze_train.algorithms.bc.learner import BCBatch
from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.events import Statistics
from maze_train.core.types import tree_leaves
from maze_train.learner.config import Progress
from maze_train.learner.learner import Learner
from maze_train.training.evaluators import Evaluator
from maze_train.training.events import TimeEvents
from maze_train.training.trainer import Run, Trainer

if TYPE_CHECKING:
    from typing import Self

METRICS_INTERVAL = 16
"""Interval in minibatches at which action metrics are computed; computing them takes as long as a
gradient step."""


class BCTrainer(Trainer):
    """Trainer for behavioral cloning: gradient steps on minibatches of recorded transitions.

    Each use of a recorded step for training counts as one step.

    Args:
        run: Objects of the run, with the learners and the policy.
        loaders: Minibatch loaders by policy id; all must be at the same position.
        fingerprints: Digests of the parts of the dataset.
    """

    step_label = "recorded steps"

    def __init__(
        self,
        run: Run,
        *,
        loaders: Mapping[str, BatchLoader],
        fingerprints: Sequence[str] = (),
    ) -> None:
        super().__init__(run)
        self.loaders = dict(loaders)
        self._fingerprints = list(fingerprints)

    @classmethod
    def make_source(cls, run: Run) -> Recordings:
        """Open the dataset."""
        return Recordings(run)

    @classmethod
    def make_learner(cls, run: Run) -> Learner[Any, Any, Any]:
        """Load the data, and build losses, metrics and the learner."""
        return recordings_of(run).make_learner()

    @classmethod
    def make_evaluators(cls, run: Run) -> list[Evaluator]:
        """Build the validation, and evaluation episodes if there is an environment."""
        recordings = recordings_of(run)
        episodes = super().make_evaluators(run) if recordings.has_env else []
        return [*recordings.make_validation(), *episodes]

    @classmethod
    def make_final_evaluator(cls, run: Run) -> Evaluator | None:
        """Build the evaluator of the test after training, if there is an environment."""
        n_episodes = run.config.evaluation.final_episodes
        if n_episodes and not recordings_of(run).has_env:
            problem = "requires an environment: set env, or remove this setting"
            raise ConfigError("evaluation.final_episodes", problem, n_episodes)
        return super().make_final_evaluator(run)

    @classmethod
    def task_name(cls, run: Run) -> str:
        """Return the name of the environment, or of the recorded task."""
        return recordings_of(run).task_name

    @classmethod
    def selection_metric(cls, run: Run) -> str:
        """Return the metric for model selection: the return, or the loss without environment."""
        return recordings_of(run).selection_metric

    @classmethod
    def build(cls, run: Run) -> Self:
        """Build a minibatch loader for each policy."""
        recordings = recordings_of(run)
        loaders = recordings.make_loaders()
        return cls(run, loaders=loaders, fingerprints=fingerprints(recordings.dataset))

    @property
    def epoch_length(self) -> int:
        """Number of updates per epoch; by default one pass over the data.

        With several policies, the default is one pass over the data of the policy with the most
        data.
        """
        passes = [loader.batches_per_pass for loader in self.loaders.values()]
        return self.algorithm_config.epoch_length or max(passes)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Take one gradient step on the next minibatch of each policy."""
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
        """Return the state of the trainer and the position of the loaders."""
        place = next(iter(self.loaders.values())).state_dict()
        own = {"loader": place, "fingerprints": self._fingerprints}
        return {**super().state_dict(), **own}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the position of the loaders.

        Raises:
            TrainingError: If the dataset differs from the dataset of the checkpoint.
        """
        if state["fingerprints"] != self._fingerprints:
            raise TrainingError("the dataset differs from the dataset of this run")
        for loader in self.loaders.values():
            loader.load_state_dict(state["loader"])


def recordings_of(run: Run) -> Recordings:
    """Return the dataset of a run."""
    assert isinstance(run.source, Recordings)
    return run.source
