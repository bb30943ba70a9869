"""Evolution strategies: fitness shaping and the antithetic gradient estimate.

Each iteration evaluates n mirrored pairs of policies. Pair k has the parameters θ + σ ε_k and
θ - σ ε_k, with ε_k standard normal, and obtains the returns R_k+ and R_k-.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ShapeError, TrainingError
from maze_train.core.types import Tensor


def _check_returns(returns: Tensor) -> torch.dtype:
    """Raise if the returns are empty or not finite; return the dtype of the utilities."""
    if returns.numel() == 0:
        raise ShapeError(f"returns has shape {list(returns.shape)}, expected at least one entry")
    if not returns.isfinite().all():
        wrong = int((~returns.isfinite()).sum())
        raise TrainingError(
            f"{wrong} of {returns.numel()} returns are not finite and cannot be ranked; check the "
            "rewards of the environment for NaN, infinite or very large values"
        )
    return returns.dtype if returns.is_floating_point() else torch.get_default_dtype()


def centered_ranks(returns: Tensor) -> Tensor:
    """Centered ranks of the returns, scaled to [-0.5, 0.5].

    u_i = r_i / (m - 1) - 1/2,

    where r_i in [0, m - 1] is the rank of entry i of m and 0 is the lowest. Equal entries are
    assigned the average of their ranks, and a single entry has the utility 0. The utilities sum to
    0 and are exactly 0 if all returns are equal. Utilities depend only on the order of the returns,
    so outliers have no extra weight.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.

    Returns:
        Utilities in [-0.5, 0.5], same shape, in the dtype of the returns if floating-point, else in
        the default dtype.

    Raises:
        ShapeError: If there are no returns.
        TrainingError: If a return is NaN or infinite.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2.1 (fitness shaping); ranks instead
    of values: Wierstra et al. (2014), JMLR 15, section 3.1.
    """
    dtype = _check_returns(returns)
    m = returns.numel()
    _, places, counts = torch.unique(returns.detach(), return_inverse=True, return_counts=True)
    # Twice the average rank and its distance from the middle are integers, so the only rounding is
    # in the division, and mirrored ranks are exact negatives.
    from_middle = 2 * counts.cumsum(0) - counts - m
    ranks: Tensor = (from_middle.to(torch.float64) / max(2 * (m - 1), 1)).to(dtype)
    return ranks[places]


def normalized_returns(returns: Tensor) -> Tensor:
    """Standardize the returns to mean 0 and standard deviation 1.

    u_i = (R_i - mean(R)) / std(R),  std with divisor m, the number of entries

    All utilities are exactly 0 if all returns are equal. Computed in float64 from the differences
    to the first return, so a large mean or a small spread does not reduce the precision.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.

    Returns:
        Utilities in [-sqrt(m - 1), sqrt(m - 1)], same shape, in the dtype of the returns if
        floating-point, else in the default dtype.

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
    x = x / peak  # Squares of extreme values would underflow or overflow.
    return (x / x.square().mean().sqrt()).to(dtype)


def shaped_returns(returns: Tensor, shaping: str) -> Tensor:
    """Apply fitness shaping: map returns to the utilities that a gradient step increases.

    Args:
        returns: Finite returns of any real dtype and any shape, at least one.
        shaping: `centered_ranks`, `normalized` (see `normalized_returns`), or `raw`, which leaves
            the returns unchanged.

    Returns:
        Utilities, same shape, in the dtype of the returns if floating-point, else in the default
        dtype.

    Raises:
        ConfigError: If `shaping` has a different value.
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
    """Antithetic estimate of the gradient of the expected utility from n mirrored pairs.

    g = 1 / (2 n) Σ_k (u_k+ - u_k-) ε_k

    The paper also divides by σ, which gives an estimate of the gradient of E[u(θ + σ ε)] with
    respect to θ. The factor 1 / σ is omitted deliberately: the step size absorbs constant factors,
    and the step length then does not depend on σ.

    Args:
        utilities: u_k+ and u_k- of each pair, [n, 2], n >= 1.
        noise: The n vectors ε_k in the order of the pairs, [dim] each, of one floating dtype.
            Vectors are read one at a time and not modified, so views of a large table are allowed.
        dim: Number of parameters.

    Returns:
        g, [dim], in the dtype and on the device of the noise. A step along +g increases the
        utility.

    Raises:
        ShapeError: If the utilities are not [n, 2] with n >= 1, if the number of noise vectors is
            not n, or if a noise vector is not [dim].

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
            raise ShapeError(f"noise has more than {n} vectors, expected one per pair")
        if row.shape != (dim,):
            raise ShapeError(f"noise[{count}] has shape {list(row.shape)}, expected [{dim}]")
        if gradient is None:
            gradient = torch.zeros_like(row)
        gradient.add_(row, alpha=weights[count])
        count += 1
    if gradient is None or count < n:
        raise ShapeError(f"noise has {count} vectors, expected {n}: one per pair")
    return gradient
