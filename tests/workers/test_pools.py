"""Contract of worker pools, tested for all pools."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
import signal
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cases import everyday
from leftovers import left_of, run_owner
from toy_workers import ToyWorker, local_class

from maze_train.cluster import pool as ray_pool
from maze_train.cluster.pool import RayBackend
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.workers import process_pool
from maze_train.workers.backends import Pickled, ThisProcess
from maze_train.workers.pool import WorkerFailedError, WorkerPool, WorkerSpecs
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

SHORT_S = 0.5
"""Timeout in seconds after which a worker counts as hung."""
PATIENCE_S = 30.0
N = 3

slow = pytest.mark.slow
FORKSERVER = pytest.param("forkserver", marks=[slow, pytest.mark.exhaustive])
RAY = pytest.param("ray", marks=[slow, pytest.mark.exhaustive, pytest.mark.ray])
REMOTE = [pytest.param("fork", marks=slow), RAY]
BACKENDS = ["here", *REMOTE, pytest.param("forkserver", marks=slow)]


def elsewhere(cases: Iterable[str], on_ray: Iterable[str]) -> list[Any]:
    """Return each case with local processes, and some cases with Ray."""
    here = [pytest.param("fork", case, marks=slow) for case in cases]
    return here + [pytest.param("ray", case, marks=RAY.marks) for case in on_ray]


@pytest.fixture
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Function that starts pools; they are closed after the test."""
    on_ray = request.node.get_closest_marker("ray")
    request.getfixturevalue("ray_cluster" if on_ray else "no_file_is_left")
    pools: list[WorkerPool] = []

    def start(where: str = "fork", first: str = "", n: int = N, **settings: Any) -> Any:
        settings = {"timeout_s": PATIENCE_S, **settings}
        backend: Any = ThisProcess()
        if where == "ray":
            backend = RayBackend(cpus_per_worker=0.1, **settings)
        elif where != "here":
            backend = LocalProcesses(start_method=where, **settings)
        names = [f"toy {i}" for i in range(n)]
        make = partial(ToyWorker, tmp_path, first)
        pools.append(backend.pool(WorkerSpecs([make] * n, names, {"fail": "a trick"})))
        return pools[-1]

    yield start
    while pools:
        pools.pop().close()


def answers(pool: WorkerPool, count: int) -> dict[int, Any]:
    """Return `count` results by worker."""
    told: dict[int, Any] = {}
    while len(told) < count:
        ready = pool.ready(PATIENCE_S)
        assert ready, "what is waited for does not come"
        told |= {index: pool.receive(index) for index in ready}
    return told


def closed_in_order(folder: Path) -> set[int]:
    """Return the indices of closed workers."""
    return {int(file.name[6:].partition("-")[0]) for file in folder.glob("closed*")}


# -- every pool ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", BACKENDS)
def test_pool_returns_results_in_call_order(start: Any, where: str, tmp_path: Path) -> None:
    """Workers return results in the order of their calls, and each is closed once."""
    pool = start(where)
    assert len(pool) == N
    assert pool.ready(0.0) == []
    pool.call(2, "echo", "two")
    assert pool.pending(2) == 1
    assert answers(pool, 1) == {2: (2, "two")}
    assert pool.call_all("echo") == [(0,), (1,), (2,)]
    assert pool.call_all("nothing") == [None] * N
    for word in "abc":
        pool.call(1, "echo", word)
    assert [pool.receive(1) for _ in range(3)] == [(1, word) for word in "abc"]
    assert pool.pending(1) == 0
    for index in range(N):
        pool.call(index, "echo", index)
    assert answers(pool, N) == {index: (index, index) for index in range(N)}
    assert pool.ready(0.0) == []
    pool.call(1, "walk", 5)
    assert pool.receive(1) == 5
    assert [pool.steps(index) for index in range(N)] == [0, 5, 0]
    processes = set(pool.call_all("process"))
    assert processes == {os.getpid()} if where == "here" else len(processes) == N
    pool.close()
    pool.close()
    assert closed_in_order(tmp_path) == set(range(N))
    assert len(pool) == 0
    for use in (lambda: pool.ready(0.0), lambda: pool.call(0, "echo")):
        with pytest.raises(WorkerError, match="the workers are closed: create a new pool"):
            use()


@pytest.mark.parametrize(
    "where", [*REMOTE, *(pytest.param(where, marks=slow) for where in ("forkserver", "spawn"))]
)
def test_workers_seed_global_generators(start: Any, where: str) -> None:
    """Workers draw different values that follow from the state of the parent's generators."""
    drawn = []
    for seed in (1, 1, 2):
        np.random.seed(seed)  # noqa: NPY002
        drawn.append(start(where, n=2).call_all("draws"))
        assert np.random.random() == np.random.RandomState(seed).random()  # noqa: NPY002
    assert drawn[0] == drawn[1]
    values = [value for draws in drawn[1:] for worker in draws for value in worker]
    assert len(set(values)) == len(values) == 2 * 2 * 4


@pytest.mark.parametrize("where", BACKENDS)
def test_workers_read_published_memory(
    start: Any, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers read published memory before later calls, and memory sent to each of them."""
    pool = start(where, on_worker_failure="restart")
    memory = pool.allocate(N)
    numbers = np.frombuffer(memory.buffer, np.uint8)
    numbers[:] = 1, 2, 3
    pool.publish(memory, [numbers[1:]])
    pool.sends(0, memory, [numbers[:1]])
    pool.call_all("map", memory)
    numbers[0] = 7
    assert pool.ask(0, "read") == [7, 2, 3]
    numbers[1:] = 8, 9
    pool.publish(memory, [numbers[1:]])
    assert pool.ask(0, "read") == [7, 8, 9]
    assert [told[1:] for told in pool.call_all("read")] == [[8, 9]] * N
    if where != "here":
        restart(pool, 0, "exit")
        assert pool.ask(0, "echo", "before") == (0, "before")
        pool.ask(0, "map", memory)
        assert pool.ask(0, "read") == [7, 8, 9]
        assert "is restarted" in capfd.readouterr().err
    memory.close()
    other = pool.allocate(N)
    assert pool.ask(1, "echo") == (1,)
    pool.call_all("map", other)
    pool.ask(1, "write", 1, 5)
    assert np.frombuffer(other.buffer, np.uint8).tolist() == [0, 5, 0]
    if where == "ray":
        assert list(pool._memories.values()) == [other]  # type: ignore[attr-defined]
    other.close()


@pytest.mark.parametrize("where", BACKENDS)
def test_pools_send_large_and_local_objects(start: Any, where: str) -> None:
    """Large arguments, lambdas and objects of local classes can be sent."""
    pool = start(where, n=1)
    large = np.arange(100_000)
    pool.call(0, "echo", large, Pickled(lambda: 7, "key"))
    _, found, function = pool.receive(0)
    assert np.array_equal(found, large)
    assert function.value() == 7
    pool.call(0, "echo", Pickled(local_class(), "key"))
    assert pool.receive(0)[1].value.value == 5


@pytest.mark.parametrize("where", BACKENDS)
def test_cancelled_calls_return_none(start: Any, where: str) -> None:
    """Results of cancelled calls are None, running or pending; later calls are not affected."""
    pool = start(where)
    for _ in range(3):
        pool.call(0, "walk", 10**9, 0.01)
    if where != "here":
        while not pool.steps(0):
            time.sleep(0.01)
    pool.cancel(0)
    pool.call(0, "echo", "later")
    assert [pool.receive(0) for _ in range(4)] == [None, None, None, (0, "later")]


def test_inline_worker_errors_are_unchanged(start: Any, tmp_path: Path) -> None:
    """In one process, errors are raised unchanged where the result is received."""
    pool = start("here")
    pool.call(1, "fail", "raise")
    assert pool.ready(0.0) == [1]
    with pytest.raises(RuntimeError, match="the wheel came off"):
        pool.receive(1)
    assert pool.call_all("echo") == [(0,), (1,), (2,)]
    with pytest.raises(RuntimeError, match="the wheel came off"):
        start("here", "raise")


# -- remote workers ------------------------------------------------------------------------------

FAILURES = {
    "raise": r"toy 1: RuntimeError: the wheel came off",
    "exit": r"toy 1 died in a trick \((exit code 7|the process ended; was memory exhausted\?)\)",
    "hang": r"toy 1 hangs: it did not finish a trick within timeout_s = 0\.5 seconds, and was "
    "killed",
}
TRACEBACK = '\n\nIn the worker process:\n(?s:.*)raise RuntimeError\\("the wheel came off"\\)'


def failure_of(pool: Any, index: int, how: str) -> WorkerFailedError:
    """Let a worker fail; return the failure without its traceback."""
    pool.call(index, "fail", how)
    if how == "hang":
        pool.timeout_s = SHORT_S
    try:
        assert pool.ready(PATIENCE_S if how != "hang" else 2 * SHORT_S) in ([index], [])
        pool.receive(index)
    except WorkerFailedError as failure:
        pool.timeout_s = PATIENCE_S
        return failure.with_traceback(None)
    raise AssertionError("it did not fail")


def restart(pool: Any, index: int, how: str) -> None:
    """Let a worker fail and restart it."""
    failure = failure_of(pool, index, how)
    pool.restart(failure, f"{failure.text}; a word is lost", "and says hello")


@pytest.mark.parametrize(("where", "how"), elsewhere([*FAILURES, "refuse"], ["raise", "exit"]))
def test_worker_failure_raises_and_ends_the_pool(
    start: Any, where: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure raises an error and ends all processes; the other workers are closed.

    ConfigError of a worker is raised unchanged, even if restarts are enabled.
    """
    pool = start(where, on_worker_failure="restart" if how == "refuse" else "fail")
    pids = pool.call_all("process")
    appendix = TRACEBACK if how == "raise" else r"\Z"
    reason = r" \(workers were restarted 0 times; on_worker_failure = fail\)"
    error, words = ConfigError, r"\Awheels = 3: expected four"
    if how != "refuse":
        error, words = WorkerError, rf"\A{FAILURES[how]}; a word is lost{reason}{appendix}"
    with pytest.raises(error, match=words):
        restart(pool, 1, how)
    assert (len(pool), pool.restarts) == (0, 0)
    assert capfd.readouterr().err == ""
    assert left_of(pids, PATIENCE_S if where == "ray" else 0.0) == []
    assert multiprocessing.active_children() == []
    assert closed_in_order(tmp_path) >= {0, 2}


@pytest.mark.parametrize(("where", "how"), elsewhere(FAILURES, ["hang", "exit"]))
@pytest.mark.parametrize("stops_before", everyday(1, [False, True]))
def test_failed_worker_is_restarted(
    start: Any, where: str, how: str, stops_before: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A restart prints a warning; other workers continue, and step counts are kept."""
    pool = start(where, on_worker_failure="restart")
    pids = pool.call_all("process")
    pool.call(1, "walk", 3)
    assert pool.receive(1) == 3
    failure = failure_of(pool, 1, how)
    pool.call(2, "echo", "before")
    if stops_before:
        pool.stop(1)
        assert left_of(pids[1:2], PATIENCE_S if where == "ray" else 0.0) == []
        assert answers(pool, 1) == {2: (2, "before")}
        pool.call(2, "echo", "before")
    pool.restart(failure, failure.text, "and says hello")
    assert pool.pending(1) == 0
    pool.call(1, "process")
    told = answers(pool, 2)
    assert told == {1: told[1], 2: (2, "before")}
    assert [now == then for now, then in zip(pool.call_all("process"), pids, strict=True)] == [
        True, False, True,
    ]  # fmt: skip
    pool.call(1, "walk", 2)
    assert pool.receive(1) == 2
    assert pool.steps(1) == 5
    warning = capfd.readouterr().err
    outlook = r"it is restarted \(restart 1 of at most 10\), and says hello"
    appendix = TRACEBACK if how == "raise" else r"\n\Z"
    assert re.match(rf"warning: {FAILURES[how]}; {outlook}{appendix}", warning)


@pytest.mark.parametrize("where", REMOTE)
def test_max_worker_restarts_limits_the_pool(
    start: Any, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`max_worker_restarts` limits the restarts of all workers together."""
    pool = start(where, on_worker_failure="restart", max_worker_restarts=2)
    for index in (1, 0):
        restart(pool, index, "exit")
    words = r"\Atoy 1 .*; a word is lost \(workers were restarted 2 times; max_worker_restarts = 2"
    with pytest.raises(WorkerError, match=words):
        restart(pool, 1, "exit")
    assert (pool.restarts, len(pool)) == (2, 0)
    assert capfd.readouterr().err.count("is restarted (restart") == 2


@pytest.mark.parametrize("where", REMOTE)
@pytest.mark.parametrize(
    ("first", "error", "words"),
    [
        ("raise", WorkerError, rf"\Atoy [012]: RuntimeError: the wheel came off{TRACEBACK}"),
        (
            "exit",
            WorkerError,
            r"\Atoy [012] died in building its environments \((exit code 7|the process .*)\)\Z",
        ),
        ("hang", WorkerError, r"\Atoy [012] hangs: it did not finish building its environments"),
        ("refuse", ConfigError, r"\Awheels = 3: expected four"),
    ],
)
def test_worker_constructor_failure_is_not_restarted(
    start: Any, where: str, first: str, error: Any, words: str
) -> None:
    """A worker that fails in its constructor is not restarted; all processes end."""
    pool = start(
        where,
        first=first,
        on_worker_failure="restart",
        timeout_s=SHORT_S if first == "hang" else PATIENCE_S,
    )
    with pytest.raises(error, match=words):
        pool.call_all("echo")
    assert (pool.restarts, len(pool)) == (0, 0)
    assert multiprocessing.active_children() == []


IDLE = r"toy 1 died in waiting \(signal SIGKILL; was memory exhausted\?\)"


@slow
def test_idle_worker_death_is_detected(start: Any) -> None:
    """A worker that dies while idle is detected."""
    pool = start(on_worker_failure="restart")
    pool.call_all("echo")
    pool.processes[1].kill()
    assert pool.ready(PATIENCE_S) == [1]
    with pytest.raises(WorkerFailedError, match=IDLE) as told:
        pool.receive(1)
    pool.restart(told.value.with_traceback(None), "it died", "and that is all")
    assert pool.call_all("echo") == [(0,), (1,), (2,)]


@pytest.mark.parametrize("where", REMOTE)
@pytest.mark.exhaustive
def test_counting_steps_prevents_a_timeout(start: Any, where: str) -> None:
    """A worker does not time out while it counts steps, or while no one waits for it."""
    pool = start(where, n=2)
    pool.call_all("echo")
    pool.timeout_s = SHORT_S
    pool.call(0, "walk", 15, 0.1)
    assert pool.receive(0) == 15
    pool.call(0, "walk", 15, 0.1)
    pool.call(1, "echo")
    time.sleep(2.0 * SHORT_S)
    assert answers(pool, 2) == {0: 15, 1: (1,)}


@pytest.mark.parametrize("where", REMOTE)
def test_unpicklable_objects_name_their_setting(start: Any, where: str) -> None:
    """The error for objects that cannot be pickled names their setting."""
    pool = start(where, n=1)
    words = r"\Amodel: cannot be sent to a worker process .*use runner=dev"
    with pytest.raises(ConfigError, match=words):
        pool.call(0, "echo", Pickled((k for k in "ab"), "model"))


def refuse_start(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let process creation fail after `after` processes."""
    allowed, process = iter(range(after)), process_pool.WorkerProcess

    def refusing(*arguments: Any) -> Any:
        if next(allowed, None) is None:
            raise OSError("no more processes")
        return process(*arguments)

    monkeypatch.setattr(process_pool, "WorkerProcess", refusing)


@slow
def test_failed_process_start_ends_the_pool(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a process cannot be started, all running processes end."""
    pool = start(on_worker_failure="restart")
    refuse_start(monkeypatch, after=0)
    with pytest.raises(OSError, match="no more processes"):
        restart(pool, 1, "exit")
    assert len(pool) == 0
    refuse_start(monkeypatch, after=2)
    with pytest.raises(OSError, match="no more processes"):
        start()
    assert multiprocessing.active_children() == []


@slow
def test_unclosed_pool_is_collected(start: Any, tmp_path: Path) -> None:
    """An unclosed pool ends its processes when it is garbage-collected."""
    crew = WorkerSpecs([partial(ToyWorker, tmp_path, "")] * 2, ["toy 0", "toy 1"])
    pool = LocalProcesses(2, start_method="fork").pool(crew)
    pids, reference = pool.call_all("process"), weakref.ref(pool)
    del pool
    gc.collect()
    assert reference() is None
    assert left_of(pids, PATIENCE_S) == []
    assert closed_in_order(tmp_path) == {0, 1}
    assert multiprocessing.active_children() == []  # also joins finished children


PARENT = """
import os, sys, time
from functools import partial
from pathlib import Path
from leftovers import stat
from toy_workers import ToyWorker
from maze_train.workers.pool import WorkerSpecs
from maze_train.cluster.pool import RayBackend
from maze_train.workers.process_pool import LocalProcesses

if __name__ == "__main__":
    on_ray = sys.argv[1] == "ray"
    local = LocalProcesses(2, start_method="spawn" if on_ray else sys.argv[1])
    backend = RayBackend(2, address="local") if on_ray else local
    make = partial(ToyWorker, Path(sys.argv[2]), "")
    pool = backend.pool(WorkerSpecs([make] * 2, ["toy 0", "toy 1"]))
    services = [int(pid) for pid in os.listdir("/proc") if stat(pid)[1:2] == [str(os.getpid())]]
    print(*pool.call_all("process"), *services * on_ray, flush=True)
    pool.call(0, "walk", 10**9, 0.01)
    if sys.argv[3] == "ends":
        sys.exit(3)
    time.sleep(600.0)
"""


@slow
@pytest.mark.parametrize("where", ["fork", FORKSERVER, RAY])
@pytest.mark.parametrize("interrupted", [False, True])
def test_hanging_workers_are_killed_on_close(
    start: Any, where: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that hang are killed after a grace period, also if a signal interrupts it."""
    pool = start(where, n=2)
    pids = pool.call_all("process")
    pool.call(0, "fail", "hang")
    time.sleep(SHORT_S)  # until the worker hangs

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if interrupted:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                pool.close()
        else:
            monkeypatch.setattr(ray_pool if where == "ray" else process_pool, "CLOSE_GRACE_S", 0.2)
            pool.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left_of(pids, PATIENCE_S) == []


@slow
@pytest.mark.parametrize("where", ["fork", FORKSERVER, RAY])
@pytest.mark.parametrize("does", ["ends", "is killed"])
def test_workers_end_with_the_main_process(tmp_path: Path, where: str, does: str) -> None:
    """If the main process is killed or exits without closing its pool, workers and Ray end."""
    if where == "ray":
        pytest.importorskip("ray")
    with run_owner(PARENT, tmp_path, where, str(tmp_path), does) as (parent, pids):
        assert len(pids) == 2 or where == "ray"
        if does == "is killed":
            parent.kill()
        assert parent.wait(PATIENCE_S) == (3 if does == "ends" else -9)
        assert left_of(pids, PATIENCE_S) == []
    if where != "ray" or does == "ends":  # Ray kills the actors of a driver that has exited.
        assert closed_in_order(tmp_path) == {0, 1}


@pytest.mark.parametrize("more", [0, 5, 12])
def test_open_file_limit_is_named(start: Callable[..., Any], more: int) -> None:
    """If the limit of open files is exceeded, the error names the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        message = rf"too many open files: the limit of this process is {limit} \(ulimit -n\)"
        with pytest.raises(WorkerError, match=message):
            start("fork", n=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
