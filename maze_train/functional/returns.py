"""Advantages and returns of time-major trajectories, based on one shared backward recurrence.

All estimators take arrays of discounts and lambdas, so episode ends need no special cases.
`discounts_and_lambdas` derives both arrays from the end codes of the steps.
"""

from __future__ import annotations

import torch

from maze_train.core.checks import check_same_shape
from maze_train.core.errors import ShapeError
from maze_train.core.step_end import RUNNING, TERMINATED, is_transition
from maze_train.core.types import Tensor


def backward_recurrence(inputs: Tensor, decays: Tensor) -> Tensor:
    """Accumulate decayed inputs backwards in time.

    acc_t = x_t + d_t * acc_{t+1},  acc_T = 0

    Computed by recursive doubling: log2(T) passes over whole tensors instead of T steps. With
    W_t(s) = d_t * ... * d_{t+s-1} and S_t(s) the sum over the rows t .. t+s-1,

    S_t(2s) = S_t(s) + W_t(s) * S_{t+s}(s),  W_t(2s) = W_t(s) * W_{t+s}(s)

    Args:
        inputs: x, [T, ...] with any trailing shape.
        decays: d, the weight of the accumulated later rows, usually in [0, 1], [T, ...].

    Returns:
        acc, [T, ...], without gradient, in the promoted dtype of both inputs.

    Raises:
        ShapeError: If the tensors differ in shape or have no time dimension.

    Source: recursive doubling for linear recurrences, Kogge and Stone (1973), IEEE Transactions on
    Computers C-22(8).
    """
    check_same_shape(inputs=inputs, decays=decays)
    if inputs.dim() == 0:
        raise ShapeError("inputs has shape [], expected a time dimension [T, ...]")
    dtype = torch.promote_types(inputs.dtype, decays.dtype)
    sums = inputs.detach().to(dtype, copy=True)
    weights = decays.detach().to(dtype)
    num_steps = sums.shape[0]
    span = 1
    while span < num_steps:
        # The product is a new tensor, so the overlapping slices are read before they are written.
        sums[:-span] += weights[: num_steps - span] * sums[span:]
        # Rows whose sum already reaches the end need no weight, so the tensor shrinks.
        weights = weights[:-span] * weights[span:]
        span *= 2
    return sums


def discounts_and_lambdas(
    end: Tensor,
    gamma: float,
    gae_lambda: float,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Derive the discounts and lambdas of the estimators from episode ends.

    discount_t = 0 if the step terminated, else gamma
    lambda_t = gae_lambda if the episode continues and step t + 1 is a transition, else 0

    After a terminated step, no value is bootstrapped. After a truncated step, the value of the
    final observation is bootstrapped and the trace is cut, so rewards of the next episode do not
    contribute. A step before a row that is not a transition, such as a dropped episode, is treated
    like a truncated step.

    Args:
        end: End codes of the steps (`maze_train.core.step_end.StepEnd`), uint8, [T, B].
        gamma: Discount of one step, in [0, 1].
        gae_lambda: Trace decay of one step, in [0, 1].
        dtype: Floating dtype of the results.

    Returns:
        Discounts and lambdas, [T, B] each.

    Source: Pardo et al. (2018), arXiv:1712.00378, partial-episode bootstrapping.
    """
    discounts = (end != TERMINATED).to(dtype) * gamma
    goes_on = end == RUNNING
    goes_on[:-1] &= is_transition(end[1:])
    return discounts, goes_on.to(dtype) * gae_lambda


def lambda_advantages(
    rewards: Tensor, discounts: Tensor, values: Tensor, next_values: Tensor, lambdas: Tensor
) -> Tensor:
    """Generalized advantage estimation: exponentially weighted temporal-difference errors.

    delta_t = r_t + discount_t * v_{t+1} - v_t
    A_t = delta_t + discount_t * lambda_t * A_{t+1},  A_T = 0

    Args:
        rewards: Reward after each action, [T, B].
        discounts: gamma, or 0 at terminal steps, in [0, 1], [T, B].
        values: v(s_t), [T, B].
        next_values: v of the true successor of each step (the final observation at the end of an
            episode), [T, B].
        lambdas: Trace decay, or 0 at every episode end, in [0, 1], [T, B].

    Returns:
        Advantages, [T, B], without gradient.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Schulman et al. (2016), arXiv:1506.02438, eq. 16.
    """
    check_same_shape(
        rewards=rewards,
        discounts=discounts,
        values=values,
        next_values=next_values,
        lambdas=lambdas,
    )
    with torch.no_grad():
        errors = rewards + discounts * next_values - values
        return backward_recurrence(errors, discounts * lambdas)


def normalize_advantages(advantages: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Normalize advantages to mean 0 and sample standard deviation 1.

    (A - mean(A)) / (std(A) + epsilon),  std with divisor N - 1

    A tensor with fewer than two elements is returned unchanged. Equal elements become 0.

    Args:
        advantages: All advantages of one minibatch, any shape.
        epsilon: Added to the standard deviation, > 0, in units of the advantages.

    Returns:
        Normalized advantages, same shape.

    Source: Andrychowicz et al. (2020), arXiv:2006.05990, choice C67.
    """
    if advantages.numel() < 2:
        return advantages
    # std_mean uses a running mean, which is exact for equal elements. With `advantages.mean()`,
    # rounding would change equal elements to values near 1.
    std, mean = torch.std_mean(advantages)
    return (advantages - mean) / (std + epsilon)


def scale_advantages(advantages: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale advantages to a root mean square of 1.

    A / (sqrt(mean(A^2)) + epsilon)

    Unlike `normalize_advantages`, this function does not shift. A shift adds c E[grad log pi(a)] to
    the policy gradient, which is 0 only if pi itself sampled the actions a.

    Args:
        advantages: All advantages of one batch, any shape.
        epsilon: Added to the root mean square, > 0, in units of the advantages.

    Returns:
        Scaled advantages, same shape.
    """
    return advantages / (advantages.square().mean().sqrt() + epsilon)


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """Fraction of the variance of the targets that the predictions explain.

    1 - Var(targets - predictions) / Var(targets)

    1: perfect prediction; 0: no better than a constant; below 0: worse than a constant. If the
    targets have zero variance, the result is 0.

    Args:
        predictions: Predicted values, any shape, at least one element.
        targets: Values to predict, same shape.

    Returns:
        Explained variance, 0-d, at most 1, without gradient, never NaN for finite inputs.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: coefficient of determination after removing the mean error; no paper.
    """
    check_same_shape(predictions=predictions, targets=targets)
    with torch.no_grad():
        # `var_mean` uses a running mean, so equal elements give exactly 0. `var` would give the
        # square of a rounding error; dividing by this value would give values near -1e16.
        variance, _ = torch.var_mean(targets, correction=0)
        residual, _ = torch.var_mean(targets - predictions, correction=0)
        share = 1.0 - residual / variance
        return torch.where(variance > 0.0, share, torch.zeros_like(share))
