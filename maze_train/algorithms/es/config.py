"""Settings of evolution strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_fields
from maze_train.core.conversion import IN_RUN, ON_RESUME
from maze_train.core.errors import ConfigError
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import Schedule
from maze_train.nets.config import ModelConfig
from maze_train.training.config import DRY_RUN_STEPS, AlgorithmConfig


@dataclass(kw_only=True)
class ESAlgorithmConfig(AlgorithmConfig):
    """Evolution strategies (Salimans et al., 2017, arXiv:1703.03864).

    In each update, perturbed copies of the policy are evaluated for one episode each, and a
    gradient of the return is estimated from the results. There is no critic and no backpropagation.
    """

    name: ClassVar[str] = "es"
    learner_class: ClassVar[str] = "maze_train.algorithms.es.learner.ESLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.es.trainer.ESTrainer"
    model_builder: ClassVar[str] = "maze_train.nets.policy_model.build_policy"

    default_concurrency: ClassVar[int] = 64
    can_share_minibatches: ClassVar[bool] = False
    without_torchrun: ClassVar[str] = (
        "es computes no gradients; its workers run in parallel with runner=local or runner=ray"
    )
    uses_accelerators: ClassVar[bool] = False
    supports_multi_agent: ClassVar[bool] = True

    n_rollouts_per_update: int = 64
    """Minimum number of episodes per update, two per perturbation. Must be even and >= 2."""

    n_timesteps_per_update: int = 0
    """Minimum number of environment steps per update (>= 0). If `n_rollouts_per_update` episodes
    have fewer steps, additional episodes are run."""

    max_steps: int = 0
    """Maximum length of a training episode in steps (>= 0); longer episodes are truncated. 0: no
    limit."""

    noise_stddev: float | Schedule = field(default=0.05, metadata=IN_RUN)
    """Standard deviation of the parameter perturbations, > 0: a number or a schedule."""

    lr: float | Schedule = field(default=0.02, metadata=IN_RUN)
    """Learning rate of the optimizer, > 0: a number, or a schedule such as `linear_0.01` (decays to
    0)."""

    optimizer: dict[str, Any] = field(
        default_factory=lambda: {"_target_": "torch.optim.Adam", "eps": 1e-8}
    )
    """Optimizer class and its arguments, except the learning rate."""

    l2_penalty: float = field(default=0.005, metadata=IN_RUN)
    """Coefficient of the L2 penalty (>= 0). The gradient of the penalty is the coefficient times
    the parameters."""

    fitness_shaping: Literal["centered_ranks", "normalized", "raw"] = "centered_ranks"
    """Fitness shaping of the returns in an update: `centered_ranks`: ranks scaled to [-0.5, 0.5];
    `normalized`: mean 0 and standard deviation 1; `raw`: unchanged."""

    deterministic: bool = True
    """Whether perturbed policies take the most likely action; false: sample actions."""

    action_noise_stddev: float = 0.0
    """Standard deviation (>= 0) of Gaussian noise added to real-valued actions in training, before
    clipping or squashing; requires real-valued actions."""

    max_grad_norm: float = field(default=0.0, metadata=IN_RUN)
    """Maximum norm of the estimated gradient including the L2 penalty, >= 0; 0: no clipping."""

    device: str = field(default="cpu", metadata=ON_RESUME)
    """Device of the population and the learner: cpu, or auto (also cpu)."""

    noise_table_size: int = 10_000_000
    """Number of values in the noise table; each value takes 4 bytes of memory shared by all
    processes. Must be >= 2 and larger than the number of policy parameters; at least 100 times as
    many values as parameters are recommended."""

    policy_wrapper: dict[str, Any] | None = None
    """Wrapper around the policy, such as a heuristic: `{_target_: my_package.MyWrapper, key:
    value}`. The wrapper is called with the policy and must return a module that acts. null: no
    wrapper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 2, "n_rollouts_per_update", "noise_table_size")
        if self.n_rollouts_per_update % 2:
            raise ConfigError(
                "n_rollouts_per_update",
                "expected an even number, because each perturbation is evaluated with both signs",
                self.n_rollouts_per_update,
            )
        check_fields(self, 0, "n_timesteps_per_update", "max_steps")
        check_fields(self, 0.0, "l2_penalty", "action_noise_stddev", "max_grad_norm")
        self._check_positive("noise_stddev", "lr")
        self._check_targets("optimizer", "policy_wrapper")
        if self.device not in ("cpu", "auto"):
            raise ConfigError(
                "device",
                "evolution strategies do not compute network gradients, so a GPU is not used; "
                "expected cpu",
                self.device,
            )

    @property
    def model_settings(self) -> dict[str, Any]:
        """Additional arguments for the model builder."""
        return {"policy_wrapper": self.policy_wrapper}

    def check_run(self, env: EnvConfig, models: Mapping[str, ModelConfig]) -> None:
        """Check that the environment can be built singly."""
        if not env.has_single_form:
            raise ConfigError(
                "env.backend",
                "evolution strategies seed each episode separately, which requires single "
                "environments; expected gymnasium",
                env.backend,
            )

    def shortened(self) -> ESAlgorithmConfig:
        """Return the settings of a dry run: one pair of short episodes."""
        return replace(
            self,
            n_epochs=1,
            epoch_length=1,
            n_rollouts_per_update=2,
            n_timesteps_per_update=0,
            max_steps=min(self.max_steps or DRY_RUN_STEPS, DRY_RUN_STEPS),
        )
