"""`maze-run rollout` with a runner that plays no episodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import yaml
from command_lines import CommandLine, maze_run

from maze_train import EnvConfig, LocalRunnerConfig, config_to_dict
from maze_train.jobs import roll_out

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["maze_run"]

ROLLOUT = ("rollout",)
RANDOM = (*ROLLOUT, "policy=random", "env=CartPole-v1")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Create the files of a run that the configuration reads; return its directory."""
    folder = tmp_path / "run" / "best"
    folder.mkdir(parents=True)
    env = {"id": "CartPole-v1", "kwargs": {"sutton_barto_reward": True}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"env": env}))
    (folder / "policy.pt").write_bytes(b"")
    return "run"


def test_a_policy_and_an_environment(maze_run: CommandLine) -> None:
    """Choices and single values have the same syntax as in training."""
    assert maze_run(*RANDOM, "runner=local", "runner.n_workers=2", "n_episodes=1e2") == 0
    config = maze_run.configs[0]
    assert (config.policy, config.env) == ("random", EnvConfig(id="CartPole-v1"))
    assert isinstance(config.runner, LocalRunnerConfig)
    assert (config.runner.n_workers, config.n_episodes, config.output_dir) == (2, 100, None)
    assert maze_run.files() == []


def test_the_environment_of_a_run(maze_run: CommandLine, run: str) -> None:
    """`run=` is sufficient; `env` and its settings change the environment of the run."""
    own = {"sutton_barto_reward": True}
    changed = {**own, "render_mode": "ansi"}
    for arguments, env in (
        ((), EnvConfig(id="CartPole-v1", kwargs=own)),
        (("env.kwargs.render_mode=ansi",), EnvConfig(id="CartPole-v1", kwargs=changed)),
        (("env=CartPole-v0",), EnvConfig(id="CartPole-v0")),
    ):
        assert maze_run(*ROLLOUT, f"run={run}", *arguments) == 0
        assert maze_run.configs[-1].env == env


def test_a_sweep_gives_every_job_a_directory(maze_run: CommandLine) -> None:
    """Job directories are numbered below the sweep directory."""
    assert maze_run("-m", *RANDOM, "seed=0,100", "hydra.sweep.dir=s") == 0
    folders = [str(config.output_dir) for config in maze_run.configs]
    assert [config.seed for config in maze_run.configs] == [0, 100]
    assert folders == [str(maze_run.folder / "s/0"), str(maze_run.folder / "s/1")]


def test_the_file_of_a_rollout_repeats_it(maze_run: CommandLine, run: str) -> None:
    """A user's `rollout.yaml` replaces ours, and its values can be overridden."""
    assert maze_run(*ROLLOUT, f"run={run}", "runner=local", "seeds=[4,2]") == 0
    maze_run.write("old/rollout.yaml", yaml.safe_dump(config_to_dict(maze_run.configs[0])))
    assert maze_run("--config-dir", "old", *ROLLOUT) == 0
    assert maze_run.configs[1] == maze_run.configs[0]
    assert maze_run("--config-dir", "old", *ROLLOUT, "runner.n_workers=2") == 0
    assert isinstance(maze_run.configs[2].runner, LocalRunnerConfig)
    assert maze_run.configs[2].runner.n_workers == 2


def test_a_primary_config_of_the_user(maze_run: CommandLine) -> None:
    """A custom primary config may extend ours under another name."""
    text = "defaults: [rollout, {override env: CartPole-v1}, _self_]\npolicy: random\nseed: 3\n"
    maze_run.write("own/mine.yaml", text)
    assert maze_run("--config-dir", "own", "-cn", "mine", "n_episodes=4") == 0
    assert maze_run.configs[0].episode_seeds == [3, 4, 5, 6]


def test_a_job_returns_the_mean_return(maze_run: CommandLine) -> None:
    """The return value of a job is optimised by sweepers."""
    work = roll_out({"policy": "random", "env": "CartPole-v1"}, None, ())
    assert math.isclose(work(), 1.0)
