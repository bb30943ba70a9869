"""Learner, trainer and events of TD3."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze_train.algorithms.off_policy.learner import PolicyAndCriticsEvents, PolicyAndCriticsLearner
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.algorithms.td3.config import TD3AlgorithmConfig
from maze_train.algorithms.td3.model import TD3Model
from maze_train.core.events import Event, Statistics
from maze_train.core.types import Tensor
from maze_train.data.replay import Transitions
from maze_train.learner.config import Progress
from maze_train.nets.critics import constant


class TD3Events(PolicyAndCriticsEvents):
    """Statistics of TD3 learners, averaged over gradient steps unless stated otherwise."""

    saturation = Event("Fraction of action components within 1 % of their bounds.")
    exploration_noise_stddev = Event(
        "Standard deviation of the exploration noise in the last update.", reduce="last"
    )


TARGET_NOISE = "target_noise"

SATURATED = 0.99
"""Absolute value above which an action scaled to [-1, 1] counts as saturated."""


class TD3Learner(PolicyAndCriticsLearner[TD3AlgorithmConfig, TD3Model]):
    """Learner of TD3: policy and target networks are updated less often than the critics.

    Source: Fujimoto et al. (2018), arXiv:1802.09477, algorithm 1.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the target policy smoothing noise.
    """

    required_apis = (TD3Model,)

    def policy_is_due(self, step: int) -> bool:
        """Return whether a gradient step updates the policy (the last step of each interval)."""
        return (step + 1) % self.config.policy_update_interval == 0

    @property
    def target_update_interval(self) -> int:
        """Number of gradient steps between updates of the target networks."""
        return self.config.target_update_interval * self.config.policy_update_interval

    def noise_columns(self, config: TD3AlgorithmConfig) -> Sequence[str]:
        """Return the names of the noise columns for target actions, if noise is used."""
        return [TARGET_NOISE] if config.target_noise_stddev > 0 else []

    @torch.no_grad()
    def targets(self, model: TD3Model, batch: Transitions, config: TD3AlgorithmConfig) -> Tensor:
        """Compute the targets of the critics, `[n]`.

        y = Σ γ^i r + γ^k min_e Q'_e(s', a'),  a' = clip(μ'(s') + clip(σ ε, -c, c), -1, 1)

        Source: Fujimoto et al. (2018), arXiv:1802.09477, eq. 10, 14 and 15.
        """
        inputs = model.inputs(batch.next_obs)
        actions = model.actions_of(model.target_policy, inputs)
        if config.target_noise_stddev:
            noise = batch[TARGET_NOISE] * config.target_noise_stddev
            bound = config.target_noise_clip
            actions = (actions + noise.clamp(-bound, bound)).clamp(-1.0, 1.0)
        values = model.target_critics(inputs, actions).amin(0).squeeze(-1)
        return torch.addcmul(batch.rewards, batch.discounts, values)

    def policy_loss(self, module_id: str, batch: Transitions, statistics: Statistics) -> Tensor:
        """Policy loss L = -mean(Q_1(s, μ(s))), 0-d, with constant critics.

        Source: Silver et al. (2014), deterministic policy gradient algorithms, eq. 9.
        """
        model = self.model(module_id)
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
            features = model.critics.encode(inputs)
        actions = model.actions_of(model.policy, inputs)
        with constant(model.critics):
            loss = model.critics.values(features, actions, first=1).mean().neg()
        statistics.record(TD3Events.policy_loss, loss)
        statistics.record(TD3Events.saturation, (actions.abs() > SATURATED).float().mean())
        return loss


class TD3(OffPolicy):
    """Trainer for TD3 with exploration noise; see `TD3Learner`."""

    algorithm_config: TD3AlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set the exploration noise, step the environments and take gradient steps."""
        setting = self.algorithm_config.exploration_noise_stddev
        self.explore(TD3Events.exploration_noise_stddev, setting, progress, statistics)
        return super().update_once(progress, statistics)
