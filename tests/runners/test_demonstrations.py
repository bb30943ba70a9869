from __future__ import annotations

from typing import TYPE_CHECKING, Any

from short_runs import settings

from maze_train import Statistics, Tracker, load_config
from maze_train.runners.factory import build_runner
from maze_train.tracking.rows import RunInfo

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
        trainer: Any = runner.build_trainer(runner.build_model(), tracker=Tracker([], RunInfo()))
        for _ in range(3):
            trainer.update_once(trainer.progress(), Statistics())
        batch = trainer.replay_buffer.sample_batch(3000)
    is_second = (batch.obs == 0.25).all(1)
    assert batch.next_obs[is_second].unique().tolist() == [0.25]
    # Over two steps and over one before the cut, over one after it.
    assert batch.rewards[is_second].unique().tolist() == [101.0, 151.5]
