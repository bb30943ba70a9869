"""The contract of every algorithm: a continued run gives the numbers of one that never stopped."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from cases import everyday
from continued_runs import (
    CASES,
    FORK,
    FOUR_EPOCHS,
    LOCAL,
    ONE_EPOCH,
    TWO_EPOCHS,
    assert_same_training,
    go_on,
    parts_of,
    start,
)
from killed_runs import assert_equal_runs, rows_of

from maze_train.training.outcome import Interrupted, Interruption

NO_LIMIT = {"algorithm.n_epochs": 0}


EVERYDAY = (
    "ppo", "ppo, memory", "ppo, actors", "sac, prioritised", "sac, demonstrations", "td3", "dqn",
    "impala, replay", "es, more steps", "bc",
)  # fmt: skip


@pytest.mark.parametrize("case", everyday(10, sorted(CASES, key=lambda case: case not in EVERYDAY)))
def test_from_each_checkpoint(tmp_path, capsys, case):
    """As if the run had not been interrupted; no episode is new, large pieces are the same."""
    whole = tmp_path / "whole"
    steps = start(case, whole).summary.env_steps
    epochs = len(rows_of(whole))
    assert epochs >= 3
    last = f"checkpoints/epoch_{epochs:06d}"
    assert bool(parts_of(whole / last)) == (
        case.startswith(("sac", "td3", "dqn")) or "replay" in case
    )
    for epoch in range(1, epochs):
        run_dir = shutil.copytree(whole, tmp_path / f"run{epoch}")
        result = go_on(resume=run_dir / "checkpoints" / f"epoch_{epoch:06d}")
        assert result.summary.env_steps == steps
        assert_equal_runs(run_dir, whole)
        newest = (run_dir / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        assert parts_of(run_dir / "checkpoints" / newest).keys() == parts_of(whole / last).keys()
    assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("case", "short", "long"),
    [
        ("dqn", {"total_steps": 128}, {"total_steps": 256}),
        # In the first part the buffer has room for the steps of that part only.
        ("sac, large buffer", {"total_steps": 128}, {"total_steps": 256}),
        ("impala, replay", {"total_steps": 288}, {"total_steps": 576}),
        ("es, sampled", TWO_EPOCHS, FOUR_EPOCHS),
        ("bc", TWO_EPOCHS, FOUR_EPOCHS),
    ],
)
def test_a_finished_run_is_extended(tmp_path, case, short, long):
    """With more to do it continues as a run that had as much from the beginning."""
    start(case, tmp_path / "whole")
    start(case, tmp_path / "run", **short)
    go_on(resume=tmp_path / "run", **long)
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("case", ["sac, demonstrations", "impala, normalised", "es, more steps"])
def test_before_the_first_checkpoint_a_run_begins_again(tmp_path, case):
    """With all that it began with, demonstrations included."""
    start(case, tmp_path / "whole")
    start(case, tmp_path / "run", **ONE_EPOCH)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    go_on(resume=tmp_path / "run", **(FOUR_EPOCHS if "es" in case else NO_LIMIT))
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


ON_DISK = {**LOCAL, "algorithm.storage": "disk"}


@pytest.mark.parametrize(
    ("case", "places"),
    [
        ("ppo", [{}, LOCAL, {"runner": "dev"}]),
        pytest.param("ppo, actors", [LOCAL, {"runner": "dev"}, FORK], marks=pytest.mark.slow),
        pytest.param("sac", [LOCAL, {"runner": "dev"}, LOCAL], marks=pytest.mark.slow),
        ("es, more steps", [{}, {**FORK, "runner.n_workers": 3}, {"runner": "dev"}]),
        # Threads that read ahead have read more than was learned from: that does not count.
        ("bc", [{}, ON_DISK, {"runner": "dev"}]),
        ("bc", [ON_DISK, {"runner": "dev"}, ON_DISK]),
    ],
)
def test_dev_to_local_and_back(tmp_path, capsys, case, places):
    """Where a run takes place makes no difference, nor do the numbers of workers."""
    start(case, tmp_path / "whole")
    start(case, tmp_path / "run", **{**places[0], **ONE_EPOCH})
    go_on(resume=tmp_path / "run", **places[1], **TWO_EPOCHS)
    go_on(resume=tmp_path / "run", **places[2], **FOUR_EPOCHS)
    assert_same_training(tmp_path / "run", tmp_path / "whole")
    assert "new episodes" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "case", ["ppo", "sac", "impala, replay", "es, normalised", "es, more steps", "bc"]
)
def test_a_signal_at_any_update(tmp_path, monkeypatch, case):
    """The checkpoint is that of the update before, also within an epoch or iteration."""
    check, calls, stop_at = Interruption.check, [], -1

    def noted(self: Interruption) -> None:
        calls.append(None)
        if len(calls) == stop_at:
            raise Interrupted(signal.SIGINT)
        check(self)

    monkeypatch.setattr(Interruption, "check", noted)
    all_updates = start(case, tmp_path / "whole").summary.updates
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
        assert_same_training(run_dir, tmp_path / "whole")
    assert 0 < found[0] < found[1] < found[2] < all_updates
