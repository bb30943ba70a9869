"""Plays episodes in the environments of one process, and records them."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from maze_train.collect.recording import (
    EpisodeRecording,
    VideoWriter,
    check_render_mode,
    ffmpeg_path,
    frames_per_second,
)
from maze_train.core.checks import check_at_least
from maze_train.core.errors import EnvError
from maze_train.core.step_end import TERMINATED, TRUNCATED, EpisodeEnd
from maze_train.core.types import (
    Array,
    ArrayTree,
    Tensor,
    TensorTree,
    leaves_by_key,
    tree_leaves,
    tree_map,
)
from maze_train.data.trajectory import Trajectory
from maze_train.envs.batch import SUCCESS, StepReport
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.learner.modules import torch_threads
from maze_train.nets.acting import ActingModel, acting, as_arrays
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import Population, build_population, row_blocks
from maze_train.spaces.agents import ACTS, agent_spaces
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import as_tensors


class EpisodeTask(NamedTuple):
    """An episode that is to be played."""

    number: int
    """Its place among those that were asked for, from 0 on."""

    seed: int
    """Seed of the environment."""

    action_seed: int
    """Seed of what the agent does by chance."""

    noise_index: int = 0
    """Index in the noise table, where the weights of the agent are perturbed; see `MemberAgent`."""


class RowAgent(ABC):
    """Chooses the actions of environments, each of which plays an episode of its own."""

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
    def act(self, envs: EnvSlice) -> ArrayTree:
        """Choose the actions of the environments that play.

        Args:
            envs: The environments with their current observations.

        Returns:
            `[n, ...]` in the order of `envs.playing`, or a flat dict of such arrays when the action
            space is a Dict or Tuple; further rows are ignored.
        """

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where the agent takes them."""
        return None


class ObservationMoments(NamedTuple):
    """Moments of the observations that one episode acted on, float64."""

    samples: Array
    """Number of observations, 0-d."""

    mean: Array
    """Means, all normalised entries in one vector."""

    var: Array
    """Variances with divisor `samples`."""


STEPS_PER_DRAW = 64
"""Steps of an episode for which the noise of actions is drawn at once."""


def num_reals(model: ActingModel) -> int:
    """Number of real numbers in an action, as the agent has it."""
    leaves = tree_leaves(model.example_actions())
    return sum(leaf.numel() for leaf in leaves if leaf.is_floating_point())


class MemberActions:
    """Chooses the actions of members, each with its own random numbers.

    Args:
        model: What acts.
        count: Number of members at a time.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: Deviation of normal noise that is added to real-valued actions as the agent
            has them, >= 0.
    """

    def __init__(
        self,
        model: ActingModel,
        count: int,
        *,
        deterministic: bool = True,
        noise_stddev: float = 0.0,
    ) -> None:
        self._model = model
        self._noise_stddev = noise_stddev
        self._deterministic = deterministic
        self._num_sampled = 0 if deterministic and not model.is_random else model.noise_size
        self._num_added = num_reals(model) if noise_stddev else 0
        size = self._num_sampled + self._num_added
        self._noise = torch.zeros(count, STEPS_PER_DRAW, size) if size else None
        self._steps = np.zeros(count, np.int64)
        self._generators = [torch.Generator() for _ in range(count if size else 0)]

    def begin(self, row: int, seed: int) -> None:
        """Begin an episode."""
        if self._noise is not None:
            self._steps[row] = 0
            self._generators[row].manual_seed(seed)

    def choose(self, population: Population, obs: TensorTree, rows: list[int]) -> ArrayTree:
        """Actions of some members, as the environment takes them.

        Args:
            population: The members.
            obs: Observations of all members.
            rows: The members that act.

        Returns:
            Actions, `[row_blocks(len(rows)), ...]`.
        """
        if self._noise is None:
            return as_arrays(population.act(rows, obs, None, self._deterministic).env_actions)
        noise = torch.zeros(row_blocks(len(rows)), self._noise.shape[2])
        noise[: len(rows)] = self._next_noise(rows)
        own = noise[:, : self._num_sampled] if self._num_sampled else None
        acted = population.act(rows, obs, own, self._deterministic)
        if not self._num_added:
            return as_arrays(acted.env_actions)
        actions = self._with_added(acted.actions, noise[:, self._num_sampled :])
        return as_arrays(self._model.to_env(actions))

    def _next_noise(self, rows: list[int]) -> Tensor:
        """The noise of this step, `[len(rows), size]`."""
        assert self._noise is not None
        at = self._steps[rows] % STEPS_PER_DRAW
        for row in (row for row, step in zip(rows, at, strict=True) if step == 0):
            generator = self._generators[row]
            drawn = self._model.draw_noise((STEPS_PER_DRAW,), generator)
            self._noise[row, :, : self._num_sampled] = drawn[:, : self._num_sampled]
            self._noise[row, :, self._num_sampled :] = torch.randn(
                STEPS_PER_DRAW, self._num_added, generator=generator
            )
        self._steps[rows] += 1
        return self._noise[torch.tensor(rows), torch.from_numpy(at)]

    def _with_added(self, actions: TensorTree, noise: Tensor) -> TensorTree:
        """Actions with noise `[n, size]` added to those that are real numbers."""
        real = [leaf for leaf in tree_leaves(actions) if leaf.is_floating_point()]
        parts = iter(torch.split(noise, [leaf[0].numel() for leaf in real], dim=1))

        def add(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf + self._noise_stddev * next(parts).view_as(leaf)

        return tree_map(add, actions)


class PopulationAgent(RowAgent):
    """Copies of a model act, one in each environment.

    Actions do not depend on other episodes, nor on the row, to the bit; see `nets.population`.

    Args:
        model: The model, on the CPU.
        envs: The environments.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: See `MemberActions`.
    """

    def __init__(
        self, model: nn.Module, envs: EnvSlice, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._space = flat_space(envs.observation.space)
        self._population = build_population(model, len(envs))
        self._actions = MemberActions(
            acting(model), len(envs), deterministic=deterministic, noise_stddev=noise_stddev
        )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `RowAgent`."""
        self._population.forget(row)
        self._actions.begin(row, task.action_seed)

    def act(self, envs: EnvSlice) -> ArrayTree:
        """Choose the actions of the environments that play, see `RowAgent`."""
        obs, rows = self._observe(envs), envs.playing
        with torch.no_grad(), torch_threads(1):  # several may add up in another order
            return self._actions.choose(self._population, obs, rows)

    def _observe(self, envs: EnvSlice) -> TensorTree:
        """Observations of all environments as networks read them, `[n, ...]`."""
        columns: Any = envs.obs
        return as_tensors(self._space, columns.get("", columns))


class ModelAgent(PopulationAgent):
    """A model acts, with one copy of the weights that it has now; see `PopulationAgent`.

    Args:
        model: The model; it is copied to the CPU, in the mode of evaluation.
        envs: The environments.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    def __init__(self, model: nn.Module, envs: EnvSlice, deterministic: bool = True) -> None:
        own: Any = copy.deepcopy(acting_part(model)).cpu().eval()
        # All rows share the parameters that are frozen.
        super().__init__(own.requires_grad_(False), envs, deterministic)


def acting_part(model: nn.Module) -> nn.Module:
    """An actor-critic without its critic, also among several agents; others as they are."""
    if type(model) is JointModel:
        policies = {key: acting_part(own) for key, own in model.by_policy.items()}
        return JointModel(policies, model.agents)
    # The exact type: a subclass may act in another way.
    if type(model) is not ActorCriticModel:
        return model
    return PolicyModel(model.policy, **model.around)


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played."""

    number: int
    """Its place among those that were asked for, from 0 on."""

    seed: int
    """Its seed."""

    episode_return: float
    """Undiscounted sum of the rewards, of raw ones where the environment reports them."""

    length: int
    """Number of steps, >= 1."""

    success: float
    """1.0 or 0.0 if the last info has `is_success` (of several agents the mean), else NaN."""

    terminated: bool
    """Whether the last step led to a terminal state."""

    truncated: bool
    """Whether the episode was cut off (time limit) after the last step."""

    lost: bool
    """Whether it was given up, since a number in it was not finite; the others say how far it
    came."""

    trajectory: Trajectory | None = None
    """Observations and actions, where they are recorded and the episode was not lost."""

    video: str | None = None
    """Path of its video, where there is one."""

    fitness: float = math.nan
    """Undiscounted sum of the rewards as the agent gets them."""

    moments: ObservationMoments | None = None
    """Moments of the observations, where the agent takes them."""

    agent_returns: dict[str, float] = field(default_factory=dict)
    """Sum of the rewards of each agent, where there are several."""

    agent_turns: dict[str, int] = field(default_factory=dict)
    """Number of actions of each agent, where there are several."""


@dataclass(frozen=True)
class PlaySettings:
    """Settings of the episodes and of their records."""

    deterministic: bool = True
    """Whether the most likely action is taken instead of a sampled one. It describes the
    agent, which was built with this setting."""

    record: bool = False
    """Whether trajectories are kept."""

    video_dir: str | None = None
    """Directory of the videos `episode_<number>_seed_<seed>.mp4`; the render mode of the
    environment has to be `rgb_array`. None: no videos."""

    video_every: int = 1
    """Interval of videos in episodes: those whose number it divides are filmed. >= 1."""

    action_seed: int = 0
    """Number that, with the seed of an episode, determines the random choices in it. >= 0."""

    def __post_init__(self) -> None:
        check_at_least("video_every", self.video_every, 1)
        check_at_least("action_seed", self.action_seed, 0)


class _Row:
    """What is played in an environment, and the source of its seeds.

    Args:
        waiting: The episodes that are to be played.
    """

    def __init__(self, waiting: deque[EpisodeTask]) -> None:
        self._waiting = waiting
        self.task: EpisodeTask | None = None
        self.recording: EpisodeRecording | None = None
        self.video: VideoWriter | None = None

    def next(self) -> int | None:
        """Take the next episode, if the result of the last one was taken; returns its seed."""
        if self.task is not None or not self._waiting:
            return None
        self.task = self._waiting.popleft()
        return self.task.seed


class EpisodePlayer:
    """Plays episodes in one process, as many at a time as there are environments.

    Args:
        envs: The environments; closed by their owner.
        agent: Chooses the actions.
        settings: How episodes are played.
        on_step: Called after each step with the number of environments that were stepped.

    Attributes:
        envs: The environments.
        agent: The agent.

    Raises:
        EnvError: If there are to be videos, but the environments have another render mode.
        MissingExtraError: If there are to be videos, but imageio-ffmpeg is not installed.
    """

    def __init__(
        self,
        envs: EnvSlice,
        agent: RowAgent,
        settings: PlaySettings,
        on_step: Callable[[int], object],
    ) -> None:
        self.envs, self.agent = envs, agent
        self._on_step = on_step
        self._settings = settings
        several = agent_spaces(envs.observation.space, envs.action.space)
        self._agents = several.agents if several is not None else ()
        self._waiting: deque[EpisodeTask] = deque()
        self._rows = [_Row(self._waiting) for _ in envs.envs]
        self._returns = np.zeros(len(envs))
        self._lengths = np.zeros(len(envs), np.int64)
        self._turns = np.zeros((len(envs), len(self._agents)), np.int64)
        envs.rest()
        envs.seed_from(self._rows)
        if settings.video_dir is not None:
            ffmpeg_path()
            for env in envs.envs:
                check_render_mode(env)
            self._fps = frames_per_second(envs.envs[0])

    @property
    def load(self) -> int:
        """Episodes that are played or wait."""
        return len(self.envs.playing) + len(self._waiting)

    def add(self, tasks: Iterable[EpisodeTask]) -> None:
        """Add episodes, which begin in this order as soon as an environment rests."""
        self._waiting.extend(tasks)

    def drop(self) -> None:
        """Forget the episodes that are played and wait; unfinished videos are removed."""
        self._waiting.clear()
        self.envs.rest()
        for row in self._rows:
            row.task = None
            if row.video is not None:
                row.video.discard()

    def step(self) -> list[PlayedEpisode]:
        """One step of every episode that is played; returns those that ended.

        Raises:
            EnvError: If an environment or a policy raises or returns something invalid.
            RunDirectoryError: If a video cannot be written.
        """
        envs = self.envs
        for i in envs.begin():
            self._begin(i)
        rows = envs.playing
        if not rows:
            return []
        for key, actions in leaves_by_key(self.agent.act(envs)).items():
            envs.actions[key][rows] = actions[: len(rows)]
        if self._agents:
            self._turns[rows] += envs.obs[ACTS][rows]
        report = self._step(rows)
        self._returns += envs.rewards  # those of others are overwritten when they begin
        self._lengths += 1
        self._on_step(len(rows))
        if report is None:
            return []
        ends: dict[int, EpisodeEnd | None] = {end.env: end for end in report.ends}
        ends |= dict.fromkeys(report.lost)
        return [self._result(i, ends[i]) for i in sorted(ends)]

    def _begin(self, i: int) -> None:
        """Begin what belongs to an episode that has just begun."""
        row, settings = self._rows[i], self._settings
        assert row.task is not None
        self._returns[i], self._lengths[i], self._turns[i] = 0.0, 0, 0
        self.agent.begin(i, row.task)
        row.recording = EpisodeRecording(self.envs, i) if settings.record else None
        row.video = None
        if settings.video_dir is not None and row.task.number % settings.video_every == 0:
            name = f"episode_{row.task.number:06d}_seed_{row.task.seed}.mp4"
            row.video = VideoWriter(Path(settings.video_dir, name), self._fps)
            self._film(i, row.video)

    def _step(self, rows: Sequence[int]) -> StepReport | None:
        """Step the environments, and record and film what happens."""
        playing = [(i, self._rows[i]) for i in rows if self._keeps_steps]
        for i, row in playing:
            if row.recording is not None:
                row.recording.act(self.envs, i)
        report = self.envs.step()
        for i, row in playing:
            if row.recording is not None:
                row.recording.step(self.envs, i)
            if row.video is not None:
                self._film(i, row.video)
        return report

    @property
    def _keeps_steps(self) -> bool:
        return self._settings.record or self._settings.video_dir is not None

    def _film(self, i: int, video: VideoWriter) -> None:
        frame = self.envs.render(i)
        try:
            video.add(frame)
        except EnvError as error:
            seed = self.envs.seeds[i]
            text = f"filming the episode with seed {seed} failed: {error}"
            raise EpisodeError(text, seed) from error

    def _result(self, i: int, end: EpisodeEnd | None) -> PlayedEpisode:
        """The episode that ended in an environment; None: it was dropped."""
        envs, row = self.envs, self._rows[i]
        task, row.task = row.task, None
        assert task is not None
        if row.video is not None:
            row.video.close()
        episode_return, success, trajectory = self._returns[i], math.nan, None
        if end is not None:
            if row.recording is not None:
                trajectory = row.recording.trajectory(envs, i)
            success = end.info.get(SUCCESS, math.nan)
            if end.counted is not None:
                episode_return = end.counted[0]
        return PlayedEpisode(
            number=task.number,
            seed=task.seed,
            episode_return=float(episode_return),
            length=int(self._lengths[i]),
            success=success,
            terminated=bool(envs.end[i] == TERMINATED),
            truncated=bool(envs.end[i] == TRUNCATED),
            lost=end is None,
            trajectory=trajectory,
            video=None if row.video is None else str(row.video.path),
            fitness=float(self._returns[i]),
            moments=self.agent.moments(i),
            agent_returns={} if end is None else end.agent_returns,
            agent_turns=dict(zip(self._agents, self._turns[i].tolist(), strict=True)),
        )
