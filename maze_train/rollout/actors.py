"""Actors: environments with a copy of the policy, which collect rollouts for a learner."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.data.joining import join_rollouts
from maze_train.rollout.collector import RolloutCollector
from maze_train.rollout.episodes import FinishedEpisodes
from maze_train.rollout.weights import WeightsReader, WeightsWriter, weights_nbytes
from maze_train.workers.pool import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from maze_train.data.rollout import Rollout
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.types import Array

__all__ = [
    "DistributedActors",
    "GatheredRollouts",
    "RolloutActor",
    "SequentialDistributedActors",
    "StepCounts",
]


@dataclass
class StepCounts:
    """Counts of the steps of actors: made = trained + queued + under way + dropped."""

    made: int = 0
    """Steps of all environments of all actors."""

    trained: int = 0
    """Those that were handed to the learner."""

    dropped: int = 0
    """Those that were lost with an actor or an episode, or in flight when a run stopped."""

    @property
    def in_flight(self) -> int:
        """Those that are queued, or in a rollout that is under way."""
        return self.made - self.trained - self.dropped


@dataclass(frozen=True)
class GatheredRollouts:
    """Rollouts of actors, as the learner gets them."""

    rollout: Rollout
    """Rollouts of actors side by side, with log-probabilities and the numbers of their weights."""

    episodes: FinishedEpisodes
    """Episodes that ended in them."""

    queue_before: int
    """Rollouts that waited when the learner asked."""

    queue_after: int
    """Rollouts that wait now."""

    waited_s: float
    """Seconds in which the learner had nothing to do."""


@dataclass(frozen=True)
class ActorSettings:
    """Settings of one actor, besides its environments and its policy."""

    num_steps: int
    """T."""

    env_seed: int
    """Seed of the episodes."""

    action_seed: int
    """Seed of the actions."""

    allow_new_episodes: bool = False
    """See `RolloutCollector`."""


class RolloutActor:
    """Environments, a policy with the newest weights, and what it collects with them.

    Args:
        env: The environments, E of them.
        model: The policy; its parameters become those that the learner publishes.
        weights: Memory that a `WeightsWriter` writes.
        settings: Length of the rollouts, seeds.
        on_step: Called after each step of the environments, see `RolloutCollector`.
    """

    def __init__(
        self,
        env: MazeVectorEnv,
        model: nn.Module,
        weights: Any,
        settings: ActorSettings,
        on_step: Callable[[], object] | None = None,
    ) -> None:
        self.model = model
        self.weights = WeightsReader(model, weights)
        self.collector = RolloutCollector(
            env,
            settings.num_steps,
            env_seed=settings.env_seed,
            action_seed=settings.action_seed,
            allow_new_episodes=settings.allow_new_episodes,
            records_log_probs=True,
            on_step=on_step,
        )

    def act(self) -> tuple[Rollout, FinishedEpisodes]:
        """One rollout with the newest weights, and the episodes that ended in it.

        Its memory is that of the next rollout.
        """
        seq_no = self.weights.load()
        rollout, episodes = self.collector.collect(self.model)  # type: ignore[arg-type]  # an ActingModel
        seq_nos = torch.full((rollout.num_envs,), seq_no, dtype=torch.int64)
        return replace(rollout, weights_seq_no=seq_nos), episodes


class DistributedActors(ABC):
    """Actors of one learner, wherever they live.

    Args:
        num_actors: How many.
        num_steps: Steps T of each environment per rollout.
        seed_of: Gives the seed of a named stream of random numbers.
    """

    def __init__(self, num_actors: int, num_steps: int, seed_of: Callable[[str], int]) -> None:
        self.num_actors = num_actors
        self.num_steps = num_steps
        self.counts = StepCounts()
        self._seed_of = seed_of
        self._writer: WeightsWriter | None = None
        # How often each actor began anew, after a failure or with a run that is continued: with
        # other random numbers then.
        self._generations = [0] * num_actors
        # News between two calls of `gather`.
        self._news = FinishedEpisodes()
        self.has_weights = False

    @property
    @abstractmethod
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""

    @abstractmethod
    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Give the actors their policy.

        Args:
            model: The model that the learner updates.
            make_model: Builds a model of the same layout, in whatever process.
        """

    def publish(self, weights_seq_no: int) -> None:
        """Let actors act with the weights of the learner as they are, from their next rollout on.

        Args:
            weights_seq_no: Updates that the weights have seen.
        """
        assert self._writer is not None, "call begin first"
        self._writer.publish(weights_seq_no)
        self.has_weights = True

    @abstractmethod
    def gather(self, count: int, idle: Callable[[], None]) -> GatheredRollouts:
        """The next rollouts, in the order in which they were finished.

        Args:
            count: How many.
            idle: Called again and again while there is nothing to do but wait; what it raises goes
                through, and nothing is lost then.
        """

    @abstractmethod
    def close(self) -> None:
        """End the actors; calling it again does nothing."""

    def _settings(self, index: int, *, allow_new_episodes: bool = False) -> ActorSettings:
        """The settings of an actor, with seeds of its own for each time that it begins anew."""
        name = f"actors/{index}/{self._generations[index]}"
        return ActorSettings(
            num_steps=self.num_steps,
            env_seed=self._seed_of(f"{name}/episodes"),
            action_seed=self._seed_of(f"{name}/actions"),
            allow_new_episodes=allow_new_episodes,
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts, published weights, and how often actors began anew."""
        return {
            "counts": asdict(self.counts),
            "generations": list(self._generations),
            "weights": None if not self.has_weights else self._weights_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.counts = StepCounts(**state["counts"])
        self._generations = list(state["generations"])
        if state["weights"] is not None:
            assert self._writer is not None, "call begin first"
            self._writer.load_state_dict(state["weights"])
            self.has_weights = True

    def _take_news(self) -> FinishedEpisodes:
        news, self._news = self._news, FinishedEpisodes()
        return news

    def _begin_anew(self, num_envs: int) -> None:
        """Go on with new episodes in all environments, without what was in flight."""
        dropped = self.counts.in_flight
        self.counts.dropped += dropped
        self._generations = [generation + 1 for generation in self._generations]
        self._news.lost += num_envs
        lost = f", and {dropped} steps that were in flight are dropped" if dropped else ""
        warn(f"the environments of the actors begin new episodes{lost}")

    def _weights_state(self) -> dict[str, Any]:
        assert self._writer is not None
        return self._writer.state_dict()


class SequentialDistributedActors(DistributedActors):
    """Actors that take turns in this process: the same numbers each time.

    A rollout is collected when the learner asks for it, so none ever waits.

    Args:
        envs: The environments of each actor; the caller closes them.
        num_steps: Steps T of each environment per rollout.
        seed_of: Gives the seed of a named stream of random numbers.
        allow_new_episodes: See `RolloutCollector`.
    """

    def __init__(
        self,
        envs: Sequence[MazeVectorEnv],
        num_steps: int,
        seed_of: Callable[[str], int],
        *,
        allow_new_episodes: bool = False,
    ) -> None:
        super().__init__(len(envs), num_steps, seed_of)
        self._envs = list(envs)
        self._allow_new_episodes = allow_new_episodes
        self._actors: list[RolloutActor] = []
        self._make_model: Callable[[], nn.Module] | None = None
        self._memory: Array = np.empty(0, np.uint8)
        self._turn = 0

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._envs[0].env_observation_space, self._envs[0].single_action_space

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Give the actors their policy."""
        self._memory = np.zeros(weights_nbytes(model), np.uint8)
        self._writer = WeightsWriter(model, self._memory)
        self._make_model = make_model
        self._make_actors()

    def _make_actors(self) -> None:
        assert self._make_model is not None
        self._actors = [
            RolloutActor(
                env,
                self._make_model(),
                self._memory,
                self._settings(i, allow_new_episodes=self._allow_new_episodes),
            )
            for i, env in enumerate(self._envs)
        ]

    def gather(self, count: int, idle: Callable[[], None]) -> GatheredRollouts:
        """Let the next actors in turn collect a rollout each."""
        started = time.perf_counter()
        rollouts, episodes = [], self._take_news()
        for _ in range(count):
            actor = self._actors[self._turn]
            rollout, finished = actor.act()
            # A copy, because an actor may have several turns.
            rollouts.append(join_rollouts([rollout]))
            episodes.extend(finished)
            self._turn = (self._turn + 1) % self.num_actors
            made, trained = rollout.rewards.numel(), rollout.num_samples
            self.counts.made += made
            self.counts.trained += trained
            self.counts.dropped += made - trained
        waited_s = time.perf_counter() - started
        return GatheredRollouts(join_rollouts(rollouts), episodes, 0, 0, waited_s)

    def close(self) -> None:
        """Nothing: the environments belong to others."""

    def state_dict(self) -> dict[str, Any]:
        """Everything: where the environments stand, too."""
        collectors = [actor.collector.state_dict() for actor in self._actors]
        return {**super().state_dict(), "collectors": collectors, "turn": self._turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; where it is one of actors in processes, with new episodes."""
        super().load_state_dict(state)
        if state["collectors"] is None:
            self._begin_anew(sum(env.num_envs for env in self._envs))
        # With the seeds of their generation, for those that have not begun.
        self._make_actors()
        if state["collectors"] is None:
            return
        self._turn = state["turn"]
        for actor, collector in zip(self._actors, state["collectors"], strict=True):
            actor.collector.load_state_dict(collector)
