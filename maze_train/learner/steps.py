"""The gradient steps of one update, for its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from maze_train.errors import TrainingError
from maze_train.events import Event, EventInterface, OwnStatistics
from maze_train.learner.modules import DEFAULT_MODULE

if TYPE_CHECKING:
    from maze_train.events import Statistics
    from maze_train.types import Tensor


class LearnerEvents(EventInterface, prefix="train"):
    """Statistics that every learner emits."""

    grad_norm = Event("L2 norm of the gradient before clipping, mean over minibatches.")
    grad_norm_clipped = Event("The same after clipping; empty without.")
    gradient_steps = Event("Gradient steps taken.", reduce="sum")
    learning_rate = Event("Learning rate of the last update.", reduce="last")
    skipped_steps = Event("Gradient steps left out: not finite.", reduce="sum")
    zeroed_gradients = Event("Entries of gradients that counted 0: not finite.", reduce="sum")
    loss = Event("Terms of a loss that has several, each as `train/loss/<term>`.")


@dataclass
class GradientSteps:
    """What became of the gradients of one update."""

    looks: bool
    """Whether each norm is looked at before its step."""

    norms: list[Tensor] = field(default_factory=list)
    """Norms before clipping, 0-d, of the steps that were taken."""

    clipped: list[Tensor] = field(default_factory=list)
    """Their norms after clipping, 0-d, if there is any."""

    zeroed: list[Tensor] = field(default_factory=list)
    """Entries that were not finite and are 0 now, 0-d."""

    skipped: list[int] = field(default_factory=list)
    """Minibatches whose gradient was not finite, without a step."""

    overflows: int = 0
    """Steps left out because a scaled loss was too large."""

    def bad(self) -> list[int]:
        """Minibatches, or steps where nobody looked before, whose gradient was not finite."""
        if self.looks or not self.norms:
            return list(self.skipped)
        bad: list[int] = (~torch.isfinite(torch.stack(self.norms))).nonzero().flatten().tolist()
        return bad

    def record(self, statistics: Statistics) -> None:
        """Record what happened."""
        statistics.record(LearnerEvents.gradient_steps, float(len(self.norms)))
        for norm in self.norms:
            statistics.record(LearnerEvents.grad_norm, norm)
        for norm in self.clipped:
            statistics.record(LearnerEvents.grad_norm_clipped, norm)
        for count in self.zeroed:
            statistics.record(LearnerEvents.zeroed_gradients, count)
        if self.skipped or self.overflows:
            left_out = float(len(self.skipped) + self.overflows)
            statistics.record(LearnerEvents.skipped_steps, left_out)


def non_finite_error(
    where: str, minibatch: int, statistics: Statistics, has_learned: bool, advice: str
) -> TrainingError:
    """The error of a gradient that is not finite.

    Args:
        where: Epoch and update.
        minibatch: Number of the minibatch in the update.
        statistics: Of the update; those that are not finite are named.
        has_learned: Whether a step was taken before, which may be the cause.
        advice: Further words for the end.
    """
    numbers = {tag: value for tag, value in statistics.reduce().items() if value - value != 0.0}
    hint = "No step was taken yet: look for"
    if has_learned:
        hint = "A smaller algorithm.lr or an algorithm.max_grad_norm may help, or look for"
    named = "".join(f", {tag} = {value}" for tag, value in numbers.items())
    return TrainingError(
        f"{where}: the gradient of minibatch {minibatch} is not finite{named}. {hint} "
        "observations, rewards or outputs of a network of your own that are not finite, such as "
        f"logits that are all -inf{advice}"
    )


def statistics_of(module_id: str, statistics: Statistics) -> Statistics:
    """What records the statistics of a module: under its id, if it is one of several."""
    return statistics if module_id == DEFAULT_MODULE else OwnStatistics(statistics, module_id)
