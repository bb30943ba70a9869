"""Whole runs with several learners: the metrics of one, exact continuation, what is refused."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from cases import everyday
from continued_runs import CASES, FORK, TWO_EPOCHS, go_on, settings, start, words
from killed_runs import assert_equal_runs, final_state, maze_run, rows_of

from maze_train.core.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("has_connected", "no_file_is_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
CHOSEN = ("ppo, normalised", "sac, prioritised", "bc")
OTHERS = [
    case for case in CASES if case.partition(",")[0] not in ("es", "impala") and case not in CHOSEN
]


def learners(count, **others):
    """So many learners; next to workers that are forked, unless something else is said."""
    return {**FORK, "runner.n_workers": 1, "learner_group.n_learners": count, **others}


def weights_of(run_dir):
    """All weights at the end, as one vector."""
    modules = final_state(run_dir)["learners"]["learner"]["modules"]["default"]
    return np.concatenate([value.double().numpy().ravel() for value in modules.values()])


def assert_nearly_equal(run_dir, other):
    """Five digits of all metrics, and six of the weights."""
    rows, others = rows_of(run_dir), rows_of(other)
    assert len(rows) == len(others) >= 3
    for row, wanted in zip(rows, others, strict=True):
        assert list(row) == list(wanted)
        for key, cell in wanted.items():
            if row[key] != cell and key != "train/rho_clip_fraction":  # of 1 but for rounding
                assert float(row[key]) == pytest.approx(float(cell), rel=1e-5, abs=1e-6), key
    np.testing.assert_allclose(weights_of(run_dir), weights_of(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", everyday(3, [*CHOSEN, *OTHERS]))
def test_metrics_of_one_learner(tmp_path, case):
    """Also with a checkpoint of two in between, continued by one, and by three."""
    start(case, tmp_path / "one")
    start(case, tmp_path / "two", **learners(2))
    assert_nearly_equal(tmp_path / "two", tmp_path / "one")
    for count in (1, 3) if case == CHOSEN[0] else ():
        run_dir = shutil.copytree(tmp_path / "two", tmp_path / f"then{count}")
        go_on(resume=run_dir / "checkpoints" / "epoch_000002", **learners(count))
        assert_nearly_equal(run_dir, tmp_path / "one")


@pytest.mark.parametrize(
    "case", everyday(1, [case for case in CASES if case.startswith("impala")][-1::-1])
)
def test_impala_in_one_process_but_for_its_learners(tmp_path, case):
    """Learners are processes with runner=dev, too."""
    start(case, tmp_path / "one")
    start(case, tmp_path / "two", **{"learner_group.n_learners": 2})
    assert_nearly_equal(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize("case", everyday(2, [*CHOSEN[:2], "td3", "dqn, all options", "bc"]))
def test_two_learners_go_on_exactly(tmp_path, case):
    """As if the run had not been interrupted, to the bit."""
    start(case, tmp_path / "whole", **learners(2))
    run_dir = shutil.copytree(tmp_path / "whole", tmp_path / "run")
    go_on(resume=run_dir / "checkpoints" / "epoch_000002")
    assert_equal_runs(run_dir, tmp_path / "whole")


def test_the_command_with_two_learners(tmp_path):
    """A run of the command leaves no process."""
    given = settings("a2c", tmp_path / "run", **learners(2, **TWO_EPOCHS))
    code, output = maze_run(tmp_path / "output", *words(given))
    assert code == 0, output
    assert len(rows_of(tmp_path / "run")) == 2


def test_evolution_strategies_have_one_learner(tmp_path):
    """The error says what to set."""
    with pytest.raises(ConfigError, match=r"learner_group.n_learners = 2: es needs one learner"):
        start("es", tmp_path / "run", **learners(2))
