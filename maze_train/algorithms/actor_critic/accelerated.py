"""Analytic gradients for A2C, PPO and IMPALA with common network architectures.

`ActorCriticLearner.compute_loss_for_module` defines the loss. For small networks autograd takes
longer than the arithmetic, so this module computes the same gradients analytically.
`ActorCriticByHand.supports` tells for which modules; all others use autograd. A learner with a
custom policy loss can take part by defining `policy_loss_gradient` next to `policy_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from maze_train.algorithms.actor_critic.batch import ActorCriticBatch, ActorCriticEvents
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor, TensorTree
from maze_train.learner.config import number
from maze_train.learner.faster import LossesByHand
from maze_train.nets.actor_critic import ActorCriticModel, ValueHead
from maze_train.nets.blocks import is_hooked
from maze_train.nets.mlp_gradients import (
    Backward,
    add_row_sum,
    forward_and_backward,
    has_gradients_by_hand,
)
from maze_train.nets.policy_model import Policy

PAIR = ("policy_loss", "policy_loss_gradient")
METHODS = (
    *("compute_losses", "compute_gradients", "compute_loss_for_module"),
    *("outputs", "value_loss", *PAIR),
)
"""Methods of a learner that the analytic gradients replace."""
FAMILY_METHOD = "log_prob_and_entropy_by_hand"
"""Method of distribution families with an analytic gradient."""


class ActorCriticByHand(LossesByHand):
    """Losses and analytic gradients of an `ActorCriticLearner`."""

    def supports(self, module_id: str) -> bool:
        """Return whether the analytic gradients are valid for a module.

        Requires multilayer perceptrons on vectors, a scalar critic, a distribution family with an
        analytic gradient, and known losses. Types are compared exactly, because a subclass may
        compute something else.
        """
        model: Any = self.learner.modules[module_id]
        head, family, policy = model.value_head, model.distribution, model.policy
        return (
            self._knows_the_losses(module_id)
            and (type(model), type(policy), type(head)) == (ActorCriticModel, Policy, ValueHead)
            and (model.rnn, head.support) == (None, None)
            and not any(map(is_hooked, model.modules()))
            and all(map(has_gradients_by_hand, (policy.net, model.critic)))
            and (model.trunk is None or has_gradients_by_hand(model.trunk))
            and (model.trunk is None or not model.critic_keys)
            and FAMILY_METHOD in vars(type(family))
            # The network outputs all parameters, or all but the log std of a Gaussian.
            and family.free_param_size in (0, family.critic_input_size)
            and bool(family.free_param_size or family.num_choices)
        )

    def _knows_the_losses(self, module_id: str) -> bool:
        """Return whether every class that defines one of `METHODS` vouches for the gradients.

        A class does so by `gradients_by_hand`, a mapping of the settings for which they are valid.
        It is not needed if the class defines only the policy loss together with its gradient.
        """
        if any(method in vars(self.learner) for method in METHODS):
            return False
        config = self.learner.config_of(module_id)
        for base in type(self.learner).__mro__:
            defined = vars(base)
            own = [method for method in METHODS if method in defined]
            pair = [method for method in PAIR if method in defined]
            settings = defined.get("gradients_by_hand", None if own != pair else {})
            if len(pair) == 1 or settings is None:
                return False
            if any(getattr(config, key) != value for key, value in settings.items()):
                return False
            # A method may have been replaced by assignment.
            names = (getattr(defined[method], "__qualname__", "") for method in own)
            if any(name.rpartition(".")[0] != base.__qualname__ for name in names):
                return False
        return True

    @torch.no_grad()
    def loss_and_backward(
        self, module_id: str, batch: ActorCriticBatch, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """Compute the loss of a module and a function that adds its gradients to `.grad`."""
        learner: Any = self.learner
        config, model = learner.config_of(module_id), learner.model(module_id)
        events, size, entropy_coef = ActorCriticEvents, batch.size, number(config.entropy_coef)
        features, trunk_backward = _features(model, batch.obs)
        raw_values, critic_backward = forward_and_backward(
            model.critic, model.critic_inputs(features, batch.obs)
        )
        errors = raw_values.squeeze(-1) - batch.targets
        value_loss = errors.square().mean()
        d_values = errors.mul_(2.0 / size).mul_(config.value_loss_coef).unsqueeze(-1)
        statistics.record(events.value_loss, value_loss, size)
        has_trunk = model.trunk is not None
        loss = value_loss * config.value_loss_coef
        if learner.is_burning_in:
            return loss, lambda: trunk_backward([critic_backward(d_values, has_trunk)])

        params, policy_backward = _params(model, features, batch.obs)
        log_probs, entropy, params_gradient = getattr(model.distribution, FAMILY_METHOD)(
            params, batch.actions
        )
        advantages = learner.advantages(batch)
        learner.record_policy_change(module_id, log_probs, batch, statistics)
        policy_loss = learner.policy_loss(log_probs, advantages, batch, config, statistics)
        mean_entropy = entropy.mean()
        statistics.record(events.policy_loss, policy_loss, size)
        statistics.record(events.policy_entropy, mean_entropy, size)
        loss = loss + (config.policy_loss_coef * policy_loss - entropy_coef * mean_entropy)
        d_log_probs = learner.policy_loss_gradient(log_probs, advantages, batch, config)
        d_params = params_gradient(d_log_probs.mul_(config.policy_loss_coef), -entropy_coef / size)

        def backward() -> None:
            trunk_backward(
                [policy_backward(d_params, has_trunk), critic_backward(d_values, has_trunk)]
            )

        return loss, backward


def _features(
    model: ActorCriticModel, obs: TensorTree
) -> tuple[TensorTree, Callable[[list[Tensor | None]], None]]:
    """Return the inputs of policy and critic, and a function that backpropagates both gradients."""
    inputs = model.inputs(obs)
    if model.trunk is None:
        return inputs, lambda gradients: None
    features, backward = forward_and_backward(model.trunk, inputs)

    def trunk_backward(gradients: list[Tensor | None]) -> None:
        parts = [part for part in gradients if part is not None]
        backward(sum(parts[1:], parts[0]), False)

    return features, trunk_backward


def _params(
    model: ActorCriticModel, features: TensorTree, obs: TensorTree
) -> tuple[Tensor, Backward]:
    """Return distribution parameters `[n, param_size]` and their backward function."""
    policy, masking = model.policy, model.masking
    outputs, net_backward = forward_and_backward(policy.net, features)
    if masking is not None:
        # Illegal actions have probability 0 and are never taken: their logits get no gradient.
        return masking.apply(outputs, obs), net_backward
    free_params, size = policy.free_params, outputs.shape[-1]
    if free_params is None:
        return outputs, net_backward
    params = torch.cat([outputs, free_params.expand(*outputs.shape[:-1], -1)], dim=-1)

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        add_row_sum(free_params, grad[..., size:])
        return net_backward(grad[..., :size], of_input)

    return params, backward
