"""Demonstrations, and buffers that there is no memory for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import own_parts
import pytest
from short_runs import settings, short_run

from maze_train import Statistics, TrainerServices, load_config, train
from maze_train.errors import ConfigError
from maze_train.runners.factory import build_runner

if TYPE_CHECKING:
    from pathlib import Path


def test_a_demonstration_that_is_cut_is_not_joined_with_the_run(tmp_path: Path) -> None:
    """Nine steps fill two columns of five rows: the second episode ends in the other column."""
    shown = {"_target_": "own_parts.demonstrations", "n_episodes": 3}
    config = load_config(
        {
            **settings("sac", run_dir=str(tmp_path / "run")),
            "algorithm.initial_demonstration_trajectories": shown,
            "algorithm.n_step_returns": 3,
            "algorithm.gamma": 0.5,
        }
    )
    with build_runner(config) as runner:
        trainer: Any = runner.builder.build(TrainerServices())
        for _ in range(3):
            trainer.update_once(trainer.progress(), Statistics())
        batch = trainer.replay_buffer.sample_batch(3000)
    is_second = (batch.obs == 0.25).all(1)
    assert batch.next_obs[is_second].unique().tolist() == [0.25]
    # Over two steps and over one before the cut, over one after it.
    assert batch.rewards[is_second].unique().tolist() == [101.0, 151.5]


def test_a_run_that_is_continued_has_its_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be gone by then."""
    run_dir = str(tmp_path / "run")
    shown = {"_target_": "own_parts.demonstrations", "n_episodes": 3}
    key = "algorithm.initial_demonstration_trajectories"
    short_run(run_dir, "sac", **{key: shown})
    monkeypatch.delattr(own_parts, "demonstrations")
    assert (
        train(resume=run_dir, total_steps=224, trust=["own_envs", "own_parts"]).summary.env_steps
        == 224
    )


def no_memory(*args: Any, **kwargs: Any) -> None:
    """A buffer that is too large."""
    raise MemoryError("Unable to allocate 1 TiB")


def test_memory_that_is_refused(tmp_path: Path) -> None:
    """An error of the setting, before anything is written."""
    node = {"_target_": "maze_train.UniformReplayBuffer"}
    run_dir = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maze_train.data.replay.UniformReplayBuffer.__init__", no_memory)
        with pytest.raises(
            ConfigError, match=r"replay_buffer_size.*Unable to allocate.*storage=disk"
        ):
            short_run(str(run_dir), "sac", **{"algorithm.replay_buffer": node})
    assert not run_dir.exists()
