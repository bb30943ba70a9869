"""Every kind of space, each with A2C and PPO: the best return is found, with one set of settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from tiny_problems import ORDERS, QUESTIONS, STEPS

from maze_train import train
from maze_train.distributions.mapping import DEFAULTS, FAMILIES, distribution_for
from maze_train.spaces.describe import flat_spaces
from maze_train.spaces.images import is_image

A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 8, "epoch_length": 50}
PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 64, "batch_size": 128}
BOTH = pytest.mark.parametrize("algorithm", [A2C, PPO], ids=["a2c", "ppo"])

TOLERANCE = 0.15
"""What continuous actions may miss in an episode: 0.05 in each entry."""

BOUNDED = [name for name, order in ORDERS.items() if name in ("Box", "Box, two dimensions")]
FAMILIES_OF_BOUNDED = ["squashed_gaussian", "beta", "truncated_gaussian"]

PAGE = Path(__file__).parents[2] / "docs" / "spaces.md"


def best_return(tmp_path: Path, env: Any, algorithm: dict[str, Any], steps: int, **keys: Any) -> Any:
    """The best mean return of 60 greedy episodes."""
    result = train(
        env=env,
        algorithm={**algorithm, "lr": "linear_0.002"},
        evaluation={"n_episodes": 60, "concurrency": 60},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        total_steps=steps,
        seed=0,
        run_dir=str(tmp_path / "run"),
        **keys,
    )
    return result.best_metric


@pytest.mark.learning
@BOTH
@pytest.mark.parametrize("kind", QUESTIONS)
def test_observations(tmp_path: Path, kind: str, algorithm: dict[str, Any]) -> None:
    """All questions are answered rightly."""
    steps = 5_000 if "image" in kind else 10_000
    assert best_return(tmp_path, QUESTIONS[kind], algorithm, steps) == STEPS


@pytest.mark.learning
@BOTH
@pytest.mark.parametrize("kind", ORDERS)
def test_actions(tmp_path: Path, kind: str, algorithm: dict[str, Any]) -> None:
    """All orders are followed: discrete parts exactly, continuous ones to within 0.05."""
    if is_exact(ORDERS[kind]().action_space):
        assert best_return(tmp_path, ORDERS[kind], algorithm, 10_000) == STEPS
    else:
        assert best_return(tmp_path, ORDERS[kind], algorithm, 30_000) >= STEPS - TOLERANCE


@pytest.mark.learning
@BOTH
@pytest.mark.parametrize("family", ["squashed_gaussian", "truncated_gaussian", "beta"])
def test_families_for_bounded_boxes(tmp_path: Path, family: str, algorithm: dict[str, Any]) -> None:
    """The other families for bounded boxes find the same actions."""
    model = {"distributions": {"Box": family}}
    best = best_return(tmp_path, ORDERS["Box"], algorithm, 30_000, model=model)
    assert best >= STEPS - TOLERANCE


def is_exact(space: spaces.Space[Any]) -> bool:
    """Whether actions are numbers that can be counted."""
    return all(
        not isinstance(leaf, spaces.Box) or leaf.dtype.kind in "iu"
        for leaf in flat_spaces(space).values()
    )
