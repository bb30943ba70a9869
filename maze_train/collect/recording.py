"""Records trajectories and videos of episodes.

Videos are H.264 in MP4 files, encoded with ffmpeg from the package imageio-ffmpeg.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from maze_train.core.checks import check_at_least
from maze_train.core.errors import EnvError, MissingExtraError, RunDirectoryError
from maze_train.core.files import fsync_directory, open_own
from maze_train.core.folders import make_folders
from maze_train.core.step_end import TERMINATED, TRUNCATED, has_ended
from maze_train.core.targets import import_extra
from maze_train.core.types import Array, ArrayTree, as_tree
from maze_train.data.trajectories import Trajectory
from maze_train.envs.atari import game_under
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.envs.wrappers import metadata_of


class EpisodeRecording:
    """Recorded observations and actions of an episode.

    Observations and actions have the dtypes of their spaces; rewards are float64.

    Args:
        envs: The environments.
        i: Index of the environment, which must be at the beginning of an episode.
    """

    def __init__(self, envs: EnvSlice, i: int) -> None:
        self._actions: list[dict[str, Array]] = []
        self._rewards: list[float] = []
        game = game_under(envs.envs[i])
        self._game = game if game and game.action_space == envs.action.space else None
        self._obs = [_row(envs.obs, i)]

    def step(self, envs: EnvSlice, i: int) -> None:
        """Record the action, the reward, and the next or final observation of a step."""
        self._actions.append(_row(envs.actions, i))
        self._rewards.append(float(envs.rewards[i]))
        if self._game is not None:
            self._actions[-1][""][...] = self._game.executed
        self._obs.append(_row(envs.final_obs if has_ended(envs.end[i]) else envs.obs, i))

    def trajectory(self, envs: EnvSlice, i: int) -> Trajectory:
        """Return the trajectory of the finished episode."""
        return Trajectory(
            obs=_stacked(self._obs),
            actions=_stacked(self._actions),
            rewards=np.array(self._rewards, np.float64),
            terminated=bool(envs.end[i] == TERMINATED),
            truncated=bool(envs.end[i] == TRUNCATED),
            seed=envs.seeds[i],
        )


def _row(columns: Mapping[str, Array], i: int) -> dict[str, Array]:
    return {key: np.array(column[i]) for key, column in columns.items()}


def _stacked(rows: list[dict[str, Array]]) -> ArrayTree:
    found = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return as_tree(found, "" not in found)


@dataclass(frozen=True)
class PlaySettings:
    """Settings of episodes and their recordings.

    Attributes:
        record: Whether to record trajectories.
        video_dir: Directory for videos named `episode_<number>_seed_<seed>.mp4`; requires
            environments with render mode `rgb_array`. None disables videos.
        video_every: Interval of videos in episodes, >= 1: every `video_every`-th episode is
            recorded.
        action_seed: Seed of the agents' random choices, >= 0; combined with the seed of each
            episode.
    """

    record: bool = False
    video_dir: str | None = None
    video_every: int = 1
    action_seed: int = 0

    def __post_init__(self) -> None:
        check_at_least("video_every", self.video_every, 1)
        check_at_least("action_seed", self.action_seed, 0)


class Recorder:
    """Records trajectories and videos of the episodes of a slice.

    Args:
        envs: The environments.
        settings: Settings of the recordings.

    Raises:
        EnvError: If videos are requested and the render mode is not `rgb_array`.
        MissingExtraError: If videos are requested and imageio-ffmpeg is not installed.
    """

    def __init__(self, envs: EnvSlice, settings: PlaySettings) -> None:
        self._envs, self._settings = envs, settings
        self._recordings: dict[int, EpisodeRecording] = {}
        self._videos: dict[int, VideoWriter] = {}
        if settings.video_dir is not None:
            ffmpeg_path()
            for env in envs.envs:
                check_render_mode(env)
            self._fps = frames_per_second(envs.envs[0])

    def begin(self, i: int, number: int) -> None:
        """Start recording episode `number` in environment i."""
        settings, seed = self._settings, self._envs.seeds[i]
        if settings.record:
            self._recordings[i] = EpisodeRecording(self._envs, i)
        if settings.video_dir is not None and number % settings.video_every == 0:
            path = Path(settings.video_dir, f"episode_{number:06d}_seed_{seed}.mp4")
            self._videos[i] = VideoWriter(path, self._fps)
            self._record_frame(i)

    def step(self) -> None:
        """Record the last step."""
        for i, recording in self._recordings.items():
            recording.step(self._envs, i)
        for i in self._videos:
            self._record_frame(i)

    def _record_frame(self, i: int) -> None:
        frame = self._envs.render(i)
        try:
            self._videos[i].add(frame)
        except EnvError as error:
            seed = self._envs.seeds[i]
            text = f"recording a video of the episode with seed {seed} failed: {error}"
            raise EpisodeError(text, seed) from error

    def end(self, i: int) -> tuple[Trajectory | None, str | None]:
        """Return the trajectory (None if the episode was dropped) and the path of the video."""
        recording, video = self._recordings.pop(i, None), self._videos.pop(i, None)
        if video is not None:
            video.close()
        path = None if video is None else str(video.path)
        if recording is None or not has_ended(self._envs.end[i]):
            return None, path
        return recording.trajectory(self._envs, i), path

    def drop(self) -> None:
        """Discard the recordings of running episodes, and remove unfinished videos."""
        for video in self._videos.values():
            video.discard()
        self._recordings.clear()
        self._videos.clear()


DEFAULT_FPS = 30.0
"""Default number of frames per second."""

END_S = 60.0
"""Time limit for ffmpeg to finish a file, in seconds."""

BUILD = 'build the environment with render_mode="rgb_array"'


class VideoWriter:
    """Writes a video. The file appears under its final name only when the video is complete.

    ffmpeg writes a temporary file, which is renamed by `close`. If the height or width of the
    frames is odd, their last row or column is repeated, because the codec requires even sizes.

    Args:
        path: Path of the file, with the extension `.mp4`. A missing folder is created if its parent
            exists.
        fps: Frames per second, > 0.

    Raises:
        MissingExtraError: If imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path, fps: float = DEFAULT_FPS) -> None:
        self.path = path
        self._fps = fps
        self._ffmpeg = ffmpeg_path()
        # `remove_leftovers` removes files with this pattern after the death of the process.
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._shape: tuple[int, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, frame: object) -> None:
        """Append a frame.

        Args:
            frame: `[H, W, 3]`, uint8; all frames must have the same size.

        Raises:
            EnvError: If the frame is invalid.
            RunDirectoryError: If the frame cannot be written.
        """
        given = checked_frame(frame)
        checked = even_frame(given)
        if self._process is None:
            self._shape = given.shape
            self._process = self._started(checked.shape)
        if given.shape != self._shape:
            raise EnvError(
                f"a frame has shape {list(given.shape)}, but previous frames have "
                f"{list(self._shape)}: all frames must have the same size"
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(checked.data)
        except OSError as error:
            raise self._failure(self._messages(self._process) or str(error)) from error

    def close(self) -> None:
        """Finish the file. Closing again has no effect.

        Raises:
            RunDirectoryError: If the file cannot be written. Incomplete files are removed.
        """
        process = self._process
        if process is None:
            return
        try:
            found = self._messages(process)
            if process.returncode:
                raise self._failure(found or "ffmpeg ended")
            with self._temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self._temporary, self.path)
            fsync_directory(self.path.parent)
        except OSError as error:
            raise self._failure(str(error)) from error
        finally:
            self.discard()

    def _messages(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for ffmpeg to finish, and return its messages."""
        try:
            _, found = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"ffmpeg did not finish it in {error.timeout:g} s") from error
        return found[-1000:].decode(errors="replace").strip()

    def discard(self) -> None:
        """Stop writing, and remove the unfinished file. Repeated calls have no effect."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(OSError):  # Buffered frames are discarded.
                process.communicate()
            self._temporary.unlink(missing_ok=True)

    def _started(self, shape: tuple[int, ...]) -> subprocess.Popen[bytes]:
        """Start ffmpeg for frames of the given shape."""
        raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{shape[1]}x{shape[0]}"]
        coded = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "20", "-pix_fmt", "yuv420p"]
        command = [
            # With -xerror, ffmpeg stops at the first error, so the messages fit into the pipe.
            *(self._ffmpeg, "-y", "-loglevel", "error", "-xerror", "-threads", "1"),
            *(*raw, "-r", f"{self._fps:g}", "-i", "pipe:0", "-an"),
            # One thread, because environments use the other cores.
            *(*coded, "-threads", "1", "-movflags", "+faststart", "-f", "mp4"),
            str(self._temporary.absolute()),
        ]
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            make_folders(self.path.parent)
            self._temporary.unlink(missing_ok=True)
            os.close(open_own(self._temporary, os.O_WRONLY))  # ffmpeg follows symlinks.
            # A separate session protects ffmpeg from signals such as Ctrl-C.
            return subprocess.Popen(
                command, stdin=pipe, stdout=null, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise self._failure(str(error)) from error

    def _failure(self, problem: str) -> RunDirectoryError:
        return RunDirectoryError(f"the video {self.path} cannot be written: {problem}")


def ffmpeg_path() -> str:
    """Return the path of ffmpeg.

    Raises:
        MissingExtraError: If imageio-ffmpeg is not installed or does not support this platform.
    """
    needed = ("imageio-ffmpeg", "video", "writing videos")
    try:
        return str(import_extra(*needed, "imageio_ffmpeg").get_ffmpeg_exe())
    except RuntimeError as error:  # The message of imageio-ffmpeg contains instructions.
        raise MissingExtraError(*needed, str(error)) from error


def check_render_mode(env: gymnasium.Env[Any, Any]) -> None:
    """Check that an environment renders images.

    Raises:
        EnvError: If the render mode is not `rgb_array`.
    """
    if env.render_mode != "rgb_array":
        raise EnvError(f"videos are not supported with render_mode = {env.render_mode!r}: {BUILD}")


def frames_per_second(env: gymnasium.Env[Any, Any]) -> float:
    """Return `render_fps` of the environment's metadata; 30 if undeclared.

    Raises:
        EnvError: If `render_fps` is not a number > 0.
    """
    found = metadata_of(env).get("render_fps")
    if found is None:
        return DEFAULT_FPS
    is_number = isinstance(found, (int, float, np.number)) and not isinstance(found, bool)
    if not is_number or not 0.0 < float(found) < float("inf"):
        raise EnvError(f"metadata['render_fps'] = {found!r}: expected a number > 0")
    return float(found)


def checked_frame(frame: object) -> Array:
    """Return a frame after checking its shape and dtype."""
    given = type(frame).__name__
    if isinstance(frame, np.ndarray):
        found: Array = frame
        if found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3 and found.size:
            return found
        given = f"{found.dtype} {list(found.shape)}"
    raise EnvError(f"env.render() returned {given}, expected a frame, uint8 [H, W, 3]: {BUILD}")


def even_frame(frame: Array) -> Array:
    """Pad a frame to even height and width, as a contiguous array."""
    height, width = frame.shape[:2]
    if height % 2 or width % 2:
        # Edge values are repeated, because the codec averages the colours of two rows.
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    return np.ascontiguousarray(frame)
