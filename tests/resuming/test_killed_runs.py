"""Runs killed with SIGKILL and resumed equal uninterrupted runs."""

from __future__ import annotations

import pytest
from cases import everyday
from killed_runs import CALLS, MOMENTS, run_in_child
from run_cases import LOCAL, assert_same_training, settings

pytestmark = pytest.mark.slow

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
}
"""Phases in which a run is killed; together they cover every phase and every kind of state."""


@pytest.mark.parametrize("case", everyday(1, PHASES))
def test_killed_runs_equal_undisturbed_ones(tmp_path, case):
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
