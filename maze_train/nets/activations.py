"""Nonlinearities with their derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as num_modes
from torch._C._functorch import peek_interpreter_stack as innermost_transform
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F

from maze_train.checks import check_one_of
from maze_train.nets.config import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.types import Tensor

__all__ = ["Activation", "activation", "is_traced"]

TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Activation:
    """A nonlinearity y = f(x), entry by entry."""

    function: Callable[[Tensor], Tensor]
    """f, differentiable."""

    apply: Callable[[Tensor], Tensor]
    """f without a graph; may overwrite x."""

    gradient: Callable[[Tensor, Tensor], Tensor]
    """dL/dx of dL/dy and `known`: y, or x if `needs_input`."""

    needs_input: bool = False
    """Whether the derivative is a function of x; else x is not kept."""


def is_traced(x: Tensor) -> bool:
    """Whether the operations on x are recorded or replaced: then all must be PyTorch's.

    So it is under `torch.jit.trace`, `torch.export`, `torch.compile`, the transformations of
    `torch.func`, forward-mode differentiation, and modes such as that of fake tensors.
    """
    # The first of these is all that a compiler reads. They take 0.3 us together.
    return (
        is_compiling()
        or type(x) not in TENSORS
        or is_tracing()
        or num_modes() > 0
        or innermost_transform() is not None
        or forward_ad._current_level >= 0
    )


def _tanh(x: Tensor) -> Tensor:
    if not x.is_cpu or is_traced(x):
        return x.tanh_()
    # Numpy's vector loop is several times faster than PyTorch's (1 against 9 us for 4096 numbers).
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def activation(name: str) -> Activation:
    """The nonlinearity of a name in the configuration.

    Raises:
        ConfigError: If there is none of that name.
    """
    check_one_of("activation", name, ACTIVATIONS)
    aten = torch.ops.aten
    table = {
        "tanh": Activation(torch.tanh, _tanh, aten.tanh_backward),
        "relu": Activation(
            F.relu, torch.relu_, lambda grad, y: aten.threshold_backward(grad, y, 0)
        ),
        "elu": Activation(
            F.elu,
            lambda x: F.elu(x, inplace=True),
            lambda grad, y: aten.elu_backward(grad, 1.0, 1.0, 1.0, True, y),
        ),
        "leaky_relu": Activation(
            F.leaky_relu,
            lambda x: F.leaky_relu(x, inplace=True),
            lambda grad, y: aten.leaky_relu_backward(grad, y, 0.01, True),
        ),
        "gelu": Activation(F.gelu, F.gelu, aten.gelu_backward, needs_input=True),
        "silu": Activation(F.silu, F.silu, aten.silu_backward, needs_input=True),
    }
    return table[name]
