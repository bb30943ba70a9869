"""V-trace: value targets and advantages from actions of a different, usually older, policy.

Like the estimators in `returns.py`, V-trace takes arrays of discounts and lambdas, so episode ends
need no special cases. Log-probabilities, parameters and actions are tensors of the whole action, or
mappings with one tensor per action component.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import torch

from maze_train.core.checks import check_same_shape
from maze_train.core.errors import ConfigError, ShapeError
from maze_train.core.types import Tensor, TensorTree
from maze_train.functional.returns import backward_recurrence

if TYPE_CHECKING:
    from typing import Unpack


# exp(89) overflows float32, and an infinite ratio times a discount or an error of 0 would give NaN.
# exp(40) is far above any threshold; unclipped advantages multiply two ratios with rewards.
_MAX_LOG_RATIO = 40.0


class VTraceReturns(NamedTuple):
    """Results of V-trace, without gradient."""

    vs: Tensor
    """Targets of the value function, `[T, ...]`."""

    pg_advantages: Tensor
    """Advantages for the policy gradient, importance weights included, `[T, ...]`."""


def importance_weights(log_rhos: Tensor) -> Tensor:
    """Exponentiate log rho, clamped to at most 40 so that products of weights stay finite.

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

    With all lambdas equal to 1, this is the estimator of the paper. With all rho equal to 1 (and
    thresholds >= 1), the advantages are identical to `lambda_advantages`, and the targets are the
    advantages plus the values. Log ratios are clamped to at most 40; -inf, the value of an action
    that the target policy never takes, has weight 0.

    The `values` are estimates for the target policy. The convergence proof assumes
    rho_bar >= c_bar (section 4.1).

    Args:
        log_rhos: log pi(a|s) - log mu(a|s) of the joint action, with target policy pi and
            behaviour policy mu, [T, ...].
        discounts: gamma, or 0 at terminal steps, in [0, 1], [T, ...].
        rewards: Reward after each action, [T, ...].
        values: v(s_t), [T, ...].
        next_values: v of the true successor of each step (the final observation at the end of an
            episode), [T, ...].
        lambdas: Trace decay, or 0 at every episode end, in [0, 1], [T, ...].
        clip_rho_threshold: rho_bar, > 0; selects the policy between mu and pi whose values are
            estimated. None: no clipping.
        clip_pg_rho_threshold: rho_bar_pg, > 0; clips the weights of the advantages. None: no
            clipping.
        clip_c_threshold: c_bar, > 0; limits how far corrections propagate back. None: no clipping;
            products of weights over many steps may then overflow.

    Returns:
        Targets and advantages, [T, ...], without gradient.

    Raises:
        ConfigError: If a threshold is not above 0.
        ShapeError: If the tensors differ in shape or have no time dimension.

    Source: Espeholt et al. (2018), arXiv:1802.01561, eq. 1 and sections 4.1 and 4.2; recursion and
    lambda: remarks 1 and 2 of the paper.
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
    # `not threshold > 0` is also true for NaN.
    if threshold is not None and not threshold > 0:
        raise ConfigError(key, "expected a number > 0, or None for no clipping", threshold)


def _clip(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)


class ActionDistribution(Protocol):
    """Interface required by `from_logits`: log-probabilities of actions."""

    def log_prob(self, params: Tensor, actions: Any) -> Tensor:
        """Log-probability of the whole action, [...], for `params` [..., param_size]."""
        ...


class VTraceFromLogitsReturns(NamedTuple):
    """Results of V-trace, and the log-probabilities used."""

    vs: Tensor
    """Targets of the value function, without gradient, `[T, ...]`."""

    pg_advantages: Tensor
    """Advantages for the policy gradient, importance weights included, without gradient,
    `[T, ...]`."""

    log_rhos: Tensor
    """Log importance weights of the joint actions, without gradient, `[T, B]`."""

    behaviour_action_log_probs: TensorTree
    """Log-probabilities under the behaviour policy, without gradient, `[T, B]` or by component."""

    target_action_log_probs: TensorTree
    """Log-probabilities under the target policy, with gradient, `[T, B]` or by component."""


class VTraceOptions(TypedDict, total=False):
    """Keyword arguments that `from_logits` passes to `from_importance_weights`."""

    clip_rho_threshold: float | None
    """See `vtrace`."""

    clip_pg_rho_threshold: float | None
    """See `vtrace`."""

    lambdas: Tensor | float | None
    """See `from_importance_weights`."""


def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    *,
    lambdas: Tensor | float | None = None,
) -> VTraceReturns:
    """Compute V-trace for sequences in which `values[t + 1]` is the next value of step t.

    Values may have trailing dimensions, for example C values per step, [T, B, C]. The other
    arguments then have the same shape, or [T, B] or [T, B, 1], which are broadcast.

    At a truncated step, the next row belongs to a new episode: add gamma times the value of the
    final observation to the reward and set the discount to 0.

    Args:
        log_rhos: log pi(a|s) - log mu(a|s) of the joint action, [T, B] or the shape of values.
        discounts: gamma, or 0 at every episode end, in [0, 1], [T, B] or the shape of values.
        rewards: Reward after each action, [T, B] or the shape of values.
        values: v(s_t), [T, B] or [T, B, ...]; [T] for a single sequence.
        bootstrap_value: v(s_T), the shape of one row of values.
        clip_rho_threshold: See `vtrace`.
        clip_pg_rho_threshold: See `vtrace`.
        lambdas: Trace decay in [0, 1]: a scalar, [T, B], or the shape of values; None: 1.

    Returns:
        Targets and advantages, the shape of values, without gradient.

    Raises:
        ConfigError: If a threshold is not above 0.
        ShapeError: If the shapes do not match.

    Source: Espeholt et al. (2018), arXiv:1802.01561, section 4.
    """
    if values.dim() == 0 or bootstrap_value.shape != values.shape[1:]:
        raise ShapeError(
            f"bootstrap_value has shape {list(bootstrap_value.shape)}, "
            f"expected the shape of one row of values, which is {list(values.shape)}"
        )
    if not isinstance(lambdas, torch.Tensor):
        lambdas = torch.full_like(values, 1.0 if lambdas is None else lambdas)
    return vtrace(
        _spread("log_rhos", log_rhos, values),
        _spread("discounts", discounts, values),
        _spread("rewards", rewards, values),
        values,
        torch.cat([values[1:], bootstrap_value.unsqueeze(0)]),
        _spread("lambdas", lambdas, values),
        clip_rho_threshold=clip_rho_threshold,
        clip_pg_rho_threshold=clip_pg_rho_threshold,
    )


def from_logits(
    behaviour_policy_logits: TensorTree,
    target_policy_logits: TensorTree,
    actions: TensorTree,
    distribution: ActionDistribution | Mapping[str, ActionDistribution],
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    **options: Unpack[VTraceOptions],
) -> VTraceFromLogitsReturns:
    """Compute V-trace from the distribution parameters of both policies.

    Args:
        behaviour_policy_logits: Parameters of the behaviour policy, [T, B, param_size], or by
            action component; treated as constant.
        target_policy_logits: Parameters of the target policy, [T, B, param_size], or by component.
        actions: The agent's actions, [T, B, ...] or by component.
        distribution: Distribution of the parameters; a mapping if they are given by component.
        discounts: See `from_importance_weights`.
        rewards: See `from_importance_weights`.
        values: See `from_importance_weights`.
        bootstrap_value: See `from_importance_weights`.
        **options: Thresholds and lambdas, see `VTraceOptions`.

    Returns:
        Targets, advantages, log importance weights and log-probabilities. Only the
        log-probabilities of the target policy have a gradient.

    Raises:
        ConfigError: If a threshold is not above 0.
        ShapeError: If shapes or components do not match.

    Source: Espeholt et al. (2018), arXiv:1802.01561, section 4.
    """
    with torch.no_grad():
        behaviour = log_probs_from_logits_and_actions_and_spaces(
            behaviour_policy_logits, actions, distribution
        )
    target = log_probs_from_logits_and_actions_and_spaces(
        target_policy_logits, actions, distribution
    )
    log_rhos = get_log_rhos(target, behaviour)
    returns = from_importance_weights(
        log_rhos, discounts, rewards, values, bootstrap_value, **options
    )
    return VTraceFromLogitsReturns(*returns, log_rhos, behaviour, target)


def get_log_rhos(
    target_action_log_probs: TensorTree, behaviour_action_log_probs: TensorTree
) -> Tensor:
    """Log importance weights of joint actions, summed over the action components.

    log rho = sum_k (log pi_k(a_k|s) - log mu_k(a_k|s))

    Args:
        target_action_log_probs: Log-probabilities under the target policy, [T, B] or any shape, or
            by component.
        behaviour_action_log_probs: Log-probabilities under the behaviour policy, same shape and
            components.

    Returns:
        Log importance weights, [T, B], without gradient.

    Raises:
        ShapeError: If the components differ, there are no components, or the tensors differ in
            shape.
    """
    log_probs = {
        "target_action_log_probs": target_action_log_probs,
        "behaviour_action_log_probs": behaviour_action_log_probs,
    }
    target, behaviour = _by_part(**log_probs)
    check_same_shape(
        **{
            f"{name}[{key!r}]" if key else name: part
            for name, tree in zip(log_probs, (target, behaviour), strict=True)
            for key, part in tree.items()
        }
    )
    with torch.no_grad():
        # Subtracting before summing is more precise, because the sums have larger magnitudes.
        differences: list[Tensor] = [part - behaviour[key] for key, part in target.items()]
        return reduce(torch.add, differences)


def log_probs_from_logits_and_actions_and_spaces(
    policy_logits: TensorTree,
    actions: TensorTree,
    distribution: ActionDistribution | Mapping[str, ActionDistribution],
) -> TensorTree:
    """Log-probabilities of actions under the distribution parameters of a policy.

    Args:
        policy_logits: Parameters, [T, B, param_size], or by action component.
        actions: The agent's actions, [T, B, ...]; a mapping by component if the parameters are
            given by component or the distribution requires a mapping.
        distribution: Object with `log_prob(params, actions)`; a mapping of such objects if the
            parameters are given by component.

    Returns:
        Log-probabilities of the joint action, [T, B], or by component, differentiable.

    Raises:
        ShapeError: If the components of the arguments differ, or there are no components.
    """
    if not isinstance(policy_logits, dict) and not isinstance(distribution, Mapping):
        return distribution.log_prob(policy_logits, actions)
    all_logits, all_actions, distributions = _by_part(
        policy_logits=policy_logits, actions=actions, distribution=distribution
    )
    return {
        key: distributions[key].log_prob(logits, all_actions[key])
        for key, logits in all_logits.items()
    }


def _spread(name: str, tensor: Tensor, values: Tensor) -> Tensor:
    """Broadcast a per-step tensor to the shape of the values.

    Raises:
        ShapeError: If the tensor has neither the shape of values nor [T, B] nor [T, B, 1].
    """
    if tensor.shape == values.shape:
        return tensor
    steps, ones = tuple(values.shape[:2]), (1,) * (values.dim() - 2)
    if tuple(tensor.shape) not in (steps, steps + ones):
        raise ShapeError(
            f"{name} has shape {list(tensor.shape)}, expected {list(values.shape)} like values, "
            f"or {list(steps)}"
        )
    return tensor.reshape(steps + ones).expand_as(values)


def _by_part(**trees: object) -> list[Mapping[str, Any]]:
    """Return the arguments as mappings by action component; a whole action has the key "".

    Raises:
        ShapeError: If the arguments differ in their components, or have none.
    """
    parts = {
        name: f"the parts {sorted(tree)}" if isinstance(tree, Mapping) else "no parts"
        for name, tree in trees.items()
    }
    first = next(iter(parts))
    for name, own in parts.items():
        if own != parts[first]:
            raise ShapeError(f"{name} has {own}, expected {parts[first]} like {first}")
    if not all(len(tree) for tree in trees.values() if isinstance(tree, Mapping)):
        raise ShapeError(f"{first} is an empty mapping, expected at least one part of the action")
    return [tree if isinstance(tree, Mapping) else {"": tree} for tree in trees.values()]
