"""Gradient steps: accumulation, loss scaling, clipping and non-finite gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

import torch

from maze_train.core.errors import TrainingError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.learner.events import LearnerEvents
from maze_train.learner.optimizers import ModuleOptimizer, joint_norm, norm_of

Batch = TypeVar("Batch")
LossOf: TypeAlias = Callable[[str, Batch, Statistics], Tensor | Mapping[str, Tensor]]
"""Computes the loss of a module from module ID, minibatch and statistics: 0-d, or named terms."""


@dataclass(frozen=True)
class Part(Generic[Batch]):
    """One loss of a gradient step, and the optimizers that follow its gradient."""

    name: str
    loss: LossOf[Batch] | None = None
    """Loss of a module; None: `Learner.compute_losses`."""
    optimizers: tuple[str, ...] | None = None
    """Names of the optimizers of a module; None: all."""


class GradientSteps:
    """Decides whether gradient steps are applied, and records the steps of an update.

    For each part of a step, the learner calls `prepare` and `judge`; `end_step` ends the step. If
    the gradient of any part is not finite, the whole step is skipped.

    No value is read on the host before `finish`, because reading would synchronise the device and
    cannot be captured in a CUDA graph.

    Args:
        device: Device of the parameters.
        on_non_finite: `raise`, `skip` or `zero`, see `algorithm.on_non_finite`.
        accumulation: Minibatches per step, >= 1; the last step of an update may have fewer.
        scales_losses: Whether to scale losses, as required for float16 gradients.

    Attributes:
        scaler: Loss scaler; None if losses are not scaled.
        empty_updates: Number of consecutive updates without any finite gradient.
        number: Number of the current minibatch in the update.
        taken: Number of steps of this update so far, including skipped steps.
        pending: Optimizers with accumulated gradients that have not been applied.
    """

    def __init__(
        self, device: torch.device, on_non_finite: str, accumulation: int, scales_losses: bool
    ) -> None:
        self.on_non_finite, self.accumulation = on_non_finite, accumulation
        self.scaler = LossScaler(device) if scales_losses else None
        self.empty_updates = 0
        self.pending: list[ModuleOptimizer] = []
        self._device = device
        # Kernels of fused optimizers require float32.
        self._has_failed = torch.zeros((), dtype=torch.float32, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin an update."""
        self.drop(self.pending)
        self._has_failed.zero_()
        self.number = self.taken = self._minibatches = 0
        self._numbers: list[int] = []  # Minibatch of each step.
        self._steps: list[int] = []  # Step of each norm.
        self._norms: list[Tensor] = []
        self._scales: list[Tensor] = []
        self._clipped: dict[int, Tensor] = {}
        self._zeroed: list[Tensor] = []

    @property
    def must_undo(self) -> bool:
        """Whether training continues after a step of which only the first parts were applied."""
        return self.on_non_finite == "skip" or self.scaler is not None

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss, 0-d, multiplied by the loss scale."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def accumulate(self, optimizers: Sequence[ModuleOptimizer]) -> bool:
        """Add the gradients of a minibatch; return whether a step is due."""
        self._minibatches += 1
        for optimizer in optimizers:
            optimizer.accumulate()
        self.pending = list(dict.fromkeys([*self.pending, *optimizers]))
        return self._minibatches == self.accumulation

    def take(self) -> list[ModuleOptimizer]:
        """Return the pending optimizers, each with the mean gradient of its minibatches."""
        optimizers, self.pending, self._minibatches = self.pending, [], 0
        for optimizer in optimizers:
            optimizer.average()
        return optimizers

    def drop(self, optimizers: Sequence[ModuleOptimizer]) -> None:
        """Drop the accumulated gradients of optimizers."""
        for optimizer in optimizers:
            optimizer.drop()
        self.pending = [each for each in self.pending if each not in optimizers]

    def prepare(self, optimizers: Sequence[ModuleOptimizer]) -> None:
        """Remove the loss scale from gradients.

        With `on_non_finite=zero`, non-finite entries are replaced by 0, unless reducing the loss
        scale might prevent such entries.
        """
        if self.on_non_finite == "zero":
            is_unscaled = None if self.scaler is None else self.scaler.scale <= 1.0
            self._zeroed += [optimizer.zero_non_finite(is_unscaled) for optimizer in optimizers]
        if self.scaler is not None:
            self.scaler.unscale(g for optimizer in optimizers for g in optimizer.gradients())

    def clip(self, optimizers: Sequence[ModuleOptimizer]) -> Tensor:
        """Clip the gradients of each optimizer; return the joint norm before clipping, 0-d."""
        return joint_norm([optimizer.clip() for optimizer in optimizers]).to(self._device)

    def judge(
        self, norm: Tensor, optimizers: Sequence[ModuleOptimizer], skip: Tensor | None
    ) -> Tensor:
        """Record the norm of a gradient; return whether to skip this part and all later parts.

        With `on_non_finite=raise`, all later steps of the update are skipped, too.

        Args:
            norm: Joint norm before clipping, 0-d.
            optimizers: The optimizers of the clipped gradients.
            skip: Result for the previous part; None for the first part of a step.

        Returns:
            1 or 0, 0-d on the device.
        """
        is_bad = (norm - norm).ne_(0.0).float()  # 1 for NaN and infinity
        if any(optimizer.clipping[0] > 0 for optimizer in optimizers):
            gradients = [g for optimizer in optimizers for g in optimizer.gradients()]
            self._clipped[len(self._norms)] = norm_of(gradients)
        if skip is None:
            self._numbers.append(self.number)
            skip = is_bad
        else:
            skip = torch.maximum(skip, is_bad)
        self._steps.append(self.taken)
        self._norms.append(norm)
        has_failed = is_bad
        if self.scaler is not None:
            self._scales.append(self.scaler.scale.clone())
            has_failed = is_bad * (self.scaler.scale <= 1.0)
        if self.on_non_finite != "skip":
            torch.maximum(self._has_failed, has_failed, out=self._has_failed)
            # Without a scale, `_has_failed` includes the parts of this step.
            skip = (
                self._has_failed if self.scaler is None else torch.maximum(self._has_failed, skip)
            )
        return skip

    def end_step(self, skip: Tensor) -> None:
        """Count a step, and update the loss scale; `skip` is the result for the last part."""
        self.taken += 1
        if self.scaler is not None:
            self.scaler.update(skip)

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
        norms = list(islice(values, len(self._norms)))
        clipped = dict(zip(self._clipped, values, strict=False))
        zeroed = list(islice(values, len(self._zeroed)))
        scales = list(values) or [1.0] * len(norms)
        bad = [i for i, norm in enumerate(norms) if not math.isfinite(norm)]
        skipped = {self._steps[i] for i in bad}
        failed = [self._numbers[self._steps[i]] for i in bad if scales[i] <= 1.0]
        num_taken = len(self._numbers) - len(skipped)
        self.empty_updates = self.empty_updates + 1 if failed and not num_taken else 0
        skips = self.on_non_finite == "skip"
        if failed and not (skips and self.empty_updates < most_empty):
            advice = "; algorithm.on_non_finite=skip skips such steps"
            if skips:
                advice = f" (no finite gradient in {self.empty_updates} updates)"
            where = f"epoch {epoch + 1}, update {update}"
            # The weights can be the cause only after a first gradient step.
            has_learned = bool(update or failed[0])
            raise _non_finite_error(where, failed[0], statistics, has_learned, advice)
        statistics.record(LearnerEvents.gradient_steps, float(num_taken))
        taken = [i for i, step in enumerate(self._steps) if step not in skipped]
        for event, recorded in (
            (LearnerEvents.grad_norm, [norms[i] for i in taken]),
            (LearnerEvents.grad_norm_clipped, [clipped[i] for i in taken if i in clipped]),
            (LearnerEvents.zeroed_gradients, zeroed),
        ):
            for value in recorded:
                statistics.record(event, value)
        if skipped:
            statistics.record(LearnerEvents.skipped_steps, float(len(skipped)))


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
