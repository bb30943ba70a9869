"""Order of the tests, a single PyTorch thread, and detection of leftovers."""

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

from maze_train.cluster.session import RAY_ENVIRONMENT
from maze_train.learner.process_group import Rendezvous, join, leave
from maze_train.run import assembly
from maze_train.workers.pool import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def pytest_configure() -> None:
    """One thread of PyTorch: tests are small, and threads wait long for busy cores."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train, then those on Ray, slow ones, fast ones; otherwise in the usual order.

    Long tests come first, so that no process works on one while the others have nothing left.
    Processes that are spawned import everything again: `make test` does without them. Names have to
    be the same in every process that runs tests.
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
    """The user's directory for configuration, also of the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("config")
        patch.setenv("XDG_CONFIG_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def no_waits() -> Iterator[None]:
    """Leave out what takes long, and what no test looks at.

    Files are not brought to the disk, which takes a sixth of the time of a short run. Hydra does
    not compose what a command says twice, first for `hydra.mode` alone. Runs do not examine their
    environments (`runner.check_repeatability`), which takes a third of the time of a short run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "is_examined", lambda config: False)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        yield


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """End the processes that a test left behind, and fail it.

    A failed test leaves processes, too; they must not disturb later tests. Shells start background
    jobs with SIGINT ignored, and `nohup` ignores SIGHUP: tests of signals need the defaults.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """Double precision for all that does not say otherwise, and the same random numbers."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def has_connected() -> None:
    """Connect learners once: what PyTorch opens for all connections of a process stays."""
    meeting = Rendezvous(LOOPBACK)
    join(meeting.address, 0, 1, 60.0, None)
    leave()
    meeting.close()


@pytest.fixture(scope="session")
def ray_machines() -> Iterator[Any]:
    """Two machines with four CPUs each, as Ray sees them."""
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
    """The two machines, and a connection of this process with them."""
    ray = sys.modules["ray"]
    if not ray.is_initialized():
        ray.init(address=ray_machines.address, logging_level="CRITICAL", log_to_driver=False)
    return ray_machines


@pytest.fixture(autouse=True)
def only_tests_of_ray_are_connected(request: pytest.FixtureRequest) -> None:
    """Disconnect before other tests: gRPC loses calls of a process that forks."""
    if "ray" in sys.modules and not request.node.get_closest_marker("ray"):
        sys.modules["ray"].shutdown()


@pytest.fixture
def no_file_is_left(no_process_is_left: None) -> Iterator[None]:
    """Check that a test leaves no socket, pipe, or memory that processes share."""
    resource_tracker.ensure_running()  # They stay, whoever starts them.
    forkserver.ensure_running()
    before = open_files()
    yield
    if open_files() - before:
        gc.collect()  # Mapped memory is open until no one has it.
    assert not open_files() - before
