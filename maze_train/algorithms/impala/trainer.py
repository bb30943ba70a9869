"""Trainer of IMPALA."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.actor_critic.trainer import begin_statistics
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.impala.learner import ActorEvents, ActorTimeEvents
from maze_train.algorithms.impala.replay import RolloutReplay
from maze_train.collect.actors import ActorPolicy, DistributedActors, GatheredRollouts
from maze_train.core.events import Statistics
from maze_train.learner.config import Progress
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.joint import JointModel, members_of
from maze_train.training.events import TimeEvents
from maze_train.training.trainer import Run, Trainer
from maze_train.workers.backends import Pickled

if TYPE_CHECKING:
    from typing import Self


class IMPALA(Trainer):
    """Trainer for IMPALA, which uses actor rollouts in the order in which they are finished.

    During updates, actors in other processes continue to collect with the last broadcast weights.
    See `ImpalaLearner`.

    Args:
        run: Objects of the run, with the learners and the model.
        actors: Actors; `begin` must have been called with the model.
        replay: Replay buffers of rollouts, keyed by module id.
    """

    algorithm_config: ImpalaAlgorithmConfig

    def __init__(
        self,
        run: Run,
        *,
        actors: DistributedActors,
        replay: Mapping[str, RolloutReplay],
    ) -> None:
        super().__init__(run)
        self.actors = actors
        self.replay = replay

    @classmethod
    def make_source(cls, run: Run) -> DistributedActors:
        """Build the actors.

        With `runner=dev`, actors run one after the other in one process: no rollouts are queued,
        the policy lag depends only on `broadcast_interval`, and results are reproducible. With
        other runners, actors run during updates, and the order of rollouts depends on the speed of
        the actors.
        """
        # Without checkpoints, states are never requested. If None, the backend decides.
        is_kept = None if run.config.checkpoint.is_on else False
        num_actors = settings_of(run).num_actors
        actors = run.make_actors(num_actors, envs_per_actor(run), can_be_restored=is_kept)
        run.env_calls.in_training_envs.append(actors.make_calls)
        return actors

    @classmethod
    def build(cls, run: Run) -> Self:
        """Pass the policy to the actors, and build the replay buffers if configured."""
        config, actors = settings_of(run), run.source
        assert isinstance(actors, DistributedActors)
        policy = ActorPolicy(
            Pickled(run.model_maker(), "model"),
            config.n_rollout_steps,
            run.config.checkpoint.allow_new_episodes,
            run.config.tracking.info_keys,
            records_log_probs=True,
            keeps_terminal_obs=isinstance(run.model, JointModel),
        )

        def seeds_of(actor: int, generation: int) -> tuple[int, int]:
            name, seed_of = f"actors/{actor}/{generation}", run.seeds.integer
            return seed_of(f"{name}/episodes"), seed_of(f"{name}/actions")

        actors.begin(run.model, policy, seeds_of, queue_size=config.queue_size, splits_turns=True)
        members = members_of(run.model)
        columns = {key: len(agents) for key, agents in members.items() if agents}
        replay = {
            key: RolloutReplay(
                config.replay_size,
                config.num_replayed,
                envs_per_actor(run) * count,
                run.seeds.integer(f"replay/{key}" if members else "replay"),
            )
            for key, count in (columns or {DEFAULT_MODULE: 1}).items()
            if config.replay_size
        }
        return cls(run, actors=actors, replay=replay)

    def before_training(self) -> None:
        """Collect observation statistics in separate environments if the model has none."""
        begin_statistics(self.run, partial(self.run.make_env, self.run.config.runner.concurrency))

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Receive a batch of rollouts, update the model, and broadcast the weights."""
        started, config = time.perf_counter(), self.algorithm_config
        if not self.actors.has_weights:
            self.actors.publish(self.learners.weights_seq_no)
        gathered = self.actors.gather(config.actors_batch_size, self.run.interruption.check)
        collected = time.perf_counter()
        gathered.episodes.record(statistics, self.run.infos)
        batch, steps = gathered.rollouts, gathered.episodes.steps
        self.check_lost(steps)
        self.callbacks.call("on_rollout_end", seen=batch)
        batch |= {key: replay.mix(batch[key]) for key, replay in self.replay.items()}
        statistics.merge(self.learners.update(batch, progress))
        if self.learners.weights_seq_no % config.broadcast_interval == 0:
            self.actors.publish(self.learners.weights_seq_no)
        ended = time.perf_counter()
        statistics.record(TimeEvents.collect_s, collected - started)
        statistics.record(TimeEvents.update_s, ended - collected)
        share = gathered.waited_s / (ended - started)
        statistics.record(ActorTimeEvents.learner_wait_fraction, share, ended - started)
        self._record_actors(gathered, statistics)
        return steps

    def _record_actors(self, gathered: GatheredRollouts, statistics: Statistics) -> None:
        counts, events = self.actors.total_counts, ActorEvents
        statistics.record(events.queue_before, float(gathered.queue_before))
        statistics.record(events.queue_after, float(gathered.queue_after))
        statistics.record(events.steps_made, float(counts.made))
        statistics.record(events.steps_dropped, float(counts.dropped))
        statistics.record(events.steps_in_flight, float(counts.in_flight))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of trainer, actors and replay buffers, without rollouts in flight."""
        return {
            **super().state_dict(),
            "actors": self.actors.state_dict(),
            "replay": {key: replay.state_dict() for key, replay in self.replay.items()},
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the actors and the replay buffers."""
        self.actors.load_state_dict(state["actors"])
        self.exact = self.exact and self.actors.is_exact
        for key, replay in self.replay.items():
            replay.load_state_dict(state["replay"][key])


def settings_of(run: Run) -> ImpalaAlgorithmConfig:
    """Return the settings of IMPALA."""
    config = run.config.algorithm
    assert isinstance(config, ImpalaAlgorithmConfig)
    return config


def envs_per_actor(run: Run) -> int:
    """Return the number of environments per actor."""
    return run.config.runner.concurrency // settings_of(run).num_actors
