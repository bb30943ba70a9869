"""Python and the command line compose the same configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday
from command_lines import maze_run

from maze_train import ConfigError, EnvConfig, load_config
from maze_train.config.options import list_options
from maze_train.core.conversion import config_to_dict
from maze_train.envs.building import OTHERS

if TYPE_CHECKING:
    from command_lines import CommandLine

__all__ = ["maze_run"]

MISSING = tuple(prefix for each in OTHERS if not each.installed for prefix in each.prefixes)
ENTRIES: list[dict[str, Any]] = [
    {"experiment": "ppo/connect_four_v3", "env": "Acrobot-v1", "seed": 3},
    {"experiment": "sac/Pendulum-v1", "algorithm": "td3", "model.activation": "elu"},
    {"model": "vector_rnn", "algorithm": "a2c", "tracking": "wandb", "runner.concurrency": 4},
    {"algorithm": "sac", "algorithm.lr": [[0, 0.1], [10, 0]], "model.hidden_sizes": [8]},
    {"algorithm": "ppo", "vars.size": 3, "env.kwargs.size": 3},
    *({"algorithm": name, "runner": "local"} for name in list_options("algorithm")),
    *({"algorithm": "ppo", "runner": runner} for runner in list_options("runner")),
    *({"experiment": preset} for preset in list_options("experiment")),
]


@pytest.mark.parametrize("given", everyday(14, ENTRIES), ids=str)
def test_python_and_the_command_line_give_the_same_configuration(
    maze_run: CommandLine, given: dict[str, Any]
) -> None:
    """Presets, options and values mean the same in `load_config` and `maze-run`."""
    preset = given.get("experiment", "")
    if MISSING and preset.partition("/")[2].startswith(MISSING):
        pytest.skip("needs an extra that is not installed")
    needed = {} if preset else {"env": "MountainCarContinuous-v0"}
    if preset.startswith("bc/") or given.get("algorithm") == "bc":
        needed["runner.dataset"] = "data"
    if given.get("algorithm") == "sacfd":
        needed["algorithm.initial_demonstration_trajectories"] = "data"
    given = {**needed, **given}
    assert maze_run(*(f"{key}={value}".replace(" ", "") for key, value in given.items())) == 0
    (found,) = maze_run.configs
    assert config_to_dict(found) == config_to_dict(load_config(given))
    assert {*found.given, "env", "env.id"} == {*load_config(given).given, "env", "env.id"}


APP = """
import hydra
from maze_train import load_config

@hydra.main(config_path=None, version_base="1.1")
def main(cfg):
    config = load_config({"experiment": "ppo/CartPole-v1", "runner": "local"})
    print(config.algorithm.name, config.runner.name, hydra.version.getbase())
main()
"""


def test_load_config_composes_inside_a_program_of_hydra(tmp_path: Path) -> None:
    """The state of the user's Hydra program is unchanged."""
    (tmp_path / "app.py").write_text(APP)
    command = [sys.executable, "app.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["ppo", "local", "1.1"]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"model": {"rnn": None, "distributions": {}}}, {"model.rnn", "model.distributions"}),
        ({"algorithm.lr": 0.1}, {"algorithm.lr"}),
        ({"runner": {"name": "local", "n_workers": 2}}, {"runner", "runner.n_workers"}),
        ({"experiment": "ppo/CartPole-v1"}, {"experiment"}),
        (config_to_dict(load_config({"env": "E-v0", "algorithm": "ppo"}))["model"], set()),
    ],
)
def test_given_settings_include_defaults_that_the_user_wrote(
    given: dict[str, Any], names: set[str]
) -> None:
    """A section with all settings was composed or stored, so nothing in it is given."""
    given = {"model": given} if "hidden_sizes" in given else given
    config = load_config({"env": "CartPole-v1", "algorithm": "ppo", **given})
    assert config.given == {"env.id", "algorithm", *names}


def test_names_of_options_do_not_leave_their_folder() -> None:
    """A name with `..` selects no file."""
    with pytest.raises(ConfigError, match=r"^runner = '\.\./algorithm/ppo': no such option"):
        load_config({"env": "CartPole-v1", "algorithm": "ppo", "runner": "../algorithm/ppo"})


def test_python_objects_are_not_interpolated() -> None:
    """Text, instances and classes are merged after the composition."""
    config = load_config(
        {"env": EnvConfig(id="E-v0"), "algorithm": "ppo", "tracking.name": "${now:%Y}, a=b"}
    )
    assert (config.env.id, config.tracking.name) == ("E-v0", "${now:%Y}, a=b")
