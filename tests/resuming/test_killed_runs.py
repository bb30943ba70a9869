"""A run that is killed with SIGKILL and continued gives the numbers of one that was not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday
from continued_runs import assert_same_training
from continued_runs import settings as short_settings
from killed_runs import CALLS, MOMENTS, run_in_child

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "runner.concurrency": 3,
    "algorithm.epoch_length": 2,
    "algorithm.n_rollout_steps": 16,
    "evaluation.n_episodes": 2,
    "evaluation.max_episode_steps": 30,
    "model.hidden_sizes": [8],
    "seed": 1,
    "total_steps": 5 * 2 * 48,
    "tracking.progress": "quiet",
    "tracking.plot": False,
}
PPO: dict[str, Any] = {"algorithm": "ppo", "algorithm.batch_size": 16}
ALGORITHMS: dict[str, Any] = {"ppo": PPO, "a2c": {"algorithm": "a2c"}}
NORMALISED = {
    "model.normalization.mode": "running",
    "model.normalization.n_steps": 48,
    "algorithm.reward_scaling": True,
}
PROBLEMS: dict[str, Any] = {
    "CartPole": {"env": "CartPole-v1"},
    "Pendulum, normalised": {"env": "Pendulum-v1", **NORMALISED},
    "HalfCheetah": {"env": "HalfCheetah-v5", **NORMALISED},
    "Dict": {"env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict"}}},
    "memory": {"env": "CartPole-v1", "model": "vector_rnn", "model.memory.size": 8},
}
SAC: dict[str, Any] = {
    "algorithm": "sac",
    "algorithm.batch_size": 8,
    "algorithm.initial_buffer_size": 100,
    "algorithm.replay_buffer_size": 300,  # it wraps
    "algorithm.update_to_data_ratio": 0.3,
}
PRIORITISED = {
    "algorithm.replay_buffer": {"_target_": "maze_train.PrioritizedReplayBuffer"},
    "algorithm.n_step_returns": 3,
    "algorithm.policy_update_interval": 2,
    "algorithm.initial_action_repeat": 5,
}
SAC_PROBLEMS: dict[str, Any] = {
    "CartPole": {"env": "CartPole-v1"},
    "Pendulum, normalised": {
        "env": {"id": "Pendulum-v1", "max_episode_steps": 20},
        "model.normalization.mode": "running",
        "model.normalization.n_steps": 48,
    },
    "Dict, on disk": {
        "env": {"_target_": "own_envs.SpacesEnv", "kwargs": {"obs": "dict"}},
        "algorithm.replay_buffer_storage": "disk",
    },
    "prioritised": {"env": "Pendulum-v1", **PRIORITISED},
}


CASES: dict[str, dict[str, Any]] = {
    **{
        f"{problem}, {algorithm}": {**ALGORITHMS[algorithm], **PROBLEMS[problem]}
        for problem in PROBLEMS
        for algorithm in ALGORITHMS
        # What A2C does otherwise than PPO does not depend on the problem.
        if algorithm == "ppo" or problem in ("CartPole", "memory")
    },
    **{f"{problem}, sac": {**SAC, **SAC_PROBLEMS[problem]} for problem in SAC_PROBLEMS},
}


OTHERS = ("impala, replay", "es, more steps", "bc")
"""Cases of `continued_runs`."""

SAMPLING, PLAYING = ([m for m in MOMENTS if m != other] for other in ("playing", "rollout"))
PHASES = {"impala, replay": SAMPLING, "es, more steps": PLAYING, "bc": PLAYING[1:]}
"""Phases in which a run is killed: all, but those that an algorithm does not have."""


def settings(run_dir: Path, case: str, runner: str) -> dict[str, Any]:
    """Settings of a run of some epochs, to start or to continue."""
    # Numbers of IMPALA are the same each time in one process only.
    runner = "dev" if "impala" in case else runner
    workers = {"runner.n_workers": 2} if runner == "local" else {}
    place = {"runner": runner, **workers, "resume": "auto"}
    if case in OTHERS:
        return {**short_settings(case, run_dir), **place}
    return {**COMMON, **CASES[case], **place, "run_dir": str(run_dir)}


@pytest.mark.parametrize("case", everyday(1, sorted([*CASES, *OTHERS], key="memory, ppo".__ne__)))
def test_killed_runs_equal_undisturbed_ones(tmp_path, case):
    """Killed in each phase, continued on dev and local in turn: equal to the last bit."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run_in_child(settings(straight, case, "dev")) == 0
    for i, moment in enumerate(PHASES.get(case, SAMPLING)):
        runner = ("dev", "local")[i % 2]
        code = run_in_child(settings(killed, case, runner), moment, CALLS[moment])
        assert code == -9, f"the run was over before it could be killed ({moment})"
    assert run_in_child(settings(killed, case, "local")) == 0
    assert_same_training(killed, straight)
