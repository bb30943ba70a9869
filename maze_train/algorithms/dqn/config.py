"""Settings of DQN."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal

from maze_train.algorithms.off_policy.config import OffPolicyConfig
from maze_train.core.checks import check_between, check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule, check_schedule


@cache
def default_exploration() -> Schedule:
    """Return the default of `epsilon`; cached, because the schedule is used in every update."""
    return Schedule(points=[[0.0, 1.0], [0.1, 0.05]])


@dataclass(kw_only=True)
class DQNAlgorithmConfig(OffPolicyConfig):
    """Deep Q-learning with replay (Mnih et al., 2015, doi:10.1038/nature14236).

    Supports a single Discrete action, with or without action masks. Each update consists of
    environment steps and of gradient steps on earlier transitions.
    """

    name: ClassVar[str] = "dqn"
    learner_class: ClassVar[str] = "maze_train.algorithms.dqn.learner.DQNLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.dqn.learner.DQN"
    model_builder: ClassVar[str] = "maze_train.algorithms.dqn.model.build_dqn"
    model_resolver: ClassVar[str] = "maze_train.algorithms.dqn.model.resolve_dqn"

    module_settings: ClassVar[tuple[str, ...]] = ("double_q", "loss")

    epoch_length: int = 250
    n_rollout_steps: int = 4
    update_to_data_ratio: float = 0.25
    batch_size: int = 64
    tau: float = field(default=1.0, metadata=IN_RUN)
    target_update_interval: int = 250
    max_grad_norm: float = field(default=10.0, metadata=IN_RUN)

    double_q: bool = True
    """Whether to use double Q-learning: the trained network selects the next action, and the target
    network evaluates it. Otherwise the target network selects and evaluates."""

    dueling: bool = False
    """Whether to use a dueling network, with a separate last hidden layer and output for state
    value and advantages."""

    num_quantiles: int = 0
    """Number of quantiles of the return per action, in [0, 10000] (QR-DQN, Dabney et al., 2018,
    arXiv:1710.10044); the Q-value is the mean of the quantiles. 0: no quantiles."""

    loss: Literal["huber", "squared"] = "huber"
    """Loss function of the TD error: `squared` is half the squared error; `huber` is the same for
    absolute errors up to 1, and linear for larger errors."""

    epsilon: float | Schedule | None = field(default=None, metadata=IN_RUN)
    """Probability of a random action during collection, in [0, 1]: a number, or a schedule such as
    `{points: [[0, 1], [50000, 0.05]], by: env_steps}`. null: decays from 1 to 0.05 over the first
    tenth of the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 0, "num_quantiles", maximum=10_000)
        if self.num_quantiles and self.loss != "huber":
            problem = f"num_quantiles={self.num_quantiles} requires loss=huber"
            raise ConfigError("loss", problem, self.loss)
        check_schedule("epsilon", self.exploration, check_between, 0.0, 1.0)

    @property
    def exploration(self) -> float | Schedule:
        """Value of `epsilon`, or its default if null."""
        return default_exploration() if self.epsilon is None else self.epsilon

    @property
    def values_over_time(self) -> dict[str, Any]:
        """Settings by key, with the default schedule of epsilon."""
        return {**super().values_over_time, "epsilon": self.exploration}

    @property
    def model_settings(self) -> dict[str, Any]:
        """Additional arguments for the model builder."""
        return {"dueling": self.dueling, "num_quantiles": self.num_quantiles}
