"""Private APIs of PyTorch, with public fallbacks for other versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad


def found(path: str, root: object = torch) -> Any:
    """Return an attribute of `root` by dotted path, or None if there is no such attribute."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), root)


FUSED_ADAM: Callable[..., object] | None = found("_fused_adam_")
FUSED_ADAMW: Callable[..., object] | None = found("_fused_adamw_")
"""Kernels of fused optimizers; if None, `optimizer.step()` is called instead."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes in which an optimizer stores its step hooks; if an attribute is missing, the optimizer
is assumed to have hooks."""


def takes_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer supports learning rates on the device and the flag of `skipping`."""
    return found("_step_supports_amp_scaling", optimizer) is True


@contextmanager
def skipping(optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> Iterator[None]:
    """Skip the steps of a fused optimizer if `flag` is 1 on the device, as `GradScaler` does."""
    names = {"grad_scale": None, "found_inf": flag}
    vars(optimizer).update(names)
    try:
        yield
    finally:
        for name in names:
            del vars(optimizer)[name]


def replaced_check(
    is_tracing: Callable[[], bool] | None,
    num_modes: Callable[[], int] | None,
    innermost_transform: Callable[[], object] | None,
    levels: object,
) -> Callable[[], bool]:
    """Return a function that checks whether tensor operations may be traced or replaced.

    Args:
        is_tracing: Returns whether `torch.jit.trace` is running; None if not available.
        num_modes: Returns the number of active dispatch modes; None if not available.
        innermost_transform: Returns the innermost `torch.func` transform, or None; None if not
            available.
        levels: Module with `_current_level`, the level of forward-mode differentiation.

    Returns:
        The function. If an argument is not available, the function always returns True.
    """
    if not (is_tracing and num_modes and innermost_transform and hasattr(levels, "_current_level")):
        return lambda: True

    def is_replaced() -> bool:
        return (
            is_tracing()
            or num_modes() > 0
            or innermost_transform() is not None
            or levels._current_level >= 0
        )

    return is_replaced


is_replaced = replaced_check(
    found("_C._is_tracing"),
    found("_C._len_torch_dispatch_stack"),
    found("_C._functorch.peek_interpreter_stack"),
    forward_ad,
)
"""Returns whether operations may be traced or replaced, so that only PyTorch operations are
allowed."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HAS_HOOKS = all(hasattr(nn.Module(), name) for name in HOOKS)


def cpu_backend(group: object) -> object:
    """Return the CPU backend of a process group, or None if it has none.

    PyTorch before 2.8 destroys a process group while holding the GIL, which is a deadlock if a
    thread of gloo still has to free a tensor. If the caller keeps the backend, the threads are
    joined when the backend is freed, without the GIL. See
    https://github.com/pytorch/pytorch/pull/154976.
    """
    get = found("_get_backend", group)
    with suppress(RuntimeError):  # The group only has a backend for GPUs.
        return None if get is None else get(torch.device("cpu"))
    return None


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks or a replaced `forward`.

    Always True if PyTorch does not have the attributes of hooks.
    """
    return not HAS_HOOKS or bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


PRIVATE_CALL = ("_compiled_call_impl", "_call_impl")
PUBLIC_CALL = ("forward", "forward")
CALL = PRIVATE_CALL if all(hasattr(nn.Module, name) for name in PRIVATE_CALL) else PUBLIC_CALL
"""Attribute of a module that replaces its call, and the method to compile. With the public pair,
hooks run outside the compiled graph."""


class CompiledCall:
    """Context manager in which a module uses its compiled call.

    Args:
        module: The module.
        backend: Backend of the compiler.
        names: `PRIVATE_CALL` or `PUBLIC_CALL`.
    """

    def __init__(self, module: nn.Module, backend: str, names: tuple[str, str] = CALL) -> None:
        self._module, (self._name, method) = module, names
        self._call = torch.compile(getattr(module, method), backend=backend)

    @staticmethod
    def is_used_by(module: nn.Module) -> bool:
        """Whether the user has compiled the module."""
        return found(CALL[0], module) is not None and CALL == PRIVATE_CALL

    def __enter__(self) -> None:
        """Use the compiled call."""
        self._module.__dict__[self._name] = self._call

    def __exit__(self, *error: object) -> None:
        """Restore the call of the class."""
        del self._module.__dict__[self._name]


@dataclass(frozen=True)
class CompilerParts:
    """Private parts of the compiler; missing parts have no effect."""

    unsupported: tuple[type[Exception], ...]
    """Exceptions raised for code that cannot be compiled."""

    no_compiler: tuple[type[Exception], ...]
    """Exceptions raised by `find_compiler`."""

    time_spent: Callable[[], Mapping[str, float]]
    """Returns the compilation times in this process in seconds, by name."""

    find_compiler: Callable[[], object]
    """Finds the C++ compiler."""

    config: Any
    """Settings of the compiler; None if not available."""

    def raise_limit(self, count: int) -> None:
        """Allow at least `count` compiled graphs per function."""
        limit = found("recompile_limit", self.config)
        if limit is not None:
            self.config.recompile_limit = max(limit, count)


def compiler_parts() -> CompilerParts:
    """Import the compiler (takes about a second) and return its private parts."""
    names = ("torch._dynamo", "torch._dynamo.utils", "torch._inductor.cpp_builder")
    dynamo, utils, builder = map(_module, names)
    errors = _module("torch._inductor.exc")
    return CompilerParts(
        unsupported=_exceptions(found("exc.Unsupported", dynamo), found("exc.UserError", dynamo)),
        no_compiler=_exceptions(found("InvalidCxxCompiler", errors)),
        time_spent=found("calculate_time_spent", utils) or dict,
        find_compiler=found("get_cpp_compiler", builder) or (lambda: None),
        config=found("config", dynamo),
    )


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def _exceptions(*classes: type[Exception] | None) -> tuple[type[Exception], ...]:
    return tuple(error for error in classes if error is not None)
