"""Collects rollouts synchronously with actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from maze_train.collect.actor_worker import ActorPolicy
from maze_train.collect.actors import DistributedActors
from maze_train.collect.collector import Collector
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.seeding import Seeds
from maze_train.core.types import Array
from maze_train.data.rollout import Rollout
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.workers.backends import Pickled


class ActorCollector(Collector):
    """Collects one rollout per actor with the current weights, and concatenates the rollouts.

    Interface and guarantees are the same as for `RolloutCollector`.

    Args:
        actors: The actors.
        model: The acting model.
        make_model: Builds a model of the same architecture in any process.
        num_steps: Number of steps T per rollout.
        env_seed: Seed of the episodes of all actors.
        action_seed: Seed of the actions of all actors.
        on_lost: Callback for episodes lost in an actor failure, called with the mask `[B]` of the
            environments before the next rollout is used for learning.
        allow_new_episodes: See `RolloutCollector`.
        info_keys: See `RolloutCollector`.
    """

    def __init__(
        self,
        actors: DistributedActors,
        model: nn.Module,
        make_model: Callable[[], nn.Module],
        num_steps: int,
        *,
        env_seed: int,
        action_seed: int,
        on_lost: Callable[[Array], object] = lambda lost: None,
        allow_new_episodes: bool = False,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._actors, self._model = actors, model
        self._on_lost = on_lost
        self._seeds = [Seeds(env_seed), Seeds(action_seed)]
        self._policy = ActorPolicy(
            Pickled(make_model, "model"),
            num_steps,
            allow_new_episodes,
            info_keys,
            returns_states=actors.pool.may_restart,
        )
        self._has_begun = False

    def _begin(self) -> DistributedActors:
        """Set up the actors on the first call."""
        if not self._has_begun:
            self._has_begun = True
            policy = replace(
                self._policy,
                records_log_probs=self.records_log_probs,
                keeps_terminal_obs=self.keeps_terminal_obs,
            )
            self._actors.begin(self._model, policy, self._seeds_of, ordered=True)
        return self._actors

    def _seeds_of(self, actor: int, generation: int) -> tuple[int, int]:
        env_seed, action_seed = (seeds.integer(f"{actor}/{generation}") for seeds in self._seeds)
        return env_seed, action_seed

    def collect_steps(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps with every actor.

        Args:
            model: The acting model; must be the one passed to the constructor.
            overlap: Function to call once during collection, with gradients enabled. The actors use
                copies of the weights, so the function may change the weights of the model.

        Returns:
            The rollout, in memory that later calls do not overwrite, and the finished episodes.
        """
        assert model is self._model, "the actors were built for another model"
        actors = self._begin()
        actors.publish(0)
        gathered = actors.gather(actors.num_actors, overlap=overlap)
        self.env_s = gathered.env_s
        if gathered.lost.any():
            self._on_lost(gathered.lost)
        rollout = gathered.rollouts[DEFAULT_MODULE]
        return replace(rollout, weights_seq_no=None), gathered.episodes

    def make_calls(self) -> None:
        """Make new calls in the environments of all actors, see `EnvCalls`."""
        self._begin().make_calls()

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the generation of each actor; call between rollouts."""
        state = self._begin().state_dict()
        kept = {name: state[name] for name in ("generations", "actors")}
        return {**kept, "turns": self.turns.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore from `state`; see `Collector`."""
        actors = self._begin()
        actors.load_state_dict({"counts": {}, "weights": None, "turn": 0, **state})
        lost, self.is_exact = actors.take_lost(), actors.is_exact
        self.turns.load_state_dict(state["turns"], torch.from_numpy(lost))
        return lost
