"""Plays episodes: one loop for evaluations, rollouts, recordings and ES."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from maze_train.core.step_end import DROPPED, RESET_ONLY, EpisodeEnd, has_ended, is_followed_by_new
from maze_train.core.types import Array, ArrayTree, tree_map
from maze_train.envs.batch import SUCCESS, numbers_of
from maze_train.envs.vector import MazeVectorEnv
from maze_train.nets.acting import Actor, as_arrays
from maze_train.spaces.agents import ACTS
from maze_train.spaces.tensors import as_tensors

if TYPE_CHECKING:
    from maze_train.collect.recording import Recorder
    from maze_train.data.trajectories import Trajectory


class EpisodeTask(NamedTuple):
    """An episode that is to be played.

    Attributes:
        number: Its place among those that were asked for, from 0 on.
        seed: Seed of the environment.
        action_seed: Seed of what the agent does by chance.
        noise_index: Index in the noise table, where the weights of the agent are perturbed; see
            `MemberAgent`.
    """

    number: int
    seed: int
    action_seed: int
    noise_index: int = 0


class RowAgent(ABC):
    """Chooses the actions of the environments that it was built with; each plays an episode."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (not all have something to do)
        """Get ready for the episodes of a round; `args` are what its owner says of it."""

    @abstractmethod
    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, which the environment of this row has just begun.

        Args:
            row: Which environment.
            task: The episode.
        """

    @abstractmethod
    def act(self) -> ArrayTree:
        """Choose the actions of the environments that play.

        Returns:
            `[n, ...]` in the order of `playing`, or a flat dict of such arrays when the action
            space is a Dict or Tuple; further rows are ignored.
        """

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where the agent takes them."""
        return None


class ObservationMoments(NamedTuple):
    """Moments of the observations that one episode acted on, float64.

    Attributes:
        samples: Number of observations, 0-d.
        mean: Means, all normalised entries in one vector.
        var: Variances with divisor `samples`.
    """

    samples: Array
    mean: Array
    var: Array


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played.

    Attributes:
        number: Its place among those that were asked for, from 0 on.
        seed: Its seed.
        episode_return: Undiscounted sum of the rewards, of raw ones where the environment reports
            them.
        length: Number of steps, >= 1.
        success: 1.0 or 0.0 if the last info has `is_success` (of several agents the mean), else
            NaN.
        end: Code of the last step, see `StepEnd`. If the episode was dropped because a value was
            not finite, the other fields describe it up to that step.
        trajectory: Observations and actions, where they are recorded and the episode was not lost.
        video: Path of its video, where there is one.
        fitness: Undiscounted sum of the rewards as the agent gets them.
        moments: Moments of the observations, where the agent takes them.
        info: The last info, or the numbers of it that were asked for.
        agent_returns: Sum of the rewards of each agent, where there are several.
        agent_turns: Number of actions of each agent, where there are several.
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
        """Whether the episode was dropped because a value was not finite."""
        return self.end == DROPPED


class Episodes(ABC):
    """Environments that play numbered episodes.

    Attributes:
        num_envs: Number of environments.
        agents: Names of the agents; empty for a single agent.
        playing: Rows of the environments that play, growing.
        obs: Observations to act on, `[n, ...]`; a mapping of such if there are several agents.
        rewards: Rewards of the last step, `[n]`.
        end: How the last step ended, `[n]`, see `StepEnd`.
    """

    num_envs: int
    agents: Sequence[str]
    playing: list[int]
    obs: Any
    rewards: Array
    end: Array

    @abstractmethod
    def begin(self) -> Mapping[int, EpisodeTask]:
        """Begin what can begin; returns the episodes that began, by row."""

    @abstractmethod
    def step(self, actions: ArrayTree) -> Mapping[int, EpisodeEnd | None]:
        """Take the actions of the environments that play; returns the ends of episodes by row.

        The end of an episode that was dropped is None.
        """


class VectorEpisodes(Episodes):
    """The episodes of a vector environment: number j is played in environment j modulo n.

    The vector environment begins episodes itself. An episode that was dropped is played again, with
    another seed. All tasks have the seed of the run of episodes.

    Args:
        env: The vector environment, which is reset.
        seed: Seed of the run of episodes.
    """

    def __init__(self, env: MazeVectorEnv, seed: int) -> None:
        self.env, self.num_envs, self.agents = env, env.num_envs, env.agents
        self.playing = list(range(env.num_envs))
        self.obs, _ = env.reset(seed=seed)
        self.rewards: Array = np.zeros(env.num_envs)
        self.end: Array = np.full(env.num_envs, RESET_ONLY, np.uint8)
        self._seed, self._numbers = seed, np.arange(env.num_envs)

    def begin(self) -> dict[int, EpisodeTask]:
        """Number the episodes that have begun, see `Episodes`."""
        self._numbers[has_ended(self.end)] += self.num_envs
        rows = np.flatnonzero(is_followed_by_new(self.end)).tolist()
        return {i: EpisodeTask(int(self._numbers[i]), self._seed, self._seed) for i in rows}

    def step(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Take the actions, see `Episodes`."""
        self.env.step_async(actions)
        batch = self.env.receive()
        self.obs, self.rewards, self.end = batch.obs, batch.rewards, batch.end
        dropped = np.flatnonzero(batch.end == DROPPED).tolist() if batch.has_gaps else []
        return {**{end.env: end for end in batch.ends}, **dict.fromkeys(dropped)}


class BatchedAgent(RowAgent):
    """A model acts for all environments at once, where it is.

    Args:
        model: The model, with the weights that it has at each step.
        episodes: The environments.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        seed: Seed of the actions.
    """

    def __init__(
        self, model: nn.Module, episodes: VectorEpisodes, deterministic: bool, seed: int
    ) -> None:
        self._episodes, self._deterministic = episodes, deterministic
        self._actor = Actor(model, episodes.num_envs)
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = 0
        self._ended = np.zeros(episodes.num_envs, np.bool_)

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `RowAgent`."""
        self._ended[row] = self._steps > 0

    def act(self) -> ArrayTree:
        """Choose the actions of all environments, see `RowAgent`."""
        self._forget()
        self._steps += 1
        actor, device = self._actor, self._actor.hidden_state.device
        env, deterministic = self._episodes.env, self._deterministic
        obs = as_tensors(env.single_observation_space, self._episodes.obs)
        noise = actor.model.noise_for(env.num_envs, self._generator, deterministic, device)
        sent = tree_map(lambda x: x.to(device), obs)
        return as_arrays(actor.act(sent, noise, deterministic).env_actions)

    def stop(self) -> None:
        """End the running episodes."""
        self._ended[:] = True
        self._forget()

    def _forget(self) -> None:
        if self._ended.any():
            self._actor.forget(self._ended)
            self._ended[:] = False


class EpisodeRunner:
    """Plays episodes, as many at a time as there are environments.

    Args:
        episodes: The environments, and what is played in them.
        agent: Chooses the actions.
        recorder: Records and films the episodes; None: nothing is kept.
        on_step: Called after each step with the number of environments that were stepped.
    """

    def __init__(
        self,
        episodes: Episodes,
        agent: RowAgent,
        recorder: Recorder | None = None,
        on_step: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.agent = agent
        self._episodes, self._recorder, self._on_step = episodes, recorder, on_step
        n, agents = episodes.num_envs, episodes.agents
        self._tasks: dict[int, EpisodeTask] = {}
        self._returns, self._lengths = np.zeros(n), np.zeros(n, np.int64)
        self._turns = np.zeros((n, len(agents)), np.int64)

    def step(self) -> list[PlayedEpisode]:
        """One step of every episode that is played; returns those that ended.

        Raises:
            EnvError: If an environment or a policy raises or returns something invalid.
            RunDirectoryError: If a video cannot be written.
        """
        episodes, recorder = self._episodes, self._recorder
        for i, task in episodes.begin().items():
            self._tasks[i] = task
            self._returns[i], self._lengths[i], self._turns[i] = 0.0, 0, 0
            self.agent.begin(i, task)
            if recorder is not None:
                recorder.begin(i, task.number)
        rows = episodes.playing
        if not rows:
            return []
        actions = self.agent.act()
        if episodes.agents:
            self._turns[rows] += episodes.obs[ACTS][rows]
        ends = episodes.step(actions)
        self._returns += episodes.rewards  # those of other rows are overwritten when they begin
        self._lengths += 1
        self._on_step(len(rows))
        if recorder is not None:
            recorder.step()
        return [self._result(i, ends[i]) for i in sorted(ends)]

    def _result(self, i: int, end: EpisodeEnd | None) -> PlayedEpisode:
        """The episode that ended in an environment; None: it was dropped."""
        task, agents = self._tasks[i], self._episodes.agents
        info = {} if end is None else end.info
        trajectory, video = (None, None) if self._recorder is None else self._recorder.end(i)
        counted = None if end is None else end.counted
        return PlayedEpisode(
            number=task.number,
            seed=task.seed,
            episode_return=float(self._returns[i] if counted is None else counted[0]),
            length=int(self._lengths[i]),
            success=numbers_of(info, (SUCCESS,), agents).get(SUCCESS, math.nan),
            end=int(self._episodes.end[i]),
            trajectory=trajectory,
            video=video,
            fitness=float(self._returns[i]),
            moments=self.agent.moments(i),
            info=info,
            agent_returns={} if end is None else end.agent_returns,
            agent_turns=dict(zip(agents, self._turns[i].tolist(), strict=True)),
        )
