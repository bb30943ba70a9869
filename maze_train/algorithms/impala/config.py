"""Settings of IMPALA."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from maze_train.algorithms.actor_critic.config import ActorCriticConfig
from maze_train.core.checks import check_between, check_fields
from maze_train.core.conversion import IN_RUN
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class ImpalaAlgorithmConfig(ActorCriticConfig):
    """Importance weighted actor-learner architecture (Espeholt et al., 2018, arXiv:1802.01561).

    Actors collect rollouts with weights that may be a few updates old. V-trace corrects for this
    policy lag. The environments of the run (`runner.concurrency`) are distributed over the actors.
    """

    name: ClassVar[str] = "impala"
    learner_class: ClassVar[str] = "maze_train.algorithms.impala.learner.ImpalaLearner"
    trainer_class: ClassVar[str] = "maze_train.algorithms.impala.trainer.IMPALA"
    has_snapshots: ClassVar[bool] = False
    can_have_actors: ClassVar[bool] = False  # `num_actors` sets the number of actors.
    shared_settings: ClassVar[tuple[str, ...]] = ("num_actors", "actors_batch_size")

    module_settings: ClassVar[tuple[str, ...]] = (
        *("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold", "loss_reduction"),
    )

    epoch_length: int = 50
    """Number of updates per epoch (>= 1). Evaluation, model selection and metrics run once per
    epoch."""

    num_actors: int = 2
    """Number of actors (>= 1), each with an equal number of environments; must divide
    `runner.concurrency`. With `runner=local`, each actor is a process."""

    actors_batch_size: int = 2
    """Number of actor rollouts per update (>= 1)."""

    queue_out_of_sync_factor: float = 1.0
    """Maximum number of queued rollouts, as a multiple of `actors_batch_size`; actors pause while
    the queue is full. Larger values reduce waiting but increase policy lag. Must be in [0, 100]."""

    broadcast_interval: int = 1
    """Number of updates between broadcasts of the weights to the actors (>= 1)."""

    n_rollout_steps: int = 20
    """Number of steps of each environment per rollout (>= 1)."""

    lr: float | Schedule = field(
        default_factory=lambda: Schedule.from_text("linear_0.001"), metadata=IN_RUN
    )
    """Learning rate, > 0: a number, or a schedule such as `linear_0.001` (decays to 0)."""

    entropy_coef: float | Schedule = field(default=0.01, metadata=IN_RUN)
    """Weight of the entropy bonus, >= 0: a number or a schedule."""

    gae_lambda: float = 1.0
    """Lambda of V-trace (weight of later corrections), in [0, 1]; 1: V-trace as in the paper."""

    normalize_advantage: bool = False
    """Whether to divide advantages by their root mean square over the batch. Advantages are not
    shifted to mean 0, because this would bias the gradient for actions of older policies."""

    vtrace_clip_rho_threshold: float | None = field(default=1.0, metadata=IN_RUN)
    """Upper bound of the importance weights in the value targets, > 0; null: no clipping. With a
    finite bound, values refer to a policy between the behavior policy and the learner's policy."""

    vtrace_clip_pg_rho_threshold: float | None = field(default=1.0, metadata=IN_RUN)
    """Upper bound of the importance weights in the policy gradient, > 0; null: no clipping."""

    loss_reduction: Literal["mean", "sum"] = "mean"
    """Whether the loss is the mean or the sum over the steps of a batch. `sum`, as in the paper,
    scales the gradient by the number of steps, so `max_grad_norm` and the `eps` of the optimizer
    must be scaled accordingly."""

    replay_size: int = 0
    """Number of actor rollouts in the replay buffer (>= 0); 0: no replay."""

    replay_proportion: float = 1.0
    """Number of replayed rollouts per new rollout in an update, > 0; only used if `replay_size` >
    0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "num_actors", "actors_batch_size", "broadcast_interval")
        check_between("queue_out_of_sync_factor", self.queue_out_of_sync_factor, 0.0, 100.0)
        if self.queue_size + self.num_actors < self.actors_batch_size:
            least = 1 - self.num_actors / self.actors_batch_size
            raise ConfigError(
                "queue_out_of_sync_factor",
                f"expected at least {least:g}, so that the {self.actors_batch_size} rollouts of an "
                "update (actors_batch_size) fit into the queue",
                self.queue_out_of_sync_factor,
            )
        self._check_positive("vtrace_clip_rho_threshold", "vtrace_clip_pg_rho_threshold")
        self._check_positive("replay_proportion")
        check_fields(self, 0, "replay_size")
        if self.replay_size and self.num_replayed < 1:
            raise ConfigError(
                "replay_proportion",
                f"expected at least 1 / actors_batch_size = {1 / self.actors_batch_size:g}, so "
                "that an update uses at least one replayed rollout",
                self.replay_proportion,
            )
        if self.reward_scaling:
            raise ConfigError(
                "reward_scaling",
                "not supported, because rollouts of several actors are not consecutive in time; "
                "expected false (env.wrappers can scale rewards)",
                self.reward_scaling,
            )

    @property
    def num_replayed(self) -> int:
        """Number of replayed rollouts per update if the buffer is not empty."""
        return round(self.actors_batch_size * self.replay_proportion) if self.replay_size else 0

    @property
    def queue_size(self) -> int:
        """Maximum number of queued rollouts."""
        return round(self.queue_out_of_sync_factor * self.actors_batch_size)

    def shortened(self) -> ImpalaAlgorithmConfig:
        """Return the settings of a dry run: one update from one rollout per actor."""
        trial = super().shortened()
        assert isinstance(trial, ImpalaAlgorithmConfig)
        size = min(self.actors_batch_size, self.num_actors)
        return replace(trial, actors_batch_size=size, replay_proportion=1.0)

    def steps_per_update(self, concurrency: int) -> int:
        """Return the environment steps of an update."""
        return self.actors_batch_size * self.n_rollout_steps * concurrency // self.num_actors

    def check_concurrency(self, concurrency: int) -> None:
        """Raise if the environments cannot be distributed evenly over the actors."""
        if concurrency % self.num_actors:
            raise ConfigError(
                "num_actors",
                f"expected a divisor of runner.concurrency = {concurrency}, so that all actors "
                "have the same number of environments",
                self.num_actors,
            )
