"""Settings of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.checks import check_at_least, check_fields
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule, is_adaptive
from maze_train.training.config import TRIAL_STEPS


@dataclass(kw_only=True)
class PPOAlgorithmConfig(ActorCriticConfig):
    """Proximal policy optimization (Schulman et al., 2017, arXiv:1707.06347), clipped surrogate."""

    name: ClassVar[str] = "ppo"
    learner_class: ClassVar[str] = "maze_train.algorithms.ppo.learner.PPOLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.ppo.learner.PPO"
    # A recurrent policy shares its layers with the critic: the loss of unscaled values exceeds that
    # of the policy by orders of magnitude, and clipping leaves nothing of the policy's gradient.
    scales_rewards_of_recurrent: ClassVar[bool] = True

    module_settings: ClassVar[tuple[str, ...]] = ("clip_range", "value_clip_range")

    epoch_length: int = 5
    """Updates per epoch; evaluation, model selection and metrics come once an epoch. >= 1."""

    lr: float | Schedule = field(default_factory=lambda: Schedule(start=1e-3, end=0.0))
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (falls to 0), or
    `adaptive_kl` (follows the divergence of the policy from the one that acted)."""

    batch_size: int = 256
    """Samples per minibatch, at most `runner.concurrency * n_rollout_steps` (the default is lowered
    to that with a note); the last minibatch of an epoch over the rollout is smaller when the sizes
    do not divide. >= 1. Unused with `n_minibatches`."""

    n_minibatches: int | None = None
    """Minibatches into which each pass cuts the rollout (a recurrent policy's sequences), in place
    of `batch_size`; their sizes differ by one sample (sequence) at most. >= 1, at most the samples
    (sequences); null: `batch_size` decides."""

    n_optimization_epochs: int = 10
    """Passes over each rollout (in other libraries often `n_epochs`, here the length of the run);
    every sample appears exactly so often. >= 1."""

    clip_range: float | Schedule = 0.2
    """Half-width of the interval around a probability ratio of 1, > 0: a number or a schedule."""

    value_clip_range: float = 0.0
    """Half-width of the interval around the old value in which the critic may move, in units of
    (transformed) returns; 0: no clipping."""

    target_kl: float = 0.0
    """Approximate KL divergence above which the passes of a policy over a rollout end, before the
    minibatch that exceeds it is applied; 0: never."""

    gradient_accumulation: int = 1
    """Minibatches whose mean gradient a step follows; at the end of an update there may be fewer.
    >= 1."""

    recompute_advantages: bool = False
    """Whether values and advantages are computed again before each pass over the rollout."""

    def __post_init__(self) -> None:
        ActorCriticConfig.__post_init__(self)
        check_fields(self, 1, "batch_size", "n_optimization_epochs", "gradient_accumulation")
        if self.n_minibatches is not None:
            check_at_least("n_minibatches", self.n_minibatches, 1)
        check_fields(self, 0.0, "value_clip_range", "target_kl")
        self._check_positive("clip_range")

    def _check_positive(self, *keys: str) -> None:
        """As in other algorithms, but a learning rate may follow the divergence."""
        super()._check_positive(*(key for key in keys if key != "lr" or not is_adaptive(self.lr)))

    def check_concurrency(self, concurrency: int) -> None:
        """Refuse minibatches larger than the rollout, and more of them than it has samples."""
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
                f"algorithm.n_rollout_steps={self.n_rollout_steps}); lower batch_size to at most "
                f"{rollout}, or raise one of the two",
                self.batch_size,
            )

    @property
    def _has_default_batch(self) -> bool:
        return self.batch_size == type(self).batch_size

    def start_notes(self, concurrency: int) -> Iterator[str]:
        """The line about a default of `batch_size` that is larger than the rollout."""
        rollout = concurrency * self.n_rollout_steps
        if self.n_minibatches is None and self.batch_size > rollout:
            yield (
                f"algorithm.batch_size = {self.batch_size} (default) is larger than the rollout of "
                f"{rollout} samples, so each minibatch is the whole rollout"
            )

    def shortened(self) -> PPOAlgorithmConfig:
        """The settings of a trial, with minibatches that a short rollout fills."""
        trial = super().shortened()
        assert isinstance(trial, PPOAlgorithmConfig)
        units = trial.n_rollout_steps // (trial.sequence_length or 1)
        count = self.n_minibatches
        return replace(
            trial,
            batch_size=min(self.batch_size, trial.n_rollout_steps),
            n_minibatches=None if count is None else min(count, units),
            n_optimization_epochs=min(self.n_optimization_epochs, TRIAL_STEPS),
        )
