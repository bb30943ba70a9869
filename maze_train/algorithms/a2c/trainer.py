"""The A2C trainer."""

from __future__ import annotations

from maze_train.algorithms.actor_critic.trainer import ActorCritic


class A2C(ActorCritic):
    """Advantage actor-critic: alternates rollouts and single gradient steps; see `A2CLearner`."""
