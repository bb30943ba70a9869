"""Settings that are paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maze_train import ConfigError, EnvConfig, load_config
from maze_train.algorithms.sac.config import SACfDAlgorithmConfig
from maze_train.config.commands import CompareConfig, ExportConfig, PushConfig
from maze_train.config.rollout_config import RolloutConfig
from maze_train.config.search_config import SearchConfig
from maze_train.config.train_config import DevRunnerConfig, RayRunnerConfig
from maze_train.core.files import results_directory
from maze_train.core.hub import local_directory
from maze_train.training.config import EvaluationConfig, PolicyConfig

if TYPE_CHECKING:
    from collections.abc import Callable

ENV = EnvConfig(id="CartPole-v1")
RUN = {"env": "CartPole-v1", "algorithm": "ppo"}


PATHS: dict[str, Callable[[str], Any]] = {
    "run_dir": lambda name: load_config({**RUN, "run_dir": name}).run_dir,
    "base_run": lambda name: load_config({**RUN, "base_run": name}).base_run,
    "resume": lambda name: load_config({**RUN, "resume": name}).resume,
    "runner.dataset": lambda name: DevRunnerConfig(dataset=name).dataset,
    "runner.working_dir": lambda name: RayRunnerConfig(working_dir=name).working_dir,
    "algorithm.initial_demonstration_trajectories": lambda name: (
        SACfDAlgorithmConfig(
            initial_demonstration_trajectories=name
        ).initial_demonstration_trajectories
    ),
    "evaluation.opponents": lambda name: EvaluationConfig(opponents={"a": name}).opponents["a"],
    "policies.source": lambda name: PolicyConfig(agents=["a"], source=name).source,
    "rollout run": lambda name: RolloutConfig(run=name, env=EnvConfig(id="a")).run,
    "output_dir": lambda name: RolloutConfig(policy="random", env=ENV, output_dir=name).output_dir,
    "record_dir": lambda name: (
        RolloutConfig(policy="random", env=ENV, record=True, record_dir=name).record_dir
    ),
    "study": lambda name: SearchConfig(search={"seed": [1]}, study=name).study,
    "compare output": lambda name: CompareConfig(runs=["a"], output=name).output,
    "export run": lambda name: ExportConfig(run=name).run,
    "export output": lambda name: ExportConfig(run="a", output=name).output,
    "push run": lambda name: PushConfig(run=name, repo_id="a/b").run,
    "a directory in Python": lambda name: str(local_directory(name)),
}


@pytest.mark.parametrize("setting", PATHS)
def test_paths_are_expanded(setting: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~` and variables are expanded in every path; undefined variables raise ConfigError."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROOT", str(tmp_path / "root"))
    read = PATHS[setting]
    found = [read(name) for name in ("~/a", "$ROOT/b", "${ROOT}/c", "$HOME/~/d")]
    assert found == [str(tmp_path / name) for name in ("a", "root/b", "root/c", "~/d")]
    if setting == "a directory in Python":
        return
    for name in ("$NOT_SET/a", "~nobody_of_this_name/a", "a/${NOT_SET}"):
        with pytest.raises(ConfigError, match=r"is undefined: set the variable"):
            read(name)
    (tmp_path / "$NOT_SET").mkdir()  # existing directories are accepted
    assert read(str(tmp_path / "$NOT_SET")) == str(tmp_path / "$NOT_SET")


def test_paths_that_are_not_utf8_raise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such paths raise ConfigError before a run starts, as a setting and as working directory."""
    name = b"l\xe4".decode(errors="surrogateescape")
    for setting in ("run_dir", "rollout run", "output_dir", "study", "compare output"):
        with pytest.raises(ConfigError, match="not a valid path: 'utf-8' codec"):
            PATHS[setting](name)
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    with (
        pytest.raises(ConfigError, match=r"run_dir = .*not a valid path"),
        results_directory("run_dir", None, Path("outputs").absolute()),
    ):
        pass
    assert not list((tmp_path / name).iterdir())
