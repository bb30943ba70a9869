"""Plays episodes in slots of environments, in one process."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maze_train.collect.episodes import success_of
from maze_train.collect.video import VideoWriter, check_render_mode, ffmpeg_path, frames_per_second
from maze_train.core.checks import check_at_least
from maze_train.core.errors import EnvError
from maze_train.core.types import as_tree, leaves_by_key
from maze_train.data.trajectories import Trajectory
from maze_train.envs.stepped import EpisodeError
from maze_train.spaces.agents import ACTS, AGENT_RETURNS, agent_spaces
from maze_train.spaces.describe import flat_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from maze_train.collect.members import EpisodeTask, ObservationMoments, SlotAgent
    from maze_train.core.types import Array, ArrayTree
    from maze_train.envs.stepped import EnvSlots


class EpisodeRecording:
    """Observations and actions of an episode, copied step by step.

    Observations and actions have the types of their spaces, rewards are float64.

    Args:
        slots: The environments; the episode has just begun in one of them.
        slot: Which one.
    """

    def __init__(self, slots: EnvSlots, slot: int) -> None:
        self._seed = slots.seeds[slot]
        self._obs: dict[str, list[Array]] = {key: [] for key in slots.obs}
        spaces = flat_spaces(slots.single_action_space)
        self._dtypes = {key: np.dtype(leaf.dtype) for key, leaf in spaces.items()}
        self._actions: dict[str, list[Array]] = {key: [] for key in spaces}
        self._rewards: list[float] = []
        self.observe(slots, slot)

    def observe(self, slots: EnvSlots, slot: int) -> None:
        """Record the current observation."""
        for key, column in slots.obs.items():
            self._obs[key].append(column[slot].copy())

    def act(self, actions: ArrayTree, slot: int) -> None:
        """Record the action of the next step.

        Args:
            actions: As the environments get them, `[rows, ...]` by leaf.
            slot: Which row.
        """
        columns = leaves_by_key(actions)
        for key, taken in self._actions.items():
            taken.append(np.array(columns[key][slot], self._dtypes[key]))

    def reward(self, reward: float) -> None:
        """Record the reward of the step."""
        self._rewards.append(reward)

    def trajectory(
        self, last_obs: dict[str, Array], *, terminated: bool, truncated: bool
    ) -> Trajectory:
        """The whole episode.

        Args:
            last_obs: Observation after the last step, by leaf.
            terminated: Whether the last step led to a terminal state.
            truncated: Whether the episode was cut off after it.
        """
        obs = {key: np.stack([*found, last_obs[key]]) for key, found in self._obs.items()}
        actions = {key: np.stack(taken) for key, taken in self._actions.items()}
        return Trajectory(
            obs=as_tree(obs, "" not in obs),
            actions=as_tree(actions, "" not in actions),
            rewards=np.array(self._rewards, np.float64),
            terminated=terminated,
            truncated=truncated,
            seed=self._seed,
        )


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
    """1.0 or 0.0 if the last info has `is_success`, else NaN."""

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
    """Settings of the episodes, and of what is kept of them."""

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
    recording: EpisodeRecording | None
    video: VideoWriter | None
    turns: Array
    """Actions of each agent so far, `[A]`."""


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
        if self._keeps_steps:
            self._note_actions(actions)
        ended = self.slots.step(count, actions)
        self._on_step(count)
        if self._keeps_steps:
            self._note_step(set(ended))
        results = [self._result(slot) for slot in ended]
        for slot in reversed(ended):
            self._vacate(slot)
        return results

    def _start(self, task: EpisodeTask) -> None:
        """Begin an episode in the first free slot."""
        slot, settings, slots = len(self._playing), self._settings, self.slots
        slots.start(slot, task.seed)
        self.agent.begin(slot, task)
        playing = _Playing(task, None, None, np.zeros(len(self._agents), np.int64))
        self._playing.append(playing)
        if settings.record:
            playing.recording = EpisodeRecording(slots, slot)
        if settings.video_dir is not None and task.number % settings.video_every == 0:
            name = f"episode_{task.number:06d}_seed_{task.seed}.mp4"
            path = Path(settings.video_dir, name)
            playing.video = VideoWriter(path, self._fps)
            self._film(slot, playing.video)

    def _note_actions(self, actions: ArrayTree) -> None:
        for slot, playing in enumerate(self._playing):
            if playing.recording is not None:
                playing.recording.act(actions, slot)

    def _note_step(self, ended: set[int]) -> None:
        """Record the results of the actions."""
        slots = self.slots
        for slot, playing in enumerate(self._playing):
            if playing.recording is not None:
                playing.recording.reward(float(slots.rewards[slot]))
                if slot not in ended:
                    playing.recording.observe(slots, slot)
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
        trajectory = self._trajectory(slot)  # at first: it may find that the episode is lost
        video = playing.video
        if video is not None:
            video.close()
        info = slots.final_infos.get(slot, {})
        counted = {"r": slots.returns[slot], "l": slots.lengths[slot]}
        return PlayedEpisode(
            number=playing.task.number,
            seed=playing.task.seed,
            episode_return=float(info.get("episode", counted)["r"]),
            length=int(slots.lengths[slot]),
            success=success_of(info),
            terminated=bool(slots.terminations[slot]),
            truncated=bool(slots.truncations[slot]),
            lost=bool(slots.lost[slot]),
            trajectory=trajectory,
            video=None if video is None else str(video.path),
            fitness=float(slots.returns[slot]),
            moments=self.agent.moments(slot),
            agent_returns=dict(info.get(AGENT_RETURNS, {})) if self._agents else {},
            agent_turns=dict(zip(self._agents, playing.turns.tolist(), strict=True)),
        )

    def _trajectory(self, slot: int) -> Trajectory | None:
        """The recorded episode, with what was observed after its last step."""
        slots, recording = self.slots, self._playing[slot].recording
        if recording is None or slots.lost[slot]:
            return None
        last_obs = slots.last_observation(slot)
        if last_obs is None:
            return None
        ends = bool(slots.terminations[slot]), bool(slots.truncations[slot])
        return recording.trajectory(last_obs, terminated=ends[0], truncated=ends[1])

    def _vacate(self, slot: int) -> None:
        """Free a slot; the last episode moves there, so that the first slots are played in."""
        last = len(self._playing) - 1
        playing = self._playing.pop()
        if slot != last:
            self._playing[slot] = playing
            self.slots.swap(slot, last)
            self.agent.swap(slot, last)
