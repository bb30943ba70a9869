from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from leftovers import left_of
from toy_envs import CountingEnv, FailingEnv, NestedEnv, ThreadCountingEnv

from maze_train import EnvFactory, SequentialVectorEnv, SubprocVectorEnv
from maze_train.errors import ConfigError, SpaceError, WorkerError

pytestmark = [
    pytest.mark.usefixtures("no_file_is_left"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

START_METHODS = [
    "fork",
    "forkserver",
    pytest.param("spawn", marks=pytest.mark.slow),
]


def sample_actions(vector):
    """Random actions in the form that the vector environment takes."""
    if isinstance(vector.single_action_space.sample(), tuple):
        gears, arms = vector.action_space.sample()
        return {"0": gears, "1/force": arms["force"]}
    return vector.action_space.sample()


def columns(tree):
    """Arrays by key; a lone array has the key ''."""
    return tree if isinstance(tree, dict) else {"": tree}


def assert_equal_steps(one, other):
    """Two steps gave the same numbers and the same final infos."""
    for a, b in zip(one[:4], other[:4], strict=True):
        assert columns(a).keys() == columns(b).keys()
        for key, column in columns(a).items():
            assert column.dtype == columns(b)[key].dtype
            np.testing.assert_array_equal(column, columns(b)[key])
    assert one[4].keys() == other[4].keys()
    for a, b in zip(one[4].get("final_obs", ()), other[4].get("final_obs", ()), strict=True):
        for key, column in columns(a).items():
            np.testing.assert_array_equal(column, columns(b)[key])
    np.testing.assert_equal(one[4].get("final_info"), other[4].get("final_info"))


@pytest.mark.parametrize(
    ("env", "n_workers", "start_method"),
    [
        *itertools.product(["CartPole-v1", "Pendulum-v1", NestedEnv], [1, 2, 3], ["fork"]),
        (NestedEnv, 2, "forkserver"),
        pytest.param(NestedEnv, 2, "spawn", marks=pytest.mark.slow),
    ],
)
def test_equals_sequential(env, n_workers, start_method):
    """Every number is that of SequentialVectorEnv, bit for bit, however the work is spread."""
    steps = 250 if env == "Pendulum-v1" else 60
    factories = [EnvFactory.from_any(env)] * 5
    episodes = 0
    with (
        SequentialVectorEnv(factories, step_infos=True) as one,
        SubprocVectorEnv(
            factories, n_workers=n_workers, start_method=start_method, step_infos=True
        ) as many,
    ):
        assert many.n_workers == n_workers
        assert many.observation_space == one.observation_space
        assert many.single_action_space == one.single_action_space
        one.action_space.seed(1)
        for seed in (4, 4):
            a, b = one.reset(seed=seed)[0], many.reset(seed=seed)[0]
            for key, column in columns(a).items():
                np.testing.assert_array_equal(column, columns(b)[key])
        for _ in range(steps):
            actions = sample_actions(one)
            expected = one.step(actions)
            assert_equal_steps(expected, many.step(actions))
            episodes += int((expected[2] | expected[3]).sum())
    assert episodes >= 5


def test_lambdas_and_local_classes_travel():
    """Factories need not be importable."""

    class LocalEnv(CountingEnv):
        pass

    with SubprocVectorEnv([lambda: LocalEnv(3)] * 2, n_workers=2) as vector:
        vector.reset(seed=0)
        obs = vector.step([0, 0])[0]
        assert obs[:, 1].tolist() == [1.0, 1.0]


def test_infos_are_dropped_unless_wanted():
    """Without step_infos only those of last steps come back."""
    with SubprocVectorEnv([lambda: CountingEnv(2)] * 2, n_workers=2) as vector:
        assert list(vector.reset(seed=0)[1]["options"]) == ["None", "None"]
        assert vector.step([0, 0])[4] == {}
        infos = vector.step([0, 0])[4]
        assert sorted(infos) == ["_final_info", "_final_obs", "final_info", "final_obs"]
        assert infos["final_info"]["half"].tolist() == [1.0, 1.0]


def test_copies():
    """The internal buffer is returned unless copies are asked for, and outlives the workers."""
    kept = []
    for copy in (False, True):
        with SubprocVectorEnv([CountingEnv], copy=copy) as vector:
            vector.reset(seed=0)
            first = vector.step([0])[0]
            second = vector.step([0])[0]
            assert np.shares_memory(first, second) is not copy
            kept.append(second)
    assert [obs[0, 1] for obs in kept] == [2.0, 2.0]


def build_and_fail(how, start_method="forkserver", **kwargs):
    """Three workers, the second of which fails as told at its third step."""
    factories = [CountingEnv, lambda: FailingEnv(how), CountingEnv]
    vector = SubprocVectorEnv(factories, n_workers=3, start_method=start_method, **kwargs)
    vector.reset(seed=5)
    for _ in range(3):
        vector.step([0, 0, 0])


@pytest.mark.parametrize("start_method", START_METHODS)
def test_exception_in_a_worker(start_method):
    """The error names worker, environment, seed and step, and shows the worker's traceback."""
    with pytest.raises(WorkerError) as caught:
        build_and_fail("raise", start_method)
    message = str(caught.value)
    assert re.search(r"worker 1 \(environments 1 to 1\): environment 1 failed at step 3", message)
    assert re.search(r"with seed \d+: RuntimeError: the wheel came off", message)
    assert "toy_envs.py" in message
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("how", "words"),
    [("shape", r"shape \(1, 2\), its space says"), ("sys.exit", "SystemExit: 0")],
)
def test_other_failures_in_a_worker(how, words):
    """An observation that does not fit its space, or `sys.exit()`, is told like an exception."""
    with pytest.raises(WorkerError, match=rf"environment 1 failed at step 3.*{words}"):
        build_and_fail(how)


def test_an_environment_of_a_worker_that_can_not_be_closed(capfd):
    """It is told, as it is in one process."""

    class Jammed(CountingEnv):
        def close(self):
            sys.exit(4)

    SubprocVectorEnv([Jammed], n_workers=1, start_method="fork").close()
    assert capfd.readouterr().err == "warning: closing an environment failed: SystemExit: 4\n"


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize(("how", "words"), [("kill", "signal SIGKILL"), ("exit", "exit code 7")])
def test_death_of_a_worker(how, words, start_method):
    """A worker that vanishes is named with its signal or exit code."""
    with pytest.raises(WorkerError, match=rf"worker 1 .*died in a step \({words}"):
        build_and_fail(how, start_method)
    assert multiprocessing.active_children() == []


def test_death_between_steps():
    """A worker that is killed while nobody waits for it is noticed at the next step."""
    vector = SubprocVectorEnv([CountingEnv] * 2, n_workers=2)
    vector.reset(seed=0)
    children = sorted(multiprocessing.active_children(), key=lambda child: child.name)
    os.kill(children[1].pid, signal.SIGKILL)
    children[1].join()
    with pytest.raises(WorkerError, match=r"worker 1 .*SIGKILL"):
        vector.step([0, 0])
    with pytest.raises(WorkerError, match="closed"):
        vector.step([0, 0])


def test_hang_of_a_worker():
    """A worker that does not answer within timeout_s is named and killed."""
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 .*hangs.*timeout_s = 2 seconds"):
        build_and_fail("hang", "fork", timeout_s=2.0)
    assert time.monotonic() - started < 30.0  # it would sleep for longer


def test_constructor_error():
    """A constructor that raises is named by worker and environment, with its traceback."""
    factories = [CountingEnv, CountingEnv, lambda: FailingEnv("constructor")]
    pattern = r"(?s)worker 1 .*environment 2 could not be built: ValueError: no such.*toy_envs\.py"
    with pytest.raises(WorkerError, match=pattern):
        SubprocVectorEnv(factories, n_workers=2)


def test_unequal_spaces():
    """Spaces that differ between workers are refused."""
    with pytest.raises(SpaceError, match="environment 1"):
        SubprocVectorEnv([CountingEnv, lambda: FailingEnv("spaces")], n_workers=2)


def test_arguments_are_checked():
    """Arguments out of range are refused before any process starts."""
    with pytest.raises(ConfigError, match="n_workers = -1"):
        SubprocVectorEnv([CountingEnv], n_workers=-1)
    with pytest.raises(ConfigError, match=r"start_method.*did you mean 'spawn'"):
        SubprocVectorEnv([CountingEnv], start_method="spwan")
    with pytest.raises(ConfigError, match="timeout_s = 0"):
        SubprocVectorEnv([CountingEnv], timeout_s=0)
    with pytest.raises(ConfigError, match="at least one"):
        SubprocVectorEnv([])


def test_no_more_workers_than_environments():
    """Workers without work are not started; 0 means one per core."""
    with SubprocVectorEnv([CountingEnv] * 2, n_workers=9) as vector:
        assert vector.n_workers == 2
    with SubprocVectorEnv([CountingEnv] * 64) as vector:
        assert vector.n_workers == min(64, len(os.sched_getaffinity(0)))


def test_close_and_interrupt():
    """Closing twice is fine; an exception while waiting closes too."""
    vector = SubprocVectorEnv([CountingEnv])
    vector.close()
    vector.close()
    vector = SubprocVectorEnv([CountingEnv])
    vector._pool.receive = lambda index: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        vector.reset(seed=0)
    assert vector.closed


PARENT = """
import os, signal, sys, multiprocessing
sys.path.insert(0, {path!r})
from toy_envs import CountingEnv
from maze_train import SubprocVectorEnv
if __name__ == "__main__":
    vectors = []
    for _ in range(2):
        vectors.append(SubprocVectorEnv([CountingEnv] * 2, n_workers=2, start_method={method!r}))
        vectors[-1].reset(seed=0)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_end_with_their_parent(start_method, tmp_path):
    """When the parent is killed, its workers end within seconds."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(path=os.path.dirname(__file__), method=start_method))
    with open(tmp_path / "out", "w") as out:
        subprocess.run([sys.executable, str(script)], stdout=out, check=False, timeout=60)
    pids = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(pids) == 4
    assert left_of(pids, 10.0) == []


@pytest.mark.slow
def test_fork_after_torch_threads_does_not_hang():
    """A forked worker may use torch though its parent has used several torch threads."""
    code = """
import torch
import numpy as np
from toy_envs import CountingEnv
from maze_train import SubprocVectorEnv
torch.set_num_threads(2)
torch.randn(500, 500) @ torch.randn(500, 500)
class TorchEnv(CountingEnv):
    def step(self, action):
        torch.randn(500, 500) @ torch.randn(500, 500)
        return super().step(action)
with SubprocVectorEnv([TorchEnv] * 2, n_workers=2, start_method="fork", timeout_s=20) as vector:
    vector.reset(seed=0)
    print(vector.step(np.zeros(2, np.int64))[1].tolist())
"""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])},
    )
    assert done.stdout.strip() == "[1.0, 1.0]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_workers_use_one_thread_of_torch(start_method):
    """Also when an environment is what imports torch, after the worker has started."""
    with SubprocVectorEnv([ThreadCountingEnv] * 2, n_workers=2, start_method=start_method) as env:
        obs, _ = env.reset(seed=0)
        assert obs.tolist() == [[1.0, 1.0], [1.0, 1.0]]
