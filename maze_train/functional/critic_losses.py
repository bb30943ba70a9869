"""The loss of values of actions, and its gradient by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from maze_train.types import Tensor


def critic_loss(
    q: Tensor,
    choices: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    delta: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Squared errors, or Huber losses, of all critics of actions.

    L = Σ_e mean_n(w_n h(Q_e(s_n, a_n) - y_n)),  Q_e(s, a) = Σ_k q_e[choice k of a],

    h(x) = ½ x² for |x| <= δ, δ (|x| - ½ δ) beyond.

    Args:
        q: Outputs of the critics, `[E, N, M]`.
        choices: Which entries of the last dimension the actions chose, `[N, K]` int64; K = 0: there
            are no choices, and M is 1.
        targets: y, `[N]`; constants of the loss.
        weights: w, `[N]`; None: 1.
        delta: δ, > 0; infinite: squared errors.

    Returns:
        Loss, 0-d, and the errors Q_e - y without a graph, `[E, N]`.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 5; Huber (1964), robust estimation of a
    location parameter.
    """
    if choices.shape[1]:
        taken = q.gather(2, choices.expand(q.shape[0], *choices.shape)).sum(2)
    else:
        taken = q.squeeze(2)
    targets = targets.detach()
    errors = taken - targets
    if delta == math.inf:
        squares = errors.square() if weights is None else errors.square() * weights
        return 0.5 * squares.mean(1).sum(), errors.detach()
    bounded = errors.clamp(-delta, delta)
    losses = bounded * (errors - 0.5 * bounded)
    if weights is not None:
        losses = losses * weights
    return losses.mean(1).sum(), errors.detach()


def critic_loss_gradient(
    q: Tensor,
    choices: Tensor,
    errors: Tensor,
    weights: Tensor | None = None,
    delta: float = math.inf,
) -> Tensor:
    """Gradient of `critic_loss` with respect to the outputs of the critics, by hand.

    ∂L/∂q_e[m] = w_n / N clip(Q_e(s_n, a_n) - y_n, -δ, δ) where action n chose m, else 0

    Args:
        q: Outputs of the critics, `[E, N, M]`.
        choices: Which of them the actions chose, `[N, K]`, as for `critic_loss`.
        errors: Q_e - y as `critic_loss` returns them, `[E, N]`.
        weights: w, `[N]`; None: 1.
        delta: δ, > 0; infinite: squared errors.

    Returns:
        The gradient, `[E, N, M]`.
    """
    bounded = errors if delta == math.inf else errors.clamp(-delta, delta)
    share = 1.0 / errors.shape[1]
    columns = (bounded * (share if weights is None else weights * share)).unsqueeze(2)
    if not choices.shape[1]:
        return columns
    index = choices.expand(q.shape[0], *choices.shape)
    return torch.zeros_like(q).scatter_(2, index, columns.expand_as(index))
