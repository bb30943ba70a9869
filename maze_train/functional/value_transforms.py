"""Rescaling of value targets, and categorical (two-hot) representations of scalars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.functional import log_softmax

from maze_train.core.checks import check_positive
from maze_train.core.errors import ConfigError, ShapeError
from maze_train.core.types import Array, Tensor


def _as_tensor(x: Tensor | Array | float) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(x)


class ValueTransform(ABC):
    """Strictly increasing elementwise map h of returns, with its inverse."""

    @abstractmethod
    def transform_value(self, x: Tensor | Array | float) -> Tensor:
        """Map returns to the scale that the critic predicts.

        Args:
            x: Returns, any shape.

        Returns:
            h(x), same shape, differentiable.
        """

    @abstractmethod
    def transform_value_inv(self, x: Tensor | Array | float) -> Tensor:
        """Map predictions of the critic back to returns.

        Args:
            x: Transformed values, any shape.

        Returns:
            h^-1(x), same shape, differentiable.
        """


@dataclass(frozen=True)
class ReduceScaleValueTransform(ValueTransform):
    """Square-root scaling of large magnitudes, with a Lipschitz-continuous inverse.

    h(x) = sign(x) * (sqrt(|x| + 1) - 1) + epsilon * x

    h^-1(y) = sign(y) * (((sqrt(1 + 4 epsilon (|y| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1)

    The linear term makes the inverse Lipschitz continuous. Both functions are computed without
    differences of nearly equal values, so float32 keeps its precision near 0, for large |x|, and
    for small epsilon.

    Args:
        epsilon: Weight of the linear term, > 0.

    Raises:
        ConfigError: If epsilon is not a finite number above 0.

    Source: Pohlen et al. (2018), arXiv:1805.11593, proposition A.2.
    """

    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)

    def transform_value(self, x: Tensor | Array | float) -> Tensor:
        """Compute h(x) with sqrt(|x| + 1) - 1 = |x| / (sqrt(|x| + 1) + 1)."""
        x = _as_tensor(x)
        return x / (torch.sqrt(x.abs() + 1.0) + 1.0) + self.epsilon * x

    def transform_value_inv(self, x: Tensor | Array | float) -> Tensor:
        """Compute h^-1(y) from the positive root u = sqrt(|x| + 1) - 1 of a quadratic equation.

        epsilon u^2 + (1 + 2 epsilon) u - |y| = 0,  |x| = u (u + 2)
        """
        y = _as_tensor(x)
        linear = 1.0 + 2.0 * self.epsilon
        root = torch.sqrt(linear * linear + 4.0 * self.epsilon * y.abs())
        u = 2.0 * y / (linear + root)
        return u * (u.abs() + 2.0)


def _check_range(support_range: tuple[int, int]) -> tuple[int, int]:
    low, high = support_range
    if not low < high:
        raise ConfigError("support_range", "expected (low, high) with low < high", support_range)
    return low, high


def check_support(logits: Tensor, support_range: tuple[int, int]) -> None:
    """Raise if the last dimension of the logits does not match the size of the support.

    Args:
        logits: One entry per integer of the support, [..., K].
        support_range: Lowest and highest integer of the support, low < high.

    Raises:
        ConfigError: If low >= high.
        ShapeError: If K != high - low + 1.
    """
    low, high = _check_range(support_range)
    size = high - low + 1
    if logits.dim() == 0 or logits.shape[-1] != size:
        raise ShapeError(
            f"logits has shape {list(logits.shape)}, "
            f"expected [..., {size}] for the integers {low} to {high}"
        )


def support_to_scalar(logits: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Expected value of a categorical distribution over consecutive integers.

    x = sum_k softmax(logits)_k * (low + k)

    Args:
        logits: Unnormalized log-probabilities, [..., K], K = high - low + 1.
        support_range: Lowest and highest integer of the support, low < high.

    Returns:
        Expected value in [low, high], [...], differentiable.

    Raises:
        ConfigError: If low >= high.
        ShapeError: If K does not match the support.

    Source: Schrittwieser et al. (2020), arXiv:1911.08265, appendix F.
    """
    check_support(logits, support_range)
    low, high = support_range
    probabilities = torch.softmax(logits, dim=-1)
    support = torch.arange(low, high + 1, dtype=probabilities.dtype, device=logits.device)
    return probabilities @ support


def scalar_to_support(scalar: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Two-hot encoding: probabilities of the two nearest integers with the scalar as their mean.

    p_k = max(0, 1 - |x - (low + k)|),  x clamped to [low, high]

    Args:
        scalar: Values to represent, [...]; integers become the default floating dtype.
        support_range: Lowest and highest integer of the support, low < high.

    Returns:
        Probabilities, [..., K], K = high - low + 1, at most two of them nonzero, which sum to 1.

    Raises:
        ConfigError: If low >= high.

    Source: Schrittwieser et al. (2020), arXiv:1911.08265, appendix F.
    """
    low, high = _check_range(support_range)
    if not scalar.is_floating_point():
        scalar = scalar.to(torch.get_default_dtype())
    support = torch.arange(low, high + 1, dtype=scalar.dtype, device=scalar.device)
    distances = (scalar.clamp(low, high).unsqueeze(-1) - support).abs()
    return torch.clamp(1.0 - distances, min=0.0)


def two_hot_loss(logits: Tensor, targets: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Cross-entropy between a categorical value estimate and a two-hot target.

    L = -mean(sum_k two_hot(R)_k * log softmax(logits)_k)

    Args:
        logits: Unnormalized log-probabilities of the support, [..., K], K = high - low + 1.
        targets: R, [...]; apply the value transform, if any, beforehand. Clamped to the support and
            treated as constant.
        support_range: Lowest and highest integer of the support, low < high.

    Returns:
        Loss in nats, 0-d.

    Raises:
        ConfigError: If the support is empty.
        ShapeError: If the logits do not match the support or the targets.

    Source: Schrittwieser et al. (2020), arXiv:1911.08265, appendix F.
    """
    check_support(logits, support_range)
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"targets has shape {list(targets.shape)}, "
            f"expected {list(logits.shape[:-1])} like logits without the support"
        )
    weights = scalar_to_support(targets.detach(), support_range)
    return (weights * log_softmax(logits, dim=-1)).sum(dim=-1).mean().neg()
