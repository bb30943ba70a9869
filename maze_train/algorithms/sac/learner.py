"""Learner, trainer and events of SAC."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from maze_train.algorithms.off_policy.learner import (
    POLICY,
    PolicyAndCriticsEvents,
    PolicyAndCriticsLearner,
)
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.algorithms.sac.model import SoftActorCriticModel
from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.targets import TARGET, locate
from maze_train.core.types import Tensor
from maze_train.data.replay import Transitions
from maze_train.functional.losses import soft_policy_loss, soft_state_values, temperature_loss
from maze_train.nets.critics import constant


class SAC(OffPolicy):
    """Trainer for SAC; see `SACLearner`."""


class SACEvents(PolicyAndCriticsEvents):
    """Statistics of SAC learners, averaged over gradient steps unless stated otherwise."""

    policy_entropy = Event("Entropy of the policy in nats, for actions scaled to [-1, 1].")
    target_entropy = Event("Target entropy in nats.")
    entropy_coef = Event("Temperature, averaged over the parts of the action.")
    temperature_loss = Event("Temperature loss.")


TEMPERATURE = "temperature"
TARGET_NOISE, POLICY_NOISE = "target_noise", "policy_noise"

DISCRETE_SHARE = 0.98
"""Target entropy of discrete actions as a fraction of the maximum entropy.

Source: Christodoulou (2019), arXiv:1910.07207, section 5.1.
"""


class SACLearner(PolicyAndCriticsLearner[SACAlgorithmConfig, SoftActorCriticModel]):
    """Learner of SAC: gradient steps of critics, policy and temperatures on each batch.

    Targets are treated as constants in the critic loss, and critics and temperatures as constants
    in the policy loss.

    Source: Haarnoja et al. (2018), arXiv:1812.05905, algorithm 1.

    Args:
        modules: Soft actor-critic models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the actions sampled in the losses.
    """

    required_apis = (SoftActorCriticModel,)
    policy_optimizers = (POLICY, TEMPERATURE)

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """Register one optimizer each for the policy, the critics and tuned temperatures."""
        super().configure_optimizers_for_module(module_id)
        config, model = self.config_of(module_id), self.model(module_id)
        if not (config.entropy_tuning and model.has_temperatures):
            model.set_temperatures(config.entropy_coef)
        model.log_temperatures.requires_grad_(config.entropy_tuning)
        if config.entropy_tuning:
            _check_entropies(model)
            node = dict(config.optimizer)
            if "weight_decay" in inspect.signature(locate(node[TARGET])).parameters:
                node["weight_decay"] = 0.0  # Weight decay would pull the temperatures towards 1.
            rate = config.lr if config.entropy_coef_lr is None else config.entropy_coef_lr
            self.register_optimizer(
                module_id,
                TEMPERATURE,
                optimizer=node,
                params=[model.log_temperatures],
                lr_or_lr_schedule=rate,
            )

    def noise_columns(self, config: SACAlgorithmConfig) -> Sequence[str]:
        """Return the names of the noise columns for target actions and for the policy loss."""
        is_due = self.policy_is_due(self.gradient_steps)
        return [TARGET_NOISE, POLICY_NOISE] if is_due else [TARGET_NOISE]

    def critic_loss(self, module_id: str, batch: Transitions, statistics: Statistics) -> Tensor:
        """Critic loss, 0-d."""
        temperatures = _temperatures(self.model(module_id))
        statistics.record(SACEvents.entropy_coef, temperatures.mean())
        return super().critic_loss(module_id, batch, statistics)

    @torch.no_grad()
    def targets(
        self, model: SoftActorCriticModel, batch: Transitions, config: SACAlgorithmConfig
    ) -> Tensor:
        """Targets y = Σ γ^i r + γ^k V'(s'), with the soft values of the target critics, `[n]`."""
        inputs = model.inputs(batch.next_obs)
        params = model.params_of(inputs, batch.next_obs)
        sample = model.actions.sample(params, batch[TARGET_NOISE])
        q = model.target_critics(inputs, sample.features)
        values = soft_state_values(q, model.entropy_terms(sample, _temperatures(model)))
        return torch.addcmul(batch.rewards, batch.discounts, values)

    def policy_loss(self, module_id: str, batch: Transitions, statistics: Statistics) -> Tensor:
        """Loss of the policy and of tuned temperatures, 0-d, with constant critics."""
        config, model = self.config_of(module_id), self.model(module_id)
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
            features = model.critics.encode(inputs)
        params = model.params_of(inputs, batch.obs)
        sample = model.actions.sample(params, batch[POLICY_NOISE])
        with constant(model.critics):
            q = model.critics.values(features, sample.features)
        loss = soft_policy_loss(q, model.entropy_terms(sample, _temperatures(model)))
        entropies = model.actions.neg_log_probs(sample)
        statistics.record(SACEvents.policy_loss, loss)
        statistics.record(SACEvents.policy_entropy, entropies.sum(1).mean())
        if config.entropy_tuning:
            loss = loss + self._temperature_loss(model, params, entropies, config, statistics)
        return loss

    def _temperature_loss(
        self,
        model: SoftActorCriticModel,
        params: Tensor,
        entropies: Tensor,
        config: SACAlgorithmConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Temperature loss, 0-d."""
        targets = model.actions.target_entropies(
            params.detach(), config.target_entropy_multiplier, DISCRETE_SHARE
        )
        loss = temperature_loss(model.log_temperatures, entropies, targets)
        statistics.record(SACEvents.target_entropy, targets.sum(-1).mean())
        statistics.record(SACEvents.temperature_loss, loss)
        return loss


def _temperatures(model: SoftActorCriticModel) -> Tensor:
    """Return the detached temperatures of the action components, `[P]`."""
    return model.log_temperatures.detach().exp()


def _check_entropies(model: SoftActorCriticModel) -> None:
    """Raise if a distribution has a fixed entropy, because its temperature would diverge."""
    for part in model.actions.parts:
        if part.has_fixed_entropy:
            raise ConfigError(
                "model.distributions",
                "the entropy of the distribution is fixed, so the temperature cannot be tuned "
                "(always the case for td3): train a base_run of sac with "
                "'model.distributions={Box: squashed_gaussian}', or set "
                "algorithm.entropy_tuning=false",
                type(part).__name__,
            )
