"""RMSProp as TensorFlow 1 computes it, which published settings of A3C and IMPALA assume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.checks import check_between, check_positive
from maze_train.learner.flat_optimizers import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from maze_train.types import Tensor


class RMSpropTF(Optimizer):
    """Steps along the gradient, each entry divided by its root mean square.

    n <- alpha * n + (1 - alpha) * g^2,  n = 1 at the start
    m <- momentum * m - lr * g / sqrt(n + eps),  m = 0 at the start
    p <- p + m

    `torch.optim.RMSprop` starts with n = 0, so its first step has the length lr / sqrt(1 - alpha)
    however small the gradient is, and it adds eps after the root: where gradients are small, an eps
    of 0.1 here shortens steps as one of 0.32 does there.

    Args:
        params: Parameters, or groups of them; None: those of the policy that `setup` gets.
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
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        lr: float = 0.01,
        alpha: float = 0.99,
        eps: float = 0.1,
        momentum: float = 0.0,
    ) -> None:
        check_between("alpha", alpha, 0.0, 1.0)
        check_positive("eps", eps)
        check_between("momentum", momentum, 0.0, 1.0)
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps, "momentum": momentum})

    def _compute_step(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        if not state:
            state["square_avg"] = torch.ones_like(gradient)
            if group["momentum"]:
                state["momentum_buffer"] = torch.zeros_like(gradient)
        square_avg: Tensor = state["square_avg"]
        square_avg.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1.0 - group["alpha"])
        step = gradient.div((square_avg + group["eps"]).sqrt_()).mul_(-group["lr"])
        if group["momentum"]:
            # The buffer holds steps, with the sign that they have.
            buffer: Tensor = state["momentum_buffer"]
            return buffer.mul_(group["momentum"]).add_(step).clone()
        return step
