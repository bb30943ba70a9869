"""Settings of evolution strategies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_fields
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule
from maze_train.training.config import TRIAL_STEPS, AlgorithmConfig


@dataclass(kw_only=True)
class ESAlgorithmConfig(AlgorithmConfig):
    """Evolution strategies (Salimans et al., 2017, arXiv:1703.03864).

    An update lets perturbed copies of the policy play one episode each, and moves the parameters
    towards those that did better. There is no critic and no gradient of a network.
    """

    name: ClassVar[str] = "es"
    learner_class: ClassVar[str] = "maze_train.algorithms.es.learner.ESLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.es.trainer.ESTrainer"
    model_builder: ClassVar[str] = "maze_train.nets.policy_model.build_policy"
    builder_class: ClassVar[str] = "maze_train.algorithms.es.trainer.ESBuilder"

    default_concurrency: ClassVar[int] = 64
    can_share_minibatches: ClassVar[bool] = False
    uses_accelerators: ClassVar[bool] = False
    learns_for_several_agents: ClassVar[bool] = True

    n_rollouts_per_update: int = 64
    """Episodes that an update learns from at least, two for each perturbation. Even, >= 2."""

    n_timesteps_per_update: int = 0
    """Environment steps that an update learns from at least: more episodes are played until there
    are as many. >= 0."""

    max_steps: int = 0
    """Steps after which an episode of training is cut, and counts as it is; 0: never."""

    noise_stddev: float | Schedule = 0.05
    """Standard deviation of the perturbation of the parameters, > 0: a number or a schedule."""

    lr: float | Schedule = 0.02
    """Step size of the optimizer, > 0: a number, or a schedule such as `linear_0.01` (falls to
    0)."""

    optimizer: dict[str, Any] = field(default_factory=lambda: {"_target_": "maze_train.Adam"})
    """Optimizer class and its arguments (without the step size): `maze_train.Adam`,
    `maze_train.SGD`, or one of PyTorch."""

    l2_penalty: float = 0.005
    """Weight decay: this times the parameters is taken off the gradient. >= 0."""

    fitness_shaping: Literal["centered_ranks", "normalized", "raw"] = "centered_ranks"
    """Transformation of the returns of an update: `centered_ranks`: ranks from -0.5 to 0.5;
    `normalized`: mean 0 and deviation 1; `raw`: returns as they are."""

    deterministic: bool = True
    """Whether perturbed policies take the most likely action; false: actions are sampled."""

    action_noise_stddev: float = 0.0
    """Standard deviation of normal noise that is added to real-valued actions in training, before
    they are clipped or squashed; needs such actions. >= 0."""

    max_grad_norm: float = 0.0
    """Bound of the norm of the estimated gradient with weight decay; 0: no clipping."""

    device: str = "cpu"
    """Device of the population and the learner: cpu, or auto (cpu as well)."""

    noise_table_size: int = 10_000_000
    """Numbers in the noise table, 4 bytes each in memory that all processes share. More than the
    policy has parameters, better a hundred times as many. >= 2."""

    policy_wrapper: dict[str, Any] | None = None
    """Wrapper around the policy, such as a heuristic: `{_target_: my_package.MyWrapper, key:
    value}`, called with the policy, returns a module that acts. null: none."""

    def __post_init__(self) -> None:
        AlgorithmConfig.__post_init__(self)
        check_fields(self, 2, "n_rollouts_per_update", "noise_table_size")
        if self.n_rollouts_per_update % 2:
            raise ConfigError(
                "n_rollouts_per_update",
                "expected an even number, as each perturbation is tried with both signs",
                self.n_rollouts_per_update,
            )
        check_fields(self, 0, "n_timesteps_per_update", "max_steps")
        check_fields(self, 0.0, "l2_penalty", "action_noise_stddev", "max_grad_norm")
        self._check_positive("noise_stddev", "lr")
        self._check_targets("optimizer", "policy_wrapper")
        if self.device not in ("cpu", "auto"):
            raise ConfigError(
                "device",
                "evolution strategies have no gradients of networks that a GPU could compute; "
                "expected cpu",
                self.device,
            )

    @property
    def model_settings(self) -> dict[str, Any]:
        """The policy wrapper, for the builder of the model."""
        return {"policy_wrapper": self.policy_wrapper}

    def shortened(self) -> ESAlgorithmConfig:
        """The settings of a trial: one pair, which does not play for long."""
        return replace(
            self,
            n_epochs=1,
            epoch_length=1,
            n_rollouts_per_update=2,
            n_timesteps_per_update=0,
            max_steps=min(self.max_steps or TRIAL_STEPS, TRIAL_STEPS),
        )
