"""Runs of IMPALA as a user makes them: in one process, and with actors in processes."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from own_envs import SpacesEnv
from own_parts import ANY_SPACES, AnyEnv, diaries
from short_runs import SMALL, everything, rows, summary

from maze_train import load_config, load_policy, train
from maze_train.algorithms.impala.events import ActorEvents, ActorTimeEvents, ImpalaEvents
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.envs.wrappers import ObservationStackWrapper
from maze_train.errors import ConfigError, EnvError, TrainingError
from maze_train.runners.factory import build_runner

if TYPE_CHECKING:
    from pathlib import Path

IMPALA: dict[str, Any] = {
    **SMALL,
    "algorithm": "impala",
    "algorithm.epoch_length": 3,
    "algorithm.n_rollout_steps": 8,
    "algorithm.num_actors": 2,
    "algorithm.actors_batch_size": 2,
    "algorithm.lr": 0.002,
    "runner": "dev",
    "runner.concurrency": 4,
    "tracking.tensorboard": False,
}
UPDATE = 2 * 8 * 2
"""Steps of an update: two rollouts of eight steps of two environments."""

FORK = {"runner": "local", "runner.start_method": "fork"}
"""Actors in processes that begin at once: they inherit what is imported."""


@pytest.fixture(autouse=True)
def nothing_is_left(no_file_is_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every test starts in an empty directory, and leaves no open environment."""
    monkeypatch.chdir(tmp_path)
    SpacesEnv.open_envs = 0
    yield
    assert SpacesEnv.open_envs == 0


def impala_run(run_dir: str = "run", env: Any = None, **overrides: Any) -> Any:
    """A short run of IMPALA, by default on a toy environment."""
    env = {"_target_": "own_envs.SpacesEnv"} if env is None else env
    return train(**{**IMPALA, "env": env, "run_dir": run_dir, **overrides})


def assert_counted(row: dict[str, Any]) -> None:
    """Every step that actors made was learned from, dropped, or is on its way."""
    made, dropped = row["actors/steps_made"], row["actors/steps_dropped"]
    assert made == row["env_steps"] + dropped + row["actors/steps_in_flight"]
    assert row["actors/steps_in_flight"] >= 0


# -- dev -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["box", "tuple"])
def test_metrics(action: str) -> None:
    """Every value that IMPALA reports is in the table, and is plausible."""
    result = impala_run(env={"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}})
    assert result.summary.updates == 6
    events = [*ImpalaEvents.events(), *ActorEvents.events()]
    clocks = {event.tag for event in ActorTimeEvents.events()}
    for row, written in zip(result.history, rows("run"), strict=True):
        missing = {event.tag for event in events} - row.keys()
        assert missing == {
            *("train/approximate_kl", "train/clip_fraction", "train/clip_range"),
            "train/skipped_steps",
        }
        assert all(math.isfinite(value) for value in row.values())
        assert set(written) >= {event.tag for event in events} - missing
        assert clocks <= row.keys()
        assert 0 <= row["time/learner_wait_share"] <= 1
        time_s = row["time/collect_s"] + row["time/update_s"]
        assert 0 < row["time/learner_wait_share"] <= row["time/collect_s"] / time_s
        # Nothing is older than the last update, so there is nothing to correct.
        assert row["train/policy_lag_mean"] == row["train/policy_lag_max"] == 0
        assert row["train/rho_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["actors/queue_before"] == row["actors/queue_after"] == 0
        assert row["actors/steps_made"] == row["env_steps"]
        assert row["actors/steps_dropped"] == row["actors/steps_in_flight"] == 0
        assert row["train/gradient_steps"] == 3
    assert result.history[-1]["env_steps"] == 6 * UPDATE == summary("run")["env_steps"]


def test_no_weight_is_above_its_bound_by_rounding() -> None:
    """Weights that acted and weights that learn are the same: no share of ratios is clipped."""
    result = impala_run(total_steps=3 * UPDATE)
    assert result.history[0]["train/rho_clip_fraction"] == 0


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_weights_are_as_old_as_the_broadcast_makes_them(interval: int) -> None:
    """With `broadcast_interval` n, updates are 0, 1, ..., n - 1 behind, again and again."""
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


def test_the_seed_decides_every_number() -> None:
    """Equal seeds give equal metrics, to the last digit; others give others."""
    more = {"algorithm.replay_size": 5, "algorithm.broadcast_interval": 2}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        impala_run(name, seed=seed, **more)
    assert rows("a") == rows("b")
    losses = [[row["train/value_loss"] for row in rows(name)] for name in "ac"]
    assert losses[0] != losses[1]


def test_each_actor_has_its_turn_and_its_seeds(tmp_path: Path) -> None:
    """Three actors, two rollouts an update: each makes as many steps, none are alike."""
    (tmp_path / "diaries").mkdir()
    env = {"_target_": "own_parts.DiaryEnv", "kwargs": {"directory": str(tmp_path / "diaries")}}
    more = {"algorithm.num_actors": 3, "runner.concurrency": 3, "evaluation.n_episodes": 0}
    impala_run(env=env, total_steps=9 * 16, **more)
    happened = [diary for count, diary in diaries(tmp_path / "diaries") if count]
    assert [len(diary) for diary in happened] == [48, 48, 48]
    assert len({obs for diary in happened for obs in diary}) == 144


def test_an_actor_that_has_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of one actor in a batch go on from each other, and have memory of their own."""
    original, seen = ImpalaLearner.preprocess, []

    def noted(self: Any, module_id: str, rollout: Any, statistics: Any) -> Any:
        assert torch.equal(rollout.obs[-1, :4], rollout.obs[0, 4:])
        assert not torch.equal(rollout.obs[:-1, :4], rollout.obs[:-1, 4:])
        seen.append(rollout.obs)
        return original(self, module_id, rollout, statistics)

    monkeypatch.setattr(ImpalaLearner, "preprocess", noted)
    impala_run(**{"algorithm.num_actors": 1}, total_steps=3 * 64)
    assert len(seen) == 3
    for before, after in pairwise(seen):
        assert torch.equal(before[-1, 4:], after[0, :4])


def test_what_was_learned_from_before_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch grows by the kept rollouts, the number of environment steps does not."""
    original, seen = ImpalaLearner.preprocess, []

    def noted(self: Any, module_id: str, rollout: Any, statistics: Any) -> Any:
        seen.append((rollout.num_envs, rollout.replayed))
        return original(self, module_id, rollout, statistics)

    monkeypatch.setattr(ImpalaLearner, "preprocess", noted)
    more = {"algorithm.replay_size": 3, "algorithm.replay_proportion": 1.5}
    result = impala_run(**more)
    assert result.summary.env_steps == 6 * UPDATE == result.history[-1]["actors/steps_made"]
    assert [num_envs for num_envs, _ in seen] == [4] + [4 + 3 * 2] * 5
    assert seen[0][1] is None
    assert all(flags.tolist() == [False] * 4 + [True] * 6 for _, flags in seen[1:])


@pytest.mark.parametrize("runner", ["dev", "fork"])
def test_a_trial_takes_a_gradient_step(runner: str) -> None:
    """One epoch of one update, an evaluation, and nothing else."""
    place = FORK if runner == "fork" else {}
    result = impala_run(**place, **{"runner.fast_dev_run": True})
    assert (result.summary.epochs, result.summary.updates) == (1, 1)
    assert result.history[0]["train/gradient_steps"] == 1


@pytest.mark.parametrize("case", ANY_SPACES)
def test_every_space(case: str) -> None:
    """Metrics are finite, every action is one of its space, and the saved policy acts."""
    more = {"model.image_encoder": "impala"} if case == "image" else {}
    env = partial(AnyEnv, *ANY_SPACES[case])
    result = impala_run(env=lambda: env(), total_steps=4 * UPDATE, **more)
    assert all(math.isfinite(value) for value in result.history[-1].values())
    made = env()
    obs, _ = made.reset(seed=0)
    for deterministic in (True, False):
        made.step(load_policy("run").act(obs, deterministic))


def test_statistics_of_observations_begin_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """With environments of their own, gone then; actors act with what the learner has seen."""
    original, open_envs = ImpalaLearner.preprocess, []

    def noted(*args: Any) -> Any:
        open_envs.append(SpacesEnv.open_envs)
        return original(*args)

    monkeypatch.setattr(ImpalaLearner, "preprocess", noted)
    more = {"model.normalization.mode": "running", "model.normalization.n_steps": 64}
    result = impala_run(**more, **{"evaluation.n_episodes": 0})
    assert open_envs == [4] * 6
    assert float(result.policy.model.normalizer.count) == 64 + 6 * UPDATE
    # The weights that act have the statistics of the learner: nothing is off.
    assert result.history[-1]["train/rho_mean"] == pytest.approx(1.0, abs=1e-5)


# -- local ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_actors_in_processes() -> None:
    """As a user gets it: each steps its environments, and nothing is lost or made up."""
    result = impala_run(
        runner="local", total_steps=30 * UPDATE, **{"algorithm.queue_out_of_sync_factor": 2.0}
    )
    assert result.summary.stop_reason == "total_steps"
    assert result.summary.env_steps == 30 * UPDATE
    for row in result.history:
        assert all(math.isfinite(value) for value in row.values())
        assert 0 <= row["time/learner_wait_share"] <= 1
        assert 0 <= row["train/policy_lag_mean"] <= row["train/policy_lag_max"] <= 6
        assert 0 <= row["actors/queue_after"] <= row["actors/queue_before"] + 2
        assert row["actors/steps_dropped"] == 0
        # Four may wait, and each actor has one under way.
        assert 0 <= row["actors/steps_in_flight"] <= 6 * UPDATE / 2
        assert_counted(row)
    # 5 steps an episode, in each of four environments.
    finished = sum(row["train/episodes"] for row in result.history if "train/episodes" in row)
    assert abs(finished - 30 * UPDATE / 5) <= 4
    made = [row["actors/steps_made"] for row in result.history]
    assert all(before <= after for before, after in pairwise(made))
    assert load_policy("run").act(np.zeros(3, np.float32)) in (-1, 0, 1)


CONTENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "memory": (
        {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict", "action": "tuple"}},
        {"model": "vector_rnn", "model.memory.size": 8, "algorithm.replay_size": 3},
    ),
    "masks, normalised": (
        partial(AnyEnv, *ANY_SPACES["mask"]),
        {"model.normalization.mode": "running", "model.normalization.n_steps": 64},
    ),
}


class Pictures(AnyEnv):
    """Random pictures: the first pixel says how old the episode is, the second is the reward."""

    def __init__(self) -> None:
        super().__init__(partial(spaces.Box, 0, 255, (16, 16), np.uint8), spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        obs[0, 0] = 0
        return obs, info

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        obs[0, 0] = self.t
        return obs, float(obs[0, 1]), *rest


def stacked_pictures() -> Any:
    """The last four pictures."""
    return ObservationStackWrapper(Pictures(), 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTENTS)
def test_what_actors_send(case: str) -> None:
    """A memory, masks, parts of actions: ratios are of the order of 1, metrics are finite."""
    env, more = CONTENTS[case]
    made = (lambda: env()) if callable(env) else env
    result = impala_run(env=made, **FORK, **more, total_steps=12 * UPDATE)
    for row in result.history:
        assert all(math.isfinite(value) for value in row.values())
        assert row["train/rho_mean"] == pytest.approx(1.0, abs=0.2)
        assert_counted(row)
    normalizer = result.policy.model.normalizer
    if normalizer is not None:
        assert float(normalizer.count) >= 64 + UPDATE


@pytest.mark.slow
def test_stacks_of_frames_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner sees the pictures in the order in which they were made, also of the replay."""
    original, checked = ImpalaLearner.preprocess, []

    def checking(self: Any, module_id: str, rollout: Any, statistics: Any) -> Any:
        steps, envs = rollout.num_steps, rollout.num_envs
        stacks = rollout.flat_obs()[0 : (steps + 1) * envs].view(steps + 1, envs, 4, 16, 16)
        ages = stacks[:, :, :, 0, 0].long()
        newest = ages[:, :, -1:]
        assert torch.equal(ages, (newest + torch.arange(-3, 1)).clamp(min=0))
        after = torch.where(rollout.ended, 0, newest[:-1, :, 0] + 1)
        assert torch.equal(newest[1:, :, 0], after)
        goes_on = ~rollout.ended
        assert torch.equal(rollout.rewards[goes_on], stacks[1:, :, 3, 0, 1].float()[goes_on])
        checked.append(envs)
        return original(self, module_id, rollout, statistics)

    monkeypatch.setattr(ImpalaLearner, "preprocess", checking)
    more = {"model.image_encoder": "impala", "model.hidden_sizes": [8], "algorithm.replay_size": 4}
    result = impala_run(env=stacked_pictures, **FORK, **more, total_steps=6 * UPDATE)
    assert checked == [4] + [8] * 5
    assert all(math.isfinite(value) for value in result.history[-1].values())


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"algorithm.num_actors": 3}, r"algorithm\.num_actors = 3: .*runner\.concurrency = 4"),
        ({"algorithm.reward_scaling": True}, r"algorithm\.reward_scaling = True"),
        ({"algorithm.vtrace_clip_rho_threshold": 0}, r"vtrace_clip_rho_threshold = 0"),
        ({"algorithm.replay_size": 2, "algorithm.replay_proportion": 0.1}, "replay_proportion"),
        ({"algorithm.num_actor": 3}, r"num_actor = 3: unknown; did you mean algorithm\.num_actors"),
        ({"algorithm.sequence_length": 4}, r"algorithm\.sequence_length = 4: .*model\.memory"),
        ({"algorithm.optimizer": {"_target_": "torch.optim.Adm"}}, r"algorithm\.optimizer"),
        ({**FORK, "algorithm.num_actors": 3}, r"algorithm\.num_actors = 3"),
        ({**FORK, "model.distributions": {"Discrete": "beta"}}, r"model\.distributions"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    """A wrong configuration raises, names the setting, and creates nothing on disk."""
    with pytest.raises(ConfigError, match=message):
        impala_run(**overrides)
    assert everything(tmp_path) == []


FAULTY = "own_envs.FaultyEnv"


def test_an_environment_that_raises_in_this_process() -> None:
    """Its own error comes through."""
    with pytest.raises(EnvError, match="the wheel came off"):
        impala_run(env={"_target_": FAULTY, "kwargs": {"at": 10}})
    assert summary("run")["stop_reason"] == "error"


def test_nothing_but_lost_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends when no update brings a transition; some without are no reason."""
    monkeypatch.setattr("maze_train.algorithms.impala.trainer.MOST_LOST_UPDATES", 4)
    kwargs = {"fault": "nan_observation", "at": 42}
    with pytest.raises(TrainingError, match=r"4 updates in a row brought no transition"):
        impala_run(
            env={"_target_": FAULTY, "kwargs": kwargs},
            total_steps=40 * UPDATE,
            **{"algorithm.on_non_finite": "skip"},
        )
    assert summary("run")["stop_reason"] == "error"
    assert summary("run")["env_steps"] == 4 * 41


@pytest.mark.slow
def test_learning_fails_while_actors_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes through, actors and environments end, the summary says so."""
    original, calls = ImpalaLearner.compute_loss_for_module, []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise TrainingError("the loss came off")
        return original(*args)

    monkeypatch.setattr(ImpalaLearner, "compute_loss_for_module", failing)
    with pytest.raises(TrainingError, match="the loss came off"):
        impala_run(**FORK)
    assert summary("run")["stop_reason"] == "error"


def test_environments_of_actors_are_numbered_through():
    """In messages, those of the second actor follow those of the first."""
    values = {"env": "CartPole-v1", "algorithm": "impala", "algorithm.num_actors": 2}
    with build_runner(load_config({**values, "runner.concurrency": 6})) as runner:
        workers = runner.builder.actors._pool.workers
        assert [worker._env.first_env for worker in workers] == [0, 3]
