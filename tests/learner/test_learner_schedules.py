from __future__ import annotations

import pytest
import torch

from maze_train.config.compose import load_config
from maze_train.core.checks import check_at_least
from maze_train.core.conversion import config_to_dict
from maze_train.core.errors import ConfigError
from maze_train.learner.config import Progress, Schedule, check_schedule, scheduled_value
from maze_train.learner.optimizers import adapted_rate


def test_constant_schedule_ignores_progress():
    """A constant does not depend on the progress."""
    assert scheduled_value(0.3, Progress()) == 0.3
    assert scheduled_value(0.3, Progress(10**9, 10**6, 5, 0.99)) == 0.3


@pytest.mark.parametrize(("total", "per_update"), [(100, 10), (100, 30), (1, 10)])
def test_linear_schedule_never_reaches_its_end(total, per_update):
    """In update k of n, the value is 1 - (k - 1) / n of the initial rate."""
    schedule = Schedule(start=1e-3, end=0.0)
    values, steps = [], 0
    while steps < total:
        values.append(scheduled_value(schedule, Progress(steps, fraction=steps / total)))
        steps += per_update
    assert values[0] == 1e-3
    assert values[-1] > 0.0
    expected = [1e-3 * (1 - k * per_update / total) for k in range(len(values))]
    assert values == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("by", "progress"),
    [
        ("env_steps", Progress(env_steps=150)),
        ("updates", Progress(updates=150)),
    ],
)
def test_piecewise_schedule_uses_its_counter(by, progress):
    """A piecewise schedule uses only the counter in `by`."""
    schedule = Schedule(points=[[100, 1.0], [200, 0.5], [400, 0.1]], by=by)
    assert scheduled_value(schedule, progress) == 0.75
    assert scheduled_value(schedule, Progress()) == 1.0
    other = Progress(env_steps=10**9 * (by != "env_steps"), updates=10**9 * (by != "updates"))
    assert scheduled_value(schedule, other) == 1.0


def values_at(schedule, *xs):
    """Return the values at fractions of the run."""
    return [scheduled_value(schedule, Progress(fraction=x)) for x in xs]


def test_piecewise_schedule_defaults_to_progress():
    """Without `by`, x is the fraction of the run; values at points are exact."""
    schedule = Schedule(points=[[0.1, 1.0], [0.5, 3.0], [0.9, -1.0]])
    values = values_at(schedule, 0.0, 0.1, 0.2, 0.5, 0.7, 0.9, 1.0)
    assert values == pytest.approx([1.0, 1.0, 1.5, 3.0, 1.0, -1.0, -1.0], rel=1e-12)
    assert values_at(Schedule(points=[[0.3, 7.0]]), 0.0, 0.3, 0.9) == [7.0, 7.0, 7.0]


def test_linear_interpolation_is_exact_at_both_ends():
    """Linear interpolation is exact at both ends; equal ends give a constant."""
    values = values_at(Schedule(start=0.1, end=0.3), 0.0, 0.5, 1.0)
    assert values == [0.1, pytest.approx(0.2, rel=1e-12), 0.3]
    shares = (0.0, 0.1, 1.0 / 3.0, 0.7, 1.0)
    assert set(values_at(Schedule(start=2.5e-4, end=2.5e-4), *shares)) == {2.5e-4}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"expected \{start"),
        ({"start": 1.0}, r"expected \{start"),
        ({"start": 1.0, "end": 0.0, "by": "updates"}, r"expected \{start"),
        ({"start": 1.0, "points": [[0, 1]]}, r"points = .*cannot be combined"),
        ({"points": []}, r"points = \[\]: expected a list of pairs"),
        ({"points": [[0, 1, 2]]}, r"expected a list of pairs"),
        ({"points": [[0, 1], [0, 2]]}, r"x values must be increasing"),
        ({"points": [[0, 1]], "by": "epochs"}, r"by = 'epochs': expected one of progress"),
        # Points that count steps, without `by`, would give a constant.
        ({"points": [[0, 1], [50_000, 0]]}, r"expected x in \[0, 1\]"),
        ({"points": [[-0.1, 1], [1, 0]]}, r"expected x in \[0, 1\]"),
        ({"adaptive_kl": 0.0}, r"adaptive_kl = 0.0: expected a number > 0"),
        ({"adaptive_kl": 0.01, "start": 0.1}, r"start = 0.1: expected .* \[1e-05, 0.01\]"),
        ({"adaptive_kl": 0.01, "min": 0.0}, r"min = 0.0: expected a number > 0"),
        ({"adaptive_kl": 0.01, "min": 0.1}, r"max = 0.01: expected a number >= 0.1"),
        ({"adaptive_kl": 0.01, "end": 0.0}, r"adaptive_kl = 0.01: cannot be combined"),
        ({"start": 1.0, "end": 0.0, "max": 0.5}, r"max = 0.5: has no effect without adaptive_kl"),
    ],
)
def test_invalid_schedules_raise(settings, message):
    """Invalid schedules raise an error with an example."""
    with pytest.raises(ConfigError, match=message):
        Schedule(**settings)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("adaptive_kl", "adaptive_kl_0.01"),
        ("adaptive_kl_0.02", "adaptive_kl_0.02"),
        ({"adaptive_kl": 0.5, "max": 0.1}, None),
        ("linear_0.5", "linear_0.5"),
    ],
)
def test_schedules_round_trip(given, written):
    """Schedules are written in short form if possible, and round trips are exact."""
    config = load_config({"env": "CartPole-v1", "algorithm": "ppo", "algorithm.lr": given})
    node = config_to_dict(config)
    assert load_config(node) == config
    assert node["algorithm"]["lr"] == (
        written or {"adaptive_kl": 0.5, "start": 0.001, "min": 1e-5, "max": 0.1}
    )
    assert scheduled_value(config.algorithm.lr, Progress()) in (0.001, 0.5)


@pytest.mark.parametrize(
    ("rate", "divergence", "expected"),
    [
        (1e-3, 0.0, 1e-3),
        (1e-3, 1e-12, 1.5e-3),
        (1e-3, 0.0049, 1.5e-3),
        (1e-3, 0.0051, 1e-3),
        (1e-3, 0.02, 1e-3),
        (1e-3, 0.0201, 1e-3 / 1.5),
        (1.2e-5, 5.0, 1e-5),
        (9e-3, 0.001, 1e-2),
        (1e-3, float("nan"), 1e-3),
    ],
)
def test_adaptive_kl_changes_the_learning_rate(rate, divergence, expected):
    """The rate decreases for large and increases for small KL divergences, within its bounds."""
    rate, divergence = torch.tensor(rate, dtype=torch.float64), torch.tensor(divergence)
    assert float(adapted_rate(Schedule.from_text("adaptive_kl"), rate, divergence)) == expected


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        *((name, "lr") for name in ("a2c", "impala", "sac", "td3", "dqn", "es", "bc")),
        *(("ppo", "entropy_coef"), ("ppo", "clip_range"), ("sac", "entropy_coef_lr")),
        *(("sac", "critic_lr"), ("td3", "exploration_noise_stddev"), ("dqn", "epsilon")),
    ],
)
def test_adaptive_kl_of_other_settings_raises(algorithm, key):
    """`adaptive_kl` raises an error for settings other than the learning rate of PPO."""
    place = {"runner.dataset": "there"} if algorithm == "bc" else {"env": "CartPole-v1"}
    told = (
        rf"^algorithm\.{key} = 'adaptive_kl_0\.01': adaptive_kl is only supported for algorithm\.lr"
    )
    with pytest.raises(ConfigError, match=told):
        load_config({**place, "algorithm": algorithm, f"algorithm.{key}": "adaptive_kl"})


def test_schedule_points_are_range_checked():
    """Range checks are applied to each point."""
    check_schedule("lr", Schedule(start=1.0, end=0.0), check_at_least, 0.0)
    with pytest.raises(ConfigError, match=r"^lr = -0.1: expected a number >= 0"):
        check_schedule("lr", Schedule(points=[[0, 1], [0.5, -0.1], [1, 0]]), check_at_least, 0.0)
    with pytest.raises(ConfigError, match=r"^lr = -1.0"):
        check_schedule("lr", -1.0, check_at_least, 0.0)
