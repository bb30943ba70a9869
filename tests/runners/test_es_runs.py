"""Runs of evolution strategies as a user makes them: in one process, and in several."""

from __future__ import annotations

import csv
import importlib
import math
import multiprocessing
import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from cases import everyday
from gymnasium import spaces
from own_envs import SpacesEnv
from own_parts import ANY_SPACES, AnyEnv
from short_runs import everything, rows, summary
from torch import nn

from maze_train import load_config, load_policy, train
from maze_train.algorithms.es.build import STATISTICS_STEPS
from maze_train.algorithms.es.events import ESEvents, PopulationEvents
from maze_train.algorithms.es.learner import ESLearner
from maze_train.errors import ConfigError, EnvError, TrainingError, WorkerError
from maze_train.runners.factory import build_runner

ES: dict[str, Any] = {
    "algorithm": "es",
    "algorithm.epoch_length": 2,
    "algorithm.n_rollouts_per_update": 8,
    "algorithm.n_epochs": 3,
    "algorithm.noise_table_size": 200_000,
    "runner": "dev",
    "runner.concurrency": 4,
    "evaluation.n_episodes": 3,
    "evaluation.max_episode_steps": 100,
    "model.hidden_sizes": [6],
    "seed": 1,
    "total_steps": 0,
    "tracking.progress": "quiet",
    "tracking.plot": False,
    "tracking.tensorboard": False,
}

FORK = {"runner": "local", "runner.start_method": "fork"}
"""Processes that begin at once: they inherit what is imported."""

OWN = ["test_es_runs", "own_parts", "own_envs"]
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
HYBRID = spaces.Dict({"gear": spaces.Discrete(3), "force": spaces.Box(-1.0, 1.0, (2,))})


@pytest.fixture(autouse=True)
def nothing_is_left(no_file_is_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every test starts in an empty directory, and leaves no open environment."""
    monkeypatch.chdir(tmp_path)
    SpacesEnv.open_envs = 0
    yield
    assert SpacesEnv.open_envs == 0


class UnevenEnv(gymnasium.Env[Any, Any]):
    """Episodes of 2 to 40 steps, as the actions and the seed decide; the reward is what they move.

    Args:
        hybrid: Whether an action is a choice and two numbers, instead of a choice.
        kills: Directory of files that are removed one by one; who removes one is killed. None: none
            is.
        at: Step of an environment at which that happens.
    """

    observation_space = VECTOR

    def __init__(self, hybrid: bool = False, kills: str | None = None, at: int = 24) -> None:
        self.action_space = HYBRID if hybrid else spaces.Discrete(3)
        self.kills, self.at = kills, at
        self.steps = 0

    def observe(self) -> Any:
        noise = self.np_random.uniform(-0.2, 0.2, 2)
        return np.array([math.tanh(self.place), *noise], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place = 0, float(self.np_random.normal())
        self.limit = int(self.np_random.integers(2, 41))
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.steps += 1
        if self.kills is not None and self.steps == self.at:
            self.die()
        self.t += 1
        gear = action["gear"] if isinstance(action, dict) else action
        move = 0.2 * (float(gear) - 1.0)
        if isinstance(action, dict):
            move += 0.1 * float(action["force"].sum())
        self.place += move
        ended = abs(self.place) > 2.0
        info = {"is_success": self.place > 0} if ended or self.t == self.limit else {}
        return self.observe(), self.place - abs(move), ended, self.t == self.limit, info

    def die(self) -> None:
        """Take a file away, and this process with it."""
        for path in Path(str(self.kills)).iterdir():
            with suppress(FileNotFoundError):  # another process was faster
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


class Reckless(nn.Module):
    """Takes the last choice beyond a place; the policy decides elsewhere."""

    def __init__(self, policy: Any, place: float = 0.0) -> None:
        super().__init__()
        self.policy = policy
        self.distribution = policy.distribution
        self.place = place

    def policy_params(self, obs: torch.Tensor) -> torch.Tensor:
        params: torch.Tensor = self.policy.policy_params(obs).clone()
        params[obs[..., 0] > self.place, 2] += 10.0
        return params


def es_run(run_dir: str = "run", env: Any = None, **overrides: Any) -> Any:
    """A short run of ES, by default on episodes of uneven lengths."""
    return train(
        **{**ES, "env": UnevenEnv if env is None else env, "run_dir": run_dir, **overrides}
    )


def compared(run_dir: str) -> list[dict[str, str]]:
    """The rows of metrics.csv without clocks, what was dropped, and what was started again."""
    left_out = ("population/steps_dropped", "train/worker_restarts")
    return [{k: v for k, v in row.items() if k not in left_out} for row in rows(run_dir)]


def assert_equal_runs(run_dir: str, other: str) -> None:
    """Every metric and the best weights are the same, to the bit."""
    assert len(compared(run_dir)) > 0
    assert compared(run_dir) == compared(other)
    weights, others = (load_policy(name, trust=OWN).model.state_dict() for name in (run_dir, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    one, two = (summary(name) for name in (run_dir, other))
    for key in ("env_steps", "updates", "best_metric", "best_epoch", "final_eval_return_mean"):
        assert one[key] == two[key], key


def assert_acts(run_dir: str, made: Any) -> None:
    """The policy that a run saved acts on an environment, in both ways."""
    policy = load_policy(run_dir, trust=OWN)
    for deterministic in (True, False):
        policy.reset()
        obs, _ = made.reset(seed=0)
        for _ in range(2):
            obs, *_ = made.step(policy.act(obs, deterministic))


# -- dev -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True])
def test_metrics(hybrid: bool) -> None:
    """Every value that ES reports is in the table, and is plausible."""
    result = es_run(env=partial(UnevenEnv, hybrid))
    assert (result.summary.stop_reason, result.summary.updates) == ("n_epochs", 6)
    tags = {event.tag for group in (ESEvents, PopulationEvents) for event in group.events()}
    before = 0
    for row, written in zip(result.history, rows("run"), strict=True):
        assert tags <= row.keys()
        assert tags <= {name for name, cell in written.items() if cell}
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/episodes"] == 16
        assert row["env_steps"] - before == 16 * row["train/episode_length_mean"]
        before = row["env_steps"]
        assert 0 <= row["train/success_rate"] <= 1
        assert row["population/steps_dropped"] == 0
        assert row["train/gradient_steps"] == 2
        assert row["train/noise_stddev"] == 0.05
        assert 0 < row["train/update_ratio"] < 1 < row["train/policy_norm"]
        assert row["time/collect_s"] > 0
        assert row["time/update_s"] > 0
    assert before == summary("run")["env_steps"]


def test_the_seed_decides_every_number() -> None:
    """Equal seeds give equal metrics, to the last digit; others give others."""
    more = {"algorithm.deterministic": False, "algorithm.n_timesteps_per_update": 200}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        es_run(name, seed=seed, **more)
    assert rows("a") == rows("b")
    assert_equal_runs("a", "b")
    for key in ("train/policy_grad_norm", "train/policy_norm", "train/episode_return_mean"):
        assert rows("a")[0][key] != rows("c")[0][key]


@pytest.mark.parametrize("runner", ["dev", "fork"])
def test_sampled_actions_and_noise_of_actions_count(runner: str) -> None:
    """Each of them gives other episodes from the first update on, of the same parameters."""
    place = FORK if runner == "fork" else {}
    one_update = {"algorithm.n_epochs": 1, "algorithm.epoch_length": 1}
    found = []
    for hybrid, stddev, deterministic in (
        (False, 0.0, True),
        (False, 0.0, False),
        (True, 0.0, True),
        (True, 0.3, True),
    ):
        settings = {
            "algorithm.action_noise_stddev": stddev,
            "algorithm.deterministic": deterministic,
            "evaluation.n_episodes": 0,
        }
        env = partial(UnevenEnv, hybrid)
        result = es_run(f"run{len(found)}", env, **place, **one_update, **settings)
        found.append(result.history[0]["train/episode_return_mean"])
    assert found[0] != found[1]
    assert found[2] != found[3]


@pytest.mark.parametrize("runner", ["dev", "fork"])
def test_a_trial_takes_a_gradient_step(runner: str) -> None:
    """One epoch of one update, an evaluation, and nothing else; also where no episode ends."""
    place = FORK if runner == "fork" else {}
    result = es_run(env=partial(SpacesEnv, length=10**9), **place, **{"runner.fast_dev_run": True})
    assert (result.summary.epochs, result.summary.updates) == (1, 1)
    assert result.summary.env_steps == 2 * 10
    assert result.history[0]["train/gradient_steps"] == 1


def test_episodes_of_training_are_cut() -> None:
    """After `max_steps`; those of an evaluation are not."""
    result = es_run(env=partial(SpacesEnv, length=50), **{"algorithm.max_steps": 7})
    for row in result.history:
        assert row["train/episode_length_mean"] == 7
        assert row["eval/episode_length_mean"] == 50


def test_schedules() -> None:
    """Step size and deviation fall over the run."""
    settings = {"algorithm.noise_stddev": "linear_0.12", "algorithm.lr": "linear_0.06"}
    result = es_run(**settings)
    stddevs = [row["train/noise_stddev"] for row in result.history]
    assert stddevs == pytest.approx([0.10, 0.06, 0.02])
    rates = [row["train/learning_rate"] for row in result.history]
    assert rates == pytest.approx([0.05, 0.03, 0.01])


@pytest.mark.parametrize("mode", ["running", "estimated"])
def test_statistics_of_observations_begin_before_training(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """With environments of their own, gone then; `estimated` ones stay as they are."""
    original, open_envs = ESLearner.preprocess, []

    def noted(*args: Any) -> Any:
        open_envs.append(SpacesEnv.open_envs)
        return original(*args)

    monkeypatch.setattr(ESLearner, "preprocess", noted)
    more = {"model.normalization.mode": mode, "model.normalization.n_steps": 64}
    result = es_run(env=SpacesEnv, **more, **{"evaluation.n_episodes": 0})
    assert open_envs == [4] * 6
    assert result.summary.env_steps == 6 * 8 * 5
    begun = float(result.policy.model.normalizer.count)
    assert begun >= 64
    if mode == "running":
        # The best policy is the first one here: all returns are those of chance.
        best = result.summary.best_epoch
        assert begun == 1024 + best * 2 * 8 * 5
    else:
        assert begun == 1024
        assert bool(result.policy.model.normalizer.frozen)


@pytest.mark.parametrize("case", ANY_SPACES)
def test_every_space(case: str) -> None:
    """Metrics are finite, every action is one of its space, and the saved policy acts."""
    more = {"model.image_encoder": "impala"} if case == "image" else {}
    env = partial(AnyEnv, *ANY_SPACES[case])
    result = es_run(env=lambda: env(), **more, **{"algorithm.n_epochs": 1})
    assert result.summary.updates == 2
    assert all(math.isfinite(value) for value in result.history[-1].values())
    assert_acts("run", env())


def test_a_wrapper_acts_and_is_saved() -> None:
    """Its rule holds for members, for evaluations and for the policy that is loaded."""
    node = {"_target_": "test_es_runs.Reckless", "place": -2.0}  # everywhere
    result = es_run(env=SpacesEnv, **{"algorithm.policy_wrapper": node})
    for row in result.history:
        assert row["train/episode_return_min"] == row["eval/episode_return_min"] == 5.0
    policy = load_policy("run", trust=OWN)
    assert type(policy.model) is Reckless
    assert [policy.act(np.full(3, x, np.float32)) for x in (-1.0, 0.0, 1.0)] == [1, 1, 1]
    assert result.history[-1]["train/update_ratio"] == 0.0  # equal returns teach nothing


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["QUESTIONS", "ORDERS"])
@pytest.mark.filterwarnings("ignore:.*infinity")
def test_every_tiny_problem(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates with every kind of space, sampled actions too; the saved policy acts."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "spaces_and_envs")
    problems = getattr(importlib.import_module("tiny_problems"), kinds)
    for i, (kind, make) in enumerate(problems.items()):
        more: dict[str, Any] = {"algorithm.n_epochs": 1, "algorithm.deterministic": i % 2 == 0}
        if "image" in kind:
            more |= {"model.image_encoder": "impala", "model.hidden_sizes": [4]}
        result = es_run(f"run{i}", lambda make=make: make(), **more)
        assert result.summary.updates == 2, kind
        assert all(math.isfinite(value) for value in result.history[-1].values()), kind
        assert_acts(f"run{i}", make())


# -- local ---------------------------------------------------------------------------------------

EQUAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "CartPole": ("CartPole-v1", {}),
    "normalised": (
        UnevenEnv,
        {
            "model.normalization.mode": "running",
            "model.normalization.n_steps": 50,
            "algorithm.n_timesteps_per_update": 300,
        },
    ),
    "estimated, steps alone": (
        UnevenEnv,
        {
            "model.normalization.mode": "estimated",
            "model.normalization.n_steps": 50,
            "algorithm.n_rollouts_per_update": 2,
            "algorithm.n_timesteps_per_update": 150,
            "algorithm.max_steps": 15,
        },
    ),
    "sampled, with noise": (
        partial(UnevenEnv, True),
        {"algorithm.deterministic": False, "algorithm.action_noise_stddev": 0.2},
    ),
    "memory": (
        partial(UnevenEnv, True),
        {"model": "vector_rnn", "model.memory.size": 4, "algorithm.n_timesteps_per_update": 150},
    ),
    "wrapper": (UnevenEnv, {"algorithm.policy_wrapper": {"_target_": "test_es_runs.Reckless"}}),
    "own network": (UnevenEnv, {"model.policy": {"_target_": "own_parts.OwnNet"}}),
    "masks": (partial(AnyEnv, *ANY_SPACES["mask"]), {"algorithm.deterministic": False}),
    "images": (partial(AnyEnv, *ANY_SPACES["image"]), {"model.image_encoder": "impala"}),
    "Dict": (
        partial(AnyEnv, *ANY_SPACES["dict"]),
        {"algorithm.deterministic": False, "algorithm.action_noise_stddev": 0.2},
    ),
}

PLACES: dict[str, dict[str, Any]] = {
    "dev, 3": {"runner.concurrency": 3},
    "dev, 64": {"runner.concurrency": 64},
    "1 worker, 3": {**FORK, "runner.n_workers": 1, "runner.concurrency": 3},
    "2 workers, 8": {**FORK, "runner.n_workers": 2, "runner.concurrency": 8},
    "4 workers, 3": {**FORK, "runner.n_workers": 4, "runner.concurrency": 3},
    "4 workers, 64": {**FORK, "runner.n_workers": 4, "runner.concurrency": 64},
}
SHORT = ("dev, 3", "2 workers, 8")


@pytest.mark.slow
@pytest.mark.parametrize("case", everyday(1, EQUAL))
def test_who_plays_makes_no_difference(case: str) -> None:
    """Any number of processes and members at a time: equal metrics and best weights."""
    made, more = EQUAL[case]
    env = made if isinstance(made, str) else lambda: made()
    images = {"algorithm.n_epochs": 1} if case == "images" else {}
    es_run("dev", env, **more, **images, **{"runner.concurrency": 8})
    names = list(EQUAL)
    places = PLACES if names.index(case) < 4 else SHORT
    for place in places:
        es_run(place, env, **more, **images, **PLACES[place])
        assert_equal_runs(place, "dev")
    for row in rows("dev"):
        assert all(math.isfinite(float(cell)) for cell in row.values() if cell)


@pytest.mark.parametrize(("n_workers", "expected"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_no_process_is_there_for_nothing(n_workers: int, expected: int) -> None:
    """Not more than members that play at a time."""
    settings = {**ES, **FORK, "env": "CartPole-v1", "runner.concurrency": 3}
    runner: Any
    with build_runner(load_config({**settings, "runner.n_workers": n_workers})) as runner:
        runner.builder.prepare(runner.builder.build_model())
        assert len(multiprocessing.active_children()) == expected


@pytest.mark.slow
def test_as_a_user_gets_it() -> None:
    """With the default way to start processes, and their default number."""
    es_run("dev")
    es_run("local", {"_target_": "test_es_runs.UnevenEnv"}, runner="local")
    assert_equal_runs("local", "dev")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "n_kills", "at"), [("none", 2, 24), ("running", 2, STATISTICS_STEPS + 12)]
)
def test_killed_workers_make_no_difference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, n_kills: int, at: int
) -> None:
    """They are started again, counted, and their members play again, with the same numbers."""
    more = {
        "model.normalization.mode": mode,
        "algorithm.n_timesteps_per_update": 300,
        "algorithm.deterministic": False,
        "evaluation.n_episodes": 0,
    }
    es_run("dev", **more)
    kills = tmp_path / "kills"
    kills.mkdir()
    for i in range(n_kills):
        (kills / str(i)).touch()
    settings = {**FORK, "runner.n_workers": 2, "runner.on_worker_failure": "restart"}
    env = partial(UnevenEnv, kills=str(kills), at=at)
    es_run("local", lambda: env(), **more, **settings)
    assert list(kills.iterdir()) == []
    assert_equal_runs("local", "dev")
    restarts = [float(row["train/worker_restarts"] or 0) for row in rows("local")]
    assert sum(restarts) == n_kills
    error = capfd.readouterr().err
    assert len(re.findall(r"warning: worker \d .* episodes are played again", error)) == n_kills


@pytest.mark.slow
def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    """Unless workers are started again; the summary says so."""
    kills = tmp_path / "kills"
    kills.mkdir()
    (kills / "0").touch()
    env = partial(UnevenEnv, kills=str(kills))
    with pytest.raises(WorkerError, match="worker"):
        es_run(env=lambda: env(), **FORK, **{"evaluation.n_episodes": 0})
    assert summary("run")["stop_reason"] == "error"


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm.n_rollouts_per_update": 3}, r"algorithm\.n_rollouts_per_update = 3"),
        ({"algorithm.noise_table_size": 10**13}, r"takes 40000\.00 GB, and .* free: lower it"),
        ({"algorithm.noise_table_size": 20}, r"algorithm\.noise_table_size = 20: .* parameters"),
        ({**FORK, "algorithm.noise_table_size": 20}, r"algorithm\.noise_table_size = 20"),
        ({"algorithm.optimizer": {"_target_": "torch.optim.Adm"}}, r"algorithm\.optimizer"),
        ({"algorithm.policy_wrapper": {"_target_": "torch.nn.Identity"}}, r"policy_wrapper = "),
        ({"model.critic_hidden_sizes": [4]}, r"model\.critic_hidden_sizes = \[4\]"),
        ({"model.distributions": {"Discrete": "beta"}}, r"model\.distributions"),
        ({**FORK, "model.distributions": {"Discrete": "beta"}}, r"model\.distributions"),
        ({"env": {"id": "CartPole-v1", "backend": "envpool"}}, r"env\.backend = 'envpool'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    """A wrong configuration raises, names the setting, and creates nothing on disk."""
    with pytest.raises(ConfigError, match=message):
        es_run(**overrides)
    assert everything(tmp_path) == []


FAULTY = "own_envs.FaultyEnv"


@pytest.mark.parametrize("runner", ["dev", "fork"])
def test_an_environment_that_raises(runner: str) -> None:
    """Its own error comes through, with the seed of the episode."""
    place = FORK if runner == "fork" else {}
    with pytest.raises(EnvError, match=r"of the episode with seed \d+: .*the wheel came off"):
        es_run(env={"_target_": FAULTY, "kwargs": {"at": 13}}, **place)
    assert summary("run")["stop_reason"] == "error"


@pytest.mark.parametrize("fault", ["nan_reward", "nan_observation"])
def test_numbers_that_are_not_finite(fault: str) -> None:
    """They end the run, or the episodes are lost, until too many are."""
    env = {"_target_": FAULTY, "kwargs": {"fault": fault, "at": 13}}
    with pytest.raises(EnvError, match=r"at step 3 of the episode with seed"):
        es_run("raise", env)
    with pytest.raises(TrainingError, match=r"an update of 8 episodes lost 81 pairs"):
        es_run("skip", env, **{"algorithm.on_non_finite": "skip"})
    assert summary("skip")["stop_reason"] == "error"


def test_rows_without_an_evaluation_select_by_training_returns() -> None:
    """The best policy is that of the epoch whose members did best."""
    result = es_run(**{"evaluation.n_episodes": 0, "algorithm.noise_stddev": 0.5})
    returns = [row["train/episode_return_mean"] for row in result.history]
    assert result.best_metric == max(returns)
    assert result.summary.best_epoch == 1 + int(np.argmax(returns))


def test_the_table_of_metrics_has_a_row_for_each_epoch() -> None:
    """Also when the limit of steps comes within an epoch."""
    es_run(total_steps=1, **{"algorithm.n_epochs": 0})
    with Path("run", "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["epoch"], row["updates"]) == ("1", "1")
    assert summary("run")["stop_reason"] == "total_steps"
