"""Settings of SAC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from maze_train.algorithms.off_policy.config import PolicyAndCriticsConfig
from maze_train.core.checks import check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class SACAlgorithmConfig(PolicyAndCriticsConfig):
    """Soft actor-critic with replay (Haarnoja et al., 2018, arXiv:1812.05905).

    Supports continuous, discrete (Christodoulou, 2019, arXiv:1910.07207) and mixed actions. Each
    update consists of environment steps and of gradient steps on earlier transitions.
    """

    name: ClassVar[str] = "sac"
    learner_class: ClassVar[str] = "maze_train.algorithms.sac.learner.SACLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.sac.learner.SAC"
    model_builder: ClassVar[str] = "maze_train.algorithms.sac.model.build_soft_actor_critic"
    model_resolver: ClassVar[str] = "maze_train.algorithms.sac.model.resolve_soft_actor_critic"

    module_settings: ClassVar[tuple[str, ...]] = (
        *("entropy_coef", "entropy_coef_lr", "entropy_tuning", "target_entropy_multiplier"),
    )
    learning_rates: ClassVar[tuple[str, ...]] = (
        *PolicyAndCriticsConfig.learning_rates,
        "entropy_coef_lr",
    )

    entropy_coef_lr: float | Schedule | None = field(default=None, metadata=IN_RUN)
    """Learning rate of the temperatures, > 0; null: the learning rate of the policy."""

    policy_update_interval: int = 1
    """Number of gradient steps between updates of the policy and the temperatures (>= 1)."""

    entropy_coef: float = field(default=1.0, metadata=IN_RUN)
    """Temperature (weight of the entropy), > 0: the initial value, or the constant value without
    `entropy_tuning`."""

    entropy_tuning: bool = True
    """Whether to tune the temperatures (one per action component) to the target entropy."""

    target_entropy_multiplier: float = field(default=1.0, metadata=IN_RUN)
    """Factor for the target entropy, >= 0. The target entropy is -dim(A) nats for a Box (actions
    scaled to [-1, 1]), and 0.98 times the maximum entropy over legal actions for discrete
    actions."""

    @property
    def fixed_settings(self) -> dict[str, str]:
        """Settings that must not change, with reasons; these depend on `entropy_tuning`."""
        if self.entropy_tuning:
            reason = "tuned by algorithm.entropy_tuning; change algorithm.target_entropy_multiplier"
            return {**super().fixed_settings, "entropy_coef": reason}
        own = ("entropy_coef_lr", "target_entropy_multiplier")
        reason = "has no effect without algorithm.entropy_tuning"
        return {**super().fixed_settings, **dict.fromkeys(own, reason)}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0.0, "target_entropy_multiplier")
        self._check_positive("entropy_coef", "entropy_coef_lr")
        if not self.entropy_tuning:
            for key, default in (("entropy_coef_lr", None), ("target_entropy_multiplier", 1.0)):
                if (value := self.value_of(key)) != default:
                    problem = "has no effect without entropy_tuning: remove this setting"
                    raise ConfigError(key, problem, value)


@dataclass(kw_only=True)
class SACfDAlgorithmConfig(SACAlgorithmConfig):
    """SAC with demonstrations in the initial replay buffer.

    Demonstrations are required. All other settings are the same as for SAC.
    """

    name: ClassVar[str] = "sacfd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_demonstration_trajectories is None:
            raise ConfigError(
                "initial_demonstration_trajectories",
                "required: the directory of a dataset (written by `maze-run rollout ... "
                "record=true`) or minari:<id>; or choose algorithm=sac",
            )
