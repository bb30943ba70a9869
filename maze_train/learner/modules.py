"""Modules of a learner by id: their optimizers, parameter groups, modes and state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import nn

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, nearest
from maze_train.learner.accumulation import LossScaler
from maze_train.learner.components import FUNCTION, choose
from maze_train.learner.config import (
    GradientSettings,
    Progress,
    Schedule,
    gradient_settings,
    settings_for_module,
)
from maze_train.learner.optimizers import ModuleOptimizer
from maze_train.learner.part import HasOwnLoss, missing_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maze_train.core.types import Tensor
    from maze_train.learner.config import Freeze


def matches(pattern: str, name: str) -> bool:
    """Whether a parameter is meant by its own name, by that of a part, or by a pattern of it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def frozen_parameters(
    rules: Iterable[Freeze], updates: int, modules: Mapping[str, nn.Module]
) -> list[nn.Parameter]:
    """The parameters that some rule freezes in the update after `updates` others."""
    patterns = [pattern for rule in rules if rule.holds(updates) for pattern in rule.params]
    return [
        param
        for module in modules.values()
        for name, param in module.named_parameters()
        if any(matches(pattern, name) for pattern in patterns)
    ]


def grouped(
    params: Sequence[nn.Parameter], module: nn.Module, settings: GradientSettings
) -> list[tuple[float, list[nn.Parameter]]]:
    """Parameters of a module in groups, each with its factor of the learning rate.

    Parameters have a group in common if they have the factor of the learning rate in common, and
    are named by the same entries of `freeze`.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    groups: dict[tuple[float, tuple[int, ...]], list[nn.Parameter]] = {}
    for param in params:
        name = names.get(id(param), "")
        factors = (factor for key, factor in settings.lr_factors.items() if matches(key, name))
        factor = next(factors, 1.0)
        frozen_by = tuple(
            i
            for i, rule in enumerate(settings.freeze)
            if any(matches(pattern, name) for pattern in rule.params)
        )
        groups.setdefault((factor, frozen_by), []).append(param)
    return [(factor, members) for (factor, _), members in groups.items()]


def check_names(settings: GradientSettings, modules: Mapping[str, nn.Module]) -> None:
    """Refuse names in settings that mean no parameter of any module.

    Raises:
        ConfigError: If there is one, with close names.
    """
    known = [name for module in modules.values() for name, _ in module.named_parameters()]
    for key, pattern in _patterns(settings):
        if not any(matches(pattern, name) for name in known):
            parts = dict.fromkeys(part for name in known for part in _with_owners(name))
            close = ", ".join(nearest(pattern, list(parts), count=3))
            raise ConfigError(
                key,
                f"no parameter has this name; close ones: {close or ', '.join(list(parts)[:5])}",
                pattern,
            )


def _patterns(settings: GradientSettings) -> Iterator[tuple[str, str]]:
    for pattern in settings.lr_factors:
        yield "algorithm.lr_factors", pattern
    for i, rule in enumerate(settings.freeze):
        for pattern in rule.params:
            yield f"algorithm.freeze[{i}].params", pattern


def _with_owners(name: str) -> Iterator[str]:
    """A parameter's name after those of the parts that hold it: `a`, `a.b`, `a.b.weight`."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        yield ".".join(parts[:length])


CUBLAS, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable that lets products of matrices on a GPU be deterministic, and its value."""

OWN = ("maze_train.nets.", "maze_train.algorithms.")
INDIFFERENT = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ELU,
    nn.Embedding,
    nn.Flatten,
    nn.GELU,
    nn.GroupNorm,
    nn.Identity,
    nn.LayerNorm,
    nn.LeakyReLU,
    nn.Linear,
    nn.MaxPool2d,
    nn.ModuleDict,
    nn.ModuleList,
    nn.ReLU,
    nn.Sequential,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softmax,
    nn.Tanh,
)


def has_modes(module: nn.Module) -> bool:
    """Whether a module, or one within it, may do different things in training and evaluation.

    Switching takes longer than a small network, so it is left out where it does nothing. Models and
    networks of the package make no difference, nor do some layers of PyTorch; others may.
    """
    return not all(
        type(part) in INDIFFERENT or type(part).__module__.startswith(OWN)
        for part in module.modules()
    )


def autocast(device: torch.device, name: str) -> AbstractContextManager[Any]:
    """Compute layers in a type of `algorithm.autocast` in the block; `none`: in that of weights."""
    if name == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, name))


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Compute products of float32 matrices with this precision in the block.

    Args:
        name: `highest`: float32; `high`: factors rounded to TensorFloat-32 or to two bfloat16
            numbers each, where the device can; `medium`: factors rounded to bfloat16. Sums are
            float32.

    Raises:
        ConfigError: If there is no such precision; PyTorch would only warn.
    """
    check_one_of("precision", name, ("highest", "high", "medium"))
    before = torch.get_float32_matmul_precision()
    if name == before:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the threads of PyTorch in the block; 0: leave them."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


DEFAULT_MODULE = "default"
DEFAULT_OPTIMIZER = "default"

ModuleSource: TypeAlias = "nn.Module | Callable[[], nn.Module] | Mapping[str, Tensor]"
Chosen: TypeAlias = "Collection[str] | Callable[[str, Any], bool] | None"


class LearnerModules:
    """Modules by id, optimizers by (module, name), and their state; see `Learner`."""

    required_apis: ClassVar[tuple[type, ...]] = ()
    """Protocols of `learner.apis` that each module has to satisfy which learns here."""

    policies_to_train: Chosen = None
    """Ids of modules that learn, or a function of id and experience; None: all but frozen ones."""

    def __init__(
        self,
        modules: nn.Module | Mapping[str, Any],
        config: Any,
        device: torch.device | str,
        seed: int,
    ) -> None:
        if isinstance(modules, nn.Module):
            modules = {DEFAULT_MODULE: modules}
        self.config = config
        self.settings = gradient_settings(config)
        own = getattr(config, "overrides", {})
        self.own_settings = {key: self._settings_for(key, own[key]) for key in own}
        self.progress = Progress()
        self.device = torch.device(device)
        self.modules: dict[str, nn.Module] = {}
        self.modules_with_modes: set[str] = set()
        self.modules_with_loss: set[str] = set()
        self.frozen_modules: set[str] = set()
        self.optimizers: dict[tuple[str, str], ModuleOptimizer] = {}
        self.weights_seq_no = self.empty_updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.loss_scaler: LossScaler | None = None
        if self.settings.autocast == "float16":
            self.loss_scaler = LossScaler()
        for module_id in self.own_settings:
            if module_id not in modules:
                close = ", ".join(nearest(module_id, modules) or modules)
                problem = f"no such module; close ones: {close}; add_module takes settings as well"
                raise ConfigError("algorithm.overrides", problem, module_id)
        for module_id, module in modules.items():
            self._place(module_id, module)
        self._has_groups = bool(self.settings.lr_factors or self.settings.freeze)
        if self._has_groups:
            check_names(self.settings, self.modules)
        self.configure_optimizers()

    @property
    def module(self) -> nn.Module:
        """The module of ordinary training, which has one."""
        return self.modules[DEFAULT_MODULE]

    # -- modules ---------------------------------------------------------------------------------

    def add_module(
        self,
        module_id: str,
        module: ModuleSource,
        *,
        frozen: bool = False,
        like: str = DEFAULT_MODULE,
        overrides: Mapping[str, Any] | None = None,
    ) -> nn.Module:
        """Add a module, between two updates at any time.

        Args:
            module_id: Its id, without `/`.
            module: The module; or what makes it, called without arguments; or its weights by name,
                such as `get_weights` and saved policies have them, for a copy of another module.
            frozen: Whether it never learns, such as an opponent that stays as it is: it gets no
                optimizer, and its experience is dropped.
            like: Id of the module that is copied, if weights are given.
            overrides: Settings of this module, as in `algorithm.overrides`.

        Returns:
            The module, on the device of the learner.

        Raises:
            ConfigError: If the id is taken or not valid, the weights do not fit, the module lacks
                what this learner needs, or a setting is not one of a module.
        """
        if isinstance(module, Mapping):
            weights, module = module, deepcopy(self._known(like))
            if like in self.frozen_modules:
                module.requires_grad_(True)
            try:
                module.load_state_dict(dict(weights))
            except RuntimeError as error:
                problem = " ".join(str(error).split())
                raise ConfigError("module", f"weights do not fit {like!r}: {problem}") from error
        elif not isinstance(module, nn.Module):
            module = module()
        is_new = module_id not in self.modules
        if overrides and is_new:
            self.own_settings[module_id] = self._settings_for(module_id, overrides)
        try:
            self._place(module_id, module, frozen)
            if not frozen:
                with self.settings_of(module_id):
                    self.configure_optimizers_for_module(module_id)
        except ConfigError:
            if is_new:
                self._forget(module_id)
            raise
        return module

    def _place(self, module_id: str, module: nn.Module, frozen: bool = False) -> None:
        """Add a module, without optimizers."""
        if not module_id or "/" in module_id:
            raise ConfigError("module_id", "expected a name without /", module_id)
        if module_id in self.modules:
            raise ConfigError("module_id", "there is such a module already", module_id)
        if frozen:
            module.requires_grad_(False)
            self.frozen_modules.add(module_id)
        else:
            with self.settings_of(module_id):
                self.check_module(module_id, module)
        self.modules[module_id] = module.to(self.device)
        if has_modes(module):
            self.modules_with_modes.add(module_id)
        if isinstance(module, HasOwnLoss):
            self.modules_with_loss.add(module_id)

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module and its optimizers, and return it.

        Raises:
            ConfigError: If there is no such module.
        """
        module = self._known(module_id)
        self._forget(module_id)
        return module

    def _forget(self, module_id: str) -> None:
        self.optimizers = {k: o for k, o in self.optimizers.items() if k[0] != module_id}
        self.modules.pop(module_id, None)
        self.own_settings.pop(module_id, None)
        for ids in (self.modules_with_modes, self.modules_with_loss, self.frozen_modules):
            ids.discard(module_id)

    def check_module(self, module_id: str, module: nn.Module) -> None:
        """Refuse a module that lacks what this learner needs of those that learn.

        Raises:
            ConfigError: If it does, with the missing names.
        """
        for api in self.required_apis:
            missing = missing_names(module, api)
            if missing:
                problem = (
                    f"{type(self).__name__} needs {api.__name__} of a module that learns, but "
                    f"{type(module).__name__} has no {' and no '.join(missing)}; "
                    "add_module(..., frozen=True), or policies.<id>.frozen=true, takes any"
                )
                raise ConfigError("module", problem, module_id)

    def freeze_module(self, module_id: str, frozen: bool = True) -> None:
        """Have a module learn no more, or again; its optimizers stay as they are meanwhile.

        Raises:
            ConfigError: If there is no such module, or it lacks what this learner needs.
        """
        module = self._known(module_id)
        if frozen:
            self.frozen_modules.add(module_id)
        elif module_id in self.frozen_modules:
            with self.settings_of(module_id):
                self.check_module(module_id, module)
                if not self.get_optimizers_for_module(module_id):
                    module.requires_grad_(True)
                    self.configure_optimizers_for_module(module_id)
            self.frozen_modules.remove(module_id)

    def may_learn(self, module_id: str) -> bool:
        """Whether a module is updated, from some experience at least."""
        chosen = self.policies_to_train
        is_chosen = chosen is None or callable(chosen) or module_id in chosen
        return is_chosen and module_id not in self.frozen_modules

    def should_module_be_updated(self, module_id: str, experience: Any) -> bool:
        """Whether a module learns from its experience, which is dropped otherwise."""
        how = self.policies_to_train
        return self.may_learn(module_id) and (not callable(how) or how(module_id, experience))

    def _known(self, module_id: str) -> nn.Module:
        if module_id not in self.modules:
            problem = f"no such module; there are: {', '.join(self.modules)}"
            raise ConfigError("module_id", problem, module_id)
        return self.modules[module_id]

    def _settings_for(self, module_id: str, own: Mapping[str, Any]) -> tuple[Any, GradientSettings]:
        """Return the settings of a module with overrides, as `config` and as `settings`."""
        config = settings_for_module(self.config, module_id, own)
        return config, gradient_settings(config)

    @contextmanager
    def settings_of(self, module_id: str) -> Iterator[None]:
        """Have the settings of a module, see `algorithm.overrides`, as `config` in the block."""
        shared = self.config, self.settings
        if module_id not in self.own_settings:
            yield
            return
        self.config, self.settings = self.own_settings[module_id]
        self.set_schedules(self.progress)
        try:
            yield
        finally:
            self.config, self.settings = shared
            self.set_schedules(self.progress)

    def set_schedules(self, progress: Progress) -> None:
        """Take values from schedules of `config` that hold in an update; here none."""
        self.progress = progress

    # -- optimizers ------------------------------------------------------------------------------

    def configure_optimizers(self) -> None:
        """Register the optimizers of all modules, once; override it or the one for a module."""
        for module_id in self.modules:
            with self.settings_of(module_id):
                self.configure_optimizers_for_module(module_id)

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """Register the optimizers of a module; by default one over all its parameters."""
        self.register_optimizer(
            module_id,
            optimizer=self.config.optimizer,
            params=list(self.modules[module_id].parameters()),
            lr_or_lr_schedule=self.config.lr,
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
        """Give some parameters of a module an optimizer; none that require no gradient.

        Args:
            module_id: The module.
            name: The name of the optimizer, one of several of the module.
            optimizer: Class and arguments: `{_target_: torch.optim.Adam, eps: 1e-5}`; or an
                optimizer of PyTorch, which keeps its groups.
            params: The parameters; `algorithm.lr_factors` and `algorithm.freeze` apply to them.
            lr_or_lr_schedule: Learning rate, its schedule, or points of one by environment steps,
                `[[0, v0], [t1, v1], ...]`; None: an optimizer of PyTorch keeps its own.

        Raises:
            ConfigError: If the name is taken, or another optimizer owns one of the parameters.
        """
        key = (module_id, name)
        owned = {id(p) for other in self.optimizers.values() for p in other.params}
        if key in self.optimizers:
            problem = f"module {module_id!r} has an optimizer {name!r} already"
            raise ConfigError("optimizer", problem)
        if any(id(p) in owned for p in params):
            problem = f"{name!r} of module {module_id!r} shares parameters with another optimizer"
            raise ConfigError("optimizer", problem)
        groups = None
        if self._has_groups:
            groups = grouped(params, self.modules[module_id], self.settings)
        clip_by = getattr(self.config, "grad_clip_by", "global_norm")
        if any(p.requires_grad for p in params):
            self.optimizers[key] = ModuleOptimizer(
                params,
                optimizer,
                lr_or_lr_schedule,
                groups=groups,
                lr_scheduler=self.settings.lr_scheduler,
                clipping=(self.config.max_grad_norm, clip_by),
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
        """Name and optimizer of all of a module, in the order of registration."""
        return [(name, o) for (owner, name), o in self.optimizers.items() if owner == module_id]

    def held_parameters(self, progress: Progress) -> list[nn.Parameter]:
        """The parameters that stay as they are in the next update: those of `algorithm.freeze`."""
        if not self.settings.freeze:
            return []
        given = self.settings.freeze, progress.updates, self.modules
        held: list[nn.Parameter] = frozen_parameters(*given)
        return held

    def hold_parameters(self, progress: Progress) -> None:
        """Have optimizers leave `held_parameters` alone, and no others."""
        held = self.held_parameters(progress)
        for optimizer in self.optimizers.values():
            optimizer.hold(held)

    # -- state -----------------------------------------------------------------------------------

    def get_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return {
            module_id: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for module_id, module in self.modules.items()
        }

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write weights, as `get_weights` gives them, into the modules, in place.

        Raises:
            ConfigError: If there is no such module.
        """
        for module_id, state in weights.items():
            self._known(module_id).load_state_dict(dict(state))

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers, who learns, random generator and counters."""
        chosen = FUNCTION if callable(self.policies_to_train) else self.policies_to_train
        state: dict[str, Any] = {
            "modules": self.get_weights(),
            "optimizers": {"/".join(key): o.state_dict() for key, o in self.optimizers.items()},
            "policies_to_train": chosen if isinstance(chosen, str | None) else sorted(chosen),
            "frozen_modules": sorted(self.frozen_modules),
            "generator": self.generator.get_state(),
            "weights_seq_no": self.weights_seq_no,
            "empty_updates": self.empty_updates,
        }
        if self.loss_scaler is not None:
            state["loss_scaler"] = self.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            ConfigError: If it is the state of other modules, or a function said who learns.
        """
        if state["modules"].keys() != self.modules.keys():
            problem = (
                f"the state is one of other modules than {', '.join(self.modules)}: add_module "
                "and remove_module before it is loaded"
            )
            raise ConfigError("module_id", problem, ", ".join(state["modules"]))
        choose(self, state)
        self.set_weights(state["modules"])
        for (module_id, name), optimizer in self.optimizers.items():
            # A module that was always frozen had none.
            if module_id not in self.frozen_modules or f"{module_id}/{name}" in state["optimizers"]:
                optimizer.load_state_dict(state["optimizers"][f"{module_id}/{name}"])
        self.generator.set_state(state["generator"])
        self.weights_seq_no = state["weights_seq_no"]
        self.empty_updates = state["empty_updates"]
        if self.loss_scaler is not None:
            self.loss_scaler.load_state_dict(state["loss_scaler"])
