"""Plays episodes with a policy, each a function of the policy and its seed alone."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError, EnvError
from maze_train.files import remove_leftovers
from maze_train.rollout.episode_player import PlayedEpisode, PlaySettings
from maze_train.rollout.episode_worker import PlayerPool
from maze_train.rollout.slot_agent import EpisodeTask
from maze_train.rollout.video import ffmpeg_path
from maze_train.workers.places import Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    import gymnasium

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.slot_agent import SlotAgent
    from maze_train.workers.places import Place

    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
    MakeAgent = Callable[[EnvSlots], SlotAgent]

__all__ = ["PlaySettings", "PlayedEpisode", "RolloutPlayer"]

WINDOW = 2
"""Episodes that are begun before the first one that is not done, for each that can be played at a
time: what is done waits in memory until it is its turn."""


class RolloutPlayer(PlayerPool):
    """Plays the episodes of given seeds in any order, and returns them in the order of the seeds.

    An episode follows from the policy, its seed and the settings, to the bit: not from who plays
    it, nor from what else is played. The exception are environments which a reset with a seed does
    not make forget what was before, such as `BipedalWalker-v3`. To be closed; it is a context
    manager that does so.

    Episodes of a worker that fails are given to others, or to the one that takes its place with
    `on_worker_failure="restart"`, and come out the same. One that fails again after that ends it
    all: when it raised for the second time, or when the third worker died or hung with it.

    Args:
        env_factory: Builds an environment.
        make_agent: Builds what acts in the slots of a worker.
        settings: How episodes are played.
        place: Where they are played.
        num_envs: Environments of all workers together, >= 1, rounded up to equally many in each: so
            many episodes are played at a time, and one is begun where one ended.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.

    Attributes:
        waiting: Episodes of the last call of `play` that are done and were not taken, by number;
            they stay there when it ends early. One counts as taken when the next is asked for.

    Raises:
        ConfigError: If a setting is wrong, or something can not be sent to another process.
        EnvError: If an environment can not be built, or can not make videos that are asked for; it
            is a WorkerError where a worker process fails.
        MissingExtraError: If a package that is needed is not installed.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        make_agent: MakeAgent,
        settings: PlaySettings,
        place: Place | None = None,
        *,
        num_envs: int = 8,
        on_non_finite: str = "raise",
    ) -> None:
        check_at_least("num_envs", num_envs, 1)
        if settings.video_dir is not None:
            ffmpeg_path()
        self.settings = settings
        self._round = 0
        self._is_closed = False
        super().__init__(env_factory, num_envs, settings, place, on_non_finite)
        self._queue.set_up("set_agent", Portable(make_agent, "policy"))

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
        self, seeds: list[int], round_: int, on_step: Callable[[int], object] | None
    ) -> Generator[PlayedEpisode, None, None]:
        self._check_round(round_)
        waiting = self.waiting = dict[int, PlayedEpisode]()
        self._queue.drop()
        action_seed = self.settings.action_seed

        def task_of(number: int) -> EpisodeTask:
            seed = seeds[number]
            return EpisodeTask(number, seed, action_seed_of(action_seed, seed))

        self._queue.begin(task_of=task_of, seed_of=seeds.__getitem__)
        made = self.steps_made
        try:
            for number in range(len(seeds)):
                limit = min(number + WINDOW * self._queue.capacity, len(seeds))
                while number not in waiting:
                    self._check_round(round_)
                    self._queue.advance(limit, self._note)
                    before, made = made, self.steps_made
                    if on_step is not None:
                        on_step(made - before)
                yield waiting[number]
                del waiting[number]
        finally:
            if self._round == round_:
                self._queue.drop()

    def _check_round(self, number: int) -> None:
        if self._is_closed or not len(self._pool):
            raise EnvError("this player is closed: build a new one")
        if number != self._round:
            raise EnvError(
                "these episodes were called off, since play() was called again: take all episodes "
                "of one call before the next"
            )

    def close(self) -> None:
        """Close the environments and remove unfinished videos; calling it again does nothing."""
        self._is_closed = True
        super().close()
        video_dir = self.settings.video_dir
        if video_dir is not None:
            remove_leftovers(Path(video_dir))  # of processes that were killed

    def __enter__(self) -> RolloutPlayer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def action_seed_of(action_seed: int, seed: int) -> int:
    """Seed of what an agent does by chance in an episode, in [0, 2^32).

    Args:
        action_seed: See `PlaySettings`.
        seed: Seed of the episode, >= 0.
    """
    return int(np.random.SeedSequence([action_seed, seed]).generate_state(1)[0])


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
