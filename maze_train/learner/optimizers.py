"""An optimizer with its parameters, learning rate and clipping."""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from maze_train.errors import ConfigError
from maze_train.learner.config import Progress, Schedule, scheduled_value
from maze_train.learner.gradients import FlatParameters, clip_gradients
from maze_train.learner.parameter_groups import ParameterGroup
from maze_train.targets import TARGET, build_target, locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from maze_train.types import Tensor


EPSILON = 1e-5

ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax")
"""Element-wise optimizers of `torch.optim`: a flat vector gives the same steps."""


class ModuleOptimizer:
    """One optimizer over some parameters of one module.

    Args:
        params: Parameters of one dtype, on their final device.
        node: `{_target_: torch.optim.Adam, eps: 1e-5, ...}`.
        lr: Learning rate or its schedule.
        key: Name of the setting for error messages.
        groups: The parameters in groups, each with a factor of the learning rate; None: one group.

    Raises:
        ConfigError: If the optimizer can not be found or refuses its arguments.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        node: Mapping[str, Any],
        lr: float | Schedule,
        key: str = "algorithm.optimizer",
        groups: Sequence[ParameterGroup] | None = None,
    ) -> None:
        self.params = [p for p in params if p.requires_grad]
        self.lr = lr
        groups = [ParameterGroup(params=self.params)] if groups is None else groups
        trained = [(g.lr_factor, [p for p in g.params if p.requires_grad]) for g in groups]
        self._lr_factors = [factor for factor, part in trained if part]
        self._groups = [part for _, part in trained if part]
        self._held: list[nn.Parameter] = []
        self._held_groups: set[int] = set()
        optimizer_class = locate(node[TARGET], f"{key}.{TARGET}")
        if not (
            inspect.isclass(optimizer_class) and issubclass(optimizer_class, torch.optim.Optimizer)
        ):
            raise ConfigError(f"{key}.{TARGET}", "expected a torch.optim.Optimizer", node[TARGET])
        closure = inspect.signature(optimizer_class.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"{key}.{TARGET}",
                "this optimizer evaluates the loss several times per step, which no learner offers",
                node[TARGET],
            )
        elementwise = getattr(optimizer_class, "is_elementwise", False) or (
            optimizer_class.__module__.startswith("torch.optim")
            and optimizer_class.__name__ in ELEMENTWISE
        )
        self._flat: list[FlatParameters] = []
        if elementwise:
            self._flat = [FlatParameters(group) for group in self._groups]
        extra = {"lr": scheduled_value(lr, Progress())} | self._defaults(optimizer_class, node)
        self.optimizer: torch.optim.Optimizer | None = None
        if self.params:
            owned = [{"params": self._owned(i)} for i in range(len(self._groups))]
            self.optimizer = build_target(node, owned, key=key, kind=torch.optim.Optimizer, **extra)
        self._is_fused_adam = (
            len(self._flat) == 1
            and type(self.optimizer) is torch.optim.Adam
            and bool(self.optimizer.defaults["fused"])
        )

    def owned(self) -> list[nn.Parameter]:
        """What the optimizer of PyTorch has: flat vectors, or the parameters."""
        return [param for i in range(len(self._groups)) for param in self._owned(i)]

    def _owned(self, group: int) -> Sequence[nn.Parameter]:
        """What the optimizer of PyTorch has of a group: one flat vector, or its parameters."""
        return [self._flat[group].vector] if self._flat else self._groups[group]

    def _defaults(self, optimizer_class: type, node: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that are not given: the field's epsilon, and the fused kernel.

        An epsilon of 1e-5 instead of PyTorch's 1e-8 measurably matters for actor-critics; a class
        whose own is larger keeps it, as does an `Optimizer` of this package. The fused kernel was
        the fastest on every size tried.
        """
        accepted = inspect.signature(optimizer_class).parameters
        defaults: dict[str, Any] = {}
        own = getattr(optimizer_class, "is_elementwise", False)
        own_epsilon = accepted["eps"].default if "eps" in accepted and not own else None
        if isinstance(own_epsilon, float) and own_epsilon < EPSILON:
            defaults["eps"] = EPSILON
        chosen = {"fused", "foreach", "capturable", "differentiable"} & set(node)
        supported = self.params and self.params[0].device.type in ("cpu", "cuda")
        if "fused" in accepted and not chosen and supported:
            defaults["fused"] = True
        return defaults

    def set_lr(self, progress: Progress) -> float:
        """Set the learning rate that the schedule gives, and return it, without factors."""
        lr = scheduled_value(self.lr, progress)
        if self.optimizer is not None:
            groups = self.optimizer.param_groups
            for group, factor in zip(groups, self._lr_factors, strict=True):
                group["lr"] = lr * factor
        return lr

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self._flat:
            for flat in self._flat:
                flat.zero_grad()
        elif self.optimizer is not None:
            self.optimizer.zero_grad()

    def gradients(self) -> list[Tensor]:
        """The gradients: one flat vector per group, or one tensor per parameter that has one.

        Without those of groups that are held.
        """
        if self._flat:
            return [f.grad for i, f in enumerate(self._flat) if i not in self._held_groups]
        return self._gradients_apart()

    def _gradients_apart(self) -> list[Tensor]:
        return [
            param.grad
            for i, group in enumerate(self._groups)
            if i not in self._held_groups
            for param in group
            if param.grad is not None
        ]

    def zero_non_finite(self) -> Tensor:
        """Set entries of gradients that are not finite to 0; returns how many there were, 0-d."""
        count = torch.zeros((), device=self.params[0].device)
        for gradient in self.gradients():
            count += torch.isfinite(gradient).logical_not().sum()
            gradient.nan_to_num_(0.0, 0.0, 0.0)
        return count

    def clip(self, bound: float, by: str) -> Tensor:
        """Clip the gradients in place (see `clip_gradients`) and return their norm before that."""
        gradients = self._gradients_apart() if by == "norm" else self.gradients()
        norm = clip_gradients(gradients, bound, by)
        return norm.to(self.params[0].device) if self.params else norm

    def reset(self) -> None:
        """Forget the moments."""
        if self.optimizer is not None:
            self.optimizer.state.clear()

    def hold(self, params: Iterable[nn.Parameter]) -> None:
        """Have `step` leave those of `params` alone that belong to this optimizer, and no others.

        Without a gradient they would still move: by weight decay, and by the moments. A group that
        is held as a whole takes no part in steps, so that its moments stay as they are too. Those
        of other held parameters go on, and are to be forgotten (`reset`) before these move again.
        """
        held = {id(param) for param in params}
        if not (held or self._held or self._held_groups):
            return
        self._held_groups = {
            i for i, group in enumerate(self._groups) if all(id(param) in held for param in group)
        }
        self._held = [
            param
            for i, group in enumerate(self._groups)
            if held and i not in self._held_groups
            for param in group
            if id(param) in held
        ]

    def step(self) -> None:
        """Apply the gradients."""
        if self.optimizer is None:
            return
        owned = [param for i in self._held_groups for param in self._owned(i)]
        gradients = [param.grad for param in owned]
        for param in owned:
            param.grad = None
        before = [param.detach().clone() for param in self._held]
        if self._is_fused_adam and not owned and _can_be_short(self.optimizer):
            _fused_adam_step(self.optimizer)
        else:
            self.optimizer.step()
        for param, value in zip(self._held, before, strict=True):
            param.detach().copy_(value)
        for param, gradient in zip(owned, gradients, strict=True):
            param.grad = gradient

    def state_dict(self) -> dict[str, Any]:
        """Copies of the moments and settings of the optimizer."""
        return {} if self.optimizer is None else deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state)


def _can_be_short(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of fused Adam is only its kernel: it has moments, and nobody listens."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(optimizer.state) and not hooks and "step" not in vars(optimizer)


@torch.no_grad()
def _fused_adam_step(optimizer: torch.optim.Optimizer) -> None:
    """Do what `step` of a fused `torch.optim.Adam` of one parameter does, to the bit.

    For small networks what surrounds the kernel there takes several times longer than it.
    """
    group = optimizer.param_groups[0]
    param: Tensor = group["params"][0]
    gradient = param.grad
    assert gradient is not None  # that of `FlatParameters`
    state, betas = optimizer.state[param], group["betas"]
    state["step"] += 1
    torch._fused_adam_(
        [param],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [state["step"]],
        lr=group["lr"],
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )
