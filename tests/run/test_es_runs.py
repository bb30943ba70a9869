"""Runs of evolution strategies in one process and in several processes."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import everyday
from es_problems import WalkEnv
from own_envs import SpacesEnv
from short_runs import FORK, rows, short_run, summary
from torch import nn

from maze_train import load_policy
from maze_train.algorithms.es.trainer import STATISTICS_STEPS

pytestmark = pytest.mark.usefixtures("empty_directory")

OWN = ["test_es_runs", "es_problems", "own_parts", "own_envs"]


class KilledEnv(WalkEnv):
    """Environment that kills its process at a step, once for each file in a directory.

    Args:
        kills: Directory of the files.
        at: Step of the environment, counted over all episodes.
    """

    def __init__(self, kills: str, at: int) -> None:
        super().__init__()
        self.kills, self.at = Path(kills), at

    def step(self, action: Any) -> Any:
        if self.steps == self.at:
            for path in self.kills.iterdir():
                with suppress(FileNotFoundError):  # removed by another process
                    path.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Reckless(nn.Module):
    """Policy wrapper that chooses the last action if the observation exceeds `place`."""

    def __init__(self, policy: Any, place: float = 0.0) -> None:
        super().__init__()
        self.policy = policy
        self.distribution = policy.distribution
        self.place = place

    def policy_params(self, obs: torch.Tensor) -> torch.Tensor:
        params: torch.Tensor = self.policy.policy_params(obs).clone()
        params[obs[..., 0] > self.place, 2] += 10.0
        return params


def es_run(run_dir: str = "run", env: Any = WalkEnv, **overrides: Any) -> Any:
    """Run ES for a few updates, by default with episodes of different lengths."""
    return short_run(run_dir, "es", env=env, **overrides)


def compared(run_dir: str) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without clocks, dropped steps and restarts."""
    left_out = ("population/steps_dropped", "train/worker_restarts")
    return [{k: v for k, v in row.items() if k not in left_out} for row in rows(run_dir)]


def assert_equal_runs(run_dir: str, other: str) -> None:
    """Assert that all metrics and the best weights are bit-for-bit identical."""
    assert len(compared(run_dir)) > 0
    assert compared(run_dir) == compared(other)
    weights, others = (load_policy(name, trust=OWN).model.state_dict() for name in (run_dir, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    one, two = (summary(name) for name in (run_dir, other))
    for key in ("env_steps", "updates", "best_metric", "best_epoch", "final_eval_return_mean"):
        assert one[key] == two[key], key


# -- dev -----------------------------------------------------------------------------------------


def test_metrics() -> None:
    """Metrics of ES have plausible values."""
    result = es_run()
    assert (result.summary.stop_reason, result.summary.updates) == ("n_epochs", 6)
    before = 0
    for row in result.history:
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


def test_sampled_actions_and_noise_of_actions_count() -> None:
    """Sampled actions and action noise change episodes from the first update on."""
    one_update = {"algorithm.n_epochs": 1, "algorithm.epoch_length": 1}
    found = []
    kinds = ((False, 0.0, True), (False, 0.0, False), (True, 0.0, True), (True, 0.3, True))
    for hybrid, stddev, deterministic in kinds:
        settings = {
            "algorithm.action_noise_stddev": stddev,
            "algorithm.deterministic": deterministic,
            "evaluation.n_episodes": 0,
        }
        env = partial(WalkEnv, "box", "dict" if hybrid else "discrete")
        result = es_run(f"run{len(found)}", env, **one_update, **settings)
        found.append(result.history[0]["train/episode_return_mean"])
    assert found[0] != found[1]
    assert found[2] != found[3]


def test_episodes_of_training_are_cut() -> None:
    """`max_steps` truncates training episodes only."""
    result = es_run(env=partial(SpacesEnv, length=50), **{"algorithm.max_steps": 7})
    for row in result.history:
        assert row["train/episode_length_mean"] == 7
        assert row["eval/episode_length_mean"] == 50


def test_a_wrapper_acts_and_is_saved() -> None:
    """A policy wrapper applies to members, evaluations and the loaded policy."""
    node = {"_target_": "test_es_runs.Reckless", "place": -2.0}  # applies everywhere
    result = es_run(env=SpacesEnv, **{"algorithm.policy_wrapper": node})
    for row in result.history:
        assert row["train/episode_return_min"] == row["eval/episode_return_min"] == 5.0
    policy = load_policy("run", trust=OWN)
    assert type(policy.model) is Reckless
    assert [policy.act(np.full(3, x, np.float32)) for x in (-1.0, 0.0, 1.0)] == [1, 1, 1]
    assert result.history[-1]["train/update_ratio"] == 0.0  # equal returns give a zero gradient


# -- local ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "at"), everyday(1, [("none", 24), ("running", STATISTICS_STEPS + 12)], are_rows=True)
)
def test_killed_workers_make_no_difference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: str, at: int
) -> None:
    """Killed workers are restarted, with identical results."""
    more = {
        "model.normalization.mode": mode,
        "algorithm.n_timesteps_per_update": 300,
        "algorithm.deterministic": False,
        "evaluation.n_episodes": 0,
    }
    es_run("dev", **more)
    kills = tmp_path / "kills"
    kills.mkdir()
    for name in "ab":
        (kills / name).touch()
    settings = {**FORK, "runner.n_workers": 2, "runner.on_worker_failure": "restart"}
    es_run("local", lambda: KilledEnv(str(kills), at), **more, **settings)
    assert list(kills.iterdir()) == []
    assert_equal_runs("local", "dev")
    restarts = [float(row["train/worker_restarts"] or 0) for row in rows("local")]
    assert sum(restarts) == 2
    error = capfd.readouterr().err
    assert len(re.findall(r"warning: worker \d .* episodes are repeated", error)) == 2
