"""Observation statistics in evaluations and saved policies."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from maze_train import load_policy, train


class FarOff(gymnasium.Env):
    """Environment with observations far from 0 and episodes truncated after 5 steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        return self._obs(), float(action), False, self.t == 5, {}

    def _obs(self):
        return np.array([1000.0, -3.0]) + [20.0, 0.5] * self.np_random.standard_normal(2)


@pytest.mark.parametrize("mode", ["running", "estimated"])
def test_a_saved_policy_has_its_statistics(tmp_path, mode):
    """`best/` and the policy in memory have identical outputs; reported rewards are unscaled."""
    result = train(
        env=FarOff,
        algorithm="ppo",
        total_steps=256,
        seed=0,
        run_dir=str(tmp_path / "run"),
        **{
            "model.normalization.mode": mode,
            "model.normalization.n_steps": 200,
            "algorithm.n_rollout_steps": 32,
            "algorithm.reward_scaling": True,
            "evaluation.n_episodes": 2,
        },
    )
    loaded = load_policy(tmp_path / "run")
    normalizer = loaded.model.normalizer
    assert float(normalizer.count) >= 200
    np.testing.assert_allclose(normalizer.mean.numpy(), [1000.0, -3.0], rtol=0.05)
    assert bool(normalizer.frozen) == (mode == "estimated")
    obs = np.array([[980.0, -3.5], [1020.0, -2.5], [1000.0, -3.0]])
    for x in obs:
        params = [
            p.model.policy_params(torch.tensor(x[None]).float()) for p in (loaded, result.policy)
        ]
        assert torch.equal(*params)
    returns = [row["train/episode_return_mean"] for row in result.history]
    assert all(0 <= value <= 5 for value in returns)
    assert max(returns) > 2.0
