"""A complete run on the dev runner: behaviour, files, errors."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cases import everyday
from own_envs import SpacesEnv
from short_runs import everything, file_contents, rows, settings, short_run, summary, written_config

from maze_train import MetricsWriter, RunInfo, evaluate, load_config, run_rollout, train
from maze_train.core.errors import ConfigError, MazeTrainError
from maze_train.envs import factory
from maze_train.run.train import TrainingRunner
from maze_train.tools.runs import find_runs

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_finished_run_has_all_files() -> None:
    """A finished run has configuration, metrics, summary, plot and best policy."""
    result = short_run(**{"tracking.plot": True})
    names = everything(Path("run"))
    assert [name for name in names if "tfevents" not in name] == [
        ".lock", "best", "best/config.yaml", "best/policy.pt", "best/score.json",
        "best/spaces.json", "checkpoints", "checkpoints/epoch_000002",
        "checkpoints/epoch_000002/MANIFEST.json", "checkpoints/epoch_000002/state.pt",
        "checkpoints/epoch_000003", "checkpoints/epoch_000003/MANIFEST.json",
        "checkpoints/epoch_000003/state.pt", "checkpoints/latest",
        "config.yaml", "environment.json", "metrics.csv", "plots", "plots/learning_curve.png",
        "run.log", "summary.json",
    ]  # fmt: skip
    assert sum("tfevents" in name for name in names) == 2
    assert result.run_dir == Path("run").absolute()
    outcome = summary("run")
    assert outcome["stop_reason"] == "total_steps"
    assert (outcome["epochs"], outcome["updates"], outcome["env_steps"]) == (3, 6, 192)
    assert outcome["best_metric"] == result.best_metric
    assert (outcome["algorithm"], outcome["environment"]) == ("ppo", "SpacesEnv")
    assert (outcome["metric"], outcome["seed"]) == ("eval/episode_return_mean", 1)
    assert (outcome["model"]["hidden_sizes"], outcome["model"]["activation"]) == ([8], "tanh")
    assert {"version", "wall_time_s", "steps_per_second"} <= outcome.keys()
    score = json.loads(Path("run/best/score.json").read_text())
    assert score.keys() == {"score", "epoch", "sha256"}
    assert (score["score"], score["epoch"]) == (result.best_metric, outcome["best_epoch"])
    for path in Path("run").rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are not JSON


@pytest.mark.parametrize("algorithm", everyday(1, ["ppo", "a2c"]))
def test_written_configuration_repeats_the_run(algorithm: str) -> None:
    """config.yaml reloads to an equal configuration and repeats the run."""
    node = settings(algorithm, seed=None)
    TrainingRunner(load_config(node)).run()
    written = written_config("run")
    assert isinstance(written["seed"], int)
    again = load_config({**written, "run_dir": "again"})
    assert again == load_config({**node, "seed": written["seed"], "run_dir": "again"})
    TrainingRunner(again).run()
    assert rows("run") == rows("again")
    assert written_config("again") == written
    short_run("other", algorithm, seed=None)
    assert written_config("other")["seed"] != written["seed"]
    assert rows("other") != rows("run")


def test_used_run_directory_raises() -> None:
    """A directory with a run raises an error and is unchanged."""
    short_run()
    before = file_contents("run")
    with pytest.raises(ConfigError, match=r"run_dir = .*already contains a run; resume it with"):
        short_run()
    assert file_contents("run") == before


def test_unwritable_run_directory_raises() -> None:
    """The error names the run directory."""
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir = '/.*file/run': cannot be written"):
        short_run("file/run")


def test_default_run_directories_are_unique() -> None:
    """Default directories are unique."""
    one, two = (short_run(None).run_dir for _ in range(2))
    assert one != two
    assert str(one).startswith(str(Path.cwd() / "outputs/SpacesEnv-ppo-dev/20"))


def test_latest_links_the_last_started_run() -> None:
    """Runs with an explicit directory are ignored."""
    with pytest.raises(ConfigError, match=r"resume = 'latest': outputs/latest does not exist"):
        train(resume="latest")
    with pytest.raises(ConfigError, match="service: does not answer"):
        short_run(None, **{"tracking.writers": [Refusing()]})
    assert not os.path.exists("outputs")
    one, two = (short_run(None).run_dir for _ in range(2))
    short_run("elsewhere")
    with pytest.raises(ValueError, match="does not know"):
        short_run(None, **{"tracking.writers": [Refusing(ValueError("does not know"))]})
    assert Path("outputs/latest").resolve() == two
    assert train(resume="latest", total_steps=256).run_dir == two
    played = run_rollout(run="latest@final", n_episodes=1, output_dir="played")
    assert len(played.episodes) == 1
    assert find_runs(["outputs"]).directories == [one, two]


def test_user_file_called_latest_is_kept() -> None:
    """An existing file `latest` is not replaced."""
    Path("outputs").mkdir()
    Path("outputs/latest").write_text("mine")
    short_run(None)
    assert Path("outputs/latest").read_text() == "mine"


class Refusing(MetricsWriter):
    """Writer of a service that cannot be reached."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or ConfigError("service", "does not answer")

    def start(self, run: RunInfo) -> None:
        """Create a directory and fail."""
        assert run.run_dir is not None
        (run.run_dir / "service").mkdir()
        raise self.error


@pytest.mark.parametrize("there", [None, [], ["notes.txt"]])
def test_failing_writer_leaves_no_run_directory(there: list[str] | None) -> None:
    """If a writer fails to start, the directory is unchanged."""
    if there is not None:
        Path("run").mkdir()
    for name in there or ():
        Path("run", name).touch()
    refused = {**settings("ppo"), "run_dir": "run", "tracking.writers": [Refusing()]}
    with pytest.raises(ConfigError, match="service: does not answer"):
        train(**refused)
    assert Path("run").is_dir() == (there is not None)
    assert not Path("run/config.yaml").exists()
    assert Path("run/notes.txt").exists() == bool(there)
    train(**{**refused, "tracking.writers": []})


def test_schedules_start_at_the_first_value() -> None:
    """The first update has the first value; the last value is not reached."""
    history = short_run(
        **{
            "algorithm.epoch_length": 1,
            "algorithm.lr": {"start": 0.01, "end": 0.0},
            "algorithm.clip_range": {"points": [[0, 0.3], [64, 0.1]], "by": "env_steps"},
            "algorithm.entropy_coef": {"points": [[0, 1.0], [4, 0.0]], "by": "updates"},
        }
    ).history
    expected = {
        "learning_rate": [0.01 * (1 - i / 6) for i in range(6)],
        "clip_range": [0.3, 0.2, 0.1, 0.1, 0.1, 0.1],
        "entropy_coef": [1, 0.75, 0.5, 0.25, 0, 0],
    }
    for name, values in expected.items():
        np.testing.assert_allclose([row[f"train/{name}"] for row in history], values, rtol=1e-6)


def test_nested_runs_are_independent() -> None:
    """A run within another run does not change its results."""
    inner: list[Any] = []

    class Nesting(SpacesEnv):
        def step(self, action: Any) -> Any:
            if not inner:
                inner.append(None)
                with torch.enable_grad():  # collectors step environments without gradients
                    short_run("inner", seed=4)
            return super().step(action)

    short_run("outer", env=Nesting, seed=3)
    short_run("outer_alone", seed=3)
    short_run("inner_alone", seed=4)
    assert rows("outer") == rows("outer_alone")
    assert rows("inner") == rows("inner_alone")
    assert everything(Path("outer/best")) == everything(Path("inner/best"))


@pytest.mark.parametrize("env", [lambda: SpacesEnv(), functools.partial(SpacesEnv)])
def test_resuming_a_python_environment_requires_it_again(env: Any) -> None:
    """The error explains how to pass the environment again."""
    run_dir = short_run(env=env).run_dir
    remedy = r"pass it again, as in train\(env=..., resume=...\) or run_rollout\(run=..., env=...\)"
    for again in (lambda: train(resume=run_dir), lambda: run_rollout(run=run_dir)):
        with pytest.raises(ConfigError, match=remedy):
            again()
    assert train(env=env, resume=run_dir, total_steps=256).summary.env_steps == 256


class Wandering(SpacesEnv):
    """Environment that changes the working directory."""

    def __init__(self) -> None:
        super().__init__()
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")


@pytest.mark.parametrize("run_dir", ["run", None])
def test_files_stay_below_the_initial_directory(run_dir: str | None) -> None:
    """All files are written below the initial directory."""
    here = Path.cwd()
    result = short_run(run_dir, env={"_target_": f"{__name__}.Wandering"})
    assert result.run_dir.is_relative_to(here / (run_dir or "outputs/Wandering-ppo-dev"))
    written = {path.name for path in here.rglob("*") if path.is_file()}
    assert written == {path.name for path in result.run_dir.rglob("*") if path.is_file()}
    assert {"metrics.csv", "summary.json", "config.yaml"} <= written


def test_run_on_a_full_disk_lists_missing_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run finishes, and the result lists missing files."""

    class Filling(SpacesEnv):
        steps = 0

        def step(self, action: Any) -> Any:
            Filling.steps += 1
            if Filling.steps == 100:
                monkeypatch.setattr(os, "fsync", full)
            return super().step(action)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    result = short_run(env=Filling, **{"evaluation.dump_interval": 1})
    assert result.summary.stop_reason == "total_steps"
    run = Path("run").absolute()
    missing = {"metrics.csv", "summary.json", "the last checkpoint"}
    assert missing < set(result.missing)
    assert str(run / "policies/epoch_000003") in result.missing


def test_second_run_in_a_thread_raises() -> None:
    """A second run in a thread raises an error with a remedy."""
    refused: list[BaseException] = []

    def second() -> None:
        try:
            short_run("second", seed=4)
        except MazeTrainError as error:
            refused.append(error)

    class Meeting(SpacesEnv):
        def step(self, action: Any) -> Any:
            if not refused:
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()
            return super().step(action)

    short_run("first", env=Meeting, seed=3)
    short_run("alone", seed=3)
    assert "another run in this process uses" in str(refused[0])
    assert not Path("second").exists()
    assert rows("first") == rows("alone")


def test_run_trains_within_no_grad() -> None:
    """Runs train within `torch.no_grad`."""
    with torch.no_grad():
        short_run("without")
    short_run("with")
    assert rows("without") == rows("with")


def endless(limit: int = 0) -> Any:
    """Return an environment whose episodes do not terminate, with an optional time limit."""
    env = SpacesEnv(length=10**9)
    return gymnasium.wrappers.TimeLimit(env, limit) if limit else env


@pytest.mark.parametrize(
    ("env", "length"),
    [
        ({"_target_": "test_training_run.endless"}, 30),
        ({"_target_": "test_training_run.endless", "kwargs": {"limit": 25}}, 25),
        ({"_target_": "test_training_run.endless", "kwargs": {"limit": 50}}, 50),
        ({"_target_": "own_envs.SpacesEnv", "kwargs": {"length": 10**9}}, 30),
        (
            {
                "_target_": "own_envs.SpacesEnv",
                "kwargs": {"length": 10**9},
                "max_episode_steps": 45,
            },
            45,
        ),
        ({"id": "Pendulum-v1"}, 200),
    ],
)
def test_declared_time_limit_applies_to_evaluations(
    env: dict[str, Any], length: int, monkeypatch: Any, capsys: Any
) -> None:
    """Without a declared limit, evaluation truncates episodes and prints a note."""
    monkeypatch.setattr(factory, "GUARD_STEPS", 30)
    result = short_run(env=env, **{"evaluation.max_episode_steps": None})
    assert {row["eval/episode_length_mean"] for row in result.history} == {length}
    notes = capsys.readouterr().err.count("truncated after 30 steps, since the environment")
    assert notes == (length == 30)
    again = {"run": str(result.run_dir), "n_episodes": 2, "trust": ["test_training_run"]}
    episodes = run_rollout(**again, progress="quiet").episodes
    assert [episode.length for episode in episodes] == [length] * 2
    assert capsys.readouterr().err.count("truncated after 30 steps") == (length == 30)


def test_evaluation_max_episode_steps_applies_to_native_backends() -> None:
    """`evaluation.max_episode_steps` applies to evaluation only."""
    env = {"id": "CartPole-v1", "backend": "native"}
    history = short_run(env=env, **{"evaluation.max_episode_steps": 3}).history
    assert {row["eval/episode_length_mean"] for row in history} == {3}
    assert history[-1]["train/episode_length_mean"] > 3


class Paid(SpacesEnv):
    """Environment with a reward of 1 in each of the 5 steps of an episode."""

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 1.0, *rest


def test_training_wrappers_do_not_change_reported_returns() -> None:
    """Reported returns exclude training wrappers."""
    losses = []
    for factor in (1.0, 10.0):
        wrapper = {"_target_": "own_envs.Scaled", "factor": factor}
        result = short_run(f"run{factor}", env=Paid, **{"env.training_wrappers": [wrapper]})
        for row in result.history:
            assert row["train/episode_return_mean"] == row["eval/episode_return_mean"] == 5.0
        losses.append(result.history[0]["train/value_loss"])
    assert losses[1] > 10.0 * losses[0]


def test_torch_threads_are_restored_after_the_run() -> None:
    """The number of threads is restored after the run."""
    seen: list[int] = []

    class Looking(SpacesEnv):
        def step(self, action: Any) -> Any:
            seen.append(torch.get_num_threads())
            return super().step(action)

    before = torch.get_num_threads()
    for count in (1, 2, 0):
        short_run(f"run{count}", env=Looking, total_steps=1, **{"runner.torch_threads": count})
        assert seen[-1] == (count or before)
        assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("eval/info/fuel", r"number 'fuel'; .* tracking\.info_keys=\[fuel\]"),
        ("train/info/fuel", "number 'fuel'"),
    ],
)
def test_missing_selection_metric_ends_the_run(metric: str, words: str) -> None:
    """The error is raised at the first evaluation after an episode."""
    with pytest.raises(ConfigError, match=f"evaluation.metric = .*not reported: .*{words}"):
        short_run(env=lambda: SpacesEnv(length=4), **{"evaluation.metric": metric})


class RareSuccess(SpacesEnv):
    """Environment whose final info contains `is_success` only if the episode is successful."""

    def reset(self, **given: Any) -> Any:
        found = super().reset(**given)
        self.is_lucky = self.np_random.random() < 0.3
        return found

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        missing = {"is_success": math.nan, "fuel": math.nan}
        lucky = {"is_success": True} if self.is_lucky else missing
        return *result, {**info, **lucky}


def test_success_that_only_successful_episodes_report() -> None:
    """Training, evaluation, rollouts and `evaluate` count episodes without it as failures."""
    env = functools.partial(RareSuccess, length=4)
    settings = {"evaluation.n_episodes": 40, "tracking.info_keys": ["fuel"]}
    found = short_run(env=env, **settings, **{"evaluation.metric": "eval/success_rate"})
    for row in found.history:
        assert 0.0 < row["train/success_rate"] < 0.7
        assert 0.1 < row["eval/success_rate"] < 0.5
        assert "train/info/fuel" not in row
    assert found.summary.best_metric == max(row["eval/success_rate"] for row in found.history)
    played = evaluate(found.policy, env, n_episodes=40)
    assert 0.1 < played.success_rate < 0.5
    rollout = run_rollout(run="run", env=env, n_episodes=40, progress="quiet")
    assert rollout.summary.success_rate == played.success_rate


def test_a_success_rate_that_no_episode_reports_selects_with_zero(capsys: Any) -> None:
    """A note is printed; the first policy is kept as the best."""
    found = short_run(env=lambda: SpacesEnv(length=4), **{"evaluation.metric": "eval/success_rate"})
    assert (found.summary.best_metric, found.summary.best_epoch) == (0.0, 1)
    assert "no episode has reported is_success" in capsys.readouterr().err


class Telling(SpacesEnv):
    """Environment with its progress in infos."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, {**info, "way": [0.5 * self.t], "name": "x"}


@pytest.mark.parametrize("algorithm", everyday(2, ["ppo", "sac", "impala", "es"]))
def test_info_keys_become_metrics(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Means over final infos are reported; missing keys print a note."""
    keys = {"tracking.info_keys": ["way", "name"]}
    told = short_run("told", algorithm, env=lambda: Telling(length=4), **keys)
    for prefix in ("train", "eval") if algorithm != "es" else ("eval",):
        assert [row[f"{prefix}/info/way"] for row in told.history] == [2.0] * len(told.history)
    assert not any("info/name" in name for row in told.history for name in row)
    assert "the final info of no episode contained a number 'name'" in capsys.readouterr().err
    short_run("plain", algorithm, env=lambda: Telling(length=4))
    without = [{k: v for k, v in row.items() if "/info/" not in k} for row in rows("told")]
    assert without == rows("plain")
