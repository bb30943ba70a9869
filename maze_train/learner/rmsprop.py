"""RMSProp as TensorFlow 1 computes it, which published settings of A3C and IMPALA assume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from maze_train.checks import check_at_least, check_between, check_positive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

__all__ = ["RMSpropTF"]


class RMSpropTF(torch.optim.Optimizer):
    """Steps along the gradient, each entry divided by its root mean square.

    n <- alpha * n + (1 - alpha) * g^2,  n = 1 at the start
    m <- momentum * m + lr * g / sqrt(n + eps),  m = 0 at the start
    p <- p - m

    `torch.optim.RMSprop` starts with n = 0, so its first step has the length lr / sqrt(1 - alpha)
    however small the gradient is, and it adds eps after the root: where gradients are small, an eps
    of 0.1 here shortens steps as one of 0.32 does there.

    Every entry is treated alone, so a flat vector of parameters gives the same steps.

    Args:
        params: Parameters, or groups of them.
        lr: Length of a step, >= 0. The momentum sums steps of the rates of their time.
        alpha: How much of the mean square is kept at each step, in [0, 1].
        eps: Added to the mean square, in squared units of the gradient, > 0.
        momentum: How much of the last step is repeated, in [0, 1].

    Raises:
        ConfigError: If an argument is out of range.

    Source: Tieleman and Hinton (2012), Neural Networks for Machine Learning, lecture 6.5; with eps
    under the root: Mnih et al. (2016), arXiv:1602.01783, section 4; start and momentum: the
    documentation of `tf.compat.v1.train.RMSPropOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
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
        """Move all parameters that have a gradient.

        Args:
            closure: Evaluates the loss and its gradients again before the step; None: they are
                there.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._move(param, param.grad, group)
        return loss

    def _move(self, param: nn.Parameter, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["square_avg"] = torch.ones_like(param)
            if group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(param)
        square_avg = state["square_avg"]
        square_avg.mul_(group["alpha"]).addcmul_(grad, grad, value=1.0 - group["alpha"])
        root = (square_avg + group["eps"]).sqrt_()
        if group["momentum"]:
            buffer = state["momentum_buffer"]
            param.sub_(buffer.mul_(group["momentum"]).addcdiv_(grad, root, value=group["lr"]))
        else:
            param.addcdiv_(grad, root, value=-group["lr"])
