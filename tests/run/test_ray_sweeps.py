"""Sweeps on a cluster: jobs in processes of workers, lost machines, clean-up."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday
from leftovers import left_of
from short_runs import rows

from maze_train.cli import main
from maze_train.core.errors import ConfigError, WorkerError
from maze_train.workers.backends import ThisProcess
from maze_train.workers.job_pool import JobRecord, ProcessJob, StartedJob, WorkerJobs
from maze_train.workers.pool import WorkerFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 60.0
SWEEP = [
    *("-m", "hydra.sweep.dir=s", "env=CartPole-v1", "algorithm=ppo", "runner.concurrency=2"),
    *("algorithm.n_rollout_steps=8", "algorithm.batch_size=8", "algorithm.epoch_length=2"),
    *("total_steps=48", "evaluation.n_episodes=2", "evaluation.max_episode_steps=20"),
    *("tracking.plot=false", "tracking.tensorboard=false"),
]
WAITING = """
import os, pathlib, time, gymnasium

class Waiting(gymnasium.Wrapper):
    def __init__(self, env):
        super().__init__(env)
        pathlib.Path(f"pid{os.getpid()}").touch()
"""


def job_of(number: int, folder: Path, work: Callable[[], Any]) -> ProcessJob:
    """Return a job that calls a function."""
    record = JobRecord(number, f"seed={number}", str(folder / str(number)))
    return ProcessJob(record, folder / f"{number}.log", work)


@pytest.mark.slow
def test_sweep_jobs_on_ray_have_processes_and_logs(tmp_path: Path) -> None:
    """Each job has a process and a log; failures are reported, and other jobs continue."""
    ended: list[StartedJob] = []

    def good() -> JobRecord:
        print("a line of", os.getppid())
        return JobRecord(0, "seed=0", "", objective=3.0)

    works = [good, lambda: sys.exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)]
    jobs = [job_of(number, tmp_path, work) for number, work in enumerate(works)]
    WorkerJobs(ended.append, ThisProcess(), 3, [str(tmp_path)]).run(jobs)
    found = [(job.outcome.objective, job.outcome.error) for job in ended]
    assert found[0] == (3.0, "")
    assert [error for _, error in found[1:]] == [
        "its process ended with exit code 3",
        "ended by SIGKILL",
    ]
    assert (tmp_path / "0.log").read_text() == f"a line of {os.getpid()}\n"


def test_machine_without_the_directory_raises(tmp_path: Path) -> None:
    """A machine without access to a folder raises an error before any job starts."""
    pool = WorkerJobs(print, ThisProcess(), 1, [str(tmp_path), str(tmp_path / "s")])
    with pytest.raises(ConfigError, match=r"hydra/launcher = 'ray': .* has no folder .*/s; "):
        pool.run([])


@pytest.mark.parametrize("setting", everyday(1, ["cpus_per_job=0", "gpus_per_job=-1", "n_jobs=-1"]))
def test_ray_settings_out_of_range_raise(
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error names the setting as typed and is raised before Ray starts."""
    monkeypatch.chdir(tmp_path)
    assert main([*SWEEP, "hydra/launcher=ray", f"hydra.launcher.{setting}", "seed=1,2"]) == 2
    assert f"hydra.launcher.{setting.partition('=')[0]} = " in capsys.readouterr().err


class Machines:
    """Fake worker pool whose calls have outcomes defined by the test.

    Args:
        outcomes: Results of the calls of each worker; exceptions are raised.
    """

    def __init__(self, *outcomes: list[Any]) -> None:
        self.outcomes = [deque(own) for own in outcomes]
        self.calls: list[Any] = []
        self.waiting: list[deque[Any]] = [deque() for _ in outcomes]

    def num_workers(self, at_most: int) -> int:
        return len(self.outcomes)

    def pool(self, *_: Any) -> Any:
        return self

    def __len__(self) -> int:
        return len(self.outcomes)

    def call(self, index: int, method: str, *args: Any) -> None:
        self.calls.append((index, method))
        self.waiting[index].append(self.outcomes[index].popleft())

    def pending(self, index: int) -> int:
        return len(self.waiting[index])

    def ready(self, timeout_s: float) -> list[int]:
        return [index for index, calls in enumerate(self.waiting) if calls]

    def receive(self, index: int) -> Any:
        outcome = self.waiting[index].popleft()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def restart(self, failure: WorkerFailedError, told: str, outlook: str) -> None:
        self.calls.append((failure.index, "restart"))

    def stop(self, index: int) -> None:
        self.calls.append((index, "stop"))

    def cancel(self, index: int) -> None:
        self.calls.append((index, "cancel"))

    def close(self) -> None:
        self.calls.append("close")


def play(machines: Machines, folder: Path, n_jobs: int = 3) -> list[str]:
    """Run jobs; return their errors in the order in which they ended."""
    ended: list[StartedJob] = []
    jobs = [job_of(number, folder, SimpleNamespace) for number in range(n_jobs)]
    try:
        WorkerJobs(ended.append, machines, n_jobs, []).run(jobs)
    finally:
        assert machines.calls[-1] == "close"
        errors = [f"{job.outcome.number}: {job.outcome.error}" for job in ended]
    return errors


def test_lost_worker_fails_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lost worker fails its job; if it does not restart, the other workers run its jobs."""
    lost = WorkerFailedError(0, "job worker 0 died")
    done = [JobRecord(number, "", "") for number in (1, 2)]
    machines = Machines([None, lost, lost], [None, *done])
    assert play(machines, tmp_path) == ["0: job worker 0 died", "1: ", "2: "]
    assert machines.calls == [
        *[(0, "begin"), (1, "begin"), (0, "run"), (1, "run")],
        *[(0, "restart"), (0, "begin"), (1, "run"), (0, "stop"), "close"],
    ]
    assert capsys.readouterr().err == "note: job worker 0 died; the other workers run its jobs\n"
    with pytest.raises(WorkerError, match="all job workers are lost, but not all jobs have run"):
        play(Machines([lost]), tmp_path)


def test_signals_cancel_jobs(tmp_path: Path) -> None:
    """Signals cancel running jobs; the third signal kills them."""
    cancelled = JobRecord(0, "", "", error="ended by SIGTERM")
    machines = Machines([None, cancelled])
    machines.ready = interrupted(machines, 2)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        play(machines, tmp_path, 1)
    assert machines.calls[-2:] == [(0, "cancel"), "close"]
    ended: list[StartedJob] = []
    machines = Machines([None, cancelled])
    machines.ready = interrupted(machines, 2, 3, 4)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        WorkerJobs(ended.append, machines, 1, []).run([job_of(0, tmp_path, SimpleNamespace)])
    assert machines.calls[-3:] == [(0, "cancel"), (0, "cancel"), "close"]
    assert ended[0].outcome.error == "killed"


def interrupted(machines: Machines, *times: int) -> Callable[[float], list[int]]:
    """Return a `ready` method that is interrupted at the given calls."""
    ready, count = machines.ready, iter(range(1, 100))

    def interrupted_ready(timeout_s: float) -> list[int]:
        if next(count) in times:
            raise KeyboardInterrupt
        return ready(timeout_s)

    return interrupted_ready


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.ray
def test_sweep_on_ray_equals_sequential_jobs(
    ray_cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Results on two machines equal sequential jobs; a failed job is reported."""
    monkeypatch.chdir(tmp_path)
    on_ray = ("hydra/launcher=ray", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=r")
    choice = "env.kwargs={},{wrong:1}"  # the error occurs when the environment is built
    found = [main([*SWEEP, *how, "seed=1,2", choice]) for how in ((), on_ray)]
    assert found == [2, 2]
    tables = [Path(name, "jobs.csv").read_text().splitlines() for name in ("s", "r")]
    assert tables[0] == tables[1]
    assert [line.endswith(",") for line in tables[1][1:]] == [True, False] * 2
    for job in (0, 2):
        assert rows(Path("s", str(job))) == rows(Path("r", str(job)))
        assert "epoch   2 " in Path("r", str(job), "job.log").read_text()
    output = capfd.readouterr()
    assert "its output: " in output.err
    assert "maze-run: job 2: done in " in output.out


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_ray_sweep_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C lets runs save; all runs end with the process of the sweep."""
    pytest.importorskip("ray")
    (tmp_path / "waiting_env.py").write_text(WAITING)
    command = [sys.executable, "-m", "maze_train", *SWEEP, "seed=1,2", "total_steps=10_000_000"]
    command += ["hydra/launcher=ray", "hydra.launcher.address=local", "hydra.launcher.n_jobs=2"]
    command += ["env.wrappers=[{_target_: waiting_env.Waiting}]"]
    with Popen(command, cwd=tmp_path, stderr=PIPE, text=True, start_new_session=True) as sweep:
        try:
            assert sweep.stderr is not None
            begun: list[Path] = []
            while len(begun) < 2:
                assert sweep.poll() is None
                logs = tmp_path.glob("s/*/job.log")
                begun = [log for log in logs if "epoch   1 " in log.read_text()]
                time.sleep(0.1)
            pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
        finally:
            sweep.send_signal(number)
        told = sweep.stderr.read()
    assert sweep.returncode == {signal.SIGINT: 130}.get(number, -number)
    assert left_of(pids, PATIENCE_S) == []
    if number == signal.SIGINT:
        assert told.count("ended by SIGTERM\n") == 2
        assert len(list(tmp_path.glob("s/*/checkpoints"))) == 2
