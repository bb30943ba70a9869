"""Settings shared by A2C, PPO and IMPALA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from maze_train.core.checks import check_at_least, check_between, check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.core.errors import ConfigError
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import GradientSettings, Schedule, check_schedule
from maze_train.nets.config import ModelConfig
from maze_train.training.config import DRY_RUN_STEPS, AlgorithmConfig


@dataclass(kw_only=True)
class ActorCriticConfig(GradientSettings, AlgorithmConfig):
    """Base class of settings for actor-critic algorithms."""

    supports_multi_agent: ClassVar[bool] = True
    has_snapshots: ClassVar[bool] = True
    model_builder: ClassVar[str] = "maze_train.nets.actor_critic.build_actor_critic"
    can_have_actors: ClassVar[bool] = True
    without_torchrun: ClassVar[str] = ""
    scales_rewards_of_recurrent: ClassVar[bool] = False
    """Whether `reward_scaling` defaults to `large` for recurrent policies."""

    module_settings: ClassVar[tuple[str, ...]] = (
        *("gamma", "gae_lambda", "reward_scaling", "scaled_reward_clip"),
        *("policy_loss_coef", "value_loss_coef", "entropy_coef"),
    )

    n_rollout_steps: int = 128
    """Number of steps of each environment per update (>= 1)."""

    lr: float | Schedule = field(default=3e-4, metadata=IN_RUN)
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (decays to 0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.optim.Adam"})
    """Optimizer class and its arguments, except the learning rate. If the class has the argument
    `eps`, its default is 1e-5 or the default of the class, whichever is larger. A parameter that
    takes no part in a loss has the gradient 0."""

    gamma: float = 0.99
    """Discount factor per step, in [0, 1]."""

    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation, in [0, 1]; 1 gives Monte Carlo returns."""

    policy_loss_coef: float = field(default=1.0, metadata=IN_RUN)
    """Weight of the policy loss (>= 0)."""

    value_loss_coef: float = field(default=0.5, metadata=IN_RUN)
    """Weight (>= 0) of the value loss, the mean squared error without a factor of 1/2."""

    entropy_coef: float | Schedule = field(default=0.0, metadata=IN_RUN)
    """Weight of the entropy bonus, >= 0: a number or a schedule."""

    normalize_advantage: bool = True
    """Whether to normalize advantages to mean 0 and standard deviation 1 over each minibatch."""

    max_grad_norm: float = field(default=0.5, metadata=IN_RUN)
    """Maximum gradient norm (or value, see `grad_clip_by`), >= 0; 0: no clipping."""

    reward_scaling: bool | Literal["large"] | None = None
    """Whether to divide rewards by the running standard deviation of discounted returns before
    learning. Reported returns are not scaled, but reported values are. `large`: rewards are
    scaled only while the standard deviation exceeds 1. null: `large` for recurrent policies
    (`model.rnn`) of PPO, otherwise false. Not supported by IMPALA."""

    scaled_reward_clip: float = 10.0
    """Clip range of scaled rewards, > 0; 0: no clipping."""

    sequence_length: int = 0
    """Length of truncated backpropagation through time for recurrent policies (`model.rnn`), in
    steps; must divide `n_rollout_steps`. 0: the whole rollout."""

    critic_burn_in_epochs: int = 0
    """Number of initial epochs (>= 0) in which only the critic and the shared trunk, if any, are
    trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "n_rollout_steps")
        self._check_positive("lr")
        self._check_targets("optimizer")
        check_between("gamma", self.gamma, 0.0, 1.0)
        check_between("gae_lambda", self.gae_lambda, 0.0, 1.0)
        check_fields(self, 0.0, "policy_loss_coef", "value_loss_coef", "max_grad_norm")
        check_fields(self, 0, "scaled_reward_clip", "sequence_length", "critic_burn_in_epochs")
        check_schedule("entropy_coef", self.entropy_coef, check_at_least, 0.0)
        if self.sequence_length and self.n_rollout_steps % self.sequence_length:
            raise ConfigError(
                "sequence_length",
                f"expected a divisor of n_rollout_steps={self.n_rollout_steps}, or 0",
                self.sequence_length,
            )

    @property
    def scales_rewards(self) -> bool | Literal["large"]:
        """Value of `reward_scaling`."""
        return self.reward_scaling or False

    def with_model_defaults(self, is_recurrent: bool) -> Self:
        """Resolve the default of `reward_scaling`."""
        if self.reward_scaling is not None:
            return self
        scales = is_recurrent and self.scales_rewards_of_recurrent
        return replace(self, reward_scaling="large" if scales else False)

    def check_run(self, env: EnvConfig, models: Mapping[str, ModelConfig]) -> None:
        """Check that `sequence_length` is only set for recurrent policies."""
        if self.sequence_length and all(model.rnn is None for model in models.values()):
            raise ConfigError(
                "algorithm.sequence_length",
                "only for recurrent policies: set model.rnn or policies.<id>.model.rnn, or remove "
                "this setting",
                self.sequence_length,
            )

    def steps_per_update(self, concurrency: int) -> int:
        """Return the environment steps of an update."""
        return concurrency * self.n_rollout_steps

    def shortened(self) -> ActorCriticConfig:
        """Return the settings of a dry run: one update of a short rollout, as one sequence."""
        steps = min(self.n_rollout_steps, self.sequence_length or DRY_RUN_STEPS, DRY_RUN_STEPS)
        sequence_length = steps if self.sequence_length else 0
        return replace(
            self, n_epochs=1, epoch_length=1, n_rollout_steps=steps, sequence_length=sequence_length
        )
