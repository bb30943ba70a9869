"""Modules of a learner with their settings, and context managers for PyTorch modes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

import torch
from torch import nn

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, TrainingError, nearest
from maze_train.core.types import Tensor, precise_dtype
from maze_train.data.rollout import Rollout
from maze_train.learner.apis import HasLoss, HasPolicy, missing_names
from maze_train.learner.config import (
    Freeze,
    GradientSettings,
    OptimizerSettings,
    Progress,
    Schedule,
    scheduled_value,
)
from maze_train.nets.normalization import find_normalizer
from maze_train.nets.policy_model import Policy


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern (parameter name, submodule name or glob) matches a parameter."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _patterns(settings: GradientSettings) -> Iterator[tuple[str, str]]:
    for pattern in settings.lr_factors:
        yield "algorithm.lr_factors", pattern
    for i, rule in enumerate(settings.freeze):
        for pattern in rule.params:
            yield f"algorithm.freeze[{i}].params", pattern


CUBLAS, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Environment variable for deterministic matrix products on GPUs, and its value."""

Mode = TypeVar("Mode", int, str)

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
    """Return whether a module may behave differently in training and evaluation mode.

    Switching modes takes longer than the forward pass of a small network. The mode is therefore not
    switched for modules known not to depend on the mode: modules of this package and some PyTorch
    layers.
    """
    return not all(
        type(part) in INDIFFERENT or type(part).__module__.startswith(OWN)
        for part in module.modules()
    )


REDUCED = MappingProxyType({"bfloat16": torch.bfloat16, "float16": torch.float16})
"""Dtypes by value of `algorithm.autocast`."""


def autocast(device: torch.device, name: str) -> AbstractContextManager[Any]:
    """Context manager for `algorithm.autocast`; `none` does nothing."""
    if name == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=REDUCED[name])


@contextmanager
def _with_mode(
    value: Mode | None, read: Callable[[], Mode], write: Callable[[Mode], None]
) -> Iterator[None]:
    """Temporarily set a PyTorch mode; None and 0 keep the current mode."""
    before = read()
    if not value or value == before:
        yield
        return
    write(value)
    try:
        yield
    finally:
        write(before)


def matmul_precision(name: str | None) -> AbstractContextManager[None]:
    """Context manager for the precision of float32 matrix products.

    Args:
        name: `highest`: float32; `high`: TensorFloat-32 or two bfloat16 values per factor, if the
            device supports it; `medium`: bfloat16 factors. Sums are float32. None: the current
            precision of PyTorch.

    Raises:
        ConfigError: If `name` is unknown. PyTorch would only warn.
    """
    if name is not None:
        check_one_of("precision", name, ("highest", "high", "medium"))
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return _with_mode(name, read, write)


def torch_threads(count: int) -> AbstractContextManager[None]:
    """Context manager for the number of PyTorch threads; 0 keeps the current number."""
    return _with_mode(count, torch.get_num_threads, torch.set_num_threads)


DEFAULT_MODULE = "default"


def current(setting: float | Schedule | Tensor) -> float | Tensor:
    """Return a setting of `Learner.config_of`: a number, or a 0-d float64 tensor if scheduled."""
    assert not isinstance(setting, Schedule)
    return setting


ModuleSource: TypeAlias = "nn.Module | Callable[[], nn.Module] | Mapping[str, Tensor]"
Data = TypeVar("Data")
Chosen: TypeAlias = "Collection[str] | Callable[[str, Any], bool] | None"


Modules: TypeAlias = nn.Module | Mapping[str, nn.Module]
"""Modules, keyed by ID, or a single module."""


class LearnerOptions(TypedDict, total=False):
    """Optional arguments of a learner, see `Learner`."""

    device: torch.device | str
    seed: int


class ModuleOptions(TypedDict, total=False):
    """Options of `Learner.add_module`."""

    frozen: bool
    """Whether the module is frozen, such as a fixed opponent. A frozen module has no optimizer, and
    its experience is dropped."""

    like: str
    """ID of the module to copy if `module` contains only weights; default: `default`."""

    overrides: Mapping[str, Any] | None
    """Settings of this module, as in `algorithm.overrides`."""


class LearnerModules(dict[str, nn.Module]):
    """Modules of a learner by ID, with their settings.

    Args:
        config: Settings of the algorithm, including `overrides` of modules.
        scheduled: Names of settings that can be schedules, see `Learner.scheduled_settings`.
        module_ids: IDs of the initial modules.
        device: Device of the modules.

    Attributes:
        frozen: IDs of frozen modules.
        with_modes: IDs of modules that depend on the training mode, see `has_modes`.
        with_loss: Modules with a custom loss.
        policies: Policies with parameters that may have limits.
        overrides: Overridden settings, keyed by module ID.

    Raises:
        ConfigError: If settings are invalid or refer to an unknown module.
    """

    def __init__(
        self,
        config: OptimizerSettings,
        scheduled: Sequence[str],
        module_ids: Collection[str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._device = device
        self.frozen: set[str] = set()
        self.with_modes: set[str] = set()
        self.with_loss: dict[str, HasLoss] = {}
        self.policies: dict[str, Policy] = {}
        self._scheduled = scheduled
        overrides = config.gradient_settings().overrides
        for module_id in overrides:
            if module_id not in module_ids:
                close = ", ".join(nearest(module_id, module_ids) or module_ids)
                problem = (
                    f"no such module; similar ids: {close}; for a module added later, "
                    "pass the settings to add_module"
                )
                raise ConfigError("algorithm.overrides", problem, module_id)
        self.overrides: dict[str, Mapping[str, Any]] = {}
        self._given: dict[str, Mapping[str, Any]] = {}  # With modules that were added later.
        self._progress = Progress()
        self._values: dict[str, dict[str, Tensor]] = {}
        self.change_settings(config)

    def config_of(self, module_id: str) -> OptimizerSettings:
        """Return the current settings of a module, see `Learner.config_of`."""
        return self._configs.get(module_id, self._shared_config)

    def set_schedules(self, progress: Progress) -> None:
        """Update the values of scheduled settings."""
        self._progress = progress
        self._shared_config = self._with_values("", self._config)
        self._configs = {
            key: self._with_values(key, own) for key, own in self._own_settings.items()
        }

    def _with_values(self, module_id: str, config: OptimizerSettings) -> OptimizerSettings:
        """Return settings in which schedules are replaced by their current values, 0-d."""
        values = self._values.setdefault(module_id, {})
        for name in self._scheduled:
            setting = config.value_of(name)
            if isinstance(setting, Schedule):
                if name not in values:
                    # With float64, products with vectors are identical to those with Python floats.
                    dtype = precise_dtype(self._device)
                    values[name] = torch.zeros((), dtype=dtype, device=self._device)
                values[name].fill_(scheduled_value(setting, self._progress))
                config = copy(config)
                setattr(config, name, values[name])
        return config

    def change_settings(self, config: OptimizerSettings) -> None:
        """Replace the settings of the algorithm; overrides of modules added later are kept.

        Raises:
            ConfigError: If an override is unknown, cannot be set per module, or is invalid.
        """
        self._config = config
        overrides, given = config.gradient_settings().overrides, self._given
        self.overrides = {
            key: {**given.get(key, {}), **overrides.get(key, {})} for key in {**overrides, **given}
        }
        self._own_settings = {
            module_id: config.for_module(module_id, own)
            for module_id, own in self.overrides.items()
        }
        self.set_schedules(self._progress)

    def set_overrides(self, module_id: str, overrides: Mapping[str, Any] | None) -> None:
        """Set the overrides of a module in addition to those of the algorithm's settings.

        Raises:
            ConfigError: If a setting is unknown, cannot be set per module, or is invalid.
        """
        if overrides:
            self._given[module_id] = overrides
        self.change_settings(self._config)

    def known(self, module_id: str) -> nn.Module:
        """Return a module by ID.

        Raises:
            ConfigError: If the module does not exist.
        """
        if module_id not in self:
            problem = f"no such module; available: {', '.join(self)}"
            raise ConfigError("module_id", problem, module_id)
        return self[module_id]

    def by_id(self, given: Data | Mapping[str, Data]) -> dict[str, Data]:
        """Return a mapping from module ID to value, given a mapping or the single module's value.

        A mapping with other keys than module IDs is the value of the single module.

        Raises:
            ConfigError: If the value belongs to the single module, but there are others.
        """
        if isinstance(given, Mapping) and given.keys() <= self.keys():
            return dict(given)
        if DEFAULT_MODULE not in self and isinstance(given, Mapping):
            self.known(next(key for key in given if key not in self))
        self.known(DEFAULT_MODULE)
        return {DEFAULT_MODULE: cast("Data", given)}

    def made(self, source: ModuleSource, like: str) -> nn.Module:
        """Return a given module, the result of a function, or a copy of `like` with new weights.

        Raises:
            ConfigError: If the module `like` does not exist, or the weights do not match.
        """
        if isinstance(source, nn.Module):
            return source
        if not isinstance(source, Mapping):
            return source()
        module = deepcopy(self.known(like))
        if like in self.frozen:
            module.requires_grad_(True)
        try:
            module.load_state_dict(dict(source))
        except RuntimeError as error:
            problem = " ".join(str(error).split())
            raise ConfigError("module", f"weights do not fit {like!r}: {problem}") from error
        return module

    def check_new(self, module_id: str) -> None:
        """Check the ID of a new module.

        Raises:
            ConfigError: If the ID is invalid or in use.
        """
        if not module_id or "/" in module_id:
            raise ConfigError("module_id", "expected a name without /", module_id)
        if module_id in self:
            raise ConfigError("module_id", "this ID is already in use", module_id)

    def place(self, module_id: str, module: nn.Module, device: torch.device) -> None:
        """Add a module after moving it to a device."""
        self[module_id] = module.to(device)
        if has_modes(module):
            self.with_modes.add(module_id)
        if isinstance(module, HasLoss):
            self.with_loss[module_id] = module
        if not missing_names(HasPolicy, module):
            policy = cast("HasPolicy", module).policy
            if isinstance(policy, Policy):
                self.policies[module_id] = policy

    def observe(self, rollouts: Mapping[str, Rollout], may_learn: Callable[[str], bool]) -> None:
        """Update the observation statistics of the modules for which `may_learn` is true."""
        for module_id, rollout in rollouts.items():
            normalizer = find_normalizer(self[module_id])
            if normalizer is not None and may_learn(module_id):
                normalizer.update(rollout.to(self._device).acted_on(normalizer.keys))

    def limit_free_params(self) -> None:
        """Clamp the parameters of policies to the limits of their distributions after a step."""
        for policy in self.policies.values():
            if policy.has_free_params:
                policy.limit_free_params()

    def forget(self, module_id: str) -> None:
        """Remove a module and its settings; does nothing if the module does not exist."""
        self.pop(module_id, None)
        self.overrides.pop(module_id, None)
        self._given.pop(module_id, None)
        self._own_settings.pop(module_id, None)
        self._configs.pop(module_id, None)
        self._values.pop(module_id, None)
        self.policies.pop(module_id, None)
        self.with_loss.pop(module_id, None)
        self.with_modes.discard(module_id)
        self.frozen.discard(module_id)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of the weights, keyed by module ID."""
        return {
            module_id: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for module_id, module in self.items()
        }

    def check_finite(self, where: str) -> None:
        """Raise TrainingError if a weight is not finite; see `Learner.check_weights`."""
        for module_id, module in self.items():
            for name, value in module.named_parameters():
                if not bool(torch.isfinite(value).all()):
                    raise TrainingError(
                        f"{where}: {name} of module {module_id!r} is not finite. A smaller "
                        "algorithm.lr or an algorithm.max_grad_norm may help"
                    )

    @contextmanager
    def in_training(self, module_ids: Iterable[str]) -> Iterator[None]:
        """Put modules that depend on the mode (dropout, batch norm) into training mode."""
        modules = [self[module_id] for module_id in module_ids if module_id in self.with_modes]
        for module in modules:
            module.train()
        try:
            yield
        finally:
            for module in modules:
                module.eval()

    def check_names(self, settings: GradientSettings) -> None:
        """Check that each name in `lr_factors` and `freeze` matches a parameter.

        Raises:
            ConfigError: If a name matches no parameter. The message suggests similar names.
        """
        known = [name for module in self.values() for name, _ in module.named_parameters()]
        for key, pattern in _patterns(settings):
            if not any(matches(pattern, name) for name in known):
                # For `a.b.weight`, also suggest `a` and `a.b`.
                owners = (accumulate(name.split("."), "{}.{}".format) for name in known)
                parts = dict.fromkeys(chain.from_iterable(owners))
                close = nearest(pattern, list(parts), count=3) or list(parts)[:5]
                problem = f"no parameter has this name; similar names: {', '.join(close)}"
                raise ConfigError(key, problem, pattern)

    def frozen_parameters(self, rules: Sequence[Freeze], updates: int) -> list[nn.Parameter]:
        """Return the parameters that a rule freezes in update number `updates`."""
        patterns = [pattern for rule in rules if rule.holds(updates) for pattern in rule.params]
        if not patterns:
            return []
        return [
            param
            for module in self.values()
            for name, param in module.named_parameters()
            if any(matches(pattern, name) for pattern in patterns)
        ]

    def grouped(
        self,
        module_id: str,
        params: Sequence[nn.Parameter],
        lr_factors: Mapping[str, float],
        rules: Sequence[Freeze],
    ) -> list[tuple[float, list[nn.Parameter]]]:
        """Group the parameters of a module by their learning rate factor.

        Parameters in a group have the same factor and are frozen by the same rules.
        """
        names = {id(param): name for name, param in self[module_id].named_parameters()}
        groups: dict[tuple[float, tuple[int, ...]], list[nn.Parameter]] = {}
        for param in params:
            name = names.get(id(param), "")
            factors = (factor for key, factor in lr_factors.items() if matches(key, name))
            factor = next(factors, 1.0)
            frozen_by = tuple(
                i
                for i, rule in enumerate(rules)
                if any(matches(pattern, name) for pattern in rule.params)
            )
            groups.setdefault((factor, frozen_by), []).append(param)
        return [(factor, members) for (factor, _), members in groups.items()]
