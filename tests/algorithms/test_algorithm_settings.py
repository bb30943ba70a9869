"""Validation of algorithm settings, and their effects."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import yaml

from docs.generate import field_docs
from maze_train import PrioritizedReplayBuffer, load_config
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.algorithms.sac.config import SACAlgorithmConfig
from maze_train.core.errors import ConfigError
from maze_train.learner.config import GradientSettings

BUFFER = "maze_train.UniformReplayBuffer"


class OwnPriorities(PrioritizedReplayBuffer):
    """User-defined subclass of the prioritized replay buffer."""


def load(algorithm: str, **settings: Any) -> Any:
    """Return the settings of an algorithm on CartPole, with some values given."""
    own = {f"algorithm.{key}": value for key, value in settings.items()}
    if algorithm == "bc":
        own["runner.dataset"] = "anywhere"
    return load_config({"env": "CartPole-v1", "algorithm": algorithm, **own}).algorithm


# Algorithm, key, value, expected message, and other settings.
REFUSED: list[tuple[Any, ...]] = [
    ("es", "n_rollouts_per_update", 7, "an even number"),
    ("es", "n_rollouts_per_update", 2.5, "expected an int"),
    ("es", "noise_stddev", math.inf, "finite"),
    ("es", "noise_stddev", "cosine_0.1", "linear_"),
    ("es", "lr", math.nan, "finite"),
    ("es", "optimizer", {}, "the key _target_"),
    ("es", "fitness_shaping", "centred_ranks", "did you mean 'centered_ranks'"),
    ("es", "deterministic", "maybe", ""),
    ("es", "policy_wrapper", {"place": 1}, "the key _target_"),
    ("es", "device", "cuda:1", "expected cpu"),
    ("es", "n_rollouts", 8, "unknown; did you mean .*n_rollouts_per_update"),
    ("es", "gamma", 0.9, "unknown"),
    ("ppo", "device", "tpu", "expected cpu, cuda"),
    ("ppo", "patience", -1, ">= 0"),
    ("ppo", "on_non_finite", "ignore", "raise, skip"),
    ("ppo", "batch_size", 20_000, "larger than the rollout of 1024 samples"),
    ("ppo", "n_minibatches", 1025, "more than the 1024 samples of a rollout"),
    ("ppo", "n_minibatches", 65, "more than the 64 sequences", {"sequence_length": 16}),
    ("impala", "num_actors", 3, r"a divisor of runner\.concurrency = 8"),
    ("impala", "queue_out_of_sync_factor", math.inf, "finite"),
    (
        *("impala", "queue_out_of_sync_factor", 0.25, "at least 0.75, .*8 rollouts"),
        {"actors_batch_size": 8},
    ),
    ("impala", "vtrace_clip_pg_rho_threshold", math.nan, ""),
    ("impala", "loss_reduction", "sums", "mean.*sum"),
    ("impala", "replay_size", -1, "a number >= 0"),
    (
        *("impala", "replay_proportion", 0.2, "at least 1 / actors_batch_size = 0.5"),
        {"replay_size": 4, "actors_batch_size": 2},
    ),
    ("impala", "reward_scaling", True, r"several actors.*expected false .*env\.wrappers"),
    ("impala", "sequence_length", 3, "a divisor of n_rollout_steps=8", {"n_rollout_steps": 8}),
    (
        "sac",
        "initial_buffer_size",
        1001,
        "at most replay_buffer_size=1000",
        {"replay_buffer_size": 1000},
    ),
    (
        *("sac", "replay_buffer_size", 7, "at least the 8 transitions of an update"),
        {"initial_buffer_size": 7},
    ),
    ("sac", "replay_bufer_size", 7, r"unknown; did you mean algorithm\.replay_buffer_size"),
    ("sac", "replay_buffer_storage", "disc", ""),
    ("sac", "replay_buffer", {"alpha": 1}, "the key _target_"),
    ("sac", "entropy_coef_lr", 0.1, "entropy_tuning", {"entropy_tuning": False}),
    ("sac", "target_entropy_multiplier", 0.5, "entropy_tuning", {"entropy_tuning": False}),
    ("sac", "target_entropy_multiplier", -1.0, ""),
    (
        *("sac", "initial_action_repeat", 2, "initial_sampling_policy"),
        {"initial_sampling_policy": {"_target_": "own_parts.AlwaysFirst"}},
    ),
    ("bc", "box_loss", "huber", "nll, mse"),
    ("bc", "validation_percentage", 100.0, ""),
    ("bc", "validation_percentage", -1.0, ""),
    ("bc", "class_weights", "some", ""),
    ("bc", "epoch_length", -1, ">= 0"),
    ("bc", "max_grad_norm", -1.0, ">= 0"),
    ("bc", "storage", "cloud", ""),
    ("bc", "on_damaged", "repair", ""),
    ("bc", "loss", {}, "the key _target_"),
    ("td3", "critic_lr", -1.0, ""),
    ("td3", "entropy_coef", 0.1, "unknown"),
    ("dqn", "loss", "absolute", "huber, squared"),
    ("dqn", "loss", "squared", "num_quantiles=9 requires loss=huber", {"num_quantiles": 9}),
    ("dqn", "num_critics", 2, "unknown"),
]
RANGE = re.compile(r"\b[Ii]n [\[(](\S+), (\S+?)[\])]|(>=?) (-?[\d.]+)")
"""Range in the documentation of a setting."""


def beyond(text: str) -> list[float]:
    """Return values outside the range in a documentation text."""
    if (found := RANGE.search(text)) is None:
        return []
    low, high, sign, bound = found.groups()
    if low:
        return [float(low) - 1.0, float(high) + 1.0]
    is_open = sign == ">" and "; 0:" not in text
    return [float(bound) - (not is_open)]


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala", "sac", "td3", "dqn", "bc", "es"])
def test_settings_outside_documented_ranges_raise(algorithm: str) -> None:
    """Values outside the documented range of a setting raise ConfigError."""
    tried = 0
    for key, text in field_docs(type(load(algorithm))).items():
        for value in beyond(text):
            tried += 1
            with pytest.raises(ConfigError, match=rf"algorithm\.{key} = "):
                load(algorithm, **{key: int(value)})
    assert tried >= 4


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "expected", "others"), [(*row, {})[:5] for row in REFUSED]
)
def test_invalid_settings_raise(
    algorithm: str, key: str, value: Any, expected: str, others: dict[str, Any]
) -> None:
    """The error contains the key, the value and what is expected."""
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} = .*{expected}") as caught:
        load(algorithm, **{key: value, **others})
    assert f"{key} = {value!r}: " in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "key", "value", "known"),
    [
        ("dqn", "epsilon", None, 0.1),
        ("a2c", "entropy_coef", "linear_0.1", [[0, 0.1], [100, 0]]),
        ("sac", "replay_buffer.beta", 0.4, 1),
        ("bc", "overrides.only.lr", "linear_0.1", {"start": 0.1, "end": 0.1}),
    ],
)
def test_schedules_over_an_unknown_run_length_raise(
    algorithm: str, key: str, value: Any, known: Any
) -> None:
    """A schedule over the fraction of the run raises an error at the start, not when loading."""
    place = {"runner.dataset": "there"} if algorithm == "bc" else {"env": "CartPole-v1"}
    limits = {"algorithm.n_epochs": 0, "algorithm.patience": 2, "total_steps": 0}
    node = {**place, "algorithm": algorithm, **limits}
    if key.startswith("replay_buffer"):
        node["algorithm.replay_buffer._target_"] = "test_algorithm_settings.OwnPriorities"
    config = load_config({**node, f"algorithm.{key}": value})
    with pytest.raises(ConfigError, match=rf"algorithm\.{key} = \[\[.*patience .*total_steps"):
        config.check_start()
    load_config({**node, f"algorithm.{key}": value, "total_steps": 10_000}).check_start()
    load_config({**node, f"algorithm.{key}": known}).check_start()


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala", "bc", "sac", "td3", "dqn"])
def test_documented_overrides_are_valid_for_every_algorithm(algorithm: str) -> None:
    """The documented example of `overrides` is valid for every algorithm."""
    example = re.search(r"`(\{.*\})`", field_docs(GradientSettings)["overrides"])
    assert example is not None
    own = yaml.safe_load(example[1])
    assert load(algorithm, overrides=own).overrides == own


def test_arguments_of_other_settings_raise() -> None:
    """Optimizer and buffer arguments that belong to another setting raise an error naming it."""
    node = {"_target_": "torch.optim.Adam", "lr": 0.5}
    for algorithm in ("es", "sac", "ppo", "bc"):
        with pytest.raises(ConfigError, match=r"optimizer\.lr = 0\.5: set algorithm\.lr instead"):
            load(algorithm, optimizer=node)
    for key, origin in {
        "gamma": r"algorithm\.gamma",
        "n_steps": r"algorithm\.n_step_returns",
        "num_envs": r"runner\.concurrency",
        "storage": r"algorithm\.replay_buffer_storage",
    }.items():
        with pytest.raises(ConfigError, match=rf"replay_buffer\.{key} = 1: .*{origin}"):
            SACAlgorithmConfig(replay_buffer={"_target_": BUFFER, key: 1})


def test_bounds_of_ranges_are_accepted() -> None:
    """Values at the bounds of their ranges are accepted."""
    load("es", n_rollouts_per_update=2, l2_penalty=0, noise_table_size=2, device="auto")
    free = load("impala", vtrace_clip_rho_threshold=None, vtrace_clip_pg_rho_threshold=None)
    assert free.vtrace_clip_rho_threshold is free.vtrace_clip_pg_rho_threshold is None
    assert load("impala", queue_out_of_sync_factor=0).queue_size == 0
    tight = load("impala", queue_out_of_sync_factor=0.5, actors_batch_size=4)
    assert tight.queue_size + tight.num_actors == 4
    assert load("impala", num_actors=8).num_actors == 8


@pytest.mark.parametrize(("algorithm", "expected"), [("es", 64), ("ppo", 8), ("a2c", 8)])
def test_default_concurrency(algorithm: str, expected: int) -> None:
    """The default depends on the algorithm; explicit values replace it."""
    node = {"env": "CartPole-v1", "algorithm": algorithm}
    assert load_config(node).runner.concurrency == expected
    assert load_config({**node, "runner.concurrency": 0}).runner.concurrency == expected
    assert load_config({**node, "runner.concurrency": 16}).runner.concurrency == 16
    with pytest.raises(ConfigError, match=r"runner\.concurrency = -1"):
        load_config({**node, "runner.concurrency": -1})


@pytest.mark.parametrize(
    ("batch", "size", "factor", "replayed", "waiting"),
    [(4, 0, 2.0, 0, 8), (4, 1, 1.0, 4, 4), (4, 9, 0.5, 2, 2), (3, 9, 0.2, 1, 1), (2, 1, 3.0, 6, 6)],
)
def test_replayed_rollouts_are_multiples_of_a_batch(
    batch: int, size: int, factor: float, replayed: int, waiting: int
) -> None:
    """The replayed rollouts (0 without replay) and the queue size are multiples of a batch."""
    config = ImpalaAlgorithmConfig(
        num_actors=4,
        actors_batch_size=batch,
        replay_size=size,
        replay_proportion=factor,
        queue_out_of_sync_factor=factor,
    )
    assert (config.num_replayed, config.queue_size) == (replayed, waiting)
