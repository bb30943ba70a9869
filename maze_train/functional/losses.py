"""Policy, value and critic losses.

Log-probabilities refer to the joint action: they are summed over the action components. The
losses run once per minibatch, so they use few tensor operations and never synchronise the device.

Losses of soft actor-critics use these sizes: N samples, E critics, M outputs per critic. The action
of a sample has C continuous components, and discrete components with M choices in total; without
discrete components, M = 1. The Q-value of an action is the sum of the outputs of its choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import mse_loss

from maze_train.core.checks import check_same_shape
from maze_train.core.types import Tensor

# exp(89) overflows float32, and the gradient of a clipped sample would be 0 * inf = NaN. exp(60) is
# far outside any clip range and leaves headroom for the product with an advantage.
MAX_LOG_RATIO = 60.0


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Loss whose negative gradient is the policy gradient.

    L = -mean(log pi(a|s) * A)

    Args:
        log_probs: Log-probability of the actions taken, [N] or any shape.
        advantages: Advantages of these actions, same shape; treated as constant.

    Returns:
        Loss, 0-d.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Mnih et al. (2016), arXiv:1602.01783, section 4 (advantage actor-critic).
    """
    check_same_shape(log_probs=log_probs, advantages=advantages)
    return (log_probs * advantages.detach()).mean().neg()


def clip_bounds(advantages: Tensor, clip_range: float | Tensor) -> Tensor:
    """Return A + c |A|, the largest gain of a sample in the objective of PPO."""
    if isinstance(clip_range, torch.Tensor):
        return torch.addcmul(advantages, advantages.abs(), clip_range.to(advantages.dtype))
    return torch.add(advantages, advantages.abs(), alpha=clip_range)


def clipped_surrogate_loss(
    log_ratios: Tensor, advantages: Tensor, clip_range: float | Tensor
) -> Tensor:
    """Clipped surrogate objective of PPO, as a loss.

    L = -mean(min(rho * A, clip(rho, 1 - c, 1 + c) * A)),  rho = exp(log ratio)

    Computed as the equivalent -mean(min(rho * A, A + c * |A|)): for A >= 0 the inner minimum is
    A * min(rho, 1 + c), for A < 0 it is A * max(rho, 1 - c). The bound is a constant, so the
    backward pass has fewer operations. Log ratios are clamped to at most 60.

    Args:
        log_ratios: log pi(a|s) - log pi_old(a|s) of the joint action, [N] or any shape.
        advantages: Advantages of these actions, same shape; treated as constant.
        clip_range: c, half-width of the interval around a ratio of 1, > 0; a number or 0-d.

    Returns:
        Loss, 0-d.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Schulman et al. (2017), arXiv:1707.06347, eq. 7.
    """
    check_same_shape(log_ratios=log_ratios, advantages=advantages)
    advantages = advantages.detach()
    bounds = clip_bounds(advantages, clip_range)
    ratios = log_ratios.clamp(max=MAX_LOG_RATIO).exp()
    return torch.minimum(ratios * advantages, bounds).mean().neg()


def approximate_kl(log_ratios: Tensor) -> Tensor:
    """Estimate of KL(pi_old || pi) from actions of the old policy, never negative.

    mean((rho - 1) - log rho),  rho = exp(log ratio)

    Args:
        log_ratios: log pi(a|s) - log pi_old(a|s) of the joint action, [N] or any shape.

    Returns:
        Estimate in nats, >= 0, 0-d, without gradient.

    Source: Schulman (2020), "Approximating KL Divergence", joschu.net/blog/kl-approx.html,
    estimator k3.
    """
    log_ratios = log_ratios.detach()
    # `exp - 1` would lose all digits of a small ratio, and with them the sign of the result.
    return (torch.expm1(log_ratios) - log_ratios).mean()


def clip_fraction(log_ratios: Tensor, clip_range: float | Tensor) -> Tensor:
    """Fraction of samples whose probability ratio is outside the clip range.

    mean(|rho - 1| > c),  rho = exp(log ratio)

    Args:
        log_ratios: log pi(a|s) - log pi_old(a|s) of the joint action, [N] or any shape.
        clip_range: c, half-width of the interval around a ratio of 1, > 0; a number or 0-d.

    Returns:
        Fraction in [0, 1], 0-d, in the dtype of the log ratios, without gradient.

    Source: the clip range of Schulman et al. (2017), arXiv:1707.06347, eq. 7.
    """
    log_ratios = log_ratios.detach()
    return (torch.expm1(log_ratios).abs() > clip_range).mean(dtype=log_ratios.dtype)


def squared_value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of the value estimates, without the factor 0.5 that some papers use.

    L = mean((v - R)^2)

    Args:
        values: v(s), [N] or any shape.
        targets: R, same shape; treated as constant.

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
    """Mean squared error with clipped value updates.

    L = mean(max((v - R)^2, (v_old + clamp(v - v_old, -c, c) - R)^2))

    Identical to `squared_value_loss` if |v - v_old| <= c. The loss does not include a factor of
    0.5.

    Args:
        values: v(s), [N] or any shape.
        old_values: v(s) at collection, on the scale of the values, same shape; treated as constant.
        targets: R, on the scale of the values, same shape; treated as constant.
        clip_range: c, in units of the values, > 0.

    Returns:
        Loss in squared units of the reward, 0-d.

    Raises:
        ShapeError: If the tensors differ in shape.

    Source: Engstrom et al. (2020), arXiv:2005.12729, section 3 (value function clipping); the
    maximum of both errors follows the implementation that the paper examines.
    """
    check_same_shape(values=values, old_values=old_values, targets=targets)
    old_values, targets = old_values.detach(), targets.detach()
    # Clamping to a moving interval keeps inner values exact, unlike v_old + (v - v_old).
    clipped = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    plain_errors = mse_loss(values, targets, reduction="none")
    clipped_errors = mse_loss(clipped, targets, reduction="none")
    return torch.maximum(plain_errors, clipped_errors).mean()


def critic_loss(
    q: Tensor,
    choices: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    delta: float = math.inf,
) -> tuple[Tensor, Tensor]:
    """Squared or Huber loss of an ensemble of Q-functions.

    L = Σ_e mean_n(w_n h(Q_e(s_n, a_n) - y_n)),  Q_e(s, a) = Σ_k q_e[choice k of a],

    h(x) = ½ x² for |x| <= δ, δ (|x| - ½ δ) beyond.

    Args:
        q: Outputs of the critics, `[E, N, M]`.
        choices: Indices of the actions in the last dimension of `q`, `[N, K]` int64; K = 0 if there
            are no discrete components, and then M is 1.
        targets: y, `[N]`; treated as constant.
        weights: Importance weights w, `[N]`; None: 1.
        delta: δ of the Huber loss, > 0; infinite: squared errors.

    Returns:
        Loss, 0-d, and the TD errors Q_e - y, detached, `[E, N]`.

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
    errors: Tensor, weights: Tensor | None = None, delta: float = math.inf
) -> Tensor:
    """Analytic gradient of `critic_loss` with respect to the Q-values.

    ∂L/∂Q_e(s_n, a_n) = w_n / N clip(Q_e(s_n, a_n) - y_n, -δ, δ)

    Args:
        errors: Q_e - y as `critic_loss` returns them, `[E, N]`.
        weights: Importance weights w, `[N]`; None: 1.
        delta: δ of the Huber loss, > 0; infinite: squared errors.

    Returns:
        The gradient, `[E, N]`.
    """
    bounded = errors if delta == math.inf else errors.clamp(-delta, delta)
    share = 1.0 / errors.shape[1]
    return bounded * (share if weights is None else weights * share)


@dataclass(frozen=True, slots=True)
class EntropyTerms:
    """Log-probabilities and temperatures of the policy that enter the soft state value."""

    log_probs: Tensor
    """Log-densities of the sampled continuous components, `[N, C]`."""

    temperatures: Tensor
    """Temperatures of the continuous components, `[C]`."""

    choice_probs: Tensor | None = None
    """Probabilities π_j of all choices, `[N, M]`, which sum to 1 per discrete component; None if
    there are no discrete components."""

    choice_log_probs: Tensor | None = None
    """Log-probabilities of the choices, 0 where the probability is 0, `[N, M]`."""

    choice_temperatures: Tensor | None = None
    """Temperatures of the choices, `[M]`."""


def soft_state_values(q: Tensor, terms: EntropyTerms) -> Tensor:
    """Soft state values: expected Q-value plus entropy bonus of the policy.

    V(s) = Σ_j π_j (min_e Q_ej - α_j log π_j) - Σ_c α_c log π_c,

    where the first sum is an exact expectation over the choices, and the second sum is estimated
    with one sample per continuous component. Without choices, V(s) is min_e Q_e - Σ_c α_c log π_c.

    Args:
        q: Outputs of the critics for the sampled continuous components, `[E, N, M]`.
        terms: Log-probabilities and temperatures of the policy in these states.

    Returns:
        Values, `[N]`.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 3, with the minimum of section 5;
    discrete: Christodoulou (2019), arXiv:1910.07207, eq. 10; both: Delalleau et al. (2019),
    arXiv:1912.11077, section 3.
    """
    lowest = q.amin(0)
    if terms.choice_probs is None:
        values = lowest.squeeze(-1)
    else:
        assert terms.choice_log_probs is not None
        assert terms.choice_temperatures is not None
        gains = lowest - terms.choice_temperatures * terms.choice_log_probs
        values = (terms.choice_probs * gains).sum(-1)
    if terms.log_probs.shape[1]:
        values = values - terms.log_probs @ terms.temperatures
    return values


def soft_policy_loss(q: Tensor, terms: EntropyTerms) -> Tensor:
    """Negative mean of `soft_state_values`, 0-d.

    Args:
        q: Outputs of the critics for the actions of the policy, `[E, N, M]`.
        terms: Log-probabilities and temperatures of the policy.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 7 and 9.
    """
    return soft_state_values(q, terms).mean().neg()


def temperature_loss(log_temperatures: Tensor, entropies: Tensor, targets: Tensor) -> Tensor:
    """Loss of the entropy temperatures, which decrease while the entropy exceeds its target.

    L = Σ_p mean_n(log α_p (H_np - H̄_np))

    Args:
        log_temperatures: log α of the action components, `[P]`.
        entropies: Entropy estimates of the components (-log π of the sampled action, or the exact
            entropy), `[N, P]`; treated as constant.
        targets: Target entropies, `[N, P]`; treated as constant.

    Returns:
        Loss, 0-d.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 18, with log α in place of α as in the
    authors' code, so that optimizer steps change α by a relative amount.
    """
    return (log_temperatures * (entropies - targets).detach().mean(0)).sum()
