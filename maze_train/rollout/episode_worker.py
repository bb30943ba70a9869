"""Workers that play episodes, many at a time, and the pool of them."""

from __future__ import annotations

import time
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from maze_train.envs.slots import EnvSlots
from maze_train.nets.population import row_blocks
from maze_train.rollout.episode_player import EpisodePlayer, PlayedEpisode
from maze_train.workers.places import Portable, ThisProcess
from maze_train.workers.pool import worker_names
from maze_train.workers.task_queue import TaskQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import gymnasium

    from maze_train.rollout.episode_player import PlaySettings
    from maze_train.rollout.slot_agent import EpisodeTask, SlotAgent
    from maze_train.workers.places import Place
    from maze_train.workers.pool import WorkerContext

    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]

__all__ = ["PlayerPool", "PlayerWorker"]

LONGEST_S = 0.05
"""Seconds after which a call returns elsewhere, unless a step takes longer."""

LONGEST_STEPS = 100
"""Steps after which one returns in this process, by no clock: what begins when does not vary."""

CALLS = {"advance": "a step of an episode", "set_agent": "building its policy"}
"""Names of calls in messages."""


class PlayerWorker:
    """A worker of `PlayerPool`, see `TaskQueue`.

    Args:
        factories: Functions that build its environments.
        settings: How episodes are played.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        report_s: Seconds for which results wait for others, while there is something to play: each
            message to another process takes time from those who play.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[MakeEnv]],
        settings: PlaySettings,
        on_non_finite: str,
        report_s: float,
        context: WorkerContext,
    ) -> None:
        count = len(factories.value)
        self._slots = EnvSlots(
            factories.value,
            row_blocks(count),
            first=context.index * count,
            on_non_finite=on_non_finite,
        )
        self._settings = settings
        self._report_s = report_s
        self._context = context
        self._player: EpisodePlayer | None = None

    def describe(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._slots.env_observation_space, self._slots.single_action_space

    def set_agent(self, make_agent: Portable[Callable[..., SlotAgent]], *args: Any) -> None:
        """Get what acts.

        Args:
            make_agent: Builds it; called with the slots.
            *args: Further arguments of `make_agent`.
        """
        agent = make_agent.value(self._slots, *args)
        self._player = EpisodePlayer(self._slots, agent, self._settings, self._context.count)

    def begin_round(self, *args: Any) -> None:
        """Tell the agent that a round begins; there are no episodes then."""
        assert self._player is not None, "set_agent() comes first"
        self._player.agent.begin_round(*args)

    def advance(self, tasks: Iterable[EpisodeTask]) -> list[PlayedEpisode]:
        """Play for a while, further episodes too; returns those that ended."""
        player = self._player
        assert player is not None, "set_agent() comes first"
        player.add(tasks)
        began, steps, results = time.monotonic(), 0, list[PlayedEpisode]()
        while player.load:
            results += player.step()
            steps += 1
            if not self._context.is_remote:
                is_over = bool(results) or steps == LONGEST_STEPS
            else:
                is_over = time.monotonic() - began > (self._report_s if results else LONGEST_S)
            if is_over:
                break
        return results

    def drop(self) -> None:
        """Forget all episodes; unfinished videos are removed."""
        if self._player is not None:
            self._player.drop()

    def close(self) -> None:
        """Close the environments; unfinished videos are removed."""
        self.drop()
        self._slots.close()


class PlayerPool:
    """Workers that play episodes in a place, and the episodes that are done.

    Args:
        env_factory: Builds an environment.
        num_envs: Environments of all workers together, >= 1, rounded up to equally many in each.
        settings: How episodes are played.
        place: Where they are played; None: in this process.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        report_s: See `PlayerWorker`.

    Attributes:
        waiting: Episodes that are done and were not taken, by number.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        settings: PlaySettings,
        place: Place | None,
        on_non_finite: str,
        report_s: float = LONGEST_S,
    ) -> None:
        place = place or ThisProcess()
        count = self._num_workers = place.num_workers(num_envs)
        slots = -(-num_envs // count)
        factories = Portable([env_factory] * slots, "env")
        names = worker_names("worker", count, slots)
        make_worker = partial(PlayerWorker, factories, settings, on_non_finite, report_s)
        self._pool = place.pool([make_worker] * count, names, CALLS)
        self._queue: TaskQueue[PlayedEpisode] = TaskQueue(self._pool, slots, attrgetter("number"))
        self.waiting: dict[int, PlayedEpisode] = {}

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._queue.spaces

    @property
    def worker_restarts(self) -> int:
        """Number of times workers were started again."""
        return self._pool.restarts

    @property
    def steps_made(self) -> int:
        """Environment steps made so far, those included that are not needed any more."""
        return sum(map(self._pool.steps, range(self._num_workers)))

    def _note(self, episode: PlayedEpisode) -> None:
        """Let an episode that ended wait for its turn."""
        self.waiting[episode.number] = episode

    def close(self) -> None:
        """Close the environments and remove unfinished videos; calling it again does nothing."""
        self._pool.close()
