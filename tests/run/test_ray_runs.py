"""Runs on a Ray cluster: results equal one process; failures; clean-up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from rollouts import RANDOM, play
from rollouts import rows as episodes_of
from short_runs import rows, short_run

from maze_train import Callback, ConfigError, WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.ray]
exhaustive = pytest.mark.exhaustive

PATIENCE_S = 60.0
RAY: dict[str, Any] = {"runner": "ray", "runner.cpus_per_worker": 0.5}
CARTPOLE: dict[str, Any] = {"env": {"id": "CartPole-v1"}}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {**CARTPOLE, "runner.concurrency": 5, "total_steps": 600},
    "actors and learners of ppo": {
        **CARTPOLE,
        "runner.concurrency": 4,
        "runner.envs_per_actor": 1,
        "learner_group.n_learners": 2,
    },
    "es": {**CARTPOLE, "evaluation.max_episode_steps": 50},
    "calls in ppo": {
        "env": {"_target_": "called_envs.LevelEnv"},
        "callbacks": [{"_target_": "called_envs.Caller"}],
    },
}


@pytest.fixture
def on_two_machines(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change to an empty directory; yield a cluster; check that its CPUs are free afterwards."""
    import ray

    monkeypatch.chdir(tmp_path)
    yield ray_cluster
    deadline = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
        assert time.monotonic() < deadline, "something is still reserved"
        time.sleep(0.1)


COMMAND = [
    *("env=CartPole-v1", "+algorithm=ppo", "runner.concurrency=2", "algorithm.n_rollout_steps=8"),
    *("total_steps=48", "algorithm.batch_size=8", "algorithm.epoch_length=2", "seed=1"),
    *("evaluation.n_episodes=2", "evaluation.max_episode_steps=20", "tracking.plot=false"),
    "learner_group.n_learners=2",
]


ANOTHER_RAY = "import ray; ray.init(address='local', num_cpus=1); print(flush=True); input()"


@exhaustive
def test_ray_starts_on_this_machine_without_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address, Ray is started next to another program's Ray, also with several learners.

    Results equal `dev`, no log of Ray is printed, and the process exits.
    """
    pytest.importorskip("ray")
    # Other clusters store their address in the default folder; paths of sockets are short.
    folder = tempfile.mkdtemp(prefix="ray")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    other = subprocess.Popen(
        [sys.executable, "-c", ANOTHER_RAY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with other:
        for place in ("dev", "ray"):
            if place == "ray":
                assert other.stdout is not None
                assert other.stdout.readline()  # has started
            command = [*COMMAND, f"run_dir={place}", f"runner={place}"]
            result = subprocess.run(
                [sys.executable, "-m", "maze_train", *command],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                timeout=2 * PATIENCE_S,
            )
            assert result.returncode == 0, result.stderr
    shutil.rmtree(folder, ignore_errors=True)
    assert rows(tmp_path / "ray") == rows(tmp_path / "dev")
    first, *others = result.stderr.splitlines()
    assert first.startswith("ray: no running cluster, started Ray on this machine: 1 machine, ")
    assert [line for line in others if "ray" in line.lower()] == []


@exhaustive
def test_rollouts_on_ray_are_identical(on_two_machines: Any) -> None:
    """Episodes are identical on every runner."""
    play(**RANDOM, output_dir="dev", n_episodes=12)
    play(**RANDOM, **RAY, output_dir="ray", n_episodes=12, **{"runner.n_workers": 3})
    assert episodes_of("ray") == episodes_of("dev")


class RemoveMachine(Callback):
    """Callback that removes a machine during the run."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self._cluster, self._node = cluster, node

    def on_update_end(self, run: Any) -> None:
        """Remove it once."""
        if run.progress.updates == 3:
            self._cluster.remove_node(self._node, allow_graceful=False)


@exhaustive
def test_lost_machine_restarts_workers_elsewhere(
    on_two_machines: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers are restarted on other machines, and results are unchanged."""
    more = {**CASES["ppo"], "seed": 3}
    node = on_two_machines.add_node(num_cpus=4)
    on_two_machines.wait_for_nodes()
    how = {**RAY, "runner.n_workers": 3, "runner.placement": "SPREAD"}
    how["runner.on_worker_failure"] = "restart"
    callbacks = [RemoveMachine(on_two_machines, node)]
    short_run("ray", "ppo", **more, **how, callbacks=callbacks)
    assert "it is restarted (restart 1 of at most 10)" in capfd.readouterr().err
    short_run("dev", "ppo", **more)
    found = [
        {name: cell for name, cell in row.items() if not name.endswith("worker_restarts")}
        for row in rows("ray")
    ]
    assert found == rows("dev")


class UntilRestarted(Callback):
    """Callback that stops training some epochs after a worker was restarted."""

    def on_epoch_end(self, run: Any) -> None:
        """Ignore restarts in the last epochs."""
        if any(row.get("train/worker_restarts") for row in run.history[:-5]):
            run.stop("it continued")


@exhaustive
def test_lost_machine_restarts_actors_elsewhere(
    on_two_machines: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """IMPALA actors restart on other machines; their rollouts are dropped, reported and counted."""
    node = on_two_machines.add_node(num_cpus=4)
    on_two_machines.wait_for_nodes()
    more = {**CARTPOLE, **RAY, "runner.on_worker_failure": "restart", "algorithm.num_actors": 3}
    more |= {"runner.concurrency": 6, "runner.placement": "SPREAD", "total_steps": 10**8}
    callbacks = [RemoveMachine(on_two_machines, node), UntilRestarted()]
    result = short_run("run", "impala", **more, callbacks=callbacks)
    assert result.summary.stop_reason == "it continued"
    told = capfd.readouterr().err
    # Learning begins with the first rollouts, while other actors may still be built.
    lost = r"\(the machine [\d.]+ is lost or unreachable\); \d+ steps of its rollout are dropped"
    assert re.findall(f"died in [a-z ]+ {lost}; it is restarted", told)
    last = result.history[-1]
    learned = result.summary.env_steps + last["actors/steps_dropped"]
    assert last["actors/steps_made"] == learned + last["actors/steps_in_flight"]


@exhaustive
def test_insufficient_cluster_raises(on_two_machines: Any) -> None:
    """The error names the missing and available resources, and is raised before training."""
    words = r"the cluster has no resources for 1 x \{'CPU': 100.0\} \(PACK\).* of [0-9]+ CPUs"
    with pytest.raises(WorkerError, match=words):
        short_run("run", **RAY | {"runner.cpus_per_worker": 100.0, "runner.worker_timeout_s": 0.5})
    assert not Path("run").exists()


@pytest.mark.parametrize("key", ["address", "placement", "cpus_per_worker", "gpus_per_learner"])
def test_ray_settings_out_of_range_raise(key: str) -> None:
    """The error names the setting and is raised before Ray starts."""
    bad = {"address": "ray://far:10001", "placement": "NEAR"}.get(key, -1)
    with pytest.raises(ConfigError, match=rf"{key} = "):
        short_run("run", runner="ray", **{f"runner.{key}": bad})
