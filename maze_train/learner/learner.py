"""Base class of learners: modules, optimizers, updates and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from maze_train.core.conversion import convert
from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.files import atomic_write
from maze_train.core.state_files import dumps, loads
from maze_train.core.targets import function_of
from maze_train.core.types import Tensor
from maze_train.data.rollout import Rollout
from maze_train.learner.apis import check_apis
from maze_train.learner.config import Freeze, OptimizerSettings, Progress, Schedule
from maze_train.learner.events import LearnerEvents, statistics_of
from maze_train.learner.modules import (
    DEFAULT_MODULE,
    Chosen,
    LearnerModules,
    ModuleOptions,
    Modules,
    ModuleSource,
    autocast,
    matmul_precision,
)
from maze_train.learner.optimizers import DEFAULT_OPTIMIZER, ModuleOptimizer, check_free
from maze_train.learner.ranks import OneRank, Ranks, Share, shard_rows
from maze_train.learner.steps import GradientSteps, LossOf, Part

if TYPE_CHECKING:
    from typing import Self, Unpack

    from maze_train.learner.compiled import Compiled

Experience = TypeVar("Experience")
Prepared = TypeVar("Prepared")
Batch = TypeVar("Batch")


FUNCTION = "<function>"
"""Placeholder for `policies_to_train` in states, because functions are not saved."""


class Learner(ABC, Generic[Experience, Prepared, Batch]):
    """Updates modules from experience by gradient descent.

    `update` calls, in this order: `before_gradient_based_update`; `preprocess` (targets,
    advantages); a gradient step for each of the `minibatches`; then, after `weights_seq_no += 1`,
    `after_gradient_based_update`. A gradient step calls, for each of its `parts`, `compute_losses`,
    `compute_gradients`, `postprocess_gradients` and `apply_gradients`; then `after_gradient_step`.

    Subclasses define how to prepare experience (`preprocess`), how to split it (`minibatches`), and
    the loss of a module (`compute_loss_for_module`).

    Args:
        modules: Independently trained modules, keyed by ID; a single module gets the ID `default`.
        config: Settings of the algorithm, such as a dataclass derived from `GradientSettings`.
        device: Device of the modules.
        seed: Seed of the learner's random generator (order of minibatches).
    """

    required_apis: ClassVar[tuple[type, ...]] = ()
    """Protocols of `learner.apis`, or base classes, that trained modules must implement."""
    scheduled_settings: ClassVar[Mapping[str, Event]] = {}
    """Loss settings that can be schedules, and the events that record their values."""
    most_empty_updates: ClassVar[int] = 1
    """Maximum number of consecutive updates without a finite gradient."""
    analytic_gradients: ClassVar[Mapping[str, object]] = {}
    """Settings and values for which `analytic_loss` matches the losses of this class. If a subclass
    overrides a loss but not this attribute, autograd computes the gradients."""

    replaces_parts: ClassVar[bool] = False
    """Whether a subclass overrides the whole loss of a class with several `parts`."""

    config: OptimizerSettings
    policies_to_train: Chosen = None
    """IDs of modules to train, or a function of ID and experience; None: all modules that are not
    frozen."""
    ranks: Ranks = OneRank()
    """Data-parallel learners, of which this learner is one."""
    made_from: tuple[tuple[Any, ...], dict[str, Any]]
    """Constructor arguments, used by other processes to create an identical learner."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Set `replaces_parts`."""
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        replaces = "compute_loss_for_module" in own or "compute_losses" in own
        cls.replaces_parts = "parts" not in own and (replaces or cls.replaces_parts)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Store the constructor arguments in `made_from`."""
        learner = super().__new__(cls)
        learner.made_from = (args, kwargs)
        return learner

    def __init__(
        self,
        modules: Modules,
        config: OptimizerSettings,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if isinstance(modules, nn.Module):
            modules = {DEFAULT_MODULE: modules}
        self.config = config
        self.settings = config.gradient_settings()
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.weights_seq_no = 0
        self.gradient_steps = 0
        """Total number of gradient steps, including skipped steps."""
        self.shares: dict[str, Share] = {}
        """Shares of the current minibatches, by module; empty for a single learner."""
        self.stopped: set[str] = set()
        """IDs of the modules that take no further steps in this update."""
        scheduled = tuple(self.scheduled_settings)
        self.modules = LearnerModules(config, scheduled, modules, self.device)
        self.optimizers: dict[tuple[str, str], ModuleOptimizer] = {}
        for module_id, module in modules.items():
            self.modules.check_new(module_id)
            self.check_module(module_id, module)
            self.modules.place(module_id, module, self.device)
        self.modules.check_names(self.settings)
        self.configure_optimizers()
        node = self.settings.loss_function
        self.loss_function = None if node is None else function_of(node, "algorithm.loss_function")
        self.steps = GradientSteps(
            self.device,
            config.on_non_finite,
            config.accumulated_minibatches,
            self.settings.autocast == "float16",
        )
        self._analytic: Collection[str] = ()
        self._backward: list[Callable[[], object]] = []
        self.compiled: Compiled[Batch] | None = None
        if self.settings.compile != "none":
            # Import lazily: loading the compiler takes a second.
            from maze_train.learner.compiled import compiled_losses

            name = type(self).__name__
            self.compiled = compiled_losses(self.settings.compile, self.loss_of, self.modules, name)

    @property
    def module(self) -> nn.Module:
        """The only module; available if the learner has a single module."""
        return self.modules[DEFAULT_MODULE]

    @torch.enable_grad()
    def update(
        self, experience: Experience | Mapping[str, Experience], progress: Progress
    ) -> Statistics:
        """Learn from experience.

        Args:
            experience: Experience of the single module, or a mapping with module IDs as keys.
            progress: Training progress before this update.

        Returns:
            Statistics of the update.

        Raises:
            ConfigError: If the experience is for an unknown module.
            TrainingError: If a gradient was not finite.
        """
        statistics = Statistics()
        by_module = self.modules.by_id(experience)
        self.before_gradient_based_update(progress, statistics)
        prepared = {
            module_id: self.preprocess(module_id, part, statistics_of(module_id, statistics))
            for module_id, part in by_module.items()
            if self.should_module_be_updated(module_id, part)
        }
        minibatches = self.minibatches(prepared, statistics)
        return self._learn(list(prepared), minibatches, statistics, progress)

    def update_from_batch(
        self, batch: Batch | Mapping[str, Batch], progress: Progress
    ) -> Statistics:
        """Learn from one prepared minibatch, see `update_from_iterator`."""
        return self.update_from_iterator([batch], progress)

    @torch.enable_grad()
    def update_from_iterator(
        self, minibatches: Iterable[Batch | Mapping[str, Batch]], progress: Progress
    ) -> Statistics:
        """Learn from prepared minibatches; `preprocess` and `minibatches` are not called.

        Args:
            minibatches: Minibatches of the single module, or a mapping with module IDs as keys. The
                iterator is advanced after each gradient step.
            progress: Training progress; see `update` for the return value and exceptions.
        """
        statistics = Statistics()
        self.before_gradient_based_update(progress, statistics)
        chosen = (
            {
                module_id: batch
                for module_id, batch in self.modules.by_id(minibatch).items()
                if self.should_module_be_updated(module_id, batch)
            }
            for minibatch in minibatches
        )
        return self._learn(list(self.modules), filter(None, chosen), statistics, progress)

    def _learn(
        self,
        module_ids: Sequence[str],
        minibatches: Iterable[Mapping[str, Batch]],
        statistics: Statistics,
        progress: Progress,
    ) -> Statistics:
        """Run the gradient steps of an update, then finish the update."""
        if module_ids:
            with (
                matmul_precision(self.settings.matmul_precision),
                self.modules.in_training(module_ids),
            ):
                own = Statistics() if self.ranks.count > 1 else statistics
                self._take_steps(minibatches, own)
            if own is not statistics:
                for state in self.ranks.gather(own.state_dict()):
                    other = Statistics()
                    other.load_state_dict(state)
                    statistics.merge(other)
                statistics.kept = own.kept
            update, most_empty = self.weights_seq_no, self.most_empty_updates
            self.steps.finish(statistics, progress.epoch, update, most_empty)
        for optimizer in self.optimizers.values():
            optimizer.end_update()
        if self.compiled is not None:
            self.compiled.report(statistics)
        self.weights_seq_no += 1
        self.after_gradient_based_update(progress, statistics)
        return statistics

    def _take_steps(
        self, minibatches: Iterable[Mapping[str, Batch]], statistics: Statistics
    ) -> None:
        """Take a gradient step per minibatch or, with accumulation, per group of minibatches."""
        self.steps.begin()
        self.stopped.clear()
        for number, whole in enumerate(minibatches):
            self.steps.number = number
            complete = {key: self.complete_batch(key, batch) for key, batch in whole.items()}
            if not self._gradient_step(self._sharded(complete), statistics):
                break
            self.after_minibatch(number)
        if self.steps.pending:
            self._apply_accumulated()

    def _sharded(self, minibatch: Mapping[str, Batch]) -> Mapping[str, Batch]:
        """Return the samples of this rank, and set `shares`.

        Losses must be means over samples. A rank without samples computes the loss of the first
        sample with weight 0, so that every rank joins each exchange.
        """
        if self.ranks.count == 1:
            return minibatch
        shards: dict[str, Batch] = {}
        for module_id, batch in minibatch.items():
            shards[module_id], *share = self.shard(batch, self.ranks.rank, self.ranks.count)
            self.shares[module_id] = Share(*share)
        return shards

    def _gradient_step(self, minibatch: Mapping[str, Batch], statistics: Statistics) -> bool:
        """Take a gradient step, or accumulate gradients; return False if all modules stopped."""
        steps, parts = self.steps, self._parts()
        skip: Tensor | None = None
        kept: dict[str, dict[str, Tensor]] = {}
        learning: Collection[str] = minibatch.keys()
        undo: list[Callable[[Tensor], None]] = []
        for part in parts:
            statistics.kept = {}
            with autocast(self.device, self.settings.autocast):
                if part.loss is None:
                    losses = self.compute_losses(minibatch, statistics)
                else:
                    losses = self._losses_of(part, minibatch, statistics)
            self.ranks.whole(statistics.kept, self.shares)
            kept.update(statistics.kept)
            if part is parts[0]:
                self._stop(self.modules_to_stop(kept))
                learning = [key for key in losses if key not in self.stopped]
                if losses and not learning:
                    return False
            optimizers = [
                optimizer
                for (module_id, name), optimizer in self.optimizers.items()
                if module_id in learning and (part.optimizers is None or name in part.optimizers)
            ]
            self.compute_gradients(losses, optimizers)
            self._sum_gradients(optimizers)
            if steps.accumulation > 1:
                if steps.accumulate(optimizers):
                    self._apply_accumulated()
                return True
            if steps.must_undo and part is not parts[-1]:
                undo += [optimizer.hold() for optimizer in optimizers]
            skip = self._apply(optimizers, skip)
        assert skip is not None
        for restore in undo:
            restore(skip)
        statistics.kept = kept
        self._end_step(skip, learning)
        return True

    def _sum_gradients(self, optimizers: Sequence[ModuleOptimizer]) -> None:
        """Sum the gradients of all ranks in place, weighted by their numbers of samples."""
        if self.ranks.count == 1:
            return
        gradients = []
        for (module_id, _), optimizer in self.optimizers.items():
            if optimizer in optimizers:
                weight = self.shares[module_id].fraction
                gradients += [gradient.mul_(weight) for gradient in optimizer.gradients()]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            self.ranks.sum(gradients[0])
        elif gradients:
            vector = self.ranks.sum(torch.cat([gradient.reshape(-1) for gradient in gradients]))
            pieces = torch.split(vector, [gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def _parts(self) -> Sequence[Part[Batch]]:
        """Return the parts of the next step; a custom loss replaces all parts by a single one."""
        parts = self.parts(self.gradient_steps)
        if self.replaces_parts or self.loss_function is not None or self.modules.with_loss:
            names = [part.optimizers for part in parts]
            optimizers = None if None in names else tuple(chain(*filter(None, names)))
            return (Part("loss", None, optimizers),)
        if len(parts) > 1 and self.steps.accumulation > 1:
            problem = f"{type(self).__name__} has several losses per gradient step; expected 1"
            key = "algorithm.gradient_accumulation"
            raise ConfigError(key, problem, self.steps.accumulation)
        return parts

    def _stop(self, module_ids: Collection[str]) -> None:
        """Stop modules until the end of the update, and drop their accumulated gradients."""
        self.stopped.update(module_ids)
        for module_id in module_ids:
            self.steps.drop([own for _, own in self.get_optimizers_for_module(module_id)])

    def _apply(self, optimizers: Sequence[ModuleOptimizer], skip: Tensor | None) -> Tensor:
        """Clip and apply gradients; see `GradientSteps.judge` for `skip` and the result."""
        self.steps.prepare(optimizers)
        skip = self.steps.judge(self.postprocess_gradients(optimizers), optimizers, skip)
        self.apply_gradients(optimizers, skip)
        self.modules.limit_free_params()
        return skip

    def _apply_accumulated(self) -> None:
        """Apply the mean of the accumulated gradients."""
        optimizers = self.steps.take()
        learning = [key for (key, _), own in self.optimizers.items() if own in optimizers]
        self._end_step(self._apply(optimizers, None), list(dict.fromkeys(learning)))

    def _end_step(self, skip: Tensor, module_ids: Collection[str]) -> None:
        self.steps.end_step(skip)
        self.gradient_steps += 1
        self.after_gradient_step(module_ids)

    def check_weights(self) -> None:
        """Check that all weights are finite.

        Raises:
            TrainingError: If a weight is not finite. The message names the module and parameter.
        """
        self.modules.check_finite(f"update {self.weights_seq_no}")

    def observe(self, experience: Rollout | Mapping[str, Rollout]) -> None:
        """Update the observation statistics of trained modules with a rollout per module."""
        self.modules.observe(self.modules.by_id(experience), self.may_learn)

    def forget_episodes(self, envs: Tensor) -> None:
        """Reset the statistics of running episodes; `envs` marks aborted episodes, `[B]` bool."""

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Called first in each update to set learning rates, frozen parameters and schedules."""
        self.modules.set_schedules(progress)
        frozen = self.modules.frozen_parameters(self.freeze_rules(), progress.updates)
        rates: dict[str, float] = {}
        for (module_id, _), optimizer in self.optimizers.items():
            if module_id not in self.modules.frozen:
                optimizer.check_trainable(module_id)
            optimizer.freeze(frozen)
            rates.setdefault(module_id, optimizer.set_lr(progress))
        for module_id, rate in rates.items():
            if self.may_learn(module_id):
                own, config = statistics_of(module_id, statistics), self.config_of(module_id)
                own.record(LearnerEvents.learning_rate, rate)
                for name, event in self.scheduled_settings.items():
                    own.record(event, float(config.value_of(name)))
        self._backward.clear()
        self._analytic = self._find_analytic()

    @abstractmethod
    def preprocess(
        self, module_id: str, experience: Experience, statistics: Statistics
    ) -> Prepared:
        """Prepare experience for minibatches: move it to the device, compute values and targets."""

    @abstractmethod
    def minibatches(
        self, prepared: Mapping[str, Prepared], statistics: Statistics
    ) -> Iterable[Mapping[str, Batch]]:
        """Return the minibatches of one update, by module ID."""

    def complete_batch(self, module_id: str, batch: Batch) -> Batch:
        """Add columns computed over the whole minibatch, such as noise or normalised advantages.

        Called once per minibatch, before the minibatch is sharded over several learners.
        """
        return batch

    def shard(self, batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
        """Return the samples of a minibatch that the learner `rank` of `count` uses.

        Returns:
            Samples `rank`, `rank + count`, ..., their number, and the size of the minibatch. If the
            minibatch has at most `rank` samples, the samples are arbitrary and their number is 0.
        """
        return shard_rows(batch, rank, count)

    def parts(self, step: int) -> Sequence[Part[Batch]]:
        """Return the losses of gradient step number `step` (from 0), in order.

        All parts use the same minibatch. Later losses are computed with the weights that earlier
        parts have changed. The result may depend on `step` and settings only.
        """
        return (Part("loss"),)

    def compute_losses(
        self, minibatch: Mapping[str, Batch], statistics: Statistics
    ) -> dict[str, Tensor]:
        """Return the loss of each module; override if a loss depends on several modules."""
        return self._losses_of(Part("loss"), minibatch, statistics)

    def _losses_of(
        self, part: Part[Batch], minibatch: Mapping[str, Batch], statistics: Statistics
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for module_id, batch in minibatch.items():
            own = statistics_of(module_id, statistics, self.shares.get(module_id))
            if self.compiled is not None:
                losses[module_id] = self.compiled.loss_of(part, module_id, batch, own)
            elif part.loss is None and module_id in self._analytic:
                losses[module_id], backward = self.analytic_loss(module_id, batch, own)
                self._backward.append(backward)
            else:
                losses[module_id] = self.loss_of(module_id, batch, own, part.loss)
        return losses

    def loss_of(
        self,
        module_id: str,
        batch: Batch,
        statistics: Statistics,
        of_part: LossOf[Batch] | None = None,
    ) -> Tensor:
        """Return the module's custom loss (`loss_function`) if set, or the loss of a part, 0-d.

        Args:
            module_id: The module.
            batch: The minibatch.
            statistics: Statistics of the update.
            of_part: Loss of a part; None: `compute_loss_for_module`.
        """
        loss: Tensor | Mapping[str, Tensor]
        if module_id in self.modules.with_loss:
            loss = self.modules.with_loss[module_id].compute_self_supervised_loss(batch, statistics)
        elif self.loss_function is not None:
            loss = self.loss_function(self, module_id, batch, statistics)
        else:
            loss = (of_part or self.compute_loss_for_module)(module_id, batch, statistics)
        if not isinstance(loss, Mapping):
            return loss
        for name, term in loss.items():
            statistics.record(LearnerEvents.loss.of_part(name), term)
        return torch.stack(list(loss.values())).sum()

    @abstractmethod
    def compute_loss_for_module(
        self, module_id: str, batch: Batch, statistics: Statistics
    ) -> Tensor | Mapping[str, Tensor]:
        """Compute the loss of one module on one minibatch, 0-d.

        The method may instead return a mapping of named terms, 0-d each, which are recorded and
        summed to the loss. `config_of(module_id)` returns the settings of the module.

        `analytic_loss` runs instead if `has_analytic_loss` is true; `algorithm.gradients=autograd`
        switches it off. Learners with several `parts` compute the losses of the parts instead.
        """

    def has_analytic_loss(self, module_id: str) -> bool:
        """Return whether `analytic_loss` currently supports a module."""
        return False

    def declares_gradients(
        self, module_id: str, methods: Sequence[str], pair: tuple[str, str] | tuple[()] = ()
    ) -> bool:
        """Return whether each class that defines one of `methods` declares analytic gradients.

        The class attribute `analytic_gradients` contains the settings for which the gradients are
        correct. A class that defines both methods of `pair`, a loss and its gradient, and no other
        method in `methods` does not need the attribute.

        Args:
            module_id: The module, for its settings.
            methods: Names of the methods replaced by analytic gradients, including `pair`.
            pair: Names of the method that computes a loss and the method that computes its
                gradient.
        """
        if any(method in vars(self) for method in methods):
            return False
        config = self.config_of(module_id)
        for base in type(self).__mro__:
            defined = vars(base)
            own = [method for method in methods if method in defined]
            of_pair = [method for method in pair if method in defined]
            declared: Mapping[str, object] | None
            declared = defined.get("analytic_gradients", None if own != of_pair else {})
            if len(of_pair) == 1 or declared is None:
                return False
            if any(config.value_of(key) != value for key, value in declared.items()):
                return False
            # A different function may have been assigned to the name of a method.
            names = (getattr(defined[method], "__qualname__", "") for method in own)
            if any(name.rpartition(".")[0] != base.__qualname__ for name in names):
                return False
        return True

    def analytic_loss(
        self, module_id: str, batch: Batch, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return the result of `compute_loss_for_module`, 0-d without a graph, and a backward pass.

        The backward pass is a function that adds the gradients to `.grad`.
        """
        raise NotImplementedError

    def _find_analytic(self) -> Collection[str]:
        """Return the modules whose gradients are analytic in this update."""
        settings = self.settings
        if (
            settings.gradients == "autograd"
            or settings.autocast != "none"
            or self.compiled is not None
            or self.loss_function is not None
            or self.modules.with_loss
            or torch.is_anomaly_enabled()
        ):
            return ()
        learning = self.modules.keys() - self.modules.frozen
        return {module_id for module_id in learning if self.has_analytic_loss(module_id)}

    def uses_autograd(self, module_id: str) -> bool:
        """Return whether autograd computes the gradients of a module in this update."""
        return self.compiled is None and module_id not in self._analytic

    def modules_to_stop(self, kept: Mapping[str, Mapping[str, Tensor]]) -> Collection[str]:
        """Return the modules to stop before the current gradient is applied.

        These modules take no further steps in this update. If all modules of the minibatch are
        stopped, the update ends.

        Args:
            kept: Tensors of the losses by name and module, see `Statistics.keep`; with several
                learners, of the whole minibatch.
        """
        return ()

    def compute_gradients(
        self, losses: Mapping[str, Tensor], optimizers: Sequence[ModuleOptimizer]
    ) -> None:
        """Compute the gradients of the sum of the losses for the parameters of the optimizers.

        Parameters without a gradient have the gradient 0, as after
        `torch.optim.Optimizer.zero_grad(set_to_none=False)`.
        """
        for optimizer in optimizers:
            optimizer.zero_grad()
        terms = [loss for loss in losses.values() if loss.requires_grad]
        if terms:
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            torch.autograd.backward(self.steps.scaled(total))
        for backward in self._backward:
            backward()
        self._backward.clear()

    def postprocess_gradients(self, optimizers: Sequence[ModuleOptimizer]) -> Tensor:
        """Clip the gradients of each optimizer; return the total norm before clipping, 0-d."""
        return self.steps.clip(optimizers)

    def apply_gradients(self, optimizers: Sequence[ModuleOptimizer], skip: Tensor) -> None:
        """Take one step with each optimizer, unless `skip` is 1 (0-d on the device)."""
        for optimizer in optimizers:
            optimizer.step(skip)

    def after_gradient_step(self, module_ids: Collection[str]) -> None:
        """Called after each gradient step, for example to update target networks.

        Also called for non-finite gradients, which are detected only at the end of the update.

        Args:
            module_ids: IDs of the modules with a loss in this step.
        """

    def after_minibatch(self, number: int) -> None:
        """Called after each minibatch (counted from 0), with or without a gradient step."""

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Called last in each update, for example to adapt coefficients and running statistics."""

    def config_of(self, module_id: str) -> Any:
        """Return the settings of a module: `config` with its `algorithm.overrides`.

        Schedules in `scheduled_settings` are replaced by their current values: 0-d tensors on the
        device, which the next update overwrites.
        """
        return self.modules.config_of(module_id)

    def add_module(
        self, module_id: str, module: ModuleSource, **how: Unpack[ModuleOptions]
    ) -> nn.Module:
        """Add a module; allowed at any time between updates.

        Args:
            module_id: ID of the new module, without `/`.
            module: The module, a function without arguments that creates it, or weights (from
                `get_weights` or a saved policy) for a copy of the module `like`.
            **how: `frozen`, `like` and `overrides`, see `ModuleOptions`.

        Returns:
            The new module, on the device of the learner.

        Raises:
            ConfigError: If the ID is invalid or in use, the weights do not match, the module lacks
                required attributes, or a setting is invalid.
        """
        module = self.modules.made(module, how.get("like", DEFAULT_MODULE))
        self.modules.check_new(module_id)
        try:
            self.modules.set_overrides(module_id, how.get("overrides"))
            if how.get("frozen", False):
                self.modules.place(module_id, module.requires_grad_(False), self.device)
                self.modules.frozen.add(module_id)
            else:
                self.check_module(module_id, module)
                self.modules.place(module_id, module, self.device)
                self.configure_optimizers_for_module(module_id)
        except ConfigError:
            self._forget(module_id)
            raise
        return module

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove and return a module; also remove the optimizers of the module.

        Raises:
            ConfigError: If the module does not exist.
        """
        module = self.modules.known(module_id)
        self._forget(module_id)
        return module

    def _forget(self, module_id: str) -> None:
        self.optimizers = {k: o for k, o in self.optimizers.items() if k[0] != module_id}
        self.modules.forget(module_id)

    def check_module(self, module_id: str, module: nn.Module) -> None:
        """Check that a module has the attributes that this learner requires.

        Raises:
            ConfigError: If attributes are missing. The message names the missing attributes.
        """
        check_apis(type(self).__name__, self.required_apis, module_id, module)

    def freeze_module(self, module_id: str, frozen: bool = True) -> None:
        """Freeze or unfreeze a module; the state of its optimizers is kept.

        Raises:
            ConfigError: If the module does not exist, or lacks required attributes.
        """
        module = self.modules.known(module_id)
        if frozen:
            self.modules.frozen.add(module_id)
        elif module_id in self.modules.frozen:
            self.check_module(module_id, module)
            if not self.get_optimizers_for_module(module_id):
                module.requires_grad_(True)
                self.configure_optimizers_for_module(module_id)
            self.modules.frozen.remove(module_id)

    def may_learn(self, module_id: str) -> bool:
        """Return whether a module is selected for training and not frozen."""
        chosen = self.policies_to_train
        is_chosen = chosen is None or callable(chosen) or module_id in chosen
        return is_chosen and module_id not in self.modules.frozen

    def should_module_be_updated(self, module_id: str, experience: object) -> bool:
        """Return whether to train a module on its experience; if False, drop the experience."""
        how = self.policies_to_train
        return self.may_learn(module_id) and (not callable(how) or how(module_id, experience))

    def configure_optimizers(self) -> None:
        """Register the optimizers of all modules."""
        for module_id in self.modules:
            self.configure_optimizers_for_module(module_id)

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """Register the optimizers of a module; by default one optimizer for all parameters."""
        config = self.config_of(module_id)
        self.register_optimizer(
            module_id,
            optimizer=config.optimizer,
            params=list(self.modules[module_id].parameters()),
            lr_or_lr_schedule=config.lr,
        )

    def register_optimizer(
        self,
        module_id: str = DEFAULT_MODULE,
        name: str = DEFAULT_OPTIMIZER,
        *,
        optimizer: Mapping[str, Any] | torch.optim.Optimizer,
        params: Sequence[nn.Parameter],
        lr_or_lr_schedule: float | Schedule | Sequence[Sequence[float]] | None = None,
    ) -> None:
        """Register an optimizer for parameters of a module that require a gradient.

        If an equal optimizer of exactly these parameters has this name, only its learning rate and
        clipping are changed.

        Args:
            module_id: The module.
            name: Name of the optimizer, unique within the module.
            optimizer: Class and arguments: `{_target_: torch.optim.Adam, eps: 1e-5}`; or a PyTorch
                optimizer, whose parameter groups are kept.
            params: The parameters; `algorithm.lr_factors` and `algorithm.freeze` apply to them.
            lr_or_lr_schedule: Learning rate, schedule, or points by environment steps, `[[0, v0],
                [t1, v1], ...]`; None: keep the rate of the PyTorch optimizer.

        Raises:
            ConfigError: If another optimizer has this name or owns one of the parameters, or the
                learning rate is neither a number nor a schedule.
        """
        config = self.config_of(module_id).gradient_settings()
        lr = convert(lr_or_lr_schedule, float | Schedule | None, "lr")
        clipping = (config.max_grad_norm, config.grad_clip_by)
        registered = self.optimizers.get((module_id, name))
        if registered is not None and registered.is_for(params, optimizer):
            registered.change(lr, clipping)
            return
        check_free(self.optimizers, module_id, name, params)
        if any(p.requires_grad for p in params):
            self.optimizers[module_id, name] = ModuleOptimizer(
                params,
                optimizer,
                lr,
                groups=self.modules.grouped(
                    module_id, params, self.settings.lr_factors, self.freeze_rules()
                ),
                lr_scheduler=config.lr_scheduler,
                clipping=clipping,
            )

    def change_settings(self, config: OptimizerSettings) -> None:
        """Replace the settings of the algorithm; only settings marked `IN_RUN` may differ.

        `configure_optimizers_for_module` is called again for modules with optimizers, to change
        learning rates and clipping of the existing optimizers.
        """
        self.config, self.settings = config, config.gradient_settings()
        self.modules.change_settings(config)
        for module_id in dict.fromkeys(owner for owner, _ in self.optimizers):
            self.configure_optimizers_for_module(module_id)

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE, name: str = DEFAULT_OPTIMIZER
    ) -> ModuleOptimizer:
        """Return an optimizer of a module by name.

        Raises:
            ConfigError: If the optimizer does not exist.
        """
        if (module_id, name) not in self.optimizers:
            problem = f"no such optimizer; available: {', '.join(map('/'.join, self.optimizers))}"
            raise ConfigError("optimizer", problem, f"{module_id}/{name}")
        return self.optimizers[module_id, name]

    def get_optimizers_for_module(
        self, module_id: str = DEFAULT_MODULE
    ) -> list[tuple[str, ModuleOptimizer]]:
        """Return names and optimizers of a module, in the order of registration."""
        return [(name, o) for (owner, name), o in self.optimizers.items() if owner == module_id]

    def freeze_rules(self) -> Sequence[Freeze]:
        """Return the rules that freeze parameters, by default `algorithm.freeze`."""
        return self.settings.freeze

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the weights, keyed by module ID."""
        return self.modules.weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy weights, as returned by `get_weights`, into the modules.

        Raises:
            ConfigError: If a module does not exist.
        """
        for module_id, state in weights.items():
            self.modules.known(module_id).load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: weights, optimizers, trained modules, random generator and counters."""
        chosen = self.policies_to_train
        if callable(chosen):
            chosen = FUNCTION
        state: dict[str, Any] = {
            "modules": self.get_weights(),
            "optimizers": {"/".join(key): o.state_dict() for key, o in self.optimizers.items()},
            "policies_to_train": chosen if isinstance(chosen, str | None) else sorted(chosen),
            "frozen_modules": sorted(self.modules.frozen),
            "generator": self.generator.get_state(),
            "weights_seq_no": self.weights_seq_no,
            "gradient_steps": self.gradient_steps,
            "empty_updates": self.steps.empty_updates,
        }
        if self.steps.scaler is not None:
            state["loss_scaler"] = self.steps.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`.

        Raises:
            ConfigError: If the state has different modules, or `policies_to_train` was a function
                when the state was saved and this learner has no such function.
        """
        if state["modules"].keys() != self.modules.keys():
            problem = (
                f"the state has other modules than {', '.join(self.modules)}: call add_module "
                "and remove_module before loading it"
            )
            raise ConfigError("module_id", problem, ", ".join(state["modules"]))
        self._restore_who_learns(state)
        self.set_weights(state["modules"])
        for (module_id, name), optimizer in self.optimizers.items():
            key = f"{module_id}/{name}"
            # A module that was always frozen has no saved optimizer.
            if module_id not in self.modules.frozen or key in state["optimizers"]:
                optimizer.load_state_dict(state["optimizers"][key])
        self.generator.set_state(state["generator"])
        self.weights_seq_no = state["weights_seq_no"]
        self.gradient_steps = state.get("gradient_steps", 0)  # Missing before version 0.4.
        self.steps.empty_updates = state["empty_updates"]
        if self.steps.scaler is not None:
            self.steps.scaler.load_state_dict(state["loss_scaler"])

    def _restore_who_learns(self, state: Mapping[str, Any]) -> None:
        """Restore `policies_to_train`, and create the optimizers of the selected modules."""
        for module_id in self.modules:
            had = any(name.startswith(f"{module_id}/") for name in state["optimizers"])
            if had and not self.get_optimizers_for_module(module_id):
                self.freeze_module(module_id, frozen=False)
        self.modules.frozen = set(state["frozen_modules"])
        chosen = state["policies_to_train"]
        if chosen != FUNCTION:
            self.policies_to_train = chosen
        elif not callable(self.policies_to_train):
            problem = "was a function, and functions are not saved; set it before loading"
            raise ConfigError("policies_to_train", problem, self.policies_to_train)

    def get_state(
        self, components: Collection[str] | None = None, *, not_components: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return some entries of `state_dict`.

        Args:
            components: Names of the entries, such as `modules` or `optimizers`; None: all.
            not_components: Names of entries to exclude.

        Raises:
            ConfigError: If an entry does not exist.
        """
        state = self.state_dict()
        chosen = state if components is None else components
        _check_components((*chosen, *not_components), state)
        return {key: state[key] for key in state if key in chosen and key not in not_components}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore entries returned by `get_state`; other entries are unchanged.

        Raises:
            ConfigError: If the learner does not have an entry.
        """
        current = self.state_dict()
        _check_components(state, current)
        self.load_state_dict({**current, **state})

    def save_to_path(
        self, path: str | Path, components: Collection[str] | None = None, **how: Collection[str]
    ) -> None:
        """Write the result of `get_state` with the same arguments to a file atomically."""
        data = dumps(self.get_state(components, **how))
        with atomic_write(Path(path)) as file:
            file.write(data)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Restore the state or one entry from a file written by `save_to_path`.

        Raises:
            ConfigError: If the path is a run directory (use `load_learner` instead), or the entry
                is missing in the file or the learner.
            RunDirectoryError: If the file is damaged.
        """
        _check_no_run(path)
        state = loads(Path(path).read_bytes(), path)
        if component is not None:
            _check_components([component], state)
            state = {component: state[component]}
        self.set_state(state)

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Create a learner from the arguments, and call `restore_from_path`."""
        _check_no_run(path)  # Before the constructor, whose arguments are not needed for a run.
        learner = cls(*args, **kwargs)
        learner.restore_from_path(path)
        return learner


def _check_no_run(path: str | Path) -> None:
    """Raise ConfigError for a run directory, which `load_learner` loads."""
    if Path(path).is_dir():
        problem = "expected a file written by save_to_path; for a run: "
        raise ConfigError("path", f"{problem}load_learner({str(path)!r})", str(path))


def _check_components(names: Iterable[str], state: Mapping[str, Any]) -> None:
    """Raise ConfigError if the state does not have an entry."""
    for name in names:
        if name not in state:
            problem = f"no such component; available: {', '.join(state)}"
            raise ConfigError("components", problem, name)
