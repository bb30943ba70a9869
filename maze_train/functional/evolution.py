"""Evolution strategies: utilities of returns, and the gradient that mirrored samples estimate.

n pairs of policies are tried: pair k has the parameters θ + σ ε_k and θ - σ ε_k, ε_k standard
normal, and earns the returns R_k+ and R_k-.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ShapeError, TrainingError
from maze_train.core.types import Tensor


def _check_returns(returns: Tensor) -> torch.dtype:
    """Refuse what has no order or no mean; gives the dtype of the utilities."""
    if returns.numel() == 0:
        raise ShapeError(f"returns has shape {list(returns.shape)}, expected at least one entry")
    if not returns.isfinite().all():
        wrong = int((~returns.isfinite()).sum())
        raise TrainingError(
            f"{wrong} of {returns.numel()} returns are not finite, so they cannot be compared; "
            "the environment gives such rewards, or very large ones"
        )
    return returns.dtype if returns.is_floating_point() else torch.get_default_dtype()


def centered_ranks(returns: Tensor) -> Tensor:
    """Ranks of all entries among each other, scaled to [-0.5, 0.5].

    u_i = r_i / (m - 1) - 1/2,

    r_i in [0, m - 1] the rank of entry i of m, 0 the lowest; equal entries share the average of
    their ranks. A single entry gets 0. The utilities sum to 0, are exactly 0 where all returns are
    equal, and depend on nothing but the order of the returns: no outlier has more weight than its
    place.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.

    Returns:
        Utilities in [-0.5, 0.5], same shape, in the dtype of the returns if it is a floating one,
        else in the default dtype.

    Raises:
        ShapeError: If there are no returns.
        TrainingError: If a return is NaN, which has no rank, or infinite.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2.1 (fitness shaping); ranks instead
    of values: Wierstra et al. (2014), JMLR 15, section 3.1.
    """
    dtype = _check_returns(returns)
    m = returns.numel()
    _, places, counts = torch.unique(returns.detach(), return_inverse=True, return_counts=True)
    # Twice the average rank, and its distance from the middle, are integers: nothing is rounded
    # before the division, so that mirrored ranks are exact negatives.
    from_middle = 2 * counts.cumsum(0) - counts - m
    ranks: Tensor = (from_middle.to(torch.float64) / max(2 * (m - 1), 1)).to(dtype)
    return ranks[places]


def normalized_returns(returns: Tensor) -> Tensor:
    """Returns with mean 0 and standard deviation 1.

    u_i = (R_i - mean(R)) / std(R),  std with divisor m, the number of entries

    All are exactly 0 where all returns are equal. Computed in float64, from differences to one of
    the returns: neither a large mean nor a small spread costs precision.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.

    Returns:
        Utilities in [-sqrt(m - 1), sqrt(m - 1)], same shape, in the dtype of the returns if it is a
        floating one, else in the default dtype.

    Raises:
        ShapeError: If there are no returns.
        TrainingError: If a return is not finite.
    """
    dtype = _check_returns(returns)
    x = returns.detach().to(torch.float64)
    x = x - x.reshape(-1)[0]
    x = x - x.mean()
    peak = x.abs().max()
    if peak == 0.0:
        return torch.zeros_like(returns, dtype=dtype)
    x = x / peak  # squares of tiny or huge numbers would vanish or overflow
    return (x / x.square().mean().sqrt()).to(dtype)


def shaped_returns(returns: Tensor, shaping: str) -> Tensor:
    """Utilities of returns: the quantity that a step increases in place of the returns.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.
        shaping: `centered_ranks`, `normalized` (see `normalized_returns`), or `raw` for the returns
            as they are.

    Returns:
        Utilities, same shape, in the dtype of the returns if it is a floating one, else in the
        default dtype.

    Raises:
        ConfigError: If `shaping` is not one of these.
        ShapeError: If there are no returns.
        TrainingError: If a return is not finite.
    """
    check_one_of("shaping", shaping, ("centered_ranks", "normalized", "raw"))
    if shaping == "centered_ranks":
        return centered_ranks(returns)
    if shaping == "normalized":
        return normalized_returns(returns)
    return returns.detach().to(_check_returns(returns))


def antithetic_gradient(utilities: Tensor, noise: Iterable[Tensor], dim: int) -> Tensor:
    """Direction in which the expected utility grows, from n pairs of mirrored samples.

    g = 1 / (2 n) Σ_k (u_k+ - u_k-) ε_k

    The paper divides by σ as well, which makes it an estimate of the gradient of
    E[u(θ + σ ε)] with respect to θ. This factor is left out on purpose: it is the same for all
    entries, so the step size holds it, and a change of σ does not change the length of a step.

    Args:
        utilities: u_k+ and u_k- of each pair, [n, 2], n >= 1.
        noise: The n vectors ε_k in the order of the pairs, [dim] each, of one floating dtype. They
            are read one by one and neither kept nor changed, so views of a large table are fine.
        dim: Number of parameters.

    Returns:
        g, [dim], in the dtype and on the device of the noise; a step along it, not against it,
        makes the utility grow.

    Raises:
        ShapeError: If the utilities are not [n, 2] with n >= 1, if there are more or less than n
            vectors of noise, or if one of them is not [dim].

    Source: Salimans et al. (2017), arXiv:1703.03864, algorithm 1 and section 2.1; mirrored samples:
    Brockhoff et al. (2010), PPSN XI.
    """
    n = len(utilities) if utilities.dim() else 0
    if n == 0 or utilities.shape != (n, 2):
        raise ShapeError(f"utilities has shape {list(utilities.shape)}, expected [n, 2], n >= 1")
    u = utilities.detach().to(torch.float64)
    weights: list[float] = ((u[:, 0] - u[:, 1]) / (2 * n)).tolist()
    gradient: Tensor | None = None
    count = 0
    for row in noise:
        if count == n:
            raise ShapeError(f"noise has more than {n} vectors, expected one for each pair")
        if row.shape != (dim,):
            raise ShapeError(f"noise[{count}] has shape {list(row.shape)}, expected [{dim}]")
        if gradient is None:
            gradient = torch.zeros_like(row)
        gradient.add_(row, alpha=weights[count])
        count += 1
    if gradient is None or count < n:
        raise ShapeError(f"noise has {count} vectors, expected {n}: one for each pair")
    return gradient
