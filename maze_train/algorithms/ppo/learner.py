"""Learner and trainer of PPO."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from maze_train.algorithms.actor_critic.batch import (
    ActorCriticBatch,
    EvaluatedRollout,
    PreparedRollout,
)
from maze_train.algorithms.actor_critic.learner import ActorCriticEvents, ActorCriticLearner
from maze_train.algorithms.actor_critic.trainer import ActorCritic
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, Statistics
from maze_train.core.types import Tensor, send
from maze_train.data.rollout import Rollout
from maze_train.functional.losses import (
    MAX_LOG_RATIO,
    approximate_kl,
    clip_bounds,
    clip_fraction,
    clipped_surrogate_loss,
)
from maze_train.learner.config import Progress, is_adaptive
from maze_train.learner.events import statistics_of
from maze_train.learner.modules import current
from maze_train.nets.actor_critic import ActorCriticModel

DIVERGENCE = "kl"
"""Name of the KL divergence in `Statistics.keep`."""


class PPOLearner(ActorCriticLearner[PPOAlgorithmConfig]):
    """Proximal policy optimization with the clipped surrogate objective.

    Runs several optimization epochs over each rollout in shuffled minibatches, with policy loss
    -mean(min(r_t A_t, clip(r_t, 1 - c, 1 + c) A_t)), r_t = pi(a_t | s_t) / pi_old(a_t | s_t).

    Source: Schulman et al. (2017), arXiv:1707.06347, eq. 7 and algorithm 1.
    """

    scheduled_settings: ClassVar[Mapping[str, Event]] = {
        **ActorCriticLearner.scheduled_settings,
        "clip_range": ActorCriticEvents.clip_range,
    }
    analytic_gradients: ClassVar[Mapping[str, object]] = {"value_clip_range": 0.0}

    def check_module(self, module_id: str, module: nn.Module) -> None:
        """Raise if the module is not supported, in general or with value clipping."""
        super().check_module(module_id, module)
        value_clip_range = self.config_of(module_id).value_clip_range
        is_categorical = isinstance(module, ActorCriticModel) and module.value_head.support
        if value_clip_range > 0 and is_categorical:
            raise ConfigError(
                "algorithm.value_clip_range",
                "value clipping is not supported for a categorical critic (model.value_support); "
                "set it to 0",
                value_clip_range,
            )

    def old_log_probs(
        self, model: ActorCriticModel, rollout: Rollout, evaluated: EvaluatedRollout
    ) -> Tensor:
        """Log-probabilities under the behaviour policy, `[T * B]`.

        Log-probabilities stored in the rollout take precedence, because a multi-agent turn may have
        started in the previous rollout, with older weights. Missing log-probabilities are computed
        before the update.
        """
        if rollout.log_probs is not None:
            return rollout.log_probs.flatten()
        return super().old_log_probs(model, rollout, evaluated)

    def minibatches(
        self, prepared: Mapping[str, PreparedRollout], statistics: Statistics
    ) -> Iterator[Mapping[str, ActorCriticBatch]]:
        """Yield shuffled minibatches of samples, or of sequences if the policy is recurrent."""
        rollouts = {key: rollout for key, rollout in prepared.items() if rollout.num_units}
        for optimization_epoch in range(self.config.n_optimization_epochs):
            if optimization_epoch and self.config.recompute_advantages:
                rollouts = {
                    module_id: self.with_new_advantages(module_id, rollout)
                    for module_id, rollout in rollouts.items()
                }
            shuffled = {
                module_id: self._shuffled(rollout) for module_id, rollout in rollouts.items()
            }
            while minibatch := {
                module_id: batch
                for module_id, batches in shuffled.items()
                if module_id not in self.stopped and (batch := next(batches, None)) is not None
            }:
                yield minibatch

    def _size(self, rollout: PreparedRollout) -> int:
        """Return the number of transitions per minibatch, or the equivalent number of sequences."""
        return max(1, self.config.batch_size // rollout.sequence_length)

    def _count(self, rollout: PreparedRollout) -> int:
        """Return the number of minibatches per optimization epoch if configured, otherwise 0."""
        return min(self.config.n_minibatches or 0, rollout.num_units)

    def _shuffled(self, rollout: PreparedRollout) -> Iterator[ActorCriticBatch]:
        size, count = self._size(rollout), self._count(rollout)
        for units in minibatch_indices(rollout.num_units, size, self.generator, self.device, count):
            yield rollout.select(units)

    def record_policy_change(
        self, module_id: str, log_probs: Tensor, batch: ActorCriticBatch, statistics: Statistics
    ) -> None:
        """Record KL divergence and clip fraction, for `target_kl` and `adaptive_kl`."""
        config = self.config_of(module_id)
        log_ratios = log_probs - batch.old_log_probs
        divergence = approximate_kl(log_ratios)
        if config.target_kl > 0 or is_adaptive(config.lr):
            statistics.keep(DIVERGENCE, divergence)
        events, clip_range = ActorCriticEvents, current(config.clip_range)
        statistics.record(events.approximate_kl, divergence, batch.size)
        statistics.record(events.clip_fraction, clip_fraction(log_ratios, clip_range), batch.size)

    def policy_loss(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        config: PPOAlgorithmConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Clipped surrogate loss, 0-d."""
        log_ratios = log_probs - batch.old_log_probs
        return clipped_surrogate_loss(log_ratios, advantages, current(config.clip_range))

    def policy_loss_gradient(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        config: PPOAlgorithmConfig,
    ) -> Tensor:
        """Gradient of the policy loss, `[n]`: -r A / n, or 0 if clipped."""
        log_ratios = log_probs - batch.old_log_probs
        bounds = clip_bounds(advantages, current(config.clip_range))
        gains = log_ratios.clamp(max=MAX_LOG_RATIO).exp().mul_(advantages)
        inside = (gains <= bounds) & (log_ratios <= MAX_LOG_RATIO)
        return gains.mul_(inside).mul_(-1.0 / gains.numel())

    def value_loss(
        self,
        model: ActorCriticModel,
        raw_values: Tensor,
        batch: ActorCriticBatch,
        config: PPOAlgorithmConfig,
    ) -> Tensor:
        """Value loss, 0-d; clipped if `value_clip_range` is set."""
        return model.value_head.loss(
            raw_values, batch.targets, batch.old_values, config.value_clip_range
        )

    def modules_to_stop(self, kept: Mapping[str, Mapping[str, Tensor]]) -> Collection[str]:
        """Return the policies whose KL divergence exceeds `target_kl`.

        This method also adapts `adaptive_kl` learning rates before each gradient step except the
        first, in which the divergence is 0. With accumulation, the first minibatch of a step
        determines the rate.
        """
        divergences = kept.get(DIVERGENCE, {})
        if self.steps.taken and not self.steps.pending:
            for module_id, divergence in divergences.items():
                for _, optimizer in self.get_optimizers_for_module(module_id):
                    optimizer.adapt_lr(divergence)
        bound = self.config.target_kl
        # Read on the host, to decide whether to take the gradient step.
        return {key for key, own in divergences.items() if float(own) > bound} if bound > 0 else ()

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Update observation statistics, and record adapted learning rates."""
        super().after_gradient_based_update(progress, statistics)
        for module_id in self.modules:
            optimizers = self.get_optimizers_for_module(module_id)
            if optimizers and self.may_learn(module_id) and is_adaptive(optimizers[0][1].lr):
                own = statistics_of(module_id, statistics)
                own.record(ActorCriticEvents.learning_rate, optimizers[0][1].set_lr(progress))


def minibatch_indices(
    num_samples: int,
    batch_size: int,
    generator: torch.Generator,
    device: torch.device,
    count: int = 0,
) -> Iterator[Tensor]:
    """Yield the indices of shuffled minibatches for one pass over `num_samples` samples.

    If N is not divisible by the batch size, the last minibatch is smaller; no sample is repeated or
    dropped. With `count`, the first N mod count minibatches have an additional sample.

    Args:
        num_samples: N, >= 1.
        batch_size: Samples per minibatch, >= 1.
        generator: Random generator on the CPU, so that the order is the same on every device.
        device: Device of the indices.
        count: Number of minibatches, in [1, N]; 0: use `batch_size`.

    Yields:
        Indices into the samples, int64.
    """
    # Copies from pinned memory do not synchronise the device.
    pinned = device.type == "cuda"
    order = send(torch.randperm(num_samples, generator=generator, pin_memory=pinned), device)
    yield from order.tensor_split(count) if count else torch.split(order, batch_size)


class PPO(ActorCritic):
    """Trainer for PPO, which alternates rollouts and optimization epochs; see `PPOLearner`."""
