"""The IMPALA trainer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.impala.events import ActorEvents, ActorTimeEvents
from maze_train.training.events import TimeEvents
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
    from maze_train.data.policy_rollouts import PolicyRolloutsReplay
    from maze_train.data.rollout_replay import RolloutReplay
    from maze_train.events import Statistics
    from maze_train.learner.config import Progress
    from maze_train.rollout.actors import DistributedActors, GatheredRollouts


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

    algorithm_config: ImpalaAlgorithmConfig

    def __init__(
        self,
        *args: Any,
        actors: DistributedActors,
        replay: RolloutReplay | PolicyRolloutsReplay | None = None,
    ) -> None:
        super().__init__(*args)
        self.actors = actors
        self.replay: Any = replay

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Take a batch of rollouts, learn from it, and send the weights to the actors."""
        started, config = time.perf_counter(), self.algorithm_config
        if not self.actors.has_weights:
            self.actors.publish(self.learners.weights_seq_no)
        gathered = self.actors.gather(config.actors_batch_size, self.interruption.check)
        collected = time.perf_counter()
        gathered.episodes.record(statistics)
        batch, steps = gathered.rollout, gathered.episodes.steps
        self.check_lost(steps)
        if self.replay is not None:
            batch = self.replay.mix(batch)
        if self.learners.settings.queue_size:
            ended_updates = self.learners.async_update(batch, progress, steps, self._send)
        else:
            ended_updates = self.learners.update(batch, progress)
            self._send()
        statistics.merge(ended_updates)
        ended = time.perf_counter()
        statistics.record(TimeEvents.collect_s, collected - started)
        statistics.record(TimeEvents.update_s, ended - collected)
        share = gathered.waited_s / (ended - started)
        statistics.record(ActorTimeEvents.learner_wait_share, share, ended - started)
        self._record_actors(gathered, statistics)
        return steps

    def _send(self) -> None:
        """Send the weights to the actors, if it is time to."""
        if self.learners.weights_seq_no % self.algorithm_config.broadcast_interval == 0:
            self.actors.publish(self.learners.weights_seq_no)

    def _record_actors(self, gathered: GatheredRollouts, statistics: Statistics) -> None:
        counts, events = self.actors.counts, ActorEvents
        statistics.record(events.queue_before, float(gathered.queue_before))
        statistics.record(events.queue_after, float(gathered.queue_after))
        statistics.record(events.steps_made, float(counts.made))
        statistics.record(events.steps_dropped, float(counts.dropped))
        statistics.record(events.steps_in_flight, float(counts.in_flight))

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
