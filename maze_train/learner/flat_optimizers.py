"""Element-wise optimizers that also accept an estimated gradient as one flat vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import nn

from maze_train.core.checks import check_at_least, check_between, check_positive
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.types import Tensor, precise_dtype


class Optimizer(torch.optim.Optimizer, ABC):
    """Base class of element-wise optimizers that minimize an objective.

    An optimizer can be used in two ways:

    - like any PyTorch optimizer: create `SGD(params, lr=0.1)`, and call `step()` when the gradients
      are in `param.grad`;
    - with an estimated gradient: create `SGD(lr=0.1)`, call `setup(policy)` once, then
      `update(gradient)` for each step. To maximize an objective, pass the negative gradient.

    Subclasses implement `_compute_step`. Since the step is element-wise, `ModuleOptimizer` can
    apply it to a flat vector of all parameters.

    Args:
        params: Parameters or parameter groups; None: set by `setup`.
        defaults: Default settings of parameter groups, including `lr` (>= 0).

    Raises:
        ConfigError: If the learning rate is negative or not finite.
    """

    is_elementwise: ClassVar[bool] = True
    """Whether one step on a flat vector equals separate steps of the parameters."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
        defaults: dict[str, Any],
    ) -> None:
        check_at_least("lr", defaults["lr"], 0.0)
        # An empty group stores the settings until `setup` is called.
        super().__init__([{"params": []}] if params is None else params, defaults)

    @abstractmethod
    def _compute_step(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        """Compute the step of one parameter.

        Args:
            gradient: Gradient of the parameter; must not be modified.
            state: Optimizer state of the parameter, initially empty; updated in place.
            group: Settings of the parameter group: `lr` and the other keys of `defaults`.

        Returns:
            New tensor to add to the parameter, with the shape of the gradient.
        """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one optimization step for all parameters with a gradient.

        Args:
            closure: Recomputes the loss and its gradients before the step; None: use the current
                gradients.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self._compute_step(param.grad, self.state[param], group))
        return loss

    def setup(self, policy: nn.Module) -> None:
        """Optimize the parameters of `policy` that require a gradient; resets the state.

        Call `setup` before `load_state_dict`.

        Raises:
            TrainingError: If no parameter requires a gradient.
        """
        params = [param for param in policy.parameters() if param.requires_grad]
        if not params:
            raise TrainingError("no parameter of the policy requires a gradient")
        group = {**self.param_groups[0], "params": params}
        self.param_groups.clear()
        self.state.clear()
        self.add_param_group(group)

    @torch.no_grad()
    def update(self, global_gradient: Tensor) -> float:
        """Take one step for a flat gradient vector.

        Existing gradients of the parameters are discarded.

        Args:
            global_gradient: Gradient of the objective to minimize with respect to all parameters
                that require a gradient, in the order of `policy.parameters()`, [dim]; not modified.

        Returns:
            Relative size of the step |θ' - θ| / |θ| from θ to θ', >= 0. If θ = 0, the relative size
            is 0 if the parameters did not change, else infinite.

        Raises:
            TrainingError: If the optimizer has no parameters, because `setup` was not called.
            ShapeError: If the gradient does not have shape [dim].
        """
        params = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        if not params:
            raise TrainingError(
                "the optimizer has no parameters: call setup(policy) before update(gradient)"
            )
        sizes = [param.numel() for param in params]
        if global_gradient.shape != (sum(sizes),):
            raise ShapeError(
                f"global_gradient has shape {list(global_gradient.shape)}, "
                f"expected [{sum(sizes)}]: one entry for each parameter that requires a gradient"
            )
        before = [param.detach().clone() for param in params]
        pieces = torch.split(global_gradient.detach(), sizes)
        for param, piece in zip(params, pieces, strict=True):
            param.grad = piece.reshape(param.shape).to(param.device, param.dtype)
        try:
            self.step()
        finally:
            for param in params:
                param.grad = None  # The gradient was a view of the caller's memory.
        moved = _length([p - b for p, b in zip(params, before, strict=True)])
        length = _length(before)
        if length == 0.0:
            return 0.0 if moved == 0.0 else math.inf
        return moved / length


def _length(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all entries."""
    norms = (float(torch.linalg.vector_norm(t, dtype=precise_dtype(t.device))) for t in tensors)
    return math.hypot(*norms)


class SGD(Optimizer):
    """SGD with an exponential moving average of the gradients.

    v <- momentum * v + (1 - momentum) * g,  v = 0 at the start
    p <- p - lr * v

    In contrast to `torch.optim.SGD`, gradients are weighted by 1 - momentum, so the momentum does
    not change the effective learning rate: lr = 0.1 in this class corresponds to lr = 0.01 in
    `torch.optim.SGD` with momentum 0.9. The first steps are shorter.

    Args:
        params: Parameters or parameter groups; None selects the parameters of the policy passed to
            `setup`.
        lr: Learning rate, >= 0.
        momentum: Decay rate of the moving average, in [0, 1).

    Raises:
        ConfigError: If an argument is out of range.

    Source: Polyak (1964), USSR Computational Mathematics and Mathematical Physics 4(5). In contrast
    to the source, the gradient is weighted by 1 - momentum.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        lr: float = 0.01,
        momentum: float = 0.9,
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ConfigError("momentum", "expected a number in [0, 1)", momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _compute_step(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        if not state:
            state["velocity"] = torch.zeros_like(gradient)
        momentum = group["momentum"]
        velocity: Tensor = state["velocity"]
        velocity.mul_(momentum).add_(gradient, alpha=1.0 - momentum)
        return velocity.mul(-group["lr"])


class Adam(Optimizer):
    """Adam optimizer.

    m <- beta_1 * m + (1 - beta_1) * g,    m = 0 at the start
    v <- beta_2 * v + (1 - beta_2) * g^2,  v = 0 at the start
    p <- p - lr * m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + eps),  t = 1 at the first step

    Args:
        params: Parameters or parameter groups; None selects the parameters of the policy passed to
            `setup`.
        lr: Learning rate, >= 0; approximately the step size of each entry.
        betas: Decay rates of the two moving averages, in [0, 1).
        eps: Constant added to the denominator, in units of the gradient, > 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source: Kingma and Ba (2015), arXiv:1412.6980, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        lr: float = 0.01,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError("betas", "expected two numbers in [0, 1)", betas)
        check_positive("eps", eps)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps})

    def _compute_step(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(gradient)
            state["square_mean"] = torch.zeros_like(gradient)
        state["step"] += 1
        beta_1, beta_2 = group["betas"]
        mean: Tensor = state["mean"]
        square_mean: Tensor = state["square_mean"]
        mean.mul_(beta_1).add_(gradient, alpha=1.0 - beta_1)
        square_mean.mul_(beta_2).addcmul_(gradient, gradient, value=1.0 - beta_2)
        root = square_mean.div(1.0 - beta_2 ** state["step"]).sqrt_().add_(group["eps"])
        return mean.div(1.0 - beta_1 ** state["step"]).div_(root).mul_(-group["lr"])


class RMSpropTF(Optimizer):
    """RMSprop as in TensorFlow 1.

    n <- alpha * n + (1 - alpha) * g^2,  n = 1 at the start
    m <- momentum * m - lr * g / sqrt(n + eps),  m = 0 at the start
    p <- p + m

    `torch.optim.RMSprop` instead starts with n = 0, so that its first step has size lr / sqrt(1 -
    alpha) regardless of the gradient, and adds eps outside the square root. For small gradients,
    eps = 0.1 in this class corresponds to eps = 0.32 in `torch.optim.RMSprop`.

    Args:
        params: Parameters or parameter groups; None selects the parameters of the policy passed to
            `setup`.
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
            # The buffer accumulates signed steps.
            buffer: Tensor = state["momentum_buffer"]
            return buffer.mul_(group["momentum"]).add_(step).clone()
        return step
