"""The contract of all learners: modules, their optimizers, one update, and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from maze_train.core.conversion import convert
from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.targets import function_of
from maze_train.core.types import Tensor
from maze_train.learner.apis import check_apis
from maze_train.learner.components import FUNCTION, merged, read, select, write
from maze_train.learner.config import Freeze, Progress, Schedule, gradient_settings
from maze_train.learner.events import LearnerEvents, statistics_of
from maze_train.learner.loss_strategies import Analytic, Autograd
from maze_train.learner.modules import (
    DEFAULT_MODULE,
    Chosen,
    HowAdded,
    LearnerModules,
    ModuleSource,
    autocast,
    matmul_precision,
)
from maze_train.learner.optimizers import DEFAULT_OPTIMIZER, ModuleOptimizer, check_free
from maze_train.learner.parallel import SingleLearner
from maze_train.learner.rows import shard_rows
from maze_train.learner.steps import GradientSteps

if TYPE_CHECKING:
    from typing import Self, Unpack

Experience = TypeVar("Experience")
Prepared = TypeVar("Prepared")
Batch = TypeVar("Batch")


class Learner(ABC, Generic[Experience, Prepared, Batch]):
    """Updates modules from experience by gradient descent.

    One call of `update` does, in this order: `before_gradient_based_update` -> `preprocess`
    (targets, advantages) -> for each of `minibatches`: `compute_losses` -> `compute_gradients` ->
    `postprocess_gradients` -> `apply_gradients` -> then `weights_seq_no += 1` ->
    `after_gradient_based_update`.

    A subclass defines how experience is prepared (`preprocess`), how it is cut (`minibatches`) and
    the loss of a module (`compute_loss_for_module`).

    Args:
        modules: The independently trained modules by id; one module alone gets the id `default`.
        config: Settings of the algorithm. Every learner reads `optimizer`, `lr`, `max_grad_norm`
            and `on_non_finite`; and, where they exist, `grad_clip_by`, `gradient_accumulation`,
            `matmul_precision`, and those of `GradientSettings`.
        device: Where the modules and their updates live.
        seed: Seed of the learner's own random numbers (order of minibatches).
    """

    required_apis: ClassVar[tuple[type, ...]] = ()
    """Protocols of `learner.apis` that each module that learns here must satisfy."""
    scheduled_settings: ClassVar[Mapping[str, Event]] = {}
    """Settings of losses that may follow a schedule, and the events that report their values."""
    most_empty_updates: ClassVar[int] = 1
    """Updates in a row without any finite gradient after which training ends."""
    gradients_by_hand: ClassVar[Mapping[str, object]] = {}
    """Settings for which `analytic_loss` computes the losses that this class defines. Autograd
    computes the gradients of a subclass that defines losses without this attribute."""

    config: Any
    policies_to_train: Chosen = None
    """Ids of modules that learn, or a function of id and experience; None: all but frozen ones."""
    watch: Callable[[Iterable[Any], int], Iterable[Any]] | None = None
    """Passes on the minibatches of an update; called with them and their largest number."""
    parallel: SingleLearner = SingleLearner()
    """How this learner takes part in gradient steps: alone, or as one of several."""
    made_from: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments of the constructor; other processes make a learner like this one with them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments."""
        learner = super().__new__(cls)
        learner.made_from = (args, kwargs)
        return learner

    def __init__(
        self,
        modules: nn.Module | Mapping[str, Any],
        config: Any,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        if isinstance(modules, nn.Module):
            modules = {DEFAULT_MODULE: modules}
        self.config = config
        self.settings = gradient_settings(config)
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.weights_seq_no = 0
        self.modules = LearnerModules(config, tuple(self.scheduled_settings), modules)
        self.optimizers: dict[tuple[str, str], ModuleOptimizer] = {}
        self.active: list[ModuleOptimizer] = []
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
            getattr(config, "gradient_accumulation", 1),
            self.settings.autocast == "float16",
        )
        self.loss_strategy = self._loss_strategy(self.settings.compile)

    def _loss_strategy(self, compiled: str) -> Autograd[Batch]:
        """Return the way to compute losses and gradients; `compiled`: `algorithm.compile`."""
        if compiled != "none":
            # Loading the compiler takes a second.
            from maze_train.learner.compiled import CompiledLosses, CompiledNetworks, check_compiler

            if check_compiler(compiled, self.modules.values()):
                if compiled == "forward":
                    return CompiledNetworks(self.loss_of, self.modules)
                return CompiledLosses(self.loss_of, type(self).__name__)
        return Analytic(self.loss_of, self.analytic_loss, self._analytic_modules)

    @property
    def module(self) -> nn.Module:
        """The only module, in training with one policy."""
        return self.modules[DEFAULT_MODULE]

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
        by_module = self.modules.by_id(experience)
        self.before_gradient_based_update(progress, statistics)
        prepared = {
            module_id: self.preprocess(module_id, part, statistics_of(module_id, statistics))
            for module_id, part in by_module.items()
            if self.should_module_be_updated(module_id, part)
        }
        minibatches = self.minibatches(prepared, statistics)
        if self.watch is not None and prepared:
            minibatches = self.watch(minibatches, self.num_minibatches(prepared))
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
            progress: See `update`, also for results and exceptions.
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
        """Take the steps of an update, if there are modules that learn, and end it."""
        if module_ids:
            precision = getattr(self.config, "matmul_precision", None)
            with matmul_precision(precision), self.modules.in_training(module_ids):
                self._take_steps(minibatches, self.parallel.begin(statistics))
                self.parallel.end(statistics)
            update, most_empty = self.weights_seq_no, self.most_empty_updates
            self.steps.finish(statistics, progress.epoch, update, most_empty)
        for optimizer in self.optimizers.values():
            optimizer.end_update()
        self.loss_strategy.report(statistics)
        self.weights_seq_no += 1
        self.after_gradient_based_update(progress, statistics)
        return statistics

    def _take_steps(
        self, minibatches: Iterable[Mapping[str, Batch]], statistics: Statistics
    ) -> None:
        """Take a gradient step on each minibatch, or with accumulation, on several."""
        self.steps.begin()
        precision = autocast(self.device, self.settings.autocast)
        for number, whole in enumerate(minibatches):
            complete = {key: self.complete_batch(key, batch) for key, batch in whole.items()}
            minibatch = self.parallel.take(self.shard, complete)
            with precision:
                losses = self.compute_losses(minibatch, statistics)
            if self.should_stop(statistics):
                break
            self.active = self.active_optimizers(losses)
            self.compute_gradients(losses)
            self.parallel.join_gradients(self.active, self.optimizers)
            if self.steps.add(number, self.active):
                self._take_step()
            self.after_minibatch(number)
            if self.steps.have_failed:
                break
        if self.steps.are_pending:
            self._take_step()

    def _take_step(self) -> None:
        """Clip and apply the gradients of the active optimizers, if they are finite."""
        self.active = self.steps.prepare(self.active)
        norm = self.postprocess_gradients()
        if self.steps.accepts(norm, self.active):
            self.apply_gradients()
            self.modules.limit_free_params()
            self.after_gradient_step()

    def check_weights(self) -> None:
        """Refuse weights that are not finite.

        Raises:
            TrainingError: If there is one, with its module and name.
        """
        self.modules.check_finite(f"update {self.weights_seq_no}")

    def forget_episodes(self, envs: Tensor) -> None:
        """Reset statistics of running episodes in environments `[B]` whose episode was lost."""

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, before everything: learning rates, frozen parameters, schedules."""
        self.modules.set_schedules(progress)
        frozen = self.modules.frozen_parameters(self.freeze_rules(), progress.updates)
        rates: dict[str, float] = {}
        for (module_id, _), optimizer in self.optimizers.items():
            optimizer.freeze(frozen)
            rates.setdefault(module_id, optimizer.set_lr(progress))
        for module_id, rate in rates.items():
            if self.may_learn(module_id):
                own, config = statistics_of(module_id, statistics), self.config_of(module_id)
                own.record(LearnerEvents.learning_rate, rate)
                for name, event in self.scheduled_settings.items():
                    own.record(event, getattr(config, name))
        self.loss_strategy.begin()

    @abstractmethod
    def preprocess(
        self, module_id: str, experience: Experience, statistics: Statistics
    ) -> Prepared:
        """Turn experience into the input of minibatches: device, values, advantages, targets."""

    @abstractmethod
    def minibatches(
        self, prepared: Mapping[str, Prepared], statistics: Statistics
    ) -> Iterable[Mapping[str, Batch]]:
        """The minibatches of one update, by module."""

    def num_minibatches(self, prepared: Mapping[str, Prepared]) -> int:
        """The largest number of minibatches of an update."""
        return 1

    def complete_batch(self, module_id: str, batch: Batch) -> Batch:
        """Add what the loss needs of the whole minibatch: random numbers, normalised values.

        Called once per minibatch, before it is sharded over several learners.
        """
        return batch

    def shard(self, batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
        """Return the samples of a minibatch that the learner `rank` of `count` uses.

        Returns:
            Samples `rank`, `rank + count`, ..., or any others in place of an empty set; their
            number (0 in that case); the number of all samples.
        """
        return shard_rows(batch, rank, count)

    def compute_losses(
        self, minibatch: Mapping[str, Batch], statistics: Statistics
    ) -> dict[str, Tensor]:
        """Return the loss of each module; override it for losses that join modules."""
        losses = {}
        for module_id, batch in minibatch.items():
            self.parallel.turn_to(module_id)
            own = statistics_of(module_id, statistics)
            losses[module_id] = self.loss_strategy.loss_of(module_id, batch, own)
        return losses

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """The loss of a module: the first of its own, of the settings, and of the algorithm."""
        if module_id in self.modules.with_loss:
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

        It may return terms by name instead, 0-d each: the loss is their sum, and each is reported
        under its name. `config_of(module_id)` has the settings of the module.
        """

    def has_analytic_loss(self, module_id: str) -> bool:
        """Whether `analytic_loss` computes the loss of a module as it is now."""
        return False

    def analytic_loss(
        self, module_id: str, batch: Batch, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """Return the loss of `compute_loss_for_module`, 0-d without a graph, and its backward pass.

        The second value is a function that adds the gradients to `.grad`.
        """
        raise NotImplementedError

    def _analytic_modules(self) -> Collection[str]:
        """Return the modules whose gradients are analytic in this update."""
        is_other = self.loss_function or self.modules.with_loss or torch.is_anomaly_enabled()
        if is_other or self.settings.autocast != "none":
            return ()
        learning = self.modules.keys() - self.modules.frozen
        return {module_id for module_id in learning if self.has_analytic_loss(module_id)}

    def should_stop(self, statistics: Statistics) -> bool:
        """Whether the update ends before the gradient of the current minibatch is applied."""
        return False

    def active_optimizers(self, losses: Mapping[str, Tensor]) -> list[ModuleOptimizer]:
        """The optimizers that take part in a gradient step: those of modules that have a loss.

        The others must not step: their momentum would move parameters without a gradient.
        """
        return [o for (module_id, _), o in self.optimizers.items() if module_id in losses]

    def compute_gradients(self, losses: Mapping[str, Tensor]) -> None:
        """Replace the gradients of the modules by those of the sum of their losses."""
        for optimizer in self.active:
            optimizer.zero_grad()
        terms = [loss for loss in losses.values() if loss.requires_grad]
        if terms:
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            torch.autograd.backward(self.steps.scaled(total))
        self.loss_strategy.add_gradients()

    def postprocess_gradients(self) -> Tensor:
        """Clip the gradients of each optimizer; return their joint norm before clipping, 0-d."""
        return self.steps.clip(self.active)

    def apply_gradients(self) -> None:
        """Take one step of each optimizer of the modules that are updated."""
        self.steps.apply(self.active)

    def after_gradient_step(self) -> None:
        """After each gradient step that was applied: target networks."""

    def after_minibatch(self, number: int) -> None:
        """After each minibatch, counted from 0, with or without its own step."""

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Once per update, after everything: adaptive coefficients, running statistics."""

    # -- modules ---------------------------------------------------------------------------------

    def config_of(self, module_id: str) -> Any:
        """The settings of a module: `config` with its `algorithm.overrides`.

        Those of `scheduled_settings` are numbers: their values in this update.
        """
        return self.modules.config_of(module_id)

    def add_module(
        self, module_id: str, module: ModuleSource, **how: Unpack[HowAdded]
    ) -> nn.Module:
        """Add a module, between two updates at any time.

        Args:
            module_id: Its id, without `/`.
            module: The module; or a function without arguments that makes it; or weights by name,
                such as those of `get_weights` and saved policies, for a copy of another module.
            **how: Whether it is frozen, the module it resembles, and its settings; see `HowAdded`.

        Returns:
            The module, on the device of the learner.

        Raises:
            ConfigError: If the id is taken or not valid, the weights do not fit, the module lacks
                what this learner needs, or a setting is not one of a module.
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
        """Remove a module and its optimizers, and return it.

        Raises:
            ConfigError: If there is no such module.
        """
        module = self.modules.known(module_id)
        self._forget(module_id)
        return module

    def _forget(self, module_id: str) -> None:
        self.optimizers = {k: o for k, o in self.optimizers.items() if k[0] != module_id}
        self.modules.forget(module_id)

    def check_module(self, module_id: str, module: nn.Module) -> None:
        """Check that a module has the attributes that this learner needs.

        Raises:
            ConfigError: If some are missing, with their names.
        """
        check_apis(type(self).__name__, self.required_apis, module_id, module)

    def freeze_module(self, module_id: str, frozen: bool = True) -> None:
        """Freeze or unfreeze a module; the state of its optimizers is kept.

        Raises:
            ConfigError: If there is no such module, or it lacks what this learner needs.
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
        """Whether a module is updated, from some experience at least."""
        chosen = self.policies_to_train
        is_chosen = chosen is None or callable(chosen) or module_id in chosen
        return is_chosen and module_id not in self.modules.frozen

    def should_module_be_updated(self, module_id: str, experience: Any) -> bool:
        """Whether a module learns from its experience, which is dropped otherwise."""
        how = self.policies_to_train
        return self.may_learn(module_id) and (not callable(how) or how(module_id, experience))

    # -- optimizers ------------------------------------------------------------------------------

    def configure_optimizers(self) -> None:
        """Register the optimizers of all modules, once; override it or the one for a module."""
        for module_id in self.modules:
            self.configure_optimizers_for_module(module_id)

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """Register the optimizers of a module; by default one over all its parameters."""
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
        """Register an optimizer of parameters of a module, without those that need no gradient.

        Args:
            module_id: The module.
            name: The name of the optimizer, one of several of the module.
            optimizer: Class and arguments: `{_target_: torch.optim.Adam, eps: 1e-5}`; or an
                optimizer of PyTorch, which keeps its groups.
            params: The parameters; `algorithm.lr_factors` and `algorithm.freeze` apply to them.
            lr_or_lr_schedule: Learning rate, its schedule, or points of one by environment steps,
                `[[0, v0], [t1, v1], ...]`; None: an optimizer of PyTorch keeps its own.

        Raises:
            ConfigError: If the name is taken, another optimizer owns one of the parameters, or the
                learning rate is neither a number nor a schedule.
        """
        check_free(self.optimizers, module_id, name, params)
        config, factors = self.config_of(module_id), self.settings.lr_factors
        if any(p.requires_grad for p in params):
            self.optimizers[module_id, name] = ModuleOptimizer(
                params,
                optimizer,
                convert(lr_or_lr_schedule, float | Schedule | None, "lr"),
                groups=self.modules.grouped(module_id, params, factors, self.freeze_rules()),
                lr_scheduler=gradient_settings(config).lr_scheduler,
                clipping=(config.max_grad_norm, getattr(config, "grad_clip_by", "global_norm")),
            )

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE, name: str = DEFAULT_OPTIMIZER
    ) -> ModuleOptimizer:
        """The optimizer of a module with this name.

        Raises:
            ConfigError: If there is no such optimizer.
        """
        if (module_id, name) not in self.optimizers:
            problem = f"no such optimizer; there are: {', '.join(map('/'.join, self.optimizers))}"
            raise ConfigError("optimizer", problem, f"{module_id}/{name}")
        return self.optimizers[module_id, name]

    def get_optimizers_for_module(
        self, module_id: str = DEFAULT_MODULE
    ) -> list[tuple[str, ModuleOptimizer]]:
        """All optimizers of a module with their names, in the order of registration."""
        return [(name, o) for (owner, name), o in self.optimizers.items() if owner == module_id]

    def freeze_rules(self) -> Sequence[Freeze]:
        """The parameters that do not learn, and when: those of `algorithm.freeze`."""
        return self.settings.freeze

    # -- state -----------------------------------------------------------------------------------

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return self.modules.weights()

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights, as `get_weights` gives them, into the modules, in place.

        Raises:
            ConfigError: If there is no such module.
        """
        for module_id, state in weights.items():
            self.modules.known(module_id).load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizers, ids that learn, random generator and counters."""
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
            "empty_updates": self.steps.empty_updates,
        }
        if self.steps.scaler is not None:
            state["loss_scaler"] = self.steps.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state`.

        Raises:
            ConfigError: If `state` has other modules, or a function chose who learned.
        """
        if state["modules"].keys() != self.modules.keys():
            problem = (
                f"the state is one of other modules than {', '.join(self.modules)}: add_module "
                "and remove_module before it is loaded"
            )
            raise ConfigError("module_id", problem, ", ".join(state["modules"]))
        self._restore_who_learns(state)
        self.set_weights(state["modules"])
        for (module_id, name), optimizer in self.optimizers.items():
            key = f"{module_id}/{name}"
            # A module that was always frozen had none.
            if module_id not in self.modules.frozen or key in state["optimizers"]:
                optimizer.load_state_dict(state["optimizers"][key])
        self.generator.set_state(state["generator"])
        self.weights_seq_no = state["weights_seq_no"]
        self.steps.empty_updates = state["empty_updates"]
        if self.steps.scaler is not None:
            self.steps.scaler.load_state_dict(state["loss_scaler"])

    def _restore_who_learns(self, state: Mapping[str, Any]) -> None:
        """Restore the ids of modules that learn, and create their optimizers.

        Raises:
            ConfigError: If a function chose them, and this learner has none.
        """
        for module_id in self.modules:
            had = any(name.startswith(f"{module_id}/") for name in state["optimizers"])
            if had and not self.get_optimizers_for_module(module_id):
                self.freeze_module(module_id, frozen=False)
        self.modules.frozen = set(state["frozen_modules"])
        chosen = state["policies_to_train"]
        if chosen != FUNCTION:
            self.policies_to_train = chosen
        elif not callable(self.policies_to_train):
            problem = "the state is that of a function, which it does not hold; set it before"
            raise ConfigError("policies_to_train", problem, self.policies_to_train)

    def get_state(
        self, components: Collection[str] | None = None, *, not_components: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return the state of some components, see `components.select`, as `state_dict` does."""
        return select(self.state_dict(), components, not_components)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore components from all or some of `get_state`; the others do not change.

        Raises:
            ConfigError: If the learner has no such component.
        """
        self.load_state_dict(merged(self.state_dict(), state))

    def save_to_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write the result of `get_state` for the arguments to a file, whole or not at all."""
        write(self.get_state(*args, **kwargs), path)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Restore the state, or one component of it, from a file of `save_to_path`.

        Raises:
            ConfigError: If the file has no such component, or the learner has none.
            RunDirectoryError: If the file is damaged.
        """
        self.set_state(read(path, component))

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Make a learner from the arguments, with the state of a file of `save_to_path`.

        Raises:
            ConfigError: If the path is the directory of a run, whose learner `load_learner` reads.
            RunDirectoryError: If the file is damaged.
        """
        state = read(path)
        learner = cls(*args, **kwargs)
        learner.set_state(state)
        return learner
