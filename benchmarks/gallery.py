"""Videos and learning curves of the gallery: trains presets and writes docs/images/.

    python benchmarks/gallery.py [--runs outputs/gallery] [--only ppo sac] [--seed 0]

Each run is `maze-run experiment=<preset>`, sometimes shortened, with a test of 20 episodes after
training. Existing runs are not repeated, so regenerating the images takes about a minute. A video
is a GIF of one or a few episodes of the best policy, with seeds not used in evaluations.
`benchmarks/gallery.md` shows videos and curves, and contains the printed table rows. The curve of
several seeds on the front page is drawn from the runs in `benchmarks/scores/`. Requires the
extras `video`, `box2d`, `mujoco`, `atari`, `minigrid` and `pettingzoo`.
Without a display, set `MUJOCO_GL=egl` or `osmesa` for MuJoCo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from maze_train import run_rollout
from maze_train.collect.recording import ffmpeg_path
from maze_train.core.report import decorate, new_figure, save_picture
from maze_train.core.run_directory import read_rows
from maze_train.tracking.curves import draw_learning_curve
from maze_train.tracking.tracker import ENV_STEPS, RunInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "gallery"
WON = "eval/vs_random/win_rate"
FRONT_PAGE = "ppo/LunarLander-v3"
MAX_NBYTES = 500_000
HALF_WIDTH = 4.5, 3.2
"""Size of a curve in inches, so that text is readable at half the page width."""
SELF_PLAY = ("total_steps=250_000", "algorithm.epoch_length=10", "evaluation.interval=1")
HANGING = 1_004
"""Seed of a Pendulum-v1 episode that starts with the pendulum hanging at rest."""


@dataclass(frozen=True)
class Entry:
    """A run of the gallery."""

    experiment: str
    """The preset."""

    seconds: int = 8
    """Maximum length of the video."""

    width: int = 240
    """Width of the video in pixels."""

    film_seed: int = 1_000
    """Seed of the first recorded episode."""

    episodes: int = 1
    """Number of recorded episodes."""

    frame_rate: int = 0
    """Steps per second in the video; 0 for the frame rate of the environment."""

    settings: tuple[str, ...] = ()
    """Changes of the preset, as on the command line."""

    policy: str = ""
    """Recorded policy of the run: empty for the best, `@final` for the final one."""

    colors: int = 48
    """Number of colours of the video."""

    camera: str = ""
    """MuJoCo camera; empty for the default camera of the environment, which may be static."""

    @property
    def name(self) -> str:
        """Stem of the file names."""
        return self.experiment.replace("/", "-")


ENTRIES = [
    Entry("ppo/LunarLander-v3", seconds=10, width=300),
    Entry("ppo/BipedalWalker-v3", seconds=10, width=300, settings=("total_steps=700_000",)),
    Entry("ppo/HalfCheetah-v5", seconds=4, width=240, colors=24, camera="track"),
    Entry("ppo/Boxing-ram", seconds=12, width=160, colors=16),
    Entry("ppo/MiniGrid-DoorKey-5x5-v0", width=180, frame_rate=4, episodes=3),
    Entry("ppo/tictactoe_v3", 20, 180, frame_rate=1, settings=SELF_PLAY, policy="@final"),
    Entry("a2c/Acrobot-v1", width=180),
    Entry("impala/CartPole-v1"),
    Entry("sac/Pendulum-v1", width=180, film_seed=HANGING),
    Entry("td3/Pendulum-v1", width=180, film_seed=HANGING, settings=("total_steps=12_000",)),
    Entry("es/MountainCarContinuous-v0"),
    Entry("dqn/LunarLander-v3", seconds=10),
]


def train(entry: Entry, run: Path, seed: int) -> None:
    """Train a preset, unless the run has already finished."""
    summary = run / "summary.json"
    if summary.is_file() and json.loads(summary.read_text())["stop_reason"] == "total_steps":
        return
    words = [f"experiment={entry.experiment}", f"seed={seed}", f"run_dir={run}", "resume=auto"]
    command = [sys.executable, "-m", "maze_train.cli", *words, *entry.settings]
    subprocess.run([*command, "evaluation.final_episodes=20"], check=True)


def film(entry: Entry, run: Path) -> int:
    """Record episodes of the policy as a GIF; return its size in bytes."""
    target = PICTURES / f"{entry.name}.gif"
    with tempfile.TemporaryDirectory() as place:
        output = Path(place, "rollout")
        run_rollout(
            f"{run}{entry.policy}",
            n_episodes=entry.episodes,
            seed=entry.film_seed,
            env={"kwargs": {"camera_name": entry.camera}} if entry.camera else None,
            video=True,
            output_dir=str(output),
            progress="quiet",
        )
        sources = Path(place, "films.txt")
        films = sorted((output / "videos").glob("*.mp4"))
        sources.write_text("".join(f"file '{film}'\n" for film in films))
        scale = f"scale={entry.width}:-2:flags=area"
        if entry.frame_rate:  # show every step
            frames = f"setpts=N/{entry.frame_rate}/TB,fps={entry.frame_rate}"
        else:
            frames = "fps=15"
        colors = f"[a]palettegen=max_colors={entry.colors}[p]"
        palette = f"split[a][b];{colors};[b][p]paletteuse=dither=none"
        arguments = ["-f", "concat", "-safe", "0", "-i", str(sources)]
        arguments += ["-vf", f"{frames},{scale},{palette}", "-t", str(entry.seconds)]
        command = [ffmpeg_path(), "-y", "-loglevel", "error", *arguments, str(target)]
        subprocess.run(command, check=True)
    return target.stat().st_size


def curve(entry: Entry, run: Path) -> int:
    """Draw the learning curve for half the page width; return the file size in bytes."""
    target = PICTURES / f"{entry.name}.png"
    rows = read_rows(run / "metrics.csv")
    points = [(row[ENV_STEPS], row[WON]) for row in rows if WON in row]
    if points:  # returns of self-play in a zero-sum game sum to 0
        figure = new_figure(*HALF_WIDTH)
        axes = figure.add_subplot()
        axes.plot(*zip(*points, strict=True), marker="o", color="#1f6feb")
        decorate(axes, "environment steps", "games won against random moves")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
    else:
        figure = draw_learning_curve(rows, RunInfo())
        figure.set_size_inches(*HALF_WIDTH)
        figure.legends[0].remove()  # the page describes the lines
    save_small(figure, target)
    return target.stat().st_size


def save_small(figure: Figure, target: Path) -> None:
    """Write a figure with a reduced colour palette."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "curve.png")
        save_picture(figure, source, dpi=130)
        with Image.open(source) as picture:
            picture.convert("RGB").quantize(256).save(target, optimize=True)


def draw_seeds(preset: str) -> None:
    """Draw the returns of all seeds of a preset and their mean, from its score file."""
    lines = (ROOT / "benchmarks" / "scores" / f"{preset}.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "seed" in row]
    figure = new_figure(*HALF_WIDTH)
    axes = figure.add_subplot()
    curves = [(np.array(row["curve"][0]), np.array(row["curve"][2])) for row in rows]
    for steps, returns in curves:
        axes.plot(steps, returns, color="#9aa5b1", linewidth=1.0)
    grid = np.linspace(0, min(steps[-1] for steps, _ in curves), 60)
    mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
    first = max(steps[0] for steps, _ in curves)
    axes.plot(grid[grid >= first], mean[grid >= first], color="#1f6feb", linewidth=2.5)
    decorate(axes, "environment steps", f"return, {len(curves)} seeds and their mean")
    name = preset.split("/")[1]
    save_small(figure, ROOT / "docs" / "images" / f"seeds-{name}.png")


def row(entry: Entry, run: Path) -> str:
    """Return a row of the gallery's table."""
    summary = json.loads((run / "summary.json").read_text())
    test = summary["final_test"]["best"]
    mean, deviation = test["episode_return_mean"], test["episode_return_std"]
    digits = 1 if abs(mean) >= 10 else 3
    figure = f"{mean:.{digits}f} ± {deviation:.{digits}f}"
    if any(WON in line for line in read_rows(run / "metrics.csv")):
        figure = f"{summary['best_metric']:.0%} won against random moves"
    return f"| `{entry.experiment}` | {summary['env_steps']:,} | {figure} |"


def main() -> None:
    """Generate the gallery."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("outputs/gallery"))
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of presets")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    draw_seeds(FRONT_PAGE)
    chosen = [
        entry
        for entry in ENTRIES
        if not options.only or any(word in entry.experiment for word in options.only)
    ]
    for entry in chosen:
        run = options.runs.absolute() / entry.name
        train(entry, run, options.seed)
        sizes = film(entry, run), curve(entry, run)
        print(row(entry, run), *sizes, flush=True)
        if max(sizes) > MAX_NBYTES:
            raise SystemExit(f"{entry.name}: {max(sizes):,} bytes are more than {MAX_NBYTES:,}")


if __name__ == "__main__":
    main()
