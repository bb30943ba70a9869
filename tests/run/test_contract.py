"""Properties of every run, tested for a table of cases."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
from cases import everyday
from killed_runs import assert_equal_runs, final_state, maze_run, rows_of
from run_cases import (
    CASES,
    FORK,
    FOUR_EPOCHS,
    ONE_EPOCH,
    OWN,
    TWO_EPOCHS,
    algorithm_of,
    assert_same_training,
    go_on,
    parts_of,
    settings,
    start,
    words,
)

from maze_train import load_policy, run_rollout, train
from maze_train.training.outcome import Interrupted, Interruption

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
NO_LIMIT = {"algorithm.n_epochs": 0}


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Return a function that runs a case once, uninterrupted, and returns its directory."""
    made = {}

    def run_of(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("whole") / "run"
            start(case, made[case])
        return made[case]

    return run_of


# -- a continued run is the same run -------------------------------------------------------------


OFTEN = [
    *("ppo, changes", "ppo, memory", "sac, prioritised", "impala, replay", "agents: ppo, league"),
]


@pytest.mark.parametrize("case", everyday(len(OFTEN), dict.fromkeys([*OFTEN, *CASES])))
def test_from_each_checkpoint(tmp_path, whole, capsys, case):
    """Runs resumed from any checkpoint equal an uninterrupted run."""
    run = whole(case)
    epochs = len(rows_of(run))
    steps = json.loads((run / "summary.json").read_text())["env_steps"]
    assert epochs >= 3
    last = f"checkpoints/epoch_{epochs:06d}"
    has_parts = algorithm_of(case) in ("sac", "td3", "dqn") or "replay" in case
    assert bool(parts_of(run / last)) == has_parts
    for epoch in range(1, epochs):
        run_dir = shutil.copytree(run, tmp_path / f"run{epoch}")
        result = go_on(resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
        assert result.summary.env_steps == steps
        assert_equal_runs(run_dir, run)
        newest = (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        assert parts_of(run_dir / "checkpoints" / newest).keys() == parts_of(run / last).keys()
    assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "short", "long"),
    everyday(
        2,
        [
            ("dqn", {"total_steps": 128}, {"total_steps": 256}),
            # With the smaller limit, the buffer has a smaller capacity.
            ("sac, large buffer", {"total_steps": 128}, {"total_steps": 256}),
            ("impala, replay", {"total_steps": 288}, {"total_steps": 576}),
            ("es, sampled", TWO_EPOCHS, FOUR_EPOCHS),
            ("bc", TWO_EPOCHS, FOUR_EPOCHS),
        ],
        are_rows=True,
    ),
)
def test_a_finished_run_is_extended(tmp_path, whole, case, short, long):
    """An extended run equals a run with the larger limit."""
    start(case, tmp_path / "run", **short)
    go_on(resume=tmp_path / "run", **long)
    assert_equal_runs(tmp_path / "run", whole(case))


@pytest.mark.parametrize(
    "case", everyday(1, ["sac, demonstrations", "impala, normalised", "es, more steps"])
)
def test_before_the_first_checkpoint_a_run_begins_again(tmp_path, whole, case):
    """Without a checkpoint, the run starts again, including demonstrations."""
    start(case, tmp_path / "run", **ONE_EPOCH)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    go_on(resume=tmp_path / "run", **(FOUR_EPOCHS if "es" in case else NO_LIMIT))
    assert_equal_runs(tmp_path / "run", whole(case))


@pytest.mark.parametrize(
    "case", everyday(1, ["ppo", "es, normalised", "sac", "impala, replay", "bc"])
)
def test_a_signal_at_any_update(tmp_path, monkeypatch, case):
    """The checkpoint contains the previous update, also within an epoch."""
    check, calls, stop_at = Interruption.check, [], -1

    def noted(self: Interruption) -> None:
        calls.append(None)
        if len(calls) == stop_at:
            raise Interrupted(signal.SIGINT)
        check(self)

    monkeypatch.setattr(Interruption, "check", noted)
    all_updates = start(case, tmp_path / "straight").summary.updates
    found, total = [], len(calls)
    for share in (0.35, 0.5, 0.8):
        calls.clear()
        stop_at, run_dir = int(share * total), tmp_path / f"run{share}"
        with pytest.raises(Interrupted) as stop:
            start(case, run_dir)
        stop_at = -1
        found.append(json.loads((run_dir / "summary.json").read_text())["updates"])
        assert stop.value.checkpoint is not None
        assert stop.value.checkpoint.is_dir()
        go_on(resume=run_dir)
        assert_same_training(run_dir, tmp_path / "straight")
    assert 0 < found[0] < found[1] < found[2] < all_updates


# -- where a run takes place makes no difference -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    everyday(
        3,
        [
            *("ppo, actors", "sac, demonstrations", "es, more steps", "dqn", "agents: ppo, league"),
            *("bc", "ppo, memory", "td3, hindsight", "es, sampled", "es, memory"),
            *("agents: ppo, actors", "agents: sac", "agents: es, memory"),
        ],
    ),
)
def test_processes_change_no_number(tmp_path, whole, capsys, case):
    """Results with two workers, and resumed without workers, are bit-for-bit identical.

    IMPALA is reproducible in one process only.
    """
    workers = {**FORK, "runner.n_workers": 2}
    if algorithm_of(case) == "es":
        workers["runner.concurrency"] = 8  # members evaluated in parallel
    if algorithm_of(case) == "bc":
        # Prefetched samples that were not trained on do not count.
        workers["algorithm.storage"] = "disk"
    run_dir = tmp_path / "run"
    start(case, run_dir, **workers)
    assert_same_training(run_dir, whole(case))
    go_on(resume=run_dir / "checkpoints" / "epoch_000002", runner="dev")
    assert_same_training(run_dir, whole(case))
    assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", everyday(1, ["es", "ppo", "a2c", "sac", "td3", "dqn"]))
def test_default_settings_give_equal_metrics_for_any_number_of_workers(tmp_path, algorithm):
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


# -- several learners have the numbers of one ----------------------------------------------------


def learners(count, **others):
    """Return settings with `count` learners, by default next to forked workers."""
    return {**FORK, "runner.n_workers": 1, "learner_group.n_learners": count, **others}


def weights_of(run_dir):
    """Return all final weights as one vector."""
    modules = final_state(run_dir)["learners"]["learner"]["modules"].values()
    found = [value.double().numpy().ravel() for state in modules for value in state.values()]
    return np.concatenate(found)


def assert_nearly_equal(run_dir, other):
    """Assert that metrics agree to five digits and weights to six."""
    rows, others = rows_of(run_dir), rows_of(other)
    assert len(rows) == len(others) >= 3
    for row, wanted in zip(rows, others, strict=True):
        assert list(row) == list(wanted)
        for key, cell in wanted.items():
            if row[key] != cell and key != "train/rho_clip_fraction":  # 1 up to rounding
                assert float(row[key]) == pytest.approx(float(cell), rel=1e-5, abs=1e-6), key
    np.testing.assert_allclose(weights_of(run_dir), weights_of(other), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("has_connected", "no_file_is_left")
@pytest.mark.parametrize(
    "case",
    everyday(
        1,
        [
            *("sac, prioritised", "ppo, normalised", "impala, replay", "agents: sac"),
        ],
    ),
)
def test_metrics_of_one_learner(tmp_path, whole, case):
    """Two learners match one up to rounding, and resume exactly."""
    one = whole(case)
    is_impala = algorithm_of(case) == "impala"
    group = {"learner_group.n_learners": 2} if is_impala else learners(2)
    start(case, tmp_path / "two", **group)
    assert_nearly_equal(tmp_path / "two", one)
    counts = (1, 2, 3) if case == "ppo, normalised" else () if is_impala else (2,)
    for count in counts:
        run_dir = shutil.copytree(tmp_path / "two", tmp_path / f"then{count}")
        go_on(resume=run_dir / "checkpoints" / "epoch_000002", **learners(count))
        assert_nearly_equal(run_dir, one)
        if count == 2:
            assert_equal_runs(run_dir, tmp_path / "two")


@pytest.mark.slow
def test_the_command_with_two_learners(tmp_path):
    """The command leaves no processes."""
    given = settings("a2c", tmp_path / "run", **learners(2, **TWO_EPOCHS))
    code, output = maze_run(tmp_path / "output", *words(given))
    assert code == 0, output
    assert len(rows_of(tmp_path / "run")) == 2


# -- what was saved acts, and a trial is a run ---------------------------------------------------


@pytest.mark.parametrize(
    "case",
    everyday(
        4,
        [
            *("ppo, memory", "impala, replay", "es, more steps", "agents: ppo, league"),
            *("td3, several boxes", "dqn", "bc", "es, wrapped", "es, memory"),
            *("agents: ppo, centralised", "agents: td3", "agents: ppo, random foe"),
        ],
    ),
)
def test_a_saved_policy_plays(whole, case):
    """The best and the final policy play whole episodes with reset states."""
    run = whole(case)
    given = {"env": "CartPole-v1"} if case.startswith("bc") else {}
    for policy in (run, f"{run}@final"):
        load_policy(policy, OWN)
        found = [
            run_rollout(run=policy, n_episodes=2, progress="quiet", trust=OWN, **given).episodes
            for _ in range(2)
        ]
        assert len(found[0]) == 2
        assert [x.episode_return for x in found[0]] == [x.episode_return for x in found[1]]
        assert all(episode.length > 0 for episode in found[0])


@pytest.mark.parametrize(
    "case",
    everyday(
        2,
        [
            *("impala, replay", "agents: sac", "es, memory", "agents: ppo, league", "agents: es"),
            *("td3", "dqn", "agents: ppo, memory", "agents: bc"),
        ],
    ),
)
def test_a_trial_is_a_run(tmp_path, case):
    """A dry run learns and evaluates in one epoch, with a complete directory."""
    result = start(case, tmp_path / "run", **{"runner.fast_dev_run": True})
    (row,) = result.history
    assert "train/gradient_steps" in row
    assert np.isfinite(result.summary.best_metric)
    load_policy(tmp_path / "run", OWN)
