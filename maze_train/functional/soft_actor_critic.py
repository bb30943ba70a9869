"""Losses of soft actor-critics, each with its gradient.

N samples, E critics, M values per critic. The action of a sample has C continuous parts and
discrete parts with M choices in all; without discrete parts M = 1. The value of an action is the
sum of the values of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from maze_train.types import Tensor

__all__ = [
    "EntropyTerms",
    "critic_loss_and_gradient",
    "soft_policy_loss_and_gradients",
    "soft_state_values",
    "temperature_loss_and_gradient",
]


@dataclass(frozen=True, slots=True)
class EntropyTerms:
    """Terms of the policy in the value of a state."""

    log_probs: Tensor
    """Log-densities of the sampled continuous parts, `[N, C]`."""

    temperatures: Tensor
    """Their temperatures, `[C]`."""

    choice_probs: Tensor | None = None
    """Probabilities π_j of all choices, `[N, M]`; those of one choice sum to 1. None: there are no
    discrete parts."""

    choice_log_probs: Tensor | None = None
    """Their logarithms, 0 where the probability is 0, `[N, M]`."""

    choice_temperatures: Tensor | None = None
    """Temperatures of the choices, `[M]`."""


def soft_state_values(q: Tensor, terms: EntropyTerms) -> Tensor:
    """Values of states under a policy that is paid for its entropy.

    V(s) = Σ_j π_j (min_e Q_ej - α_j log π_j) - Σ_c α_c log π_c,

    the first sum over choices, an exact expectation; the second over continuous parts, of which one
    action was sampled. Without choices V(s) = min_e Q_e - Σ_c α_c log π_c.

    Args:
        q: Values of the critics for the sampled continuous parts, `[E, N, M]`.
        terms: The policy in these states.

    Returns:
        Values, `[N]`.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 3, with the minimum of its section 5;
    discrete: Christodoulou (2019), arXiv:1910.07207, eq. 10; both: Delalleau et al. (2019),
    arXiv:1912.11077, section 3.
    """
    return -_costs_of_states(q.amin(0), terms)[0]


def _costs_of_states(lowest: Tensor, terms: EntropyTerms) -> tuple[Tensor, Tensor | None]:
    """-V(s), `[N]`, and the costs c_j = α_j log π_j - min_e Q_ej of choices, `[N, M]`."""
    costs = None
    if terms.choice_probs is None:
        total = -lowest.squeeze(-1)
    else:
        assert terms.choice_log_probs is not None
        assert terms.choice_temperatures is not None
        costs = terms.choice_temperatures * terms.choice_log_probs - lowest
        total = (terms.choice_probs * costs).sum(-1)
    if terms.log_probs.shape[1]:
        total = total + terms.log_probs @ terms.temperatures
    return total, costs


def critic_loss_and_gradient(
    q: Tensor, choices: Tensor, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Squared errors of all critics, and the gradient.

    L = Σ_e ½ mean_n(w_n (Q_e(s_n, a_n) - y_n)²),  Q_e(s, a) = Σ_k q_e[choice k of a]

    Args:
        q: Outputs of the critics, `[E, N, M]`.
        choices: Which entries of the last dimension the actions chose, `[N, K]` int64; K = 0: there
            are no choices, and M is 1.
        targets: y, `[N]`.
        weights: w, `[N]`; None: 1.

    Returns:
        Loss, 0-d; gradient with respect to `q`; errors Q_e - y, `[E, N]`.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 5.
    """
    has_choices = choices.shape[1] > 0
    index = choices.expand(q.shape[0], *choices.shape)
    taken = q.gather(2, index).sum(2) if has_choices else q.squeeze(2)
    errors = taken - targets
    scaled = errors / targets.shape[0]
    if weights is not None:
        scaled.mul_(weights)
    loss = 0.5 * (errors * scaled).sum()
    if not has_choices:
        return loss, scaled.unsqueeze(2), errors
    gradient = torch.zeros_like(q).scatter_add_(2, index, scaled.unsqueeze(2).expand_as(index))
    return loss, gradient, errors


def soft_policy_loss_and_gradients(
    q: Tensor, terms: EntropyTerms
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss of the policy, -mean(V(s)) of `soft_state_values`, and its gradients.

    Args:
        q: Values of the critics for the actions of the policy, `[E, N, M]`.
        terms: The policy.

    Returns:
        Loss, 0-d; gradient with respect to `q`, which is 0 but for the lowest critic; gradient with
        respect to `log_probs`; and the cost c_j = (α_j log π_j - min_e Q_ej) / N of each choice,
        `[N, M]`, None without choices. The gradient for the logit of a choice is
        π_j (c_j - Σ_i π_i c_i), the sum over the alternatives of that choice.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 7 and 9.
    """
    size = q.shape[1]
    lowest, which = q.min(0)
    total, costs = _costs_of_states(lowest, terms)
    share = terms.choice_probs / -size if terms.choice_probs is not None else -1.0 / size
    critics = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    d_q = (which == critics) * share
    d_log_probs = (terms.temperatures / size).expand_as(terms.log_probs)
    return total.mean(), d_q, d_log_probs, None if costs is None else costs / size


def temperature_loss_and_gradient(
    log_temperatures: Tensor, entropies: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss of the temperatures: they fall where entropy is above its target.

    L = Σ_p mean_n(log α_p (H_np - H̄_np))

    Args:
        log_temperatures: log α of the parts of the action, `[P]`.
        entropies: Estimates of the entropies of the parts (-log π of the sampled action, or exact
            ones), `[N, P]`.
        targets: Target entropies, `[N, P]`.

    Returns:
        Loss, 0-d, and its gradient, `[P]`.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 18, with log α in the place of α, as in
    the code of the authors: the steps of an optimizer then are relative ones.
    """
    gradient = (entropies - targets).mean(0)
    return (log_temperatures.detach() * gradient).sum(), gradient
