"""Plays episodes with a policy, each a function of the policy and its seed alone."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError, EnvError
from maze_train.files import remove_leftovers
from maze_train.rollout.episode_player import (
    EpisodePlayer,
    PlayedEpisode,
    PlaySettings,
    build_player,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import gymnasium

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.agents import SlotAgent

    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
    MakeAgent = Callable[[EnvSlots], SlotAgent]

__all__ = [
    "EpisodePlayer",
    "PlaySettings",
    "PlayedEpisode",
    "RolloutPlayer",
    "SequentialPlayer",
]

WINDOW = 2
"""Episodes that are begun before the first one that is not done, for each that can be played at a
time: what is done waits in memory until it is its turn."""


class RolloutPlayer(ABC):
    """Plays the episodes of given seeds, somewhere, in any order, and tells of them in theirs.

    An episode follows from the policy, its seed and the settings, to the bit: not from who plays
    it, nor from what else is played. The exception are environments which a reset with a seed does
    not make forget what was before, such as `BipedalWalker-v3`. To be closed; it is a context
    manager that does so.

    Args:
        settings: How episodes are played.

    Attributes:
        steps_made: Environment steps made so far, those included that are not needed any more.
        waiting: Episodes of the last call of `play` that are done and were not taken, by number;
            they stay there when it ends early. One counts as taken when the next is asked for.
    """

    def __init__(self, settings: PlaySettings) -> None:
        self.settings = settings
        self.steps_made = 0
        self.waiting: dict[int, PlayedEpisode] = {}
        self._seeds: list[int] = []
        self._round = 0
        self._is_closed = False

    @property
    @abstractmethod
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""

    @property
    def worker_restarts(self) -> int:
        """How many times processes were started again."""
        return 0

    def play(
        self, seeds: Sequence[int], on_step: Callable[[int], object] | None = None
    ) -> Iterator[PlayedEpisode]:
        """Play an episode for each seed; calls off what an earlier call still plays.

        Args:
            seeds: Seeds >= 0. Episode j of these has the number j.
            on_step: Called again and again with the number of steps that were made meanwhile, 0
                included; what it raises goes through.

        Returns:
            The episodes in the order of their numbers, each as soon as all before it are done. Few
            are begun before it is asked for them, so little waits in memory.

        Raises:
            ConfigError: If a seed is no integer >= 0.
            EnvError: When it is asked for an episode, if an environment or a policy raises or
                returns something invalid.
            WorkerError: The same, if a process fails and is not started again.
        """
        checked = checked_seeds(seeds)
        self._round += 1
        return self._played(checked, self._round, on_step)

    def _played(
        self, seeds: list[int], number: int, on_step: Callable[[int], object] | None
    ) -> Generator[PlayedEpisode, None, None]:
        self._check_round(number)
        self._seeds = seeds
        waiting = self.waiting = dict[int, PlayedEpisode]()
        self._begin()
        try:
            for place in range(len(seeds)):
                limit = min(place + WINDOW * self._capacity, len(seeds))
                while place not in waiting:
                    self._check_round(number)
                    before = self.steps_made
                    self._advance(limit)
                    if on_step is not None:
                        on_step(self.steps_made - before)
                yield waiting[place]
                del waiting[place]
        finally:
            if self._round == number:
                self._end()

    def _check_round(self, number: int) -> None:
        if self._is_closed:
            raise EnvError("this player is closed: build a new one")
        if number != self._round:
            raise EnvError(
                "these episodes were called off, since play() was called again: take all episodes "
                "of one call before the next"
            )

    @property
    @abstractmethod
    def _capacity(self) -> int:
        """Episodes that can be played at a time."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin with new seeds."""

    def _note(self, ended: Iterable[PlayedEpisode]) -> None:
        """Let episodes that ended wait for their turn."""
        self.waiting.update((episode.number, episode) for episode in ended)

    @abstractmethod
    def _advance(self, limit: int) -> None:
        """Go on playing for a while, and note the episodes that ended.

        Args:
            limit: Episodes 0, ..., limit - 1 are to be played; it never falls.
        """

    @abstractmethod
    def _end(self) -> None:
        """Stop playing; what has not ended is dropped."""

    def close(self) -> None:
        """Close the environments and remove unfinished videos; calling it again does nothing."""
        self._is_closed = True
        self._close()
        video_dir = self.settings.video_dir
        if video_dir is not None:
            remove_leftovers(Path(video_dir))  # of processes that were killed

    @abstractmethod
    def _close(self) -> None:
        """Close what plays."""

    def __enter__(self) -> RolloutPlayer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SequentialPlayer(RolloutPlayer):
    """All episodes are played in this process.

    Args:
        env_factory: Builds an environment.
        make_agent: Builds what acts in the slots.
        settings: How episodes are played.
        concurrency: Episodes that are played at a time, >= 1; one is begun where one ended.
        on_non_finite: What to do about numbers that are not finite: `raise` or `skip`.

    Raises:
        ConfigError: If a setting is wrong.
        EnvError: If an environment can not be built, or can not make videos that are asked for.
        MissingExtraError: If a package that is needed is not installed.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        make_agent: MakeAgent,
        settings: PlaySettings,
        *,
        concurrency: int = 8,
        on_non_finite: str = "raise",
    ) -> None:
        super().__init__(settings)
        check_at_least("concurrency", concurrency, 1)
        self._player = build_player(
            [env_factory] * concurrency, make_agent, settings, on_non_finite
        )
        slots = self._player.slots
        self._spaces = slots.env_observation_space, slots.single_action_space
        self._slots = len(slots)
        self._next = 0

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._spaces

    @property
    def _capacity(self) -> int:
        return self._slots

    def _begin(self) -> None:
        self._player.drop()
        self._next = 0

    def _advance(self, limit: int) -> None:
        player = self._player
        player.add((number, self._seeds[number]) for number in range(self._next, limit))
        self._next = max(self._next, limit)
        self._note(player.step())
        self.steps_made = player.steps_made

    def _end(self) -> None:
        self._player.drop()

    def _close(self) -> None:
        self._player.close()


def checked_seeds(seeds: Iterable[Any]) -> list[int]:
    """Seeds as plain integers.

    Raises:
        ConfigError: If one is no integer >= 0.
    """
    checked: list[int] = []
    for i, seed in enumerate(seeds):
        try:
            number = operator.index(seed)
        except TypeError:
            number = -1
        if number < 0:
            raise ConfigError(f"seeds[{i}]", "expected an integer >= 0", seed)
        checked.append(number)
    return checked
