"""Saved policies act like the policies of their runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import everyday
from run_cases import OWN, start

from maze_train import load_policy, run_rollout


@pytest.mark.parametrize(
    "case",
    everyday(
        4,
        [
            *("ppo, memory", "impala, replay", "es, more steps", "agents: ppo, league"),
            *("td3, several boxes", "dqn", "bc", "es, wrapped", "es, memory"),
            *("agents: ppo, centralised", "agents: td3", "agents: ppo, random foe"),
        ],
    ),
)
def test_saved_policy_plays_whole_episodes_from_reset_states(whole, case):
    """The best and the final policy play whole episodes with reset states."""
    run = whole(case)
    given = {"env": "CartPole-v1"} if case.startswith("bc") else {}
    for policy in (run, f"{run}@final"):
        load_policy(policy, OWN)
        found = [
            run_rollout(run=policy, n_episodes=2, progress="quiet", trust=OWN, **given).episodes
            for _ in range(2)
        ]
        assert len(found[0]) == 2
        assert [x.episode_return for x in found[0]] == [x.episode_return for x in found[1]]
        assert all(episode.length > 0 for episode in found[0])


@pytest.mark.parametrize(
    "case", everyday(2, ["ppo, normalised", "sac, demonstrations", "es, normalised", "dqn, masks"])
)
def test_saved_best_policy_has_the_weights_and_statistics_of_the_run(tmp_path, case):
    """Weights, running statistics and deterministic actions match the policy in memory."""
    result = start(case, tmp_path / "run")
    loaded = load_policy(tmp_path / "run", OWN)
    weights = loaded.model.state_dict()
    expected = result.policy.model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)
    for seed in range(3):
        loaded.observation_space.seed(seed)
        obs = loaded.observation_space.sample()
        if "masks" in case:
            obs["action_mask"][:] = [0, 1, 0, 1]
        actions = [policy.act(obs, deterministic=True) for policy in (loaded, result.policy)]
        np.testing.assert_equal(*actions)
        assert "masks" not in case or actions[0] in (1, 3)


@pytest.mark.parametrize(
    "case",
    everyday(
        2,
        [
            *("impala, replay", "agents: sac", "es, memory", "agents: ppo, league", "agents: es"),
            *("td3", "dqn", "agents: ppo, memory", "agents: bc"),
        ],
    ),
)
def test_fast_dev_run_learns_evaluates_and_saves(tmp_path, case):
    """A dry run learns and evaluates in one epoch, with a complete directory."""
    result = start(case, tmp_path / "run", **{"runner.fast_dev_run": True})
    (row,) = result.history
    assert "train/gradient_steps" in row
    assert np.isfinite(result.summary.best_metric)
    load_policy(tmp_path / "run", OWN)
