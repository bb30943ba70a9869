"""Runs of evolution strategies in one process and in several processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from es_problems import WalkEnv
from own_envs import SpacesEnv
from short_runs import short_run, summary
from torch import nn

from maze_train import load_policy

pytestmark = pytest.mark.usefixtures("empty_directory")

OWN = ["test_es_runs", "es_problems", "own_parts", "own_envs"]


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


# -- dev -----------------------------------------------------------------------------------------


def test_metrics_are_plausible() -> None:
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


def test_sampling_and_action_noise_change_episodes() -> None:
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


def test_max_steps_truncates_training_episodes_only() -> None:
    """`max_steps` truncates training episodes only."""
    result = es_run(env=partial(SpacesEnv, length=50), **{"algorithm.max_steps": 7})
    for row in result.history:
        assert row["train/episode_length_mean"] == 7
        assert row["eval/episode_length_mean"] == 50


def test_policy_wrapper_acts_and_is_saved() -> None:
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
