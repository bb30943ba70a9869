"""Workers that play episodes, many at a time, and report those that ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from maze_train.rollout.episode_player import build_player

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import gymnasium

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.agents import SlotAgent
    from maze_train.rollout.episode_player import PlayedEpisode, PlaySettings
    from maze_train.workers.messages import Portable
    from maze_train.workers.pool import WorkerContext

__all__ = ["PlayerWorker", "play_on"]

Task = TypeVar("Task", contravariant=True)
Result = TypeVar("Result")

LONGEST_S = 0.05
"""Seconds after which a call returns, unless a step takes longer."""


class Plays(Protocol[Task, Result]):
    """Plays episodes step by step."""

    @property
    def load(self) -> int:
        """Episodes that are played or wait."""
        ...

    def add(self, tasks: Iterable[Task], /) -> None:
        """Add episodes to play."""
        ...

    def step(self) -> list[Result]:
        """One step of every episode; returns those that ended."""
        ...


def play_on(player: Plays[Task, Result], tasks: Iterable[Task], tell_s: float) -> list[Result]:
    """Take episodes over, and play for a while.

    Args:
        player: The player.
        tasks: Further episodes.
        tell_s: Seconds for which results wait for others, while there is something to play: each
            message takes time from those who play.

    Returns:
        Episodes that ended.
    """
    player.add(tasks)
    began, results = time.monotonic(), list[Result]()
    while player.load:
        results += player.step()
        spent = time.monotonic() - began
        if spent > (tell_s if results else LONGEST_S):
            break
    return results


class PlayerWorker:
    """A worker of `RolloutPlayer`, see `TaskQueue`.

    Args:
        factories: Functions that build its environments.
        make_agent: Builds what acts in their slots.
        settings: How episodes are played.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[Callable[[], gymnasium.Env[Any, Any]]]],
        make_agent: Portable[Callable[[EnvSlots], SlotAgent]],
        settings: PlaySettings,
        on_non_finite: str,
        context: WorkerContext,
    ) -> None:
        self._is_remote = context.is_remote
        self._player = build_player(
            factories.value,
            make_agent.value,
            settings,
            on_non_finite,
            context.count,
            first=context.index * len(factories.value),
        )

    def describe(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        slots = self._player.slots
        return slots.env_observation_space, slots.single_action_space

    def begin_round(self) -> None:
        """Forget earlier episodes."""
        self._player.drop()

    def advance(self, tasks: list[tuple[int, int]]) -> list[PlayedEpisode]:
        """Play for a while; tasks are numbers and seeds of further episodes."""
        return play_on(self._player, tasks, LONGEST_S if self._is_remote else 0.0)

    def drop(self) -> None:
        """Forget all episodes; unfinished videos are removed."""
        self._player.drop()

    def close(self) -> None:
        """Close the environments."""
        self._player.close()
