"""Quantile representation of return distributions (QR-DQN)."""

from __future__ import annotations

import torch

from maze_train.core.types import Tensor


def of_actions(outputs: Tensor, num_quantiles: int) -> Tensor:
    """Reshape outputs `[..., A * M]` to quantiles of the return of every action, `[..., A, M]`."""
    return outputs.reshape(*outputs.shape[:-1], -1, num_quantiles)


def taken(quantiles: Tensor, actions: Tensor) -> Tensor:
    """Select the quantiles `[n, M]` of the actions `[n, 1]` from `[n, A, M]`."""
    return quantiles.take_along_dim(actions.unsqueeze(-1), 1).squeeze(1)


def quantile_loss(quantiles: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Quantile Huber loss.

    L = mean_n(w_n Σ_i mean_j(|τ_i - 1[u_ij < 0]| h(u_ij))),  u_ij = y_j - θ_i,

    τ_i = (i + ½) / M for i = 0 ... M - 1,  h(u) = ½ u² for |u| <= 1, |u| - ½ beyond.

    Args:
        quantiles: θ, `[N, M]`.
        targets: y, samples or quantiles of the return, `[N, K]`; treated as constant.
        weights: Importance weights w, `[N]`; None: 1.

    Returns:
        Loss, 0-d.

    Source: Dabney et al. (2018), arXiv:1710.10044, eq. 10 with κ = 1, algorithm 1.
    """
    size = quantiles.shape[1]
    shares = (torch.arange(size, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / size
    errors = targets.detach().unsqueeze(1) - quantiles.unsqueeze(2)
    bounded = errors.clamp(-1.0, 1.0)
    slopes = (shares[:, None] - (errors.detach() < 0).to(shares.dtype)).abs()
    losses = (slopes * bounded * (errors - 0.5 * bounded)).mean(2).sum(1)
    return (losses if weights is None else losses * weights).mean()
