"""Settings of TD3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from maze_train.algorithms.off_policy.config import PolicyAndCriticsConfig
from maze_train.core.checks import check_at_least, check_fields
from maze_train.learner.config import Schedule, check_schedule


@dataclass(kw_only=True)
class TD3AlgorithmConfig(PolicyAndCriticsConfig):
    """Twin delayed DDPG (Fujimoto et al., 2018, arXiv:1802.09477), with replay.

    Box actions with bounds, alone or as parts of a Dict or Tuple. An update steps the environments
    and takes gradient steps on what was collected before.
    """

    name: ClassVar[str] = "td3"
    learner_class: ClassVar[str] = "maze_train.algorithms.td3.learner.TD3Learner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.td3.learner.TD3"
    model_builder: ClassVar[str] = "maze_train.algorithms.td3.model.build_td3"
    model_resolver: ClassVar[str] = "maze_train.algorithms.td3.model.resolve_td3"

    module_settings: ClassVar[tuple[str, ...]] = ("target_noise_stddev", "target_noise_clip")

    num_critics: int = 2
    """Critics, whose minimum is the target; the policy follows the first. In [1, 100]."""

    policy_update_interval: int = 2
    """Gradient steps from one step of the policy to the next; targets move with it. >= 1."""

    target_update_interval: int = 1
    """Steps of the policy from one update of the targets to the next. >= 1."""

    target_noise_stddev: float = 0.2
    """Standard deviation of the noise that smooths the target policy, of actions scaled to [-1, 1],
    >= 0; 0: none."""

    target_noise_clip: float = 0.5
    """Bound of this noise, > 0."""

    exploration_noise_stddev: float | Schedule = 0.1
    """Standard deviation of the noise of actions that collect experience, of actions scaled to
    [-1, 1], >= 0: a number, or a schedule such as `linear_0.2` (falls to 0); 0: none."""

    def __post_init__(self) -> None:
        PolicyAndCriticsConfig.__post_init__(self)
        check_fields(self, 0.0, "target_noise_stddev")
        noise = self.exploration_noise_stddev
        check_schedule("exploration_noise_stddev", noise, check_at_least, 0.0)
        self._check_positive("target_noise_clip")

    @property
    def model_settings(self) -> dict[str, Any]:
        """Arguments for the builder of the model in addition to the model settings."""
        return {**super().model_settings, "noise_stddev": self.exploration_noise_stddev}
