"""Import, training with runner=dev, and resuming without modules that macOS or Windows lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import everyday

HELPERS = Path(__file__).parent / "helpers"
pytestmark = pytest.mark.slow

SCRIPT = """
import importlib, pkgutil
from pathlib import Path
import maze_train
from maze_train import ConfigError, load_policy, train
from maze_train.core.files import one_at_a_time, process_runs
from maze_train.workers.backends import available_cores
from run_cases import settings
for module in pkgutil.walk_packages(maze_train.__path__, "maze_train."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for case in sys.argv[1:]:
    run_dir = Path(case).absolute()
    given = settings(case, run_dir, **{"tracking.plot": True, "tracking.tensorboard": True})
    train(**{**given, "algorithm.n_epochs": 1})
    resumed = train(resume=str(run_dir), **{"algorithm.n_epochs": 2})
    assert resumed.summary.exact and len(resumed.history) == 2
    load_policy(run_dir)
class Failing(maze_train.MetricsWriter):
    def start(self, run):
        raise ConfigError("writer", "fails")
try:
    train("CartPole-v1", "ppo", writers=[Failing()])
except ConfigError as error:
    assert "writer: fails" in str(error), error
else:
    raise AssertionError(Failing)
refused = {"runner": "local"}, {"learner_group.n_learners": 2}
for setting in refused:
    try:
        train("CartPole-v1", "ppo", **setting)
    except ConfigError as error:
        assert "runner: worker processes require Linux or macOS" in str(error), error
    else:
        raise AssertionError(setting)
with one_at_a_time(Path()):
    assert available_cores() > 0 and process_runs(1)
"""

COMMAND = """
from maze_train.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process in which names of the standard library are hidden."""
    path = tmp_path / "script.py"
    path.write_text(
        f"import sys\nsys.path[:0] = {[str(HELPERS), str(HELPERS.parents[1])]}\n{script}"
    )
    command = [sys.executable, str(HELPERS / "other_platform.py"), str(path), *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "cases",
    everyday(
        1,
        [
            ("ppo", "sac, disk"),
            ("a2c", "td3", "dqn", "agents: ppo, league"),
            ("impala", "es", "bc"),
        ],
    ),
)
def test_training_works_on_other_platforms(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """All modules import, and algorithms train and resume exactly; worker processes are errors."""
    done = run(tmp_path, SCRIPT, *cases)
    assert done.returncode == 0, done.stderr


PPO = ("+algorithm=ppo", "env=CartPole-v1", "total_steps=256", "algorithm.n_rollout_steps=16")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((*PPO, "run_dir=run", "algorithm.epoch_length=1"), 0, "final evaluation"),
        ((*PPO, "-m", "hydra/launcher=local", "seed=1,2"), 2, "hydra/launcher: jobs in other"),
    ],
)
def test_commands_work_on_other_platforms(
    tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    """Training and rollouts work; parallel jobs raise ConfigError."""
    done = run(tmp_path, COMMAND, *arguments)
    assert (done.returncode, text in done.stdout + done.stderr) == (code, True), done.stderr
    if code == 0:
        played = run(tmp_path, COMMAND, "rollout", "run=run", "n_episodes=2")
        assert played.returncode == 0, played.stderr
