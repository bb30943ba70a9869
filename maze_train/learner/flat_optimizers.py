"""Element-wise optimizers that also accept a flat gradient; RMSProp as in TensorFlow 1."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import nn

from maze_train.core.checks import check_at_least, check_between, check_positive
from maze_train.core.errors import ConfigError, ShapeError, TrainingError
from maze_train.core.types import Tensor


class Optimizer(torch.optim.Optimizer, ABC):
    """Steps that lower what a gradient is of, each entry by its own gradient alone.

    There are two ways to use one:

    - as any optimizer of PyTorch: `SGD(params, lr=0.1)`, gradients in `param.grad`, `step()`;
    - with a gradient that someone else estimated: `SGD(lr=0.1)`, `setup(policy)` once, then
      `update(gradient)`. To climb, pass the negative of the direction of ascent.

    A subclass writes `_compute_step`. As its entries do not know of each other, a flat vector of
    parameters gives the same steps, and `ModuleOptimizer` makes use of that.

    Args:
        params: Parameters, or groups of them; None: those of the policy that `setup` gets.
        defaults: Settings of groups that do not have their own, `lr` (>= 0) among them.

    Raises:
        ConfigError: If the learning rate is negative or not finite.
    """

    is_elementwise: ClassVar[bool] = True
    """Whether a flat vector of parameters gives the same steps."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
        defaults: dict[str, Any],
    ) -> None:
        check_at_least("lr", defaults["lr"], 0.0)
        # A group without parameters holds the settings until `setup` fills it.
        super().__init__([{"params": []}] if params is None else params, defaults)

    @abstractmethod
    def _compute_step(
        self, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        """The step of one parameter.

        Args:
            gradient: Its gradient, any shape; not to be changed.
            state: Statistics kept of it from step to step, empty at first; to be changed.
            group: The settings: `lr` and the others of `defaults`.

        Returns:
            The value added to the parameter, in the shape of the gradient: a new tensor.
        """

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
        """Take over the parameters of `policy` that require a gradient; all else is forgotten.

        Settings stay. To be called before `load_state_dict`.

        Raises:
            TrainingError: If no parameter requires a gradient.
        """
        params = [param for param in policy.parameters() if param.requires_grad]
        if not params:
            raise TrainingError("no parameter of the policy requires a gradient: nothing to learn")
        group = {**self.param_groups[0], "params": params}
        self.param_groups.clear()
        self.state.clear()
        self.add_param_group(group)

    @torch.no_grad()
    def update(self, global_gradient: Tensor) -> float:
        """Take one step along a gradient that is one vector.

        Gradients that the parameters had are dropped.

        Args:
            global_gradient: Gradient of what shall become less with respect to all parameters that
                require one, in the order of `policy.parameters()`, [dim]; not changed.

        Returns:
            |θ' - θ| / |θ|, how far the parameters moved from θ to θ', >= 0. From θ = 0 it is 0 if
            they stayed there, else infinite.

        Raises:
            TrainingError: If the optimizer has no parameters, because `setup` was not called.
            ShapeError: If the gradient is not [dim].
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
                param.grad = None  # it may lie in memory of the caller
        moved = _length([p - b for p, b in zip(params, before, strict=True)])
        length = _length(before)
        if length == 0.0:
            return 0.0 if moved == 0.0 else math.inf
        return moved / length


def _length(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all entries together."""
    norms = (float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in tensors)
    return math.hypot(*norms)


class SGD(Optimizer):
    """Steps along an average of the gradients.

    v <- momentum * v + (1 - momentum) * g,  v = 0 at the start
    p <- p - lr * v

    The weights of all gradients sum to at most 1, so the momentum does not change how far many
    steps lead: a learning rate of 0.1 here is one of 0.01 in `torch.optim.SGD` with momentum 0.9.
    The first steps are shorter.

    Args:
        params: Parameters, or groups of them; None: those of the policy that `setup` gets.
        lr: Factor of a step, >= 0.
        momentum: How much of the average is kept at each step, in [0, 1).

    Raises:
        ConfigError: If an argument is out of range.

    Source: Polyak (1964), USSR Computational Mathematics and Mathematical Physics 4(5); the
    gradient weighted by 1 - momentum.
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
    """Steps along an average of the gradients, each entry divided by its root mean square.

    m <- beta_1 * m + (1 - beta_1) * g,    m = 0 at the start
    v <- beta_2 * v + (1 - beta_2) * g^2,  v = 0 at the start
    p <- p - lr * m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + eps),  t = 1 at the first step

    Args:
        params: Parameters, or groups of them; None: those of the policy that `setup` gets.
        lr: Length of a step, roughly, of every entry, >= 0.
        betas: How much of the two averages is kept at each step, both in [0, 1).
        eps: Added to the root mean square, in units of the gradient, > 0.

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
