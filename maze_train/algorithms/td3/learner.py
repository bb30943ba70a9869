"""Learner, trainer and events of TD3."""

from __future__ import annotations

from typing import Any

import torch

from maze_train.algorithms.off_policy.learner import PolicyAndCriticsEvents, PolicyAndCriticsLearner
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.algorithms.td3.model import TD3Model
from maze_train.core.events import Event, Statistics
from maze_train.core.types import Tensor, TensorTree
from maze_train.data.replay import Transitions
from maze_train.learner.config import Progress
from maze_train.nets.critics import constant


class TD3Events(PolicyAndCriticsEvents):
    """Statistics of TD3 learners, means over gradient steps unless said otherwise."""

    saturation = Event("Share of the numbers of the policy's actions beyond 0.99 of their bounds.")
    exploration_noise_stddev = Event(
        "Standard deviation of the noise of actions in the last update.", reduce="last"
    )


SATURATED = 0.99
"""Size from which on an action scaled to [-1, 1] counts as saturated."""


class TD3Learner(PolicyAndCriticsLearner[TD3AlgorithmConfig, TD3Model]):
    """TD3: critics learn in every gradient step, the policy and all targets in some.

    Source: Fujimoto et al. (2018), arXiv:1802.09477, algorithm 1; here both gradients are taken at
    the same weights.

    Args:
        modules: Models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Seed of the noise of target actions.
    """

    @property
    def updates_policy(self) -> bool:
        """Whether the policy takes part in the next gradient step: the last one of an interval."""
        return (self.gradient_steps + 1) % self.config.policy_update_interval == 0

    @property
    def target_update_interval(self) -> int:
        """Gradient steps from one update of the targets to the next."""
        return self.config.target_update_interval * self.config.policy_update_interval

    def num_draws(self, config: TD3AlgorithmConfig) -> int:
        """The noise of target actions, if there is any."""
        return int(config.target_noise_stddev > 0)

    @torch.no_grad()
    def targets(self, model: TD3Model, batch: Transitions, config: TD3AlgorithmConfig) -> Tensor:
        """Targets of the critics, `[n]`.

        y = Σ γ^i r + γ^k min_e Q'_e(s', a'),  a' = clip(μ'(s') + clip(σ ε, -c, c), -1, 1)

        Source: Fujimoto et al. (2018), arXiv:1802.09477, eq. 10, 14 and 15.
        """
        inputs = model.inputs(batch.next_obs)
        actions = model.actions_of(model.target_policy, inputs)
        if config.target_noise_stddev:
            noise = self.draw_noise(model, len(actions)) * config.target_noise_stddev
            bound = config.target_noise_clip
            actions = (actions + noise.clamp(-bound, bound)).clamp(-1.0, 1.0)
        values = model.target_critics(inputs, actions).amin(0).squeeze(-1)
        return torch.addcmul(batch.rewards, batch.discounts, values)

    def policy_loss(
        self,
        model: TD3Model,
        batch: Transitions,
        inputs: TensorTree,
        features: Any,
        config: TD3AlgorithmConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the policy, 0-d: L = -mean(Q_1(s, μ(s))), the critic is a constant.

        Source: Silver et al. (2014), deterministic policy gradient algorithms, eq. 9.
        """
        actions = model.actions_of(model.policy, inputs)
        with constant(model.critics):
            loss = model.critics.values(features, actions, first=1).mean().neg()
        statistics.record(TD3Events.policy_loss, loss)
        statistics.record(TD3Events.saturation, (actions.abs() > SATURATED).float().mean())
        return loss


class TD3(OffPolicy):
    """TD3: acts with noise of a standard deviation that may change; see `TD3Learner`."""

    algorithm_config: TD3AlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set the noise, step the environments, and learn meanwhile."""
        setting = self.algorithm_config.exploration_noise_stddev
        self.explore(TD3Events.exploration_noise_stddev, setting, progress, statistics)
        return super().update_once(progress, statistics)
