"""Settings of the display of progress and of the files of metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maze_train.core.checks import check_below
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.targets import check_targets


@dataclass(kw_only=True)
class TrackingConfig(Settings):
    """Progress display and files of metrics."""

    progress: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Display of progress: a bar, lines, or nothing (quiet); auto: a bar on a terminal, else lines
    (at most one a second)."""

    csv: bool = True
    """Whether metrics.csv is written, one row per epoch."""

    tensorboard: bool = True
    """Whether TensorBoard event files are written."""

    name: str = ""
    """Folder of these files in the run directory, which TensorBoard shows as the end of the name of
    the run. Empty: they lie in the run directory; in a sweep: what differs between the jobs, such
    as `algorithm.lr=0.001,seed=2`."""

    summary: bool = True
    """Whether summary.json is written at the end of the run."""

    plot: bool = True
    """Whether plots/learning_curve.png is drawn at the end of the run, and of self-play a table and
    a picture, plots/league_<policy>.csv and .png, after each evaluation as well."""

    profile: list[int] | None = None
    """First and last update, from 1, that are profiled, such as `[11, 20]`: where their time goes
    is written to profile/updates_<first>_<last>.json, for chrome://tracing or ui.perfetto.dev."""

    writers: list[dict[str, Any]] = field(default_factory=list)
    """Further writers, each `{_target_: my_package.MyWriter, key: value}`; for example
    `{_target_: maze_train.WandbWriter, project: my_project}`."""

    info_keys: list[str] = field(default_factory=list)
    """Keys of the info of the last step of episodes, whose means become the metrics
    `train/info/<key>` and `eval/info/<key>`, where they hold numbers. (ES: evaluations only.)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name:
            check_below("name", self.name)
        if self.profile is not None and not (
            len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]
        ):
            problem = "expected the first and the last update, from 1, such as [11, 20]"
            raise ConfigError("profile", problem, self.profile)
        check_targets("writers", self.writers)
