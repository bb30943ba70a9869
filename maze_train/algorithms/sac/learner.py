"""Learner of SAC."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.events import SACEvents
from maze_train.functional.soft_actor_critic import (
    critic_loss,
    soft_policy_loss,
    soft_state_values,
    temperature_loss,
)
from maze_train.learner.gradients import constant
from maze_train.nets.soft_actor_critic import SoftActorCriticModel
from maze_train.targets import TARGET, locate
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.data.transitions import Transitions
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.learner.optimizers import ModuleOptimizer
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
    temperatures are constants of the policy's.

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
        features = model.critics.encode(inputs)
        loss = self.critic_loss(model, batch, features, alphas, statistics)
        if not self.updates_policy:
            return loss
        features = tree_map(torch.Tensor.detach, features)
        return loss + self.policy_loss(model, batch, inputs, features, alphas, statistics)

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

    def critic_loss(
        self,
        model: SoftActorCriticModel,
        batch: Transitions,
        features: Any,
        alphas: Tensor,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the critics, 0-d; `features` are what `critics.encode` makes of observations."""
        targets = self.soft_targets(model, batch, alphas)
        actions = model.actions
        q = model.critics.values(features, actions.critic_input(batch.actions))
        loss, errors = critic_loss(q, actions.choices(batch.actions), targets, batch.weights)
        if batch.weights is not None:
            self.errors = errors.abs().mean(0)
        statistics.record(SACEvents.critic_loss, loss)
        statistics.record(SACEvents.critic_value, errors.mean() + targets.mean())
        if errors.shape[0] > 1:
            statistics.record(SACEvents.critic_spread, (errors.amax(0) - errors.amin(0)).mean())
        return loss

    def policy_loss(
        self,
        model: SoftActorCriticModel,
        batch: Transitions,
        inputs: TensorTree,
        features: Any,
        alphas: Tensor,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the policy and of temperatures that are tuned, 0-d; critics are constants."""
        params = model.params_of(inputs, batch.obs)
        sample = model.actions.sample(params, self._noise(model, params))
        with constant(model.critics):
            q = model.critics.values(features, sample.features)
        loss = soft_policy_loss(q, model.entropy_terms(sample, alphas))
        entropies = model.actions.neg_log_probs(sample)
        statistics.record(SACEvents.policy_loss, loss)
        statistics.record(SACEvents.policy_entropy, entropies.sum(1).mean())
        if self.config.entropy_tuning:
            loss = loss + self._temperature_loss(model, params, entropies, statistics)
        return loss

    def _temperature_loss(
        self,
        model: SoftActorCriticModel,
        params: Tensor,
        entropies: Tensor,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the temperatures, 0-d."""
        targets = model.actions.target_entropies(
            params.detach(), self.config.target_entropy_multiplier, DISCRETE_SHARE
        )
        loss = temperature_loss(model.log_temperatures, entropies, targets)
        statistics.record(SACEvents.target_entropy, targets.sum(-1).mean())
        statistics.record(SACEvents.temperature_loss, loss)
        return loss

    def _noise(self, model: SoftActorCriticModel, params: Tensor) -> Tensor:
        noise = model.distribution.draw_noise(
            tuple(params.shape[:1]), self.generator, torch.device("cpu")
        )
        return noise.to(self.device)


def _has_weight_decay(optimizer: Mapping[str, Any]) -> bool:
    """Whether an optimizer shrinks parameters if nothing else is said."""
    return "weight_decay" in inspect.signature(locate(str(optimizer[TARGET]))).parameters
