"""Settings of the commands `check`, `compare`, `export` and `push`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maze_train.core.checks import absolute_path, check_at_least
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.hub import BRANCH, REPOSITORY, is_on_hub
from maze_train.envs.config import EnvConfig


@dataclass(kw_only=True)
class CheckConfig(Settings):
    """Settings of `maze-run check`."""

    env: EnvConfig = field(default_factory=EnvConfig)
    """Environment to check."""

    seed: int = 0
    """Seed of the episodes and the random actions (>= 0)."""

    n_check_steps: int = 100
    """Number of steps of each episode prefix (>= 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("seed", self.seed, 0)
        check_at_least("n_check_steps", self.n_check_steps, 1)


@dataclass(kw_only=True)
class CompareConfig(Settings):
    """Settings of `maze-run compare`."""

    runs: list[str] = field(default_factory=list)
    """Run directories, directories that contain runs at any depth (such as a sweep directory), or
    glob patterns with `*`."""

    output: str | None = None
    """Output directory for the tables and the plot; existing files are overwritten. null:
    outputs/comparisons/<date>_<time>."""

    metric: str | None = None
    """Column of metrics.csv to compare; null: the metric that selected the best policy. If this
    metric differs between the runs, null selects the mean evaluation return, or the mean training
    return without evaluations."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether larger (max) or smaller (min) values are better; auto: `evaluation.mode` of the runs
    if `metric` selected their best policies, otherwise inferred from the name of the metric."""

    threshold: float | dict[str, float] | None = None
    """Target value of the metric; the tables then contain the steps and the time to reach this
    value. One value, or one value per environment: `{CartPole-v1: 475, Pendulum-v1: -200}`."""

    ignore: list[str] = field(default_factory=list)
    """Settings or sections to ignore when grouping runs by configuration, such as
    `[runner, env.kwargs.port]`."""

    bounds: dict[str, list[float]] = field(default_factory=dict)
    """Metric values that correspond to normalized scores of 0 and 1, by environment:
    `{CartPole-v1: [22, 500]}`. If set, a table aggregated over these environments is added."""

    unfinished: bool = False
    """Whether to include runs that failed, were interrupted or are still in progress."""

    n_resamples: int = 10_000
    """Number of bootstrap resamples per confidence interval (>= 100)."""

    plot_format: Literal["png", "svg", "pdf"] = "png"
    """File format of the plot."""

    def threshold_in(self, env: str) -> float | None:
        """Return the threshold of an environment; None without a threshold."""
        return self.threshold.get(env) if isinstance(self.threshold, dict) else self.threshold

    def __post_init__(self) -> None:
        super().__post_init__()
        if not [name for name in self.runs if name.strip()]:
            problem = "expected directories of runs, such as runs=[outputs/a,outputs/b*]"
            raise ConfigError("runs", problem, self.runs)
        if self.output is not None:
            self.output = absolute_path("output", self.output)
        check_at_least("n_resamples", self.n_resamples, 100)
        levels = self.threshold if isinstance(self.threshold, dict) else {"": self.threshold}
        for env, level in levels.items():
            if level is not None:
                key = f"threshold.{env}" if env else "threshold"
                check_at_least(key, level, float("-inf"))
        for env, ends in self.bounds.items():
            if len(ends) != 2 or ends[0] == ends[1]:
                problem = "expected two different values, for the normalised scores 0 and 1"
                raise ConfigError(f"bounds.{env}", problem, ends)


@dataclass(kw_only=True)
class ExportConfig(Settings):
    """Settings of `maze-run export`."""

    run: str = ""
    """Policy to export: a run directory (selects the best policy), the directory of a saved policy,
    `<run>@final` or `<run>@epoch_<n>`."""

    format: Literal["onnx", "torch_export"] = "onnx"
    """File format: ONNX (requires the extra `onnx`) or a `torch.export` archive."""

    output: str | None = None
    """Output file; an existing file is overwritten. null: policy.onnx or policy.pt2 in the run
    directory (policy_<agent>.onnx or .pt2 with `agent`)."""

    agent: str | None = None
    """Agent whose policy is exported, for multi-agent runs; null: all agents in one file."""

    trust: list[str] = field(default_factory=list)
    """Modules that the configuration of `run` may import if you did not create the run, such as
    `[my_nets]`. Their code is executed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run.strip():
            problem = "expected the directory of a run, such as run=outputs/a"
            raise ConfigError("run", problem, self.run)
        if self.output is not None:
            self.output = absolute_path("output", self.output)
        elif is_on_hub(self.run):
            problem = "required for policies on the hub; set a file, such as output=policy.onnx"
            raise ConfigError("output", problem, self.output)
        self.run = absolute_path("run", self.run)


@dataclass(kw_only=True)
class PushConfig(Settings):
    """Settings of `maze-run push`."""

    run: str | None = None
    """Policy to upload: a run directory (selects the best policy), the directory of a saved policy
    (`<run>/policies/epoch_<n>`), or `<run>@final`."""

    repo_id: str | None = None
    """Repository on the Hugging Face hub, `<owner>/<name>`; created if the repository does not
    exist."""

    private: bool = False
    """Whether a newly created repository is private; has no effect on existing repositories."""

    revision: str | None = None
    """Branch to push to, created if the branch does not exist; null: the main branch."""

    card: bool = True
    """Whether to write README.md (the model card). If false, an existing file is kept."""

    video_file: str | None = None
    """Video of the policy to upload, an .mp4 file, such as a video of `maze-run rollout run=<run>
    video=true`; null: no video."""

    share: list[str] = field(default_factory=list)
    """Text settings to upload, by dotted name or pattern, such as `[env.kwargs.map_name]`. Numbers,
    Booleans and predefined choices are always uploaded. Other text settings may contain paths or
    secrets, so they are omitted by default."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package and PyTorch that the configuration of `run` may import if you
    did not create the run, such as `[my_nets]`. Their code is executed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is None or is_on_hub(self.run):
            problem = "expected the directory of a run, or of one of its saved policies"
            raise ConfigError("run", problem, self.run)
        if self.repo_id is None or not REPOSITORY.fullmatch(self.repo_id):
            problem = "expected <owner>/<name>, such as repo_id=me/cartpole-ppo"
            raise ConfigError("repo_id", problem, self.repo_id)
        if self.revision is not None and not BRANCH.fullmatch(self.revision):
            problem = "expected the name of a branch, of letters, digits and . _ - /, or null"
            raise ConfigError("revision", problem, self.revision)
        if self.video_file is not None and not self.video_file.endswith(".mp4"):
            raise ConfigError(
                "video_file", "expected a file that ends in .mp4, or null", self.video_file
            )
        self.run = absolute_path("run", self.run)
