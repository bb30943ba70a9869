"""Metrics, spaces, invalid settings and faults of all algorithms."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces
from own_envs import SpacesEnv
from own_parts import KeptReplay
from recorded import record
from short_runs import ALGORITHMS, FORK, QUIET, everything, rows, short_run, summary

from maze_train import load_policy, train
from maze_train.algorithms.es.learner import ESLearner
from maze_train.algorithms.impala.learner import ImpalaLearner
from maze_train.algorithms.sac.learner import SACLearner
from maze_train.core.errors import (
    ConfigError,
    EnvError,
    MazeTrainError,
    ShapeError,
    SpaceError,
    TrainingError,
)
from maze_train.core.targets import locate
from maze_train.training.config import DRY_RUN_STEPS

pytestmark = pytest.mark.usefixtures("empty_directory")

FAULTY = "own_envs.FaultyEnv"
SHOWN, BUFFER = "algorithm.initial_demonstration_trajectories", "algorithm.replay_buffer"
POLICY = "algorithm.initial_sampling_policy"
KEPT = {"_target_": "own_parts.KeptReplay"}
SOME = {"_target_": "own_parts.demonstrations"}


RARE = {"skipped_steps", "zeroed_gradients", "loss", "compile_s"}

# Events of each algorithm, and those that are only reported on request or after errors.
REPORTED: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "ppo": (("actor_critic.learner.ActorCriticEvents",), RARE),
    "impala": (
        (
            "impala.learner.ImpalaEvents",
            "impala.learner.ActorEvents",
            "impala.learner.ActorTimeEvents",
        ),
        {"approximate_kl", "clip_fraction", "clip_range", *RARE},
    ),
    "sac": (
        (
            "sac.learner.SACEvents",
            "off_policy.learner.ReplayEvents",
            "off_policy.learner.ReplayTimeEvents",
        ),
        {"grad_norm_clipped", *RARE},
    ),
    "es": (("es.learner.ESEvents", "es.learner.PopulationEvents"), set()),
}


@pytest.mark.parametrize("algorithm", REPORTED)
def test_every_declared_event_is_reported(algorithm: str) -> None:
    """All events are in the history and in metrics.csv, with finite values."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"action": "tuple"}}
    result = short_run(algorithm=algorithm, env=env)
    groups, missing = REPORTED[algorithm]
    events = [e.tag for name in groups for e in locate(f"maze_train.algorithms.{name}").events()]
    row, written = result.history[-1], rows("run")[-1]
    assert set(events) - row.keys() == {f"train/{name}" for name in missing}
    clocks = {tag for tag in events if tag.startswith("time/")}
    assert {tag for tag in events if tag in row} - clocks <= {k for k, v in written.items() if v}
    assert all(math.isfinite(value) for row in result.history for value in row.values())
    assert [int(r["env_steps"]) for r in rows("run")] == [r["env_steps"] for r in result.history]
    assert row["env_steps"] == result.summary.env_steps == summary("run")["env_steps"]


SPACES = {
    "ppo": [("counts", "discrete"), ("dict", "dict"), ("image", "box")],
    "impala": [("image", "tuple"), ("mask", "choice")],
    "es": [("image", "tuple"), ("mask", "choice"), ("dict", "dict")],
    "sac": [
        *(("box", action) for action in ("box", "discrete", "multi_discrete", "multi_binary")),
        *[("mask", "choice"), ("image", "dict")],
    ],
}
"""Observation and action spaces; SAC has a separate loss for each kind of action."""


@pytest.mark.parametrize(
    ("algorithm", "obs", "action"),
    [
        row
        for algorithm, pairs in SPACES.items()
        for row in everyday(1, [(algorithm, *pair) for pair in pairs], are_rows=True)
    ],
)
def test_every_space_learns_saves_and_acts(algorithm: str, obs: str, action: str) -> None:
    """Metrics are finite, actions are valid, and the saved policy acts."""
    more = {"model.image_encoder": "impala"} if obs == "image" else {}
    steps = {"es": 0, "sac": 96}.get(algorithm, 64)
    limits = {"algorithm.n_epochs": 1} if algorithm == "es" else {}
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": obs, "action": action}}
    result = short_run(algorithm=algorithm, env=env, total_steps=steps, **more, **limits)
    assert all(math.isfinite(value) for value in result.history[-1].values())
    policy, made = load_policy("run", ["own_envs"]), SpacesEnv(obs, action)
    assert policy.action_space == made.action_space
    for deterministic in (True, False):
        seen, _ = made.reset(seed=0)
        for _ in range(2):
            seen, *_ = made.step(policy.act(seen, deterministic))
    made.close()


# -- dry runs --------------------------------------------------------------------------------------


class CountingEnv(SpacesEnv):
    """Environment with endless episodes; counts the steps of each instance."""

    made: ClassVar[list[CountingEnv]] = []

    def __init__(self) -> None:
        super().__init__(length=10**9)
        self.steps = 0
        CountingEnv.made.append(self)

    def step(self, action: Any) -> Any:
        """Count the step."""
        self.steps += 1
        return super().step(action)


TRIALS: dict[str, dict[str, Any]] = {
    "sac": {"algorithm.update_to_data_ratio": 0.01},
    "sacfd": {SHOWN: "data"},
    "bc": {"runner.dataset": "data"},
}


@pytest.mark.parametrize(
    ("algorithm", "normalization"),
    everyday(
        2,
        [
            *(("sac", "estimated"), ("ppo", "none"), ("impala", "estimated"), ("es", "estimated")),
            *(("sacfd", "none"), ("bc", "estimated")),
        ],
        are_rows=True,
    ),
)
def test_fast_dev_run_makes_few_steps_per_environment(algorithm: str, normalization: str) -> None:
    """A dry run takes few steps in training, evaluation and for statistics, in one epoch."""
    record(Path("data"), SpacesEnv(), n_episodes=2)
    CountingEnv.made = []
    settings = {"runner.fast_dev_run": True, "model.normalization.mode": normalization}
    more = TRIALS.get(algorithm, {})
    result = train(CountingEnv, algorithm, run_dir="run", seed=0, **QUIET, **settings, **more)
    assert result.summary.epochs == 1
    assert result.history[0]["train/gradient_steps"] >= 1
    assert np.isfinite(result.history[0]["eval/episode_return_mean"])
    parts = 1 if normalization == "none" else 2
    assert 0 < max(env.steps for env in CountingEnv.made) <= parts * DRY_RUN_STEPS


# -- statistics of observations ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "learner_class", "mode", "begun", "of_training"),
    everyday(
        1,
        [
            ("impala", ImpalaLearner, "running", 64, 6 * 2 * 8 * 2),
            ("es", ESLearner, "running", 1024, None),
            ("es", ESLearner, "estimated", 1024, 0),
        ],
        are_rows=True,
    ),
)
def test_observation_statistics_use_separate_environments(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    learner_class: Any,
    mode: str,
    begun: int,
    of_training: int | None,
) -> None:
    """Separate environments are used and closed before training."""
    original, open_envs = learner_class.preprocess, []

    def noted(*args: Any) -> Any:
        open_envs.append(SpacesEnv.open_envs)
        return original(*args)

    monkeypatch.setattr(learner_class, "preprocess", noted)
    more = {"model.normalization.mode": mode, "model.normalization.n_steps": 64}
    result = short_run(algorithm=algorithm, **more, **{"evaluation.n_episodes": 0})
    assert open_envs == [4] * 6
    normalizer = result.policy.model.normalizer
    if of_training is None:  # two updates of eight episodes per epoch
        of_training = result.summary.best_epoch * 2 * 8 * 5
    assert float(normalizer.count) == begun + of_training
    assert bool(normalizer.frozen) == (mode == "estimated")


# -- what goes wrong -----------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"model.distributions": {"Discrete": "diagonal_gaussian"}}, "requires a Box"),
    ("ppo", {"model.policy": {"_target_": "own_parts.NarrowNet"}}, "expected outputs of sh"),
    (
        "ppo",
        {"algorithm.device": "cuda:99"},
        "algorithm.device = 'cuda:99': not available",
    ),
    ("ppo", {"learner_group.device": "cuda:99"}, "learner_group.device = 'cuda:99': not available"),
    (
        "ppo",
        {"evaluation.evaluators": [{"_target_": "maze_train.core.seeding.draw_seed"}]},
        "a maze_train.Evaluator",
    ),
    ("ppo", {"total_steps": 0}, "the run would never end"),
    (
        *("ppo", {"total_steps": 0, "algorithm.patience": 2, "algorithm.n_epochs": 0}),
        r"algorithm\.lr = \[\[0\.0, 0\.001\], .*set total_steps, or use a",
    ),
    ("ppo", {"runner.dataset": "data"}, r"runner\.dataset.*use algorithm=bc"),
    ("ppo", {"evaluation.metric": "validation/loss"}, "metric = 'validation/loss': not reported"),
    ("impala", {"algorithm.sequence_length": 4}, r"sequence_length = 4: .*model\.rnn"),
    ("es", {**FORK, "algorithm.noise_table_size": 20}, r"noise_table_size = 20: .*parameters"),
    ("es", {"algorithm.policy_wrapper": {"_target_": "torch.nn.Identity"}}, "policy_wrapper = "),
    ("es", {"learner_group.n_learners": 2}, "learner_group.n_learners = 2: es supports a single"),
    ("es", {"learner_group.device": "cuda"}, "learner_group.device = 'cuda': es computes no"),
    (
        "sac",
        {"runner.envs_per_actor": 1},
        r"envs_per_actor = 1: sac does not support actors",
    ),
    ("ppo", {"runner.envs_per_actor": 3}, r"envs_per_actor = 3: .* runner\.concurrency = 2"),
    ("sac", {"total_steps": 32}, r"^total_steps = 32: the run would end .*initial_buffer_size=32"),
    ("sac", {BUFFER: {"_target_": "own_parts.NoBuffer"}}, r"algorithm\.replay_buffer.*'NoBuffer'"),
    ("sac", {BUFFER: {**KEPT, "bond": 1.0}}, r"algorithm\.replay_buffer: .*'bond'"),
    ("sac", {POLICY: {"_target_": "own_parts.Always"}}, rf"{POLICY}.*AlwaysFirst"),
    ("sac", {POLICY: {"_target_": "own_parts.OwnPPOConfig"}}, rf"{POLICY} = .*a method act"),
    ("sac", {SHOWN: {**SOME, "n_episodes": 0}}, rf"{SHOWN} = .*contains no episodes: expected at"),
    ("sac", {SHOWN: {**SOME, "n_episodes": 400}}, r"of their 1200 transitions fit"),
]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    REFUSED,
)
def test_invalid_settings_raise_before_anything_is_written(
    tmp_path: Path, algorithm: str, overrides: dict[str, Any], message: str
) -> None:
    """Invalid configurations raise an error that names the setting, and create no files."""
    KeptReplay.made.clear()
    with pytest.raises(ConfigError, match=message):
        short_run(**{"algorithm": algorithm, "run_dir": "run", **overrides})
    assert everything(tmp_path) == []


MANY = spaces.Discrete(2**31)
UNBOUNDED = spaces.Box(-np.inf, np.inf, (1,), np.float32)


@pytest.mark.parametrize(
    ("algorithm", "name", "space", "message"),
    [
        ("td3", "action_space", UNBOUNDED, "td3 requires .* finite bounds.* algorithm=ppo or"),
        ("ppo", "observation_space", MANY, "^observation space .* has 2,147,483,648 categories"),
        (
            "a2c",
            "observation_space",
            spaces.Dict(a=spaces.MultiDiscrete([2**30, 9])),
            r"^observation space \(key 'a'\) Multi.* has 1,073,741,833 categories",
        ),
        ("ppo", "action_space", MANY, "^action space .* at most 16,777,216 are supported"),
        ("sac", "action_space", MANY, "^action space .* at most 16,777,216 are supported"),
    ],
)
def test_unsupported_spaces_raise_before_memory_is_allocated(
    algorithm: str, name: str, space: Any, message: str, tmp_path: Path
) -> None:
    """The error is raised before memory is allocated, and suggests a supported setting."""

    class Odd(SpacesEnv):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, space)

    with pytest.raises(SpaceError, match=message):
        train(Odd, algorithm, run_dir="run", total_steps=20_000, **QUIET)
    assert everything(tmp_path) == []


def test_default_batch_size_is_limited_to_the_rollout(capsys: Any) -> None:
    """A note is printed for the default; an explicit larger size raises an error."""
    small = {"algorithm.n_rollout_steps": 16, "runner.concurrency": 2, "algorithm.batch_size": 256}
    result = short_run(algorithm="ppo", **small, **{"algorithm.n_optimization_epochs": 3})
    assert result.history[0]["train/gradient_steps"] == 2 * 3
    told = capsys.readouterr().err
    assert told.count("batch_size = 256 (default) is larger than the rollout of 32 samples") == 1


def test_demonstrations_of_other_shapes_raise(tmp_path: Path) -> None:
    """The error names the trajectory and is raised before anything is written."""
    env = {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict"}}
    with pytest.raises(ShapeError, match=r"trajectory 0 has the arrays .*expected .*place"):
        short_run(algorithm="sac", env=env, **{SHOWN: {**SOME, "n_episodes": 1}})
    assert everything(tmp_path) == []


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [*((name, {}) for name in ALGORITHMS), pytest.param("es", FORK, marks=pytest.mark.slow)],
)
def test_error_of_an_environment_ends_the_run(algorithm: str, place: dict[str, Any]) -> None:
    """The error contains the original error and the episode seed."""
    with pytest.raises(EnvError, match=r"with seed \d+: .*the wheel came off"):
        short_run(algorithm=algorithm, env={"_target_": FAULTY, "kwargs": {"at": 13}}, **place)
    assert summary("run")["stop_reason"] == "error"


@pytest.mark.parametrize(
    ("algorithm", "fault"),
    [
        *(("ppo", "nan_reward"), ("sac", "nan_observation")),
        *(("impala", "nan_observation"), ("es", "nan_reward")),
    ],
)
def test_nan_observation_or_reward_ends_the_run(algorithm: str, fault: str) -> None:
    """NaN in rewards or observations ends the run with an error and a remedy."""
    env = {"_target_": FAULTY, "kwargs": {"fault": fault, "at": 13}}
    with pytest.raises(MazeTrainError, match=r"at step 3 of the episode.*(reward|observation)"):
        short_run(algorithm=algorithm, env=env)
    assert summary("run")["stop_reason"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "learner_class", "loss"),
    everyday(
        1,
        [
            ("sac", SACLearner, "policy_loss"),
            ("impala", ImpalaLearner, "compute_loss_for_module"),
        ],
        are_rows=True,
    ),
)
def test_error_of_the_learner_closes_workers(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, learner_class: Any, loss: str
) -> None:
    """The error is raised, and workers and environments are closed."""
    original, calls = getattr(learner_class, loss), []

    def failing(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            raise TrainingError("the loss came off")
        return original(*args)

    monkeypatch.setattr(learner_class, loss, failing)
    with pytest.raises(TrainingError, match="the loss came off"):
        short_run(algorithm=algorithm, **FORK)
    assert summary("run")["stop_reason"] == "error"
    assert multiprocessing.active_children() == []
