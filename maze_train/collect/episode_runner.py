"""Loop that runs episodes; used in evaluations, rollouts, recordings and ES."""

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
    """An episode to run.

    Attributes:
        number: Index of the requested episode, from 0.
        seed: Seed of the environment.
        action_seed: Seed of the agent's random choices.
        noise_index: Index into the noise table that perturbs the weights; see `MemberAgent`.
    """

    number: int
    seed: int
    action_seed: int
    noise_index: int = 0


class RowAgent(ABC):
    """Chooses the actions of multiple environments, each of which runs a separate episode."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (optional)
        """Prepare for the episodes of a round; subclasses define the arguments."""

    @abstractmethod
    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, after the reset of the environment.

        Args:
            row: Index of the environment.
            task: The episode.
        """

    @abstractmethod
    def act(self) -> ArrayTree:
        """Choose the actions of the environments with a running episode.

        Returns:
            Actions `[n, ...]` in the order of `playing`; a flat dict of arrays for a Dict or Tuple
            action space. Additional rows are ignored.
        """

    def moments(self, row: int) -> ObservationMoments | None:
        """Return the moments of the observations in the episode; None if not computed."""
        return None


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


class Episodes(ABC):
    """Environments that run numbered episodes.

    Attributes:
        num_envs: Number of environments n.
        agents: Names of the agents; empty in single-agent environments.
        playing: Rows of the environments with a running episode, in increasing order.
        obs: Current observations, `[n, ...]`; a mapping of arrays in multi-agent environments.
        rewards: Rewards of the last step, `[n]`.
        end: `StepEnd` codes of the last step, `[n]`.
    """

    num_envs: int
    agents: Sequence[str]
    playing: list[int]
    obs: ArrayTree
    rewards: Array
    end: Array

    @abstractmethod
    def begin(self) -> Mapping[int, EpisodeTask]:
        """Begin episodes in all free environments; return the new episodes by row."""

    @abstractmethod
    def step(self, actions: ArrayTree) -> Mapping[int, EpisodeEnd | None]:
        """Step the environments with a running episode; return episode ends by row.

        The value is None for a dropped episode.
        """


class VectorEpisodes(Episodes):
    """Episodes of a vector environment: episode j runs in environment j modulo n.

    The vector environment resets automatically. A dropped episode is repeated with a different
    seed. All tasks contain the seed of the reset.

    Args:
        env: The vector environment; reset by the constructor.
        seed: Seed of the reset.
    """

    def __init__(self, env: MazeVectorEnv, seed: int) -> None:
        self.env, self.num_envs, self.agents = env, env.num_envs, env.agents
        self.playing = list(range(env.num_envs))
        self.obs, _ = env.reset(seed=seed)
        self.rewards: Array = np.zeros(env.num_envs)
        self.end: Array = np.full(env.num_envs, RESET_ONLY, np.uint8)
        self._seed, self._numbers = seed, np.arange(env.num_envs)

    def begin(self) -> dict[int, EpisodeTask]:
        """Return the episodes that have begun; see `Episodes`."""
        self._numbers[has_ended(self.end)] += self.num_envs
        rows = np.flatnonzero(is_followed_by_new(self.end)).tolist()
        return {i: EpisodeTask(int(self._numbers[i]), self._seed, self._seed) for i in rows}

    def step(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Step all environments; see `Episodes`."""
        self.env.step_async(actions)
        batch = self.env.receive()
        self.obs, self.rewards, self.end = batch.obs, batch.rewards, batch.end
        dropped = np.flatnonzero(batch.end == DROPPED).tolist() if batch.has_gaps else []
        return {**{end.env: end for end in batch.ends}, **dict.fromkeys(dropped)}


class BatchedAgent(RowAgent):
    """Acts with a model in all environments of a vector environment, in one batch.

    Args:
        model: The model; its current weights are used at each step.
        episodes: The environments.
        deterministic: Whether to take the most likely action instead of sampling.
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
        """Begin an episode; see `RowAgent`."""
        self._ended[row] = self._steps > 0

    def act(self) -> ArrayTree:
        """Choose the actions of all environments; see `RowAgent`."""
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
    """Runs one episode per environment at a time.

    Args:
        episodes: The environments and their episodes.
        agent: Chooses the actions.
        recorder: Records trajectories and videos; None disables recording.
        on_step: Function to call after each step with the number of stepped environments.
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
        """Step all running episodes; return the results of ended episodes.

        Raises:
            EnvError: If an environment or a policy raises or returns an invalid value.
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
        self._returns += (
            episodes.rewards
        )  # Rows of idle environments are reset when an episode begins.
        self._lengths += 1
        self._on_step(len(rows))
        if recorder is not None:
            recorder.step()
        return [self._result(i, ends[i]) for i in sorted(ends)]

    def _result(self, i: int, end: EpisodeEnd | None) -> PlayedEpisode:
        """Return the result of an ended episode; `end` is None for a dropped episode."""
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
