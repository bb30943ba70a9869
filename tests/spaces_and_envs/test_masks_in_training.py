"""Action masks: what is forbidden is never tried, so what is right is found sooner."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tiny_problems import Doors, HeavyDoors, learn

from maze_train.core.errors import MazeTrainError

if TYPE_CHECKING:
    from pathlib import Path

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 32, "batch_size": 128, "epoch_length": 2}
PPO["n_optimization_epochs"] = 4

BEST = Doors.ROOMS


def trained(tmp_path: Path, env: Any, algorithm: dict[str, Any], steps: int) -> Any:
    """Train with an evaluation every 512 steps; one episode tells all, as nothing is random."""
    return learn(tmp_path, env, {**algorithm, "lr": 1e-3, "entropy_coef": 0.02}, steps, 1)


def steps_to_best(result: Any) -> float:
    """Steps of training before the first evaluation that brought the best return; inf: never."""
    rows = [row for row in result.history if row["eval/episode_return_mean"] == BEST]
    return rows[0]["env_steps"] if rows else math.inf


@pytest.mark.learning
@pytest.mark.exhaustive
def test_a_mask_is_obeyed_and_saves_steps(tmp_path: Path) -> None:
    """No sampled action is illegal, which would be an error; the optimum comes sooner."""
    masked = trained(tmp_path / "masked", HeavyDoors, PPO, 20_000)
    assert masked.summary.env_steps >= 20_000
    sooner = steps_to_best(masked)
    assert sooner < 10_000
    hide = partial(HeavyDoors, shows_mask=False)
    hidden = trained(tmp_path / "hidden", hide, PPO, 2 * int(sooner))
    assert steps_to_best(hidden) >= 2 * sooner


def test_an_observation_without_legal_action_is_an_error(tmp_path: Path) -> None:
    """The error names the step. After the end of an episode no action need be legal."""
    with pytest.raises(MazeTrainError, match=r"step 3 of the episode.*no action is legal"):
        trained(tmp_path, lambda: Doors(locked_after=3), PPO, 1_000)
