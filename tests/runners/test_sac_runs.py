"""Runs of SAC as a user makes them: what they store, report and refuse."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from own_envs import SpacesEnv
from own_parts import (
    ANY_SPACES,
    AlwaysFirst,
    AnyEnv,
    KeptReplay,
    demonstrations,
    diaries,
)
from short_runs import everything, rows, short_run, summary

import maze_train.algorithms.off_policy.build as off_policy
import maze_train.data.replay_columns as replay_columns
from maze_train import load_policy, train
from maze_train.algorithms.off_policy.events import ReplayEvents, ReplayTimeEvents
from maze_train.algorithms.sac.events import SACEvents
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.errors import ConfigError, ShapeError, TrainingError

if TYPE_CHECKING:
    from pathlib import Path

LOCAL = {"runner": "local", "runner.n_workers": 2}
PRIORITISED = "maze_train.PrioritizedReplayBuffer"
KEPT = {"_target_": "own_parts.KeptReplay"}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every test starts in an empty directory and leaves no open environment."""
    monkeypatch.chdir(tmp_path)
    SpacesEnv.open_envs = 0
    KeptReplay.made.clear()
    AlwaysFirst.seen.clear()
    yield
    assert SpacesEnv.open_envs == 0


def sac_run(run_dir: str | None = "run", **overrides: Any) -> Any:
    """A short run of SAC on a toy environment."""
    return short_run(run_dir, "sac", **overrides)


# -- what is stored ------------------------------------------------------------------------------


def env_actions(policy: Any, actions: Any) -> np.ndarray[Any, Any]:
    """Stored actions as the environment got them, in one row each."""
    given = policy.model.distribution.to_env(actions)
    parts = given.values() if isinstance(given, dict) else [given]
    arrays = [np.asarray(part, np.float64) for part in parts]
    return np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)


@pytest.mark.parametrize("size", [1000, 60])
@pytest.mark.parametrize("action", ["box", "tuple"])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("runner", ["dev", pytest.param("local", marks=pytest.mark.slow)])
def test_what_is_stored_is_what_happened(
    tmp_path: Path, runner: str, concurrency: int, action: str, size: int
) -> None:
    """Each transition is one that an environment made; of a full buffer, the last ones are."""
    (tmp_path / "diaries").mkdir()
    kwargs = {"directory": str(tmp_path / "diaries"), "action": action}
    workers = {"runner.n_workers": 2} if runner == "local" and concurrency > 1 else {}
    result = sac_run(
        env={"_target_": "own_parts.DiaryEnv", "kwargs": kwargs},
        runner=runner,
        **workers,
        **{
            "runner.concurrency": concurrency,
            "algorithm.replay_buffer": KEPT,
            "algorithm.replay_buffer_size": size,
            "algorithm.gamma": 0.9,
            "evaluation.n_episodes": 0,
            "total_steps": 180,
        },
    )
    buffer = KeptReplay.made[-1]
    happened = [diary for count, diary in diaries(tmp_path / "diaries") if count]
    steps = result.summary.env_steps
    assert sum(map(len, happened)) == steps >= 180
    assert len(happened) == concurrency
    assert len(buffer) == min(size, steps)
    # The last transitions of each environment, all of them.
    kept = len(buffer) // concurrency
    expected = {obs: told for diary in happened for obs, told in list(diary.items())[-kept:]}
    batch = buffer.sample_batch(40 * len(buffer))
    _, first = np.unique(batch.indices.numpy(), return_index=True)
    assert len(first) == len(expected) == len(buffer)
    actions = env_actions(result.policy, batch.actions)
    found = {tuple(batch.obs[i].tolist()) for i in first}
    assert found == expected.keys()
    for i in first:
        told_action, reward, discount, next_obs = expected[tuple(batch.obs[i].tolist())]
        np.testing.assert_allclose(actions[i], told_action, rtol=1e-5, atol=1e-6)
        assert batch.rewards[i] == np.float32(reward)
        assert batch.discounts[i] == np.float32(discount)
        assert not discount or batch.next_obs[i].tolist() == next_obs
    assert {told[2] for told in expected.values()} == {0.0, 0.9}


# -- spaces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ANY_SPACES)
def test_every_space(case: str) -> None:
    """Metrics are finite, every action is one of its space, and the saved policy acts."""
    observation_space, action_space = ANY_SPACES[case]

    def make() -> Any:
        return AnyEnv(observation_space, action_space)

    more = {"model.image_encoder": "impala"} if case == "image" else {}
    result = sac_run(env=make, **more, total_steps=96)
    row = result.history[-1]
    assert all(math.isfinite(value) for value in row.values())
    assert row["train/critic_loss"] > 0
    env = make()
    obs, _ = env.reset(seed=0)
    policy = load_policy("run")
    for deterministic in (True, False):
        env.step(policy.act(obs, deterministic))


# -- the initial phase ---------------------------------------------------------------------------


def test_a_policy_of_ones_own_acts_first() -> None:
    """`initial_sampling_policy` acts on all environments until the buffer holds enough."""
    node = {"_target_": "own_parts.AlwaysFirst", "action": 1}
    sac_run(
        **{
            "algorithm.initial_sampling_policy": node,
            "algorithm.initial_buffer_size": 64,
            "algorithm.epoch_length": 8,
            "algorithm.replay_buffer": KEPT,
        }
    )
    assert AlwaysFirst.seen == [2] * 32
    rewards = np.array([float(row["train/episode_return_mean"]) for row in rows("run")])
    assert rewards[0] == 5.0  # five steps of the action 1
    assert (rewards[1:] < 5.0).all()


def test_demonstrations_begin_the_buffer() -> None:
    """They are stored, count for the initial phase, and are no steps of the run."""
    node = {"_target_": "own_parts.demonstrations", "n_episodes": 12}
    result = sac_run(
        **{
            "algorithm.initial_demonstration_trajectories": node,
            "algorithm.initial_buffer_size": 36,
            "algorithm.replay_buffer": KEPT,
        }
    )
    buffer = KeptReplay.made[-1]
    assert len(buffer) == 36 + 192
    assert result.summary.env_steps == 192
    # The policy acts from the first step on, and all but the last update is learned from.
    steps = sum(float(row["train/gradient_steps"] or 0) for row in rows("run"))
    assert steps == (192 - 8) // 4
    batch = buffer.sample_batch(10_000)
    demonstrated = np.unique(batch.indices[batch.rewards >= 100].numpy())
    assert len(demonstrated) == 36
    for i in (batch.rewards >= 100).nonzero().flatten().tolist():
        episode = demonstrations(12)[round(float(batch.rewards[i])) - 100]
        assert batch.obs[i].tolist() == episode.obs[0].tolist()
        assert batch.discounts[i] == 0 or batch.next_obs[i].tolist() == episode.obs[0].tolist()
        assert batch.actions[i] in (0, 1, 2)
    ends = batch.discounts[batch.rewards >= 100] == 0
    assert 0.1 < ends.float().mean() < 0.25  # the last step of every other episode


# -- what is refused -----------------------------------------------------------------------------

POLICY, SHOWN = "algorithm.initial_sampling_policy", "algorithm.initial_demonstration_trajectories"
BUFFER = "algorithm.replay_buffer"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"algorithm.initial_buffer_size": 1001},
            r"algorithm\.initial_buffer_size = 1001: expected at most replay_buffer_size=1000",
        ),
        (
            {"algorithm.replay_buffer_size": 7, "algorithm.initial_buffer_size": 7},
            r"algorithm\.replay_buffer_size = 7: expected at least the 8 transitions of an update",
        ),
        (
            {"algorithm.replay_bufer_size": 7},
            r"algorithm\.replay_bufer_size = 7: unknown; did you mean algorithm\.replay_buffer_siz",
        ),
        ({BUFFER: {"_target_": "own_parts.NoBuffer"}}, r"algorithm\.replay_buffer.*'NoBuffer'"),
        ({BUFFER: {"_target_": "own_parts.AlwaysFirst"}}, r"algorithm\.replay_buffer"),
        (
            {BUFFER: {"_target_": "builtins.dict", "zip": 1}},
            r"algorithm\.replay_buffer",
        ),
        ({BUFFER: {**KEPT, "bond": 1.0}}, r"algorithm\.replay_buffer: .*'bond'"),
        (
            {BUFFER: {"_target_": PRIORITISED, "alpha": -1}},
            r"algorithm\.replay_buffer\.alpha = -1: .*>= 0",
        ),
        (
            {BUFFER: {**KEPT, "gamma": 0.5}},
            r"algorithm\.replay_buffer\.gamma = 0\.5: .*algorithm\.gamma",
        ),
        ({BUFFER: {"alpha": 1}}, r"algorithm\.replay_buffer = .*expected the key _target_"),
        ({"algorithm.replay_buffer_storage": "disc"}, r"replay_buffer_storage = 'disc'"),
        ({"model.memory.cell": "lstm"}, r"model\.memory"),
        ({"model.shared_trunk": True}, r"model\.shared_trunk = True"),
        ({"runner": "ray"}, r"runner = 'ray'"),
        ({POLICY: {"_target_": "own_parts.Always"}}, rf"{POLICY}.*AlwaysFirst"),
        ({POLICY: {"_target_": "own_parts.AlwaysFirst", "act": 1}}, rf"{POLICY}: .*'act'"),
        (
            {POLICY: {"_target_": "own_parts.OwnPPOConfig"}},
            rf"{POLICY} = .*expected an object with a method act",
        ),
        (
            {SHOWN: {"_target_": "own_parts.demonstrations", "n_episodes": 0}},
            rf"{SHOWN} = .*holds no episodes: expected at least one",
        ),
        (
            {SHOWN: {"_target_": "own_parts.demonstrations", "n_episodes": 400}},
            r"algorithm\.replay_buffer_size = 1000: holds .* of the 1200 transitions of the demon",
        ),
        ({"total_steps": 32}, r"algorithm\.initial_buffer_size = 32: nothing would be learned"),
        (
            {"algorithm.entropy_tuning": False, "algorithm.entropy_coef_lr": 0.1},
            r"algorithm\.entropy_coef_lr = 0\.1: .*entropy_tuning",
        ),
        (
            {POLICY: {"_target_": "own_parts.AlwaysFirst"}, "algorithm.initial_action_repeat": 2},
            r"algorithm\.initial_action_repeat = 2: .*initial_sampling_policy",
        ),
        ({SHOWN: {"_target_": "own_parts.demonstrations"}}, rf"{SHOWN}: .*'n_episodes'"),
        ({"algorithm.lr": 0}, r"algorithm\.lr = 0"),
        ({"algorithm.tau": 1.5}, r"algorithm\.tau = 1\.5"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    """A wrong configuration raises, names the setting, and creates nothing on disk."""
    with pytest.raises(ConfigError, match=message):
        sac_run(**overrides)
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("storage", "remedy"),
    [("memory", "storage=disk"), ("device", "storage=disk"), ("disk", "set run_dir")],
)
@pytest.mark.parametrize(("total_steps", "held"), [(185, 192), (0, 1000)])
def test_a_buffer_that_does_not_fit_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    storage: str,
    remedy: str,
    total_steps: int,
    held: int,
) -> None:
    """Before it is made, by what it holds in the end. One byte of room decides."""
    # Rows of three numbers, one action, one reward and flags; one more for the newest.
    needed = (held + 2) * (12 + 8 + 4 + 1)
    free = [needed - 1]
    for name in ("available_memory", "available_disk"):
        monkeypatch.setattr(off_policy, name, lambda place: free[0])
    settings: dict[str, Any] = {
        "algorithm.replay_buffer_storage": storage,
        "total_steps": total_steps,
        "algorithm.n_epochs": 3,
    }
    size = rf"algorithm\.replay_buffer_size = 1000: .* {needed / 1000:.1f} kB .*lower it, or"
    with pytest.raises(ConfigError, match=f"{size}.*{remedy}"):
        sac_run(**settings)
    assert everything(tmp_path) == []
    free[0] = needed
    assert sac_run(**settings).summary.env_steps == 192


@pytest.mark.skipif(sys.platform != "linux", reason="files may be sparse elsewhere")
def test_a_buffer_is_no_larger_than_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes room for `total_steps` and demonstrations; for more when a run is extended."""
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, offset, size: taken.append(size))
    shown = {SHOWN: {"_target_": "own_parts.demonstrations", "n_episodes": 2}}
    expected = {192: ({}, "run"), 192 + 6 + 2: (shown, "shown")}
    for held, (more, run_dir) in expected.items():
        sac_run(run_dir, **{"algorithm.replay_buffer_storage": "disk", **more})
        assert sorted(taken) == [(held + 2) * 8, (held + 2) * 12]  # actions, observations
        taken.clear()
    train(resume="run", total_steps=400, trust=["own_envs", "own_parts"])
    assert sorted(taken) == [402 * 8, 402 * 12]
    taken.clear()
    train(resume="shown", total_steps=400, trust=["own_envs", "own_parts"])
    assert sorted(taken) == [1002 * 8, 1002 * 12]


def test_priorities_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a uniform buffer just fits, a prioritised one does not."""
    monkeypatch.setattr(off_policy, "available_memory", lambda device: (192 + 2) * 25)
    assert sac_run("uniform").summary.env_steps == 192
    with pytest.raises(ConfigError, match=r"algorithm\.replay_buffer_size = 1000: .*are free"):
        sac_run("prioritised", **{BUFFER: {"_target_": PRIORITISED}})


def test_files_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes none is an error of the setting that asks for them."""

    def refuse(dir: Path) -> Any:
        assert dir == tmp_path
        raise PermissionError("Permission denied")

    monkeypatch.setattr(replay_columns, "TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"replay_buffer_storage = 'disk': .*Permission denied"):
        sac_run("some/where", **{"algorithm.replay_buffer_storage": "disk"})
    assert everything(tmp_path) == []


def test_a_large_buffer_of_a_short_run_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is shorter than a row of all environments neither."""
    monkeypatch.setattr(off_policy, "available_memory", lambda device: 500)
    settings = {"algorithm.initial_buffer_size": 1, "runner.concurrency": 3}
    assert sac_run(total_steps=2, **settings).summary.env_steps == 12


def test_demonstrations_of_other_shapes_are_refused(tmp_path: Path) -> None:
    """Before anything is written, naming the trajectory."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict"}}
    node = {"_target_": "own_parts.demonstrations", "n_episodes": 1}
    with pytest.raises(ShapeError, match=r"trajectory 0 has the arrays .*expected .*place"):
        sac_run(env=env, **{SHOWN: node})
    assert everything(tmp_path) == []


# -- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["box", "tuple"])
def test_metrics(action: str) -> None:
    """Every value that SAC reports is in the table, and is plausible."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": action}}
    result = sac_run(env=env, **{"algorithm.replay_buffer_size": 100})
    events = [*SACEvents.events(), *ReplayEvents.events(), *ReplayTimeEvents.events()]
    row = result.history[-1]
    told = {event.tag for event in events if event.tag in row}
    missing = {event.tag for event in events} - told
    # Only where something went wrong.
    assert missing == {"train/skipped_steps"}
    assert set(rows("run")[-1]) >= {tag for tag in told if not tag.startswith("time/")}
    assert row["replay/size"] == 100
    # One for four transitions after the initial phase.
    steps = sum(float(r.get("train/gradient_steps") or 0) for r in result.history)
    assert steps == (192 - 32) // 4
    assert row["replay/picks_per_transition"] == pytest.approx(steps * 8 / (192 - 8))
    assert row["train/policy_entropy"] <= 2 * math.log(2)  # uniform, in [-1, 1] and over 2 choices
    target = {"box": -2.0, "tuple": -1.0 + 0.98 * math.log(2)}[action]
    assert row["train/target_entropy"] == pytest.approx(target, rel=1e-6)
    assert 0.9 < row["train/entropy_coef"] < 1.0  # falls: the entropy is above its target
    assert row["train/critic_spread"] > 0
    assert row["train/learning_rate"] == pytest.approx(3e-4)
    assert 0 < row["time/sample_s"] < row["time/update_s"]


@pytest.mark.parametrize("total_steps", [40, 33, 192])
def test_the_initial_phase_counts_as_steps(total_steps: int) -> None:
    """The run ends after as many steps as it was told, up to the end of an update."""
    result = sac_run(total_steps=total_steps)
    assert result.summary.env_steps == 8 * math.ceil(total_steps / 8)
    assert result.history[-1]["env_steps"] == result.summary.env_steps
    assert summary("run")["env_steps"] == result.summary.env_steps


@pytest.mark.parametrize("ratio", [1.0, 0.01])
def test_a_trial_takes_a_gradient_step(ratio: float) -> None:
    """One update that collects, one that learns, however rarely the run would."""
    result = sac_run(
        **{
            "runner.fast_dev_run": True,
            "runner.concurrency": 1,
            "algorithm.n_rollout_steps": 1,
            "algorithm.update_to_data_ratio": ratio,
        }
    )
    assert (result.summary.epochs, result.summary.updates) == (1, 2)
    assert result.history[0]["train/gradient_steps"] == 1


def test_the_seed_decides_every_number() -> None:
    """Equal seeds give equal metrics, others give others."""
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        sac_run(name, seed=seed)
    assert rows("a") == rows("b")
    losses = [[row["train/critic_loss"] for row in rows(name)] for name in "ac"]
    assert losses[0] != losses[1]


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learning_fails_while_workers_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes through, workers and environments end, the summary says so."""
    original, calls = SACLearner.compute_loss_for_module, []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise TrainingError("the loss came off")
        return original(*args)

    monkeypatch.setattr(SACLearner, "compute_loss_for_module", failing)
    with pytest.raises(TrainingError, match="the loss came off"):
        sac_run(**LOCAL)
    assert summary("run")["stop_reason"] == "error"
    assert multiprocessing.active_children() == []
