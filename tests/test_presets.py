"""All presets of `conf/experiment/` are valid; some of each kind are built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_lines import maze_run

from maze_train.cli import main
from maze_train.envs.building import OTHERS

if TYPE_CHECKING:
    from command_lines import CommandLine

__all__ = ["maze_run"]

FOLDER = Path(__file__).parents[1] / "conf/experiment"
PRESETS = [str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml")]
MISSING = tuple(prefix for each in OTHERS if not each.installed for prefix in each.prefixes)
TRIAL = ("runner=dev", "runner.fast_dev_run=true", "tracking.progress=quiet", "tracking.plot=false")
OF_EACH_KIND = (
    *("a2c/Acrobot-v1", "dqn/atari", "es/HalfCheetah-v5", "impala/CartPole-v1"),
    *("ppo/BipedalWalker-v3", "ppo/CartPole-v1-positions", "ppo/MiniGrid-DoorKey-5x5-v0"),
    *("ppo/connect_four_v3", "ppo/multiwalker_v9", "ppo/robot", "ppo/simple_spread_v3"),
    *("sac/CartPole-v1", "sac/FetchReach-v4", "sac/PointMaze_UMaze-v3", "td3/Pendulum-v1-ddpg"),
)
"""Presets that differ in algorithm, kind of environment or networks."""


def is_missing(preset: str) -> bool:
    """Return whether a preset needs an extra that is not installed."""
    return bool(MISSING) and preset.partition("/")[2].startswith(MISSING)


@pytest.mark.exhaustive
def test_presets_are_valid_and_limited(maze_run: CommandLine) -> None:
    """Each preset can be composed, has valid settings and a limit that ends the run."""
    for preset in PRESETS:
        if is_missing(preset):
            continue
        data = ("runner.dataset=data",) if preset.startswith("bc/") else ()
        assert maze_run(f"experiment={preset}", *data) == 0, preset
        maze_run.configs[-1].check_start()


# Box2D's bindings emit this warning on import.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning")
@pytest.mark.parametrize("preset", OF_EACH_KIND)
def test_preset_trains_and_evaluates(preset: str, tmp_path: Path) -> None:
    """Environment and networks are built, and the preset trains and evaluates once."""
    if is_missing(preset):
        pytest.skip("needs an extra that is not installed")
    assert main([f"experiment={preset}", *TRIAL, f"run_dir={tmp_path}/run"]) == 0
    assert (tmp_path / "run/summary.json").exists()
