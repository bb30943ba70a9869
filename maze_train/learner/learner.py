"""Contract of all learners, in its single-process form."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from maze_train.events import Statistics
from maze_train.learner.accumulation import Accumulation
from maze_train.learner.gradients import norm_of
from maze_train.learner.learner_state import LearnerState
from maze_train.learner.modes import matmul_precision
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.learner.part import MadeFrom, Part, shard_rows
from maze_train.learner.steps import GradientSteps, LearnerEvents, non_finite_error
from maze_train.targets import TARGET, maker_of

if TYPE_CHECKING:
    from torch import nn

    from maze_train.learner.config import Progress
    from maze_train.learner.optimizers import ModuleOptimizer
    from maze_train.types import Tensor


Experience = TypeVar("Experience")
Prepared = TypeVar("Prepared")
Batch = TypeVar("Batch")
Data = TypeVar("Data")


class Learner(MadeFrom, LearnerState, ABC, Generic[Experience, Prepared, Batch]):
    """Updates modules from experience by gradient descent.

    One call of `update` does, in this order: `before_gradient_based_update` -> `preprocess`
    (targets, advantages) -> for each of `minibatches`: `forward` -> `compute_losses` ->
    `compute_gradients` -> `postprocess_gradients` -> `apply_gradients` -> then
    `weights_seq_no += 1` -> `after_gradient_based_update`.

    A subclass says what experience is prepared to (`preprocess`), how it is cut (`minibatches`) and
    what the loss of a module is (`compute_loss_for_module`).

    Args:
        modules: The independently trained modules by id; one module alone gets the id `default`.
        config: Settings of the algorithm, of which every learner reads these:

            - `optimizer`: `{_target_: torch.optim.Adam, ...}`, for every module; `lr`: its learning
              rate or the schedule of it.
            - `max_grad_norm`: bound of the gradient, 0: no clipping; `grad_clip_by`, if there is
              one: `global_norm` (the default), `norm` or `value`, see `clip_gradients`.
            - `on_non_finite`: `raise`: a gradient that is not finite ends training; `skip`: its
              step is left out, unless no step of `most_empty_updates` updates is left; `zero`:
              entries that are not finite count 0.
            - `gradient_accumulation`, if there is one: minibatches whose mean gradient a step
              follows; 1: each has a step of its own.
            - those of `GradientSettings`, if it derives from it.
            - `matmul_precision`, if there is one: precision of products of float32 matrices in
              updates: `highest` (the default), `high` or `medium`, see
              `torch.set_float32_matmul_precision`.
        device: Where the modules and their updates live.
        seed: Seed of the learner's own random numbers (order of minibatches).
    """

    config: Any
    most_empty_updates: ClassVar[int] = 1
    """Updates in a row without a gradient step, as none was finite, after which training ends."""
    part: Part = Part()
    """Part of each minibatch that this learner computes."""

    def __init__(
        self,
        modules: nn.Module | Mapping[str, Any],
        config: Any,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self._empty_updates = 0
        self._active: list[ModuleOptimizer] = []
        self.on_non_finite: str = config.on_non_finite
        self.grad_clip_by: str = getattr(config, "grad_clip_by", "global_norm")
        self.precision: str = getattr(config, "matmul_precision", "highest")
        super().__init__(modules, config, device, seed)
        count: int = getattr(config, "gradient_accumulation", 1)
        self._accumulation = Accumulation(count) if count > 1 else None
        self.loss_function = _loss_function(self.settings.loss_function)

    # -- one update ------------------------------------------------------------------------------

    @torch.enable_grad()
    def update(
        self, experience: Experience | Mapping[str, Experience], progress: Progress
    ) -> Statistics:
        """Learn from experience.

        Args:
            experience: Experience of the only module, or of modules by id.
            progress: Where training stands before this update.

        Returns:
            Statistics of the update.

        Raises:
            ConfigError: If experience comes for a module that does not exist.
            TrainingError: If a gradient was not finite.
        """
        statistics = Statistics()
        by_module = self._by_module(experience)
        self.before_gradient_based_update(progress, statistics)
        prepared = {
            module_id: self.preprocess(module_id, part, statistics)
            for module_id, part in by_module.items()
            if self.should_module_be_updated(module_id, part)
        }
        minibatches = self.minibatches(prepared, statistics)
        return self._learn(list(prepared), minibatches, statistics, progress)

    def update_from_batch(
        self, batch: Batch | Mapping[str, Batch], progress: Progress
    ) -> Statistics:
        """Learn from one minibatch as the loss takes it, see `update_from_iterator`."""
        return self.update_from_iterator([batch], progress)

    @torch.enable_grad()
    def update_from_iterator(
        self, minibatches: Iterable[Batch | Mapping[str, Batch]], progress: Progress
    ) -> Statistics:
        """Learn from minibatches that were cut already: an update without `preprocess`.

        Args:
            minibatches: Minibatches of the only module, or of modules by id; each is asked for when
                the step before is taken, until there are no more.
            progress: Where training stands before this update.

        Returns:
            Statistics of the update.

        Raises:
            ConfigError: If there is a minibatch for a module that does not exist.
            TrainingError: If a gradient was not finite.
        """
        statistics = Statistics()
        self.before_gradient_based_update(progress, statistics)
        chosen = (
            {
                module_id: batch
                for module_id, batch in self._by_module(minibatch).items()
                if self.should_module_be_updated(module_id, batch)
            }
            for minibatch in minibatches
        )
        return self._learn(list(self.modules), filter(None, chosen), statistics, progress)

    def _learn(
        self,
        module_ids: Sequence[str],
        minibatches: Iterator[Mapping[str, Batch]],
        statistics: Statistics,
        progress: Progress,
    ) -> Statistics:
        """Take the steps of an update, if there are modules that learn, and end it."""
        if module_ids:
            with matmul_precision(self.precision):
                self._take_steps(module_ids, minibatches, statistics, progress)
        self.weights_seq_no += 1
        self.after_gradient_based_update(progress, statistics)
        return statistics

    def _by_module(self, experience: Data | Mapping[str, Data]) -> dict[str, Data]:
        if not isinstance(experience, Mapping):
            experience = {DEFAULT_MODULE: experience}
        for module_id in experience:
            self._known(module_id)
        return dict(experience)

    def _take_steps(
        self,
        module_ids: Sequence[str],
        minibatches: Iterator[Mapping[str, Batch]],
        statistics: Statistics,
        progress: Progress,
    ) -> None:
        modules = [self.modules[key] for key in module_ids if key in self.modules_with_modes]
        for module in modules:
            module.train()
        # A look at each norm would stall a GPU; there all are looked at after the update.
        looks = (
            self.device.type == "cpu"
            or self.on_non_finite == "skip"
            or self.loss_scaler is not None
        )
        steps = GradientSteps(looks=looks)
        number = 0
        own = self.part.begin(statistics)
        for number, minibatch in enumerate(minibatches):
            with self._autocast():
                losses = self.compute_losses(self.part.take(self.shard, minibatch), own)
            if self.should_stop(own):
                break
            self._active = self.active_optimizers(losses)
            self.compute_gradients(losses)
            self.part.join_gradients(self._active)
            if self._accumulation is None or self._accumulation.add(self._active):
                self._step(number, steps)
            self.after_minibatch(number)
            if steps.skipped and self.on_non_finite == "raise":
                break
        if self._accumulation is not None and self._accumulation.is_pending:
            self._step(number, steps)
        self.part.end(statistics)
        for module in modules:
            module.eval()
        self._check_finite(steps, statistics, progress)
        steps.record(statistics)

    def _autocast(self) -> AbstractContextManager[Any]:
        """What losses are computed in: layers in `algorithm.autocast`, if that is a type."""
        name = self.settings.autocast
        if name == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=getattr(torch, name))

    def _step(self, number: int, steps: GradientSteps) -> None:
        """Take the gradient step of a minibatch, or of those up to it, if it is finite."""
        if self._accumulation is not None:
            self._active = self._accumulation.take()
        if self.on_non_finite == "zero":
            steps.zeroed += [optimizer.zero_non_finite() for optimizer in self._active]
        norm = self.postprocess_gradients()
        if steps.looks and not math.isfinite(norm):
            if self.loss_scaler is not None and self.loss_scaler.lower():
                steps.overflows += 1
            else:
                steps.skipped.append(number)
            return
        steps.norms.append(norm)
        if self.config.max_grad_norm > 0:
            steps.clipped.append(norm_of([g for o in self._active for g in o.gradients()]))
        self.apply_gradients()
        if self.loss_scaler is not None:
            self.loss_scaler.count_step()
        self.after_gradient_step()

    def _check_finite(
        self, steps: GradientSteps, statistics: Statistics, progress: Progress
    ) -> None:
        """Refuse gradients that are not finite, all or each, as the settings say."""
        bad = steps.bad()
        self._empty_updates = self._empty_updates + 1 if bad and not steps.norms else 0
        skips = self.on_non_finite == "skip"
        if bad and not (skips and self._empty_updates < self.most_empty_updates):
            advice = "; algorithm.on_non_finite=skip leaves such steps out"
            if skips:
                advice = f" (there was no other gradient in {self._empty_updates} updates)"
            where = f"epoch {progress.epoch + 1}, update {self.weights_seq_no}"
            # The weights can only be the cause once a step has changed them.
            has_learned = bool(self.weights_seq_no or bad[0])
            raise non_finite_error(where, bad[0], statistics, has_learned, advice)

    def forget_episodes(self, envs: Tensor) -> None:
        """Forget what is kept of running episodes in some environments, `[B]` bool: they were lost.

        Nothing, unless a learner follows episodes from one update to the next.
        """

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, before everything: learning rates, frozen parameters, schedules."""
        self.hold_parameters(progress)
        for optimizer in self.optimizers.values():
            statistics.record(LearnerEvents.learning_rate, optimizer.set_lr(progress))

    @abstractmethod
    def preprocess(
        self, module_id: str, experience: Experience, statistics: Statistics
    ) -> Prepared:
        """Turn experience into the input of minibatches: device, values, advantages, targets."""

    @abstractmethod
    def minibatches(
        self, prepared: Mapping[str, Prepared], statistics: Statistics
    ) -> Iterator[Mapping[str, Batch]]:
        """The minibatches of one update, by module."""

    def shard(self, batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
        """The part of a minibatch that the learner `rank` of `count` computes.

        What a loss takes of the whole minibatch has to be made of it here.

        Returns:
            Samples `rank`, `rank + count`, ... or, if there are none, any; how many these are (0 in
            that case); how many there are in all.
        """
        return shard_rows(batch, rank, count)

    def compute_losses(
        self, minibatch: Mapping[str, Batch], statistics: Statistics
    ) -> dict[str, Tensor]:
        """The loss of each module; override it for losses that join modules."""
        return {
            module_id: self._loss_of(module_id, batch, statistics)
            for module_id, batch in minibatch.items()
        }

    @property
    def may_differentiate_by_hand(self) -> bool:
        """Whether all losses are those of the algorithm, computed in the type of the weights."""
        replaced = self.loss_function is not None or self.modules_with_loss
        return not replaced and self.settings.autocast == "none"

    def _loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """The loss of a module: its own, else that of the settings, else that of the algorithm."""
        if module_id in self.modules_with_loss:
            module: Any = self.modules[module_id]
            loss = module.compute_self_supervised_loss(batch, statistics)
        elif self.loss_function is not None:
            loss = self.loss_function(self, module_id, batch, statistics)
        else:
            loss = self.compute_loss_for_module(module_id, batch, statistics)
        if not isinstance(loss, Mapping):
            return loss  # type: ignore[no-any-return]  # of a module or function of a user
        prefix = "" if module_id == DEFAULT_MODULE else f"{module_id}/"
        for name, term in loss.items():
            statistics.record(LearnerEvents.loss.of_part(prefix + name), term)
        return torch.stack(list(loss.values())).sum()

    @abstractmethod
    def compute_loss_for_module(
        self, module_id: str, batch: Batch, statistics: Statistics
    ) -> Tensor | Mapping[str, Tensor]:
        """Forward pass and loss of one module on one minibatch, 0-d.

        Or the terms of the loss, 0-d each, by names, under which they are reported: the loss is
        their sum.
        """

    def should_stop(self, statistics: Statistics) -> bool:
        """Whether the update ends before the gradient of the current minibatch is applied."""
        return False

    def active_optimizers(self, losses: Mapping[str, Tensor]) -> list[ModuleOptimizer]:
        """The optimizers that take part in a gradient step: those of modules that have a loss.

        Others must not step: their momentum would move what has no gradient.
        """
        return [o for (module_id, _), o in self.optimizers.items() if module_id in losses]

    def compute_gradients(self, losses: Mapping[str, Tensor]) -> None:
        """Replace the gradients of the modules by those of the sum of their losses."""
        for optimizer in self._active:
            optimizer.zero_grad()
        terms = [loss for loss in losses.values() if loss.requires_grad]
        if terms:
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            if self.loss_scaler is not None:
                total = total * self.loss_scaler.scale
            total.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    def postprocess_gradients(self) -> Tensor:
        """Clip the gradients of each optimizer; returns the norm of all of them before that.

        Gradients of a loss that was scaled are brought back to their size first.
        """
        if self.loss_scaler is not None:
            for gradient in (g for optimizer in self._active for g in optimizer.gradients()):
                gradient.div_(self.loss_scaler.scale)
        norms = [o.clip(self.config.max_grad_norm, self.grad_clip_by) for o in self._active]
        if not norms:
            return torch.zeros((), device=self.device)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def apply_gradients(self) -> None:
        """One step of each optimizer of the modules that are updated."""
        for optimizer in self._active:
            optimizer.step()

    def after_gradient_step(self) -> None:
        """After each gradient step that was applied: target networks."""

    def after_minibatch(self, number: int) -> None:
        """After each minibatch, counted from 0, with or without a step of its own."""

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, after everything: adaptive coefficients, running statistics."""


def _loss_function(node: Mapping[str, Any] | None) -> Callable[..., Any] | None:
    """The function that `algorithm.loss_function` names, with its own arguments."""
    if node is None:
        return None
    key = "algorithm.loss_function"
    function = maker_of(node[TARGET], f"{key}.{TARGET}")
    return partial(function, **{name: value for name, value in node.items() if name != TARGET})
