"""PPO from a cloned policy compared with PPO from scratch; draws the figure of the documentation.

    maze-run experiment=ppo/LunarLander-v3 seed=0 run_dir=teacher
    maze-run -cn rollout run=teacher n_episodes=100 record=true output_dir=records
    maze-run algorithm=bc runner.dataset=records/trajectories run_dir=cloned
    python benchmarks/fine_tuning.py --base-run cloned --experiment ppo/LunarLander-v3

Existing runs are not repeated. The curves show evaluation returns at equal steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from maze_train.core.run_directory import read_rows
from maze_train.tracking.tracker import EVAL_RETURN

COLORS = {"from scratch": "#9aa5b1", "from BC": "#1f6feb"}


def main() -> None:
    """Train the missing runs and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-run", type=Path, required=True)
    parser.add_argument("--experiment", default="ppo/LunarLander-v3")
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("outputs/fine_tuning"))
    parser.add_argument("--picture", type=Path, default=Path("outputs/fine_tuning.png"))
    parser.add_argument("--settings", nargs="*", default=[], help="of runs from BC alone")
    args = parser.parse_args()
    kinds = {
        "from scratch": [],
        "from BC": [f"base_run={args.base_run}", *args.settings],
    }
    found = {}
    for kind, settings in kinds.items():
        found[kind] = [
            curve(
                args.runs / f"{kind.replace(' ', '_')}_{seed}",
                [
                    f"experiment={args.experiment}",
                    f"total_steps={args.steps}",
                    f"seed={seed}",
                    *settings,
                ],
            )
            for seed in args.seeds
        ]
    draw(found, f"PPO on {args.experiment.partition('/')[2]}", args.picture)
    for kind, curves in found.items():
        ends = [f"{returns[-1]:.1f}" for _, returns in curves]
        print(f"{kind}: last evaluations {', '.join(ends)}")


def curve(run_dir: Path, settings: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and returns of the evaluations of a run."""
    if not (run_dir / "summary.json").exists():
        command = [sys.executable, "-m", "maze_train.cli", *settings, f"run_dir={run_dir}"]
        subprocess.run([*command, "tracking.progress=quiet"], check=True)
    rows = [row for row in read_rows(run_dir / "metrics.csv") if EVAL_RETURN in row]
    steps = np.array([row["env_steps"] for row in rows])
    return steps, np.array([row[EVAL_RETURN] for row in rows])


def draw(found: dict[str, list[tuple[np.ndarray, np.ndarray]]], title: str, picture: Path) -> None:
    """Draw the mean over seeds, and the range of the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8.0, 4.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    for kind, curves in found.items():
        steps = curves[0][0]
        returns = np.stack([own for _, own in curves])
        axes.plot(
            steps, returns.mean(0), color=COLORS[kind], label=f"{kind}, mean of {len(curves)}"
        )
        axes.fill_between(
            steps, returns.min(0), returns.max(0), color=COLORS[kind], alpha=0.2, linewidth=0
        )
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return of evaluations")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(visible=True, color="#d8dee4", linewidth=0.7)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main()
