"""Runs on a Ray cluster of two hosts with different network addresses."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from short_runs import rows, short_run
from two_hosts import Host, two_hosts

from maze_train import train

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.ray]

LIMIT_S, PATIENCE_S = 240.0, 60.0
HELPERS = Path(__file__).parents[1] / "helpers"
PPO: dict[str, Any] = {"env": {"id": "CartPole-v1"}, "runner.concurrency": 4, "total_steps": 320}
SPREAD = {
    "runner": "ray",
    "runner.n_workers": 4,
    "runner.placement": "SPREAD",
    "runner.cpus_per_worker": 0.5,
}
RESTART = {**SPREAD, "runner.on_worker_failure": "restart"}
LEARNERS = {"runner.envs_per_actor": 2, "learner_group.n_learners": 2}


class RayHosts:
    """Ray cluster with a head and one other host, with 2 and 4 CPUs and a directory each."""

    def __init__(self, head: Host, other: Host, folder: Path) -> None:
        self.hosts = self.head, self.other = head, other
        self._folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(HELPERS),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(),
            # A lost host is noticed after some seconds instead of a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return f"{self.head.address}:6379"

    def start(self, host: Host) -> list[str]:
        """Return the command that starts Ray on a host."""
        where = [f"--address={self.address}", "--num-cpus=4"]
        if host is self.head:
            where = ["--head", "--port=6379", "--num-cpus=2", "--include-dashboard=false"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", *where]
        place = [f"--node-ip-address={host.address}", f"--temp-dir={self._folder / host.name}"]
        return host.command(*ray, *place, "--object-store-memory=100000000")

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command and return its outcome."""
        return subprocess.run(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def train(self, run_dir: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Train on the head; check that no worker remains once both hosts are connected."""
        given = {**settings, "runner.address": self.address, "tracking.progress": "lines"}
        code = f"import short_runs; short_runs.short_run({run_dir!r}, **{given!r})"
        outcome = self.run(self.head.command(sys.executable, "-c", code))
        self.other.connect("up")
        deadline = time.monotonic() + PATIENCE_S
        while any("RayWorker" in process for host in self.hosts for process in host.processes()):
            assert time.monotonic() < deadline, outcome.stdout
            time.sleep(0.2)
        return outcome


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    """Start Ray on the head."""
    pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray")  # Paths of sockets must be short.
    try:
        with two_hosts() as hosts:
            found = RayHosts(*hosts, Path(folder))
            outcome = found.run(found.start(found.head))
            assert outcome.returncode == 0, outcome.stdout
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def hosts(cluster: RayHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayHosts:
    """Connect the other host to the cluster; change to an empty directory."""
    monkeypatch.chdir(tmp_path)
    cluster.other.kill()
    cluster.other.connect("up")
    outcome = cluster.run(cluster.start(cluster.other))
    assert outcome.returncode == 0, outcome.stdout
    return cluster


def without_restarts(run_dir: str) -> list[dict[str, str]]:
    """Metrics of a run, except the number of restarts."""
    return [
        {name: cell for name, cell in row.items() if not name.endswith("worker_restarts")}
        for row in rows(run_dir)
    ]


@pytest.mark.parametrize("settings", [{}, LEARNERS], ids=["environments", "actors and learners"])
def test_workers_on_another_host_give_identical_results(
    hosts: RayHosts, settings: dict[str, Any]
) -> None:
    """Results with workers, or a learner, on another host are identical to one process."""
    on_ray = {**SPREAD, "runner.n_workers": 2, "runner.cpus_per_learner": 3.0}  # Not on the head.
    outcome = hosts.train("ray", **PPO, **settings, **on_ray)
    assert outcome.returncode == 0, outcome.stdout
    assert "ray: 2 machines, 6 CPUs" in outcome.stdout
    short_run("dev", **PPO, **settings)
    assert rows("ray") == rows("dev")


@pytest.mark.parametrize("kills", [True, False], ids=["killed", "disconnected"])
def test_run_waits_for_a_lost_host(hosts: RayHosts, kills: bool) -> None:
    """The run waits for the resources of its workers, and results do not change."""
    # With disconnected processes, workers fit on the head, and the run does not wait.
    returns = " ".join(hosts.start(hosts.other)) if kills else ""
    fault = {"_target_": "two_hosts.LosesHost", "host": list(hosts.other), "kills": kills}
    settings = {**PPO, **RESTART, "runner.cpus_per_worker": 1.0 if kills else 0.5}
    outcome = hosts.train("ray", **settings, callbacks=[{**fault, "returns": returns}])
    assert outcome.returncode == 0, outcome.stdout
    lost = f"(the machine {hosts.other.address} is lost or unreachable)"
    assert lost in outcome.stdout
    short_run("dev", **PPO)
    assert without_restarts("ray") == rows("dev")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (SPREAD, r"the machine 10\.77\.0\.2 is lost or unreachable"),
        (
            {**RESTART, "runner.worker_timeout_s": 15, "runner.cpus_per_worker": 1.0},
            r"was not started within worker_timeout_s = 15 seconds, because the cluster "
            r"has no resources for it; \d of 2 CPUs and 0 of 0 GPUs are free; add machines",
        ),
    ],
    ids=["fail", "restart"],
)
def test_host_that_does_not_return_ends_the_run(
    hosts: RayHosts, settings: dict[str, Any], text: str
) -> None:
    """The run ends with one error that names the host or the resources, and can be resumed."""
    fault = {"_target_": "two_hosts.LosesHost", "host": list(hosts.other)}
    outcome = hosts.train("ray", **PPO, **settings, callbacks=[fault])
    assert outcome.returncode == 1
    assert re.search(text, outcome.stdout.splitlines()[-1]), outcome.stdout
    train(resume="ray", runner="dev", callbacks=[], **{"tracking.progress": "quiet"})
    short_run("dev", **PPO)
    assert without_restarts("ray") == rows("dev")
