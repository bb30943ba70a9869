"""Recurrent policies recall earlier observations; other policies cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tiny_problems import Recall, learn

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.learning

A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 16, "epoch_length": 25, "lr": 3e-3}
A2C["entropy_coef"] = 0.01
PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 256, "epoch_length": 2}
PPO |= {"n_optimization_epochs": 4, "lr": "linear_0.003"}


def trained(
    tmp_path: Path, algorithm: dict[str, Any], steps: int, memory: dict[str, Any] | None
) -> Any:
    """Train with evaluations of 60 greedy episodes."""
    model = {"hidden_sizes": [32], "rnn": memory}
    return learn(tmp_path, Recall, algorithm, steps, 60, enough=1.0, model=model)


def play(policy: Any, seed: int) -> float:
    """Play an episode step by step; return its total reward."""
    env = Recall()
    observation, _ = env.reset(seed=seed)
    policy.reset()
    total, ended = 0.0, False
    while not ended:
        observation, reward, ended, _, _ = env.step(policy.act(observation))
        total += reward
    return total


@pytest.mark.parametrize(
    ("algorithm", "cell", "steps"),
    [
        pytest.param(PPO, "lstm", 20_000, id="ppo, lstm"),
        pytest.param(A2C, "gru", 50_000, id="a2c, gru", marks=pytest.mark.exhaustive),
    ],
)
def test_recurrent_policy_recalls_the_signal(
    tmp_path: Path, algorithm: dict[str, Any], cell: str, steps: int
) -> None:
    """Every signal is recalled at the end, in evaluations and when acting step by step."""
    result = trained(tmp_path, algorithm, steps, {"cell": cell, "size": 32})
    assert result.best_metric == 1.0
    assert [play(result.policy, seed) for seed in range(20)] == [1.0] * 20
