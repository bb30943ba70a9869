"""Optimizer steps without the Python overhead of `torch.optim`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from maze_train.core.torch_private import FUSED_ADAM, FUSED_ADAMW, STEP_HOOKS
from maze_train.core.types import Tensor

LEAST = 5e-324
"""Smallest positive float; multiplying by 1 gives 0 if subnormal numbers are flushed to zero."""


WRAPPED = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
"""Methods that PyTorch wraps to support compiled steps."""


def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass that does not import PyTorch's compiler; importing takes about a second.

    Wrapped methods import the compiler at their first call. Methods of third-party classes are
    unchanged. Copies and unpickled optimizers are instances of the original class.
    """

    def reduced(self: torch.optim.Optimizer) -> tuple[Any, ...]:
        return object.__new__, (optimizer_class,), self.__getstate__()

    methods: dict[str, Any] = {"__reduce__": reduced}
    for name in WRAPPED:
        method = getattr(optimizer_class, name)
        if method.__module__.startswith("torch.optim"):
            methods[name] = inspect.unwrap(method)
    if "step" in methods:
        methods["step"] = torch.no_grad()(methods["step"])
    return type(optimizer_class.__name__, (optimizer_class,), methods)


def can_be_short(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `fused_adam_step` supports an optimizer: it has a state and no hooks."""
    if FUSED_ADAM is None or FUSED_ADAMW is None:
        return False
    hooks = [vars(optimizer).get(name, True) for name in STEP_HOOKS]
    return bool(optimizer.state) and not any(hooks) and "step" not in vars(optimizer)


def fused_adam_step(
    optimizer: torch.optim.Optimizer, rate: float | Tensor, skips: Tensor | None
) -> None:
    """Take a step of a fused `torch.optim.Adam` with one parameter.

    Results are bit-for-bit identical to `step`, except that subnormal moments become 0.

    For small networks, the overhead of `step` is several times the duration of the kernel.

    Args:
        optimizer: The optimizer.
        rate: Learning rate, a number or 0-d.
        skips: 1 if the step is skipped, otherwise 0, 0-d; None: 0.
    """
    group = optimizer.param_groups[0]
    param: Tensor = group["params"][0]
    gradient = param.grad
    assert gradient is not None  # Set by `FlatParameters`.
    state, betas = optimizer.state[param], group["betas"]
    state["step"] += 1
    if skips is not None:
        state["step"] -= skips
    # Arithmetic with subnormal numbers, such as moments of vanished gradients, takes 20 times as
    # long.
    # Older versions of PyTorch lack `decoupled_weight_decay`.
    is_decoupled = group.get("decoupled_weight_decay", False)
    kernel = FUSED_ADAMW if is_decoupled else FUSED_ADAM
    assert kernel is not None  # See `can_be_short`.
    flushes = LEAST * 1.0 == 0.0
    torch.set_flush_denormal(True)
    try:
        kernel(
            [param.detach()],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [state["step"]],
            lr=rate,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            found_inf=skips,
        )
    finally:
        torch.set_flush_denormal(flushes)
