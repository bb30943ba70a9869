"""The PPO trainer."""

from __future__ import annotations

from maze_train.algorithms.actor_critic.trainer import ActorCritic


class PPO(ActorCritic):
    """Proximal policy optimization: alternates rollouts and passes over them; see `PPOLearner`."""
