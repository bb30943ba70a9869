"""Restarting failed workers does not change the results of training."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from cases import everyday, sweep
from toy_envs import (
    FORKS,
    START_METHODS,
    CountingEnv,
    FailingEnv,
    JitterEnv,
    NestedEnv,
    assert_equal_steps,
    assert_same,
    here,
    restarted,
    state_after,
    workers,
)

from maze_train import EnvFactory, PooledVectorEnv
from maze_train.core.errors import EnvError, WorkerError
from maze_train.core.seeding import episode_seed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_file_is_left"), FORKS]


@pytest.mark.parametrize("start_method", everyday(1, START_METHODS))
@sweep("between_halves", [False, True])
def test_killed_workers_do_not_change_results(between_halves, start_method):
    """Workers are killed at random times; results match an undisturbed run."""
    rng = np.random.default_rng(5)
    factories = [EnvFactory.from_any(NestedEnv)] * 5
    with here(factories) as one, restarted(factories, start_method=start_method) as many:
        one.action_space.seed(1)
        one.reset(seed=4)
        many.reset(seed=4)
        kills = 0

        def kill(worker):
            nonlocal kills
            process = many._pool.processes[worker]
            kills += process.is_alive()  # Otherwise its end was not noticed yet.
            process.kill()
            process.join()

        for step in range(60):
            actions = one.action_space.sample()
            expected = one.step(actions)
            if between_halves:
                many.step_async(actions)
            if rng.random() < 0.06:
                time.sleep(0.01 * (step % 2))
                kill(rng.integers(2))
            assert_equal_steps(expected, many.step_wait() if between_halves else many.step(actions))
            if step % 11 == 3:
                options = {"reset_mask": np.arange(5) % 2 == step % 2}
                seeds = [7, None, step, 2, 1]
                expected = one.reset(seed=seeds, options=options)[0]
                if step > 40:
                    kill(step % 2)
                assert_same(many.reset(seed=seeds, options=options)[0], expected)
        many.step(actions)  # Detects a kill after the previous step.
        one.step(actions)
        assert many.worker_restarts == kills > 2
        assert pickle.dumps(one.state_dict()) == pickle.dumps(many.state_dict())


def test_results_are_saved_before_a_worker_overwrites_them(tmp_path, monkeypatch):
    """Previous results are saved before a worker can overwrite them and die."""
    call, slow = PooledVectorEnv._call, []

    def slow_call(vector, method, *args):
        call(vector, method, *args)
        if slow and vector is many:
            vector._pool.processes[1].join()

    monkeypatch.setattr(PooledVectorEnv, "_call", slow_call)
    dying = lambda: FailingEnv("exit", 3, tmp_path / "died", 5)  # noqa: E731 (one line)
    with here([CountingEnv] * 4) as one, restarted([CountingEnv] * 3 + [dying]) as many:
        one.reset(seed=1)
        many.reset(seed=1)
        for step in range(6):
            slow[:] = [True] if step == 2 else []
            assert_equal_steps(one.step([0] * 4), many.step([0] * 4))
        assert many.worker_restarts == 1


RAISED = r"environment 2 failed at step 3 of the episode with seed \d+: RuntimeError.*"
EXITED = r"died in a step \(exit code 7\); seeds of its episodes: %d, %d"


@pytest.mark.parametrize(
    ("how", "seed", "words"),
    [("raise", 1, RAISED), ("exit", 1, EXITED), ("exit", [3, 4, 5], EXITED)],
)
def test_single_failure_is_repaired(how, seed, words, tmp_path, capfd):
    """A failure that does not recur is reported once and does not change the results.

    The worker has already stepped some of its environments.
    """
    faulty = lambda: FailingEnv(how, 3, tmp_path / "failed", 5)  # noqa: E731 (one line)
    with (
        here([CountingEnv] * 3) as one,
        restarted([CountingEnv, CountingEnv, faulty]) as many,
    ):
        one.reset(seed=seed)
        many.reset(seed=seed)
        for _ in range(12):
            assert_equal_steps(one.step([0, 1, 2]), many.step([0, 1, 2]))
        assert many.worker_restarts == 1
    text = capfd.readouterr().err
    begin, *trace = text.splitlines()
    if how == "exit":
        words %= (4, 5) if seed != 1 else tuple(episode_seed(1, i, 3, 1) for i in (1, 2))
    assert re.fullmatch(
        rf"warning: worker 1 \(environments 1 to 2\):? {words}; "
        r"it is restarted \(restart 1 of at most 10\), and its environments are restored",
        begin,
    )
    assert text.count("warning: ") == 1
    assert ("toy_envs.py" in text) is bool(trace) is (how == "raise")


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_repeated_failure_begins_new_episodes(how, capfd):
    """If a failure recurs, the environments of the worker begin new episodes."""
    with restarted([CountingEnv, lambda: FailingEnv(how, 3), CountingEnv]) as vector:
        vector.reset(seed=1)
        for _ in range(2):
            assert vector.step([0, 0, 0])[4] == {}
        obs, rewards, terminated, truncated, infos = vector.step([0, 0, 0])
        assert infos["lost"].tolist() == infos["ignored"].tolist() == [False, True, True]
        assert infos["lost"].dtype == infos["ignored"].dtype == np.bool_
        assert sorted(infos) == ["ignored", "lost"]
        assert rewards.tolist() == [3.0, 0.0, 0.0]
        assert not (terminated | truncated).any()
        seeds = [episode_seed(1, i, 3, k) % 1000 for i, k in ((0, 1), (1, 2), (2, 2))]
        assert obs.tolist() == [[seeds[0], 3.0], [seeds[1], 0.0], [seeds[2], 0.0]]
        assert vector.worker_restarts == 2
        assert vector.step([0, 0, 0])[1].tolist() == [4.0, 1.0, 1.0]
        assert [record["episodes"] for record in vector.state_dict()["envs"]] == [1, 2, 2]
        assert [record["steps"] for record in vector.state_dict()["envs"]] == [4, 1, 1]
    text = capfd.readouterr().err
    assert text.count("warning: ") == 2
    assert "restored" in text
    assert "begin new episodes" in text


def test_differing_replay_loses_the_episode(capfd):
    """An environment whose replay differs loses its episode and is named."""
    with restarted([lambda: JitterEnv(length=9)] * 2) as vector:
        vector.reset(seed=1)
        vector.step([0, 0])
        vector._pool.processes[1].kill()
        infos = vector.step([0, 0])[4]
        assert infos["lost"].tolist() == [False, True]
        assert vector.worker_restarts == 2
    assert re.search(
        r"worker 1 \(environments 1 to 1\): environment 1 could not be restored: "
        r"after 1 actions in the episode with seed \d+, the observation differs by up to \S+; it",
        capfd.readouterr().err,
    )


def test_failing_resets_try_the_next_seeds():
    """If a reset fails repeatedly, the next seeds are tried, one per restart."""

    class Picky(CountingEnv):
        def reset(self, *, seed=None, options=None):
            assert seed not in (episode_seed(1, 1, 2, 1), episode_seed(1, 1, 2, 2))
            return super().reset(seed=seed, options=options)

    with restarted([CountingEnv, Picky]) as vector:
        obs, infos = vector.reset(seed=1)
        expected = [episode_seed(1, 0, 2, 1) % 1000, episode_seed(1, 1, 2, 3) % 1000]
        assert obs[:, 0].tolist() == expected
        assert "lost" not in infos
        assert vector.worker_restarts == 3
        state = vector.state_dict()
        assert [record["episodes"] for record in state["envs"]] == [1, 3]
    with here([CountingEnv] * 2) as other:
        assert other.load_state_dict(state)[0].tolist() == obs.tolist()


def test_failing_reset_of_some_loses_other_episodes():
    """The other environments of the worker lose their episodes, which the infos tell."""

    class Picky(CountingEnv):
        def reset(self, *, seed=None, options=None):
            assert seed != episode_seed(1, 1, 3, 2)
            return super().reset(seed=seed, options=options)

    with restarted([CountingEnv, Picky, CountingEnv]) as vector:
        vector.reset(seed=1)
        vector.step([0] * 3)
        obs, infos = vector.reset(options={"reset_mask": np.array([True, True, False])})
        episodes = [2, 3, 3]
        seeds = [episode_seed(1, i, 3, k) % 1000 for i, k in enumerate(episodes)]
        assert obs.tolist() == [[seed, 0.0] for seed in seeds]
        assert infos["lost"].tolist() == [False, False, True]
        state = vector.state_dict()
        assert [record["episodes"] for record in state["envs"]] == episodes
    with here([CountingEnv] * 3) as other:
        assert other.load_state_dict(state)[0].tolist() == obs.tolist()


def test_constructor_failing_at_restart_is_repeated(tmp_path, capfd):
    """If a constructor fails at a restart, the worker is restarted again."""

    class Once(CountingEnv):
        def __init__(self):
            super().__init__()
            made = len(list(tmp_path.iterdir()))
            (tmp_path / str(made)).touch()
            if made == 1:
                raise ValueError("the licence server is busy")

    with restarted([Once], n_workers=1) as vector:
        vector.reset(seed=1)
        vector.step([0])
        vector._pool.processes[0].kill()
        obs, *_, infos = vector.step([0])
        assert "lost" not in infos
        assert vector.worker_restarts == 2
    with here([CountingEnv]) as other:
        other.reset(seed=1)
        other.step([0])
        assert obs.tolist() == other.step([0])[0].tolist()
    assert "licence server" in capfd.readouterr().err


def test_repair_begins_at_the_last_state_dict(tmp_path, capfd):
    """A repair begins at the last `state_dict`; earlier actions are not replayed."""

    class Own(CountingEnv):
        def step(self, action):
            with (tmp_path / "steps").open("a") as file:
                file.write(f"{self.t} ")
            return super().step(action)

        def state_dict(self):
            return {"t": self.t}

        def load_state_dict(self, state):
            self.t = state["t"]

    with restarted([lambda: Own(1000)], n_workers=1) as vector:
        vector.reset(seed=1)
        for _ in range(4):
            vector.step([0])
        state = vector.state_dict()
        for _ in range(2):
            vector.step([0])
        vector._pool.processes[0].kill()
        assert vector.step([0])[1].tolist() == [7.0]
        assert (tmp_path / "steps").read_text() == "0 1 2 3 4 5 4 5 6 "
        vector._pool.processes[0].kill()
        # The journal replaces the state of a dead worker.
        later = vector.state_dict()["envs"][0]
        assert len(later["actions"][""]) == 3
        assert later["own"] == state["envs"][0]["own"]
        assert vector.step([0])[1].tolist() == [8.0]
    capfd.readouterr()


def test_worker_that_dies_before_saving_its_state(capfd):
    """A state that no journal can restore is saved after a restart, or saving it raises."""

    class Stage(CountingEnv):
        stage = 0

        def reset(self, **settings):
            self.stage += 1
            return super().reset(**settings)

        def state_dict(self):
            return {"stage": self.stage, "t": self.t}

        def load_state_dict(self, state):
            self.stage, self.t = state["stage"], state["t"]

    for make in (restarted, workers):
        with make([lambda: Stage(2)] * 2, n_workers=2, can_be_restored=False) as vector:
            vector.reset(seed=1)
            vector.step([0, 0])
            vector._pool.processes[1].kill()
            vector._pool.processes[1].join()
            if make is workers:
                with pytest.raises(WorkerError, match="SIGKILL"):
                    vector.own_states()
                continue
            stages = [state["states"][-1] for state in vector.own_states()]
            assert stages == [{"stage": 1, "t": 1}] * 2
            assert vector.step([0, 0])[2].all()
    capfd.readouterr()


@pytest.mark.exhaustive
def test_timeout_applies_to_each_replayed_step():
    """During a replay, timeout_s applies to each step."""

    class Slow(CountingEnv):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    state = state_after([lambda: CountingEnv(10**6)], 20)
    with workers([lambda: Slow(100)], n_workers=1, timeout_s=0.5) as vector:
        assert vector.load_state_dict(state)[0][0, 1] == 20.0
    with (
        workers([lambda: FailingEnv("hang", 3)], n_workers=1, timeout_s=1.0) as vector,
        pytest.raises(WorkerError, match="hangs: it did not finish replaying episodes"),
    ):
        vector.load_state_dict(state)


def test_a_worker_that_stands_still_blocks_nobody():
    """Sending a large state to a stopped worker times out."""
    state = state_after([lambda: CountingEnv(10**6)], 1)
    state["envs"][0]["actions"][""] = np.zeros(10**6, np.int64)
    with workers([CountingEnv], n_workers=1, timeout_s=1.0) as vector:
        os.kill(vector._pool.processes[0].pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="hangs"):
            vector.load_state_dict(state)


def test_what_is_not_finite_is_no_failure_of_a_worker():
    """A non-finite reward does not restart the worker; `on_non_finite` decides."""
    with restarted([lambda: FailingEnv("nan", 2)], n_workers=1) as vector:
        vector.reset(seed=1)
        vector.step([0])
        with pytest.raises(EnvError, match="reward is nan"):
            vector.step([0])
        assert vector.worker_restarts == 0


SURVIVORS = """
import os, signal, subprocess, sys, time
from toy_envs import CountingEnv
from maze_train import SubprocVectorEnv

NUMBERS = [1, 2, 10, 15]
# A program that an environment starts must be able to end by these signals.
ASK = f"import signal as s; print(*[s.getsignal(n) is not s.SIG_IGN for n in {NUMBERS}], "
ASK += "*s.pthread_sigmask(s.SIG_BLOCK, []))"

class Asking(CountingEnv):
    def reward(self, action):
        said = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True).stdout
        return float(said.strip() == "True True True True")

if __name__ == "__main__":
    got = []
    for number in NUMBERS:
        signal.signal(number, lambda number, frame: got.append(number))
    with SubprocVectorEnv([lambda: CountingEnv(5)] * 2 + [Asking], n_workers=2,
                          start_method=sys.argv[1], on_worker_failure="restart") as vector:
        print(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), end=" ")
        vector.reset(seed=0)
        pids = [process.pid for process in vector._pool.processes]
        for number in NUMBERS:
            os.killpg(0, number)
            time.sleep(0.2)
            print(*vector.step([0, 0, 0])[1], end=" ")
        vector._pool.processes[0].kill()
        print(*vector.step([0, 0, 0])[1], vector.worker_restarts, end=" ")
        assert [process.pid for process in vector._pool.processes][1] == pids[1]
    print(got)
    left = SubprocVectorEnv([CountingEnv], n_workers=1, start_method=sys.argv[1])
    left.reset(seed=0)  # It is never closed.
"""


@pytest.mark.parametrize("start_method", everyday(1, START_METHODS))
def test_workers_survive_cluster_signals(start_method, tmp_path):
    """Workers survive signals sent to all processes: they step, restart, and exit."""
    script = tmp_path / "parent.py"
    script.write_text(SURVIVORS)
    done = subprocess.run(
        [sys.executable, str(script), start_method],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    steps = " ".join(f"{k}.0 {k}.0 1.0" for k in range(1, 6))
    assert done.stdout.strip() == f"0 {steps} 1 [1, 2, 10, 15]", done.stderr
    assert done.returncode == 0
    assert done.stderr.count("warning") == 1, done.stderr
