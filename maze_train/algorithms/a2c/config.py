"""Settings of A2C."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.conversion import IN_RUN
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class A2CAlgorithmConfig(ActorCriticConfig):
    """Synchronous advantage actor-critic (Mnih et al., 2016, arXiv:1602.01783).

    Takes one gradient step per rollout.
    """

    name: ClassVar[str] = "a2c"
    learner_class: ClassVar[str] = "maze_train.algorithms.a2c.learner.A2CLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.a2c.learner.A2C"

    epoch_length: int = 125
    """Number of updates per epoch (>= 1). Evaluation, model selection and metrics run once per
    epoch."""

    n_rollout_steps: int = 5
    """Number of steps of each environment per update (>= 1)."""

    lr: float | Schedule = field(default=7e-4, metadata=IN_RUN)
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (decays to 0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.optim.RMSprop"})
    """Optimizer class and its arguments, except the learning rate. If the class has the argument
    `eps`, its default is 1e-5 or the default of the class, whichever is larger. A parameter that
    takes no part in a loss has the gradient 0."""

    gae_lambda: float = 1.0
    """Lambda of generalized advantage estimation, in [0, 1]; 1 gives Monte Carlo returns."""

    normalize_advantage: bool = False
    """Whether to normalize advantages to mean 0 and standard deviation 1 over each minibatch."""
