"""Rows of metrics: one flat mapping of names to numbers per epoch."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from maze_train.errors import RunDirectoryError
from maze_train.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ENV_STEPS",
    "EPOCH",
    "EVAL_RETURN",
    "EVAL_RETURN_STD",
    "TRAIN_RETURN",
    "UPDATES",
    "MetricsRow",
    "RunInfo",
    "ordered_columns",
    "read_rows",
]

MAX_NBYTES = 1 << 30

MetricsRow: TypeAlias = dict[str, float]
"""`epoch`, `updates`, `env_steps` (totals since the start of training), then `train/...`,
`eval/...` and `time/...`. A name is absent from the row of an epoch that has no value for it."""

EPOCH = "epoch"
UPDATES = "updates"
ENV_STEPS = "env_steps"
TRAIN_RETURN = "train/episode_return_mean"
EVAL_RETURN = "eval/episode_return_mean"
EVAL_RETURN_STD = "eval/episode_return_std"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run for writers."""

    run_dir: Path | None = None
    """Directory of the run; None: nothing is written to disk."""

    title: str = ""
    """Short name for people, such as `PPO on CartPole-v1`."""

    config: dict[str, Any] = field(default_factory=dict)
    """Resolved configuration as plain values."""

    total_env_steps: int | None = None
    """Environment steps after which training ends; None: not limited."""

    n_epochs: int | None = None
    """Epochs after which training ends; None: not limited."""

    step_label: str = "environment steps"
    """Unit of `env_steps`, for people."""

    metric: str = EVAL_RETURN
    """Metric that selects the best policy."""

    mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller metric is better."""

    past_rows: tuple[MetricsRow, ...] = ()
    """Rows of the epochs before the checkpoint from which this run continues (see `read_rows`)."""

    resumed_at_step: int | None = None
    """Environment steps at that checkpoint; None: the run begins."""

    def is_better(self, score: float, best: float) -> bool:
        """Whether a score is better than the best one so far."""
        return score > best if self.mode == "max" else score < best


def ordered_columns(names: Iterable[str]) -> list[str]:
    """Names in the order of columns: epoch, updates, env_steps, train, eval, others, time.

    Within a group the order of `names` is kept.
    """

    def rank(name: str) -> int:
        if name in (EPOCH, UPDATES, ENV_STEPS):
            return (EPOCH, UPDATES, ENV_STEPS).index(name)
        group = name.split("/", 1)[0]
        return {"train": 3, "eval": 4, "time": 6}.get(group, 5)

    return sorted(dict.fromkeys(names), key=rank)


def read_rows(path: str | Path, last_epoch: int | None = None) -> list[MetricsRow]:
    """The rows of a `metrics.csv`.

    A last line that was cut off when its process was killed is left out.

    Args:
        path: The file; no rows if it does not exist.
        last_epoch: Epoch of the checkpoint from which a run continues: later rows, whose epochs
            will be repeated, are left out. None: all rows.

    Raises:
        RunDirectoryError: If the file is not a table of numbers.
    """
    if not Path(path).exists():
        return []
    try:
        text = read_regular(Path(path), MAX_NBYTES).decode()
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunDirectoryError(f"{path} is damaged: {error}") from error
    rows = []
    for number, cells in enumerate(lines[1:], start=2):
        try:
            pairs = zip(lines[0], cells, strict=True)
            rows.append({name: _number(cell) for name, cell in pairs if cell != ""})
        except ValueError as error:
            raise RunDirectoryError(f"{path} line {number} is damaged: {error}") from error
    if last_epoch is None:
        return rows
    return [row for row in rows if row.get(EPOCH, 0) <= last_epoch]


def _number(cell: str) -> float:
    return int(cell) if cell.lstrip("-").isdigit() else float(cell)
