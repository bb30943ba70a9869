"""Notes at the start of a run, and the extent of a dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces
from own_envs import SpacesEnv, newest
from short_runs import QUIET

from maze_train import load_config, train
from maze_train.run.notes import TimeLimitNote, start_notes
from maze_train.tracking.tracker import RunInfo
from maze_train.training.config import DRY_RUN_STEPS, TRIAL_BATCH

if TYPE_CHECKING:
    from pathlib import Path

MASKED = {"env.wrappers": [{"_target_": "maze_train.ActionMaskWrapper"}]}


class MaskedTuple(gymnasium.Env[Any, Any]):
    """Environment with masks in its infos, for two discrete actions."""

    observation_space = spaces.Dict(place=spaces.Discrete(3))
    action_space = spaces.MultiDiscrete([2, 3])
    mask: Any = ([0, 1], [1, 0, 0])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Start an episode."""
        super().reset(seed=seed)
        return {"place": 0}, self.info

    def step(self, action: Any) -> Any:
        """Assert that the action is legal."""
        assert action.tolist() == [1, 0]
        return {"place": 1}, 1.0, False, False, self.info

    @property
    def info(self) -> dict[str, Any]:
        """Return the info with the mask."""
        return {} if self.mask is None else {"action_mask": np.concatenate(self.mask)}


@pytest.mark.parametrize(
    ("algorithm", "key", "most"),
    [
        ("sac", "batch_size", TRIAL_BATCH),
        ("bc", "batch_size", TRIAL_BATCH),
        ("ppo", "n_optimization_epochs", DRY_RUN_STEPS),
        ("impala", "actors_batch_size", 2),
    ],
)
def test_fast_dev_run_limits_every_setting(algorithm: str, key: str, most: int) -> None:
    """A dry run is short regardless of the settings of an update."""
    settings = {"runner.fast_dev_run": True, f"algorithm.{key}": 65536}
    data = {"runner.dataset": "data"} if algorithm == "bc" else {}
    config = load_config({"algorithm": algorithm, "env": "Pendulum-v1", **settings, **data})
    assert getattr(config.shortened().algorithm, key) == most


@pytest.mark.parametrize("algorithm", everyday(1, ["es", "ppo"]))
def test_unused_mask_is_noted_once(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note about unused masks is printed once per run."""
    for number, more in enumerate(({}, {}, MASKED)):
        settings = {"run_dir": tmp_path / str(number), "runner.fast_dev_run": True, **QUIET, **more}
        train(newest("Taxi"), algorithm, seed=0, **settings)
        told = capsys.readouterr().err
        assert told.count("maze_train.ActionMaskWrapper") == (0 if more else 1)


def test_mask_wrapper_supports_several_choices(tmp_path: Path) -> None:
    """The wrapper adds the mask to a Dict; only legal actions are taken."""
    settings = {"runner.fast_dev_run": True, "algorithm.gamma": 0.5, **QUIET, **MASKED}
    result = train(MaskedTuple, "sac", run_dir=tmp_path / "run", seed=0, **settings)
    assert result.best_metric == DRY_RUN_STEPS


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mask": None}, "info has no 'action_mask'"),
        ({"mask": ([1], [1])}, "has 2 entries, expected 5"),
        ({"action_space": spaces.Box(0, 1)}, "has no Discrete or MultiDiscrete part"),
        ({"observation_space": spaces.Dict(action_mask=spaces.MultiBinary(5))}, "already"),
    ],
)
def test_invalid_masks_raise(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Invalid masks raise an error."""
    env = type("Odd", (MaskedTuple,), changes)
    with pytest.raises(Exception, match=problem):
        train(env, "ppo", run_dir=tmp_path / "run", **QUIET, **MASKED)


def notes(env: Any, space: spaces.Space[Any] | None = None, **changes: Any) -> list[str]:
    """Return the notes at the start of a run."""
    config = load_config({"env": env, "algorithm": "ppo", **changes})
    return list(start_notes(config, space or spaces.Box(-1, 1, (3,))))


@pytest.mark.parametrize(
    ("env", "changes", "is_lacking"),
    [
        (newest("CliffWalking"), {}, True),
        (newest("CliffWalking"), {"env.max_episode_steps": 50}, False),
        ("CartPole-v1", {}, False),
        ("ALE/Pong-v5", {}, False),
        (SpacesEnv, {}, True),
        (lambda: gymnasium.make("CartPole-v1"), {}, False),
        (
            SpacesEnv,
            {"env.wrappers": [{"_target_": "gymnasium.wrappers.TimeLimit", "n": 5}]},
            False,
        ),
    ],
)
def test_missing_time_limit_is_noted(env: Any, changes: dict[str, Any], is_lacking: bool) -> None:
    """A note is printed if no episode ended in the first epoch.

    It is not printed if a time limit applies in training.
    """
    row = {"env_steps": 4_096.0}
    assert len(told_after(row, env, **changes)) == is_lacking
    assert not told_after({**row, "train/episodes": 3.0}, env, **changes)
    if is_lacking:
        (found,) = told_after(row, env)
        assert "no episode ended in the first 4,096 steps" in found
        assert "evaluation truncates it after 30,000 steps" in found
        (found,) = told_after(row, env, **{"evaluation.n_episodes": 0})
        assert "evaluation" not in found


def told_after(row: dict[str, float], env: Any, **changes: Any) -> list[str]:
    """Return the notes after the first epoch; the second one adds none."""
    found: list[str] = []
    note = TimeLimitNote(load_config({"env": env, "algorithm": "ppo", **changes}), found.append)
    note.start(RunInfo())
    note.write(row)
    note.write(row)
    return found


@pytest.mark.parametrize(
    ("space", "changes", "told"),
    [
        (spaces.Box(0, 1, (64, 64, 3), np.float32), {}, "flattened to 12,288 inputs"),
        (spaces.Box(0, 1, (64, 64, 3), np.float32), {"model.image_encoder": "flat"}, ""),
        (spaces.Box(0, 255, (64, 64, 3), np.uint8), {}, ""),
        (spaces.Box(0, 1, (5, 3, 2), np.float32), {}, ""),
        (
            spaces.Dict({f"wolf_{i}": spaces.Box(0, 1, (64, 64, 3)) for i in range(5)}),
            {},
            "the observation 'wolf_0' (and 4 others) has the shape (64, 64, 3) of an image",
        ),
    ],
)
def test_float_images_are_noted(
    space: spaces.Space[Any], changes: dict[str, Any], told: str
) -> None:
    """A note is printed for images that no convolution reads because of their dtype."""
    found = notes("CartPole-v1", space, **changes)
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_start_notes_are_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Notes are printed after the first epoch, and not again on resume."""
    settings = {"algorithm.n_rollout_steps": 32, "algorithm.epoch_length": 1, **QUIET}
    settings |= {"evaluation.n_episodes": 0}
    run = tmp_path / "run"
    train(newest("CliffWalking"), "ppo", total_steps=256, run_dir=run, seed=0, **settings)
    assert capsys.readouterr().err.count("no episode ended") == 1
    train(resume=str(run), total_steps=512)
    assert "no episode ended" not in capsys.readouterr().err
    SpacesEnv.open_envs = 0
