"""Settings of IMPALA: what follows from them, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from maze_train import load_config
from maze_train.algorithms.impala.build import ImpalaBuilder
from maze_train.algorithms.impala.config import ImpalaAlgorithmConfig
from maze_train.errors import ConfigError
from maze_train.runners.factory import build_runner


def load(**settings: Any) -> Any:
    """A configuration of IMPALA on CartPole with some settings of the algorithm."""
    own = {f"algorithm.{key}": value for key, value in settings.items()}
    return load_config({"env": "CartPole-v1", "algorithm": "impala", "runner": "dev", **own})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_actors": 0}, r"algorithm\.num_actors = 0: expected a number >= 1"),
        (
            {"num_actors": 3},
            r"algorithm\.num_actors = 3: expected a divisor of runner\.concurrency = 8",
        ),
        ({"num_actors": 16}, r"algorithm\.num_actors = 16: expected a divisor of runner\.conc"),
        ({"actors_batch_size": 0}, r"algorithm\.actors_batch_size = 0: expected a number >= 1"),
        ({"queue_out_of_sync_factor": -0.5}, r"algorithm\.queue_out_of_sync_factor = -0\.5: .*0"),
        (
            {"queue_out_of_sync_factor": 1e7},
            r"algorithm\.queue_out_of_sync_factor = 10000000\.0: .*100",
        ),
        ({"queue_out_of_sync_factor": math.inf}, r"queue_out_of_sync_factor = inf: .*finite"),
        (
            {"queue_out_of_sync_factor": 0.25, "actors_batch_size": 8},
            r"algorithm\.queue_out_of_sync_factor = 0\.25: expected at least 0\.75, .*8 rollouts",
        ),
        ({"broadcast_interval": 0}, r"algorithm\.broadcast_interval = 0: expected a number >= 1"),
        ({"vtrace_clip_rho_threshold": 0.0}, r"algorithm\.vtrace_clip_rho_threshold = 0"),
        ({"vtrace_clip_rho_threshold": -1}, r"algorithm\.vtrace_clip_rho_threshold = -1"),
        ({"vtrace_clip_pg_rho_threshold": 0}, r"algorithm\.vtrace_clip_pg_rho_threshold = 0"),
        ({"vtrace_clip_pg_rho_threshold": math.nan}, r"vtrace_clip_pg_rho_threshold = nan"),
        ({"loss_reduction": "sums"}, r"algorithm\.loss_reduction = 'sums': .*mean.*sum"),
        ({"replay_size": -1}, r"algorithm\.replay_size = -1: expected a number >= 0"),
        ({"replay_proportion": 0.0}, r"algorithm\.replay_proportion = 0\.?0?: expected a number >"),
        (
            {"replay_size": 4, "replay_proportion": 0.2, "actors_batch_size": 2},
            r"algorithm\.replay_proportion = 0\.2: expected at least 1 / actors_batch_size = 0\.5",
        ),
        (
            {"reward_scaling": True},
            r"algorithm\.reward_scaling = True: .*several actors.*expected false .*env\.wrappers",
        ),
        ({"gae_lambda": 1.5}, r"algorithm\.gae_lambda = 1\.5"),
        ({"n_rollout_steps": 0}, r"algorithm\.n_rollout_steps = 0"),
        (
            {"sequence_length": 3, "n_rollout_steps": 8},
            r"algorithm\.sequence_length = 3: expected a divisor of n_rollout_steps=8",
        ),
        (
            {"n_actors": 2},
            r"algorithm\.n_actors = 2: unknown; did you mean algorithm\.num_actors",
        ),
        (
            {"vtrace_clip_rho_treshold": 1.0},
            r"unknown; did you mean algorithm\.vtrace_clip_rho_threshold",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], message: str) -> None:
    """By its key, its value, and what is expected instead."""
    with pytest.raises(ConfigError, match=message):
        load(**settings)


def test_ray_is_refused() -> None:
    """The runners that there are get named."""
    with pytest.raises(ConfigError, match=r"runner = 'ray'"):
        load_config({"env": "CartPole-v1", "algorithm": "impala", "runner": "ray"})


def test_what_is_accepted() -> None:
    """Bounds may be left out, and the queue may hold nothing but what is under way."""
    algorithm = load(
        vtrace_clip_rho_threshold=None, vtrace_clip_pg_rho_threshold=None, loss_reduction="sum"
    ).algorithm
    assert isinstance(algorithm, ImpalaAlgorithmConfig)
    assert algorithm.vtrace_clip_rho_threshold is algorithm.vtrace_clip_pg_rho_threshold is None
    assert load(queue_out_of_sync_factor=0).algorithm.queue_size == 0
    tight = {"queue_out_of_sync_factor": 0.5, "actors_batch_size": 4}
    assert load(**tight).algorithm.queue_size + 2 == 4
    assert load(num_actors=8).algorithm.num_actors == 8


@pytest.mark.parametrize(
    ("batch", "size", "proportion", "expected"),
    [(4, 0, 2.0, 0), (4, 1, 1.0, 4), (4, 9, 0.5, 2), (3, 9, 0.2, 1), (2, 1, 3.0, 6)],
)
def test_replayed_rollouts(batch: int, size: int, proportion: float, expected: int) -> None:
    """As many for each new one as the proportion says; none if none are kept."""
    config = ImpalaAlgorithmConfig(
        actors_batch_size=batch, replay_size=size, replay_proportion=proportion
    )
    assert config.num_replayed == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.0, 0), (0.5, 2), (1.0, 4), (2.5, 10)])
def test_queue_size(factor: float, expected: int) -> None:
    """A multiple of the batch."""
    config = ImpalaAlgorithmConfig(
        num_actors=4, actors_batch_size=4, queue_out_of_sync_factor=factor
    )
    assert config.queue_size == expected


def test_runners() -> None:
    """There is one, whatever the place, and it wants settings of its algorithm."""
    config = {"env": "CartPole-v1", "algorithm": "impala", "seed": 1}
    for runner in ("dev", "local"):
        made = build_runner(load_config({**config, "runner": runner}))
        assert type(made.builder) is ImpalaBuilder
    memory = {"algorithm.sequence_length": 10}
    with pytest.raises(ConfigError, match=r"algorithm\.sequence_length = 10: .*model\.memory"):
        build_runner(load_config({**config, **memory}))
