"""The SAC trainer: schedule of gradient steps, acting policy, statistics."""

from __future__ import annotations

import math
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import maze_train.algorithms.off_policy.learner as off_policy_learner
from maze_train import Statistics, Trajectory, load_config
from maze_train.core.errors import TrainingError
from maze_train.learner.config import Progress
from maze_train.run.build import build_run

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIORITISED = {"_target_": "maze_train.PrioritizedReplayBuffer"}


class NotedEnv(gymnasium.Env[Any, Any]):
    """Environment with observations far from 0 and episodes of 5 steps; records its steps.

    Args:
        lost_every: Interval of steps with a NaN reward, counted over all episodes; 0: none.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-2.0, 1.0, (1,), np.float32)

    def __init__(self, lost_every: int = 0) -> None:
        self.lost_every = lost_every
        self.acted_on: list[Any] = []
        self.actions: list[float] = []

    def observe(self) -> Any:
        self.obs = np.array([100.0, -3.0]) + [5.0, 0.5] * self.np_random.standard_normal(2)
        return self.obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.acted_on.append(self.obs)
        self.actions.append(float(action[0]))
        is_lost = self.lost_every and len(self.actions) % self.lost_every == 0
        reward = math.nan if is_lost else float(action[0])
        return self.observe(), reward, False, self.t == 5, {}


@contextmanager
def sac(
    num_envs: int = 1, env: dict[str, Any] | None = None, **changes: Any
) -> Iterator[tuple[Any, list[NotedEnv]]]:
    """Yield a trainer before its first update, and its environments."""
    made: list[NotedEnv] = []

    def make(**kwargs: Any) -> NotedEnv:
        made.append(NotedEnv(**kwargs))
        return made[-1]

    config = load_config(
        {
            "env": {"_target_": make, "kwargs": env or {}},
            "algorithm": "sac",
            "algorithm.batch_size": 4,
            "algorithm.initial_buffer_size": 10,
            "algorithm.replay_buffer_size": 1000,
            "model.hidden_sizes": [8],
            "runner.concurrency": num_envs,
            "checkpoint.interval": 0,
            "evaluation.n_episodes": 0,
            "seed": 3,
            **changes,
        }
    )
    with build_run(config) as run:
        run.trainer.before_training()
        yield run.trainer, made[-num_envs:]


def update(trainer: Any) -> tuple[int, dict[str, float]]:
    """Run one update; return its environment steps and metrics."""
    statistics = Statistics()
    return trainer.update_once(Progress(), statistics), statistics.reduce()


def gradient_steps_after(samples: list[int], initial: int, ratio: str) -> list[int]:
    """Return the expected gradient steps after each update, given the samples of each update."""
    taken = []
    for number in range(len(samples)):
        learned_from = 0
        for i in range(number):  # samples are used from the next update on
            if sum(samples[: i + 1]) >= initial:
                learned_from += samples[i]
        taken.append(math.floor(Fraction(ratio) * learned_from))
    return taken


# -- gradient steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "num_envs", "n_rollout_steps"), [("0.3", 3, 1), ("1", 1, 1), ("2.5", 1, 4)]
)
def test_gradient_steps_follow_transitions(
    monkeypatch: pytest.MonkeyPatch, ratio: str, num_envs: int, n_rollout_steps: int
) -> None:
    """The ratio applies after warm-up, for any number of environments."""
    changes = {
        "algorithm.update_to_data_ratio": float(ratio),
        "algorithm.n_rollout_steps": n_rollout_steps,
    }
    with sac(num_envs, **changes) as (trainer, _):
        seen: list[int] = []
        sample = trainer.replay_buffers["default"].sample_batch

        def noted(n_samples: int) -> Any:
            seen.append(len(trainer.replay_buffers["default"]))
            return sample(n_samples)

        monkeypatch.setattr(trainer.replay_buffers["default"], "sample_batch", noted)
        samples: list[int] = []
        taken: list[int] = []
        learner = trainer.learners.foreach_learner(lambda learner: learner)[0]
        while len(taken) < 8 or sum(samples) < 30:
            seen.clear()
            collected = sum(samples)
            samples.append(update(trainer)[0])
            # An update learns before it stores the collected transitions.
            assert set(seen) <= {collected}
            assert trainer.gradient_steps - (taken[-1] if taken else 0) == len(seen)
            taken.append(trainer.gradient_steps)
            assert learner.gradient_steps == taken[-1]
        assert samples == [num_envs * n_rollout_steps] * len(samples)
        assert len(trainer.replay_buffers["default"]) == sum(samples)
    assert taken == gradient_steps_after(samples, 10, ratio)
    assert taken[-1] > 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dropped_steps_are_not_counted(num_envs: int) -> None:
    """Lost steps count neither as steps, nor for warm-up, nor for gradient steps."""
    changes = {"algorithm.on_non_finite": "skip", "algorithm.n_rollout_steps": 4}
    with sac(num_envs, {"lost_every": 3}, **changes) as (trainer, envs):
        samples, taken = [], []
        for _ in range(12):
            steps, metrics = update(trainer)
            samples.append(steps)
            taken.append(trainer.gradient_steps)
            assert metrics["replay/size"] == len(trainer.replay_buffers["default"]) == sum(samples)
    made = sum(len(env.actions) for env in envs)
    assert made == 12 * 4 * num_envs
    assert sum(samples) == sum(len(env.actions) - len(env.actions) // 3 for env in envs) < made
    assert taken == gradient_steps_after(samples, 10, "1")
    assert taken[-1] > 0


def test_environment_that_always_drops_episodes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is raised in training and while collecting statistics before training."""
    monkeypatch.setattr("maze_train.training.trainer.MAX_LOST_UPDATES", 3)
    skip = {"algorithm.on_non_finite": "skip"}
    with sac(1, {"lost_every": 1}, **skip) as (trainer, _):
        assert [update(trainer)[0] for _ in range(2)] == [0, 0]
        with pytest.raises(TrainingError, match="3 consecutive updates had no valid transition"):
            update(trainer)
    normalised = {"model.normalization.mode": "running", **skip}
    with (
        pytest.raises(TrainingError, match="every step of a rollout was lost before training"),
        sac(1, {"lost_every": 1}, **normalised),
    ):
        pass


def test_skipped_steps_change_no_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `skip`, non-finite errors neither change priorities nor end the run."""
    changes = {"algorithm.on_non_finite": "skip", "algorithm.replay_buffer": PRIORITISED}
    with sac(**changes) as (trainer, _):
        for _ in range(11):
            update(trainer)
        before = trainer.replay_buffers["default"].state_dict()["priorities"]
        original = off_policy_learner.critic_loss

        def broken(*args: Any) -> Any:
            return tuple(tensor * math.nan for tensor in original(*args))

        monkeypatch.setattr(off_policy_learner, "critic_loss", broken)
        _, metrics = update(trainer)
        assert metrics["train/skipped_steps"] == 1
        after = trainer.replay_buffers["default"].state_dict()["priorities"]
        assert np.isfinite(after).all()
        assert (after != before).sum() == 1  # the new transition
        monkeypatch.setattr(off_policy_learner, "critic_loss", original)
        assert "train/critic_loss" in update(trainer)[1]
        assert (trainer.replay_buffers["default"].state_dict()["priorities"] != after).sum() > 1


# -- the initial phase ---------------------------------------------------------------------------


def sharpen(trainer: Any) -> None:
    """Make the policy always choose the upper bound."""
    with torch.no_grad():
        *_, weight, bias = trainer.model.policy.parameters()
        weight.zero_()
        bias.copy_(torch.tensor([20.0, -20.0]))


def test_warm_up_actions_are_uniform() -> None:
    """Warm-up actions are uniform over the bounds; afterwards the policy acts."""
    changes = {"algorithm.initial_buffer_size": 1000, "algorithm.lr": 1e-9}
    with sac(2, **changes) as (trainer, envs):
        sharpen(trainer)
        for _ in range(510):
            update(trainer)
    first = np.sort(np.concatenate([env.actions[:500] for env in envs]))
    # Kolmogorov-Smirnov test at significance level 0.001.
    uniform = (first + 2.0) / 3.0
    assert np.abs(uniform - np.arange(1000) / 1000).max() < 1.95 / math.sqrt(1000)
    later = np.concatenate([env.actions[500:] for env in envs])
    np.testing.assert_allclose(later, 1.0, atol=1e-3)


def test_initial_action_repeat_repeats_actions() -> None:
    """`initial_action_repeat` repeats actions across the ends of episodes and updates."""
    changes = {
        "algorithm.initial_action_repeat": 3,
        "algorithm.n_rollout_steps": 2,
        "algorithm.initial_buffer_size": 100,
    }
    with sac(2, **changes) as (trainer, envs):
        for _ in range(6):
            update(trainer)
        groups = np.array([env.actions for env in envs]).reshape(2, 4, 3)
    assert (groups == groups[:, :, :1]).all()
    assert len(np.unique(groups)) == 8


# -- statistics of observations ------------------------------------------------------------------


def demonstrations(n_steps: int) -> list[Trajectory]:
    """Return two demonstrations with other observations than the environment."""
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            obs=rng.normal(50.0, 9.0, (n_steps + 1, 2)),
            actions=np.full((n_steps, 1), 0.5, np.float32),
            rewards=np.ones(n_steps),
            terminated=i == 0,
            truncated=i == 1,
        )
        for i in range(2)
    ]


DEMONSTRATIONS = {"_target_": "test_sac_trainer.demonstrations", "n_steps": 30}


@pytest.mark.parametrize(
    ("mode", "has_demonstrations", "lost_every"),
    [("running", False, 0), ("running", True, 7), ("estimated", True, 0), ("estimated", False, 7)],
)
def test_statistics_cover_demonstrations_and_steps(
    mode: str, has_demonstrations: bool, lost_every: int
) -> None:
    """Statistics cover demonstrations, steps before training and, if `running`, training steps."""
    changes: dict[str, Any] = {
        "model.normalization.mode": mode,
        "model.normalization.n_steps": 250,
        "algorithm.on_non_finite": "skip",
    }
    if has_demonstrations:
        changes["algorithm.initial_demonstration_trajectories"] = DEMONSTRATIONS
    with sac(2, {"lost_every": lost_every}, **changes) as (trainer, envs):
        normalizer = trainer.model.normalizer
        before = float(normalizer.count)
        made_before = [len(env.actions) for env in envs]
        assert before >= 250
        for _ in range(20):
            update(trainer)
        seen = []
        for env, made in zip(envs, made_before, strict=True):
            until = len(env.actions) if mode == "running" else made
            kept = [i for i in range(until) if not lost_every or (i + 1) % lost_every]
            seen += [env.acted_on[i] for i in kept]
    # Observations are stored as float32.
    obs = np.array(seen, np.float32).astype(np.float64)
    if has_demonstrations:
        assert before < 250 + 200  # demonstrations count towards n_steps
        own = [episode.obs[:-1].astype(np.float32) for episode in demonstrations(30)]
        obs = np.concatenate([*own, obs])
    assert float(normalizer.count) == len(obs)
    np.testing.assert_allclose(normalizer.mean.numpy(), obs.mean(0), rtol=1e-10)
    np.testing.assert_allclose(normalizer.var.numpy(), obs.var(0), rtol=1e-8)


def test_demonstrations_replace_warm_up_steps() -> None:
    """With enough demonstrations the policy acts at once; they do not count as steps of the run."""
    changes = {
        "algorithm.initial_demonstration_trajectories": DEMONSTRATIONS,
        "algorithm.initial_buffer_size": 62,
    }
    with sac(2, **changes) as (trainer, envs):
        sharpen(trainer)
        assert len(trainer.replay_buffers["default"]) == 60
        assert [update(trainer)[0] for _ in range(3)] == [2, 2, 2]
        assert trainer.gradient_steps == 4
        assert len(trainer.replay_buffers["default"]) == 66
        batch = trainer.replay_buffers["default"].sample_batch(2000)
    assert all(env.actions[0] != 1.0 for env in envs)
    np.testing.assert_allclose([env.actions[1] for env in envs], 1.0, atol=1e-2)
    assert len(set(batch.indices.tolist())) == 66
    found = {tuple(row) for row in batch.obs.tolist()}
    own = np.concatenate([episode.obs[:-1] for episode in demonstrations(30)])
    assert {tuple(row) for row in own.astype(np.float32).tolist()} <= found
    # No transition leads from a demonstration into the run.
    is_own = batch.obs[:, 0] < 80
    is_over = batch.discounts == 0
    assert ((batch.next_obs[:, 0] < 80) == is_own)[~is_over].all()
    assert set(batch.obs[is_over].tolist()[0]) <= set(own.astype(np.float32)[29].tolist())
