"""Analytic gradients of actor-critics with template networks on vectors.

For small networks, autograd takes more time than the arithmetic. Analytic gradients are
identical to autograd gradients up to rounding; see `tests/algorithms/test_accelerated.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from maze_train.core.torch_private import is_hooked
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import ParamsGradient
from maze_train.nets.actor_critic import ActorCriticModel, ValueHead
from maze_train.nets.mlp_gradients import (
    Backward,
    add_row_sum,
    forward_and_backward,
    supports_analytic_gradients,
)
from maze_train.nets.policy_model import Policy

FAMILY_METHOD = "analytic_log_prob_and_entropy"
"""Name of the method that computes the analytic gradient of a distribution family."""


def has_analytic_gradients(model: ActorCriticModel) -> bool:
    """Return whether a model has plain linear layers, a scalar critic and a supported distribution.

    Types are compared exactly, because subclasses may compute other functions.
    """
    head, family, policy = model.value_head, model.distribution, model.policy
    return (
        (type(model), type(policy), type(head)) == (ActorCriticModel, Policy, ValueHead)
        and (model.rnn, head.support) == (None, None)
        and not any(map(is_hooked, model.modules()))
        and all(map(supports_analytic_gradients, (policy.net, model.critic)))
        and (model.trunk is None or supports_analytic_gradients(model.trunk))
        and (model.trunk is None or not model.critic_keys)
        and FAMILY_METHOD in vars(type(family))
        # The network outputs all parameters, or all except the log std of a Gaussian.
        and family.free_param_size in (0, family.critic_input_size)
        and bool(family.free_param_size or family.num_choices)
    )


class AnalyticOutputs:
    """Outputs of a model for n samples, computed without autograd, and their backward pass.

    Must be used under `torch.no_grad`.

    Args:
        model: A model that `has_analytic_gradients`.
        obs: Observations, `[n, ...]`.

    Attributes:
        raw_values: Outputs of the critic, `[n, 1]`.
    """

    _params_gradient: ParamsGradient
    _policy_backward: Backward

    def __init__(self, model: ActorCriticModel, obs: TensorTree) -> None:
        self._model, self._obs = model, obs
        self._features, self._trunk_backward = _features(model, obs)
        inputs = model.critic_inputs(self._features, obs)
        self.raw_values, self._critic_backward = forward_and_backward(model.critic, inputs)

    def log_prob_and_entropy(self, actions: TensorTree) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of actions and entropies of the policy, `[n]` each."""
        params, self._policy_backward = _params(self._model, self._features, self._obs)
        family = self._model.distribution
        log_probs, entropies, self._params_gradient = family.analytic_log_prob_and_entropy(
            params, actions
        )
        return log_probs, entropies

    def backward(
        self,
        d_values: Tensor,
        d_log_probs: Tensor | None = None,
        d_entropy: float | Tensor = 0.0,
    ) -> None:
        """Add the gradients of a loss to the `.grad` of the parameters.

        Args:
            d_values: Gradient with respect to `raw_values`, `[n, 1]`.
            d_log_probs: Gradient with respect to log-probabilities, `[n]`; None for losses that do
                not depend on the policy.
            d_entropy: Gradient with respect to the entropy of each sample, a number or 0-d.
        """
        has_trunk = self._model.trunk is not None
        gradients = []
        if d_log_probs is not None:
            d_params = self._params_gradient(d_log_probs, d_entropy)
            gradients.append(self._policy_backward(d_params, has_trunk))
        gradients.append(self._critic_backward(d_values, has_trunk))
        self._trunk_backward([part for part in gradients if part is not None])


def _features(
    model: ActorCriticModel, obs: TensorTree
) -> tuple[TensorTree, Callable[[list[Tensor]], None]]:
    """Return the inputs of policy and critic, and a function that backpropagates both gradients."""
    inputs = model.inputs(obs)
    if model.trunk is None:
        return inputs, lambda gradients: None
    features, backward = forward_and_backward(model.trunk, inputs)

    def trunk_backward(gradients: list[Tensor]) -> None:
        backward(sum(gradients[1:], gradients[0]), False)

    return features, trunk_backward


def _params(
    model: ActorCriticModel, features: TensorTree, obs: TensorTree
) -> tuple[Tensor, Backward]:
    """Return distribution parameters `[n, param_size]` and their backward function."""
    policy, masking = model.policy, model.masking
    outputs, net_backward = forward_and_backward(policy.net, features)
    if masking is not None:
        # Illegal actions have probability 0 and are never taken, so their logits have no gradient.
        return masking.apply(outputs, obs), net_backward
    free_params, size = policy.free_params, outputs.shape[-1]
    if free_params is None:
        return outputs, net_backward
    params = torch.cat([outputs, free_params.expand(*outputs.shape[:-1], -1)], dim=-1)

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        add_row_sum(free_params, grad[..., size:])
        return net_backward(grad[..., :size], of_input)

    return params, backward
