"""Settings that may change on resume, and the search for the run to resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.algorithms.off_policy.config import OffPolicyConfig
from maze_train.config.compose import load_config
from maze_train.config.options import list_options
from maze_train.config.results import digests_of_files, leaves, matters
from maze_train.config.stored import config_text
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.run_directory import checkpoint_name
from maze_train.run.resuming import continued, resumed_config, run_to_resume
from maze_train.training.changes import changeable

BASE: dict[str, Any] = {
    "env": "CartPole-v1",
    "algorithm": "ppo",
    "seed": 3,
    "runner.concurrency": 4,
    "runner.torch_threads": 2,
}


@pytest.fixture
def run_dir(tmp_path):
    """Create the directory of a run."""
    directory = tmp_path / "run"
    directory.mkdir()
    config = config_to_dict(load_config(BASE))
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return directory


def checkpoint(run_dir: Path) -> Any:
    """Return a checkpoint with the settings of the run and the attributes `continued` reads."""
    path = run_dir / "checkpoints" / "epoch_000003"
    settings = (run_dir / "config.yaml").read_text()
    return SimpleNamespace(path=path, settings=settings, epoch=3, env_steps=5)


SHARED = {
    "algorithm.device",
    "algorithm.n_epochs",
    "algorithm.on_non_finite",
    "algorithm.patience",
    "callbacks",
    "evaluation.concurrency",
    "evaluation.dump_interval",
    "evaluation.dump_interval_steps",
    "evaluation.final_episodes",
    "learner_group.device",
    "learner_group.n_cpus_per_learner",
    "learner_group.n_learners",
    "moved",
    "resume",
    "run_dir",
    "total_steps",
    "trust",
}
OF_KIND = {
    BCAlgorithmConfig: {"algorithm.on_damaged", "algorithm.storage"},
    OffPolicyConfig: {"algorithm.replay_buffer_storage"},
}
SECTIONS = ("checkpoint.", "tracking.", "runner.")


@pytest.mark.parametrize("algorithm", list_options("algorithm"))
def test_resume_allows_settings_of_runner_length_and_output(algorithm):
    """Settings of runner, length and output, and those that callbacks may change, may differ."""
    data = {"bc": "runner.dataset", "sacfd": "algorithm.initial_demonstration_trajectories"}
    more = {data[algorithm]: "x"} if algorithm in data else {}
    config = load_config({**BASE, "algorithm": algorithm, **more})
    free = {key for key in leaves(config_to_dict(config)) if not matters(key, config)}
    of_sections = {key for key in free if key.startswith(SECTIONS)}
    own = [keys for kind, keys in OF_KIND.items() if isinstance(config.algorithm, kind)]
    in_run = {f"algorithm.{name}" for name in changeable(config.algorithm)}
    assert "algorithm.max_grad_norm" in in_run
    assert in_run.isdisjoint(SHARED)
    assert free - of_sections == SHARED.union(in_run, *own)
    fixed = {"runner.concurrency", "runner.envs_per_actor", "runner.fast_dev_run"}
    assert not fixed & of_sections
    assert {"runner.torch_threads", "checkpoint.interval", "tracking.csv"} <= of_sections


@pytest.mark.parametrize(
    "change",
    [
        {"total_steps": 10**9},
        {"runner": "local", "runner.concurrency": 4},
        {"algorithm.device": "cuda"},
        {"tracking.progress": "quiet", "checkpoint.keep_best": 7},
    ],
    ids=str,
)
def test_resume_keeps_the_drawn_seed(run_dir, change):
    """The drawn seed is kept, whatever else is changed."""
    values = {**BASE, "run_dir": str(run_dir), "resume": "auto", "seed": None, **change}
    assert continued(load_config(values), run_dir).seed == 3


@pytest.mark.parametrize(
    ("key", "value", "was"),
    [
        ("algorithm.gamma", 0.5, "0.99"),
        ("algorithm", "a2c", "PPO"),
        ("env", "Acrobot-v1", "CartPole-v1"),
        ("model.rnn.size", 3, "None"),
        ("runner.concurrency", 2, "4"),
        ("runner.envs_per_actor", 2, "0"),
        ("seed", 4, "3"),
    ],
)
@pytest.mark.parametrize("runner", ["dev", "local"])
def test_resume_rejects_settings_that_change_results(run_dir, runner, key, value, was):
    """The error names the key, both values, and the remedy."""
    values = {**BASE, "runner": runner, "run_dir": str(run_dir), "resume": "auto", key: value}
    with pytest.raises(
        ConfigError, match=f"{was}.*affects the results.*start a new run.*base_run="
    ) as caught:
        continued(load_config(values), run_dir, checkpoint(run_dir))
    assert caught.value.key.startswith(key) or key.startswith(caught.value.key)


def test_stored_lists_may_be_replaced_by_tuples(run_dir):
    """A stored list may be replaced by a tuple with the same values, but not with others."""
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("kwargs: {}", "kwargs: {size: [8, 4]}"))
    continued(load_config({**BASE, "env.kwargs.size": (8, 4)}), run_dir, checkpoint(run_dir))
    with pytest.raises(ConfigError, match=r"env\.kwargs\.size = \[4, 8\]: .* has \[8, 4\]"):
        continued(load_config({**BASE, "env.kwargs.size": (4, 8)}), run_dir, checkpoint(run_dir))


def test_resume_lists_all_changed_settings(run_dir):
    """One message lists all changed settings, and marks those that may not change."""
    values = {**BASE, "algorithm.gamma": 0.5, "total_steps": 7, "seed": 9, "run_dir": str(run_dir)}
    with pytest.raises(ConfigError) as caught:
        continued(load_config(values), run_dir, checkpoint(run_dir))
    assert caught.value.problem.splitlines() == [
        f"checkpoint {checkpoint(run_dir).path} has 0.99, and this setting affects the results; "
        f"keep the old value, or start a new run from its policy with base_run={run_dir}; all "
        "changed settings:",
        "  setting          before  now",
        "  algorithm.gamma    0.99  0.5  refused",
        "  seed                  3    9  refused",
        "  total_steps      100000    7",
    ]


@pytest.mark.parametrize(("key", "limit"), [("total_steps", 4), ("algorithm.n_epochs", 2)])
def test_limit_below_progress_raises(run_dir, key, limit):
    """A limit below the completed steps or epochs raises an error; larger and equal ones do not."""
    for allowed in (limit + 1, 0 if key == "algorithm.n_epochs" else limit + 2):
        continued(load_config({**BASE, key: allowed}), run_dir, checkpoint(run_dir))
    with pytest.raises(
        ConfigError, match=rf"{key} = {limit}: the run has already completed {limit + 1} "
    ):
        continued(load_config({**BASE, key: limit}), run_dir, checkpoint(run_dir))


def test_resume_accepts_runs_checkpoints_and_auto(run_dir, tmp_path):
    """`resume` may be a run, one of its checkpoints, or auto, which uses `run_dir` if it exists."""

    def found(**values):
        return run_to_resume(load_config({**BASE, **values}))

    assert found() is None
    assert found(resume=str(run_dir)) == run_dir
    checkpoint = str(run_dir / "checkpoints" / "epoch_000003")
    assert found(resume=checkpoint) == run_dir
    assert checkpoint_name(checkpoint) == "epoch_000003"
    assert checkpoint_name(str(run_dir)) is None
    assert checkpoint_name("auto") is None
    assert found(resume="auto", run_dir=str(run_dir)) == run_dir
    assert found(resume="auto", run_dir=str(tmp_path / "new")) is None
    assert found(resume=str(run_dir), run_dir=str(run_dir)) == run_dir
    with pytest.raises(ConfigError, match=r"resume = .*no run found; expected a directory with"):
        found(resume=str(tmp_path))
    with pytest.raises(ConfigError, match=r"run_dir = .*remove run_dir"):
        found(resume=str(run_dir), run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"resume = 'auto'.*set run_dir"):
        found(resume="auto")


def test_given_settings_override_those_of_the_run(run_dir):
    """Given settings override; another runner keeps the settings common to all runners."""
    config = resumed_config(str(run_dir), {"total_steps": 7, "algorithm.n_epochs": 2})
    assert (config.total_steps, config.algorithm.n_epochs, config.seed) == (7, 2, 3)
    assert config.resume == str(run_dir)
    config = resumed_config(str(run_dir), {"runner": "local", "runner.n_workers": 3})
    assert config.runner.name == "local"
    assert (config.runner.concurrency, config.runner.torch_threads) == (4, 2)
    assert config.runner.n_workers == 3
    continued(config, run_dir, checkpoint(run_dir))


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: [", "seed: 1", "\x00", "runner: 3"])
def test_damaged_configuration_raises(run_dir, text):
    """RunDirectoryError is raised for any invalid content."""
    (run_dir / "config.yaml").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"config.yaml is damaged"):
        resumed_config(str(run_dir), {})


def test_missing_stored_settings_have_defaults(run_dir):
    """Settings missing in the stored file count as unchanged."""
    path = Path(run_dir) / "config.yaml"
    node = yaml.safe_load(path.read_text())
    del node["checkpoint"], node["algorithm"]["on_non_finite"], node["algorithm"]["gamma"]
    path.write_text(yaml.safe_dump(node))
    config = load_config({**BASE, "run_dir": str(run_dir), "resume": "auto"})
    config = continued(config, run_dir, checkpoint(run_dir))
    assert config.algorithm.gamma == 0.99


@pytest.mark.parametrize("kind", ["file", "folder", "list"])
@pytest.mark.parametrize("case", ["same content", "copied", "other content", "named", "no path"])
def test_moved_files_are_accepted_with_identical_content(run_dir, tmp_path, kind, case):
    """Another path is accepted if the content is identical, or if `moved` allows it."""

    def made(name, content):
        if kind == "folder":
            (tmp_path / name).mkdir()
            (tmp_path / name / "part").write_text(content)
            return str(tmp_path / name)
        (tmp_path / name).write_text(content)
        return str(tmp_path / name) if kind != "list" else [str(tmp_path / name)]

    old = made("old", "streets")
    before = load_config({**BASE, "env.kwargs.net_file": old})
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config_to_dict(before)))
    found = digests_of_files(before)
    assert list(found) == ["env.kwargs.net_file"]
    if case != "copied":
        (run_dir / "files.json").write_text(json.dumps(found))
        (tmp_path / "old").rename(tmp_path / "gone")
    new = made("new", "others" if case in ("other content", "named") else "streets")
    if case == "no path":
        new = 3
    more = {"moved": ["env.kwargs"]} if case in ("named", "no path") else {}
    config = load_config({**BASE, "env.kwargs.net_file": new, **more})
    if case in ("other content", "no path"):
        hint = kind != "list" and case == "other content"
        text = r"env\.kwargs\.net_file = .*" + r"moved=\[env\.kwargs\.net_file\]" * hint
        with pytest.raises(ConfigError, match=text):
            continued(config, run_dir, checkpoint(run_dir))
    else:
        assert continued(config, run_dir, checkpoint(run_dir)).env.kwargs["net_file"] == new
    assert "moved: []" in config_text(config)
    assert digests_of_files(load_config({**BASE, "env.kwargs.word": ""})) == {}
