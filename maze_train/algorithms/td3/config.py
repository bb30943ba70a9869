"""Settings of TD3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from maze_train.algorithms.off_policy.config import PolicyAndCriticsConfig
from maze_train.core.checks import check_at_least, check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.learner.config import Schedule, check_schedule


@dataclass(kw_only=True)
class TD3AlgorithmConfig(PolicyAndCriticsConfig):
    """Twin delayed DDPG with replay (Fujimoto et al., 2018, arXiv:1802.09477).

    Supports bounded Box actions, alone or as components of a Dict or Tuple. Each update consists of
    environment steps and of gradient steps on earlier transitions.
    """

    name: ClassVar[str] = "td3"
    learner_class: ClassVar[str] = "maze_train.algorithms.td3.learner.TD3Learner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.td3.learner.TD3"
    model_builder: ClassVar[str] = "maze_train.algorithms.td3.model.build_td3"
    model_resolver: ClassVar[str] = "maze_train.algorithms.td3.model.resolve_td3"

    module_settings: ClassVar[tuple[str, ...]] = ("target_noise_stddev", "target_noise_clip")

    num_critics: int = 2
    """Number of critics, in [1, 100]. The targets are computed from the minimum of all critics, and
    the policy loss from the first critic."""

    policy_update_interval: int = 2
    """Number of gradient steps between updates of the policy and the target networks (>= 1)."""

    target_update_interval: int = 1
    """Number of policy updates between updates of the target networks (>= 1)."""

    target_noise_stddev: float = 0.2
    """Standard deviation (>= 0) of the target policy smoothing noise, for actions scaled to [-1,
    1]; 0: no noise."""

    target_noise_clip: float = field(default=0.5, metadata=IN_RUN)
    """Clip range of the target policy smoothing noise, > 0."""

    exploration_noise_stddev: float | Schedule = field(default=0.1, metadata=IN_RUN)
    """Standard deviation (>= 0) of the exploration noise, for actions scaled to [-1, 1]: a number,
    or a schedule such as `linear_0.2` (decays to 0); 0: no noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0.0, "target_noise_stddev")
        noise = self.exploration_noise_stddev
        check_schedule("exploration_noise_stddev", noise, check_at_least, 0.0)
        self._check_positive("target_noise_clip")

    @property
    def model_settings(self) -> dict[str, Any]:
        """Additional arguments for the model builder."""
        return {**super().model_settings, "noise_stddev": self.exploration_noise_stddev}
