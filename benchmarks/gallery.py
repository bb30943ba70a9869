"""Films and curves of the gallery: trains presets, films each policy, writes docs/images/.

    python benchmarks/gallery.py [--runs outputs/gallery] [--only ppo sac] [--seed 0]

Each run is `maze-run experiment=<preset>`, some of them shorter, with a test of 20 episodes after
training; runs that are there already are not repeated, so the pictures can be made again in a
minute. A film is an episode of the best policy, or a few, with seeds that no evaluation had, as a
GIF; the curve is that of the run. `docs/gallery.md` shows them, and has the rows that are printed.
The curve over seeds of the front page is drawn from the runs in `benchmarks/scores/`. Needs the
extras `video`, `box2d`, `mujoco`, `atari`, `minigrid` and `pettingzoo`; without a screen, MuJoCo
films with `MUJOCO_GL=egl` or `osmesa`.
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
from maze_train.core.run_directory import read_rows
from maze_train.tracking.report import decorate, draw_learning_curve, new_figure, save_picture
from maze_train.tracking.tracker import ENV_STEPS, RunInfo

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images" / "gallery"
WON = "eval/vs_random/win_rate"
FRONT_PAGE = "ppo/LunarLander-v3"
MAX_NBYTES = 500_000
HALF_WIDTH = 4.5, 3.2
"""Inches of a curve next to a film: letters stay readable where each has half of a page."""
SELF_PLAY = ("total_steps=250_000", "algorithm.epoch_length=10", "evaluation.interval=1")
HANGING = 1_004
"""Seed of an episode of Pendulum-v1 that begins with the pendulum at rest below."""


@dataclass(frozen=True)
class Entry:
    """A run of the gallery."""

    experiment: str
    """The preset."""

    seconds: int = 8
    """Length of the film at most."""

    width: int = 240
    """Width of the film in pixels."""

    film_seed: int = 1_000
    """Seed of the first episode that is filmed."""

    episodes: int = 1
    """Episodes that are filmed, one after the other."""

    frame_rate: int = 0
    """Steps per second in the film; 0: those of the environment."""

    settings: tuple[str, ...] = ()
    """Changes of the preset, as on the command line."""

    policy: str = ""
    """Policy of the run that is filmed; empty: the best, `@final`: the last."""

    colors: int = 48
    """Colours of the film."""

    camera: str = ""
    """Camera of MuJoCo that films; empty: the one of the environment, which may stand still."""

    @property
    def name(self) -> str:
        """Name of the files."""
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
    """Train a preset, unless this run has come to its end before."""
    summary = run / "summary.json"
    if summary.is_file() and json.loads(summary.read_text())["stop_reason"] == "total_steps":
        return
    words = [f"experiment={entry.experiment}", f"seed={seed}", f"run_dir={run}", "resume=auto"]
    command = [sys.executable, "-m", "maze_train.cli", *words, *entry.settings]
    subprocess.run([*command, "evaluation.final_episodes=20"], check=True)


def film(entry: Entry, run: Path) -> int:
    """Play episodes of the best policy, and write them as a GIF; returns its bytes."""
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
        if entry.frame_rate:  # each step is shown
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
    """Draw the curve of the run for half the width of a page, in few colours; returns its bytes."""
    target = PICTURES / f"{entry.name}.png"
    rows = read_rows(run / "metrics.csv")
    points = [(row[ENV_STEPS], row[WON]) for row in rows if WON in row]
    if points:  # returns of a game that both sides play add up to 0
        figure = new_figure(*HALF_WIDTH)
        axes = figure.add_subplot()
        axes.plot(*zip(*points, strict=True), marker="o", color="#1f6feb")
        decorate(axes, "environment steps", "games won against random moves")
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter("{x:.0%}")
    else:
        figure = draw_learning_curve(rows, RunInfo())
        figure.set_size_inches(*HALF_WIDTH)
        figure.legends[0].remove()  # the page says what the lines are
    save_small(figure, target)
    return target.stat().st_size


def save_small(figure: Figure, target: Path) -> None:
    """Write a figure in few colours."""
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "curve.png")
        save_picture(figure, source, dpi=130)
        with Image.open(source) as picture:
            picture.convert("RGB").quantize(256).save(target, optimize=True)


def draw_seeds(preset: str) -> None:
    """Draw the returns of all seeds of a preset, and their mean, from its rows of scores."""
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
    """A row of the table of figures."""
    summary = json.loads((run / "summary.json").read_text())
    test = summary["final_test"]["best"]
    mean, deviation = test["episode_return_mean"], test["episode_return_std"]
    digits = 1 if abs(mean) >= 10 else 3
    figure = f"{mean:.{digits}f} ± {deviation:.{digits}f}"
    if any(WON in line for line in read_rows(run / "metrics.csv")):
        figure = f"{summary['best_metric']:.0%} won against random moves"
    return f"| `{entry.experiment}` | {summary['env_steps']:,} | {figure} |"


def main() -> None:
    """Make the gallery."""
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
