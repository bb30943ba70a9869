"""Settings of the progress display and of the metric files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from maze_train.core.checks import check_below
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.targets import check_targets


@dataclass(kw_only=True)
class TrackingConfig(Settings):
    """Settings of the progress display and of the metric files."""

    progress: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """Progress display: a bar, lines, or nothing (quiet); auto: a bar on a terminal, otherwise
    lines (at most one per second)."""

    csv: bool = True
    """Whether to write metrics.csv, one row per epoch."""

    tensorboard: bool = True
    """Whether to write TensorBoard event files."""

    name: str = ""
    """Subfolder for TensorBoard files in the run directory; TensorBoard shows the subfolder as part
    of the run name. Empty: no subfolder, or in a sweep the settings that vary between jobs, such as
    `algorithm.lr=0.001,seed=2`."""

    group: str = ""
    """Common name of related runs: group in Weights & Biases, parent run in MLflow. Empty: no
    group, or in a sweep the name of the sweep directory."""

    summary: bool = True
    """Whether to write summary.json at the end of the run."""

    git_diff: bool = True
    """Whether to record uncommitted changes to tracked files in environment.json, for the git
    repositories of the run. The commits are always recorded."""

    plot: bool = True
    """Whether to draw plots/learning_curve.png at the end of the run and, for self-play, to write
    plots/league_<policy>.csv and .png at the end and after each evaluation."""

    profile: list[int] | None = None
    """First and last update to profile, counted from 1, such as `[11, 20]`. The trace is written to
    profile/updates_<first>_<last>.json, for chrome://tracing or ui.perfetto.dev."""

    writers: list[dict[str, Any]] = field(default_factory=list)
    """Additional metric writers, each `{_target_: my_package.MyWriter, key: value}`, such as
    `{_target_: maze_train.WandbWriter, project: my_project}`."""

    info_keys: list[str] = field(default_factory=list)
    """Numeric keys of the final `info` of an episode to log, as means `train/info/<key>` and
    `eval/info/<key>` (ES: evaluations only)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name:
            check_below("name", self.name)
        if self.profile is not None and not (
            len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]
        ):
            problem = "expected the first and the last update (>= 1), such as [11, 20]"
            raise ConfigError("profile", problem, self.profile)
        check_targets("writers", self.writers)
