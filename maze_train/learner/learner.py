"""Contract of all learners, in its single-process form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.targets import function_of
from maze_train.learner.accumulation import Accumulation
from maze_train.learner.components import merged, read, select, write
from maze_train.learner.modules import DEFAULT_MODULE, LearnerModules, autocast, matmul_precision
from maze_train.learner.part import MadeFrom, Part
from maze_train.learner.shard import shard_rows
from maze_train.learner.steps import (
    GradientSteps,
    LearnerEvents,
    check_finite,
    compiled_losses,
    statistics_of,
)

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

    from maze_train.core.types import Tensor
    from maze_train.learner.config import Progress
    from maze_train.learner.optimizers import ModuleOptimizer


Experience = TypeVar("Experience")
Prepared = TypeVar("Prepared")
Batch = TypeVar("Batch")
Data = TypeVar("Data")


class Learner(MadeFrom, LearnerModules, ABC, Generic[Experience, Prepared, Batch]):
    """Updates modules from experience by gradient descent.

    One call of `update` does, in this order: `before_gradient_based_update` -> `preprocess`
    (targets, advantages) -> for each of `minibatches`: `forward` -> `compute_losses` ->
    `compute_gradients` -> `postprocess_gradients` -> `apply_gradients` -> then
    `weights_seq_no += 1` -> `after_gradient_based_update`.

    A subclass says what experience is prepared to (`preprocess`), how it is cut (`minibatches`) and
    what the loss of a module is (`compute_loss_for_module`).

    Args:
        modules: The independently trained modules by id; one module alone gets the id `default`.
        config: Settings of the algorithm. Every learner reads these:

            - `optimizer`: `{_target_: torch.optim.Adam, ...}`, for every module; `lr`: its learning
              rate or the schedule of it.
            - `max_grad_norm`: bound of the gradient, 0: no clipping; `grad_clip_by`, if it exists:
                `global_norm` (the default), `norm` or `value`, see `clip_gradients`.
            - `on_non_finite`: `raise`: a gradient that is not finite ends training; `skip`: its
              step is left out, unless no step of `most_empty_updates` updates is left; `zero`:
              entries that are not finite count 0.
            - `gradient_accumulation`, if there is one: minibatches whose mean gradient a step
              follows; 1: each has its own step.
            - those of `GradientSettings`, if it derives from it.
            - `matmul_precision`, if there is one: precision of products of float32 matrices in
              updates: `highest` (the default), `high` or `medium`, see `modes.matmul_precision`.
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
        self.active: list[ModuleOptimizer] = []
        self.on_non_finite: str = config.on_non_finite
        self.precision: str = getattr(config, "matmul_precision", "highest")
        super().__init__(modules, config, device, seed)
        count: int = getattr(config, "gradient_accumulation", 1)
        self.accumulation: Accumulation | None = None
        if count > 1:
            self.accumulation = Accumulation(count)
        node = self.settings.loss_function
        self.loss_function = None if node is None else function_of(node, "algorithm.loss_function")
        self.compiled = compiled_losses(self) if self.settings.compile != "none" else None

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
        prepared = {}
        for module_id, part in by_module.items():
            if self.should_module_be_updated(module_id, part):
                with self.settings_of(module_id):
                    own = statistics_of(module_id, statistics)
                    prepared[module_id] = self.preprocess(module_id, part, own)
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
            progress: See `update`, as for what is returned and raised.
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
        for optimizer in self.optimizers.values():
            optimizer.end_update()
        if self.compiled is not None:
            self.compiled.report(statistics)
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
        steps = GradientSteps(self)
        if self.accumulation is not None:
            self.accumulation.clear()  # an update before may have failed
        number = 0
        own = self.part.begin(statistics)
        for number, minibatch in enumerate(minibatches):
            with autocast(self.device, self.settings.autocast):
                losses = self.compute_losses(self.part.take(self.shard, minibatch), own)
            if self.should_stop(own):
                break
            self.active = self.active_optimizers(losses)
            self.compute_gradients(losses)
            self.part.join_gradients(self.active, self.optimizers)
            if self.accumulation is None or self.accumulation.add(self.active):
                steps.take(number)
            self.after_minibatch(number)
            if steps.skipped and self.on_non_finite == "raise":
                break
        if self.accumulation is not None and self.accumulation.is_pending:
            steps.take(number)
        self.part.end(statistics)
        for module in modules:
            module.eval()
        steps.finish(statistics, progress)

    def check_weights(self) -> None:
        """Refuse weights that are not finite.

        Raises:
            TrainingError: If there is one, with its module and name.
        """
        check_finite(self.modules, f"update {self.weights_seq_no}")

    def forget_episodes(self, envs: Tensor) -> None:
        """Forget running episodes of environments, `[B]` bool, that were lost, if any are known."""

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, before everything: learning rates, frozen parameters, schedules."""
        self.set_schedules(progress)
        self.hold_parameters(progress)
        rates: dict[str, float] = {}
        for (module_id, _), optimizer in self.optimizers.items():
            rates.setdefault(module_id, optimizer.set_lr(progress))
        for module_id, rate in rates.items():
            if not self.may_learn(module_id):
                continue
            own = statistics_of(module_id, statistics)
            own.record(LearnerEvents.learning_rate, rate)
            with self.settings_of(module_id):
                self.report_settings(own)

    def report_settings(self, statistics: Statistics) -> None:
        """Record scheduled settings of the module that `config` is of, once per update; here none.

        Its statistics take them, after `set_schedules`.
        """

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

    def num_minibatches(self, prepared: Mapping[str, Prepared]) -> int:
        """How many minibatches an update has at most."""
        return 1

    def shard(self, batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
        """The part of a minibatch that the learner `rank` of `count` computes.

        What a loss takes of the whole minibatch has to be made of it here.

        Returns:
            Samples `rank`, `rank + count`, ..., or any others in place of an empty set; their
            number (0 in that case); the number of all samples.
        """
        part: tuple[Batch, int, int] = shard_rows(batch, rank, count)
        return part

    def compute_losses(
        self, minibatch: Mapping[str, Batch], statistics: Statistics
    ) -> dict[str, Tensor]:
        """The loss of each module; override it for losses that join modules."""
        losses = {}
        for module_id, batch in minibatch.items():
            self.part.turn_to(module_id)
            with self.settings_of(module_id):
                own = statistics_of(module_id, statistics)
                losses[module_id] = (self.compiled or self.loss_of)(module_id, batch, own)
        return losses

    @property
    def may_differentiate_by_hand(self) -> bool:
        """Whether all losses are those of the algorithm, computed in the type of the weights."""
        replaced = self.loss_function or self.compiled or self.modules_with_loss
        return not (replaced or torch.is_anomaly_enabled()) and self.settings.autocast == "none"

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
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
        for name, term in loss.items():
            statistics.record(LearnerEvents.loss.of_part(name), term)
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
        for optimizer in self.active:
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
            for gradient in (g for optimizer in self.active for g in optimizer.gradients()):
                gradient.div_(self.loss_scaler.scale)
        norms = [optimizer.clip() for optimizer in self.active]
        if not norms:
            return torch.zeros((), device=self.device)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def apply_gradients(self) -> None:
        """One step of each optimizer of the modules that are updated."""
        for optimizer in self.active:
            optimizer.step()

    def after_gradient_step(self) -> None:
        """After each gradient step that was applied: target networks."""

    def after_minibatch(self, number: int) -> None:
        """After each minibatch, counted from 0, with or without its own step."""

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, after everything: adaptive coefficients, running statistics."""

    # -- components of the state -----------------------------------------------------------------

    def get_state(
        self,
        components: Collection[str] | None = None,
        *,
        not_components: Collection[str] = (),
    ) -> dict[str, Any]:
        """State of some components, in the form of `state_dict`; see `components.select`."""
        state: dict[str, Any] = select(self.state_dict(), components, not_components)
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over components, all or some of `get_state`; the others stay as they are.

        Raises:
            ConfigError: If the learner has no such component.
        """
        self.load_state_dict(merged(self.state_dict(), state))

    def save_to_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write what `get_state` gives for the arguments to a file, whole or not at all."""
        write(self.get_state(*args, **kwargs), path)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Take over the state of a file of `save_to_path`, or one component of it.

        Raises:
            ConfigError: If the file has no such component, or the learner has none.
            RunDirectoryError: If the file is damaged.
        """
        self.set_state(read(path, component))

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """A new learner, made from the arguments, with the state of a file of `save_to_path`.

        Raises:
            ConfigError: If the path is the directory of a run, whose learner `load_learner` reads.
            RunDirectoryError: If the file is damaged.
        """
        if Path(path).is_dir():
            problem = f"expected a file of save_to_path; for a run: load_learner({str(path)!r})"
            raise ConfigError("path", problem, str(path))
        learner = cls(*args, **kwargs)
        learner.restore_from_path(path)
        return learner
