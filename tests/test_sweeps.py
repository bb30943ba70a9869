"""Sweeps: comparison of runs and parallel jobs, with runners that do not train."""

from __future__ import annotations

import csv
import importlib
import json
import math
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from cases import everyday
from command_lines import CommandLine, maze_run
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback as HydraCallback
from leftovers import left_of, run_owner
from other_launcher import other_launcher
from run_files import write_run
from short_runs import PPO, SMALL

from maze_train import Callback
from maze_train.cli import main
from maze_train.core.files import exclusive
from maze_train.workers.backends import SIGNALS, signals_later
from maze_train.workers.job_pool import JobPool, StartedJob

if TYPE_CHECKING:
    from maze_train.config.train_config import TrainConfig

__all__ = ["maze_run", "other_launcher"]

ENV = "env=CartPole-v1"
SWEEP = ("-m", "algorithm=ppo", ENV, "hydra.sweep.dir=s")
LOCAL = ("hydra/launcher=local", "hydra.launcher.n_jobs=2")
FORK = multiprocessing.get_context("fork")
PATIENCE_S = 60.0


def wait_for_signals() -> None:
    """Sleep briefly; `signal.pause` would miss a signal that arrives just before the call."""
    time.sleep(0.02)


OWNER = """
import os, signal, sys, threading
from types import ModuleType, SimpleNamespace
sys.path.insert(0, {package!r})
os.chdir({folder!r})
reader, writer = os.pipe()

class Runner:
    def __init__(self, config):
        os.write(writer, b"%d " % os.getpid())
    def run(self):
        signal.pause()

def tell():
    pids = b""
    while pids.count(b" ") < 2:
        pids += os.read(reader, 100)
    print(pids.decode(), file=out, flush=True)

out, sys.stdout = sys.stdout, sys.stderr
module = ModuleType("maze_train.run.train")
module.TrainingRunner = Runner
sys.modules[module.__name__] = module
import maze_train.jobs
from maze_train.cli import main
threading.Thread(target=tell, daemon=True).start()
main([*{arguments!r}, "seed=0,1"])
"""


def run_of_seed(config: TrainConfig) -> float:
    """Write a run whose return is its seed; seed 1 fails."""
    print("a line of the job")
    for descriptor in (1, 2):
        os.write(descriptor, b"a line of a library\n")
    if config.seed == 1:
        raise ValueError("a bug")
    assert config.run_dir is not None
    write_run(Path(config.run_dir), [config.seed or 0.0], seed=config.seed)
    return float(config.seed or 0)


@pytest.mark.parametrize("launcher", everyday(1, [(), LOCAL]))
def test_sweep_writes_comparison_and_table_with_failed_jobs(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], launcher: tuple[str, ...]
) -> None:
    """The comparison is saved and printed, with failed jobs, for every launcher."""
    maze_run.train = run_of_seed
    assert maze_run(*SWEEP, *launcher, "seed=0,1,2,3") == 1
    output = capfd.readouterr()
    assert ",1.6666666666666667," in (maze_run.folder / "s/comparison.csv").read_text()
    label = "job 1 (algorithm=ppo env=CartPole-v1 seed=1)"
    assert f"  s: {label}: ValueError: a bug" in output.out
    assert f"maze-run: error: {label}: ValueError: a bug\n" in output.err
    assert output.err.endswith("maze-run: 1 of 4 jobs failed\n")
    rows = list(csv.DictReader((maze_run.folder / "s/jobs.csv").read_text().splitlines()))
    assert rows[1] == {
        "job": "1",
        "settings": "algorithm=ppo env=CartPole-v1 seed=1",
        "run_dir": "1",
        "objective": "NaN",
        "error": "ValueError: a bug",
    }
    assert [row["objective"] for row in rows] == ["0.0", "NaN", "2.0", "3.0"]
    files = maze_run.files()
    assert {f"s/comparison.{kind}" for kind in ("csv", "md", "png")} < set(files)
    logs = [name for name in files if name.endswith(".log")]
    assert logs == ([f"s/{i}/job.log" for i in range(4)] if launcher else [])
    assert ("a line of the job" in output.out) is (launcher == ())
    for text in (output.out, output.err):
        assert ("a line of a library" in text) is (launcher == ())
    assert all((maze_run.folder / name).read_text().count("library") == 2 for name in logs)


@pytest.mark.parametrize(
    ("launcher", "directory"), [((), "a b"), (LOCAL, "s/${env.id}"), ((), None)]
)
def test_sweep_files_stay_in_the_sweep_directory_with_chdir(
    maze_run: CommandLine, launcher: tuple[str, ...], directory: str | None
) -> None:
    """Table and comparison are in the sweep directory, and contain all runs."""
    maze_run.train = run_of_seed
    named = [] if directory is None else [f"hydra.sweep.dir={directory}"]
    argv = (*SWEEP[:-1], *launcher, *named, "seed=0,2", "hydra.job.chdir=true")
    assert maze_run(*argv) == 0
    (table,) = maze_run.folder.rglob("jobs.csv")
    expected = str(directory).replace("${env.id}", "CartPole-v1")
    assert directory is None or table == maze_run.folder / expected / "jobs.csv"
    assert [row.split(",")[2] for row in table.read_text().splitlines()] == ["run_dir", "0", "1"]
    (comparison,) = maze_run.folder.rglob("comparison.csv")
    assert comparison.parent == table.parent
    assert ",0 2," in comparison.read_text()


class Stopped(datetime):
    """Clock that always shows the same time."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        """Return the fixed time."""
        return cls(2026, 1, 2, 3, 4, 5)


def test_simultaneous_sweeps_use_separate_directories(
    maze_run: CommandLine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Sweeps that start in the same second have separate directories; a directory has one sweep."""
    monkeypatch.setattr("maze_train.core.files.datetime", Stopped)
    maze_run.train = run_of_seed
    for _ in range(2):
        assert maze_run(*SWEEP[:-1], "seed=0,2") == 0
        assert maze_run("-cn", "compare", "runs=outputs/sweeps") == 0
    for kind, name in (("sweeps", "jobs.csv"), ("comparisons", "comparison.csv")):
        names = sorted(
            path.parent.name for path in maze_run.folder.glob(f"outputs/{kind}/*/{name}")
        )
        assert names == ["2026-01-02_03-04-05", "2026-01-02_03-04-05-2"]
    (maze_run.folder / "s").mkdir()
    capfd.readouterr()
    with exclusive(maze_run.folder / "s", "sweeps in"):
        assert maze_run(*SWEEP, "seed=0,2") == 1
    assert f"another process (pid {os.getpid()} on host" in (text := capfd.readouterr().err)
    assert f"sweeps in {maze_run.folder / 's'}: wait until it ends" in text
    assert not (maze_run.folder / "s/jobs.csv").exists()


class PreemptOnce(Callback):
    """The signal of submitit in the second epoch, the first time."""

    def on_epoch_end(self, run: Any) -> None:
        """Send the signal."""
        note = Path(run.run_dir).parent / "preempted"
        if run.progress.epoch == 1 and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGUSR2)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["other", "submitit_local"])
def test_preempted_job_resumes_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_launcher: str, launcher: str
) -> None:
    """The handler of its launcher is called once a checkpoint is saved; the restart resumes."""
    if launcher == "submitit_local":
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.chdir(tmp_path)
    given = {**SMALL, **PPO, "env": "CartPole-v1", "algorithm.epoch_length": 1}
    words = [f"{key}={value}" for key, value in given.items()]
    words += ["callbacks=[{_target_: test_sweeps.PreemptOnce}]", "seed=1,2"]
    assert main(["-m", f"hydra/launcher={launcher}", "hydra.sweep.dir=s", *words]) == 0
    for job in range(2):
        rows = list(csv.DictReader((tmp_path / f"s/{job}/metrics.csv").read_text().splitlines()))
        assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(1, 7)]
        starts = json.loads((tmp_path / f"s/{job}/environment.json").read_text())["starts"]
        assert len(starts) == (2 if job == 0 else 1)
    table = csv.DictReader((tmp_path / "s/jobs.csv").read_text().splitlines())
    assert [row["error"] for row in table] == ["", ""]


class StopOnce(Callback):
    """Callback that sends SIGINT once, in the second epoch of seed 1."""

    def on_epoch_end(self, run: Any) -> None:
        """Send the signal."""
        note = Path(run.run_dir).parent / "stopped"
        is_second = run.progress.epoch == 1 and Path(run.run_dir).name == "1"
        if is_second and not note.exists():
            note.touch()
            is_job = multiprocessing.parent_process() is not None
            os.kill(os.getppid() if is_job else os.getpid(), signal.SIGINT)
            time.sleep(0.5 * is_job)  # the sweep's process forwards the signal


@pytest.mark.slow
@pytest.mark.parametrize("launcher", everyday(1, [(), LOCAL[:1]]))
def test_printed_command_resumes_an_interrupted_sweep(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    launcher: tuple[str, ...],
) -> None:
    """The printed command keeps finished jobs and resumes the interrupted one."""
    monkeypatch.chdir(tmp_path)
    given = {"total_steps": 192, "runner.concurrency": 2, "algorithm.n_rollout_steps": 32}
    given |= {"algorithm.batch_size": 32, "algorithm.epoch_length": 1, "evaluation.n_episodes": 1}
    given |= {"tracking.progress": "quiet", "tracking.plot": "false", "model.hidden_sizes": "[4]"}
    more = [f"{key}={value}" for key, value in given.items()]
    more += ["callbacks=[{_target_: test_sweeps.StopOnce}]", "seed=0,1,2"]
    one = ["hydra.launcher.n_jobs=1"] if launcher else []
    argv = [*SWEEP[:-1], "hydra.sweep.dir=a b", *launcher, *one, *more]
    assert main(argv) == 130
    text = capfd.readouterr().err
    (line,) = (line for line in text.splitlines() if line.startswith("to resume the sweep: "))
    summaries = [tmp_path / f"a b/{job}/summary.json" for job in range(3)]
    assert [path.exists() for path in summaries] == [True, True, False]
    first = summaries[0].read_bytes()
    words = shlex.split(line.partition(": ")[2])
    assert words[0] == "maze-run"
    assert main(words[1:]) == 0
    assert summaries[0].read_bytes() == first
    assert [json.loads(path.read_text())["env_steps"] for path in summaries] == [192, 192, 192]
    rows = (tmp_path / "a b/1/metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", "1", "2", "3"]
    output = capfd.readouterr().out
    log = output if not launcher else (tmp_path / "a b/0/job.log").read_text()
    assert f"{tmp_path}/a b/0 has already finished" in log
    assert "ppo           3 " in output
    assert main([*words[1:], "total_steps=256"]) == 0
    assert [json.loads(path.read_text())["env_steps"] for path in summaries] == [256, 256, 256]


class Ends(HydraCallback):
    """Hydra callback that logs how each job ended."""

    def on_job_end(self, config: Any, job_return: JobReturn, **kwargs: Any) -> None:
        """Append the status and the returned value."""
        with open(f"{config.hydra.runtime.cwd}/ends", "a") as file:
            file.write(f"{job_return.status.name} {job_return._return_value!r}\n")


@pytest.mark.parametrize("given", [(), ("-m",), ("-m", *LOCAL), ("-m", "hydra/launcher=other")])
def test_hydra_callbacks_receive_failures(
    maze_run: CommandLine,
    capfd: pytest.CaptureFixture[str],
    other_launcher: str,
    given: tuple[str, ...],
) -> None:
    """Callbacks receive the exception, with any launcher; Hydra prints no error."""
    maze_run.train = run_of_seed
    seeds = "seed=1,2" if given else "seed=1"
    end = "+hydra.callbacks.ends._target_=test_sweeps.Ends"
    assert maze_run(*given, *SWEEP[1:], "run_dir=null" if given else "run_dir=r", end, seeds) == 1
    ends = sorted((maze_run.folder / "ends").read_text().splitlines())
    assert ends == [*["COMPLETED 2.0"] * bool(given), "FAILED ValueError('a bug')"]
    told = capfd.readouterr().err
    assert "Error executing job" not in told
    assert told.count("error: ") == 2 if given[1:] == ("hydra/launcher=other",) else 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["other", "joblib", "submitit_local"])
def test_every_launcher_writes_table_and_comparison(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    other_launcher: str,
    launcher: str,
) -> None:
    """Table, comparison and failures are derived from the values that the launcher returns."""
    if launcher != "other":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    monkeypatch.chdir(tmp_path)
    given = {**SMALL, **PPO, "env": "CartPole-v1"}
    given["env.kwargs"] = "{render_mode: null},{no: 1},{sutton_barto_reward: true}"
    words = [f"{key}={value}" for key, value in given.items()]
    assert main(["-m", f"hydra/launcher={launcher}", "hydra.sweep.dir=s", *words]) == 2
    if launcher == "joblib":  # idle workers would outlive the test
        importlib.import_module("joblib.externals.loky").get_reusable_executor().shutdown()
    table = list(csv.DictReader((tmp_path / "s/jobs.csv").read_text().splitlines()))
    assert [row["job"] for row in table] == [row["run_dir"] for row in table] == ["0", "1", "2"]
    assert ["does not accept" in row["error"] for row in table] == [False, True, False]
    assert [math.isfinite(float(row["objective"])) for row in table] == [True, False, True]
    assert len((tmp_path / "s/comparison.csv").read_text().splitlines()) == 3
    output = capfd.readouterr()
    assert output.err.endswith("maze-run: 1 of 3 jobs failed\n")
    assert "maze-run: error: job 1 (" in output.err


def test_launcher_of_the_same_name_is_replaced_with_a_note(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], other_launcher: str
) -> None:
    """Our launcher runs the jobs, and a note is printed; the other one is restored afterwards."""
    assert maze_run(*SWEEP, *LOCAL[:1], "seed=0,1") == 0
    note = f"note: hydra/launcher=local is LocalLauncher of maze_train, not {other_launcher}\n"
    assert capfd.readouterr().err.count(note) == 1
    node = ConfigStore.instance().load("hydra/launcher/local.yaml").node
    assert node["_target_"] == other_launcher


@pytest.mark.parametrize(
    ("varied", "names"),
    everyday(
        2,
        [
            ("env.kwargs.maps=[a/b],../c d", ["env.kwargs.maps=-a-b-", "env.kwargs.maps=..-c-d"]),
            ("tracking.name=mine", ["mine"]),
            (f"env.kwargs.map={'x' * 99},y", [f"env.kwargs.map={'x' * 85}", "env.kwargs.map=y"]),
        ],
        are_rows=True,
    ),
)
def test_sweep_names_runs_by_varied_settings(
    maze_run: CommandLine, varied: str, names: list[str]
) -> None:
    """The name contains only settings that differ and is a valid path; all runs share a group."""
    given = ("total_steps=2k", "+tracking.plot=false", "tracking.info_keys=[a,b]")
    assert maze_run(*SWEEP, *given, varied) == 0
    assert [config.tracking.name for config in maze_run.configs] == names
    assert maze_run(*SWEEP[1:-1], *given, "algorithm.lr=1e-3", "run_dir=r") == 0
    assert len({config.tracking.group for config in maze_run.configs[:-1]} - {""}) == 1
    last = maze_run.configs[-1].tracking
    assert (last.name, last.group) == ("", "")


def test_compare_command_accepts_directories_and_lists(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command accepts one directory or a list; each error is one message."""
    write_run(maze_run.folder / "a", [1.0, 9.0])
    write_run(maze_run.folder / "b", [1.0, 3.0], seed=1)
    compare = ("-cn", "compare", "output=o")
    assert maze_run(*compare, "runs=[a,b]", "threshold=5") == 0
    assert capfd.readouterr().out.endswith(f"results: {maze_run.folder / 'o'}\n")
    assert maze_run(*compare, "runs=c") == 2
    assert "maze-run: error: runs = 'c': no run found" in capfd.readouterr().err
    assert maze_run(*compare, "runs=a", "--cfg", "job") == 0
    assert "n_resamples: 10000" in capfd.readouterr().out
    assert maze_run.configs == []


@pytest.mark.parametrize("launcher", everyday(1, [LOCAL, LOCAL[:1]]), ids=["two", "one per core"])
def test_parallel_jobs_are_limited_by_n_jobs_with_one_gpu_each(
    maze_run: CommandLine, monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, ...]
) -> None:
    """At most `n_jobs` run in parallel, each with one GPU; the others wait."""
    cores = 2 if launcher == LOCAL[:1] else 9
    monkeypatch.setattr("maze_train.workers.job_pool.available_cores", lambda: cores)
    together, running, most = FORK.Barrier(2), FORK.Value("i", 0), FORK.Value("i", 0)

    def train(config: TrainConfig) -> float:
        with running:
            running.value += 1
            most.value = max(most.value, running.value)
        together.wait(PATIENCE_S)
        assert os.getpgrp() == os.getpid()  # Ctrl-C in a terminal only reaches the sweep
        maze_run.write(f"gpu{config.seed}", os.environ["CUDA_VISIBLE_DEVICES"])
        with running:
            running.value -= 1
        together.wait(PATIENCE_S)
        return 1.0

    maze_run.train = train
    assert maze_run(*SWEEP, *launcher, "hydra.launcher.gpus=[5,7]", "seed=0,1,2,3") == 0
    assert most.value == 2
    seen = [(maze_run.folder / f"gpu{seed}").read_text() for seed in range(4)]
    assert sorted(seen) == ["5", "5", "7", "7"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("end", "reason"),
    everyday(
        1,
        [
            (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
            (lambda: os.kill(os.getpid(), signal.SIGTERM), "ended by SIGTERM"),
            (lambda: os._exit(3), "its process ended with exit code 3"),
            (lambda: sys.exit(0), "SystemExit: 0"),
        ],
        are_rows=True,
    ),
    ids=["killed", "terminated", "gone", "exit"],
)
def test_lost_job_does_not_stop_a_sweep(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str], end: object, reason: str
) -> None:
    """The error says how the process ended."""
    maze_run.train = lambda config: end() if config.seed == 0 else 1.0  # type: ignore[operator]
    assert maze_run(*SWEEP, *LOCAL, "seed=0,1") == 1
    output = capfd.readouterr()
    label = "job 0 (algorithm=ppo env=CartPole-v1 seed=0)"
    log = maze_run.folder / "s/0/job.log"
    assert f"maze-run: error: {label}: {reason}\n  its output: {log}\n" in output.err
    assert "maze-run: job 1: done in " in output.out


def test_signal_ends_all_jobs_of_a_sweep(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal is forwarded to running jobs; no other job starts."""
    both = FORK.Barrier(2)

    def train(config: TrainConfig) -> float:
        both.wait(PATIENCE_S)
        if config.seed == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        while True:
            wait_for_signals()

    maze_run.train = train
    assert maze_run(*SWEEP, *LOCAL, "seed=0,1,2") == 143
    assert capfd.readouterr().err.endswith("maze-run: terminated\n")
    rows = csv.DictReader((maze_run.folder / "s/jobs.csv").read_text().splitlines())
    assert [row["error"] for row in rows] == ["ended by SIGTERM"] * 2


def test_failing_sweep_ends_all_jobs(
    maze_run: CommandLine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All jobs end if the sweep itself fails."""
    errors = [OSError("a full disk")]

    def notify(*_: object) -> None:
        if errors:
            raise errors.pop()

    def train(config: TrainConfig) -> float:
        while config.seed == 0:
            wait_for_signals()
        return 1.0

    maze_run.train = train
    monkeypatch.setattr("maze_train.hydra_sweeps.tell_end", notify)
    assert maze_run(*SWEEP, *LOCAL, "seed=0,1") == 1
    assert capfd.readouterr().err.endswith("maze-run: error: OSError: a full disk\n")
    assert ",0,NaN,ended by SIGTERM\n" in (maze_run.folder / "s/jobs.csv").read_text()


def test_third_signal_kills_a_job_that_ignores_signals(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """The third signal kills the job with its child processes."""
    signals = maze_run.folder / "signals"

    def again(*_: object) -> None:
        with signals.open("a") as file:
            file.write("x")
        os.kill(os.getppid(), signal.SIGINT)

    def train(config: TrainConfig) -> float:
        signal.signal(signal.SIGINT, again)
        child = subprocess.Popen(["sleep", "600"])
        maze_run.write("child", str(child.pid))
        again()
        while True:
            wait_for_signals()

    maze_run.train = train
    assert maze_run(*SWEEP, *LOCAL, "seed=0") == 130
    assert "ended by SIGKILL\n" in capfd.readouterr().err
    assert signals.read_text() == "xxx"  # one of its own, and two forwarded ones
    assert left_of([int((maze_run.folder / "child").read_text())], PATIENCE_S) == []


@pytest.mark.slow
def test_killed_sweep_ends_its_jobs(tmp_path: Path) -> None:
    """Jobs end even if the sweep is killed."""
    package = str(Path(__file__).parents[1])
    code = OWNER.format(package=package, folder=str(tmp_path), arguments=[*SWEEP, *LOCAL])
    with run_owner(code, tmp_path) as (owner, pids):
        assert len(pids) == 2
        owner.kill()
        assert left_of(pids, PATIENCE_S) == []


def test_negative_n_jobs_raises(maze_run: CommandLine, capfd: pytest.CaptureFixture[str]) -> None:
    """One message, and no job runs."""
    assert maze_run(*SWEEP, *LOCAL[:1], "hydra.launcher.n_jobs=-1", "seed=0,1") == 2
    error = "maze-run: error: hydra.launcher.n_jobs = -1: expected a number >= 0\n"
    assert capfd.readouterr().err == error
    assert maze_run.configs == []


def test_sweep_compares_directories_of_resumed_runs(
    maze_run: CommandLine, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sweep compares the directories of the resumed runs."""
    for seed, name in enumerate("ab"):
        write_run(maze_run.folder / name, [float(seed)], seed=seed)
        (maze_run.folder / name / "checkpoints/epoch_000001").mkdir(parents=True)
    names = ",".join(f"{name}/checkpoints/epoch_000001" for name in "ab")
    assert maze_run("-m", f"resume={names}", "trust=[]", "hydra.sweep.dir=s") == 0
    assert "ppo           2     1k" in capfd.readouterr().out


def test_signals_later_keeps_blocked_signals_blocked() -> None:
    """Leaving nested `signals_later` blocks keeps signals blocked that were blocked before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        with signals_later():
            with signals_later():
                pass
            assert signal.pthread_sigmask(signal.SIG_BLOCK, []) >= set(SIGNALS)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (
            (ENV, "env.kwargs.x=1,2", "algorithm.lr=0.5", "+seed=3", "+tracking.name=a"),
            [
                f"++env.kwargs.x={x},algorithm.lr=0.5,algorithm=ppo,{ENV},seed=3,tracking.name=a"
                for x in (1, 2)
            ],
        ),
        (
            (f"{ENV},Acrobot-v1", "env.max_episode_steps=9", "runner=dev,local"),
            [
                f"++env.max_episode_steps=9,algorithm=ppo,env={env},runner={runner}"
                for env in ("CartPole-v1", "Acrobot-v1")
                for runner in ("dev", "local")
            ],
        ),
        (
            ("--config-dir=.", "-cn=parameters", "env.max_episode_steps=9"),
            [
                f"++env.max_episode_steps=9,algorithm=ppo,env={env}"
                for env in ("CartPole-v1", "Acrobot-v1")
            ],
        ),
        (
            ("experiment=ppo/CartPole-v1,ppo/CartPole-v1-positions", "env.wrappers=[]"),
            [
                f"++env.wrappers=[],algorithm=ppo,experiment=ppo/{name}"
                for name in ("CartPole-v1", "CartPole-v1-positions")
            ],
        ),
        (
            (ENV, "runner=dev,local", "runner.concurrency=1"),
            [
                f"algorithm=ppo,{ENV},runner.concurrency=1,runner={runner}"
                for runner in ("dev", "local")
            ],
        ),
    ],
    ids=["values", "environments", "parameters", "experiments", "runners"],
)
def test_override_dirname_contains_plain_keys(
    maze_run: CommandLine, given: tuple[str, ...], names: list[str]
) -> None:
    """Keys that exist in the configurations of all jobs have no `++`; other keys require it."""
    parameters = {"env": "CartPole-v1,Acrobot-v1"}
    text = json.dumps(
        {"defaults": ["train", "_self_"], "hydra": {"sweeper": {"params": parameters}}}
    )
    (maze_run.folder / "parameters.yaml").write_text(text)
    subdir = "hydra.sweep.subdir=${hydra.job.override_dirname}"
    assert maze_run("-m", "algorithm=ppo", "hydra.sweep.dir=s", *given, subdir) == 0
    rows = csv.DictReader((maze_run.folder / "s/jobs.csv").read_text().splitlines())
    assert [row["run_dir"] for row in rows] == names


class SlowJobs(JobPool[StartedJob]):
    """Pool with one job that needs 100 seconds on a clock of its own."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__(lambda job: None)
        self._clock, self._end_at = clock, clock.now + 100.0

    def _slots(self) -> AbstractContextManager[None]:
        self._free.append(0)
        return nullcontext()

    def _start(self, slot: int, job: Any) -> StartedJob:
        return StartedJob(job)

    def _collect(self) -> None:
        self._clock.now += 1.0
        if self._clock.now >= self._end_at:
            self._free.append(0)
            self._finish(0, None)

    def _signal(self, number: int) -> None:
        raise AssertionError(number)


def test_jobs_that_run_silently_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, a line every 30 seconds says that jobs are running."""
    clock = SimpleNamespace(now=time.monotonic())
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    job: Any = SimpleNamespace(record=SimpleNamespace(title="lr=1"))
    SlowJobs(clock).run([job])
    assert capsys.readouterr().out.splitlines() == [
        "maze-run: lr=1",
        *(f"maze-run: 1 running, the longest for 0:0{t}" for t in ("0:30", "1:00", "1:30")),
    ]
