"""Videos contain the rendered frames, and are complete or missing."""

from __future__ import annotations

import re
import subprocess
from functools import partial

import numpy as np
import pytest
from actor_envs import FailsForSeedEnv
from es_problems import PictureEnv

from maze_train.collect.episode_pool import EpisodePool
from maze_train.collect.recording import PlaySettings, VideoWriter, frames_per_second
from maze_train.collect.row_policies import random_rows
from maze_train.core.errors import EnvError, RunDirectoryError

ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()


def decoded(path, height, width):
    """Return the frames of a video, `[n, height, width, 3]`."""
    command = [ffmpeg, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    raw = subprocess.run([*command, "-"], capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3).astype(int)


def described(path):
    """Return the description of the video stream by ffmpeg."""
    told = subprocess.run([ffmpeg, "-i", str(path)], capture_output=True, text=True).stderr
    return next(line for line in told.splitlines() if "Video:" in line)


def frames(n, height, width):
    """Return frames with two halves in colours that change over time."""
    found = np.zeros((n, height, width, 3), np.uint8)
    for t in range(n):
        found[t, :, : width // 2] = (20 * t, 200, 30)
        found[t, :, width // 2 :] = (60, 10 * t, 220)
    return found


@pytest.mark.parametrize(("height", "width"), [(32, 48), (33, 51), (1, 1)])
def test_video_frames_match_the_rendering(height, width, tmp_path):
    """Decoded frames match within compression loss; odd sizes are padded by one line."""
    path, shown = tmp_path / "new" / "a.mp4", frames(9, height, width)
    writer = VideoWriter(path, 12.5)
    for frame in shown:
        writer.add(frame)
    assert not path.exists()
    writer.close()
    writer.close()
    even = height + height % 2, width + width % 2
    found = decoded(path, *even)
    assert len(found) == 9
    if height > 1:
        middle = (slice(None), slice(4, 28), [8, 40])
        assert np.abs(found[middle] - shown[middle]).max() < 16
        last = found[:, -1, [8, 40]], found[:, 8, -1]
        assert np.abs(last[0] - shown[:, -1, [8, 40]]).max() < 16
        assert np.abs(last[1] - shown[:, 8, -1]).max() < 16
    assert re.search(rf"h264.*yuv420p.*{even[1]}x{even[0]}.*12\.5.* fps", described(path))
    assert [file.name for file in path.parent.iterdir()] == ["a.mp4"]


def test_invalid_frames_raise(tmp_path):
    """Invalid frames raise an error with a remedy; no file remains."""
    writer = VideoWriter(tmp_path / "a.mp4")
    words = r"returned {}, expected a frame, uint8 \[H, W, 3\]: build .*render_mode=\"rgb_array\""
    for frame, given in (
        (None, "NoneType"),
        (np.zeros((4, 4, 3)), r"float64 \[4, 4, 3\]"),
        (np.zeros((4, 4, 4), np.uint8), r"uint8 \[4, 4, 4\]"),
        (np.zeros((0, 4, 3), np.uint8), r"uint8 \[0, 4, 3\]"),
    ):
        with pytest.raises(EnvError, match=words.format(given)):
            writer.add(frame)
    writer.close()
    writer.add(np.zeros((8, 8, 3), np.uint8)[:, ::-1])  # any memory layout
    with pytest.raises(EnvError, match=r"\[8, 6, 3\], but previous frames have \[8, 8, 3\]"):
        writer.add(np.zeros((8, 6, 3), np.uint8))
    for _ in range(2):
        writer.discard()
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_video_raises(tmp_path):
    """If the file cannot be written, the error has the reason; no partial file remains."""
    folder = tmp_path / "a.mp4"
    folder.mkdir()
    writer = VideoWriter(folder)
    writer.add(np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(RunDirectoryError, match=r"a\.mp4 cannot be written: .*directory"):
        writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    (folder / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"b\.mp4 cannot be written"):
        VideoWriter(folder / "file" / "b.mp4").add(np.zeros((8, 8, 3), np.uint8))


@pytest.mark.parametrize("call", ["add", "close"])
def test_dying_ffmpeg_raises(call, tmp_path):
    """An exit of ffmpeg raises an error, at the latest on close."""
    writer = VideoWriter(tmp_path / "a.mp4")
    frame = np.zeros((400, 400, 3), np.uint8)  # larger than the buffer of a pipe
    writer.add(frame)
    process = writer._process
    process.kill()
    process.wait()
    arguments = (frame,) if call == "add" else ()
    with pytest.raises(RunDirectoryError, match=r"a\.mp4 cannot be written: .*(ended|pipe)"):
        getattr(writer, call)(*arguments)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_hanging_ffmpeg_is_killed(monkeypatch, tmp_path):
    """If ffmpeg hangs, it is killed and an error is raised; no file remains."""
    writer = VideoWriter(tmp_path / "a.mp4")
    writer.add(np.zeros((8, 8, 3), np.uint8))
    process = writer._process
    communicate = process.communicate

    def hangs(timeout=None):
        if timeout is None:
            return communicate()
        raise subprocess.TimeoutExpired("ffmpeg", timeout)

    monkeypatch.setattr(process, "communicate", hangs)
    with pytest.raises(RunDirectoryError, match=r"a\.mp4 .*ffmpeg did not finish it in 60 s"):
        writer.close()
    assert process.wait() != 0
    assert list(tmp_path.iterdir()) == []


def test_video_frame_rate_comes_from_metadata():
    """The frame rate comes from the metadata of the environment; the default is 30."""
    env = PictureEnv()
    for told, expected in ((None, 30.0), (4, 4.0), (12.5, 12.5), (np.float32(2.0), 2.0)):
        env.metadata = {} if told is None else {"render_fps": told}
        assert frames_per_second(env) == expected
    for bad in (0, -1, "fast", True, float("nan"), float("inf")):
        env.metadata = {"render_fps": bad}
        with pytest.raises(EnvError, match=r"metadata\['render_fps'\] = .*expected a number > 0"):
            frames_per_second(env)


# -- episodes ------------------------------------------------------------------------------------


class FailingPictureEnv(FailsForSeedEnv):
    """Environment that renders frames until it fails."""

    render_mode = "rgb_array"

    def render(self):
        """Return a frame; seed 2 changes its size, seed 3 raises an error."""
        if self.seed == 3:
            raise RuntimeError("no light")
        return np.zeros((8, 10 if self.t and not self.is_bad and self.seed == 2 else 8, 3), "u1")

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        self.seed = seed
        return super().reset(seed=seed, options=options)


def test_failed_episodes_leave_no_video(tmp_path):
    """Failed episodes leave no video; the error names the seed."""
    settings = PlaySettings(video_dir=str(tmp_path))
    for seed, words in (
        (1, "seed 1: RuntimeError"),
        (2, "recording a video of the episode with seed 2 failed"),
        (3, "seed 3: RuntimeError: no light"),
    ):
        make = partial(FailingPictureEnv, "raise", 1)
        with EpisodePool(make, settings, num_envs=2) as player:
            player.set_policy(random_rows, "policy")
            with pytest.raises(EnvError, match=words):
                list(player.play([seed, 0]))
        assert list(tmp_path.iterdir()) == []
