"""Runs that were stopped, killed or extended equal uninterrupted runs."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from cases import everyday
from killed_runs import CALLS, MOMENTS, assert_equal_runs, rows_of, run_in_child
from run_cases import (
    CASES,
    FOUR_EPOCHS,
    LOCAL,
    ONE_EPOCH,
    TWO_EPOCHS,
    algorithm_of,
    assert_same_training,
    go_on,
    parts_of,
    settings,
    start,
)

from maze_train.core.signals import Interrupted, Interruption

NO_LIMIT = {"algorithm.n_epochs": 0}
OFTEN = [
    *("ppo, changes", "ppo, memory", "sac, prioritised", "impala, replay", "agents: ppo, league"),
    "ppo, calls",
    "ppo, curriculum",
]


@pytest.mark.parametrize("case", everyday(len(OFTEN), dict.fromkeys([*OFTEN, *CASES])))
def test_run_resumed_from_any_checkpoint_equals_uninterrupted_run(tmp_path, whole, capsys, case):
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
def test_extended_run_equals_longer_run(tmp_path, whole, case, short, long):
    """An extended run equals a run with the larger limit."""
    start(case, tmp_path / "run", **short)
    go_on(resume=tmp_path / "run", **long)
    assert_equal_runs(tmp_path / "run", whole(case))


@pytest.mark.parametrize(
    "case", everyday(1, ["sac, demonstrations", "impala, normalised", "es, more steps"])
)
def test_run_without_checkpoint_starts_again(tmp_path, whole, case):
    """Without a checkpoint, the run starts again, including demonstrations."""
    start(case, tmp_path / "run", **ONE_EPOCH)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    go_on(resume=tmp_path / "run", **(FOUR_EPOCHS if "es" in case else NO_LIMIT))
    assert_equal_runs(tmp_path / "run", whole(case))


@pytest.mark.parametrize(
    "case", everyday(1, ["ppo", "es, normalised", "sac", "impala, replay", "bc"])
)
def test_run_interrupted_at_any_update_resumes_exactly(tmp_path, monkeypatch, case):
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


SAMPLING = [moment for moment in MOMENTS if moment != "playing"]
PHASES = {
    "ppo, changes": ["update", "saving"],
    "ppo, actors": ["rollout", "update", "renaming"],
    "ppo, memory": SAMPLING,
    "ppo, normalised": ["update", "saving"],
    "sac, disk": SAMPLING,
    "sac, prioritised": ["update", "renaming"],
    "sac, demonstrations": ["rollout", "saving"],
    "impala, replay": ["rollout", "evaluation", "saving"],
    "agents: ppo, league": ["update", "saving"],
    "es, more steps": ["playing", "evaluation", "saving"],
    "bc": ["update", "evaluation", "writing"],
    "ppo, calls": ["update", "rollout"],
}
"""Phases in which a run is killed; together they cover every phase and every kind of state."""


@pytest.mark.slow
@pytest.mark.parametrize("case", everyday(1, PHASES))
def test_run_killed_in_any_phase_resumes_exactly(tmp_path, case):
    """A run that is killed in each phase and resumed on dev and local is bit-for-bit identical."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    # IMPALA is only reproducible in one process.
    local = {"runner": "dev"} if "impala" in case else LOCAL
    assert run_in_child(settings(case, straight)) == 0
    given = settings(case, killed, resume="auto")
    for i, moment in enumerate(PHASES[case]):
        code = run_in_child({**given, **(local if i % 2 else {})}, moment, CALLS[moment])
        assert code == -9, f"the run was over before it could be killed ({moment})"
    assert run_in_child({**given, **local}) == 0
    assert_same_training(killed, straight)
