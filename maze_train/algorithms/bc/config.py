"""Settings of behavioral cloning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from maze_train.core.checks import check_at_least, check_fields
from maze_train.core.conversion import ON_RESUME
from maze_train.core.errors import ConfigError
from maze_train.core.targets import TARGET
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import GradientSettings
from maze_train.nets.config import ModelConfig
from maze_train.training.config import TRIAL_BATCH, AlgorithmConfig


@dataclass(kw_only=True)
class BCAlgorithmConfig(GradientSettings, AlgorithmConfig):
    """Behavioral cloning (Pomerleau, 1988; Bain and Sammut, 1995).

    Supervised learning of recorded actions. An update is one gradient step on one minibatch; an
    epoch is one pass over the data.
    """

    name: ClassVar[str] = "bc"
    learner_class: ClassVar[str] = "maze_train.algorithms.bc.learner.BCLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.bc.trainer.BCTrainer"
    model_builder: ClassVar[str] = "maze_train.nets.policy_model.build_policy"

    default_total_steps: ClassVar[int] = 0
    least_epoch_length: ClassVar[int] = 0
    learns_from: ClassVar[Literal["env", "dataset"]] = "dataset"
    supports_multi_agent: ClassVar[bool] = True
    without_torchrun: ClassVar[str] = (
        "bc learns from a dataset, not in environments; use learner_group.n_learners"
    )

    n_epochs: int = field(default=50, metadata=ON_RESUME)
    """Number of epochs (>= 0); 0: no limit on epochs, but then a different limit is required."""

    epoch_length: int = 0
    """Number of updates per epoch (>= 0); 0: one pass over the data. Evaluation, model selection
    and metrics run once per epoch."""

    batch_size: int = 256
    """Number of transitions per update (>= 1)."""

    optimizer: dict[str, Any] = field(
        default_factory=lambda: {TARGET: "torch.optim.Adam", "eps": 1e-8}
    )
    """Optimizer class and its arguments, except the learning rate. A parameter that takes no part
    in a loss has the gradient 0."""

    loss: dict[str, Any] = field(default_factory=lambda: {TARGET: "maze_train.BCLoss"})
    """Loss class and its arguments."""

    box_loss: Literal["nll", "mse"] = "nll"
    """Loss for Box actions: `nll`: negative log-likelihood; `mse`: mean squared error of the most
    likely action, with actions scaled to [-1, 1]."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus (>= 0)."""

    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes of discrete actions. `balanced`: inversely proportional to the
    frequency in the training data, with mean 1; `none`: all weights are 1."""

    validation_percentage: float = 20.0
    """Percentage of episodes held out for validation, in [0, 100); 0: no validation."""

    storage: Literal["auto", "memory", "disk"] = field(default="auto", metadata=ON_RESUME)
    """Where the data is stored: `memory`; `disk`: memory-mapped files of the dataset; `auto`:
    `memory` if the data requires less than half of the free memory, otherwise `disk`. Does not
    affect results."""

    on_damaged: Literal["raise", "skip"] = field(default="raise", metadata=ON_RESUME)
    """What to do if part of the dataset is damaged: `raise` an error, or `skip` the part with a
    warning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("batch_size", self.batch_size, 1)
        self._check_positive("lr")
        self._check_targets("optimizer", "loss")
        check_fields(self, 0.0, "entropy_coef", "max_grad_norm")
        if not 0 <= self.validation_percentage < 100:
            raise ConfigError(
                "validation_percentage", "expected [0, 100)", self.validation_percentage
            )

    def check_run(self, env: EnvConfig, models: Mapping[str, ModelConfig]) -> None:
        """Check that no policy is recurrent."""
        for key, model in models.items():
            if model.rnn is not None:
                problem = "not supported, because bc is trained on single transitions"
                raise ConfigError(f"{key}.rnn", f"{problem}; remove this setting")

    def shortened(self) -> BCAlgorithmConfig:
        """Return the settings of a dry run: two updates."""
        batch_size = min(self.batch_size, TRIAL_BATCH)
        return replace(self, n_epochs=1, epoch_length=2, batch_size=batch_size)
