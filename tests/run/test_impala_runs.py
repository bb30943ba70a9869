"""Runs of IMPALA in one process, and with actors in processes."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_envs import SpacesEnv
from short_runs import FORK, short_run, summary

from maze_train import load_config, load_policy
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.envs.wrappers import ObservationStackWrapper
from maze_train.run.build import build_run

pytestmark = pytest.mark.usefixtures("empty_directory")

UPDATE = 2 * 8 * 2
"""Steps of an update: two rollouts of eight steps of two environments."""


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which each update appends its rollout."""
    original, found = ImpalaLearner.preprocess, []

    def noted(self: Any, module_id: str, rollout: Any, statistics: Any) -> Any:
        found.append(rollout)
        return original(self, module_id, rollout, statistics)

    monkeypatch.setattr(ImpalaLearner, "preprocess", noted)
    return found


def impala_run(run_dir: str = "run", env: Any = None, **overrides: Any) -> Any:
    """Run IMPALA for a few updates, by default on a toy environment."""
    env = {"_target_": "own_envs.SpacesEnv"} if env is None else env
    return short_run(run_dir, "impala", env=env, **overrides)


def assert_counted(row: dict[str, Any]) -> None:
    """Assert that collected steps equal trained, dropped and in-flight steps."""
    made, dropped = row["actors/steps_made"], row["actors/steps_dropped"]
    assert made == row["env_steps"] + dropped + row["actors/steps_in_flight"]
    assert row["actors/steps_in_flight"] >= 0


# -- dev -----------------------------------------------------------------------------------------


def test_metrics_are_plausible() -> None:
    """Metrics of IMPALA have plausible values."""
    result = impala_run(env={"_target_": "own_envs.SpacesEnv", "kwargs": {"action": "box"}})
    assert result.summary.updates == 6
    for row in result.history:
        time_s = row["time/collect_s"] + row["time/update_s"]
        assert 0 < row["time/learner_wait_fraction"] <= row["time/collect_s"] / time_s
        # All rollouts use the weights of the last update, so nothing is corrected.
        assert row["train/policy_lag_mean"] == row["train/policy_lag_max"] == 0
        assert row["train/rho_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["actors/queue_before"] == row["actors/queue_after"] == 0
        assert row["actors/steps_made"] == row["env_steps"]
        assert row["actors/steps_dropped"] == row["actors/steps_in_flight"] == 0
        assert row["train/gradient_steps"] == 3
    assert result.history[0]["train/rho_clip_fraction"] == 0  # rounding does not count as clipping
    assert result.history[-1]["env_steps"] == 6 * UPDATE == summary("run")["env_steps"]


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_policy_lag_follows_broadcast_interval(interval: int) -> None:
    """With `broadcast_interval` n, the lag cycles through 0, ..., n - 1."""
    result = impala_run(
        total_steps=12 * UPDATE,
        **{"algorithm.broadcast_interval": interval, "algorithm.epoch_length": 6},
    )
    assert len(result.history) == 2
    for row in result.history:
        assert row["train/policy_lag_mean"] == (interval - 1) / 2
        assert row["train/policy_lag_max"] == interval - 1
        off = abs(row["train/rho_mean"] - 1.0)
        assert (off > 1e-5) == (interval > 1)


def test_actors_play_different_episodes(learned: list[Any]) -> None:
    """All environments have different episodes."""
    impala_run(total_steps=64)
    first = learned[0].obs[0].tolist()
    assert len({tuple(obs) for obs in first}) == len(first) == 4


def test_rollouts_of_one_actor_continue_each_other(learned: list[Any]) -> None:
    """Consecutive rollouts of one actor in a batch continue each other, in separate memory."""
    impala_run(**{"algorithm.num_actors": 1}, total_steps=3 * 64)
    assert len(learned) == 3
    for rollout in learned:
        assert torch.equal(rollout.obs[-1, :4], rollout.obs[0, 4:])
        assert not torch.equal(rollout.obs[:-1, :4], rollout.obs[:-1, 4:])
    for before, after in pairwise(learned):
        assert torch.equal(before.obs[-1, 4:], after.obs[0, :4])


def test_replayed_rollouts_are_no_environment_steps(learned: list[Any]) -> None:
    """Replayed rollouts enlarge a batch, but do not count as environment steps."""
    more = {"algorithm.replay_size": 3, "algorithm.replay_proportion": 1.5}
    result = impala_run(**more)
    assert result.summary.env_steps == 6 * UPDATE == result.history[-1]["actors/steps_made"]
    assert [rollout.num_envs for rollout in learned] == [4] + [4 + 3 * 2] * 5
    assert learned[0].replayed is None
    assert all(x.replayed.tolist() == [False] * 4 + [True] * 6 for x in learned[1:])


# -- local ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_actors_in_processes_lose_no_step() -> None:
    """With `runner=local`, no step is lost or counted twice."""
    result = impala_run(
        runner="local", total_steps=30 * UPDATE, **{"algorithm.queue_out_of_sync_factor": 2.0}
    )
    assert result.summary.stop_reason == "total_steps"
    assert result.summary.env_steps == 30 * UPDATE
    for row in result.history:
        assert all(math.isfinite(value) for value in row.values())
        assert 0 <= row["time/learner_wait_fraction"] <= 1
        assert 0 <= row["train/policy_lag_mean"] <= row["train/policy_lag_max"] <= 6
        assert 0 <= row["actors/queue_after"] <= row["actors/queue_before"] + 2
        assert row["actors/steps_dropped"] == 0
        # Four rollouts may be queued, and each actor collects one.
        assert 0 <= row["actors/steps_in_flight"] <= 6 * UPDATE / 2
        assert_counted(row)
    # Five steps per episode in each of four environments.
    finished = sum(row["train/episodes"] for row in result.history if "train/episodes" in row)
    assert abs(finished - 30 * UPDATE / 5) <= 4
    made = [row["actors/steps_made"] for row in result.history]
    assert all(before <= after for before, after in pairwise(made))
    assert load_policy("run").act(np.zeros(3, np.float32)) in (-1, 0, 1)


class Pictures(SpacesEnv):
    """Environment with random images: pixel 0 is the episode step, pixel 1 the reward."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (16, 16), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        obs[0, 0] = 0
        return obs, info

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        obs[0, 0] = self.t
        return obs, float(obs[0, 1]), *rest


def stacked_pictures() -> Any:
    """Return the environment with stacks of the last four images."""
    return ObservationStackWrapper(Pictures(), 4)


@pytest.mark.slow
def test_actors_send_composite_actions_and_states() -> None:
    """Composite actions, recurrent states and statistics: ratios are near 1, metrics finite."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "tuple"}}
    more = {"model": "vector_rnn", "model.rnn.size": 8, "algorithm.replay_size": 3}
    more |= {"model.normalization.mode": "running", "model.normalization.n_steps": 64}
    result = impala_run(env=env, **FORK, **more, total_steps=12 * UPDATE)
    for row in result.history:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/rho_mean"] == pytest.approx(1.0, abs=0.2)
        assert_counted(row)
    assert float(result.policy.model.normalizer.count) >= 64 + UPDATE


@pytest.mark.slow
def test_actors_send_whole_frame_stacks(learned: list[Any]) -> None:
    """The learner receives frames in their original order, also from the replay."""
    more = {"model.image_encoder": "impala", "model.hidden_sizes": [8], "algorithm.replay_size": 4}
    result = impala_run(env=stacked_pictures, **FORK, **more, total_steps=6 * UPDATE)
    assert [rollout.num_envs for rollout in learned] == [4] + [8] * 5
    assert all(math.isfinite(value) for value in result.history[-1].values())
    for rollout in learned:
        ages = rollout.obs[:, :, :, 0, 0].long()
        newest = ages[:, :, -1:]
        assert torch.equal(ages, (newest + torch.arange(-3, 1)).clamp(min=0))
        after = torch.where(rollout.ended, 0, newest[:-1, :, 0] + 1)
        assert torch.equal(newest[1:, :, 0], after)
        continues = ~rollout.ended
        seen = rollout.obs[1:, :, 3, 0, 1].float()
        assert torch.equal(rollout.rewards[continues], seen[continues])


# -- what goes wrong -----------------------------------------------------------------------------


def test_errors_number_environments_over_all_actors():
    """Error messages number the environments over all actors."""
    values = {"env": "CartPole-v1", "algorithm": "impala", "algorithm.num_actors": 2}
    with build_run(load_config({**values, "runner.concurrency": 6})) as run:
        workers = run.source.pool.workers
        assert [env.first_env for worker in workers for env in worker._envs.values()] == [0, 3]


class DiesOnce(SpacesEnv):
    """Environment that logs the seed of each episode; one process dies in its third episode."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        with Path("seeds").open("a") as file:
            file.write(f"{os.getpid()} {seed}\n")
        self.episodes += 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.episodes == 3:
            with suppress(FileExistsError):
                Path("died").touch(exist_ok=False)
                os._exit(7)
        return super().step(action)


@pytest.mark.slow
def test_restarted_actor_plays_new_episodes() -> None:
    """A restarted actor does not repeat episodes that were already trained on."""
    how = {"runner.on_worker_failure": "restart"}
    train_return = {"evaluation.n_episodes": 0, "evaluation.metric": "train/episode_return_mean"}
    impala_run(env=DiesOnce, **FORK, **how, **train_return, total_steps=12 * UPDATE)
    lines = [line.split() for line in Path("seeds").read_text().splitlines()]
    seeds = [seed for process, seed in lines if process != str(os.getpid())]
    assert len({process for process, _ in lines} - {str(os.getpid())}) == 3
    assert len(set(seeds)) == len(seeds) > 12
