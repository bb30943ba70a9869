"""Films and curves of the gallery: trains presets, films each policy, writes docs/images/gallery.

    python benchmarks/gallery.py [--runs outputs/gallery] [--only ppo sac] [--seed 0]

Each run is `maze-run experiment=<preset>`, some of them shorter, with a test of 20 episodes after
training; runs that are there already are not repeated, so the pictures can be made again in a
minute. A film is one episode of the best policy, with a seed that no evaluation had, as a GIF; the
curve is that of the run. `docs/gallery.md` shows them, and has the rows that are printed. Needs the
extra `video`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from maze_train import run_rollout
from maze_train.collect.recording import ffmpeg_path

PICTURES = Path(__file__).parents[1] / "docs" / "images" / "gallery"
MAX_NBYTES = 300_000
CURVE_WIDTH = 800
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
    """Seed of the episode that is filmed."""

    settings: tuple[str, ...] = ()
    """Changes of the preset, as on the command line."""

    @property
    def name(self) -> str:
        """Name of the files."""
        return self.experiment.replace("/", "-")


ENTRIES = [
    Entry("ppo/CartPole-v1"),
    Entry("a2c/CartPole-v1"),
    Entry("impala/CartPole-v1"),
    Entry("sac/Pendulum-v1", width=180, film_seed=HANGING),
    Entry("td3/Pendulum-v1", width=180, film_seed=HANGING, settings=("total_steps=12_000",)),
    Entry("es/CartPole-v1"),
    Entry("dqn/Acrobot-v1", width=180),
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
    """Play one episode of the best policy, and write it as a GIF; returns its bytes."""
    target = PICTURES / f"{entry.name}.gif"
    with tempfile.TemporaryDirectory() as place:
        output = Path(place, "rollout")
        run_rollout(
            str(run),
            n_episodes=1,
            seed=entry.film_seed,
            video=True,
            output_dir=str(output),
            progress="quiet",
        )
        (source,) = (output / "videos").glob("*.mp4")
        scale = f"fps=15,scale={entry.width}:-2:flags=area"
        palette = "split[a][b];[a]palettegen=max_colors=48[p];[b][p]paletteuse=dither=none"
        arguments = ["-i", str(source), "-t", str(entry.seconds), "-vf", f"{scale},{palette}"]
        command = [ffmpeg_path(), "-y", "-loglevel", "error", *arguments, str(target)]
        subprocess.run(command, check=True)
    return target.stat().st_size


def curve(entry: Entry, run: Path) -> int:
    """Copy the curve of the run in few colours; returns its bytes."""
    target = PICTURES / f"{entry.name}.png"
    with Image.open(run / "plots" / "learning_curve.png") as picture:
        height = round(picture.height * CURVE_WIDTH / picture.width)
        small = picture.convert("RGB").resize((CURVE_WIDTH, height), Image.Resampling.LANCZOS)
        small.quantize(256).save(target, optimize=True)
    return target.stat().st_size


def row(entry: Entry, run: Path) -> str:
    """A row of the table of figures."""
    summary = json.loads((run / "summary.json").read_text())
    test = summary["final_test"]["best"]
    figure = f"{test['episode_return_mean']:.1f} ± {test['episode_return_std']:.1f}"
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
