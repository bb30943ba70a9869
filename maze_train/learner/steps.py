"""Gradient steps: accumulation, loss scaling, clipping and non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from maze_train.core.errors import TrainingError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.events import LearnerEvents
from maze_train.learner.optimizers import ModuleOptimizer, joint_norm, norm_of


class GradientSteps:
    """Applies the gradients of a learner and records the steps of an update.

    For each minibatch the learner calls `add`; if a step is due, `prepare`, `clip` and `accepts`,
    and, if the gradient is finite, `apply`. Optimizers skip frozen parameters.

    Args:
        device: Device of the parameters.
        on_non_finite: `raise`, `skip` or `zero`, see `algorithm.on_non_finite`.
        accumulation: Minibatches per step, >= 1; the last step of an update may have fewer.
        scales_losses: Whether losses are scaled, for gradients in float16.

    Attributes:
        scaler: Factor of the losses; None: 1.
        empty_updates: Number of consecutive updates without any finite gradient.
    """

    def __init__(
        self, device: torch.device, on_non_finite: str, accumulation: int, scales_losses: bool
    ) -> None:
        self.on_non_finite = on_non_finite
        self.scaler = LossScaler() if scales_losses else None
        self.empty_updates = 0
        self._device, self._accumulation = device, Accumulation(accumulation)
        self.begin()

    def begin(self) -> None:
        """Begin an update."""
        self._accumulation.clear()
        # Reading a norm synchronises the GPU, so on a GPU all norms are checked after the update.
        self._checks_each = (
            self._device.type == "cpu" or self.on_non_finite == "skip" or self.scaler is not None
        )
        self._number = self._overflows = 0
        self._norms: list[Tensor] = []
        self._clipped: list[Tensor] = []
        self._zeroed: list[Tensor] = []
        self._skipped: list[int] = []

    @property
    def have_failed(self) -> bool:
        """Whether a gradient was not finite, so that the update ends with an error."""
        return bool(self._skipped) and self.on_non_finite == "raise"

    @property
    def are_pending(self) -> bool:
        """Whether there are accumulated gradients that were not applied."""
        return self._accumulation.is_pending

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss, 0-d, multiplied by the factor of losses."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def add(self, number: int, active: Sequence[ModuleOptimizer]) -> bool:
        """Add the gradients of a minibatch; return whether a step is due.

        Args:
            number: Number of the minibatch in the update.
            active: The optimizers that hold the gradients.
        """
        self._number = number
        return self._accumulation.add(active)

    def prepare(self, active: list[ModuleOptimizer]) -> list[ModuleOptimizer]:
        """Return the optimizers of a step, with accumulated, unscaled gradients.

        With `on_non_finite=zero`, entries that are not finite become 0.

        Args:
            active: The optimizers of the last minibatch.
        """
        if self._accumulation.is_pending:
            active = self._accumulation.take()
        if self.on_non_finite == "zero" and not self._may_have_overflowed(active):
            self._zeroed += [optimizer.zero_non_finite() for optimizer in active]
        if self.scaler is not None:
            self.scaler.unscale(g for optimizer in active for g in optimizer.gradients())
        return active

    def clip(self, active: Sequence[ModuleOptimizer]) -> Tensor:
        """Clip the gradients of each optimizer; return the joint norm before clipping, 0-d."""
        return joint_norm([optimizer.clip() for optimizer in active]).to(self._device)

    def accepts(self, norm: Tensor, active: Sequence[ModuleOptimizer]) -> bool:
        """Return whether a gradient may be applied, and record its norm; False: not finite.

        Args:
            norm: Joint norm before clipping, 0-d.
            active: The optimizers that hold the clipped gradients.
        """
        if self._checks_each and not math.isfinite(norm):
            if self.scaler is not None and self.scaler.lower():
                self._overflows += 1
            else:
                self._skipped.append(self._number)
            return False
        self._norms.append(norm)
        if any(optimizer.clipping[0] > 0 for optimizer in active):
            self._clipped.append(norm_of([g for o in active for g in o.gradients()]))
        if self.scaler is not None:
            self.scaler.count_step()
        return True

    def apply(self, active: Sequence[ModuleOptimizer]) -> None:
        """Take one step of each optimizer."""
        for optimizer in active:
            optimizer.step()

    def _may_have_overflowed(self, active: Sequence[ModuleOptimizer]) -> bool:
        """Return whether a non-finite gradient may be due to the loss scale."""
        if self.scaler is None or self.scaler.scale <= 1.0:
            return False
        return not math.isfinite(norm_of([g for own in active for g in own.gradients()]))

    def finish(self, statistics: Statistics, epoch: int, update: int, most_empty: int) -> None:
        """Record the steps of an update, or raise if gradients were not finite.

        Args:
            statistics: Statistics of the update.
            epoch: Index of the epoch, from 0.
            update: Number of updates before this one.
            most_empty: Consecutive updates without a finite gradient that `skip` allows, >= 1.

        Raises:
            TrainingError: If a gradient was not finite, or with `skip`, in too many updates.
        """
        bad = self._non_finite()
        self.empty_updates = self.empty_updates + 1 if bad and not self._norms else 0
        skips = self.on_non_finite == "skip"
        if bad and not (skips and self.empty_updates < most_empty):
            advice = "; algorithm.on_non_finite=skip skips such steps"
            if skips:
                advice = f" (there was no other gradient in {self.empty_updates} updates)"
            where = f"epoch {epoch + 1}, update {update}"
            # The weights can only be the cause once a step has changed them.
            raise _non_finite_error(where, bad[0], statistics, bool(update or bad[0]), advice)
        statistics.record(LearnerEvents.gradient_steps, float(len(self._norms)))
        for event, values in (
            (LearnerEvents.grad_norm, self._norms),
            (LearnerEvents.grad_norm_clipped, self._clipped),
            (LearnerEvents.zeroed_gradients, self._zeroed),
        ):
            for value in values:
                statistics.record(event, value)
        if self._skipped or self._overflows:
            left_out = float(len(self._skipped) + self._overflows)
            statistics.record(LearnerEvents.skipped_steps, left_out)

    def _non_finite(self) -> list[int]:
        """Minibatches (on a GPU: steps) whose gradient was not finite."""
        if self._checks_each or not self._norms:
            return self._skipped
        norms = torch.stack(self._norms).tolist()  # Synchronises the device once per update.
        return [number for number, norm in enumerate(norms) if not math.isfinite(norm)]


def _non_finite_error(
    where: str, minibatch: int, statistics: Statistics, has_learned: bool, advice: str
) -> TrainingError:
    """Return the error of a gradient that is not finite.

    Args:
        where: Epoch and update.
        minibatch: Number of the minibatch in the update.
        statistics: Statistics of the update; the message names values that are not finite.
        has_learned: Whether an earlier step may be the cause.
        advice: End of the message.
    """
    numbers = {tag: value for tag, value in statistics.reduce().items() if value - value != 0.0}
    hint = "No step was taken yet: look for"
    if has_learned:
        hint = "A smaller algorithm.lr or an algorithm.max_grad_norm may help, or look for"
    named = "".join(f", {tag} = {value}" for tag, value in numbers.items())
    return TrainingError(
        f"{where}: the gradient of minibatch {minibatch} is not finite{named}. {hint} "
        "observations, rewards or outputs of a custom network that are not finite, such as "
        "logits that are all -inf, and for returns whose squares float32 cannot hold (beyond "
        f"1e19): scale the rewards, with a2c and ppo by algorithm.reward_scaling=true{advice}"
    )


class Accumulation:
    """Mean gradients of several minibatches, each computed with the same weights.

    Args:
        count: Minibatches per step, >= 1; with 1 the gradients stay where they are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.clear()

    def clear(self) -> None:
        """Drop accumulated gradients."""
        self._minibatches = 0
        self._uses: dict[ModuleOptimizer, int] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there are accumulated gradients."""
        return self._minibatches > 0

    def add(self, optimizers: Sequence[ModuleOptimizer]) -> bool:
        """Add the gradients of a minibatch; return whether a step is due."""
        if self._count == 1:
            return True
        self._minibatches += 1
        for optimizer in optimizers:
            self._uses[optimizer] = self._uses.get(optimizer, 0) + 1
            for param in optimizer.owned():
                if param.grad is not None:
                    kept = self._sums.get(param)
                    self._sums[param] = param.grad.clone() if kept is None else kept + param.grad
        return self._minibatches == self._count

    def take(self) -> list[ModuleOptimizer]:
        """Set the gradients of each optimizer to the mean over its minibatches, and reset."""
        for optimizer, count in self._uses.items():
            for param in optimizer.owned():
                if param in self._sums:
                    mean = self._sums[param].div_(count)
                    if param.grad is None:
                        param.grad = mean
                    else:
                        param.grad.copy_(mean)
        optimizers = list(self._uses)
        self.clear()
        return optimizers


class LossScaler:
    """Factor of the loss that keeps gradients in float16 from underflowing.

    The factor is halved when a gradient overflows, and doubled after many steps.

    Source: Micikevicius et al. (2018), arXiv:1710.03740, section 3.2.
    """

    FIRST = 65536.0
    STEPS_TO_GROW = 2000

    def __init__(self) -> None:
        self.scale = self.FIRST
        self._steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the factor, in place."""
        for gradient in gradients:
            gradient.div_(self.scale)

    def lower(self) -> bool:
        """Halve the factor after an overflow; return False if it is already 1."""
        self._steps = 0
        if self.scale <= 1.0:
            return False
        self.scale /= 2.0
        return True

    def count_step(self) -> None:
        """Count a step without an overflow."""
        self._steps += 1
        if self._steps == self.STEPS_TO_GROW:
            self._steps = 0
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the number of steps since it changed."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.scale, self._steps = state["scale"], state["steps"]
