"""Settings of a rollout: meaning, validation, and source of the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from maze_train import ConfigError, DevRunnerConfig, EnvConfig, RunDirectoryError
from maze_train.config.rollout_config import joined_env, load_rollout_config
from maze_train.core.policy_location import PolicyLocation

if TYPE_CHECKING:
    from pathlib import Path

RANDOM: dict[str, Any] = {"policy": "random", "env": "CartPole-v1"}
WRAPPER = {"_target_": "gymnasium.wrappers.ClipReward"}
STORED = {
    "id": "Maze-v0",
    "_target_": None,
    "kwargs": {"size": 3, "walls": True},
    "wrappers": [WRAPPER],
    "max_episode_steps": 40,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Create the files of a run that the configuration reads; return its directory."""
    for place in ("best", "policies/epoch_000002"):
        folder = tmp_path / "run" / place
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"env": STORED}))
        (folder / "policy.pt").write_bytes(b"")
    return tmp_path / "run"


def test_rollout_defaults_match_the_class() -> None:
    """A policy and an environment are sufficient; the default number of environments is 8."""
    config = load_rollout_config(RANDOM)
    assert config.env == EnvConfig(id="CartPole-v1")
    assert isinstance(config.runner, DevRunnerConfig)
    assert config.runner.concurrency == 8
    assert config.episode_seeds == list(range(50))
    assert config.render_mode is None


def test_custom_policy_and_environment_are_settings() -> None:
    """A custom policy and environment are named with their settings."""
    own = {"policy._target_": "my.Policy", "policy.a": 1, "env._target_": "my.Env"}
    config = load_rollout_config(own)
    assert config.policy == {"_target_": "my.Policy", "a": 1}
    assert config.env == EnvConfig(target="my.Env")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"seed": 7, "n_episodes": 2}, [7, 8]),
        ({"seeds": [5, 3, 5]}, [5, 3, 5]),
        *(({"seeds": seeds}, [0, 1, 2]) for seeds in (range(3), np.arange(3), iter([0, 1, 2]))),
    ],
)
def test_episode_seeds_count_up_or_are_given(given: dict[str, Any], expected: list[int]) -> None:
    """Seeds count up from `seed`, or are given by any iterable; they are plain integers."""
    found = load_rollout_config({**RANDOM, **given}).episode_seeds
    assert found == expected
    assert {type(seed) for seed in found} == {int}


@pytest.mark.parametrize("seeds", [np.array(3), np.zeros((2, 2)), "012", {"a": 1}, [True], [0.5]])
def test_invalid_seeds_raise(seeds: Any) -> None:
    """The error names the key."""
    with pytest.raises(ConfigError, match="seeds"):
        load_rollout_config({**RANDOM, "seeds": seeds})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "CartPole-v1"}, "run = None: expected one of run=<directory of a run>, policy="),
        ({"policy": "random"}, "env: choose one: env=<registered id>"),
        ({"policy": "random", "env": {"kwargs": {"a": 1}}}, "env: choose one"),
        ({**RANDOM, "run": "x"}, "run = 'x': expected one of"),
        ({**RANDOM, "policy": "rnadom"}, "policy = 'rnadom': expected `random`, or a mapping"),
        ({**RANDOM, "n_episode": 3}, "n_episode = 3: unknown; did you mean n_episodes?"),
        ({**RANDOM, "n_episodes": 0}, "n_episodes = 0: expected a number >= 1"),
        ({**RANDOM, "seed": -1}, "seed = -1: expected a number >= 0"),
        ({**RANDOM, "seeds": []}, "seeds = []: expected at least one seed"),
        ({**RANDOM, "seeds": [1, -1]}, "seeds[1] = -1: expected a number >= 0"),
        ({**RANDOM, "max_episode_steps": -1}, "max_episode_steps = -1"),
        ({**RANDOM, "video_interval": 0}, "video_interval = 0"),
        ({**RANDOM, "record_dir": "d"}, "record_dir = 'd': requires record=true"),
        ({**RANDOM, "output_dir": " "}, "output_dir = ' ': expected a path"),
        ({**RANDOM, "runner.fast_dev_run": True}, "runner.fast_dev_run = True: only used for"),
        ({**RANDOM, "runner.max_wall_time_s": 5}, "runner.max_wall_time_s = 5.0: only used for"),
        ({**RANDOM, "env.backend": "native"}, "env.backend = 'native': rollouts seed every"),
        ({**RANDOM, "on_non_finite": "ignore"}, "on_non_finite = 'ignore': expected one of"),
        ({**RANDOM, "progress": "loud"}, "progress = 'loud': expected one of"),
        ({**RANDOM, "render": "window"}, "render = 'window': expected one of none, human"),
        ({**RANDOM, "render": "human", "video": True}, "cannot be combined with video"),
        ({**RANDOM, "render": "human", "runner": "local"}, "set runner=dev"),
        ({**RANDOM, "render": "human", "runner.concurrency": 2}, "set runner.concurrency=1"),
    ],
)
def test_invalid_rollout_settings_raise(settings: dict[str, Any], message: str) -> None:
    """The message contains key, value and remedy."""
    with pytest.raises(ConfigError) as caught:
        load_rollout_config(settings)
    assert message in str(caught.value)


def test_video_and_window_set_the_render_mode() -> None:
    """Videos render `rgb_array`; a window is limited to one environment."""
    assert load_rollout_config({**RANDOM, "video": True}).render_mode == "rgb_array"
    config = load_rollout_config({**RANDOM, "render": "human"})
    assert (config.render_mode, config.runner.concurrency) == ("human", 1)


def test_rollout_uses_the_environment_of_the_run(run: Path) -> None:
    """Without `env`, the environment of the run is used, also for a saved policy."""
    expected = EnvConfig(
        id="Maze-v0", kwargs=STORED["kwargs"], wrappers=[WRAPPER], max_episode_steps=40
    )
    assert load_rollout_config({"run": run}).env == expected
    assert load_rollout_config({"run": str(run / "policies/epoch_000002")}).env == expected
    assert PolicyLocation.named(run).settings == run / "best"


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"kwargs": {"size": 5}}, {"kwargs": {"size": 5, "walls": True}}),
        ({"id": "Maze-v0", "kwargs": {"size": 5}}, {"kwargs": {"size": 5, "walls": True}}),
        ({"max_episode_steps": None}, {"max_episode_steps": None}),
        ({"wrappers": []}, {"wrappers": []}),
        ({"id": None, "wrappers": []}, {"wrappers": []}),
    ],
)
def test_single_settings_change_the_environment(
    given: dict[str, Any], changed: dict[str, Any]
) -> None:
    """`kwargs` are merged; other settings replace those of the run."""
    assert joined_env(STORED, given) == {**STORED, **changed}


@pytest.mark.parametrize("name", [{"id": "Other-v0"}, {"_target_": "my.Env"}])
def test_other_environment_drops_arguments(name: dict[str, Any]) -> None:
    """Wrappers are kept; arguments and time limit of the run's environment are dropped."""
    assert joined_env(STORED, {**name, "kwargs": {"a": 1}}) == {
        "wrappers": [WRAPPER],
        **name,
        "kwargs": {"a": 1},
    }


def test_run_without_environment_requires_one(run: Path) -> None:
    """A run that learned from a dataset may have no environment."""
    (run / "best/config.yaml").write_text(yaml.safe_dump({"env": {"id": None, "_target_": None}}))
    with pytest.raises(ConfigError, match="env: choose one"):
        load_rollout_config({"run": run})
    assert load_rollout_config({"run": run, "env": "CartPole-v1"}).env is not None


@pytest.mark.parametrize("text", ["[1", "5", "env: 5", "seed: 1", "\x00"])
def test_damaged_run_configuration_raises(run: Path, text: str) -> None:
    """The error names the file."""
    (run / "best/config.yaml").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"best/config\.yaml is damaged"):
        load_rollout_config({"run": run})
