"""Losses of a state-value estimate: squared, clipped, and as a distribution over a support."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import log_softmax, mse_loss

from maze_train.errors import ShapeError
from maze_train.functional.shapes import check_same_shape
from maze_train.functional.value_transforms import check_support, scalar_to_support

if TYPE_CHECKING:
    from maze_train.types import Tensor

__all__ = [
    "clipped_value_loss",
    "squared_value_loss",
    "two_hot_loss",
]


def squared_value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error, without the factor 0.5 that some papers put in front.

    L = mean((v - R)^2)

    Args:
        values: v(s), [N] or any shape.
        targets: R, same shape; a constant of the loss.

    Returns:
        Loss in squared units of the reward, 0-d.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Schulman et al. (2017), arXiv:1707.06347, eq. 9 (L^VF).
    """
    check_same_shape(values=values, targets=targets)
    return mse_loss(values, targets.detach())


def clipped_value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, clip_range: float
) -> Tensor:
    """Mean squared error that ignores gains from moving far off the old value.

    L = mean(max((v - R)^2, (v_old + clamp(v - v_old, -c, c) - R)^2))

    Like `squared_value_loss` without a factor 0.5, which it equals while |v - v_old| <= c.

    Args:
        values: v(s), [N] or any shape.
        old_values: v(s) at collection, on the scale of the values, same shape; a constant.
        targets: R, on the scale of the values, same shape; a constant.
        clip_range: c, in units of the values, > 0.

    Returns:
        Loss in squared units of the reward, 0-d.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Engstrom et al. (2020), arXiv:2005.12729, section 3 (value function clipping), with the
    larger of both errors, as in the code which that paper examines.
    """
    check_same_shape(values=values, old_values=old_values, targets=targets)
    old_values, targets = old_values.detach(), targets.detach()
    # Clamping to a moving band leaves inner values bit for bit, unlike v_old + (v - v_old).
    clipped = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain_errors = mse_loss(values, targets, reduction="none")
    clipped_errors = mse_loss(clipped, targets, reduction="none")
    return torch.maximum(plain_errors, clipped_errors).mean()


def two_hot_loss(logits: Tensor, targets: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Cross-entropy between a categorical value estimate and a two-hot target.

    L = -mean(sum_k two_hot(R)_k * log softmax(logits)_k)

    Args:
        logits: Unnormalized log-probabilities of the support, [..., K], K = high - low + 1.
        targets: R, already passed through the value transform if there is one, clamped to the
            support, [...]; a constant of the loss.
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
