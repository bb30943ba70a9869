"""Learner of SAC."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.events import SACEvents
from maze_train.functional.gradients import loss_by_hand
from maze_train.functional.soft_actor_critic import (
    critic_loss_and_gradient,
    soft_policy_loss_and_gradients,
    soft_state_values,
    temperature_loss_and_gradient,
)
from maze_train.nets.blocks import add_gradient
from maze_train.nets.soft_actor_critic import SoftActorCriticModel
from maze_train.targets import TARGET, locate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maze_train.data.transitions import Transitions
    from maze_train.events import Statistics
    from maze_train.learner.optimizers import ModuleOptimizer
    from maze_train.learner.progress import Progress
    from maze_train.nets.critics import EncodedObservations
    from maze_train.types import Tensor, TensorTree

__all__ = ["SACLearner"]

POLICY, CRITICS, TEMPERATURE = "policy", "critics", "temperature"

DISCRETE_SHARE = 0.98
"""Share of the largest possible entropy that discrete actions steer at.

Source: Christodoulou (2019), arXiv:1910.07207, section 5.1.
"""


class SACLearner(OffPolicyLearner[SACAlgorithmConfig]):
    """Soft actor-critic: one gradient step of critics, policy and temperatures on each batch.

    The three gradients are taken at the same weights, and none of them reaches what belongs to
    another: the targets and the policy's own action are constants of the critics' loss, critics and
    temperatures are constants of the policy's. They are derived by hand where the networks are
    those of the package.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, algorithm 1.

    Args:
        modules: Soft actor-critic models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Seed of the actions that losses are taken of.
    """

    def model(self, module_id: str) -> SoftActorCriticModel:
        """A module under its type."""
        module = self.modules[module_id]
        assert isinstance(module, SoftActorCriticModel)
        return module

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """One optimizer each for policy, critics, and temperatures that are tuned."""
        config, model = self.config, self.model(module_id)
        with torch.no_grad():
            model.log_temperatures.fill_(math.log(config.entropy_coef))
        model.log_temperatures.requires_grad_(config.entropy_tuning)
        parts = {
            POLICY: (list(model.policy.parameters()), config.lr),
            CRITICS: (list(model.critics.parameters()), config.critic_lr),
            TEMPERATURE: ([model.log_temperatures], config.entropy_coef_lr),
        }
        for name, (params, lr) in parts.items():
            if any(param.requires_grad for param in params):
                rate = config.lr if lr is None else lr
                node = dict(config.optimizer)
                if name == TEMPERATURE and _has_weight_decay(node):
                    node["weight_decay"] = 0.0  # it would pull temperatures to 1
                self.register_optimizer(module_id, params, node, rate, name)

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Set learning rates; that of the policy is reported."""
        for (_, name), optimizer in self.optimizers.items():
            rate = optimizer.set_lr(progress)
            if name == POLICY:
                statistics.record(SACEvents.learning_rate, rate)

    # -- one gradient step -----------------------------------------------------------------------

    @property
    def updates_policy(self) -> bool:
        """Whether policy and temperatures take part in the next gradient step."""
        return self.gradient_steps % self.config.policy_update_interval == 0

    def active_optimizers(self, losses: Mapping[str, Tensor]) -> list[ModuleOptimizer]:
        """All optimizers, or those of the critics while the policy waits."""
        return [
            optimizer
            for (module_id, name), optimizer in self.optimizers.items()
            if module_id in losses and (name == CRITICS or self.updates_policy)
        ]

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """The sum of the losses of critics, policy and temperatures, 0-d."""
        model = self.model(module_id)
        alphas = model.log_temperatures.detach().exp()
        statistics.record(SACEvents.entropy_coef, alphas.mean())
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
        encoded = model.critics.encode(inputs)
        loss, d_q, write_critics = self._critic_loss(model, batch, encoded, alphas, statistics)
        if not self.updates_policy:
            return loss_by_hand(loss, (d_q,), write_critics)
        policy_loss, gradients, write_policy = self._policy_loss(
            model, batch, inputs, encoded, alphas, statistics
        )

        def write(d_q: Tensor, *gradients: Tensor | None) -> None:
            write_critics(d_q)
            write_policy(*gradients)

        return loss_by_hand(loss + policy_loss, (d_q, *gradients), write)

    @torch.no_grad()
    def soft_targets(
        self, model: SoftActorCriticModel, batch: Transitions, alphas: Tensor
    ) -> Tensor:
        """Targets y = Σ γ^i r + γ^k V'(s'), with the values of the target critics, `[n]`."""
        inputs = model.inputs(batch.next_obs)
        params = model.params_of(inputs, batch.next_obs)
        sample = model.actions.sample(params, self._noise(model, params))
        q = model.target_critics(inputs, sample.features)
        values = soft_state_values(q, model.entropy_terms(sample, alphas))
        return torch.addcmul(batch.rewards, batch.discounts, values)

    def _critic_loss(
        self,
        model: SoftActorCriticModel,
        batch: Transitions,
        encoded: EncodedObservations,
        alphas: Tensor,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor, Callable[[Tensor], None]]:
        """Loss of the critics, its gradient for their values, and what writes it on from there."""
        targets = self.soft_targets(model, batch, alphas)
        actions = model.actions
        q, write_gradients = model.critics.vjp(encoded, actions.critic_input(batch.actions))
        choices = actions.choices(batch.actions)
        loss, d_q, errors = critic_loss_and_gradient(q, choices, targets, batch.weights)
        if batch.weights is not None:
            self.errors = errors.abs().mean(0)
        statistics.record(SACEvents.critic_loss, loss)
        statistics.record(SACEvents.critic_value, errors.mean() + targets.mean())
        if errors.shape[0] > 1:
            statistics.record(SACEvents.critic_spread, (errors.amax(0) - errors.amin(0)).mean())
        return loss, d_q, write_gradients

    def _policy_loss(
        self,
        model: SoftActorCriticModel,
        batch: Transitions,
        inputs: TensorTree,
        encoded: EncodedObservations,
        alphas: Tensor,
        statistics: Statistics,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], Callable[..., None]]:
        """Loss of policy and temperatures, gradients of its parts, and what writes these on.

        The gradients are those of `soft_policy_loss_and_gradients` and of the temperatures.
        """
        params, write_policy = model.params_vjp(inputs, batch.obs)
        sample, params_gradient = model.actions.sample_vjp(params, self._noise(model, params))
        q, action_gradient = model.critics.action_vjp(encoded, sample.features)
        terms = model.entropy_terms(sample, alphas)
        loss, d_q, d_log_probs, costs = soft_policy_loss_and_gradients(q, terms)
        entropies = model.actions.neg_log_probs(sample)
        statistics.record(SACEvents.policy_loss, loss)
        statistics.record(SACEvents.policy_entropy, entropies.sum(1).mean())
        d_temperatures = None
        if self.config.entropy_tuning:
            temperature_loss, d_temperatures = self._temperature_loss(
                model, params, entropies, statistics
            )
            loss = loss + temperature_loss

        def write(
            d_q: Tensor, d_log_probs: Tensor, costs: Tensor | None, d_temperatures: Tensor | None
        ) -> None:
            d_features = action_gradient(d_q) if sample.features.shape[1] else None
            write_policy(params_gradient(d_features, d_log_probs, costs))
            if d_temperatures is not None:
                add_gradient(model.log_temperatures, d_temperatures)

        return loss, (d_q, d_log_probs, costs, d_temperatures), write

    def _temperature_loss(
        self,
        model: SoftActorCriticModel,
        params: Tensor,
        entropies: Tensor,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor]:
        """Loss of the temperatures, 0-d, and its gradient, `[P]`."""
        targets = model.actions.target_entropies(
            params, self.config.target_entropy_multiplier, DISCRETE_SHARE
        )
        loss, gradient = temperature_loss_and_gradient(model.log_temperatures, entropies, targets)
        statistics.record(SACEvents.target_entropy, targets.sum(-1).mean())
        statistics.record(SACEvents.temperature_loss, loss)
        return loss, gradient

    def _noise(self, model: SoftActorCriticModel, params: Tensor) -> Tensor:
        noise = model.distribution.draw_noise(
            tuple(params.shape[:1]), self.generator, torch.device("cpu")
        )
        return noise.to(self.device)


def _has_weight_decay(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer shrinks parameters if nothing else is said."""
    return "weight_decay" in inspect.signature(locate(str(optimizer[TARGET]))).parameters
