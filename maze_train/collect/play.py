"""Loop that plays episodes; used in evaluations, rollouts, recordings and ES."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.step_end import DROPPED, EpisodeEnd
from maze_train.core.types import Array, ArrayTree
from maze_train.envs.batch import SUCCESS, numbers_of
from maze_train.spaces.agents import ACTS

if TYPE_CHECKING:
    from maze_train.collect.recording import Recorder
    from maze_train.data.trajectories import Trajectory


class Episode(NamedTuple):
    """An episode to play.

    Attributes:
        number: Index of the requested episode, from 0.
        seed: Seed of the environment.
        action_seed: Seed of the policy's random choices.
        noise_index: Index into the noise table that perturbs the weights; see `MemberRows`.
    """

    number: int
    seed: int
    action_seed: int = 0
    noise_index: int = 0


class ObservationMoments(NamedTuple):
    """Moments of the observations of one episode, float64.

    Attributes:
        samples: Number of observations, 0-d.
        mean: Means of all normalised entries, as one vector.
        var: Population variances (divisor `samples`), as one vector.
    """

    samples: Array
    mean: Array
    var: Array


class RowPolicy(ABC):
    """Acts in several environments (rows), each of which plays a separate episode."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (optional)
        """Prepare for the episodes of a round; subclasses define the arguments."""

    @abstractmethod
    def begin(self, row: int, episode: Episode) -> None:
        """Begin an episode in an environment that was reset.

        Args:
            row: Index of the environment.
            episode: The episode.
        """

    @abstractmethod
    def act(self) -> ArrayTree:
        """Choose the actions of the environments that play.

        Returns:
            Actions `[n, ...]` in the order of `PlayableEnv.playing`; a flat dict of arrays for a
            Dict or Tuple action space. Additional rows are ignored.
        """

    def moments(self, row: int) -> ObservationMoments | None:
        """Return the moments of the observations in the episode; None if not computed."""
        return None


class PlayableEnv(Protocol):
    """Environments that play episodes: a slice, or a vector environment.

    An environment is paused at the end of its episode, unless it `starts_itself`.
    """

    @property
    def num_envs(self) -> int:
        """Number of environments n."""
        ...

    @property
    def agents(self) -> Sequence[str]:
        """Names of the agents; empty in single-agent environments."""
        ...

    @property
    def starts_itself(self) -> bool:
        """Whether an ended episode is followed by the next one without `begin`."""
        ...

    @property
    def playing(self) -> list[int]:
        """Rows of the environments that play, in increasing order."""
        ...

    @property
    def obs(self) -> ArrayTree:
        """Current observations, `[n, ...]` per leaf."""
        ...

    @property
    def rewards(self) -> Array:
        """Rewards of the last step, `[n]`."""
        ...

    @property
    def end(self) -> Array:
        """`StepEnd` codes of the last step, `[n]`."""
        ...

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Begin episodes in paused environments, with the given seed per row."""
        ...

    def advance(self, actions: ArrayTree) -> Mapping[int, EpisodeEnd | None]:
        """Step the environments that play; return episode ends by row, None for a dropped one."""
        ...


@dataclass(frozen=True)
class PlayedEpisode:
    """Result of an episode.

    Attributes:
        number: Index of the requested episode, from 0.
        seed: Seed of the episode.
        episode_return: Undiscounted sum of rewards, or of raw rewards if the environment reports
            them.
        length: Number of steps, >= 1.
        success: 1.0 or 0.0 if the final info has `is_success` (mean over agents), else NaN.
        end: `StepEnd` code of the last step. For DROPPED episodes (non-finite value), the other
            fields describe the episode up to this step.
        trajectory: Observations and actions, if recorded and not dropped.
        video: Path of the video, if any.
        fitness: Undiscounted sum of the rewards that the agent receives.
        moments: Moments of the observations; None if not computed.
        info: The final info, or its requested values.
        agent_returns: Sum of rewards by agent, in multi-agent environments.
        agent_turns: Number of actions by agent, in multi-agent environments.
    """

    number: int
    seed: int
    episode_return: float
    length: int
    success: float
    end: int
    trajectory: Trajectory | None = None
    video: str | None = None
    fitness: float = math.nan
    moments: ObservationMoments | None = None
    info: dict[str, Any] = field(default_factory=dict)
    agent_returns: dict[str, float] = field(default_factory=dict)
    agent_turns: dict[str, int] = field(default_factory=dict)

    @property
    def lost(self) -> bool:
        """Whether the episode was dropped because of a non-finite value."""
        return self.end == DROPPED


class EpisodeQueue:
    """Episodes that are played in order by any free environment: rollouts and ES.

    Attributes:
        waiting: The episodes that have not begun.
    """

    def __init__(self, episodes: Iterable[Episode] = ()) -> None:
        self.waiting = deque(episodes)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def next(self, row: int) -> Episode | None:
        """Return the next episode of a free environment; None: the environment stays paused."""
        return self.waiting.popleft() if self.waiting else None

    def drop(self, row: int, episode: Episode) -> None:
        """Record that an episode was dropped, which its result reports."""


class EpisodePlan:
    """Plan in which environment i of n plays the episodes i, i + n, ...: evaluations.

    A dropped episode is repeated with the next seed of its environment. The seeds are those of the
    vector environment after a reset with `root`.

    Args:
        root: Root of the seeds.
        n_episodes: Number of episodes.
        num_envs: Number of environments n.
    """

    def __init__(self, root: int, n_episodes: int, num_envs: int) -> None:
        self.n_episodes = n_episodes
        self._numbers = list(range(num_envs))
        self._seeds = [EpisodeSeeds(root, row, num_envs) for row in range(num_envs)]

    def __bool__(self) -> bool:
        return min(self._numbers) < self.n_episodes

    def next(self, row: int) -> Episode | None:
        """Return the next episode of an environment; None after its last one."""
        number = self._numbers[row]
        if number >= self.n_episodes:
            return None
        self._numbers[row] += len(self._numbers)
        return Episode(number, self._seeds[row].next())

    def drop(self, row: int, episode: Episode) -> None:
        """Repeat a dropped episode."""
        self._numbers[row] = episode.number


class EpisodeRunner:
    """Plays the episodes of a queue or plan, one per environment at a time.

    Args:
        env: The environments.
        policy: Chooses the actions.
        episodes: The episodes.
        recorder: Records trajectories and videos; None disables recording.
        on_step: Function to call after each step with the number of stepped environments.
    """

    def __init__(
        self,
        env: PlayableEnv,
        policy: RowPolicy,
        episodes: EpisodeQueue | EpisodePlan,
        recorder: Recorder | None = None,
        on_step: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.env, self.policy, self.episodes = env, policy, episodes
        self._recorder, self._on_step = recorder, on_step
        n = env.num_envs
        self.running: dict[int, Episode] = {}
        self._free = set(range(n))
        self._returns, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._turns = np.zeros((n, len(env.agents)), np.int64)

    def step(self) -> list[PlayedEpisode]:
        """Begin episodes in free environments, and step all that play; return ended episodes.

        Raises:
            EnvError: If an environment or a policy raises or returns an invalid value.
            RunDirectoryError: If a video cannot be written.
        """
        env = self.env
        if self._free and self.episodes:
            self._begin_episodes()
        rows = env.playing
        if not (rows or env.starts_itself):
            return []
        actions = self.policy.act()
        if env.agents:
            self._turns[rows] += env.obs[ACTS][rows]
        ends = env.advance(actions)
        # Rows that do not play are reset when their next episode begins.
        self._returns += env.rewards
        self._lengths += 1
        self._on_step(len(rows))
        if self._recorder is not None:
            self._recorder.step()
        return [self._ended(row, ends[row]) for row in sorted(ends) if row in self.running]

    def _begin_episodes(self) -> None:
        env, playing = self.env, set(self.env.playing)
        begun: dict[int, Episode] = {}
        for row in sorted(self._free):
            # A row of `starts_itself` that does not play is reset by the next step.
            if row in playing or not env.starts_itself:
                episode = self.episodes.next(row)
                if episode is not None:
                    begun[row] = episode
        seeds = {row: episode.seed for row, episode in begun.items() if row not in playing}
        if seeds:
            env.begin(seeds)
        for row, episode in begun.items():
            self.running[row] = episode
            self._returns[row], self._lengths[row], self._turns[row] = 0.0, 0, 0
            self.policy.begin(row, episode)
            if self._recorder is not None:
                self._recorder.begin(row, episode.number)
        self._free -= begun.keys()

    def _ended(self, row: int, end: EpisodeEnd | None) -> PlayedEpisode:
        """Return the result of an ended episode; `end` is None for a dropped episode."""
        env, episode = self.env, self.running.pop(row)
        self._free.add(row)
        if end is None:
            self.episodes.drop(row, episode)
        info = {} if end is None else end.info
        trajectory, video = (None, None) if self._recorder is None else self._recorder.end(row)
        counted = None if end is None else end.counted
        return PlayedEpisode(
            number=episode.number,
            seed=episode.seed,
            episode_return=float(self._returns[row] if counted is None else counted[0]),
            length=int(self._lengths[row]),
            success=numbers_of(info, (SUCCESS,), env.agents).get(SUCCESS, math.nan),
            end=DROPPED if end is None else int(env.end[row]),
            trajectory=trajectory,
            video=video,
            fitness=float(self._returns[row]),
            moments=self.policy.moments(row),
            info=info,
            agent_returns={} if end is None else end.agent_returns,
            agent_turns=dict(zip(env.agents, self._turns[row].tolist(), strict=True)),
        )

    def clear(self) -> None:
        """Forget all episodes; the caller pauses the environments."""
        self.running.clear()
        self._free = set(range(self.env.num_envs))
