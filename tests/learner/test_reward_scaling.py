"""Rewards are divided by the standard deviation of discounted sums per episode."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from maze_train.core.errors import ShapeError, TrainingError
from maze_train.core.step_end import StepEnd
from maze_train.learner.reward_scaling import RewardScaler

GAMMA = 0.9


class SlowScaler:
    """Reference that scales one environment and step at a time and stores all sums."""

    def __init__(self, clip):
        self.clip = clip
        self.sums = []
        self.running = {}

    def scale(self, rewards, done, valid):
        """Return the scaled rewards of a rollout."""
        if len(self.running) != rewards.shape[1]:
            self.running = dict.fromkeys(range(rewards.shape[1]), 0.0)
        for t in range(len(rewards)):
            for b in range(rewards.shape[1]):
                if not valid[t, b]:
                    self.running[b] *= done[t, b]  # an episode was lost, unless `done`
                    continue
                self.running[b] = rewards[t, b] + GAMMA * self.running[b]
                self.sums.append(self.running[b])
                if done[t, b]:
                    self.running[b] = 0.0
        scaled = rewards / np.sqrt(np.var(self.sums) + 1e-8)
        return np.clip(scaled, -self.clip, self.clip) if self.clip else scaled


def rollout(seed, steps=20, n=3, share_valid=1.0):
    """Return rewards, ends and valid rows; invalid rows may have ends."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(2.0, 3.0, (steps, n))
    return rewards, rng.random((steps, n)) < 0.2, rng.random((steps, n)) < share_valid


def tensors(*arrays):
    """Return the arrays as tensors."""
    return tuple(torch.from_numpy(array) for array in arrays)


@pytest.mark.parametrize("share_valid", [1.0, 0.7])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_normalizer_follows_its_definition(clip, share_valid):
    """Statistics and rewards match over several rollouts with gaps and unfinished episodes."""
    scaler, slow = RewardScaler(GAMMA, clip), SlowScaler(clip)
    for seed in range(4):
        rewards, done, valid = rollout(seed, share_valid=share_valid)
        # In rows without a transition, an agent waits or an episode was dropped.
        gap = np.where(done, StepEnd.WAITING, StepEnd.DROPPED)
        scaled = scaler.scale(*tensors(rewards, np.where(valid, done, gap)))
        np.testing.assert_allclose(scaled, slow.scale(rewards, done, valid), rtol=1e-10)
    assert float(scaler.moments.count) == len(slow.sums)
    np.testing.assert_allclose(float(scaler.moments.mean), np.mean(slow.sums), rtol=1e-12)


def test_rows_that_are_no_transitions_may_hold_anything():
    """Only the sum of a dropped episode changes, to 0; waiting agents keep their sum."""
    scaler = RewardScaler(GAMMA, 0.0)
    rewards, done, _ = tensors(*rollout(0, steps=6, n=2))
    scaler.scale(rewards, done)
    gaps = torch.tensor([[StepEnd.WAITING, StepEnd.DROPPED]] * 6)
    before = scaler.state_dict()
    before["carry"][1] = 0.0
    assert before["carry"][0] != 0.0
    scaler.scale(rewards * torch.nan, gaps)
    torch.testing.assert_close(scaler.state_dict(), before, rtol=0, atol=0)


def test_sums_of_dropped_episodes_begin_again():
    """Only the sums of environments with a dropped episode are reset, for all their agents."""
    scaler = RewardScaler(GAMMA, 0.0)
    for n, dropped, expected in ((3, [0, 1, 0], [1, 0, 1]), (4, [0, 1], [1, 0, 1, 0])):
        scaler.scale(torch.ones(2, n), torch.zeros(2, n, dtype=torch.uint8))
        scaler.forget(torch.tensor(dropped, dtype=torch.bool))
        sums = scaler.state_dict()["carry"].tolist()
        assert sums == [(1.0 + GAMMA) * kept for kept in expected]


def test_another_number_of_environments_begins_new_episodes():
    """The running sums are reset, and the statistics are kept."""
    scaler, slow = RewardScaler(GAMMA, 0.0), SlowScaler(0.0)
    for n in (3, 2, 2):
        rewards, done, valid = rollout(n, n=n)
        expected = slow.scale(rewards, done, valid)
        np.testing.assert_allclose(scaler.scale(*tensors(rewards, done)), expected, rtol=1e-10)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6])
def test_equal_sums_have_no_scale(value):
    """Rewards are unchanged as long as all sums are equal."""
    scaler = RewardScaler(0.0, 0.0)
    rewards, done = torch.full((5, 2), value), torch.zeros(5, 2, dtype=torch.bool)
    for _ in range(3):
        assert torch.equal(scaler.scale(rewards, done), rewards)
    assert float(RewardScaler(GAMMA, 10.0).scale(torch.full((1, 1), 1e3), done[:1, :1])) == 10.0


def test_raw_rewards_stay_as_they_are():
    """The result is a new tensor of the same dtype, without a graph."""
    scaler = RewardScaler(GAMMA, 10.0)
    rewards, done = torch.randn(5, 2), torch.zeros(5, 2, dtype=torch.bool)
    before = rewards.clone()
    scaled = scaler.scale(rewards, done)
    assert torch.equal(rewards, before)
    assert scaled.dtype == torch.float32
    assert scaled.data_ptr() != rewards.data_ptr()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rewards_that_are_not_finite(value):
    """The error contains environment and step, and the statistics do not change."""
    scaler = RewardScaler(GAMMA, 10.0)
    rewards, done, _ = tensors(*rollout(0))
    scaler.scale(rewards, done)
    before = scaler.state_dict()
    rewards[4, 2] = value
    with pytest.raises(TrainingError, match=f"environment 2 at step 4 .* is {value}"):
        scaler.scale(rewards, done)
    assert all(torch.equal(x, before[key]) for key, x in scaler.state_dict().items())


def test_wrong_shapes():
    """Rewards and ends of different or wrong shapes raise ShapeError."""
    scaler, done = RewardScaler(GAMMA, 10.0), torch.zeros(4, 2, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"expected \[T, B\]"):
        scaler.scale(torch.zeros(4), done)
    with pytest.raises(ShapeError, match="end"):
        scaler.scale(torch.zeros(4, 1), done)


@pytest.mark.parametrize(("size", "is_scaled"), [(0.01, False), (100.0, True)])
def test_only_large_rewards_are_scaled(size, is_scaled):
    """Rewards are only scaled if the std of their sums is above 1."""
    always, large = RewardScaler(GAMMA, 10.0), RewardScaler(GAMMA, 10.0, only_large=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        rewards = size * torch.rand(20, 3, generator=generator)
        done = torch.rand(20, 3, generator=generator) < 0.2
        found, expected = large.scale(rewards, done), always.scale(rewards, done)
        assert torch.equal(found, expected if is_scaled else rewards)
        assert not torch.equal(expected, rewards)
