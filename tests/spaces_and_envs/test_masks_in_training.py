"""Action masks: what is forbidden is never tried, so what is right is found sooner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tiny_problems import Doors

from maze_train import train
from maze_train.errors import MazeTrainError

if TYPE_CHECKING:
    from pathlib import Path

PPO: dict[str, Any] = {"name": "ppo", "n_rollout_steps": 32, "batch_size": 128, "epoch_length": 2}
A2C: dict[str, Any] = {"name": "a2c", "n_rollout_steps": 8, "epoch_length": 8}
BOTH = pytest.mark.parametrize("algorithm", [A2C, PPO], ids=["a2c", "ppo"])

BEST = Doors.ROOMS


def learn(tmp_path: Path, env: Any, algorithm: dict[str, Any], steps: int) -> Any:
    """Train with frequent evaluations."""
    return train(
        env=env,
        algorithm={**algorithm, "lr": 3e-3},
        evaluation={"n_episodes": 1},
        tracking={"progress": "quiet", "plot": False, "tensorboard": False},
        total_steps=steps,
        seed=0,
        run_dir=str(tmp_path / "run"),
    )


def steps_to(result: Any, wanted: float) -> int:
    """Steps of training before the first evaluation that brought the wanted return."""
    rows = [row for row in result.history if row["eval/episode_return_mean"] == wanted]
    return int(rows[0]["env_steps"])


@pytest.mark.learning
@BOTH
def test_a_mask_is_obeyed_and_saves_steps(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """100 000 sampled actions, none of them illegal; the optimum comes sooner than without mask."""
    masked = learn(tmp_path / "masked", Doors, algorithm, 100_000)
    assert masked.summary.env_steps >= 100_000
    hidden = learn(tmp_path / "hidden", lambda: Doors(shows_mask=False), algorithm, 40_000)
    assert 2 * steps_to(masked, BEST) <= steps_to(hidden, BEST)


@BOTH
def test_an_observation_without_legal_action_is_an_error(
    tmp_path: Path, algorithm: dict[str, Any]
) -> None:
    """The error names the step."""
    with pytest.raises(MazeTrainError, match=r"step 3 of the episode.*no action is legal"):
        learn(tmp_path, lambda: Doors(locked_after=3), algorithm, 1_000)
