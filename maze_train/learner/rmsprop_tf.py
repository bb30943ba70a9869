"""RMSprop as in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import nn

from maze_train.core.checks import check_at_least, check_between, check_positive
from maze_train.core.types import Tensor


class RMSpropTF(torch.optim.Optimizer):
    """RMSprop as in TensorFlow 1.

    n <- alpha * n + (1 - alpha) * g^2,  n = 1 at the start
    m <- momentum * m - lr * g / sqrt(n + eps),  m = 0 at the start
    p <- p + m

    `torch.optim.RMSprop` instead starts with n = 0, so that its first step has size lr / sqrt(1 -
    alpha) regardless of the gradient, and adds eps outside the square root. For small gradients,
    eps = 0.1 in this class corresponds to eps = 0.32 in `torch.optim.RMSprop`.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, >= 0. Gradients are scaled by lr before they enter the momentum buffer.
        alpha: Decay rate of the mean square, in [0, 1].
        eps: Constant added to the mean square, in squared units of the gradient, > 0.
        momentum: Momentum factor, in [0, 1].

    Raises:
        ConfigError: If an argument is out of range.

    Source: Tieleman and Hinton (2012), Neural Networks for Machine Learning, lecture 6.5; with eps
    under the root: Mnih et al. (2016), arXiv:1602.01783, section 4; start and momentum: the
    documentation of `tf.compat.v1.train.RMSPropOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        check_at_least("lr", lr, 0.0)
        check_between("alpha", alpha, 0.0, 1.0)
        check_positive("eps", eps)
        check_between("momentum", momentum, 0.0, 1.0)
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimization step; `closure` recomputes and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, self.state[param], group)
        return loss

    def _step(
        self, param: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["square_avg"] = torch.ones_like(gradient)
            if group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(gradient)
        square_avg: Tensor = state["square_avg"]
        square_avg.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1.0 - group["alpha"])
        step = gradient.div((square_avg + group["eps"]).sqrt_()).mul_(-group["lr"])
        if group["momentum"]:
            # The buffer accumulates signed steps.
            buffer: Tensor = state["momentum_buffer"]
            step = buffer.mul_(group["momentum"]).add_(step)
        param.add_(step)
