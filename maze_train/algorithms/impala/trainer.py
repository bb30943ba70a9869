"""The IMPALA trainer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.impala.events import ActorEvents, ActorTimeEvents
from maze_train.errors import TrainingError
from maze_train.training.trainer import TimeEvents, Trainer

if TYPE_CHECKING:
    from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
    from maze_train.data.rollout_replay import RolloutReplay
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.learner.group import LearnerGroup
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.rollout.actors import DistributedActors, GatheredRollouts
    from maze_train.training.services import TrainerServices

__all__ = ["IMPALA"]

MOST_LOST_UPDATES = 1_000
"""Updates in a row without a transition after which training ends."""


class IMPALA(Trainer):
    """Learns from the rollouts of actors, in the order in which they are finished.

    Actors in processes go on meanwhile, with the weights that they have. See `ImpalaLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The model that the learner updates.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        actors: Collect rollouts; they have begun with `model`.
        replay: Keeps rollouts to learn from again; None: none are kept.
    """

    def __init__(
        self,
        config: ImpalaAlgorithmConfig,
        learners: LearnerGroup,
        model: ActorCriticModel,
        services: TrainerServices,
        *,
        actors: DistributedActors,
        replay: RolloutReplay | None = None,
    ) -> None:
        super().__init__(config, learners, model, services)
        self.actors = actors
        self.replay = replay
        self._config = config
        self._lost_updates = 0

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Take a batch of rollouts, learn from it, and send the weights to the actors."""
        started = time.perf_counter()
        if not self.actors.has_weights:
            self.actors.publish(self.learners.weights_seq_no)
        gathered = self.actors.gather(self._config.actors_batch_size, self.interruption.check)
        collected = time.perf_counter()
        gathered.episodes.record(statistics)
        rollout = gathered.rollout
        self._check_lost(rollout.num_samples)
        batch = rollout if self.replay is None else self.replay.mix(rollout)
        statistics.merge(self.learners.update(batch, progress))
        if self.learners.weights_seq_no % self._config.broadcast_interval == 0:
            self.actors.publish(self.learners.weights_seq_no)
        ended = time.perf_counter()
        statistics.record(TimeEvents.collect_s, collected - started)
        statistics.record(TimeEvents.update_s, ended - collected)
        share = gathered.waited_s / (ended - started)
        statistics.record(ActorTimeEvents.learner_wait_share, share, ended - started)
        self._record_actors(gathered, statistics)
        return rollout.num_samples

    def _record_actors(self, gathered: GatheredRollouts, statistics: Statistics) -> None:
        counts, events = self.actors.counts, ActorEvents
        statistics.record(events.queue_before, float(gathered.queue_before))
        statistics.record(events.queue_after, float(gathered.queue_after))
        statistics.record(events.steps_made, float(counts.made))
        statistics.record(events.steps_dropped, float(counts.dropped))
        statistics.record(events.steps_in_flight, float(counts.in_flight))

    def _check_lost(self, num_samples: int) -> None:
        """Refuse to go on when nothing but lost episodes comes."""
        self._lost_updates = 0 if num_samples else self._lost_updates + 1
        if self._lost_updates == MOST_LOST_UPDATES:
            raise TrainingError(
                f"{MOST_LOST_UPDATES} updates in a row brought no transition: the environments "
                "return numbers that are not finite at the beginning of each episode"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers, but rollouts in flight."""
        return {
            **super().state_dict(),
            "actors": self.actors.state_dict(),
            "replay": None if self.replay is None else self.replay.state_dict(),
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Put the actors and the kept rollouts where they were."""
        self.actors.load_state_dict(state["actors"])
        if self.replay is not None:
            self.replay.load_state_dict(state["replay"])
