"""Runs with torchrun: results equal one process; stopped, killed, restarted; errors."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from killed_runs import differences, final_state
from two_hosts import two_hosts

import maze_train.learner.torchrun
import maze_train.run.train
from maze_train import TrainingResult, load_config, train
from maze_train.cli import main
from maze_train.core.errors import ConfigError
from maze_train.core.files import read_json
from maze_train.core.torchrun import TorchrunVariables
from maze_train.learner.ranks import RanksLostError
from maze_train.learner.torchrun import TorchrunRanks
from maze_train.run.build import build_run
from maze_train.run.train import TrainingRunner

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = Path(__file__).parents[1] / "helpers"
LIMIT_S = 240
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
SHORT = {
    "total_steps": 480,
    "algorithm.n_rollout_steps": 20,
    "algorithm.epoch_length": 2,
    "runner.concurrency": 4,
    "evaluation.n_episodes": 2,
    "checkpoint.interval": 1,
    "model.hidden_sizes": [16],
    "tracking.plot": False,
    "tracking.tensorboard": False,
    "seed": 1,
}
PPO = {"algorithm": "ppo", "env": "CartPole-v1", "algorithm.batch_size": 40}


ENVIRONMENT = {"PYTHONPATH": str(PARTS), "OMP_NUM_THREADS": "1"}


def command_line(settings: dict[str, Any], count: int, *options: str) -> list[str]:
    """Return the command of a run in `count` processes."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={count}", *options]
    words = [f"{key}={value}" for key, value in {**SHORT, **settings}.items()]
    return [sys.executable, *launch, "-m", "maze_train", *words]


def torchrun(
    directory: Path, settings: dict[str, Any], count: int = 2, *options: str
) -> subprocess.CompletedProcess[str]:
    """Start a run in `count` processes and return its outcome."""
    return subprocess.run(
        command_line(settings, count, "--standalone", *options),
        cwd=directory,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def alone(directory: Path, settings: dict[str, Any]) -> None:
    """Train in this process."""
    given = {**SHORT, **settings, "run_dir": str(directory), "tracking.progress": "quiet"}
    TrainingRunner(load_config(given)).run()


def rows(run: Path) -> list[dict[str, float]]:
    """Metrics of a run without times."""
    with (run / "metrics.csv").open() as file:
        return [
            {
                key: float(value)
                for key, value in row.items()
                if value and not key.startswith("time/")
            }
            for row in csv.DictReader(file)
        ]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """Weights in the last checkpoint."""
    modules = final_state(run)["learners"]["learner"]["modules"]
    return {f"{key}/{name}": x for key, own in modules.items() for name, x in own.items()}


def assert_equal_runs(found: Path, expected: Path) -> None:
    """Compare weights and metrics of two runs up to float32 rounding."""
    torch.testing.assert_close(weights_of(found), weights_of(expected), rtol=1e-4, atol=1e-5)
    for row, wanted in zip(rows(found), rows(expected), strict=True):
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def assert_continues_after_a_kill(directory: Path, settings: dict[str, Any]) -> None:
    """Assert that a run with a killed rank, restarted by torchrun, equals the run in `whole`."""
    ends = "[{_target_: torchrun_parts.EndsProcess, rank: 1, update: 5}]"
    settings = {**settings, "callbacks": ends, "run_dir": "killed"}
    outcome = torchrun(directory, settings, 2, "--max-restarts=1")
    assert outcome.returncode == 0, outcome.stdout
    assert "continued from epoch_000002" in outcome.stdout
    assert rows(directory / "killed") == rows(directory / "whole")
    whole, killed = final_state(directory / "whole"), final_state(directory / "killed")
    killed.pop("callbacks")
    assert differences(killed, whole) == []


@pytest.mark.slow
def test_two_processes_equal_one_and_resume_after_a_kill(tmp_path: Path) -> None:
    """Results equal one process; after a kill, torchrun restarts from a checkpoint."""
    outcome = torchrun(tmp_path, {**PPO, "run_dir": "whole"})
    assert outcome.returncode == 0, outcome.stdout
    assert outcome.stdout.count("torchrun: 2 learners, one per process") == 1
    assert outcome.stdout.count("PPO on CartPole-v1") == 1
    assert "2 environments each" in (tmp_path / "whole/run.log").read_text()
    alone(tmp_path / "alone", PPO)
    assert_equal_runs(tmp_path / "whole", tmp_path / "alone")
    assert_continues_after_a_kill(tmp_path, PPO)


REPLAY = {
    "algorithm.initial_buffer_size": 80,
    "algorithm.batch_size": 30,
    "algorithm.n_rollout_steps": 5,
    "algorithm.epoch_length": 8,
}
SAC = {**REPLAY, "algorithm": "sac", "env": "Pendulum-v1"}
IMPALA = {
    "algorithm": "impala",
    "env": "CartPole-v1",
    "algorithm.num_actors": 4,
    "algorithm.actors_batch_size": 4,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        PPO,
        {"algorithm": "a2c", "env": "Pendulum-v1"},
        {**PPO, "runner": "local", "runner.n_workers": 2, "model.normalization.mode": "running"},
        {**PPO, "model": "vector_rnn", "model.rnn.size": 8, "algorithm.sequence_length": 10},
        IMPALA,
        {**SAC, "algorithm.replay_buffer": "prioritized", "algorithm.initial_action_repeat": 3},
        {**REPLAY, "algorithm": "td3", "env": "Pendulum-v1"},
        {**REPLAY, "algorithm": "dqn", "env": "CartPole-v1"},
    ],
    ids=["ppo", "a2c", "local", "recurrent", "impala", "sac", "td3", "dqn"],
)
def test_four_processes_equal_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Statistics, sequences, workers and replay buffers also match."""
    outcome = torchrun(tmp_path, {**settings, "run_dir": "four"}, 4)
    assert outcome.returncode == 0, outcome.stdout
    alone(tmp_path / "alone", settings)
    assert_equal_runs(tmp_path / "four", tmp_path / "alone")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_callbacks_apply_to_all_processes(tmp_path: Path) -> None:
    """Environment calls, changed settings and a stop by one process apply to all processes."""
    planet, steers = "torchrun_parts.PlanetEnv", "torchrun_parts.Steers"
    texts = {"env": f"{{_target_: {planet}}}", "callbacks": f"[{{_target_: {steers}, stops: 1}}]"}
    outcome = torchrun(tmp_path, {**PPO, **texts, "run_dir": "two"})
    assert outcome.returncode == 0, outcome.stdout
    values = {"env": {"_target_": planet}, "callbacks": [{"_target_": steers}]}
    alone(tmp_path / "alone", {**PPO, **values})
    assert_equal_runs(tmp_path / "two", tmp_path / "alone")
    for name in ("two", "alone"):
        assert read_json(tmp_path / name / "summary.json")["stop_reason"] == "enough"
        assert len(final_state(tmp_path / name)["env_calls"]["evaluation"]) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {**IMPALA, "algorithm.replay_size": 4},
        {
            **SAC,
            "algorithm.epoch_length": 2,
            "algorithm.initial_buffer_size": 20,
            "algorithm.initial_sampling_policy": "{_target_: torchrun_parts.ZeroPolicy}",
        },
    ],
    ids=["impala", "sac"],
)
def test_replay_buffers_of_all_processes_resume_after_a_kill(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Checkpoints contain the actors and warm-up policy of every process, and replay buffers."""
    outcome = torchrun(tmp_path, {**settings, "run_dir": "whole"})
    assert outcome.returncode == 0, outcome.stdout
    assert_continues_after_a_kill(tmp_path, settings)


@pytest.mark.exhaustive
def test_signal_to_one_process_ends_all(tmp_path: Path) -> None:
    """The run resumes exactly with the same number of processes."""
    number = int(signal.SIGTERM)
    ends = f"[{{_target_: torchrun_parts.EndsProcess, rank: 1, update: 3, number: {number}}}]"
    outcome = torchrun(tmp_path, {**PPO, "run_dir": "run", "callbacks": ends})
    assert outcome.returncode != 0
    assert "stopped in epoch 2 after 240 steps; last checkpoint" in outcome.stdout
    with pytest.raises(ConfigError, match="the number of processes was 2 and is now 1"):
        train(resume=str(tmp_path / "run"), **{"tracking.progress": "quiet"})
    outcome = torchrun(tmp_path, {"resume": "run", "callbacks": "[]"})
    assert outcome.returncode == 0, outcome.stdout
    outcome = torchrun(tmp_path, {**PPO, "run_dir": "whole"})
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"env": "{_target_: torchrun_parts.FailingEnv}"}, "ValueError: the robot fell over"),
        (
            {
                "callbacks": "[{_target_: torchrun_parts.Fails}]",
                "tracking.writers": "[{_target_: torchrun_parts.SlowWriter}]",
            },
            "RuntimeError: only here",
        ),
        (
            {
                "callbacks": "[{_target_: torchrun_parts.Steers, differs: 1}]",
                "env": "{_target_: torchrun_parts.PlanetEnv}",
            },
            r"run.call_envs = .*: differs between processes after on_update_end",
        ),
        (
            {"callbacks": "[{_target_: torchrun_parts.Steers, differs: 1, request: set}]"},
            "run.set = .*0.025.*: differs between processes after on_update_end",
        ),
        (
            {"env": "{_target_: torchrun_parts.UnequalEnv}"},
            r"env: differs between rank 0 and \[1\]; the environments of all processes",
        ),
    ],
    ids=["environment", "callback", "calls", "settings", "spaces"],
)
def test_error_in_one_process_ends_all(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    """The message contains the rank and the traceback."""
    outcome = torchrun(tmp_path, {**PPO, **settings, "run_dir": "run"})
    assert outcome.returncode != 0
    assert re.search(text, outcome.stdout), outcome.stdout
    assert re.search(r"maze-run: error: rank 1 of 2: ", outcome.stdout)
    assert (tmp_path / "run/finished").exists() == ("tracking.writers" in settings)


@pytest.mark.exhaustive
def test_two_machines_equal_one(tmp_path: Path) -> None:
    """Machines share only a directory."""
    settings = {**PPO, "run_dir": "two"}
    started = []
    with two_hosts() as hosts:
        for rank, host in enumerate(hosts):
            options = ("--nnodes=2", f"--node-rank={rank}", f"--master-addr={hosts[0].address}")
            command = host.command(*command_line(settings, 1, *options))
            with (tmp_path / f"{rank}.txt").open("w") as output:
                outputs: dict[str, Any] = {"stdout": output, "stderr": output}
                environment = {**os.environ, **ENVIRONMENT}
                process = subprocess.Popen(command, cwd=tmp_path, env=environment, **outputs)
            started.append(process)
        codes = [process.wait(LIMIT_S) for process in started]
    text = (tmp_path / "0.txt").read_text()
    assert codes == [0, 0], text
    assert "torchrun: 2 learners on 2 machines" in text
    alone(tmp_path / "alone", PPO)
    assert_equal_runs(tmp_path / "two", tmp_path / "alone")


VARIABLES = {
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the variables of torchrun for a single process; return its store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {**VARIABLES, "MASTER_PORT": str(store.port)}.items():
        monkeypatch.setenv(name, value)
    return store


def test_single_torchrun_process_equals_plain_run(
    launched: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are identical; scripts may train twice and be restarted."""
    alone(tmp_path / "first", PPO)
    alone(tmp_path / "second", PPO)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    settings = {**SHORT, **PPO, "tracking.progress": "quiet", "run_dir": str(tmp_path / "no")}
    result = train(settings.pop("env"), settings.pop("algorithm"), overrides=settings)
    assert result.run_dir == tmp_path / "first"
    for name in VARIABLES:
        monkeypatch.delenv(name)
    alone(tmp_path / "plain", PPO)
    for name in ("first", "second"):
        found, expected = final_state(tmp_path / name), final_state(tmp_path / "plain")
        assert differences(found, expected) == []


def by_command(**settings: Any) -> None:
    """Train as `maze-run` does."""
    assert main([f"{key}={value}" for key, value in settings.items()]) == 0


@pytest.mark.parametrize("start", [train, by_command])
@pytest.mark.parametrize("is_resumed", [False, True], ids=["new", "resumed"])
def test_restarted_process_has_the_same_settings(
    launched: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., object],
    is_resumed: bool,
) -> None:
    """Presets, a fixed directory and `trust` apply as in the first attempt."""
    run, configs = tmp_path / "run", []

    class Runner(TrainingRunner):
        def run(self) -> TrainingResult:
            configs.append(replace(self.config, resume=None, run_dir=None))
            return super().run()

    monkeypatch.setattr(maze_train.run.train, "TrainingRunner", Runner)
    given = {**SHORT, "experiment": "ppo/CartPole-v1", "algorithm.batch_size": 40, "run_dir": run}
    if is_resumed:
        alone(run, PPO)
        configs.clear()
        given = {"resume": run, "total_steps": 960}
    for attempt in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        start(**given, trust=["torchrun_parts"])
    assert configs == configs[:1] * 2
    assert configs[0].trust == ["torchrun_parts"]
    assert len(read_json(run / "environment.json")["starts"]) == 2 + is_resumed


def test_processes_use_the_gpu_of_their_local_rank(
    launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process uses the GPU of its local rank."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    variables = TorchrunVariables.read()
    assert variables is not None
    processes, chosen = TorchrunRanks(variables), []
    key = "learner_group.device"
    assert processes.device("cpu", key) == "cpu"
    with pytest.raises(ConfigError, match=rf"^{key} = 'cuda:0': 2 processes cannot share a GPU"):
        processes.device("cuda:0", key)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (processes.device("auto", key), chosen) == ("cuda:1", [1])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=rf"2 processes need a GPU each, .* has only 1; .*or {key}=cpu"
    ):
        processes.device("cuda", key)
    processes.leave()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("reset by peer"), RanksLostError),
        (dist.DistNetworkError("no answer"), RanksLostError),
        (torch.OutOfMemoryError("no memory"), None),
    ],
    ids=["connection", "network", "memory"],
)
def test_only_connection_errors_are_lost_processes(
    launched: Any, error: RuntimeError, expected: type[Exception] | None
) -> None:
    """Only connection errors are reported as lost processes."""

    def fails() -> None:
        raise error

    variables = TorchrunVariables.read()
    assert variables is not None
    processes = TorchrunRanks(variables)
    with pytest.raises(expected or type(error), match=str(error)):
        processes._exchange(fails)
    processes.leave()


def test_missing_ranks_are_named(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names all missing ranks after a single wait."""
    monkeypatch.setattr(maze_train.learner.torchrun, "MEET_S", 1.0)
    monkeypatch.setenv("WORLD_SIZE", "4")
    variables, start = TorchrunVariables.read(), time.monotonic()
    assert variables is not None
    with pytest.raises(ConfigError, match=r"RANK = \[1, 2, 3\]: did not start a run within 1 s"):
        TorchrunRanks(variables)
    assert time.monotonic() - start < 2.5


def test_nccl_blocking_wait_is_enabled(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's blocking wait is enabled, so that failures do not end the process."""
    monkeypatch.setenv(BLOCKING_WAIT, "")
    monkeypatch.delenv(BLOCKING_WAIT)
    variables = TorchrunVariables.read()
    assert variables is not None
    TorchrunRanks(variables).leave()
    assert os.environ[BLOCKING_WAIT] == "1"


def test_child_process_does_not_join_as_rank(launched: Any) -> None:
    """A process that inherited the variables does not join."""
    launched.set("maze_train/0/0", "elsewhere:1")
    with pytest.raises(ConfigError, match="process elsewhere:1 has this rank"):
        build_run(load_config({**SHORT, **PPO}))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"MASTER_PORT": "1"}, "torchrun does not answer at port 1 .* unset TORCHELASTIC_RUN_ID"),
        ({"RANK": ""}, "RANK = '': expected a number, since TORCHELASTIC_RUN_ID is set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': expected a number"),
    ],
    ids=["no store", "no rank", "no processes"],
)
def test_inherited_torchrun_variables_raise(
    launched: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    """Inherited variables raise an error without waiting."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=text):
        build_run(load_config({**SHORT, **PPO}))


def test_variables_of_other_launchers_are_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With variables of other launchers, one process trains and prints a note."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert TorchrunVariables.read() is None
    build_run(load_config({**SHORT, **PPO}), until_learner=True).closing.close()
    assert "not by torchrun: this process trains alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "algorithm=ppo", "env=CartPole-v1", "seed=1,2"),
        ("compare", "runs=[a,b]"),
        ("--config-dir", "own", "-cn", "mine", "runs=[a,b]"),
    ],
    ids=["sweep", "compare", "own compare"],
)
def test_torchrun_starts_only_single_runs(
    launched: Any,
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sweeps and other commands, also in a user's primary config, raise an error."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/mine.yaml").write_text("defaults: [compare, _self_]\n")
    assert main(arguments) == 2
    assert [path.name for path in Path().iterdir()] == ["own"]
    told = capsys.readouterr().err
    assert "error: rank 0 of 1: " in told
    assert "torchrun: it starts the processes of one training run" in told


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algorithm": "impala", "algorithm.num_actors": 1}, "num_actors = 1: expected a multiple"),
        ({"algorithm": "es"}, "algorithm = 'es': not supported with torchrun: es computes no"),
        ({"learner_group.n_learners": 2}, "learner_group.n_learners = 2: each process"),
        ({"runner.envs_per_actor": 2}, "runner.envs_per_actor = 2: not supported with torchrun"),
        ({"runner.concurrency": 5}, "runner.concurrency = 5: expected a multiple of the 2"),
        ({"runner": "ray"}, "runner = 'ray': expected dev or local with torchrun"),
        (
            {"algorithm": "bc", "runner.dataset": "x"},
            "algorithm = 'bc': not supported with torchrun: bc learns from a dataset",
        ),
    ],
    ids=["impala", "es", "n_learners", "actors", "concurrency", "ray", "bc"],
)
def test_unsupported_settings_of_several_processes_raise(
    launched: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], text: str
) -> None:
    """Unsupported settings raise an error before processes connect."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = {"algorithm": "ppo", "env": "CartPole-v1", "runner.concurrency": 4, **settings}
    with pytest.raises(ConfigError, match=text):
        build_run(load_config(given))
