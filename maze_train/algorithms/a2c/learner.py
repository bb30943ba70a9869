"""How A2C changes weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.actor_critic.learner import ActorCriticLearner
from maze_train.functional.policy_loss import policy_gradient_loss_and_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maze_train.algorithms.actor_critic.batch import ActorCriticBatch
    from maze_train.events import Statistics
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.types import Tensor, TensorTree

__all__ = ["A2CLearner"]


class A2CLearner(ActorCriticLearner[A2CAlgorithmConfig]):
    """Advantage actor-critic: one gradient step on the whole rollout.

    Policy loss = -mean(log pi(a_t | s_t) * A_t).

    Source: Mnih et al. (2016), arXiv:1602.01783, section 4 (there with asynchronous workers).
    """

    def old_log_probs(
        self, model: ActorCriticModel, obs: TensorTree, actions: TensorTree
    ) -> Tensor:
        """Not used by this loss: zeros, `[N]`."""
        size = next(iter(obs.values())).shape[0] if isinstance(obs, dict) else obs.shape[0]
        return torch.zeros(size, device=self.device)

    def minibatches(
        self, prepared: Mapping[str, ActorCriticBatch], statistics: Statistics
    ) -> Iterator[Mapping[str, ActorCriticBatch]]:
        """Everything, once."""
        yield prepared

    def policy_loss(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        batch: ActorCriticBatch,
        statistics: Statistics,
    ) -> tuple[Tensor, Tensor]:
        """Policy gradient loss, 0-d, and its gradient, `[n]`."""
        return policy_gradient_loss_and_gradient(log_probs, advantages)
