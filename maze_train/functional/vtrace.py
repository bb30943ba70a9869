"""V-trace: value targets and advantages from actions of another, usually older, policy.

Like the estimators of `returns.py` it takes arrays of discounts and lambdas, so that episode ends
are data and not cases. `vtrace_forms.py` has it for other arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from maze_train.checks import check_same_shape
from maze_train.errors import ConfigError
from maze_train.functional.returns import backward_recurrence

if TYPE_CHECKING:
    from maze_train.types import Tensor


# exp(89) overflows float32, and a ratio of inf at a discount or an error of 0 would give NaN.
# exp(40) is far above any threshold, and unclipped advantages multiply two ratios with rewards.
_MAX_LOG_RATIO = 40.0


class VTraceReturns(NamedTuple):
    """Results of V-trace, without gradient."""

    vs: Tensor
    """Targets of the value function, `[T, ...]`."""

    pg_advantages: Tensor
    """Advantages for the policy gradient, importance weights included, `[T, ...]`."""


def importance_weights(log_rhos: Tensor) -> Tensor:
    """Rho = exp(log rho), where log rho counts as at most 40, so that products stay finite.

    Args:
        log_rhos: log pi(a|s) - log mu(a|s) of the joint action, any shape.

    Returns:
        Importance weights, same shape, a new tensor without gradient.
    """
    return log_rhos.detach().clamp(max=_MAX_LOG_RATIO).exp_()


def vtrace(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    lambdas: Tensor,
    *,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
) -> VTraceReturns:
    """Off-policy value targets and advantages with clipped importance weights.

    rho_t = exp(log rho_t),  c_t = lambda_t * min(c_bar, rho_t)
    delta_t = min(rho_bar, rho_t) * (r_t + discount_t * v_{t+1} - v_t)
    e_t = delta_t + discount_t * c_t * e_{t+1},  e_T = 0
    vs_t = v_t + e_t
    A_t = min(rho_bar_pg, rho_t) * (r_t + discount_t * (v_{t+1} + lambda_t * e_{t+1}) - v_t)

    With all lambdas 1 this is the estimator of the paper. With all rho 1 (and thresholds of at
    least 1) the advantages are `lambda_advantages`, and the targets those plus the values. Log
    ratios count as at most 40; -inf, an action that the target policy never takes, is a weight
    of 0.

    The values are those of the policy that learns. The proof that the targets converge to values of
    a policy assumes rho_bar >= c_bar (section 4.1).

    Args:
        log_rhos: log pi(a|s) - log mu(a|s) of the joint action, pi the policy that learns, mu the
            one that acted, [T, ...].
        discounts: gamma, or 0 at terminal steps, in [0, 1], [T, ...].
        rewards: Reward after each action, [T, ...].
        values: v(s_t), [T, ...].
        next_values: v of the true successor of each step, also where the environment was reset,
            [T, ...].
        lambdas: Trace decay, or 0 at every episode end, in [0, 1], [T, ...].
        clip_rho_threshold: rho_bar, > 0: which policy between mu and pi the values are of. None:
            no clipping.
        clip_pg_rho_threshold: rho_bar_pg, > 0, the same for the advantages.
        clip_c_threshold: c_bar, > 0: how far corrections reach back. None: no clipping; products
            of weights over many steps may then overflow.

    Returns:
        Targets and advantages, [T, ...], without gradient.

    Raises:
        ConfigError: If a threshold is not above 0.
        ShapeError: If the tensors differ in shape or have no time dimension.

    Source: Espeholt et al. (2018), arXiv:1802.01561, eq. 1 and sections 4.1 and 4.2; recursion and
    lambda: its remarks 1 and 2.
    """
    check_same_shape(
        log_rhos=log_rhos,
        discounts=discounts,
        rewards=rewards,
        values=values,
        next_values=next_values,
        lambdas=lambdas,
    )
    _check_threshold("clip_rho_threshold", clip_rho_threshold)
    _check_threshold("clip_pg_rho_threshold", clip_pg_rho_threshold)
    _check_threshold("clip_c_threshold", clip_c_threshold)
    with torch.no_grad():
        rhos = importance_weights(log_rhos)
        decays = discounts * lambdas
        errors = rewards + discounts * next_values - values
        corrections = backward_recurrence(
            _clip(rhos, clip_rho_threshold) * errors, decays * _clip(rhos, clip_c_threshold)
        )
        errors[:-1] += decays[:-1] * corrections[1:]
        return VTraceReturns(values + corrections, _clip(rhos, clip_pg_rho_threshold) * errors)


def _check_threshold(key: str, threshold: float | None) -> None:
    # The negation refuses NaN as well.
    if threshold is not None and not threshold > 0:
        raise ConfigError(key, "expected a number > 0, or None for no clipping", threshold)


def _clip(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
