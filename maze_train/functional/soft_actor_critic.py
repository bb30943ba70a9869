"""Losses of soft actor-critics.

N samples, E critics, M values per critic. The action of a sample has C continuous parts and
discrete parts with M choices in all; without discrete parts M = 1. The value of an action is the
sum of the values of its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze_train.core.types import Tensor


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
    """Minus the mean of `soft_state_values`, 0-d; the weights of the critics are constants.

    Args:
        q: Values of the critics for the actions of the policy, `[E, N, M]`.
        terms: The policy.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 7 and 9.
    """
    return soft_state_values(q, terms).mean().neg()


def temperature_loss(log_temperatures: Tensor, entropies: Tensor, targets: Tensor) -> Tensor:
    """Loss of the temperatures: they fall where entropy is above its target.

    L = Σ_p mean_n(log α_p (H_np - H̄_np))

    Args:
        log_temperatures: log α of the parts of the action, `[P]`.
        entropies: Estimates of the entropies of the parts (-log π of the sampled action, or exact
            ones), `[N, P]`; constants of the loss.
        targets: Target entropies, `[N, P]`; constants of the loss.

    Returns:
        Loss, 0-d.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, eq. 18, with log α in the place of α, as in
    the code of the authors: the steps of an optimizer then are relative ones.
    """
    return (log_temperatures * (entropies - targets).detach().mean(0)).sum()
