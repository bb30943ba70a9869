"""Results of self-play as a table and a picture."""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING

from maze_train.files import atomic_write
from maze_train.tracking.tracker import EPOCH, MetricsRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure


WIN_RATE = re.compile(r"league/([^/]+)@(\d+)/win_rate")


def write_leagues(rows: Sequence[MetricsRow], run_dir: Path, title: str) -> None:
    """Write `plots/league_<policy>.csv` and `.png` of each policy that met snapshots.

    A row of the table is an epoch, with the Elo rating of the policy, and a column a snapshot: the
    share of points of the policy against it in this epoch, empty where they did not meet.

    Args:
        rows: Rows of metrics in the order of epochs.
        run_dir: Directory of the run.
        title: Title of the run.
    """
    found = {match for row in rows for name in row if (match := WIN_RATE.match(name))}
    for policy in sorted({match[1] for match in found}):
        numbers = sorted({int(match[2]) for match in found if match[1] == policy})
        names = [f"league/{policy}@{number}/win_rate" for number in numbers]
        text = io.StringIO(newline="")
        table = csv.writer(text)
        table.writerow([EPOCH, "elo", *numbers])
        for row in rows:
            values = [row.get(name, "") for name in (f"league/{policy}/elo", *names)]
            table.writerow([int(row[EPOCH]), *values])
        path = run_dir / "plots" / f"league_{policy}.csv"
        with atomic_write(path) as file:
            file.write(text.getvalue().encode())
        figure = draw_league(rows, policy, numbers, title)
        with atomic_write(path.with_suffix(".png")) as file:
            figure.savefig(file, format="png", dpi=150)


def draw_league(
    rows: Sequence[Mapping[str, float]], policy: str, numbers: Sequence[int], title: str
) -> Figure:
    """A figure of the points against snapshots and of the rating, epoch by epoch.

    Args:
        rows: Rows of metrics in the order of epochs.
        policy: Id of the policy.
        numbers: Numbers of the snapshots.
        title: Title of the figure.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, height_ratios=(1, 2))
    figure.suptitle(f"{title}: {policy} against its snapshots")
    epochs = [row[EPOCH] for row in rows]
    above.plot(epochs, [row.get(f"league/{policy}/elo", np.nan) for row in rows])
    above.set_ylabel("Elo rating")
    points = np.array(
        [[row.get(f"league/{policy}@{k}/win_rate", np.nan) for row in rows] for k in numbers]
    )
    extent = (epochs[0] - 0.5, epochs[-1] + 0.5, numbers[-1] + 0.5, numbers[0] - 0.5)
    image = below.imshow(points, "RdYlGn", vmin=0.0, vmax=1.0, aspect="auto", extent=extent)
    figure.colorbar(image, ax=below, label="share of points")
    below.set_xlabel("epoch")
    below.set_ylabel("snapshot")
    return figure
