"""Settings of A2C."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class A2CAlgorithmConfig(ActorCriticConfig):
    """Advantage actor-critic (Mnih et al., 2016, arXiv:1602.01783), synchronous.

    One gradient step on each rollout.
    """

    name: ClassVar[str] = "a2c"
    learner_class: ClassVar[str] = "maze_train.algorithms.a2c.learner.A2CLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.a2c.learner.A2C"

    epoch_length: int = 125
    """Updates per epoch; evaluation, model selection and metrics come once an epoch. >= 1."""

    n_rollout_steps: int = 5
    """Steps of each environment per update. >= 1."""

    lr: float | Schedule = 7e-4
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (falls to 0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.optim.RMSprop"})
    """Optimizer class and its arguments (without the learning rate); `eps`, where the class has it,
    is 1e-5 unless given, or larger by default."""

    gae_lambda: float = 1.0
    """Bias-variance trade-off of the advantages, in [0, 1]; 1: discounted sums of rewards."""

    normalize_advantage: bool = False
    """Whether advantages are scaled to mean 0 and deviation 1 over each batch that a gradient is
    taken of."""
