"""Modules of a learner by id, with their settings; modes of PyTorch in an update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from fnmatch import fnmatchcase
from itertools import accumulate, chain
from typing import Any, TypeAlias, TypedDict, TypeVar

import torch
from torch import nn

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, TrainingError, nearest
from maze_train.core.types import Tensor
from maze_train.learner.apis import HasOwnLoss
from maze_train.learner.config import (
    Freeze,
    GradientSettings,
    Progress,
    settings_for_module,
    with_values,
)
from maze_train.nets.policy_model import Policy


def matches(pattern: str, name: str) -> bool:
    """Whether a parameter is meant by its own name, by that of a part, or by a pattern of it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _patterns(settings: GradientSettings) -> Iterator[tuple[str, str]]:
    for pattern in settings.lr_factors:
        yield "algorithm.lr_factors", pattern
    for i, rule in enumerate(settings.freeze):
        for pattern in rule.params:
            yield f"algorithm.freeze[{i}].params", pattern


CUBLAS, REPEATABLE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable that lets products of matrices on a GPU be deterministic, and its value."""

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
def _with_mode(
    value: Mode | None, read: Callable[[], Mode], write: Callable[[Mode], None]
) -> Iterator[None]:
    """Set a mode of PyTorch in the block; a value that is None or 0 leaves it."""
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
    """Compute products of float32 matrices with this precision in the block.

    Args:
        name: `highest`: float32; `high`: factors rounded to TensorFloat-32 or to two bfloat16
            numbers each, if the device can; `medium`: factors rounded to bfloat16. Sums are
            float32. None: the precision that is set in PyTorch.

    Raises:
        ConfigError: If there is no such precision; PyTorch would only warn.
    """
    if name is not None:
        check_one_of("precision", name, ("highest", "high", "medium"))
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return _with_mode(name, read, write)


def torch_threads(count: int) -> AbstractContextManager[None]:
    """Set the number of threads of PyTorch in the block; 0 leaves it."""
    return _with_mode(count, torch.get_num_threads, torch.set_num_threads)


DEFAULT_MODULE = "default"

ModuleSource: TypeAlias = "nn.Module | Callable[[], nn.Module] | Mapping[str, Tensor]"
Data = TypeVar("Data")
Chosen: TypeAlias = "Collection[str] | Callable[[str, Any], bool] | None"


class HowAdded(TypedDict, total=False):
    """How a module is added to a learner."""

    frozen: bool
    """Whether it never learns, such as an opponent that stays as it is: it gets no optimizer, and
    its experience is dropped."""

    like: str
    """Id of the module that is copied, if weights are given; without it `default`."""

    overrides: Mapping[str, Any] | None
    """Settings of this module, as in `algorithm.overrides`."""


class LearnerModules(dict[str, nn.Module]):
    """The modules of a learner by id, and the settings of each.

    Args:
        config: Settings of the algorithm, `overrides` of modules among them, if there are any.
        scheduled: Settings that may follow a schedule, see `Learner.scheduled_settings`.
        module_ids: Ids of the first modules.

    Attributes:
        frozen: Ids of modules that do not learn.
        with_modes: Ids of those that differ in training and evaluation, see `has_modes`.
        with_loss: Ids of those that have their own loss.
        policies: Policies of the modules, which may have parameters with limits.
        own_settings: Settings of modules that have their own, by id.

    Raises:
        ConfigError: If there are settings of a module that does not exist, or a wrong one.
    """

    def __init__(self, config: Any, scheduled: Sequence[str], module_ids: Collection[str]) -> None:
        super().__init__()
        self.frozen: set[str] = set()
        self.with_modes: set[str] = set()
        self.with_loss: set[str] = set()
        self.policies: dict[str, Policy] = {}
        self._config, self._scheduled = config, scheduled
        overrides = getattr(config, "overrides", {})
        for module_id in overrides:
            if module_id not in module_ids:
                close = ", ".join(nearest(module_id, module_ids) or module_ids)
                problem = f"no such module; close ones: {close}; add_module takes settings as well"
                raise ConfigError("algorithm.overrides", problem, module_id)
        self.own_settings = {
            module_id: settings_for_module(config, module_id, own)
            for module_id, own in overrides.items()
        }
        self.set_schedules(Progress())

    # -- settings --------------------------------------------------------------------------------

    def config_of(self, module_id: str) -> Any:
        """The settings of a module in this update, see `Learner.config_of`."""
        return self._configs.get(module_id, self._shared_config)

    def set_schedules(self, progress: Progress) -> None:
        """Give settings the values that their schedules have in an update."""
        self._progress = progress
        self._shared_config = with_values(self._config, self._scheduled, progress)
        self._configs = {
            module_id: with_values(config, self._scheduled, progress)
            for module_id, config in self.own_settings.items()
        }

    def set_overrides(self, module_id: str, overrides: Mapping[str, Any] | None) -> None:
        """Give a module its own settings, if there are any.

        Raises:
            ConfigError: If one is unknown, is not a setting of a module, or has a wrong value.
        """
        if overrides:
            self.own_settings[module_id] = settings_for_module(self._config, module_id, overrides)
        self.set_schedules(self._progress)

    # -- modules come and go ---------------------------------------------------------------------

    def known(self, module_id: str) -> nn.Module:
        """The module with this id.

        Raises:
            ConfigError: If there is no such module.
        """
        if module_id not in self:
            problem = f"no such module; there are: {', '.join(self)}"
            raise ConfigError("module_id", problem, module_id)
        return self[module_id]

    def by_id(self, given: Data | Mapping[str, Data]) -> dict[str, Data]:
        """Values by module id, from such a mapping or from the value of the only module.

        Raises:
            ConfigError: If there is no such module.
        """
        if not isinstance(given, Mapping):
            given = {DEFAULT_MODULE: given}
        for module_id in given:
            self.known(module_id)
        return dict(given)

    def made(self, source: ModuleSource, like: str) -> nn.Module:
        """A module that is given, or made from a function, or a copy of another with weights.

        Raises:
            ConfigError: If weights do not fit the module `like`, or there is no such module.
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
        """Refuse the id of a module that is not valid or taken.

        Raises:
            ConfigError: If it is.
        """
        if not module_id or "/" in module_id:
            raise ConfigError("module_id", "expected a name without /", module_id)
        if module_id in self:
            raise ConfigError("module_id", "there is such a module already", module_id)

    def place(self, module_id: str, module: nn.Module, device: torch.device) -> None:
        """Add a module, on a device."""
        self[module_id] = module.to(device)
        if has_modes(module):
            self.with_modes.add(module_id)
        if isinstance(module, HasOwnLoss):
            self.with_loss.add(module_id)
        policy = getattr(module, "policy", None)
        if isinstance(policy, Policy):
            self.policies[module_id] = policy

    def limit_free_params(self) -> None:
        """Clamp parameters of policies to the limits of their families, after a step."""
        for policy in self.policies.values():
            if policy.has_free_params:
                policy.limit_free_params()

    def forget(self, module_id: str) -> None:
        """Remove a module, if it is there, with its settings."""
        self.pop(module_id, None)
        self.own_settings.pop(module_id, None)
        self.policies.pop(module_id, None)
        for ids in (self.with_modes, self.with_loss, self.frozen):
            ids.discard(module_id)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights by module."""
        return {
            module_id: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for module_id, module in self.items()
        }

    def check_finite(self, where: str) -> None:
        """Refuse weights that are not finite; see `Learner.check_weights`."""
        for module_id, module in self.items():
            for name, value in module.named_parameters():
                if not bool(torch.isfinite(value).all()):
                    raise TrainingError(
                        f"{where}: {name} of module {module_id!r} is not finite. A smaller "
                        "algorithm.lr or an algorithm.max_grad_norm may help"
                    )

    @contextmanager
    def in_training(self, module_ids: Iterable[str]) -> Iterator[None]:
        """Have modules in training mode in the block, where that differs from evaluation."""
        modules = [self[module_id] for module_id in module_ids if module_id in self.with_modes]
        for module in modules:
            module.train()
        try:
            yield
        finally:
            for module in modules:
                module.eval()

    # -- names of parameters ---------------------------------------------------------------------

    def check_names(self, settings: GradientSettings) -> None:
        """Refuse names in settings that mean no parameter of any module.

        Raises:
            ConfigError: If there is one, with close names.
        """
        known = [name for module in self.values() for name, _ in module.named_parameters()]
        for key, pattern in _patterns(settings):
            if not any(matches(pattern, name) for name in known):
                # Of `a.b.weight` also `a` and `a.b`.
                owners = (accumulate(name.split("."), "{}.{}".format) for name in known)
                parts = dict.fromkeys(chain.from_iterable(owners))
                close = nearest(pattern, list(parts), count=3) or list(parts)[:5]
                problem = f"no parameter has this name; close ones: {', '.join(close)}"
                raise ConfigError(key, problem, pattern)

    def frozen_parameters(self, rules: Sequence[Freeze], updates: int) -> list[nn.Parameter]:
        """The parameters that some rule freezes in the update after `updates` others."""
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
        """Parameters of a module in groups, each with its factor of the learning rate.

        Parameters share a group if they have the same factor and the same rules freeze them.
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
