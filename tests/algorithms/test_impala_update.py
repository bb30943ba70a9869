"""IMPALA: importance weights, policy lag, and replayed rollouts."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from update_problems import (
    B,
    assert_same_weights,
    compare,
    make_learner,
    make_problem,
    replayed,
    snapshot,
)

from maze_train import Progress, ShapeError
from maze_train.data.rollout import join_rollouts, select_envs

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("threshold", [1.0, 1.75, None])
def test_importance_weight_metrics_cover_transitions_only(threshold, ignoring):
    """The mean ratio and the clipped fraction cover transitions only."""
    problem = make_problem(ignoring=ignoring)
    row, ratios = compare("impala", problem, vtrace_clip_rho_threshold=threshold)
    found = np.array(list(ratios.values()))
    assert row["train/rho_mean"] == pytest.approx(found.mean(), rel=1e-5)
    if threshold is None:
        assert "train/rho_clip_fraction" not in row
    else:
        assert row["train/rho_clip_fraction"] == pytest.approx((found > threshold).mean(), rel=1e-6)


def test_policy_lag_counts_updates_since_acting():
    """The lag is the number of updates since the acting weights, over new rollouts only."""
    model, rollout, _ = make_problem()
    learner = make_learner("impala", model)
    assert "train/policy_lag_mean" not in learner.update(rollout, Progress()).reduce()
    for _ in range(9):
        learner.update(rollout, Progress())
    row = learner.update(replace(rollout, weights_seq_no=torch.tensor([9, 4, 8])), Progress())
    assert row.reduce()["train/policy_lag_mean"] == pytest.approx((1 + 6 + 2) / 3)
    assert row.reduce()["train/policy_lag_max"] == 6
    row = learner.update(replayed(rollout, count=2), Progress()).reduce()
    assert (row["train/policy_lag_mean"], row["train/policy_lag_max"]) == (4, 4)


def test_replayed_rollouts_equal_new_rollouts():
    """Replayed and new rollouts in a batch change the weights in the same way."""
    model, rollout, _ = make_problem()
    other, before = copy.deepcopy(model), snapshot(model)
    make_learner("impala", model).update(rollout, Progress())
    one, two = select_envs(rollout, slice(0, 1)), select_envs(rollout, slice(1, B))
    flags = torch.ones(B - 1, dtype=torch.bool)
    mixed = join_rollouts([one, replace(two, replayed=flags)])
    make_learner("impala", other).update(mixed, Progress())
    assert_same_weights(model, other, before)


def test_rollout_without_log_probs_raises():
    """The error describes how to record log-probabilities."""
    model, rollout, _ = make_problem()
    with pytest.raises(ShapeError, match=r"no log_probs.*records_log_probs=True"):
        make_learner("impala", model).update(replace(rollout, log_probs=None), Progress())
