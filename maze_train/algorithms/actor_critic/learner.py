"""What learners of on-policy actor-critics share: advantages, value loss, entropy bonus."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from maze_train.algorithms.actor_critic.batch import ActorCriticBatch
from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.algorithms.actor_critic.events import ActorCriticEvents
from maze_train.data.rollout import Rollout
from maze_train.functional.gradients import loss_by_hand
from maze_train.functional.returns import (
    discounts_and_lambdas,
    explained_variance,
    lambda_advantages,
    normalize_advantages,
)
from maze_train.learner.learner import Learner
from maze_train.learner.progress import scheduled_value
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.trees import tree_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.events import Statistics
    from maze_train.learner.progress import Progress
    from maze_train.types import Tensor, TensorTree

__all__ = ["ActorCriticLearner"]

Config = TypeVar("Config", bound=ActorCriticConfig)


class ActorCriticLearner(Learner[Rollout, ActorCriticBatch], Generic[Config]):
    """Base of the learners of on-policy actor-critics.

    Loss = policy_loss_coef * policy loss + value_loss_coef * value loss - entropy_coef * entropy;
    a subclass gives the policy loss.

    Args:
        modules: Actor-critic models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Seed of the order of minibatches.
    """

    def __init__(
        self,
        modules: ActorCriticModel | Mapping[str, ActorCriticModel],
        config: Config,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config
        self._entropy_coef = 0.0
        self._burn_in = False
        super().__init__(
            modules,
            optimizer=config.optimizer,
            lr=config.lr,
            grad_clip=config.max_grad_norm,
            grad_clip_by=config.grad_clip_by,
            device=device,
            seed=seed,
        )

    def model(self, module_id: str) -> ActorCriticModel:
        """A module under its type."""
        module = self.modules[module_id]
        assert isinstance(module, ActorCriticModel)
        return module

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Set scheduled coefficients; while the critic burns in, it alone learns."""
        super().before_gradient_based_update(progress, statistics)
        self._burn_in = progress.epoch < self.config.critic_burn_in_epochs
        if progress.updates == self.config.critic_burn_in_epochs * self.config.epoch_length > 0:
            # The policy's moments are still zero, but their bias correction is used up: its first
            # steps would be several times too large.
            for optimizer in self.optimizers.values():
                optimizer.reset()
        self._entropy_coef = scheduled_value(self.config.entropy_coef, progress)
        statistics.record(ActorCriticEvents.entropy_coef, self._entropy_coef)

    # -- targets ---------------------------------------------------------------------------------

    @torch.no_grad()
    def preprocess(
        self, module_id: str, experience: Rollout, statistics: Statistics
    ) -> ActorCriticBatch:
        """Advantages and targets of a rollout, flattened to N = T * B samples."""
        rollout = experience.to(self.device)
        model = self.model(module_id)
        steps = rollout.num_steps
        obs = tree_map(lambda x: x[:steps].flatten(0, 1), rollout.obs)
        actions = tree_map(lambda x: x.flatten(0, 1), rollout.actions)
        value_columns = self._value_columns(model, rollout, statistics)
        columns = torch.stack([*value_columns, self.old_log_probs(model, obs, actions)])
        return ActorCriticBatch(obs, actions, columns, rollout)

    @torch.no_grad()
    def with_new_advantages(self, module_id: str, batch: ActorCriticBatch) -> ActorCriticBatch:
        """The batch with advantages, targets and values of the critic as it is now."""
        assert batch.rollout is not None
        value_columns = self._value_columns(self.model(module_id), batch.rollout)
        return replace(batch, columns=torch.stack([*value_columns, batch.old_log_probs]))

    def _value_columns(
        self, model: ActorCriticModel, rollout: Rollout, statistics: Statistics | None = None
    ) -> list[Tensor]:
        """Advantages, targets and old values of a rollout, each `[T * B]`.

        Statistics are taken of the values at collection only, not of those recomputed later.
        """
        values, next_values = state_values(model, rollout)
        discounts, lambdas = discounts_and_lambdas(
            rollout.terminated,
            rollout.truncated,
            self.config.gamma,
            self.config.gae_lambda,
            dtype=rollout.rewards.dtype,
        )
        advantages = lambda_advantages(rollout.rewards, discounts, values, next_values, lambdas)
        returns = advantages + values
        if statistics is not None:
            events = ActorCriticEvents
            statistics.record(events.explained_variance, explained_variance(values, returns))
            statistics.record(events.values_mean, values.mean())
            statistics.record(events.returns_mean, returns.mean())
        head = model.value_head
        columns = (advantages, head.targets(returns), head.targets(values))
        return [column.flatten() for column in columns]

    def old_log_probs(
        self, model: ActorCriticModel, obs: TensorTree, actions: TensorTree
    ) -> Tensor:
        """Log-probabilities under the policy that acted, whose weights these still are, `[N]`."""
        return model.distribution.log_prob(model.policy_params(obs), actions)

    # -- losses ----------------------------------------------------------------------------------

    def compute_loss_for_module(
        self, module_id: str, batch: ActorCriticBatch, statistics: Statistics
    ) -> Tensor:
        """The weighted sum of policy loss, value loss and entropy bonus, 0-d.

        Its gradients are derived by hand, see `loss_by_hand`.
        """
        config, model = self.config, self.model(module_id)
        params, raw_values, write_gradients = model.vjp(batch.obs)
        value_loss, d_raw_values = self.value_loss(model, raw_values, batch)
        d_raw_values = d_raw_values.mul_(config.value_loss_coef)
        loss = value_loss * config.value_loss_coef
        statistics.record(ActorCriticEvents.value_loss, value_loss, batch.size)
        if self._burn_in:
            return loss_by_hand(loss, (None, d_raw_values), write_gradients)
        policy_part, d_params = self._policy_part(model, params, batch, statistics)
        return loss_by_hand(loss + policy_part, (d_params, d_raw_values), write_gradients)

    def _policy_part(
        self,
        model: ActorCriticModel,
        params: Tensor,
        batch: ActorCriticBatch,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor]:
        """Weighted policy loss and entropy bonus, 0-d, and their gradient, `[n, param_size]`."""
        config, events, size = self.config, ActorCriticEvents, batch.size
        log_probs, entropy, params_gradient = model.distribution.log_prob_and_entropy_vjp(
            params, batch.actions
        )
        advantages = batch.advantages
        if config.normalize_advantage:
            advantages = normalize_advantages(advantages)
        policy_loss, d_log_probs = self.policy_loss(log_probs, advantages, batch, statistics)
        mean_entropy = entropy.mean()
        statistics.record(events.policy_loss, policy_loss, size)
        statistics.record(events.policy_entropy, mean_entropy, size)
        d_params = params_gradient(
            d_log_probs.mul_(config.policy_loss_coef), -self._entropy_coef / size
        )
        loss = config.policy_loss_coef * policy_loss - self._entropy_coef * mean_entropy
        return loss, d_params

    def value_loss(
        self, model: ActorCriticModel, raw_values: Tensor, batch: ActorCriticBatch
    ) -> tuple[Tensor, Tensor]:
        """Loss of the critic, 0-d, and its gradient with respect to `raw_values`."""
        return model.value_head.loss_and_gradient(raw_values, batch.targets, batch.old_values)

    @abstractmethod
    def policy_loss(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor]:
        """Loss of the policy.

        Args:
            log_probs: Log-probabilities of the actions under the current policy, `[n]`.
            advantages: Advantages, normalised if the settings say so, `[n]`.
            batch: The minibatch.
            statistics: Takes what is worth reporting.

        Returns:
            Loss, 0-d, and its gradient with respect to `log_probs`, `[n]`, a new tensor.
        """


def state_values(model: ActorCriticModel, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Values of a rollout's states and of their true successors.

    Args:
        model: Model whose critic is asked.
        rollout: T steps of B environments.

    Returns:
        v(s_t) and v(s_{t+1}), both `[T, B]`. Where the step was truncated, the successor is the
        last observation of that episode and not the first of the next one.
    """
    steps, num_envs = rollout.rewards.shape
    values = model.values(tree_map(lambda x: x.flatten(0, 1), rollout.obs)).view(-1, num_envs)
    next_values = values[1:]
    if len(rollout.final_positions):
        final_values = model.values(rollout.final_obs)
        next_values = next_values.clone()
        next_values.view(-1)[rollout.final_positions] = final_values
    return values[:steps], next_values
