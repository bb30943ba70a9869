"""The export command, its settings, and use of the file without maze_train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import everyday

from maze_train import ConfigError, EnvFactory, ExportConfig, export_policy
from maze_train.cli import main
from maze_train.config.compose import load_config, load_settings
from maze_train.config.stored import config_text
from maze_train.training.evaluators import copy_of_weights
from maze_train.training.multi_agent_models import make_joint_model
from maze_train.training.policy_files import PolicyWriter, TrainedPolicy

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
WITHOUT_PACKAGE = (
    "import runpy, sys; sys.modules.update(maze_train=None, torch=None); "
    "runpy.run_path('my_robot.py')"
)
HEAPS = {"_target_": "agent_envs.Heaps"}


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Change to an empty working directory."""
    monkeypatch.chdir(tmp_path)


def write_policy(env):
    """Save an untrained policy as the best policy of a run, and return it."""
    config = load_config({"algorithm": "ppo", "env": env, "model.hidden_sizes": [8], "seed": 0})
    made = EnvFactory.from_any(config.env)()
    here = made.observation_space, made.action_space
    made.close()
    model = make_joint_model(config.algorithm, config.model, {}, *here, 0)
    settings = config_text(config).partition("# signature")[0]  # the configuration is unsigned
    PolicyWriter(*here, settings)(Path("run/best"), copy_of_weights(model), {})
    return TrainedPolicy(model, *here)


@pytest.mark.parametrize(
    ("env", "arguments", "file", "source"),
    everyday(
        2,
        [
            ("CartPole-v1", ["output=a/own.file"], "a/own.file", "the environment"),
            (HEAPS, ["agent=second"], "run/policy_second.pt2", "the space"),
            ("CartPole-v1", [], "run/policy.pt2", "the environment"),
            (HEAPS, ["trust=[agent_envs]"], "run/policy.pt2", "the environment"),
            (
                *(HEAPS, ["trust=[agent_envs]", "agent=second"]),
                *("run/policy_second.pt2", "the environment"),
            ),
        ],
        are_rows=True,
    ),
)
def test_the_command(env, arguments, file, source, capsys):
    """The file is written next to the policy or to `output`; a trusted environment is played."""
    write_policy(env)
    assert main(["-cn", "export", "run=run", "format=torch_export", *arguments]) == 0
    said = capsys.readouterr()
    assert f"  file      {Path(file).absolute()}, {Path(file).stat().st_size:,} bytes" in said.out
    assert f"  compared  1,000 observations of {source}, largest difference " in said.out
    assert ("instead of episodes: " in said.err) == ("trust=[agent_envs]" in said.err)
    assert ("trust=[agent_envs]" in said.err) == (source == "the space")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, r"run = '': expected the directory of a run, such as run=outputs/a"),
        ({"run": "a", "format": "onix"}, r"format = 'onix': .*mean 'onnx'"),
        ({"run": "a", "formt": "onnx"}, r"formt = 'onnx': unknown; did you mean format"),
    ],
)
def test_invalid_search_settings_raise(settings, problem):
    """Wrong settings raise ConfigError before any file is read."""
    with pytest.raises(ConfigError, match=problem):
        load_settings(ExportConfig, settings)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_program_of_the_page_runs_without_this_package():
    """The example of docs/export.md plays the policy's episode without maze_train and PyTorch."""
    pytest.importorskip("onnxruntime")
    policy = write_policy("CartPole-v1")
    export_policy(policy, "policy.onnx")
    source = re.search(r"```python my_robot.py\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    assert len(source.strip().splitlines()) <= 12
    Path("my_robot.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    env = EnvFactory.from_any("CartPole-v1")()
    observation, steps, ended = env.reset(seed=0)[0], 0, False
    while not ended:
        observation, _, *ends, _ = env.step(policy.act(observation))
        steps, ended = steps + 1, any(ends)
    assert done.stdout == f"{steps} steps\n"
