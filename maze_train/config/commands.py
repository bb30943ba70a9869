"""The configurations of the commands compare, export and push."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from maze_train.core.checks import absolute_path, check_at_least
from maze_train.core.conversion import Settings
from maze_train.core.errors import ConfigError
from maze_train.core.hub import BRANCH, REPOSITORY, is_on_hub


@dataclass(kw_only=True)
class CompareConfig(Settings):
    """Everything that defines a comparison of runs."""

    runs: list[str] = field(default_factory=list)
    """Directories of runs, directories that hold some at any depth (such as that of a sweep), and
    patterns with `*`."""

    output: str | None = None
    """Directory of the tables and the picture; null: outputs/comparisons/<date>_<time>. Those of a
    comparison before are replaced."""

    metric: str | None = None
    """Column of metrics.csv that is compared; null: the one that selected the best policy. Where
    runs differ in it: the mean return of evaluation, or of training without evaluations."""

    mode: Literal["auto", "max", "min"] = "auto"
    """Whether a larger or a smaller value is better; auto: as for the selection of policies, with
    their setting where the metric is that of the runs."""

    threshold: float | dict[str, float] | None = None
    """Value of the metric for which steps and time until a run first reaches it are given; also one
    for each environment: `{CartPole-v1: 475, Pendulum-v1: -200}`."""

    ignore: list[str] = field(default_factory=list)
    """Settings, and sections of settings, that may differ between runs that count as the same, such
    as `[runner, env.kwargs.port]`."""

    bounds: dict[str, list[float]] = field(default_factory=dict)
    """Values that count as 0 and as 1 by environment, `{CartPole-v1: [22, 500]}`: adds a table over
    these environments together."""

    unfinished: bool = False
    """Whether runs that failed, were interrupted, or have not ended count as far as they came."""

    n_resamples: int = 10_000
    """Bootstrap samples of an interval. >= 100."""

    def threshold_in(self, env: str) -> float | None:
        """Return the threshold in an environment; None if it has no threshold."""
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
                problem = "expected two values that differ: those that count as 0 and as 1"
                raise ConfigError(f"bounds.{env}", problem, ends)


@dataclass(kw_only=True)
class ExportConfig(Settings):
    """Everything that defines an export."""

    run: str = ""
    """Directory of a training run, whose best policy is exported, of one of its saved policies, or
    `<run>@final`, `<run>@epoch_<n>`."""

    format: Literal["onnx", "torch_export"] = "onnx"
    """Kind of file: ONNX (extra `onnx`), or an archive of `torch.export`."""

    output: str | None = None
    """The file; null: policy.onnx or policy.pt2 in the run directory; with `agent`
    policy_<agent>.onnx and so on. One that is there is replaced."""

    agent: str | None = None
    """Of several agents the one whose policy it is; null: all of them in one file."""

    trust: list[str] = field(default_factory=list)
    """Modules of networks and environments that the configuration of `run` may import if another
    user made the run: their code is run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run.strip():
            problem = "expected the directory of a run, such as run=outputs/a"
            raise ConfigError("run", problem, self.run)
        if self.output is not None:
            self.output = absolute_path("output", self.output)
        elif is_on_hub(self.run):
            problem = "expected a file, such as output=policy.onnx: the run is on the hub"
            raise ConfigError("output", problem, self.output)
        self.run = absolute_path("run", self.run)


@dataclass(kw_only=True)
class PushConfig(Settings):
    """Everything that defines an upload to the Hugging Face hub."""

    run: str | None = None
    """Directory of a training run, whose best policy is pushed, of one of its saved policies
    (`<run>/policies/epoch_<n>`), or `<run>@final`."""

    repo_id: str | None = None
    """Repository on the hub, `<owner>/<name>`; it is made if it is not there."""

    private: bool = False
    """Whether a repository that is made is private; one that is there stays as it is."""

    revision: str | None = None
    """Branch that is written, and made if it is not there; null: the main one."""

    card: bool = True
    """Whether README.md is written; false keeps that of the repository."""

    film: str | None = None
    """A film of the policy, an .mp4 file, such as one of `maze-run -cn rollout run=<run>
    video=true`; null: none."""

    share: list[str] = field(default_factory=list)
    """Settings with texts that are uploaded as well, by dotted name or pattern, such as
    `[env.kwargs.map_name]`. Numbers, flags and words that settings offer always are; any other text
    may be a path or a secret, and is left out."""

    trust: list[str] = field(default_factory=list)
    """Modules other than this package and PyTorch that the configuration of `run` may import if
    another user made the run, such as `[my_nets]`: their code is run."""

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
        if self.film is not None and not self.film.endswith(".mp4"):
            raise ConfigError("film", "expected a file that ends in .mp4, or null", self.film)
        self.run = absolute_path("run", self.run)
