"""Runs with several processes, of which these tests start only one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from called_envs import LevelEnv
from run_cases import CASES, SMALL

from maze_train import ConfigError, PooledVectorEnv, StopAtReturn, load_config
from maze_train.algorithms.off_policy import trainer as off_policy
from maze_train.envs.calls import EnvCall, EnvCalls
from maze_train.learner.ranks import OneRank, Ranks
from maze_train.run import build
from maze_train.run.build import build_run
from maze_train.run.train import train_run
from maze_train.training import contexts
from maze_train.training.contexts import check_fits

if TYPE_CHECKING:
    from collections.abc import Callable


class TwoProcesses(OneRank):
    """Fake of two processes that records the values to be shared."""

    count = local_count = 2

    def __init__(self) -> None:
        self.shared: list[object] = []
        self.compared: dict[str, object] = {}
        self.has_left = False

    def check_same(self, key: str, value: object, remedy: str = "") -> None:
        self.compared[key] = value

    def first(self, function: Callable[[], Any]) -> Any:
        self.shared.append(function())
        return self.shared[-1]

    def device(self, name: str, key: str) -> str:
        return {("cuda", "env.device"): "cpu"}.get((name, key), name)

    def leave(self, *error: object) -> None:
        self.has_left = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> TwoProcesses:
    """Replace the processes of every run in a test, and return the substitute."""
    found = TwoProcesses()
    monkeypatch.setattr(build, "join_ranks", lambda config: found)
    return found


@pytest.mark.parametrize("seed", [None, 3])
def test_all_processes_draw_a_seed(processes: TwoProcesses, seed: int | None) -> None:
    """A seed is drawn and shared even if another one is given, so exchanges do not differ."""
    config = load_config({**SMALL, "algorithm": "ppo", "seed": seed})
    with build_run(config, until_learner=True) as run:
        assert run.seeds.root == (processes.shared[0] if seed is None else seed)
    assert len(processes.shared) == 1
    assert processes.has_left


@pytest.mark.usefixtures("empty_directory")
def test_processes_with_different_settings_raise(processes: TwoProcesses) -> None:
    """Differences would mix up the exchanges of the processes."""
    given = {**SMALL, "algorithm": "ppo", "runner.fast_dev_run": True}
    with build_run(load_config(given), callbacks=[StopAtReturn(1.0)]) as run:
        train_run(run)
        assert processes.compared == {
            "configuration": run.text,
            "resume": None,
            "env": run.spaces,
            "callbacks": ["maze_train.training.callbacks.StopAtReturn"],
        }


def test_failed_runs_leave_the_process_group(processes: TwoProcesses) -> None:
    """Processes are left after errors in the constructor and while closing."""
    with pytest.raises(ConfigError, match="resume"):
        build_run(load_config({"resume": "missing", **SMALL, "algorithm": "ppo"}))
    assert processes.has_left
    processes.has_left = False
    run = build_run(load_config({**SMALL, "algorithm": "ppo"}), until_learner=True)
    run.closing.callback(int, "no number")
    with pytest.raises(ValueError, match="no number"):
        run.closing.close()
    assert processes.has_left


def test_simulators_have_the_device_of_their_process(processes: TwoProcesses) -> None:
    """`env.device` is replaced by the device of the process, as is `algorithm.device`."""
    given = {**SMALL, **CASES["ppo, simulator"], "algorithm": "ppo", "env.device": "cuda"}
    with build_run(load_config(given), until_learner=True) as run:
        assert str(run.env.simulator.device) == "cpu"


@pytest.mark.parametrize(("processes_", "rollouts"), [(OneRank(), 1), (TwoProcesses(), 10)])
def test_rollout_memory_counts_all_processes(
    monkeypatch: pytest.MonkeyPatch, processes_: Ranks, rollouts: int
) -> None:
    """Each of two processes stores its rollout, two received rollouts and their concatenation."""
    needed = 4 * 4 * 2 * (8 + 1) * rollouts
    free = [needed]
    monkeypatch.setattr(contexts, "_meminfo", lambda proc: free[0])
    monkeypatch.setattr(contexts, "_groups", lambda proc, cgroups: [])
    with PooledVectorEnv([LevelEnv] * 2) as env:
        check_fits(env, 8, processes_)
        free[0] = needed - 1
        with pytest.raises(ConfigError, match=r"n_rollout_steps = 8: .* are free on cpu"):
            check_fits(env, 8, processes_)


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_replay_memory_counts_all_processes(
    processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """Each process on a machine has a buffer of the same size."""
    for name in ("available_memory", "available_disk"):
        monkeypatch.setattr(off_policy, name, lambda place, count: 1000 // count)
    settings = {"algorithm": "sac", "algorithm.replay_buffer_storage": storage}
    with pytest.raises(ConfigError, match=r"0\.5 kB are free .* for each of the 2 processes"):
        build_run(load_config({**SMALL, **settings}))


def test_calls_of_processes_are_compared_exactly() -> None:
    """Large arrays are not abbreviated, and NaN equals NaN."""

    def added(value: float) -> str:
        calls, many = EnvCalls(), np.zeros(5000)
        many[2500] = value
        calls.add(EnvCall("keep", [{"x": [many, float("nan")]}]), evaluate=True)
        return calls.added

    assert added(0.0) == added(0.0) != added(1.0)
