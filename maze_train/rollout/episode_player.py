"""Plays episodes in slots of environments, in one process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from maze_train.checks import check_at_least
from maze_train.envs.slots import EnvSlots, EpisodeError
from maze_train.errors import EnvError
from maze_train.nets.population import row_blocks
from maze_train.rollout.episodes import success_of
from maze_train.rollout.recording import EpisodeRecording
from maze_train.rollout.video import (
    VideoWriter,
    check_render_mode,
    ffmpeg_path,
    frames_per_second,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    import gymnasium

    from maze_train.data.trajectories import Trajectory
    from maze_train.rollout.agents import SlotAgent
    from maze_train.types import ArrayTree

    Job = tuple[int, int]
    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
    MakeAgent = Callable[[EnvSlots], SlotAgent]

__all__ = ["EpisodePlayer", "PlaySettings", "PlayedEpisode", "action_seed_of", "build_player"]


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

    trajectory: Trajectory | None
    """Observations and actions, where they are recorded and the episode was not lost."""

    video: str | None
    """Path of its video, where there is one."""


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
    environment has to be `rgb_array`. None: there are none."""

    video_every: int = 1
    """Interval of videos in episodes: those whose number it divides are filmed. >= 1."""

    action_seed: int = 0
    """Number that, with the seed of an episode, determines the random choices in it. >= 0."""

    def __post_init__(self) -> None:
        check_at_least("video_every", self.video_every, 1)
        check_at_least("action_seed", self.action_seed, 0)


def action_seed_of(action_seed: int, seed: int) -> int:
    """Seed of what an agent does by chance in an episode, in [0, 2^32).

    Args:
        action_seed: See `PlaySettings`.
        seed: Seed of the episode, >= 0.
    """
    return int(np.random.SeedSequence([action_seed, seed]).generate_state(1)[0])


@dataclass
class _Playing:
    """An episode that is being played."""

    number: int
    seed: int
    recording: EpisodeRecording | None
    video: VideoWriter | None


class EpisodePlayer:
    """Plays episodes in one process, as many at a time as there are slots.

    Args:
        slots: Environments with `row_blocks(len(slots))` rows; closed with the player.
        agent: Chooses the actions.
        settings: How episodes are played.
        on_step: Called after each step with the number of environments that were stepped.

    Attributes:
        slots: The environments.

    Raises:
        EnvError: If there are to be videos, but the environments have another render mode.
        MissingExtraError: If there are to be videos, but imageio-ffmpeg is not installed.
    """

    def __init__(
        self,
        slots: EnvSlots,
        agent: SlotAgent,
        settings: PlaySettings,
        on_step: Callable[[int], object] = lambda steps: None,
    ) -> None:
        self.slots = slots
        self._on_step = on_step
        self._agent = agent
        self._settings = settings
        self._is_closed = False
        self._waiting: deque[Job] = deque()
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

    def add(self, jobs: Iterable[tuple[int, int]]) -> None:
        """Add episodes, which play in this order as soon as there are slots.

        Args:
            jobs: Number and seed of each.
        """
        self._waiting.extend(jobs)

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
            RunDirectoryError: If a video can not be written.
        """
        while self._waiting and len(self._playing) < len(self.slots):
            self._start(*self._waiting.popleft())
        count = len(self._playing)
        if not count:
            return []
        actions = self._agent.act(count, self.slots)
        self._note_actions(actions)
        ended = self.slots.step(count, actions)
        self._on_step(count)
        self._note_step(set(ended))
        results = [self._result(slot) for slot in ended]
        for slot in reversed(ended):
            self._vacate(slot)
        return results

    def _start(self, number: int, seed: int) -> None:
        """Begin an episode in the first free slot."""
        slot, settings, slots = len(self._playing), self._settings, self.slots
        slots.start(slot, seed)
        self._agent.begin(slot, action_seed_of(settings.action_seed, seed))
        playing = _Playing(number, seed, None, None)
        self._playing.append(playing)
        if settings.record:
            playing.recording = EpisodeRecording(slots, slot)
        if settings.video_dir is not None and number % settings.video_every == 0:
            path = Path(settings.video_dir, f"episode_{number:06d}_seed_{seed}.mp4")
            playing.video = VideoWriter(path, self._fps)
            self._film(slot, playing.video)

    def _note_actions(self, actions: ArrayTree) -> None:
        for slot, playing in enumerate(self._playing):
            if playing.recording is not None:
                playing.recording.act(actions, slot)

    def _note_step(self, ended: set[int]) -> None:
        """Take in what came of the actions."""
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
            number=playing.number,
            seed=playing.seed,
            episode_return=float(info.get("episode", counted)["r"]),
            length=int(slots.lengths[slot]),
            success=success_of(info),
            terminated=bool(slots.terminations[slot]),
            truncated=bool(slots.truncations[slot]),
            lost=bool(slots.lost[slot]),
            trajectory=trajectory,
            video=None if video is None else str(video.path),
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
            self._agent.swap(slot, last)

    def close(self) -> None:
        """Close the environments and remove unfinished videos; again it does nothing."""
        self.drop()
        if not self._is_closed:
            self._is_closed = True
            self.slots.close()


def build_player(
    env_factories: Sequence[MakeEnv],
    make_agent: MakeAgent,
    settings: PlaySettings,
    on_non_finite: str = "raise",
    on_step: Callable[[int], object] = lambda steps: None,
    first: int = 0,
) -> EpisodePlayer:
    """Environments, the agent, and what plays; nothing is left open when something fails.

    Args:
        env_factories: One function per slot, each of which returns a new environment.
        make_agent: Builds what acts in the slots.
        settings: How episodes are played.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        on_step: See `EpisodePlayer`.
        first: Number of the first environment in messages.

    Raises:
        MazeTrainError: If one of them can not be built.
    """
    rows = row_blocks(len(env_factories))
    slots = EnvSlots(env_factories, rows, first=first, on_non_finite=on_non_finite)
    try:
        return EpisodePlayer(slots, make_agent(slots), settings, on_step)
    except BaseException:
        slots.close()
        raise
