"""Trainer and builder of IMPALA."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import nn

from maze_train.algorithms.actor_critic.trainer import ActorCriticBuilder
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.impala.learner import ActorEvents, ActorTimeEvents
from maze_train.algorithms.impala.replay import RolloutReplay
from maze_train.collect.actor_worker import ActorPolicy
from maze_train.collect.actors import DistributedActors, GatheredRollouts
from maze_train.core.events import Statistics
from maze_train.learner.config import Progress
from maze_train.learner.learners import Learners
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.joint import JointModel, members_of
from maze_train.training.actors import build_actors
from maze_train.training.config import AlgorithmConfig
from maze_train.training.events import TimeEvents
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer
from maze_train.workers.backends import Pickled


class IMPALA(Trainer):
    """Trainer for IMPALA, which uses actor rollouts in the order in which they are finished.

    During updates, actors in other processes continue to collect with the last broadcast weights.
    See `ImpalaLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The model being trained.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        actors: Actors; `begin` must have been called with `model`.
        replay: Replay buffers of rollouts, keyed by module id.
    """

    algorithm_config: ImpalaAlgorithmConfig

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: Learners,
        model: nn.Module,
        services: TrainerServices,
        *,
        actors: DistributedActors,
        replay: Mapping[str, RolloutReplay],
    ) -> None:
        super().__init__(config, learners, model, services)
        self.actors = actors
        self.replay = replay

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Receive a batch of rollouts, update the model, and broadcast the weights."""
        started, config = time.perf_counter(), self.algorithm_config
        if not self.actors.has_weights:
            self.actors.publish(self.learners.weights_seq_no)
        gathered = self.actors.gather(config.actors_batch_size, self.interruption.check)
        collected = time.perf_counter()
        gathered.episodes.record(statistics, self.infos)
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


class ImpalaBuilder(ActorCriticBuilder[ImpalaAlgorithmConfig]):
    """Builder for IMPALA: actors, learner and replay buffers."""

    @cached_property
    def source(self) -> DistributedActors:
        """Actors that collect experience, closed at the end of the run.

        With `runner=dev`, actors run one after the other in one process: no rollouts are queued,
        the policy lag depends only on `broadcast_interval`, and results are reproducible. With
        other runners, actors run during updates, and the order of rollouts depends on the speed of
        the actors.
        """
        # Without checkpoints, states are never requested. If None, the backend decides.
        is_kept = None if self.config.checkpoint.is_on else False
        num_actors = self.algorithm.num_actors
        context, envs = self.context, self.envs_per_actor
        actors = build_actors(context, num_actors, envs, can_be_restored=is_kept)
        context.env_calls.in_training_envs.append(actors.make_calls)
        return actors

    @property
    def has_actors(self) -> bool:
        """Whether actors collect the experience; always true."""
        return True

    @property
    def envs_per_actor(self) -> int:
        """Number of environments per actor."""
        return self.config.runner.concurrency // self.algorithm.num_actors

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self.source.spaces

    def trainer_parts(self, model: nn.Module) -> Mapping[str, Any]:
        """Build the actors, and the replay buffers if configured."""
        context = self.context
        actors = self.source
        policy = ActorPolicy(
            Pickled(self.model_maker(), "model"),
            self.algorithm.n_rollout_steps,
            context.config.checkpoint.allow_new_episodes,
            context.config.tracking.info_keys,
            records_log_probs=True,
            keeps_terminal_obs=isinstance(model, JointModel),
        )

        def seeds_of(actor: int, generation: int) -> tuple[int, int]:
            name, seed_of = f"actors/{actor}/{generation}", context.seeds.integer
            return seed_of(f"{name}/episodes"), seed_of(f"{name}/actions")

        queue_size = self.algorithm.queue_size
        actors.begin(model, policy, seeds_of, queue_size=queue_size, splits_turns=True)
        config, members = self.algorithm, members_of(model)
        columns = {key: len(agents) for key, agents in members.items() if agents}
        replay = {
            key: RolloutReplay(
                config.replay_size,
                config.num_replayed,
                self.envs_per_actor * count,
                context.seeds.integer(f"replay/{key}" if members else "replay"),
            )
            for key, count in (columns or {DEFAULT_MODULE: 1}).items()
            if config.replay_size
        }
        return {"actors": actors, "replay": replay}

    def before_training(self, trainer: Trainer) -> None:
        """Collect observation statistics in separate environments if the model has none."""
        super().before_training(trainer)
        self.close_env()
