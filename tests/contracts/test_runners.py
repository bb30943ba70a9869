"""Results are identical on every runner."""

from __future__ import annotations

import pytest
from cases import everyday
from killed_runs import rows_of
from run_cases import FORK, algorithm_of, assert_same_training, go_on, start

from maze_train import train

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
RAY = {"runner": "ray", "runner.cpus_per_worker": 0.5, "runner.placement": "SPREAD"}
RUNNERS = {
    "local": FORK,
    "restarted": {**FORK, "runner.on_worker_failure": "restart"},
    "ray": RAY,
}


def on(case, runner, marker):
    """Return the settings of a case on a runner with two workers; `marker` lets one die."""
    given = {**RUNNERS[runner], "runner.n_workers": 2}
    if algorithm_of(case) == "es":
        given["runner.concurrency"] = 8  # members evaluated in parallel
    if algorithm_of(case) == "bc":
        # Prefetched samples that were not trained on do not count.
        given["algorithm.storage"] = "disk"
    if runner == "restarted":
        marker.touch()
        given["env.wrappers"] = [{"_target_": "own_envs.DiesOnce", "marker": str(marker)}]
    return given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "runner"),
    [
        *everyday(
            4,
            [
                *(("ppo, actors", "local"), ("sac", "restarted"), ("es, more steps", "local")),
                *(("agents: ppo, league", "local"), ("sac, demonstrations", "local")),
                *(("dqn", "local"), ("bc", "local"), ("ppo, memory", "local")),
                *(("td3, hindsight", "local"), ("es, sampled", "local"), ("es, memory", "local")),
                *(("agents: ppo, actors", "local"), ("agents: sac", "local")),
                *(("agents: es, memory", "local"), ("ppo, calls that draw", "local")),
                *(("es, calls", "local"), ("sac, curriculum", "local"), ("ppo, masks", "local")),
                *(("ppo", "restarted"), ("ppo, actors", "restarted")),
                *(("es, normalised", "restarted"), ("dqn", "restarted")),
            ],
            are_rows=True,
        ),
        *(
            pytest.param(case, "ray", marks=[pytest.mark.ray, pytest.mark.exhaustive])
            for case in ("ppo", "ppo, actors", "es", "ppo, calls")
        ),
    ],
)
def test_runs_are_identical_on_every_runner(request, tmp_path, whole, capsys, case, runner):
    """Results with two workers, and resumed without workers, are bit-for-bit identical.

    IMPALA is reproducible in one process only.
    """
    if runner == "ray":
        request.getfixturevalue("ray_cluster")
    run_dir, marker = tmp_path / "run", tmp_path / "marker"
    start(case, run_dir, **on(case, runner, marker))
    assert not marker.exists(), "no worker died"
    assert_same_training(run_dir, whole(case))
    assert "new episodes" not in capsys.readouterr().err
    if runner == "local":
        go_on(resume=run_dir / "checkpoints" / "epoch_000002", runner="dev")
        assert_same_training(run_dir, whole(case))
        assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", everyday(1, ["es", "ppo", "a2c", "sac", "td3", "dqn"]))
def test_default_settings_give_identical_metrics_for_any_number_of_workers(tmp_path, algorithm):
    """An epoch with the defaults of an algorithm, such as its number of environments."""
    has_boxes = algorithm in ("sac", "td3")
    limit = {"algorithm.n_epochs": 1} if algorithm == "es" else {"total_steps": 1100}
    quiet = {"tracking.progress": "quiet", "tracking.plot": False, "tracking.tensorboard": False}
    expected = None
    for n_workers in (0, 1, 2, 3):
        runner = {**FORK, "runner.n_workers": n_workers} if n_workers else {"runner": "dev"}
        run_dir = tmp_path / str(n_workers)
        env = "Pendulum-v1" if has_boxes else "CartPole-v1"
        train(env, algorithm, seed=6, run_dir=run_dir, **runner, **limit, **quiet)
        expected = expected or rows_of(run_dir)
        assert rows_of(run_dir) == expected, f"runner.n_workers = {n_workers}"
