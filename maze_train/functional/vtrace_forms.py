"""V-trace for other arguments: values of the next row, and parameters of two policies.

Log-probabilities, parameters and actions are of a whole action, or mappings by part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import torch

from maze_train.checks import check_same_shape
from maze_train.errors import ShapeError
from maze_train.functional.vtrace import VTraceReturns, vtrace

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from maze_train.types import Tensor, TensorTree


class ActionDistribution(Protocol):
    """Log-probabilities of actions under parameters; every `Distribution` has them."""

    def log_prob(self, params: Tensor, actions: Any) -> Tensor:
        """Log-probability of the whole action, [...], for `params` [..., param_size]."""
        ...


class VTraceFromLogitsReturns(NamedTuple):
    """Results of V-trace, and the log-probabilities that it was computed from."""

    vs: Tensor
    """Targets of the value function, without gradient, `[T, ...]`."""

    pg_advantages: Tensor
    """Advantages for the policy gradient, importance weights included, without gradient,
    `[T, ...]`."""

    log_rhos: Tensor
    """Log importance weights of the joint actions, without gradient, `[T, B]`."""

    behaviour_action_log_probs: TensorTree
    """Of the policy that acted, without gradient, `[T, B]` or by part of the action."""

    target_action_log_probs: TensorTree
    """Of the policy that learns, with gradient, `[T, B]` or by part of the action."""


class VTraceOptions(TypedDict, total=False):
    """Settings of V-trace that `from_logits` hands on."""

    clip_rho_threshold: float | None
    """As in `vtrace`."""

    clip_pg_rho_threshold: float | None
    """As in `vtrace`."""

    lambdas: Tensor | float | None
    """As in `from_importance_weights`."""


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
    """`vtrace` of rows in which the value of each row is the next value of the row before.

    Values may have trailing dimensions: C values per step, [T, B, C]. The other arguments have all
    of them, or [T, B], or [T, B, 1], and then count for each value.

    At a truncated step, where the next row belongs to another episode, add gamma times the value of
    the last observation to the reward and set the discount to 0.

    Args:
        log_rhos: log pi(a|s) - log mu(a|s) of the joint action, [T, B] or like values.
        discounts: gamma, or 0 at every episode end, in [0, 1], [T, B] or like values.
        rewards: Reward after each action, [T, B] or like values.
        values: v(s_t), [T, B] or [T, B, ...]; also [T] of a single sequence.
        bootstrap_value: v(s_T), the shape of one row of values.
        clip_rho_threshold: As in `vtrace`.
        clip_pg_rho_threshold: As in `vtrace`.
        lambdas: Trace decay in [0, 1], one number, or [T, B] or like values; None: 1.

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
            f"expected that of one row of values, which has shape {list(values.shape)}"
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
    """`from_importance_weights` for two policies, given by the parameters that they computed.

    Args:
        behaviour_policy_logits: Parameters of the policy that acted, [T, B, param_size], or by
            part of the action; constants.
        target_policy_logits: Parameters of the policy that learns, likewise.
        actions: The agent's actions, [T, B, ...] or by part.
        distribution: Distribution of the parameters; a mapping where they are given by part.
        discounts: As in `from_importance_weights`.
        rewards: As in `from_importance_weights`.
        values: As in `from_importance_weights`.
        bootstrap_value: As in `from_importance_weights`.
        **options: Thresholds and lambdas, see `VTraceOptions`.

    Returns:
        Targets, advantages, log importance weights and log-probabilities; only those of the policy
        that learns have a gradient.

    Raises:
        ConfigError: If a threshold is not above 0.
        ShapeError: If shapes or parts do not match.

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
    """Log importance weights of joint actions: the differences, summed over parts.

    log rho = sum_k (log pi_k(a_k|s) - log mu_k(a_k|s))

    Args:
        target_action_log_probs: Of the policy that learns, [T, B] or any shape, or by part.
        behaviour_action_log_probs: Of the policy that acted, likewise, with the same parts.

    Returns:
        Log importance weights, [T, B], without gradient.

    Raises:
        ShapeError: If the parts differ, there are none, or the tensors differ in shape.
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
        # Differences first: the sums over parts are larger and would round away digits.
        differences: list[Tensor] = [part - behaviour[key] for key, part in target.items()]
        return reduce(torch.add, differences)


def log_probs_from_logits_and_actions_and_spaces(
    policy_logits: TensorTree,
    actions: TensorTree,
    distribution: ActionDistribution | Mapping[str, ActionDistribution],
) -> TensorTree:
    """Log-probabilities of actions under the parameters that a policy computed.

    Args:
        policy_logits: Parameters, [T, B, param_size], or by part of the action.
        actions: The agent's actions, [T, B, ...]; by part where the parameters are, or where one
            distribution takes them so.
        distribution: Distribution of the parameters: anything with `log_prob(params, actions)`. A
            mapping of such where the parameters are given by part.

    Returns:
        Log-probabilities of the joint action, [T, B], or by part, differentiable.

    Raises:
        ShapeError: If the parts of the arguments differ, or there are none.
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
    """A tensor of steps repeated for each value of a step.

    Raises:
        ShapeError: If it has neither the shape of values nor [T, B] nor [T, B, 1].
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


def _by_part(**trees: Any) -> list[Mapping[str, Any]]:
    """Arguments as mappings by part of the action; the key of a whole action is empty.

    Raises:
        ShapeError: If the parts of an argument differ from those of the first, or that has none.
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
