"""Settings of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.checks import check_between, check_fields
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class ImpalaAlgorithmConfig(ActorCriticConfig):
    """Importance weighted actor-learner architecture (Espeholt et al., 2018, arXiv:1802.01561).

    Actors collect rollouts with weights that may be a few updates old; V-trace corrects for that.
    The environments of the run (`runner.concurrency`) are spread over the actors.
    """

    name: ClassVar[str] = "impala"
    learner_class: ClassVar[str] = "maze_train.algorithms.impala.learner.ImpalaLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.impala.trainer.IMPALA"
    builder_class: ClassVar[str] = "maze_train.algorithms.impala.trainer.ImpalaBuilder"
    has_snapshots: ClassVar[bool] = False
    can_have_actors: ClassVar[bool] = False  # but those of `num_actors`
    can_learn_meanwhile: ClassVar[bool] = True

    module_settings: ClassVar[tuple[str, ...]] = (
        *("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold", "loss_reduction"),
    )

    epoch_length: int = 50
    """Updates per epoch; evaluation, model selection and metrics come once an epoch. >= 1."""

    num_actors: int = 2
    """Actors, each with an equal share of the environments, so it divides `runner.concurrency`.
    With `runner=local` each is a process. >= 1."""

    actors_batch_size: int = 2
    """Rollouts of actors that one update learns from. >= 1."""

    queue_out_of_sync_factor: float = 1.0
    """Rollouts that may wait for the learner, as a multiple of `actors_batch_size`; when that many
    wait, actors pause. Larger: less waiting, older weights. In [0, 100]."""

    broadcast_interval: int = 1
    """Updates from one sending of weights to the actors to the next. >= 1."""

    n_rollout_steps: int = 20
    """Steps of each environment per rollout. >= 1."""

    lr: float | Schedule = field(default_factory=lambda: Schedule.from_text("linear_0.001"))
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (falls to 0)."""

    entropy_coef: float | Schedule = 0.01
    """Weight of the entropy bonus, >= 0: a number or a schedule."""

    gae_lambda: float = 1.0
    """Lambda of V-trace, in [0, 1]: weight of later corrections; 1: V-trace of the paper."""

    normalize_advantage: bool = False
    """Whether advantages are divided by the root of their mean square over the batch. They are not
    shifted to a mean of 0: for actions of older policies that would be a bias."""

    vtrace_clip_rho_threshold: float | None = 1.0
    """Bound of the importance weights in the targets of the critic, > 0; null: none. Below
    infinity, the critic learns the value of a policy between the one that acts and the one that
    learns."""

    vtrace_clip_pg_rho_threshold: float | None = 1.0
    """Bound of the importance weights in the policy gradient, > 0; null: none."""

    loss_reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is the mean or the sum over the steps of a batch. `sum`, as in the paper,
    makes gradients larger by as many, so that `max_grad_norm` and the `eps` of the optimizer mean
    something else."""

    replay_size: int = 0
    """Rollouts of actors that are kept to be learned from again; 0: none."""

    replay_proportion: float = 1.0
    """Kept rollouts per new one that an update learns from as well, if some are kept. > 0."""

    def __post_init__(self) -> None:
        ActorCriticConfig.__post_init__(self)
        check_fields(self, 1, "num_actors", "actors_batch_size", "broadcast_interval")
        check_between("queue_out_of_sync_factor", self.queue_out_of_sync_factor, 0.0, 100.0)
        if self.queue_size + self.num_actors < self.actors_batch_size:
            least = 1 - self.num_actors / self.actors_batch_size
            raise ConfigError(
                "queue_out_of_sync_factor",
                f"expected at least {least:g}, so that the {self.actors_batch_size} rollouts of an "
                "update can wait at the same time (actors_batch_size)",
                self.queue_out_of_sync_factor,
            )
        bounds = ("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold")
        self._check_positive(*bounds, "replay_proportion")
        check_fields(self, 0, "replay_size")
        if self.replay_size and self.num_replayed < 1:
            raise ConfigError(
                "replay_proportion",
                f"expected at least 1 / actors_batch_size = {1 / self.actors_batch_size:g}, so "
                "that an update learns from one kept rollout",
                self.replay_proportion,
            )
        if self.reward_scaling:
            raise ConfigError(
                "reward_scaling",
                "follows episodes from update to update, which rollouts of several actors do not; "
                "expected false (wrappers can scale rewards: env.wrappers)",
                self.reward_scaling,
            )

    @property
    def num_replayed(self) -> int:
        """Kept rollouts in the batch of an update, once there are some."""
        return round(self.actors_batch_size * self.replay_proportion) if self.replay_size else 0

    @property
    def queue_size(self) -> int:
        """Rollouts that may wait for the learner."""
        return round(self.queue_out_of_sync_factor * self.actors_batch_size)

    def shortened(self) -> ImpalaAlgorithmConfig:
        """The settings of a trial: one update from one rollout of each actor."""
        trial = super().shortened()
        assert isinstance(trial, ImpalaAlgorithmConfig)
        size = min(self.actors_batch_size, self.num_actors)
        return replace(trial, actors_batch_size=size, replay_proportion=1.0)

    def check_concurrency(self, concurrency: int) -> None:
        """Refuse environments that cannot be spread evenly over the actors."""
        if concurrency % self.num_actors:
            raise ConfigError(
                "num_actors",
                f"expected a divisor of runner.concurrency = {concurrency}, so that each actor has "
                "as many environments",
                self.num_actors,
            )
