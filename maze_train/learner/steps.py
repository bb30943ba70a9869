"""Gradient steps: accumulation, loss scaling, clipping and non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from maze_train.core.errors import TrainingError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.events import LearnerEvents
from maze_train.learner.optimizers import ModuleOptimizer, joint_norm, norm_of


class GradientSteps:
    """Applies the gradients of a learner and records the steps of an update.

    The learner calls `add` for each minibatch and, if a step is due, `prepare`, `clip`, `check` and
    `apply`. Optimizers skip frozen parameters, and steps with a non-finite gradient.

    No value is read on the host before `finish`, because reading would synchronise the device and
    cannot be captured in a CUDA graph.

    Args:
        device: Device of the parameters.
        on_non_finite: `raise`, `skip` or `zero`, see `algorithm.on_non_finite`.
        accumulation: Minibatches per step, >= 1; the last step of an update may have fewer.
        scales_losses: Whether to scale losses, as required for float16 gradients.

    Attributes:
        scaler: Loss scaler; None if losses are not scaled.
        counts: Whether `train/gradient_steps` counts the next steps.
        empty_updates: Number of consecutive updates without any finite gradient.
    """

    def __init__(
        self, device: torch.device, on_non_finite: str, accumulation: int, scales_losses: bool
    ) -> None:
        self.on_non_finite = on_non_finite
        self.scaler = LossScaler(device) if scales_losses else None
        self.counts, self.empty_updates = True, 0
        self._device, self._accumulation = device, Accumulation(accumulation)
        # Kernels of fused optimizers require float32.
        self._has_failed = torch.zeros((), dtype=torch.float32, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin an update."""
        self._accumulation.clear()
        self._has_failed.zero_()
        self._number = 0
        self._numbers: list[int] = []
        self._counts: list[bool] = []
        self._norms: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._clipped: dict[int, Tensor] = {}
        self._zeroed: list[Tensor] = []

    @property
    def are_pending(self) -> bool:
        """Whether there are accumulated gradients that have not been applied."""
        return self._accumulation.is_pending

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss, 0-d, multiplied by the loss scale."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def add(self, number: int, active: Sequence[ModuleOptimizer]) -> bool:
        """Add the gradients of a minibatch; return whether a step is due.

        Args:
            number: Number of the minibatch in the update.
            active: The optimizers of the gradients.
        """
        self._number = number
        return self._accumulation.add(active)

    def prepare(self, active: list[ModuleOptimizer]) -> list[ModuleOptimizer]:
        """Return the optimizers of a step, with accumulated, unscaled gradients.

        With `on_non_finite=zero`, non-finite entries are replaced by 0, unless reducing the loss
        scale might prevent such entries.

        Args:
            active: The optimizers of the last minibatch.
        """
        if self._accumulation.is_pending:
            active = self._accumulation.take()
        if self.on_non_finite == "zero":
            is_unscaled = None if self.scaler is None else self.scaler.scale <= 1.0
            self._zeroed += [optimizer.zero_non_finite(is_unscaled) for optimizer in active]
        if self.scaler is not None:
            self.scaler.unscale(g for optimizer in active for g in optimizer.gradients())
        return active

    def clip(self, active: Sequence[ModuleOptimizer]) -> Tensor:
        """Clip the gradients of each optimizer; return the joint norm before clipping, 0-d."""
        return joint_norm([optimizer.clip() for optimizer in active]).to(self._device)

    def check(self, norm: Tensor, active: Sequence[ModuleOptimizer]) -> None:
        """Record the norm of a gradient; if the norm is not finite, optimizers skip the step.

        With `on_non_finite=raise`, optimizers also skip all later steps of the update.

        Args:
            norm: Joint norm before clipping, 0-d.
            active: The optimizers of the clipped gradients.
        """
        is_bad = (norm - norm).ne_(0.0).float()  # 1 for NaN and infinity
        if any(optimizer.clipping[0] > 0 for optimizer in active):
            gradients = [g for optimizer in active for g in optimizer.gradients()]
            self._clipped[len(self._norms)] = norm_of(gradients)
        self._numbers.append(self._number)
        self._counts.append(self.counts)
        self._norms.append(norm)
        has_failed = is_bad
        if self.scaler is not None:
            self._scales.append(self.scaler.scale.clone())
            has_failed = is_bad * (self.scaler.scale <= 1.0)
            self.scaler.update(is_bad)
        if self.on_non_finite != "skip":
            torch.maximum(self._has_failed, has_failed, out=self._has_failed)
            if self.scaler is None:
                is_bad = self._has_failed
            else:
                is_bad = torch.maximum(self._has_failed, is_bad)
        for optimizer in active:
            optimizer.skips = is_bad

    def apply(self, active: Sequence[ModuleOptimizer]) -> None:
        """Take one step of each optimizer."""
        for optimizer in active:
            optimizer.step()

    def finish(self, statistics: Statistics, epoch: int, update: int, most_empty: int) -> None:
        """Record the steps of an update, or raise if gradients were not finite.

        Args:
            statistics: Statistics of the update.
            epoch: Index of the epoch, from 0.
            update: Number of updates before this one.
            most_empty: Number of consecutive updates without a finite gradient at which `skip`
                raises an error, >= 1.

        Raises:
            TrainingError: If a gradient was not finite; with `skip`, only if `most_empty`
                consecutive updates had no finite gradient.
        """
        # This is the only synchronisation of the device in an update.
        tensors = [*self._norms, *self._clipped.values(), *self._zeroed, *self._scales]
        values = iter(torch.stack(tensors).tolist() if tensors else ())
        norms = dict(enumerate(islice(values, len(self._norms))))
        clipped = dict(zip(self._clipped, values, strict=False))
        zeroed = list(islice(values, len(self._zeroed)))
        scales = list(values) or [1.0] * len(norms)
        taken = [i for i, norm in norms.items() if math.isfinite(norm)]
        bad = [
            self._numbers[i]
            for i, norm in norms.items()
            if not math.isfinite(norm) and scales[i] <= 1.0
        ]
        self.empty_updates = self.empty_updates + 1 if bad and not taken else 0
        skips = self.on_non_finite == "skip"
        if bad and not (skips and self.empty_updates < most_empty):
            advice = "; algorithm.on_non_finite=skip skips such steps"
            if skips:
                advice = f" (no finite gradient in {self.empty_updates} updates)"
            where = f"epoch {epoch + 1}, update {update}"
            # The weights can be the cause only after a first gradient step.
            raise _non_finite_error(where, bad[0], statistics, bool(update or bad[0]), advice)
        statistics.record(LearnerEvents.gradient_steps, float(sum(self._counts[i] for i in taken)))
        for event, recorded in (
            (LearnerEvents.grad_norm, [norms[i] for i in taken]),
            (LearnerEvents.grad_norm_clipped, [clipped[i] for i in taken if i in clipped]),
            (LearnerEvents.zeroed_gradients, zeroed),
        ):
            for value in recorded:
                statistics.record(event, value)
        if len(taken) < len(norms):
            statistics.record(LearnerEvents.skipped_steps, float(len(norms) - len(taken)))


def _non_finite_error(
    where: str, minibatch: int, statistics: Statistics, has_learned: bool, advice: str
) -> TrainingError:
    """Return the error for a non-finite gradient.

    Args:
        where: Epoch and update.
        minibatch: Number of the minibatch in the update.
        statistics: Statistics of the update; the message names values that are not finite.
        has_learned: Whether an earlier gradient step may have caused the error.
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
        "logits that are all -inf, and for returns beyond 1e19, whose squares overflow float32: "
        f"scale the rewards, with a2c and ppo by algorithm.reward_scaling=true{advice}"
    )


class Accumulation:
    """Mean gradients of several minibatches, each computed with the same weights.

    Args:
        count: Minibatches per step, >= 1; 1 disables accumulation.
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
    """Loss scale that keeps gradients in float16 from underflowing.

    The scale is halved if a gradient overflows, and doubled after 2000 steps without overflow. The
    scale and the number of steps since its last change are stored on the device.

    Args:
        device: Device of the losses.

    Source: Micikevicius et al. (2018), arXiv:1710.03740, section 3.2.
    """

    FIRST = 65536.0
    STEPS_TO_GROW = 2000

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(self.FIRST, dtype=torch.float32, device=device)
        self._steps = torch.zeros_like(self.scale)

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the loss scale, in place."""
        for gradient in gradients:
            gradient.div_(self.scale)

    def update(self, overflows: Tensor) -> None:
        """Halve the scale (to at least 1) if `overflows` (0-d) is 1; otherwise count a step."""
        self._steps.add_(1.0).mul_(1.0 - overflows)
        grows = self._steps >= self.STEPS_TO_GROW
        halved = (self.scale / 2.0).clamp_(min=1.0)
        kept = torch.where(grows, self.scale * 2.0, self.scale)
        self.scale.copy_(torch.where(overflows > 0.0, halved, kept))
        self._steps.masked_fill_(grows, 0.0)

    def state_dict(self) -> dict[str, float]:
        """Return the loss scale and the number of steps since its last change."""
        return {"scale": float(self.scale), "steps": float(self._steps)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a result of `state_dict`."""
        self.scale.fill_(state["scale"])
        self._steps.fill_(state["steps"])
