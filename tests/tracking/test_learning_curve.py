"""The plot of a learning curve."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import matplotlib.image
import numpy as np
import pytest

from maze_train import LearningCurveWriter, RunInfo
from maze_train.tracking.curves import draw_learning_curve

if TYPE_CHECKING:
    from pathlib import Path


def make_rows(n: int) -> list[dict[str, float]]:
    """Return rows of n epochs with an evaluation every second epoch, best at epoch 6."""
    rows: list[dict[str, float]] = []
    for i in range(1, n + 1):
        row = {"epoch": i, "env_steps": 1000 * i, "train/episode_return_mean": float(i)}
        if i % 2 == 0:
            row["eval/episode_return_mean"] = 10.0 - abs(i - 6)
            row["eval/episode_return_std"] = 1.0
        rows.append(row)
    return rows


def test_learning_curve_shows_training_evaluation_and_best() -> None:
    """Curves contain the values of the rows; the best evaluation is marked."""
    figure = draw_learning_curve(make_rows(10), RunInfo(title="PPO on X"))
    axes = figure.axes[0]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    names = ["training episodes", "evaluation", "± 1 std over its episodes", "best: 10.00 at 6k"]
    assert legend == names
    train, evaluation, best = axes.lines
    assert np.array_equal(train.get_xydata(), [(1000 * i, i) for i in range(1, 11)])
    assert list(evaluation.get_xdata()) == [2000, 4000, 6000, 8000, 10000]
    assert best.get_xydata().tolist() == [[6000, 10]]
    assert len(axes.collections) == 1
    assert axes.get_title(loc="left") == "PPO on X"
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "episode return (mean)"


def test_learning_curve_skips_missing_values() -> None:
    """Epochs without a finished episode have no point."""
    rows = make_rows(4)
    rows[0]["train/episode_return_mean"] = float("nan")
    del rows[1]["train/episode_return_mean"]
    rows[3]["eval/episode_return_std"] = float("nan")
    axes = draw_learning_curve(rows, RunInfo()).axes[0]
    assert list(axes.lines[0].get_xdata()) == [3000, 4000]
    assert len(axes.collections) == 0
    axes = draw_learning_curve([{"epoch": 1, "env_steps": 10}], RunInfo()).axes[0]
    assert len(axes.lines) == 0
    assert "no episode return" in axes.texts[0].get_text()


def test_learning_curve_draws_the_selecting_opponent() -> None:
    """If an opponent selects the best policy, self-play returns are not drawn."""
    metric = "eval/vs_random/win_rate"
    rows = [{**row, metric: row["epoch"] / 4} for row in make_rows(4)]
    axes = draw_learning_curve(rows, RunInfo(metric=metric)).axes[0]
    assert axes.get_ylabel() == "win rate against random"
    assert list(axes.lines[0].get_ydata()) == [0.25, 0.5, 0.75, 1.0]
    assert [len(line.get_xdata()) for line in axes.lines] == [4, 1]


def test_learning_curve_draws_losses_without_returns() -> None:
    """Losses with values are drawn, unless there are returns."""
    names = ("train/policy_loss", "validation/policy_loss")
    rows = [{"env_steps": 10 * i, names[0]: 1 / i, names[1]: 2 / i} for i in (1, 2)]
    run = RunInfo(metric="validation/loss", mode="min")
    for given, labels in ((rows, names), ([{**row, names[1]: np.nan} for row in rows], names[:1])):
        axes = draw_learning_curve(given, run).axes[0]
        assert (axes.get_ylabel(), tuple(axes.get_legend_handles_labels()[1])) == ("loss", labels)
    axes = draw_learning_curve([{**row, **rows[0]} for row in make_rows(4)], run).axes[0]
    assert axes.get_ylabel() == "episode return (mean)"


@pytest.mark.parametrize("n", [0, 1, 2, 60])
def test_learning_curve_png_is_not_blank(tmp_path: Path, n: int) -> None:
    """The PNG has the expected size and is not blank; a run without epochs has none."""
    writer = LearningCurveWriter()
    rows = make_rows(n)
    writer.start(RunInfo(run_dir=tmp_path, title="A2C", past_rows=tuple(rows[:1])))
    for row in rows[1:]:
        writer.write(row)
    writer.finish({})
    writer.close()
    path = tmp_path / "plots" / "learning_curve.png"
    assert path.exists() == bool(rows)
    if not rows:
        return
    image = matplotlib.image.imread(path)
    assert path.stat().st_size > 5_000
    assert image.shape[:2] == (675, 1200)
    assert image[..., :3].std() > 0.02
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
