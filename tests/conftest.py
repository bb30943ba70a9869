"""Order of the tests, a single PyTorch thread, and checks for leftover processes and files."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hydra._internal.hydra import Hydra
from leftovers import open_files
from own_envs import SpacesEnv

from maze_train.cluster.session import RAY_ENVIRONMENT
from maze_train.learner.process_group import Rendezvous, join, leave
from maze_train.workers.pool import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_configure() -> None:
    """Use one PyTorch thread: tests are small, and more threads would compete for busy cores."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that train first, then tests on Ray, slow tests and fast tests.

    Long tests start early, so that no worker still runs one while the others are idle. Spawned
    processes import everything again, so `make test` skips them. Test names must be the same in
    every worker.
    """
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"{item.nodeid}: give this case a name (ids=...)")
        if "spawn" in item.name.partition("[")[2]:
            item.add_marker(pytest.mark.exhaustive)
    groups = ("learning", "ray", "slow")
    items.sort(key=lambda item: [not item.get_closest_marker(group) for group in groups])


@pytest.fixture(scope="session", autouse=True)
def config_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set and yield the user's configuration directory, also for processes started by tests."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("config")
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def no_waits() -> Iterator[None]:
    """Skip slow steps that no test checks.

    `fsync` takes a sixth of the time of a short run. Hydra composes the configuration twice to
    read `hydra.mode`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Kill the processes that a test left behind, and fail the test.

    Processes of a failed test must not disturb later tests. Shells start background jobs with
    SIGINT ignored, and `nohup` ignores SIGHUP: tests of signals need the default handlers.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()
        process.join()
    assert not left


@pytest.fixture
def float64() -> Iterator[None]:
    """Use double precision by default, and seed PyTorch."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def has_connected() -> None:
    """Connect learners once; PyTorch keeps some files open after the first connection."""
    meeting = Rendezvous(LOOPBACK)
    join(meeting.address, 0, 1, 60.0, None)
    leave()
    meeting.close()


@pytest.fixture(scope="session")
def ray_machines() -> Iterator[Any]:
    """Start a Ray cluster with two nodes of four CPUs each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=4)
    yield cluster
    sys.modules["ray"].shutdown()
    cluster.shutdown()


@pytest.fixture
def ray_cluster(ray_machines: Any) -> Any:
    """Return the cluster with two nodes, to which this process is connected."""
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        ray.init(address=ray_machines.address, logging_level="CRITICAL", log_to_driver=False)
    return ray_machines


@pytest.fixture(autouse=True)
def only_tests_of_ray_are_connected(request: pytest.FixtureRequest) -> None:
    """Disconnect from Ray before other tests, since gRPC fails in processes that fork."""
    if "ray" in sys.modules and not request.node.get_closest_marker("ray"):
        sys.modules["ray"].shutdown()


@pytest.fixture
def no_file_is_left(no_process_is_left: None) -> Iterator[None]:
    """Check that a test leaves no open socket, pipe or shared memory."""
    resource_tracker.ensure_running()  # both processes stay alive
    forkserver.ensure_running()
    before = open_files()
    yield
    if open_files() - before:
        gc.collect()  # mapped memory is open until it is collected
    assert not open_files() - before


@pytest.fixture
def empty_directory(
    no_file_is_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Change to an empty directory; check that all environments are closed and no file is left."""
    monkeypatch.chdir(tmp_path)
    SpacesEnv.open_envs = 0
    yield
    assert SpacesEnv.open_envs == 0
