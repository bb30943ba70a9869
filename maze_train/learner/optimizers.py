"""Optimizers of modules: learning rates, gradients and clipping."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET, InlineObject, build_target, locate
from maze_train.core.torch_private import skipping, takes_tensors
from maze_train.core.types import Tensor, precise_dtype
from maze_train.learner.config import (
    ADAPTIVE_FACTOR,
    Progress,
    Schedule,
    is_adaptive,
    scheduled_value,
)
from maze_train.learner.flat_parameters import FlatParameters
from maze_train.learner.quick_steps import can_be_short, fused_adam_step, without_compiler
from maze_train.learner.rmsprop_tf import RMSpropTF

# Avoids division by zero; same value as in `torch.nn.utils.clip_grad_norm_`.
NORM_EPSILON = 1e-6


def clip_gradients(gradients: Sequence[Tensor], bound: float, by: str) -> Tensor:
    """Clip gradients in place.

    Args:
        gradients: The gradients of one optimizer.
        bound: Maximum norm or value, > 0; 0 disables clipping.
        by: `global_norm` scales all gradients by min(1, bound / norm), where norm is their total L2
            norm; `norm` scales each tensor separately; `value` clamps each entry to
            [-bound, bound].

    Returns:
        Total L2 norm before clipping, 0-d.
    """
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    norm = joint_norm(norms)
    if bound <= 0 or not norms:
        return norm
    if by == "value":
        for gradient in gradients:
            gradient.clamp_(-bound, bound)
    elif by == "norm" and len(gradients) > 1:
        for gradient, own_norm in zip(gradients, norms, strict=True):
            gradient.mul_(_coefficient(own_norm, bound))
    else:
        coefficient = _coefficient(norm, bound)
        for gradient in gradients:
            gradient.mul_(coefficient)
    return norm


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the total L2 norm of all gradients, 0-d; 0 if there are no gradients."""
    return joint_norm([torch.linalg.vector_norm(gradient) for gradient in gradients])


def joint_norm(norms: Sequence[Tensor]) -> Tensor:
    """Return the total norm, given the norms of the tensors, 0-d; 0 for an empty sequence."""
    if not norms:
        return torch.zeros(())
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([*norms]))
    return norm


def compute_gradient_norm(params: Iterable[Tensor]) -> float:
    """Return the total L2 norm sqrt(Σ g²) of the gradients of all parameters.

    Synchronises the device once.

    Args:
        params: Parameters on one device; parameters without a gradient count as 0.

    Returns:
        The norm, >= 0; 0.0 if there are no gradients.
    """
    return float(norm_of([param.grad for param in params if param.grad is not None]))


def _coefficient(norm: Tensor, bound: float) -> Tensor:
    return (norm + NORM_EPSILON).reciprocal_().mul_(bound).clamp_(max=1.0)


DEFAULT_OPTIMIZER = "default"

EPSILON = 1e-5

ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax")
"""Element-wise optimizers of `torch.optim`, which give identical steps on a flat vector."""

REMOVED_OPTIMIZERS = MappingProxyType(
    {
        "maze_train.Adam": "removed; use torch.optim.Adam with eps: 1e-8. Its steps differ by "
        "rounding, so runs with this optimizer cannot be resumed; use them as base_run",
        "maze_train.SGD": "removed; use torch.optim.SGD with lr multiplied by 1 - momentum. Runs "
        "with this optimizer cannot be resumed; use them as base_run",
    }
)
"""Optimizers of version 0.3, and what to use instead."""

IMPLEMENTATIONS = ("fused", "foreach", "capturable", "differentiable")
"""Arguments of `torch.optim` that select an implementation; the default depends on the device."""


class ModuleOptimizer:
    """Optimizer for some or all parameters of a module.

    A parameter that takes no part in a loss has the gradient 0, as after
    `zero_grad(set_to_none=False)`, so momentum and weight decay still move the parameter. To train
    without some parameters, freeze them.

    Args:
        params: Parameters of one dtype, on their final device.
        node: `{_target_: torch.optim.Adam, eps: 1e-5, ...}`, or a PyTorch optimizer of these
            parameters, whose groups are kept.
        lr: Learning rate or schedule; None: keep the rate of the PyTorch optimizer.
        key: Name of the setting for error messages.
        groups: Learning rate factor and parameters of each group; None: one group with factor 1.
        lr_scheduler: Class and arguments of a PyTorch scheduler; None: none.
        clipping: `bound` and `by` of `clip_gradients`.

    Attributes:
        rates: Learning rates by group, 0-d on the device; empty if they are constant, or if the
            optimizer does not accept tensors.

    Raises:
        ConfigError: If the optimizer cannot be found, does not accept its arguments or has
            different parameters, or if both a schedule and a scheduler are set.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        node: Mapping[str, Any] | torch.optim.Optimizer,
        lr: float | Schedule | None,
        key: str = "algorithm.optimizer",
        groups: Sequence[tuple[float, Sequence[nn.Parameter]]] | None = None,
        lr_scheduler: Mapping[str, Any] | None = None,
        clipping: tuple[float, str] = (0.0, "global_norm"),
    ) -> None:
        self._made_from = frozenset(map(id, params)), _comparable(node)
        self.params = [p for p in params if p.requires_grad]
        self.clipping = clipping
        self.lr = lr
        self._adapted_lr: float | None = None
        self._adapted = torch.zeros((), dtype=torch.float64)
        groups = [(1.0, self.params)] if groups is None else groups
        trained = [(factor, [p for p in group if p.requires_grad]) for factor, group in groups]
        self._lr_factors = [factor for factor, part in trained if part]
        self._frozen_units: set[int] = set()
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._num_summed = 0
        self._flat: list[FlatParameters] = []
        self._units: list[list[nn.Parameter]] = [[param] for param in self.params]
        self._is_fused_adam = False
        self.rates: list[Tensor] = []
        self.optimizer: torch.optim.Optimizer | None
        if isinstance(node, torch.optim.Optimizer):
            self.optimizer = self._taken(node, params)
        else:
            self.optimizer = self._built(node, key, [part for _, part in trained if part])
        self.scheduler: LRScheduler | None = None
        if lr_scheduler is not None and self.optimizer is not None:
            self.set_lr(Progress())
            self.scheduler = self._build_scheduler(lr_scheduler)
        if self.optimizer is not None:
            self._allocate_rates(self.optimizer)

    def _allocate_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Allocate rates on the device if they change and the optimizer accepts tensors."""
        device = optimizer.param_groups[0]["params"][0].device
        self._adapted = self._adapted.to(device, precise_dtype(device))
        is_changing = self.scheduler is not None or isinstance(self.lr, Schedule)
        if is_changing and takes_tensors(optimizer) and not self.rates:
            # With float64, steps are identical to those with Python floats. GPUs require float32.
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            count = len(optimizer.param_groups)
            self.rates = [torch.zeros((), device=device, dtype=dtype) for _ in range(count)]

    def _taken(
        self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Check a PyTorch optimizer and return it unchanged."""
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if own != set(map(id, params)):
            problem = "expected an optimizer of exactly the given params"
            raise ConfigError("optimizer", problem, type(optimizer).__name__)
        if any(factor != 1.0 for factor in self._lr_factors):
            problem = "has no effect on a PyTorch optimizer; set lr in its parameter groups"
            raise ConfigError("algorithm.lr_factors", problem)
        self._lr_factors = [1.0] * len(optimizer.param_groups)
        return optimizer

    def _built(
        self, node: Mapping[str, Any], key: str, groups: Sequence[list[nn.Parameter]]
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer, on flat vectors if it is element-wise; None without parameters."""
        if node[TARGET] in REMOVED_OPTIMIZERS:
            raise ConfigError(f"{key}.{TARGET}", REMOVED_OPTIMIZERS[node[TARGET]], node[TARGET])
        optimizer_class = locate(node[TARGET], f"{key}.{TARGET}")
        if not (
            inspect.isclass(optimizer_class) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise ConfigError(f"{key}.{TARGET}", "expected a torch.optim.Optimizer", node[TARGET])
        if _needs(optimizer_class.step, "closure"):
            raise ConfigError(
                f"{key}.{TARGET}",
                "this optimizer evaluates the loss several times per step, which is not supported",
                node[TARGET],
            )
        is_torch = optimizer_class.__module__.startswith("torch.optim")
        is_of_elements = is_torch and optimizer_class.__name__ in ELEMENTWISE
        if is_of_elements or optimizer_class is RMSpropTF:
            self._flat = [FlatParameters(group) for group in groups]
            self._units = list(groups)
        if not self.params:
            return None
        if self.lr is None:
            raise ConfigError("lr_or_lr_schedule", "expected a learning rate", None)
        lr = scheduled_value(self.lr, Progress())
        extra = {"lr": lr} | self._defaults(optimizer_class, node)
        owned = [{"params": [flat.vector]} for flat in self._flat]
        owned = owned or [{"params": group} for group in groups]
        node = {**node, TARGET: InlineObject(without_compiler(optimizer_class), node[TARGET])}
        built: torch.optim.Optimizer = build_target(
            node, owned, key=key, kind=torch.optim.Optimizer, **extra
        )
        self._is_fused_adam = (
            len(self._flat) == 1
            and optimizer_class is torch.optim.Adam
            and bool(built.defaults["fused"])
        )
        return built

    def _build_scheduler(
        self, node: Mapping[str, Any], key: str = "algorithm.lr_scheduler"
    ) -> LRScheduler:
        """Build the scheduler, starting from the current learning rates of the groups.

        Raises:
            ConfigError: If the learning rate already has a schedule, or the scheduler requires a
                metric.
        """
        if isinstance(self.lr, Schedule):
            problem = "the learning rate already has a schedule: expected a number, such as lr=1e-3"
            raise ConfigError(key, problem, node[TARGET])
        scheduler: LRScheduler = build_target(node, self.optimizer, key=key, kind=LRScheduler)
        if _needs(scheduler.step, "metrics"):
            problem = "requires a metric, which is not supported; use a scheduler that counts steps"
            raise ConfigError(f"{key}.{TARGET}", problem, node[TARGET])
        return scheduler

    def owned(self) -> list[nn.Parameter]:
        """Return the parameters of the PyTorch optimizer: flat vectors or module parameters."""
        return [flat.vector for flat in self._flat] or self.params

    def _defaults(self, optimizer_class: type, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return default arguments: an epsilon of 1e-5, the fused kernel, and `capturable`.

        An epsilon of 1e-5 instead of PyTorch's 1e-8 measurably improves actor-critic training.
        Classes with a larger default keep their default. The fused kernel was the fastest for all
        tested sizes. Without it, `capturable` keeps the state on the GPU, so that a step does not
        synchronise it.
        """
        accepted = inspect.signature(optimizer_class).parameters
        defaults: dict[str, Any] = {}
        epsilon = accepted["eps"].default if "eps" in accepted else None
        if isinstance(epsilon, float) and epsilon < EPSILON:
            defaults["eps"] = EPSILON
        chosen = set(IMPLEMENTATIONS) & set(node)
        device = self.params[0].device.type if self.params else "none"
        # PyTorch 2.6 has no fused Adagrad on CUDA.
        supported = ("cpu",) if optimizer_class is torch.optim.Adagrad else ("cpu", "cuda")
        if "fused" in accepted and not chosen and device in supported:
            defaults["fused"] = True
        elif "capturable" in accepted and not chosen and device == "cuda":
            defaults["capturable"] = True
        return defaults

    def set_lr(self, progress: Progress) -> float:
        """Set the scheduled learning rate, and return the rate before factors are applied."""
        if self.optimizer is None:
            return 0.0 if self.lr is None else scheduled_value(self.lr, progress)
        groups = self.optimizer.param_groups
        if self.lr is None or self.scheduler is not None:
            lr = float(groups[0]["lr"])
        else:
            lr = scheduled_value(self.lr, progress)
            lr = lr if self._adapted_lr is None else self._adapted_lr
            for group, factor in zip(groups, self._lr_factors, strict=True):
                group["lr"] = lr * factor
        self._adapted.fill_(lr)
        for rate, group in zip(self.rates, groups, strict=False):
            rate.fill_(group["lr"])
        return lr

    def adapt_lr(self, divergence: Tensor) -> None:
        """Update an `adaptive_kl` learning rate, given the current divergence, 0-d.

        The rate is copied to the host only if the optimizer does not accept tensors.
        """
        if self.optimizer is None or not (isinstance(self.lr, Schedule) and is_adaptive(self.lr)):
            return
        self._adapted.copy_(adapted_rate(self.lr, self._adapted, divergence))
        for i, factor in enumerate(self._lr_factors):
            if self.rates:
                self.rates[i].copy_(self._adapted * factor)
            else:
                self.optimizer.param_groups[i]["lr"] = float(self._adapted) * factor

    def is_for(
        self, params: Iterable[nn.Parameter], node: Mapping[str, Any] | torch.optim.Optimizer
    ) -> bool:
        """Return whether the arguments `params` and `node` of this optimizer were equal.

        PyTorch optimizers are equal if they have the same class and defaults.
        """
        return self._made_from == (frozenset(map(id, params)), _comparable(node))

    def change(self, lr: float | Schedule | None, clipping: tuple[float, str]) -> None:
        """Change the learning rate and the clipping from the next update on."""
        if lr != self.lr:
            self.lr, self._adapted_lr = lr, None
            if self.optimizer is not None:
                self._allocate_rates(self.optimizer)
        self.clipping = clipping

    def end_update(self) -> None:
        """Step the scheduler, even if no gradient step was taken, and store an adapted rate."""
        if is_adaptive(self.lr):
            self._adapted_lr = float(self._adapted)
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # The scheduler also counts updates whose gradient steps were all skipped.
                warnings.filterwarnings(
                    "ignore", "Detected call of `lr_scheduler.step", UserWarning
                )
                self.scheduler.step()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        if self._flat:
            for flat in self._flat:
                flat.zero_grad()
        elif self.optimizer is not None:
            self.optimizer.zero_grad()

    def accumulate(self) -> None:
        """Add the gradients of a minibatch to the gradients since the last `average` or `drop`."""
        self._num_summed += 1
        for param in self.owned():
            if param.grad is not None:
                total = self._sums.get(param)
                self._sums[param] = param.grad.clone() if total is None else total.add_(param.grad)

    def average(self) -> None:
        """Set the gradients to the mean of the accumulated gradients."""
        for param, total in self._sums.items():
            mean = total.div_(self._num_summed)
            if param.grad is None:
                param.grad = mean
            else:
                param.grad.copy_(mean)
        self.drop()

    def drop(self) -> None:
        """Drop the accumulated gradients."""
        self._sums, self._num_summed = {}, 0

    def gradients(self) -> list[Tensor]:
        """Return the gradients: one flat vector per group, or one tensor per parameter.

        Excludes fully frozen parameter groups.
        """
        if self._flat:
            return [f.grad for i, f in enumerate(self._flat) if i not in self._frozen_units]
        return self._gradients_apart()

    def _gradients_apart(self) -> list[Tensor]:
        return [
            param.grad
            for i, unit in enumerate(self._units)
            if i not in self._frozen_units
            for param in unit
            if param.grad is not None
        ]

    def zero_non_finite(self, condition: Tensor | None) -> Tensor:
        """Replace non-finite gradient entries by 0; return the number of replaced entries, 0-d.

        Args:
            condition: Whether to replace the entries, 0-d bool; None: always.
        """
        count = torch.zeros((), device=self.params[0].device)
        for gradient in self.gradients():
            is_bad = torch.isfinite(gradient).logical_not_()
            if condition is not None:
                is_bad &= condition
            gradient.masked_fill_(is_bad, 0.0)
            count += is_bad.sum()
        return count

    def clip(self) -> Tensor:
        """Clip the gradients in place and return their norm before clipping."""
        bound, by = self.clipping
        gradients = self._gradients_apart() if by == "norm" else self.gradients()
        norm = clip_gradients(gradients, bound, by)
        return norm.to(self.params[0].device) if self.params else norm

    def reset(self) -> None:
        """Reset the optimizer state."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def check_trainable(self, name: str) -> None:
        """Raise if a parameter no longer requires a gradient; `name` is the name of the module.

        Raises:
            ConfigError: If `requires_grad` was switched off.
        """
        if not all(param.requires_grad for param in self.params):
            raise ConfigError(
                "requires_grad",
                f"switched off for parameters of module {name!r} after their optimizer was "
                "created; momentum and weight decay would still move them. Use "
                "learner.freeze_module, or algorithm.freeze for some parameters",
                False,
            )

    def freeze(self, params: Iterable[nn.Parameter]) -> None:
        """Freeze the parameters in `params` that this optimizer owns, until the next call.

        Frozen parameters and their optimizer state do not change. A flat group is always frozen as
        a whole, because the same rules apply to all parameters in a group.
        """
        frozen = {id(param) for param in params}
        self._frozen_units = {
            i for i, unit in enumerate(self._units) if frozen.issuperset(map(id, unit))
        }

    def step(self, skip: Tensor | None = None) -> None:
        """Apply the gradients, unless `skip` is 1 (0-d on the device; None: 0)."""
        if self.optimizer is None:
            return
        units = self.owned()
        frozen = [units[i] for i in self._frozen_units]
        gradients = [param.grad for param in frozen]
        for param in frozen:
            param.grad = None  # Optimizers skip parameters without a gradient.
        if self._is_fused_adam and not frozen and can_be_short(self.optimizer):
            rate = self.rates[0] if self.rates else self.optimizer.param_groups[0]["lr"]
            fused_adam_step(self.optimizer, rate, skip)
        else:
            self._full_step(self.optimizer, skip)
        for param, gradient in zip(frozen, gradients, strict=True):
            param.grad = gradient

    def _full_step(self, optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
        """Apply the gradients with the `step` of the PyTorch optimizer."""
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.rates, strict=False):
            group["lr"] = rate
        if skip is None:
            optimizer.step()
        elif takes_tensors(optimizer) and self._device_state() is not None:
            with skipping(optimizer, skip):
                optimizer.step()
        else:
            undo = self.hold()
            optimizer.step()
            undo(skip)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def hold(self) -> Callable[[Tensor], None]:
        """Copy the parameters and the optimizer state.

        Returns:
            A function that restores the copies if its argument (0-d on the device) is 1.
        """
        if self.optimizer is None:
            return lambda skip: None
        state, on_device = self.optimizer.state, self._device_state()
        values = [*(param.detach() for param in self.owned()), *(on_device or ())]
        copies = [value.clone() for value in values]
        before = {key: deepcopy(own) for key, own in state.items()} if on_device is None else {}

        def undo(skip: Tensor) -> None:
            is_skipped = skip > 0.0
            for value, copy in zip(values, copies, strict=True):
                value.copy_(torch.where(is_skipped, copy, value))
            # Synchronises the device, usually only in the first step.
            if on_device is None and is_skipped:
                state.clear()
                state.update(before)

        return undo

    def _device_state(self) -> list[Tensor] | None:
        """Return the state that a step changes; None if it is missing or not only in tensors."""
        assert self.optimizer is not None
        found: list[Tensor] = []
        for group in self.optimizer.param_groups:
            is_plain = isinstance(self.optimizer, torch.optim.SGD) and group["momentum"] == 0
            for param in group["params"]:
                values = self.optimizer.state.get(param, {}).values()
                if param.grad is None:
                    continue
                if not (values or is_plain) or not all(isinstance(v, Tensor) for v in values):
                    return None
                found += values
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the optimizer state and settings, and the state of the scheduler."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state_dict()
        if self.scheduler is not None:
            state["lr_scheduler"] = self.scheduler.state_dict()
        if self._adapted_lr is not None:
            state["adapted_lr"] = self._adapted_lr
        return deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, possibly of an optimizer on another device."""
        if self.optimizer is not None:
            defaults = self.optimizer.defaults
            own = {name: defaults[name] for name in IMPLEMENTATIONS if name in defaults}
            groups = [{**group, **own} for group in state["param_groups"]]
            self.optimizer.load_state_dict({**state, "param_groups": groups})
        if self.scheduler is not None:
            self.scheduler.load_state_dict(deepcopy(state["lr_scheduler"]))
        if is_adaptive(self.lr):
            self._adapted_lr = state.get("adapted_lr")


def adapted_rate(schedule: Schedule, rate: Tensor, divergence: Tensor) -> Tensor:
    """Return an adaptive learning rate after a minibatch, with the target t = `adaptive_kl`.

    max(min, rate / 1.5) if d > 2 t;  min(max, 1.5 rate) if 0 < d < t / 2;  else the same rate.

    Args:
        schedule: Target t, and bounds of the rate.
        rate: Current learning rate, in [`min`, `max`], 0-d.
        divergence: d, estimated KL divergence between the behaviour policy and the current policy,
            0-d.

    Source: Schulman et al. (2017), arXiv:1707.06347, section 4, which doubles and halves a penalty
    by d; applied to the learning rate with these constants: Rudin et al. (2022), arXiv:2109.11978,
    appendix.
    """
    target, divergence = schedule.adaptive_kl, divergence.to(rate.dtype)
    assert target is not None
    lower = (rate / ADAPTIVE_FACTOR).clamp(min=schedule.min)
    higher = (rate * ADAPTIVE_FACTOR).clamp(max=schedule.max)
    is_small = (divergence > 0.0) & (divergence < 0.5 * target)
    rate = torch.where(is_small, higher, rate)
    return torch.where(divergence > 2.0 * target, lower, rate)


def _comparable(node: Mapping[str, Any] | torch.optim.Optimizer) -> object:
    return (type(node), node.defaults) if isinstance(node, torch.optim.Optimizer) else node


def _needs(step: Callable[..., object], argument: str) -> bool:
    """Return whether an argument of a method is required."""
    parameter = inspect.signature(step).parameters.get(argument)
    return parameter is not None and parameter.default is inspect.Parameter.empty


def check_free(
    optimizers: Mapping[tuple[str, str], ModuleOptimizer],
    module_id: str,
    name: str,
    params: Sequence[nn.Parameter],
) -> None:
    """Raise ConfigError if the optimizer name or any parameter is already registered.

    Raises:
        ConfigError: If the name or a parameter is already registered.
    """
    owned = {id(param) for other in optimizers.values() for param in other.params}
    if (module_id, name) in optimizers:
        problem = f"module {module_id!r} already has an optimizer {name!r} with other params or "
        problem += "settings: choose another name, or pass the same params and optimizer"
        raise ConfigError("optimizer", problem)
    if any(id(param) in owned for param in params):
        problem = f"{name!r} of module {module_id!r} shares parameters with another optimizer"
        raise ConfigError("optimizer", problem)
