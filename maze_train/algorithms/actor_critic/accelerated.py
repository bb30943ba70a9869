"""A faster way to the gradients of A2C and PPO, for the networks and policies that most runs have.

A reader can skip this file: `ActorCriticLearner.compute_loss_for_module` says what is computed, and
autograd would give the same gradients. For small networks it takes longer than the arithmetic, so
here they are derived by hand. `accelerates` says when; anything else takes the ordinary way. A
learner whose policy loss has a gradient by hand has a method `policy_loss_gradient` next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch

from maze_train.algorithms.actor_critic.batch import ActorCriticBatch, ActorCriticEvents
from maze_train.learner.learner import Learner
from maze_train.learner.steps import statistics_of
from maze_train.nets.actor_critic import ActorCriticModel, ValueHead
from maze_train.nets.mlp_gradients import (
    Backward,
    add_row_sum,
    forward_and_backward,
    has_gradients_by_hand,
)
from maze_train.nets.policy_model import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from maze_train.core.events import Statistics
    from maze_train.core.types import Tensor, TensorTree
    from maze_train.learner.config import Progress

AnyLearner: TypeAlias = Any
"""An `ActorCriticLearner`."""
GradientsByHand: TypeAlias = "Mapping[str, Mapping[str, object]]"


Experience = TypeVar("Experience")
Prepared = TypeVar("Prepared")

METHODS = (
    *("compute_losses", "compute_gradients", "compute_loss_for_module"),
    *("outputs", "value_loss"),
)
"""Methods of a learner, in addition to its policy loss, that the gradients by hand take the place
of."""
FAMILY_METHOD = "log_prob_and_entropy_by_hand"
"""Method of families of distributions that have a gradient by hand."""


class AcceleratedLearner(Learner[Experience, Prepared, ActorCriticBatch]):
    """Computes losses and gradients of those modules by hand that `accelerates` names."""

    gradients_by_hand: ClassVar[GradientsByHand] = {"compute_losses": {}, "compute_gradients": {}}
    """Methods that this class defines itself and for which the gradients by hand are right, each
    with the settings that this takes. A subclass that overrides one of `METHODS` gets autograd,
    unless it declares the method too."""
    entropy_coef = 0.0
    is_burning_in = False
    """Whether the critic alone learns."""
    accelerated: Set[str] = frozenset()
    """Modules whose gradients the next minibatch gets by hand."""
    _backward: Sequence[Callable[[], None]] = ()

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Look which modules can be accelerated: networks and methods may have changed."""
        super().before_gradient_based_update(progress, statistics)
        accelerated = set()
        for key in self.modules.keys() - self.frozen_modules:  # frozen ones may be of any kind
            with self.settings_of(key):
                if accelerates(self, self.modules[key]):
                    accelerated.add(key)
        self.accelerated = accelerated

    def compute_losses(
        self, minibatch: Mapping[str, ActorCriticBatch], statistics: Statistics
    ) -> dict[str, Tensor]:
        """The loss of each module; without a graph where `compute_gradients` does without."""
        ordinary = {key: part for key, part in minibatch.items() if key not in self.accelerated}
        losses = super().compute_losses(ordinary, statistics)
        self._backward = backward = []
        for key, batch in minibatch.items():
            if key in self.accelerated:
                self.part.turn_to(key)
                own = statistics_of(key, statistics)
                with self.settings_of(key):
                    losses[key], add_gradients = _loss_and_backward(self, key, batch, own)
                backward.append(add_gradients)
        return losses

    def compute_gradients(self, losses: Mapping[str, Tensor]) -> None:
        """Replace the gradients of the modules by those of their losses."""
        super().compute_gradients(losses)
        for backward in self._backward:
            backward()


def accelerates(learner: AnyLearner, model: Any) -> bool:
    """Whether a module has gradients by hand: stock networks, families and losses, nothing else.

    Networks of linear layers on vectors, a scalar critic, and a family whose class has a gradient
    by hand. A method that a subclass of the learner overrides turns it off, unless that class says
    in `gradients_by_hand` that they stay right. Types are compared exactly, because a subclass may
    compute something else.
    """
    head, family, policy = model.value_head, model.distribution, model.policy
    owner = _owner(learner, "policy_loss_gradient")
    return (
        learner.may_differentiate_by_hand
        and all(_is_declared(learner, method) for method in METHODS)
        and owner is not None
        and owner is _owner(learner, "policy_loss")
        and (type(model), type(policy), type(head)) == (ActorCriticModel, Policy, ValueHead)
        and (model.rnn, head.support) == (None, None)
        and all(map(has_gradients_by_hand, (policy.net, model.critic)))
        and (model.trunk is None or has_gradients_by_hand(model.trunk))
        and FAMILY_METHOD in vars(type(family))
        # The network gives all parameters, or all but the deviations of a Gaussian.
        and family.free_param_size in (0, family.critic_input_size)
        and bool(family.free_param_size or family.num_choices)
    )


def _owner(learner: AnyLearner, method: str) -> type | None:
    """The class that defines a method; None where someone put another function in its place."""
    if method in vars(learner):
        return None
    owner = next(base for base in type(learner).__mro__ if method in vars(base))
    name = getattr(vars(owner)[method], "__qualname__", None)
    return owner if name == f"{owner.__qualname__}.{method}" else None


def _is_declared(learner: AnyLearner, method: str) -> bool:
    """Whether the class that defines a method declares it, for settings as they are."""
    owner = _owner(learner, method)
    declared = {} if owner is None else vars(owner).get("gradients_by_hand", {})
    settings = declared.get(method)
    return settings is not None and all(
        getattr(learner.config, key) == value for key, value in settings.items()
    )


@torch.no_grad()
def _loss_and_backward(
    learner: AnyLearner, module_id: str, batch: ActorCriticBatch, statistics: Statistics
) -> tuple[Tensor, Callable[[], None]]:
    """`compute_loss_for_module` without a graph, and what adds its gradients to `.grad`."""
    config, events, size = learner.config, ActorCriticEvents, batch.size
    model = learner.model(module_id)
    features, trunk_backward = _features(model, batch.obs)
    raw_values, critic_backward = forward_and_backward(model.critic, features)
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
    policy_loss = learner.policy_loss(log_probs, advantages, batch, statistics)
    mean_entropy = entropy.mean()
    statistics.record(events.policy_loss, policy_loss, size)
    statistics.record(events.policy_entropy, mean_entropy, size)
    loss = loss + (config.policy_loss_coef * policy_loss - learner.entropy_coef * mean_entropy)
    d_log_probs = learner.policy_loss_gradient(log_probs, advantages, batch)
    d_params = params_gradient(
        d_log_probs.mul_(config.policy_loss_coef), -learner.entropy_coef / size
    )

    def backward() -> None:
        trunk_backward([policy_backward(d_params, has_trunk), critic_backward(d_values, has_trunk)])

    return loss, backward


def _features(
    model: ActorCriticModel, obs: TensorTree
) -> tuple[TensorTree, Callable[[list[Tensor | None]], None]]:
    """Inputs of policy and critic, and a function that takes the gradients of both for them."""
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
    """Parameters of the distribution, `[n, param_size]`, and what writes gradients."""
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
