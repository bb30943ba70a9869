"""Builder of the writers from the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.targets import build_target, locate
from maze_train.tracking.tracker import MetricsWriter

if TYPE_CHECKING:
    from maze_train.tracking.config import TrackingConfig

__all__ = ["build_writers"]

CONSOLE = "maze_train.tracking.console.ConsoleWriter"
WRITERS = {
    "csv": "maze_train.tracking.writers.CSVWriter",
    "tensorboard": "maze_train.tracking.writers.TensorBoardWriter",
    "summary": "maze_train.tracking.writers.JSONSummaryWriter",
    "plot": "maze_train.tracking.curve.LearningCurveWriter",
}
"""Writers by the setting that asks for them."""


def build_writers(config: TrackingConfig) -> list[MetricsWriter]:
    """The writers that the settings ask for; the console comes last, after the files are written.

    Raises:
        ConfigError: If one of `writers` can not be built or is not a `MetricsWriter`.
        MissingExtraError: If one needs a package that is not installed.
    """
    writers = [locate(path)() for setting, path in WRITERS.items() if getattr(config, setting)]
    for i, node in enumerate(config.writers):
        writers.append(build_target(node, key=f"tracking.writers[{i}]", kind=MetricsWriter))
    writers.append(locate(CONSOLE)(config.progress))
    return writers
