"""Learner and trainer for A2C."""

from __future__ import annotations

from typing import ClassVar

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.actor_critic.learner import ActorCriticLearner
from maze_train.algorithms.actor_critic.trainer import ActorCritic


class A2CLearner(ActorCriticLearner[A2CAlgorithmConfig]):
    """Advantage actor-critic: one gradient step on the whole rollout.

    Policy loss = -mean(log pi(a_t | s_t) * A_t).

    Source: Mnih et al. (2016), arXiv:1602.01783, section 4, without asynchronous workers.
    """

    needs_old_log_probs: ClassVar[bool] = False
    most_empty_updates: ClassVar[int] = 100


class A2C(ActorCritic):
    """Trainer for A2C, which alternates between rollouts and gradient steps; see `A2CLearner`."""
