"""Services that a trainer gets from whoever runs it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maze_train.tracking.tracker import RunInfo, Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from maze_train.training.callbacks import Callback
    from maze_train.training.checkpoint_schedule import Checkpoints
    from maze_train.training.evaluators import Evaluator
    from maze_train.training.model_selection import BestModelSelection
    from maze_train.training.outcome import Interruption, Limits


class Contexts:
    """Contexts of the parts of a run; those of this class change nothing."""

    def training(self) -> AbstractContextManager[None]:
        """Everything that holds while a run trains."""
        return nullcontext()

    def testing(self) -> AbstractContextManager[None]:
        """Everything that holds while trained policies are tested."""
        return nullcontext()

    def update(self, number: int) -> AbstractContextManager[None]:
        """Everything that holds during the update of a number, from 1."""
        return nullcontext()


@dataclass(frozen=True, kw_only=True)
class TrainerServices:
    """Everything around training that does not depend on the algorithm.

    Attributes:
        tracker: Takes the metrics; by default it keeps them in `history` and writes nothing.
        evaluator: Judges the policy; None: the training return selects the best one.
        model_selection: Keeps the best policy; None: nothing is kept.
        limits: When to stop; None: those of the algorithm.
        evaluation_interval: Epochs from one evaluation to the next.
        selection_metric: Metric that `model_selection` is told.
        contexts: What holds in an update.
        checkpoints: Writes where training stands; None: nothing is written.
        interruption: Tells whether a signal came; None: no signals are taken.
        callbacks: Called while training goes on.
    """

    tracker: Tracker = field(default_factory=lambda: Tracker([], RunInfo()))
    evaluator: Evaluator | None = None
    model_selection: BestModelSelection | None = None
    limits: Limits | None = None
    evaluation_interval: int = 1
    selection_metric: str = "eval/episode_return_mean"
    contexts: Contexts = field(default_factory=Contexts)
    checkpoints: Checkpoints | None = None
    interruption: Interruption | None = None
    callbacks: Sequence[Callback] = ()
