"""Learner of DQN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.events import DQNEvents
from maze_train.algorithms.dqn.model import DQNModel
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.functional.losses import critic_loss
from maze_train.learner.apis import HasPolicy, HasTargets

if TYPE_CHECKING:
    from maze_train.data.transitions import Transitions
    from maze_train.events import Statistics
    from maze_train.types import Tensor


DELTA = {"huber": 1.0, "squared": math.inf}
"""Errors from which on a loss is linear."""


class DQNLearner(OffPolicyLearner[DQNAlgorithmConfig]):
    """Deep Q-learning: one gradient step of the values on each batch.

    Source: Mnih et al. (2015), doi:10.1038/nature14236, algorithm 1.

    Args:
        modules: Models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Unused: losses take no random numbers.
    """

    required_apis: ClassVar[tuple[type, ...]] = (HasPolicy, HasTargets)

    def model(self, module_id: str) -> DQNModel:
        """A module under its type."""
        module: Any = self.modules[module_id]
        assert isinstance(module, DQNModel)
        return module

    @torch.no_grad()
    def targets(self, model: DQNModel, batch: Transitions) -> Tensor:
        """Targets of the values, `[n]`.

        y = Σ γ^i r + γ^k Q'(s', a'),  a' = argmax_a Q(s', a), or Q' without `double_q`,

        over the legal actions.

        Source: Mnih et al. (2015), algorithm 1; van Hasselt et al. (2016), arXiv:1509.06461, eq. 4.
        """
        inputs = model.inputs(batch.next_obs)
        values: Tensor = model.target_policy(inputs)
        judged = model.policy(inputs) if self.config.double_q else values
        chosen = model.legal(judged, batch.next_obs).argmax(-1, keepdim=True)
        # A final observation may have no legal action: the values themselves are finite.
        return torch.addcmul(batch.rewards, batch.discounts, values.gather(-1, chosen).squeeze(-1))

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """Loss of the values, 0-d."""
        model = self.model(module_id)
        actions: Any = batch.actions
        targets, choices = self.targets(model, batch), model.distribution.choices(actions)
        q = model.policy(model.inputs(batch.obs)).unsqueeze(0)
        loss, errors = critic_loss(q, choices, targets, batch.weights, DELTA[self.config.loss])
        if batch.weights is not None:
            self.errors = errors.abs().squeeze(0)
        statistics.record(DQNEvents.critic_loss, loss)
        statistics.record(DQNEvents.critic_value, errors.mean() + targets.mean())
        return loss
