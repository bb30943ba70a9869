"""Every preset of `conf/experiment/` makes one iteration of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import everyday

from maze_train import run_rollout
from maze_train.cli import main
from maze_train.envs.registered import OTHERS

FOLDER = Path(__file__).parents[1] / "conf/experiment"
PRESETS = sorted(path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.yaml"))
MISSING = tuple(prefix for each in OTHERS if not each.installed for prefix in each.prefixes)
TRIAL = ("runner=dev", "runner.fast_dev_run=true", "tracking.progress=quiet", "tracking.plot=false")


# Box2D's bindings warn while their module is created, and cannot pass on an error from there.
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
@pytest.mark.parametrize("preset", everyday(0, map(str, PRESETS)))
def test_a_preset_works(preset: str, tmp_path: Path) -> None:
    """It composes, its environment and networks can be built, and it learns and evaluates once."""
    if MISSING and preset.partition("/")[2].startswith(MISSING):
        pytest.skip("needs an extra that is not installed")
    arguments = [f"experiment={preset}", *TRIAL, f"run_dir={tmp_path}/run"]
    if preset.startswith("bc/"):
        env = preset.partition("/")[2]
        run_rollout(policy="random", env=env, n_episodes=2, record=True, output_dir=str(tmp_path))
        arguments.append(f"runner.dataset={tmp_path}/trajectories")
    assert main(arguments) == 0
    assert (tmp_path / "run/summary.json").exists()
