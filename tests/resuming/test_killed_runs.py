"""A run that is killed with SIGKILL and continued gives the numbers of one that was not."""

from __future__ import annotations

import pytest
from cases import everyday
from continued_runs import assert_same_training, settings
from killed_runs import CALLS, MOMENTS, run_in_child

pytestmark = pytest.mark.slow

KILLED = [
    "ppo, memory", "ppo", "ppo, normalised", "a2c", "a2c, memory", "sac", "sac, disk",
    "sac, prioritised", "sac, demonstrations", "impala, replay", "es, more steps", "bc",
]  # fmt: skip
SAMPLING, PLAYING = ([m for m in MOMENTS if m != other] for other in ("playing", "rollout"))
PHASES = {"impala, replay": SAMPLING, "es, more steps": PLAYING, "bc": PLAYING[1:]}
"""Phases in which a run is killed: all, but those that an algorithm does not have."""


@pytest.mark.parametrize("case", everyday(1, KILLED))
def test_killed_runs_equal_undisturbed_ones(tmp_path, case):
    """Killed in each phase, continued on dev and local in turn: equal to the last bit."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    # Numbers of IMPALA are the same each time in one process only.
    local = {"runner": "dev"} if "impala" in case else {"runner": "local", "runner.n_workers": 2}
    assert run_in_child(settings(case, straight)) == 0
    given = settings(case, killed, resume="auto")
    for i, moment in enumerate(PHASES.get(case, SAMPLING)):
        code = run_in_child({**given, **(local if i % 2 else {})}, moment, CALLS[moment])
        assert code == -9, f"the run was over before it could be killed ({moment})"
    assert run_in_child({**given, **local}) == 0
    assert_same_training(killed, straight)
