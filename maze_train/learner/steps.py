"""Gradient steps of an update, taken if gradients are finite, and their statistics."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from maze_train.core.errors import TrainingError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor
from maze_train.learner.config import Progress
from maze_train.learner.modules import DEFAULT_MODULE, autocast
from maze_train.learner.optimizers import norm_of
from maze_train.learner.part import OwnStatistics
from maze_train.learner.step_settings import Accumulation
from maze_train.nets.policy_model import Policy

AnyLearner: TypeAlias = Any
"""A `Learner`."""


class LearnerEvents(EventInterface, prefix="train"):
    """Statistics that every learner emits."""

    grad_norm = Event("L2 norm of the gradient before clipping, mean over minibatches.")
    grad_norm_clipped = Event("The same after clipping; empty without.")
    gradient_steps = Event("Gradient steps taken.", reduce="sum")
    learning_rate = Event(
        "Learning rate of the last update, of the first optimizer of a module.", reduce="last"
    )
    skipped_steps = Event("Gradient steps left out: not finite.", reduce="sum")
    zeroed_gradients = Event("Entries of gradients that counted 0: not finite.", reduce="sum")
    compile_s = Event("Seconds that `algorithm.compile` took.", reduce="sum")
    loss = Event("Terms of a loss that has several, each as `train/loss/<term>`.")


class GradientSteps:
    """Takes the gradient steps of one update, and notes what becomes of each.

    What settings add to a step is here: the type of `autocast`, the exchange with other learners,
    `gradient_accumulation`, the scale of losses, and `on_non_finite`.

    Args:
        learner: The learner.

    Attributes:
        autocast: Context in which losses are computed.
        norms: Norms before clipping, 0-d, of the steps that were taken.
        clipped: Their norms after clipping, 0-d, if there is any.
        zeroed: Entries that were not finite and are 0 now, 0-d.
        skipped: Minibatches whose gradient was not finite, without a step.
        overflows: Steps left out because a scaled loss was too large.
    """

    def __init__(self, learner: AnyLearner) -> None:
        self._learner = learner
        self.autocast = autocast(learner.device, learner.settings.autocast)
        count: int = getattr(learner.config, "gradient_accumulation", 1)
        self._accumulation = Accumulation(count) if count > 1 else None
        self._number = 0
        # A look at each norm would stall a GPU; there all are looked at after the update.
        self._looks = (
            learner.device.type == "cpu"
            or learner.on_non_finite == "skip"
            or learner.loss_scaler is not None
        )
        found = (getattr(module, "policy", None) for module in learner.modules.values())
        self._free_policies = [
            policy for policy in found if isinstance(policy, Policy) and policy.has_free_params
        ]
        self.norms: list[Tensor] = []
        self.clipped: list[Tensor] = []
        self.zeroed: list[Tensor] = []
        self.skipped: list[int] = []
        self.overflows = 0

    @property
    def have_failed(self) -> bool:
        """Whether a gradient was not finite, so that the update ends with an error."""
        return bool(self.skipped) and self._learner.on_non_finite == "raise"

    def take(self, number: int) -> None:
        """Take a step of the gradients of a minibatch, when there are those of enough minibatches.

        Args:
            number: Number of the minibatch, whose gradients `active` optimizers have.
        """
        learner, self._number = self._learner, number
        learner.part.join_gradients(learner.active, learner.optimizers)
        if self._accumulation is None:
            self._step()
        elif self._accumulation.add(learner.active):
            self.take_rest()

    def take_rest(self) -> None:
        """Take a step of the gradients that are gathered, if there are any."""
        if self._accumulation is not None and self._accumulation.is_pending:
            self._learner.active = self._accumulation.take()
            self._step()

    def _step(self) -> None:
        """Apply the gradients, if they are finite."""
        learner, scaler = self._learner, self._learner.loss_scaler
        if learner.on_non_finite == "zero" and not self._may_have_overflowed():
            self.zeroed += [optimizer.zero_non_finite() for optimizer in learner.active]
        if scaler is not None:
            scaler.unscale(g for optimizer in learner.active for g in optimizer.gradients())
        norm = learner.postprocess_gradients()
        if self._looks and not math.isfinite(norm):
            if scaler is not None and scaler.lower():
                self.overflows += 1
            else:
                self.skipped.append(self._number)
            return
        self.norms.append(norm)
        if any(optimizer.clipping[0] > 0 for optimizer in learner.active):
            self.clipped.append(norm_of([g for o in learner.active for g in o.gradients()]))
        learner.apply_gradients()
        for policy in self._free_policies:
            policy.limit_free_params()
        if scaler is not None:
            scaler.count_step()
        learner.after_gradient_step()

    def _may_have_overflowed(self) -> bool:
        """Whether a gradient is not finite that a smaller scale of the loss could mend."""
        scaler = self._learner.loss_scaler
        if scaler is None or scaler.scale <= 1.0:
            return False
        gradients = [gradient for own in self._learner.active for gradient in own.gradients()]
        return not math.isfinite(norm_of(gradients))

    def finish(self, statistics: Statistics, progress: Progress) -> None:
        """Refuse gradients that were not finite, all or each as the settings say; record the rest.

        Raises:
            TrainingError: If they are refused.
        """
        learner, bad = self._learner, self._bad()
        learner.empty_updates = learner.empty_updates + 1 if bad and not self.norms else 0
        skips = learner.on_non_finite == "skip"
        if bad and not (skips and learner.empty_updates < learner.most_empty_updates):
            advice = "; algorithm.on_non_finite=skip leaves such steps out"
            if skips:
                advice = f" (there was no other gradient in {learner.empty_updates} updates)"
            where = f"epoch {progress.epoch + 1}, update {learner.weights_seq_no}"
            # The weights can only be the cause once a step has changed them.
            has_learned = bool(learner.weights_seq_no or bad[0])
            raise _non_finite_error(where, bad[0], statistics, has_learned, advice)
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

    def _bad(self) -> list[int]:
        """Minibatches, or steps where no one looked before, whose gradient was not finite."""
        if self._looks or not self.norms:
            return self.skipped
        norms = torch.stack(self.norms).tolist()  # the one wait for the device
        return [number for number, norm in enumerate(norms) if not math.isfinite(norm)]


def _non_finite_error(
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
        "logits that are all -inf, and for returns whose squares float32 cannot hold (beyond "
        f"1e19): scale the rewards, with a2c and ppo by algorithm.reward_scaling=true{advice}"
    )


def statistics_of(module_id: str, statistics: Statistics) -> Statistics:
    """Statistics that record under the id of a module, if it is one of several."""
    if module_id == DEFAULT_MODULE:
        return statistics
    own: Statistics = OwnStatistics(statistics, module_id)
    return own
