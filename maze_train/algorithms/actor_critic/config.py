"""Settings that A2C, PPO and later actor-critics share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from maze_train.core.checks import check_at_least, check_between, check_fields
from maze_train.core.errors import ConfigError
from maze_train.learner.config import GradientSettings, Schedule, check_schedule
from maze_train.training.config import TRIAL_STEPS, AlgorithmConfig


@dataclass(kw_only=True)
class ActorCriticConfig(GradientSettings, AlgorithmConfig):
    """Base of the settings of on-policy actor-critics."""

    learns_for_several_agents: ClassVar[bool] = True
    has_snapshots: ClassVar[bool] = True
    model_builder: ClassVar[str] = "maze_train.nets.actor_critic.build_actor_critic"
    builder_class: ClassVar[str] = "maze_train.algorithms.actor_critic.trainer.ActorCriticBuilder"
    can_have_actors: ClassVar[bool] = True
    scales_rewards_of_recurrent: ClassVar[bool] = False
    """Whether `reward_scaling` is `large` by default for recurrent policies."""

    module_settings: ClassVar[tuple[str, ...]] = (
        *("gamma", "gae_lambda", "reward_scaling", "scaled_reward_clip"),
        *("policy_loss_coef", "value_loss_coef", "entropy_coef"),
    )

    n_rollout_steps: int = 128
    """Steps of each environment per update. >= 1."""

    lr: float | Schedule = 3e-4
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (falls to 0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "torch.optim.Adam"})
    """Optimizer class and its arguments (without the learning rate); `eps`, where the class has it,
    is 1e-5 unless given, or larger by default."""

    gamma: float = 0.99
    """Discount per step, in [0, 1]."""

    gae_lambda: float = 0.95
    """Bias-variance trade-off of the advantages, in [0, 1]; 1: discounted sums of rewards."""

    policy_loss_coef: float = 1.0
    """Weight of the policy loss. >= 0."""

    value_loss_coef: float = 0.5
    """Weight of the value loss (mean squared error, without a further factor 1/2). >= 0."""

    entropy_coef: float | Schedule = 0.0
    """Weight of the entropy bonus, >= 0: a number or a schedule."""

    normalize_advantage: bool = True
    """Whether advantages are scaled to mean 0 and deviation 1 over each batch that a gradient is
    taken of."""

    max_grad_norm: float = 0.5
    """Bound of the gradient, see `grad_clip_by`; 0: no clipping."""

    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """Bounded quantity: the norm of the whole gradient, of each parameter's gradient, or each
    entry."""

    reward_scaling: bool | Literal["large"] | None = None
    """Whether rewards are divided by the running standard deviation of their discounted sums before
    anything is learned from them. Reported returns stay as they are; values are then in scaled
    units. `large`: only if it exceeds 1. null: `large` for recurrent policies (`model.rnn`) of PPO,
    otherwise false. Not supported by IMPALA."""

    scaled_reward_clip: float = 10.0
    """Bound of the scaled rewards, > 0; 0: none."""

    sequence_length: int = 0
    """Steps through which gradients of a recurrent policy (`model.rnn`) flow back, a divisor
    of `n_rollout_steps`; 0: the whole rollout."""

    critic_burn_in_epochs: int = 0
    """Epochs at the start in which only the critic learns (and a trunk that it shares with the
    policy). >= 0."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        GradientSettings.__post_init__(self)
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

    def with_model_defaults(self, is_recurrent: bool) -> Self:
        """Fill in `reward_scaling`."""
        if self.reward_scaling is not None:
            return self
        scales = is_recurrent and self.scales_rewards_of_recurrent
        return replace(self, reward_scaling="large" if scales else False)

    def shortened(self) -> ActorCriticConfig:
        """The settings of a trial: one update of a short rollout, which is one sequence."""
        steps = min(self.n_rollout_steps, self.sequence_length or TRIAL_STEPS, TRIAL_STEPS)
        sequence_length = steps if self.sequence_length else 0
        return replace(
            self, n_epochs=1, epoch_length=1, n_rollout_steps=steps, sequence_length=sequence_length
        )
