"""A complete run on the dev runner: behaviour, files, errors."""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium.spaces import Text
from own_envs import SpacesEnv
from short_runs import everything, file_contents, rows, settings, short_run, summary, written_config

from maze_train import MetricsWriter, RunInfo, evaluate, load_config, run_rollout, train
from maze_train.core.errors import ConfigError, MazeTrainError, SpaceError
from maze_train.envs import factory
from maze_train.run.train import make_runner
from maze_train.tools.runs import find_runs

pytestmark = pytest.mark.usefixtures("empty_directory")


def test_files_of_the_run_directory() -> None:
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
def test_the_written_configuration_repeats_the_run(algorithm: str) -> None:
    """config.yaml reloads to an equal configuration and repeats the run."""
    node = settings(algorithm, seed=None)
    make_runner(load_config(node)).run()
    written = written_config("run")
    assert isinstance(written["seed"], int)
    again = load_config({**written, "run_dir": "again"})
    assert again == load_config({**node, "seed": written["seed"], "run_dir": "again"})
    make_runner(again).run()
    assert rows("run") == rows("again")
    assert written_config("again") == written
    short_run("other", algorithm, seed=None)
    assert written_config("other")["seed"] != written["seed"]
    assert rows("other") != rows("run")


def test_a_space_without_a_distribution_is_refused(tmp_path: Path) -> None:
    """Unsupported action spaces raise a SpaceError, and nothing is created."""

    class TextActions(SpacesEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = Text(3)

    with pytest.raises(SpaceError, match="Text"):
        short_run(env=TextActions)
    SpacesEnv.open_envs = 0
    assert everything(tmp_path) == []


def test_a_run_directory_is_not_used_twice() -> None:
    """A directory with a run raises an error and is unchanged."""
    short_run()
    before = file_contents("run")
    with pytest.raises(ConfigError, match=r"run_dir = .*already contains a run; resume it with"):
        short_run()
    assert file_contents("run") == before


def test_a_run_directory_that_can_not_be_written_is_named() -> None:
    """The error names the run directory."""
    Path("file").write_text("")
    with pytest.raises(ConfigError, match=r"run_dir = '/.*file/run': cannot be written"):
        short_run("file/run")


def test_runs_without_a_name_get_directories_of_their_own() -> None:
    """Default directories are unique."""
    one, two = (short_run(None).run_dir for _ in range(2))
    assert one != two
    assert str(one).startswith(str(Path.cwd() / "outputs/SpacesEnv-ppo-dev/20"))


def test_latest_names_the_run_that_started_last() -> None:
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


def test_a_file_of_the_user_called_latest_stays() -> None:
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
def test_a_writer_that_refuses_leaves_no_run_directory(there: list[str] | None) -> None:
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


def test_schedules_go_from_start_to_end() -> None:
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


def test_two_runs_in_one_process_do_not_mix() -> None:
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
def test_a_run_with_an_environment_of_python_needs_it_again(env: Any) -> None:
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
def test_an_environment_that_changes_the_working_directory(run_dir: str | None) -> None:
    """All files are written below the initial directory."""
    here = Path.cwd()
    result = short_run(run_dir, env={"_target_": f"{__name__}.Wandering"})
    assert result.run_dir.is_relative_to(here / (run_dir or "outputs/Wandering-ppo-dev"))
    written = {path.name for path in here.rglob("*") if path.is_file()}
    assert written == {path.name for path in result.run_dir.rglob("*") if path.is_file()}
    assert {"metrics.csv", "summary.json", "config.yaml"} <= written


def test_a_disk_that_stays_full(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_runs_in_two_threads_are_refused() -> None:
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


def test_a_run_learns_where_gradients_are_off() -> None:
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
def test_a_declared_time_limit_holds_in_evaluations(
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


def test_evaluations_on_native_vector_environments_are_cut_too() -> None:
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


def test_wrappers_for_training_change_what_is_learned_from_alone() -> None:
    """Reported returns exclude training wrappers."""
    losses = []
    for factor in (1.0, 10.0):
        wrapper = {"_target_": "own_envs.Scaled", "factor": factor}
        result = short_run(f"run{factor}", env=Paid, **{"env.training_wrappers": [wrapper]})
        for row in result.history:
            assert row["train/episode_return_mean"] == row["eval/episode_return_mean"] == 5.0
        losses.append(result.history[0]["train/value_loss"])
    assert losses[1] > 10.0 * losses[0]


def test_the_closing_summary_tells_when_the_best_return_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The summary shows the best return and its epoch."""
    result = short_run(
        **{
            "evaluation.mode": "min",
            "env": "Pendulum-v1",
            "tracking.progress": "lines",
            "checkpoint.keep_best": 1,
            "checkpoint.keep_last": 1,
        }
    )
    returns = [row["eval/episode_return_mean"] for row in result.history]
    assert min(returns) < max(returns)
    found = re.search(r"best return .* at epoch (\d+)", capsys.readouterr().out)
    assert found is not None
    best = 1 + returns.index(min(returns))
    assert int(found[1]) == best == result.summary.best_epoch
    kept = {path.name for path in Path("run/checkpoints").glob("epoch_*")}
    assert kept == {f"epoch_{epoch:06d}" for epoch in (best, len(returns))}


@pytest.mark.exhaustive
def test_modes_of_the_settings_hold_for_the_run_only() -> None:
    """Modes apply to training, statistics and the test, and are restored.

    Anomaly detection applies to training only.
    """
    seen: list[tuple[bool, bool]] = []

    class Looking(SpacesEnv):
        def step(self, action: Any) -> Any:
            seen.append((torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()))
            return super().step(action)

    modes = {"runner.deterministic": True, "runner.detect_anomaly": True}
    more = {"tracking.profile": [2, 3], "evaluation.final_episodes": 1}
    short_run(env=Looking, **modes, **more, **{"model.normalization.mode": "estimated"})
    assert list(dict.fromkeys(seen)) == [(True, True), (True, False)]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_anomaly_enabled()
    assert '"update 3"' in Path("run/profile/updates_2_3.json").read_text()


def test_threads_of_torch_are_set_for_the_run_only() -> None:
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
def test_a_metric_that_no_episode_reports_ends_the_run(metric: str, words: str) -> None:
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
def test_keys_of_infos_become_metrics(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
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
