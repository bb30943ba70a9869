"""Several learners equal one learner up to rounding."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from cases import everyday
from killed_runs import assert_equal_runs, final_state, maze_run, rows_of
from run_cases import FORK, TWO_EPOCHS, algorithm_of, go_on, settings, start, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


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
def test_learners_equal_one_learner_and_resume_exactly(tmp_path, whole, case):
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


def test_command_with_two_learners_leaves_no_process(tmp_path):
    """The command leaves no processes."""
    given = settings("a2c", tmp_path / "run", **learners(2, **TWO_EPOCHS))
    code, output = maze_run(tmp_path / "output", *words(given))
    assert code == 0, output
    assert len(rows_of(tmp_path / "run")) == 2
