"""Plays episodes in slots of environments, in one process, and records them."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
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
from maze_train.core.step_end import DROPPED, TERMINATED, TRUNCATED
from maze_train.core.types import Array, ArrayTree, Tensor, TensorTree, tree_leaves, tree_map
from maze_train.data.trajectory import Trajectory
from maze_train.envs.batch import SUCCESS, numbers_of
from maze_train.envs.stepped import EnvSlots, EpisodeError
from maze_train.learner.modules import torch_threads
from maze_train.nets.acting import ActingModel, acting, as_arrays
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import Population, build_population, row_blocks
from maze_train.spaces.agents import ACTS, AGENT_RETURNS, agent_spaces
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


class SlotAgent(ABC):
    """Chooses the actions of the first slots."""

    def begin_round(self, *args: Any) -> None:  # noqa: B027 (not all have something to do)
        """Get ready for the episodes of a round; `args` are what its owner says of it."""

    @abstractmethod
    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, which the environment of this row has just begun.

        Args:
            row: Which slot.
            task: The episode.
        """

    @abstractmethod
    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, in new memory.

        Args:
            count: How many slots.
            slots: The environments with their current observations.

        Returns:
            `[rows, ...]` with at least `count` rows, or a flat dict of such arrays when the action
            space is a Dict or Tuple.
        """

    @abstractmethod
    def swap(self, i: int, j: int) -> None:
        """Exchange two rows with all that belongs to them."""

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

    def swap(self, i: int, j: int) -> None:
        """Exchange two members."""
        if self._noise is None:
            return
        self._steps[[i, j]] = self._steps[[j, i]]
        self._noise[[i, j]] = self._noise[[j, i]]
        generators = self._generators
        generators[i], generators[j] = generators[j], generators[i]

    def choose(self, population: Population, obs: TensorTree, count: int) -> ArrayTree:
        """Actions of the first members, as the environment takes them.

        Args:
            population: The members.
            obs: Their observations, `[row_blocks(count), ...]`.
            count: Number of members that matter.

        Returns:
            Actions, `[row_blocks(count), ...]`.
        """
        if self._noise is None:
            return as_arrays(population.act(count, obs, None, self._deterministic).env_actions)
        noise = torch.zeros(row_blocks(count), self._noise.shape[2])
        noise[:count] = self._next_noise(count)
        own = noise[:, : self._num_sampled] if self._num_sampled else None
        acted = population.act(count, obs, own, self._deterministic)
        if not self._num_added:
            return as_arrays(acted.env_actions)
        actions = self._with_added(acted.actions, noise[:, self._num_sampled :])
        return as_arrays(self._model.to_env(actions))

    def _next_noise(self, count: int) -> Tensor:
        """The noise of this step, `[count, size]`."""
        assert self._noise is not None
        at = self._steps[:count] % STEPS_PER_DRAW
        for row in (at == 0).nonzero()[0].tolist():
            generator = self._generators[row]
            drawn = self._model.draw_noise((STEPS_PER_DRAW,), generator)
            self._noise[row, :, : self._num_sampled] = drawn[:, : self._num_sampled]
            self._noise[row, :, self._num_sampled :] = torch.randn(
                STEPS_PER_DRAW, self._num_added, generator=generator
            )
        self._steps[:count] += 1
        return self._noise[torch.arange(count), torch.from_numpy(at)]

    def _with_added(self, actions: TensorTree, noise: Tensor) -> TensorTree:
        """Actions with noise `[n, size]` added to those that are real numbers."""
        real = [leaf for leaf in tree_leaves(actions) if leaf.is_floating_point()]
        parts = iter(torch.split(noise, [leaf[0].numel() for leaf in real], dim=1))

        def add(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf + self._noise_stddev * next(parts).view_as(leaf)

        return tree_map(add, actions)


class PopulationAgent(SlotAgent):
    """Copies of a model act, one in each slot.

    Actions do not depend on other episodes, nor on the row, to the bit; see `nets.population`.

    Args:
        model: The model, on the CPU.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: See `MemberActions`.
    """

    def __init__(
        self, model: nn.Module, rows: int, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._population = build_population(model, rows)
        self._actions = MemberActions(
            acting(model), rows, deterministic=deterministic, noise_stddev=noise_stddev
        )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `SlotAgent`."""
        self._population.forget(row)
        self._actions.begin(row, task.action_seed)

    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, see `SlotAgent`."""
        obs = self._observe(count, slots)
        with torch.no_grad(), torch_threads(1):  # several may add up in another order
            return self._actions.choose(self._population, obs, count)

    def _observe(self, count: int, slots: EnvSlots) -> TensorTree:
        """Observations as networks read them, with the rows of whole blocks, `[n, ...]`."""
        columns: Any = {key: column[: row_blocks(count)] for key, column in slots.obs.items()}
        return as_tensors(slots.single_observation_space, columns.get("", columns))

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows, see `SlotAgent`."""
        self._population.swap(i, j)
        self._actions.swap(i, j)


class ModelAgent(PopulationAgent):
    """A model acts, with one copy of the weights that it has now; see `PopulationAgent`.

    Args:
        model: The model; it is copied to the CPU, in the mode of evaluation.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    def __init__(self, model: nn.Module, rows: int, deterministic: bool = True) -> None:
        own: Any = copy.deepcopy(acting_part(model)).cpu().eval()
        # All rows share the parameters that are frozen.
        super().__init__(own.requires_grad_(False), rows, deterministic)


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


@dataclass
class _Playing:
    """An episode that is being played."""

    task: EpisodeTask
    turns: Array
    """Actions of each agent so far, `[A]`."""
    recording: EpisodeRecording | None = None
    video: VideoWriter | None = None


class EpisodePlayer:
    """Plays episodes in one process, as many at a time as there are slots.

    Args:
        slots: Environments with `row_blocks(len(slots))` rows; closed by their owner.
        agent: Chooses the actions.
        settings: How episodes are played.
        on_step: Called after each step with the number of environments that were stepped.

    Attributes:
        slots: The environments.
        agent: The agent.

    Raises:
        EnvError: If there are to be videos, but the environments have another render mode.
        MissingExtraError: If there are to be videos, but imageio-ffmpeg is not installed.
    """

    def __init__(
        self,
        slots: EnvSlots,
        agent: SlotAgent,
        settings: PlaySettings,
        on_step: Callable[[int], object],
    ) -> None:
        self.slots, self.agent = slots, agent
        self._on_step = on_step
        self._settings = settings
        several = agent_spaces(slots.env_observation_space, slots.single_action_space)
        self._agents = several.agents if several is not None else ()
        self._keeps_steps = settings.record or settings.video_dir is not None
        self._waiting: deque[EpisodeTask] = deque()
        self._playing: list[_Playing] = []
        if settings.video_dir is not None:
            ffmpeg_path()
            for env in slots.envs:
                check_render_mode(env)
            self._fps = frames_per_second(slots.envs[0])

    @property
    def load(self) -> int:
        """Episodes that are played or wait."""
        return len(self._playing) + len(self._waiting)

    def add(self, tasks: Iterable[EpisodeTask]) -> None:
        """Add episodes, which play in this order as soon as there are slots."""
        self._waiting.extend(tasks)

    def drop(self) -> None:
        """Forget the episodes that are played and wait; unfinished videos are removed."""
        self._waiting.clear()
        for playing in self._playing:
            if playing.video is not None:
                playing.video.discard()
        self._playing.clear()

    def step(self) -> list[PlayedEpisode]:
        """One step of every episode that is played; returns those that ended.

        Raises:
            EnvError: If an environment or a policy raises or returns something invalid.
            RunDirectoryError: If a video cannot be written.
        """
        while self._waiting and len(self._playing) < len(self.slots):
            self._start(self._waiting.popleft())
        count = len(self._playing)
        if not count:
            return []
        actions = self.agent.act(count, self.slots)
        if self._agents:
            for slot, playing in enumerate(self._playing):
                playing.turns += self.slots.obs[ACTS][slot]
        if self._settings.record:
            for slot, playing in enumerate(self._playing):
                assert playing.recording is not None
                playing.recording.act(actions, slot)
        ended = self.slots.step(count, actions)
        self._on_step(count)
        if self._keeps_steps:
            self._keep_step(set(ended))
        results = [self._result(slot) for slot in ended]
        for slot in reversed(ended):
            self._vacate(slot)
        return results

    def _start(self, task: EpisodeTask) -> None:
        """Begin an episode in the first free slot."""
        slot, settings, slots = len(self._playing), self._settings, self.slots
        slots.start(slot, task.seed)
        self.agent.begin(slot, task)
        playing = _Playing(task, np.zeros(len(self._agents), np.int64))
        self._playing.append(playing)
        if settings.record:
            playing.recording = EpisodeRecording(slots, slot)
        if settings.video_dir is not None and task.number % settings.video_every == 0:
            name = f"episode_{task.number:06d}_seed_{task.seed}.mp4"
            path = Path(settings.video_dir, name)
            playing.video = VideoWriter(path, self._fps)
            self._film(slot, playing.video)

    def _keep_step(self, ended: set[int]) -> None:
        """Record and film the results of the actions."""
        for slot, playing in enumerate(self._playing):
            if playing.recording is not None:
                playing.recording.step(self.slots, slot, ended=slot in ended)
            if playing.video is not None:
                self._film(slot, playing.video)

    def _film(self, slot: int, video: VideoWriter) -> None:
        frame = self.slots.render(slot)
        try:
            video.add(frame)
        except EnvError as error:
            seed = self.slots.seeds[slot]
            text = f"filming the episode with seed {seed} failed: {error}"
            raise EpisodeError(text, seed) from error

    def _result(self, slot: int) -> PlayedEpisode:
        slots, playing = self.slots, self._playing[slot]
        recording, video = playing.recording, playing.video
        # At first: it may find that the episode is lost.
        trajectory = None if recording is None else recording.trajectory(slots, slot)
        if video is not None:
            video.close()
        info = slots.final_infos.get(slot, {})
        numbers = numbers_of(info, (SUCCESS,), self._agents)
        raw_return, _ = slots.counted.get(slot, (slots.returns[slot], 0))
        return PlayedEpisode(
            number=playing.task.number,
            seed=playing.task.seed,
            episode_return=float(raw_return),
            length=int(slots.lengths[slot]),
            success=numbers.get(SUCCESS, math.nan),
            terminated=bool(slots.end[slot] == TERMINATED),
            truncated=bool(slots.end[slot] == TRUNCATED),
            lost=bool(slots.end[slot] == DROPPED),
            trajectory=trajectory,
            video=None if video is None else str(video.path),
            fitness=float(slots.returns[slot]),
            moments=self.agent.moments(slot),
            agent_returns=dict(info.get(AGENT_RETURNS, {})) if self._agents else {},
            agent_turns=dict(zip(self._agents, playing.turns.tolist(), strict=True)),
        )

    def _vacate(self, slot: int) -> None:
        """Free a slot; the last episode moves there, so that the first slots are played in."""
        last = len(self._playing) - 1
        playing = self._playing.pop()
        if slot != last:
            self._playing[slot] = playing
            self.slots.swap(slot, last)
            self.agent.swap(slot, last)
