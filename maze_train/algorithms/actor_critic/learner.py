"""Base class of actor-critic learners: advantages, value loss and entropy bonus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, Unpack

import torch
from torch import nn

from maze_train.algorithms.actor_critic.batch import (
    ActorCriticBatch,
    EvaluatedRollout,
    PreparedRollout,
    evaluate_rollout,
    with_new_states,
)
from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.events import Event, Statistics
from maze_train.core.torch_private import is_hooked
from maze_train.core.types import Tensor, TensorTree, tree_map
from maze_train.data.rollout import Rollout
from maze_train.distributions.base import ParamsGradient
from maze_train.functional.losses import policy_gradient_loss
from maze_train.functional.returns import (
    discounts_and_lambdas,
    explained_variance,
    lambda_advantages,
    normalize_advantages,
)
from maze_train.learner.config import Freeze, Progress
from maze_train.learner.events import LearnerEvents
from maze_train.learner.learner import Learner
from maze_train.learner.modules import LearnerOptions, Modules, current
from maze_train.learner.reward_scaling import RewardScaler
from maze_train.nets.actor_critic import ActorCriticModel, ValueHead
from maze_train.nets.blocks import Backward, add_row_sum
from maze_train.nets.policy_model import Policy
from maze_train.nets.template import forward_and_backward, supports_analytic_gradients

Config = TypeVar("Config", bound=ActorCriticConfig)

PAIR = ("policy_loss", "policy_loss_gradient")
METHODS = (
    *("compute_losses", "compute_gradients", "compute_loss_for_module"),
    *("outputs", "weighted_value_loss", "weighted_policy_loss", "value_loss", *PAIR),
)
"""Methods whose gradient is computed by `analytic_loss`."""


class ActorCriticEvents(LearnerEvents):
    """Statistics of actor-critic learners, averaged over samples unless stated otherwise."""

    policy_loss = Event("Policy loss.")
    value_loss = Event("Value loss, without its coefficient.")
    policy_entropy = Event("Entropy of the policy, in nats.")
    approximate_kl = Event("Estimate of KL(old policy || new policy), in nats.")
    clip_fraction = Event("Fraction of samples with a probability ratio outside the clip range.")
    explained_variance = Event(
        "1 - Var(returns - values) / Var(returns) of the values at collection; 1 is perfect."
    )
    values_mean = Event("Mean value at collection.")
    returns_mean = Event("Mean value target.")
    clip_range = Event("Clip range in the last update.", reduce="last")
    entropy_coef = Event("Weight of the entropy bonus in the last update.", reduce="last")


class ActorCriticLearner(Learner[Rollout, PreparedRollout, ActorCriticBatch], Generic[Config]):
    """Base class of actor-critic learners.

    Loss = policy_loss_coef * policy loss + value_loss_coef * value loss - entropy_coef * entropy.
    By default, the policy loss is the policy gradient loss, and an update is one gradient step on
    the whole rollout.

    Args:
        modules: Actor-critic models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed for shuffling the minibatches.
    """

    required_apis: ClassVar[tuple[type, ...]] = (ActorCriticModel,)
    scheduled_settings: ClassVar[Mapping[str, Event]] = {
        "entropy_coef": ActorCriticEvents.entropy_coef
    }
    analytic_gradients: ClassVar[Mapping[str, object]] = {}
    config: Config
    is_burning_in = False
    """Whether only the critic is trained."""
    needs_old_log_probs: ClassVar[bool] = True
    """Whether the loss uses log-probabilities under the policy that collected the rollout."""

    def __init__(self, modules: Modules, config: Config, **options: Unpack[LearnerOptions]) -> None:
        super().__init__(modules, config, **options)
        self._reward_scalers: dict[str, RewardScaler] = {}
        self._observed: dict[str, Rollout] = {}

    @property
    def _burn_in_updates(self) -> int:
        """Number of initial updates that train only the critic."""
        return self.config.critic_burn_in_epochs * self.config.epoch_length

    def model(self, module_id: str) -> ActorCriticModel:
        """Return a module as an `ActorCriticModel`."""
        module = self.modules[module_id]
        assert isinstance(module, ActorCriticModel)
        return module

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Update schedules and `is_burning_in`."""
        self.is_burning_in = progress.updates < self._burn_in_updates
        super().before_gradient_based_update(progress, statistics)

    def freeze_rules(self) -> Sequence[Freeze]:
        """Return the rules of `algorithm.freeze`, plus one for the policy during critic burn-in."""
        if not self._burn_in_updates:
            return super().freeze_rules()
        return [*super().freeze_rules(), Freeze(params=["policy"], stop=self._burn_in_updates)]

    @torch.no_grad()
    def preprocess(
        self, module_id: str, experience: Rollout, statistics: Statistics
    ) -> PreparedRollout:
        """Compute advantages and value targets of a rollout."""
        config, model = self.config_of(module_id), self.model(module_id)
        self._observed[module_id] = rollout = experience.to(self.device)
        if config.reward_scaling:
            scaler = self._reward_scalers.setdefault(module_id, self._new_reward_scaler(module_id))
            rewards = scaler.scale(rollout.rewards, rollout.end)
            rollout = replace(rollout, rewards=rewards)
        evaluated = self.evaluate(module_id, rollout)
        log_probs = self.old_log_probs(model, rollout, evaluated)
        advantages, returns = self.advantages_and_returns(rollout, evaluated, log_probs, config)
        columns = {
            **_columns(model, advantages, returns, evaluated.values, log_probs),
            **{key: x.flatten(0, 1) for key, x in self.columns(module_id, rollout).items()},
        }
        length = self.config.sequence_length or rollout.num_steps
        prepared = PreparedRollout(rollout, columns, length)
        if prepared.num_units:
            self._record_values(prepared, evaluated.values, returns, statistics)
        return prepared

    def columns(self, module_id: str, rollout: Rollout) -> Mapping[str, Tensor]:
        """Return additional columns of the minibatches, `[T, B, ...]` each, keyed by name.

        Args:
            module_id: The module.
            rollout: T steps of B environments, on the device, with scaled rewards.
        """
        return {}

    def evaluate(self, module_id: str, rollout: Rollout) -> EvaluatedRollout:
        """Evaluate the model on a rollout before the update."""
        model = self.model(module_id)
        return evaluate_rollout(model, rollout, self.needs_old_log_probs, self.ranks)

    @torch.no_grad()
    def with_new_advantages(self, module_id: str, prepared: PreparedRollout) -> PreparedRollout:
        """Recompute values, value targets and advantages with the current critic."""
        rollout, model = prepared.rollout, self.model(module_id)
        has_modes = module_id in self.modules.with_modes
        if has_modes:  # Same mode as before the update.
            model.eval()
        evaluated = evaluate_rollout(model, with_new_states(model, rollout), False, self.ranks)
        if has_modes:
            model.train()
        log_probs = prepared.old_log_probs
        config = self.config_of(module_id)
        advantages, returns = self.advantages_and_returns(rollout, evaluated, log_probs, config)
        columns = _columns(model, advantages, returns, evaluated.values, log_probs)
        return PreparedRollout(rollout, {**prepared.columns, **columns}, prepared.sequence_length)

    def advantages_and_returns(
        self, rollout: Rollout, evaluated: EvaluatedRollout, log_probs: Tensor, config: Config
    ) -> tuple[Tensor, Tensor]:
        """Compute advantages and value targets; by default with GAE.

        Args:
            rollout: T steps of B environments, with rewards scaled for learning.
            evaluated: Outputs of the model for the rollout.
            log_probs: Result of `old_log_probs`, `[T * B]`.
            config: Settings of the module.

        Returns:
            Advantages and returns, `[T, B]` each.
        """
        discounts, lambdas = self.discounts_and_lambdas(rollout, config)
        values = evaluated.values
        advantages = lambda_advantages(
            rollout.rewards, discounts, values, evaluated.next_values, lambdas
        )
        return advantages, advantages + values

    def discounts_and_lambdas(self, rollout: Rollout, config: Config) -> tuple[Tensor, Tensor]:
        """Return discount and trace decay of each step, `[T, B]` each."""
        return discounts_and_lambdas(
            rollout.end, config.gamma, config.gae_lambda, dtype=rollout.rewards.dtype
        )

    def _record_values(
        self, prepared: PreparedRollout, values: Tensor, returns: Tensor, statistics: Statistics
    ) -> None:
        """Record statistics of the values at collection, in units of the scaled rewards."""
        values, returns = (prepared.transitions(x.flatten()) for x in (values, returns))
        events = ActorCriticEvents
        statistics.record(events.explained_variance, explained_variance(values, returns))
        statistics.record(events.values_mean, values.mean())
        statistics.record(events.returns_mean, returns.mean())

    def old_log_probs(
        self, model: ActorCriticModel, rollout: Rollout, evaluated: EvaluatedRollout
    ) -> Tensor:
        """Log-probabilities under the policy before the update, `[T * B]`.

        Returns zeros if `needs_old_log_probs` is False.
        """
        if evaluated.params is None:
            return torch.zeros_like(rollout.rewards).flatten()
        actions = tree_map(lambda x: x.flatten(0, 1), rollout.actions)
        return model.distribution.log_prob(evaluated.params, actions)

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Update the observation statistics for the next rollout.

        The previous statistics are used during the update, because the actions were sampled with
        them.
        """
        super().after_gradient_based_update(progress, statistics)
        self.observe(self._observed)
        self._observed.clear()

    def minibatches(
        self, prepared: Mapping[str, PreparedRollout], statistics: Statistics
    ) -> Iterator[Mapping[str, ActorCriticBatch]]:
        """Yield a single minibatch with all samples."""
        batches = {key: rollout.whole() for key, rollout in prepared.items() if rollout.num_units}
        if batches:
            yield batches

    def complete_batch(self, module_id: str, batch: ActorCriticBatch) -> ActorCriticBatch:
        """Normalize the advantages over the minibatch if `normalize_advantage` is set."""
        if not self.config.normalize_advantage or self.is_burning_in:
            return batch
        return batch.with_column("advantages", self.normalized(batch.advantages))

    def shard(
        self, batch: ActorCriticBatch, rank: int, count: int
    ) -> tuple[ActorCriticBatch, int, int]:
        """Return the shard of a data-parallel learner; see `Learner.shard`."""
        shard, size = batch.shard(rank, count)
        return shard, size, batch.size

    def normalized(self, advantages: Tensor) -> Tensor:
        """Normalize the advantages of a minibatch, `[n]`."""
        return normalize_advantages(advantages)

    def compute_loss_for_module(
        self, module_id: str, batch: ActorCriticBatch, statistics: Statistics
    ) -> Tensor:
        """Return the weighted sum of policy loss, value loss and entropy bonus, 0-d."""
        config, model = self.config_of(module_id), self.model(module_id)
        params, raw_values = self.outputs(module_id, batch)
        value_loss = self.value_loss(model, raw_values, batch, config)
        loss = self.weighted_value_loss(value_loss, batch, config, statistics)
        if self.is_burning_in:
            return loss
        outputs = model.distribution.log_prob_and_entropy(params, batch.actions)
        return loss + self.weighted_policy_loss(module_id, *outputs, batch, config, statistics)

    def weighted_value_loss(
        self, value_loss: Tensor, batch: ActorCriticBatch, config: Config, statistics: Statistics
    ) -> Tensor:
        """Record the value loss, and return the loss times its coefficient, 0-d."""
        statistics.record(ActorCriticEvents.value_loss, value_loss, batch.size)
        return config.value_loss_coef * value_loss

    def weighted_policy_loss(
        self,
        module_id: str,
        log_probs: Tensor,
        entropies: Tensor,
        batch: ActorCriticBatch,
        config: Config,
        statistics: Statistics,
    ) -> Tensor:
        """Return the weighted policy loss minus the weighted entropy bonus, 0-d."""
        self.record_policy_change(module_id, log_probs, batch, statistics)
        policy_loss = self.policy_loss(log_probs, batch.advantages, batch, config, statistics)
        entropy, size = entropies.mean(), batch.size
        statistics.record(ActorCriticEvents.policy_loss, policy_loss, size)
        statistics.record(ActorCriticEvents.policy_entropy, entropy, size)
        bonus = torch.mul(entropy, current(config.entropy_coef)).to(entropy.dtype)
        return config.policy_loss_coef * policy_loss - bonus

    def has_analytic_loss(self, module_id: str) -> bool:
        """Whether the model and all methods of the loss have analytic gradients."""
        is_known = self.declares_gradients(module_id, METHODS, PAIR)
        return is_known and has_analytic_gradients(self.model(module_id))

    @torch.no_grad()
    def analytic_loss(
        self, module_id: str, batch: ActorCriticBatch, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """Compute the loss of `compute_loss_for_module` and its backward pass without autograd."""
        config, size = self.config_of(module_id), batch.size
        outputs = AnalyticOutputs(self.model(module_id), batch.obs)
        errors = outputs.raw_values.squeeze(-1) - batch.targets
        loss = self.weighted_value_loss(errors.square().mean(), batch, config, statistics)
        d_values = errors.mul_(2.0 / size).mul_(config.value_loss_coef).unsqueeze(-1)
        if self.is_burning_in:
            return loss, partial(outputs.backward, d_values)
        log_probs, entropies = outputs.log_prob_and_entropy(batch.actions)
        loss = loss + self.weighted_policy_loss(
            module_id, log_probs, entropies, batch, config, statistics
        )
        d_log_probs = self.policy_loss_gradient(log_probs, batch.advantages, batch, config)
        d_log_probs.mul_(config.policy_loss_coef)
        d_entropy = -current(config.entropy_coef) / size
        return loss, partial(outputs.backward, d_values, d_log_probs, d_entropy)

    def outputs(self, module_id: str, batch: ActorCriticBatch) -> tuple[Tensor, Tensor]:
        """Return distribution parameters and critic outputs for the samples of a minibatch."""
        params, raw_values = self.model(module_id)(batch.obs, batch.sequences)
        valid = None if batch.sequences is None else batch.sequences.valid
        return (params, raw_values) if valid is None else (params[valid], raw_values[valid])

    def value_loss(
        self, model: ActorCriticModel, raw_values: Tensor, batch: ActorCriticBatch, config: Config
    ) -> Tensor:
        """Value loss, 0-d, of critic outputs `[n, output_size]`."""
        return model.value_head.loss(raw_values, batch.targets, batch.old_values)

    def record_policy_change(
        self, module_id: str, log_probs: Tensor, batch: ActorCriticBatch, statistics: Statistics
    ) -> None:
        """Record the change of the policy since the rollout; called before `policy_loss`."""

    def policy_loss(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        config: Config,
        statistics: Statistics,
    ) -> Tensor:
        """Policy loss, 0-d; by default -mean(log pi(a_t | s_t) * A_t).

        Args:
            log_probs: Log-probabilities of the actions under the current policy, `[n]`.
            advantages: Advantages, normalized if `normalize_advantage` is set, `[n]`.
            batch: The minibatch.
            config: Settings of the module.
            statistics: Statistics of the update, for additional metrics.
        """
        return policy_gradient_loss(log_probs, advantages)

    def policy_loss_gradient(
        self, log_probs: Tensor, advantages: Tensor, batch: ActorCriticBatch, config: Config
    ) -> Tensor:
        """Gradient of the policy loss with respect to the log-probabilities, -A / n, `[n]`."""
        return advantages * (-1.0 / advantages.numel())

    def remove_module(self, module_id: str) -> nn.Module:
        """Remove a module, its optimizers and its reward scaling."""
        self._reward_scalers.pop(module_id, None)
        return super().remove_module(module_id)

    def forget_episodes(self, envs: Tensor) -> None:
        """Reset the discounted returns of environments with a dropped episode, `[B]` bool."""
        for scaler in self._reward_scalers.values():
            scaler.forget(envs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the learner and of the reward scaling."""
        scalers = {key: scaler.state_dict() for key, scaler in self._reward_scalers.items()}
        return {**super().state_dict(), "reward_scalers": scalers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self._reward_scalers = {}
        for module_id, scaler_state in state["reward_scalers"].items():
            self._reward_scalers[module_id] = self._new_reward_scaler(module_id)
            self._reward_scalers[module_id].load_state_dict(scaler_state)

    def _new_reward_scaler(self, module_id: str) -> RewardScaler:
        config = self.config_of(module_id)
        only_large = config.reward_scaling == "large"
        return RewardScaler(config.gamma, config.scaled_reward_clip, only_large)


def _columns(
    model: ActorCriticModel, advantages: Tensor, returns: Tensor, values: Tensor, log_probs: Tensor
) -> dict[str, Tensor]:
    """Return the columns of an `ActorCriticBatch`, `[T * B]` each."""
    head = model.value_head
    return {
        "advantages": advantages.flatten(),
        "targets": head.targets(returns).flatten(),
        "old_values": head.targets(values).flatten(),
        "old_log_probs": log_probs.flatten(),
    }


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
