"""Settings of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.checks import check_at_least, check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule
from maze_train.training.config import DRY_RUN_STEPS


@dataclass(kw_only=True)
class PPOAlgorithmConfig(ActorCriticConfig):
    """Proximal policy optimization with the clipped surrogate objective (arXiv:1707.06347)."""

    name: ClassVar[str] = "ppo"
    learner_class: ClassVar[str] = "maze_train.algorithms.ppo.learner.PPOLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.ppo.learner.PPO"
    # Recurrent policies share layers with the critic. With unscaled rewards, the value loss can be
    # larger than the policy loss by orders of magnitude, and gradient clipping would suppress the
    # policy gradient.
    scales_rewards_of_recurrent: ClassVar[bool] = True

    adaptive_settings: ClassVar[tuple[str, ...]] = ("lr",)
    module_settings: ClassVar[tuple[str, ...]] = ("clip_range", "value_clip_range")

    epoch_length: int = 5
    """Number of updates per epoch (>= 1). Evaluation, model selection and metrics run once per
    epoch."""

    lr: float | Schedule = field(
        default_factory=lambda: Schedule(start=1e-3, end=0.0), metadata=IN_RUN
    )
    """Learning rate, > 0: a number, a schedule such as `linear_0.001` (decays to 0), or
    `adaptive_kl` (adapts to the KL divergence from the policy that collected the rollout)."""

    batch_size: int = 256
    """Number of samples per minibatch, in [1, `runner.concurrency * n_rollout_steps`]; the default
    is reduced to the upper limit with a note. If the rollout is not divisible by the batch size,
    the last minibatch of each optimization epoch is smaller. Ignored if `n_minibatches` is set."""

    n_minibatches: int | None = None
    """Number of minibatches per optimization epoch, as an alternative to `batch_size`, in [1,
    number of samples (sequences for recurrent policies)]. Sizes differ by at most one sample or
    sequence. null: use `batch_size`."""

    n_optimization_epochs: int = field(default=10, metadata=IN_RUN)
    """Number of optimization epochs (passes) over each rollout, often called `n_epochs` in other
    libraries; each sample is used exactly this many times. Must be >= 1."""

    clip_range: float | Schedule = field(default=0.2, metadata=IN_RUN)
    """Clip range of the probability ratio (half-width of the interval around 1), > 0: a number or a
    schedule."""

    value_clip_range: float = 0.0
    """Maximum change of the value prediction per update, in units of (transformed) returns, >= 0;
    0: no clipping."""

    target_kl: float = field(default=0.0, metadata=IN_RUN)
    """If the approximate KL divergence of a minibatch exceeds this value, the update of the policy
    stops before the gradient step. Must be >= 0; 0: no early stopping."""

    gradient_accumulation: int = 1
    """Number of minibatches per optimizer step, whose gradients are averaged. The last step of an
    update may use fewer minibatches. Must be >= 1."""

    recompute_advantages: bool = False
    """Whether to recompute values and advantages before each optimization epoch."""

    @property
    def accumulated_minibatches(self) -> int:
        """Number of minibatches per gradient step."""
        return self.gradient_accumulation

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch_size", "n_optimization_epochs", "gradient_accumulation")
        if self.n_minibatches is not None:
            check_at_least("n_minibatches", self.n_minibatches, 1)
        check_fields(self, 0.0, "value_clip_range", "target_kl")
        self._check_positive("clip_range")

    def check_concurrency(self, concurrency: int) -> None:
        """Raise if `batch_size` or `n_minibatches` is too large for the rollout."""
        rollout = concurrency * self.n_rollout_steps
        if self.n_minibatches is not None:
            units = rollout // (self.sequence_length or 1)
            if self.n_minibatches > units:
                name = "sequences" if self.sequence_length else "samples"
                problem = f"more than the {units} {name} of a rollout; expected at most {units}"
                raise ConfigError("n_minibatches", problem, self.n_minibatches)
        elif self.batch_size > rollout and not self._has_default_batch:
            raise ConfigError(
                "batch_size",
                f"larger than the rollout of {rollout} samples (runner.concurrency={concurrency} x "
                f"algorithm.n_rollout_steps={self.n_rollout_steps}); use at most {rollout}, or "
                "increase one of the two settings",
                self.batch_size,
            )

    @property
    def _has_default_batch(self) -> bool:
        return self.batch_size == type(self).batch_size

    def start_notes(self, concurrency: int) -> Iterator[str]:
        """Yield a note if the default of `batch_size` is larger than the rollout."""
        rollout = concurrency * self.n_rollout_steps
        if self.n_minibatches is None and self.batch_size > rollout:
            yield (
                f"algorithm.batch_size = {self.batch_size} (default) is larger than the rollout of "
                f"{rollout} samples, so each minibatch is the whole rollout"
            )

    def shortened(self) -> PPOAlgorithmConfig:
        """Return the settings of a dry run, with minibatches that fit a short rollout."""
        trial = super().shortened()
        assert isinstance(trial, PPOAlgorithmConfig)
        units = trial.n_rollout_steps // (trial.sequence_length or 1)
        count = self.n_minibatches
        return replace(
            trial,
            batch_size=min(self.batch_size, trial.n_rollout_steps),
            n_minibatches=None if count is None else min(count, units),
            n_optimization_epochs=min(self.n_optimization_epochs, DRY_RUN_STEPS),
        )
