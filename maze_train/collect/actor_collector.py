"""Collects rollouts with actors that are waited for, instead of environments that are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from maze_train.collect.actors import Actors
from maze_train.collect.collector import Collector
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.seeding import Seeds
from maze_train.core.types import Array
from maze_train.data.rollout import Rollout, join_rollouts
from maze_train.learner.modules import torch_threads
from maze_train.workers.pool import WorkerFailedError


class ActorCollector(Collector):
    """Lets every actor collect a rollout with the current weights, and joins them side by side.

    It takes the place of a `RolloutCollector`, with the same promises. A worker that fails is
    started again, within the budget of its pool: its actors are put back where they were after
    their last rollouts, which come with their states for that, and collect again what did not
    arrive. So the numbers are those of a run in which nothing failed. An actor that makes its
    worker fail twice in a row starts over, with new episodes and other random numbers.

    Args:
        actors: The actors.
        model: The acting model.
        make_model: Builds a model of the same layout, in whatever process.
        num_steps: T.
        env_seed: Seed of the episodes of all actors.
        action_seed: Seed of their actions.
        on_lost: Called with the environments, `[B]` bool, whose episodes were lost with an actor,
            before anybody learns from the next rollout.
        allow_new_episodes: See `RolloutCollector`.
        info_keys: Likewise.

    Attributes:
        env_s: Seconds that environments needed in the last rollout, in the slowest worker.
    """

    def __init__(
        self,
        actors: Actors,
        model: Any,
        make_model: Callable[[], Any],
        num_steps: int,
        *,
        env_seed: int,
        action_seed: int,
        on_lost: Callable[[Array], object] = lambda lost: None,
        allow_new_episodes: bool = False,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._actors, self._model, self._make_model = actors, model, make_model
        self._on_lost = on_lost
        self._seeds = [Seeds(env_seed), Seeds(action_seed)]
        self._settings: dict[str, Any] = {
            "num_steps": num_steps,
            "allow_new_episodes": allow_new_episodes,
            "info_keys": info_keys,
        }
        self._has_begun = False
        self._is_set_up = [False] * len(actors.slices)
        self._lost = np.zeros((actors.num_actors, actors.num_envs), np.bool_)
        self._restarts = 0

    def collect_steps(
        self, model: Any, meanwhile: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Let every actor collect T steps.

        Args:
            model: The acting model, the same each time.
            meanwhile: Called once, with gradients enabled, while the actors act with their copies
                of the weights.

        Returns:
            The rollout, in separate memory, and the episodes that ended in it.
        """
        assert model is self._model, "actors act with the model that they were made for"
        actors = self._actors
        self._begin()
        actors.publish(0)
        collected = self._results("collect", meanwhile)
        rollouts = []
        episodes = FinishedEpisodes(worker_restarts=self._restarts, lost=int(self._lost.sum()))
        for worker, own in enumerate(collected):
            for part in own:
                rollouts.append(actors.rollout(worker, part))
                episodes.extend(part.episodes)
                actors.states[part.actor] = part.state
        if self._lost.any():
            self._on_lost(self._taken_lost())
        self._restarts = 0
        self.env_s = max(sum(part.env_s for part in own) for own in collected)
        return join_rollouts(rollouts), episodes

    def _begin(self) -> None:
        """Make room for rollouts, unless there is."""
        if self._has_begun:
            return
        self._has_begun = True
        self._actors.begin(
            self._model,
            self._make_model,
            max(map(len, self._actors.slices)),
            self._seeds_of,
            records_log_probs=self.records_log_probs,
            keeps_terminal_obs=self.keeps_terminal_obs,
            returns_states=self._actors.pool.may_restart,
            **self._settings,
        )

    # -- calls -----------------------------------------------------------------------------------

    def _results(
        self, method: str = "", meanwhile: Callable[[], object] | None = None
    ) -> list[list[Any]]:
        """Results of a call of every actor, by worker; without a method, actors are only set up."""
        self._begin()
        slices = self._actors.slices
        try:
            for worker, part in enumerate(slices):
                self._send(worker, method, part)
            if meanwhile is not None:
                with torch.enable_grad():
                    meanwhile()
            with torch_threads(1):  # as workers elsewhere have
                return [self._received(worker, method) for worker in range(len(slices))]
        except BaseException:
            # Results that were not received would be taken for later ones.
            self._actors.close()
            raise

    def _send(self, worker: int, method: str, actors: Sequence[int], **changes: Any) -> None:
        """Start calls of actors of a worker, which is set up before unless it is."""
        pool, part = self._actors.pool, self._actors.slices[worker]
        if not self._is_set_up[worker]:
            self._actors.set_up(worker, **changes)
        for actor in actors if method else ():
            slot = (part.index(actor),) if method == "collect" else ()
            pool.call(worker, method, actor, *slot)

    def _received(self, worker: int, method: str) -> list[Any]:
        """Results of a call of the actors of a worker, which is started again where it fails."""
        pool, part = self._actors.pool, self._actors.slices[worker]
        found: list[Any] = []
        failures = 0
        while not self._is_set_up[worker] or (method and len(found) < len(part)):
            try:
                if not self._is_set_up[worker]:
                    self._finish_set_up(worker)
                else:
                    found.append(pool.receive(worker))
                    failures = 0
            except WorkerFailedError as failure:
                if failure.raised and not method:
                    raise failure.as_error() from None
                failures += 1
                failed = part[len(found)] if failures > 1 and len(found) < len(part) else None
                self._restart(failure.with_traceback(None), failed)
                for collected in found if method == "collect" else ():
                    self._actors.states[collected.actor] = collected.state
                self._send(worker, method, part[len(found) :], allow_new_episodes=True)
        return found

    def _finish_set_up(self, worker: int) -> None:
        pool = self._actors.pool
        pool.receive(worker)
        for actor in self._actors.slices[worker]:
            if self._actors.states[actor] is not None:
                lost, is_exact = pool.receive(worker)
                self._lost[actor] |= lost
                self.is_exact = self.is_exact and is_exact
        self._is_set_up[worker] = True

    def _restart(self, failure: WorkerFailedError, failed: int | None) -> None:
        """Start a worker again, or end training.

        Args:
            failure: The failure.
            failed: An actor that starts over, since it made the worker fail before.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        outlook = "and its environments are put back where they were after the last rollout"
        if failed is not None:
            first = failed * self._actors.num_envs
            last = first + self._actors.num_envs - 1
            outlook = f"and its environments {first} to {last} begin new episodes"
            self._actors.start_over(failed)
            self._lost[failed] = True
        self._actors.pool.restart(failure, failure.text, outlook)
        self._is_set_up[failure.index] = False
        self._restarts += 1

    def _seeds_of(self, actor: int, generation: int) -> tuple[int, int]:
        name = f"{actor}/{generation}"
        env_seed, action_seed = (seeds.integer(name) for seeds in self._seeds)
        return env_seed, action_seed

    # -- state -----------------------------------------------------------------------------------

    def _taken_lost(self) -> Array:
        """Environments whose episodes were lost since this was asked for, `[B]` bool."""
        lost = self._lost.flatten()
        self._lost[:] = False
        return lost

    def state_dict(self) -> dict[str, Any]:
        """State of each actor, and how often it started over; valid between two rollouts."""
        states = self._results("state_dict")
        kept = self._actors.state_dict([state for own in states for state in own])
        return {**kept, "turns": self.turns.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Continue from `state`; see `Collector`."""
        self._begin()
        self._actors.load_state_dict(state)
        self._is_set_up = [False] * len(self._is_set_up)
        self._results()
        lost = self._taken_lost()
        self.turns.load_state_dict(state["turns"])
        self.turns.forget(torch.from_numpy(lost))
        return lost
