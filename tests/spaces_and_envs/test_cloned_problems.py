"""Behavioral cloning of who knows the answers, on a problem for every kind of space."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from cases import everyday
from test_tiny_problems import ORDERS, QUESTIONS, TOLERANCE, is_exact, right_action
from tiny_problems import STEPS

sys.path.insert(0, str(Path(__file__).parents[1] / "runners"))
from recorded import record

from maze_train import train

EPISODES = 200

CASES = [(kind, "nll") for kind in ORDERS]
CASES += [(kind, "mse") for kind in ORDERS if not is_exact(ORDERS[kind]().action_space)]


def cloned_return(tmp_path: Path, make: Any, **changes: Any) -> float:
    """Best return of evaluations of a policy that learned from right actions."""
    env = make()
    record(tmp_path / "data", env, lambda _: right_action(env), EPISODES)
    given: dict[str, Any] = {
        "runner.dataset": tmp_path / "data",
        "run_dir": tmp_path / "run",
        "algorithm.n_epochs": 24,
        "algorithm.batch_size": 32,
        "algorithm.lr": 0.003,
        "evaluation.n_episodes": 40,
        "evaluation.interval": 12,
        "model.hidden_sizes": [32],
        "seed": 1,
        "tracking.progress": "quiet",
        "tracking.plot": False,
        "tracking.tensorboard": False,
    }
    return float(train(env=make, algorithm="bc", **{**given, **changes}).best_metric)


@pytest.mark.learning
@pytest.mark.parametrize("kind", everyday(1, QUESTIONS))
def test_observations_of_a_clone(tmp_path: Path, kind: str) -> None:
    """All questions are answered rightly, also those that were not recorded."""
    assert cloned_return(tmp_path, QUESTIONS[kind]) == STEPS


@pytest.mark.learning
@pytest.mark.parametrize("case", everyday(1, CASES), ids="-".join)
def test_actions_of_a_clone(tmp_path: Path, case: tuple[str, str]) -> None:
    """All orders are followed: discrete parts exactly, continuous ones to within 0.1."""
    kind, box_loss = case
    exact = is_exact(ORDERS[kind]().action_space)
    best = cloned_return(tmp_path, ORDERS[kind], **{"algorithm.box_loss": box_loss})
    assert best >= (STEPS if exact else STEPS - TOLERANCE)
