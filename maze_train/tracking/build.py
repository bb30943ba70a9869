"""Builder of the writers from the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.targets import build_target
from maze_train.tracking.console import ConsoleWriter
from maze_train.tracking.curve import LearningCurveWriter
from maze_train.tracking.writers import (
    CSVWriter,
    JSONSummaryWriter,
    MetricsWriter,
    TensorBoardWriter,
)

if TYPE_CHECKING:
    from maze_train.tracking.config import TrackingConfig

__all__ = ["build_writers"]


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """The writers that the settings ask for; the console comes last, after the files are written.

    Raises:
        ConfigError: If one of `writers` can not be built or is not a `MetricsWriter`.
        MissingExtraError: If one needs a package that is not installed.
    """
    writers: list[MetricsWriter] = []
    if config.csv:
        writers.append(CSVWriter())
    if config.tensorboard:
        writers.append(TensorBoardWriter())
    if config.summary:
        writers.append(JSONSummaryWriter())
    if config.plot:
        writers.append(LearningCurveWriter())
    for i, node in enumerate(config.writers):
        writers.append(build_target(node, key=f"tracking.writers[{i}]", kind=MetricsWriter))
    writers.append(ConsoleWriter(config.progress))
    return writers
