"""A step in two halves gives what a step in one gives, and the caller can compute in between."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import CountingEnv, FailingEnv, NestedEnv

from maze_train import EnvFactory, PooledVectorEnv, SequentialVectorEnv, SubprocVectorEnv
from maze_train.envs.foreign import ForeignVectorEnv
from maze_train.errors import EnvError, ShapeError, WorkerError
from maze_train.workers import worker_process

pytestmark = pytest.mark.usefixtures("no_file_is_left")


def sequential(factories):
    """Environments in this process."""
    return SequentialVectorEnv(factories)


def subprocess(factories, **settings):
    """Environments in two others."""
    return SubprocVectorEnv(factories, n_workers=2, **settings)


def foreign(factories):
    """A vector environment of gymnasium, presented as ours."""
    return ForeignVectorEnv(SyncVectorEnv(factories, autoreset_mode=AutoresetMode.SAME_STEP))


MAKERS = [sequential, subprocess, foreign]
OWN = [sequential, subprocess]


def columns(tree):
    """Arrays by key; a lone array has the key ''."""
    return tree if isinstance(tree, dict) else {"": tree}


def assert_equal_steps(one, other):
    """Two steps gave the same bytes and the same infos."""
    for a, b in zip(one[:4], other[:4], strict=True):
        assert columns(a).keys() == columns(b).keys()
        for key, column in columns(a).items():
            assert column.tobytes() == columns(b)[key].tobytes()
    assert repr(one[4]) == repr(other[4])


def actions_for(vector):
    """Random actions in the form that the vector environment takes."""
    sample = vector.action_space.sample()
    return {"0": sample[0], "1/force": sample[1]["force"]} if isinstance(sample, tuple) else sample


@pytest.mark.parametrize("env", ["CartPole-v1", NestedEnv])
@pytest.mark.parametrize("make", MAKERS)
def test_two_halves_are_a_step(make, env):
    """Every byte is the same, also when the caller writes into the actions in between."""
    factories = [EnvFactory.from_any(env)] * 3
    episodes = 0
    with make(factories) as one, make(factories) as two:
        for seed in (3, 3):
            one.action_space.seed(seed)
            one.reset(seed=seed)
            two.reset(seed=seed)
            for _ in range(30):
                actions = actions_for(one)
                expected = one.step(actions)
                two.step_async(actions)
                for part in columns(actions).values():
                    part[...] = 0
                given = two.step_wait()
                assert_equal_steps(expected, given)
                episodes += int((given[2] | given[3]).sum())
        if two.can_be_restored:
            assert pickle.dumps(one.state_dict()) == pickle.dumps(two.state_dict())
    assert episodes > 3


class Marking(CountingEnv):
    """Makes a file when it is stepped, and waits for another before it goes on."""

    def __init__(self, directory):
        super().__init__()
        self.directory = Path(directory)

    def step(self, action):
        (self.directory / "began").touch()
        wait_for(self.directory / "may go on")
        return super().step(action)


def wait_for(path):
    """Wait until a file exists; a minute is long enough for any machine."""
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def test_workers_work_while_the_caller_computes(tmp_path):
    """They have begun before they are waited for, and need nothing from the caller to go on."""
    with subprocess([lambda: Marking(tmp_path)] * 2) as vector:
        vector.reset(seed=0)
        vector.step_async([0, 0])
        wait_for(tmp_path / "began")
        (tmp_path / "may go on").touch()
        assert vector.step_wait()[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [sequential, foreign])
def test_others_work_when_they_are_waited_for(make, tmp_path):
    """In one process nothing happens before."""
    (tmp_path / "may go on").touch()
    with make([lambda: Marking(tmp_path)] * 2) as vector:
        vector.reset(seed=0)
        vector.step_async([0, 0])
        assert not (tmp_path / "began").exists()
        assert vector.step_wait()[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda vector, state: vector.step_async([1, 1]), "step_async"),
        (lambda vector, state: vector.step([1, 1]), "step_async"),
        (lambda vector, state: vector.reset(seed=1), "reset"),
        (lambda vector, state: vector.state_dict(), "state_dict"),
        (lambda vector, state: vector.load_state_dict(state), "load_state_dict"),
    ],
)
@pytest.mark.parametrize("make", MAKERS)
def test_nothing_else_between_the_halves(make, call, name):
    """It is refused by name, and the step goes on as if it had not been tried."""
    with make([CountingEnv] * 2) as one, make([CountingEnv] * 2) as two:
        one.reset(seed=5)
        two.reset(seed=5)
        state = one.state_dict() if one.can_be_restored else {}
        for _ in range(6):
            expected = one.step([0, 2])
            two.step_async([0, 2])
            words = rf"{name}\(\) was called between step_async\(\) and step_wait\(\): call step_w"
            if not two.can_be_restored and "state" in name:
                words = "can not be kept"
            with pytest.raises(EnvError, match=words):
                call(two, state)
            assert_equal_steps(expected, two.step_wait())


@pytest.mark.parametrize("make", MAKERS)
def test_waiting_for_nothing(make):
    """Without a step that began, at the start and after each, there is nothing to wait for."""
    words = r"step_wait\(\) was called without step_async\(actions\) before it"
    with make([CountingEnv] * 2) as vector:
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        with pytest.raises(EnvError, match=r"before the first reset"):
            vector.step_async([0, 0])
        vector.reset(seed=0)
        with pytest.raises(ShapeError, match=r"actions has shape \(3,\)"):
            vector.step_async([0, 0, 0])
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        vector.step([0, 0])
        with pytest.raises(EnvError, match=words):
            vector.step_wait()
        assert vector.step([0, 0])[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("make", MAKERS)
def test_closing_between_the_halves(make):
    """It works, twice; nothing can be waited for any more."""
    vector = make([CountingEnv] * 2)
    vector.reset(seed=0)
    vector.step_async([0, 0])
    vector.close()
    vector.close()
    assert multiprocessing.active_children() == []
    with pytest.raises(EnvError, match=r"step_wait\(\) was called after close\(\)"):
        vector.step_wait()


def test_closing_while_workers_hang(monkeypatch):
    """They are killed after a short time of grace; the environment would sleep for a minute."""
    monkeypatch.setattr(worker_process, "CLOSE_GRACE_S", 0.2)
    vector = subprocess([lambda: FailingEnv("hang", at=1), CountingEnv])
    vector.reset(seed=0)
    vector.step_async([0, 0])
    vector.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("when", ["before", "between"])
def test_killed_workers_are_noticed_in_the_second_half(when):
    """The first half does not fail; the second names the worker, and closes."""
    vector = subprocess([CountingEnv] * 2)
    vector.reset(seed=0)
    process = vector._pool.processes[1]
    if when == "before":
        process.kill()
        process.join()
    vector.step_async([0, 0])
    process.kill()
    with pytest.raises(WorkerError, match=r"(?s)worker 1 .* died in a step .* = fail\)"):
        finish_until_killed(vector)
    assert vector.closed


def finish_until_killed(vector):
    """A worker may have made its step before it was killed: then the next one finds it."""
    vector.step_wait()
    vector.step([0, 0])


def test_restarted_workers_change_no_number(capfd):
    """They die between the halves, before and after they made the step."""
    rng = np.random.default_rng(5)
    factories = [EnvFactory.from_any(NestedEnv)] * 5
    with (
        sequential(factories) as one,
        subprocess(factories, on_worker_failure="restart") as many,
    ):
        one.action_space.seed(1)
        one.reset(seed=4)
        many.reset(seed=4)
        kills = 0
        for step in range(60):
            actions = actions_for(one)
            expected = one.step(actions)
            many.step_async(actions)
            if rng.random() < 0.06:
                time.sleep(0.01 * (step % 2))
                process = many._pool.processes[rng.integers(2)]
                kills += process.is_alive()  # Else its end was not noticed yet.
                process.kill()
                process.join()
            assert_equal_steps(expected, many.step_wait())
        many.step(actions)  # It finds the last kill, if that was after its step.
        one.step(actions)
        assert many.worker_restarts == kills > 2
        assert pickle.dumps(one.state_dict()) == pickle.dumps(many.state_dict())
    assert capfd.readouterr().err.count("warning: worker") == kills


class DyingOnce(CountingEnv):
    """Kills its process at the third step, unless it has done so before."""

    def __init__(self, marker):
        super().__init__()
        self.marker = Path(marker)

    def step(self, action):
        if self.t == 2 and not self.marker.exists():
            self.marker.touch()
            os._exit(7)
        return super().step(action)


def test_workers_that_are_faster_than_the_first_half(tmp_path, monkeypatch, capfd):
    """What was before the step is kept before a worker can overwrite it and die."""
    call, slow = PooledVectorEnv._call, []

    def slow_call(vector, method, *args):
        call(vector, method, *args)
        if slow and vector is many:
            vector._pool.processes[1].join()

    monkeypatch.setattr(PooledVectorEnv, "_call", slow_call)
    dying = DyingOnce
    with (
        sequential([CountingEnv] * 4) as one,
        subprocess(
            [CountingEnv] * 3 + [lambda: dying(tmp_path / "died")], on_worker_failure="restart"
        ) as many,
    ):
        one.reset(seed=1)
        many.reset(seed=1)
        for step in range(6):
            slow[:] = [True] if step == 2 else []
            assert_equal_steps(one.step([0] * 4), many.step([0] * 4))
        assert many.worker_restarts == 1
    capfd.readouterr()


def test_episodes_that_are_lost_between_the_halves(capfd):
    """What fails again is given up, as in a step."""
    failing = FailingEnv
    results = []
    for halves in (False, True):
        with subprocess(
            [CountingEnv, lambda: failing("raise", at=3)], on_worker_failure="restart"
        ) as vector:
            vector.reset(seed=1)
            for _ in range(4):
                if halves:
                    vector.step_async([0, 0])
                    result = vector.step_wait()
                else:
                    result = vector.step([0, 0])
                results.append(repr(result))
            assert vector.worker_restarts == 2
    assert results[:4] == results[4:]
    assert "'lost': array([False,  True])" in results[2]
    assert capfd.readouterr().err.count("warning: ") == 4


@pytest.mark.parametrize("make", MAKERS)
def test_environments_that_raise_do_so_in_the_second_half(make):
    """The step is over then; what is left goes on after a reset."""
    failing = FailingEnv
    vector = make([CountingEnv, lambda: failing("raise", at=2)])
    vector.reset(seed=0)
    vector.step([0, 0])
    vector.step_async([0, 0])
    with pytest.raises(EnvError, match="the wheel came off"):
        vector.step_wait()
    with pytest.raises(EnvError, match=re.escape("step_wait() was called")):
        vector.step_wait()
    if not vector.closed:
        vector.reset(seed=0)
        assert vector.step([0, 0])[1].tolist() == [1.0, 1.0]
    vector.close()


@pytest.mark.parametrize("make", OWN)
def test_states_after_a_step_in_halves(make):
    """A state taken between two steps is that of the last one, and others go on from it."""
    with make([CountingEnv] * 2) as one, make([CountingEnv] * 2) as two:
        one.reset(seed=5)
        one.step_async([1, 2])
        one.step_wait()
        two.load_state_dict(one.state_dict())
        for _ in range(6):
            for vector in (one, two):
                vector.step_async([2, 1])
            assert_equal_steps(one.step_wait(), two.step_wait())
