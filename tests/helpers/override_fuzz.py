"""Random overrides of every key of every command, run by `maze-run` in this process.

    python tests/helpers/override_fuzz.py <command> <seed> <count>

It has its own process, since an override may abort it.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 20.0
MEMORY = 16 << 30
VALUES = (
    "", "null", "true", "false", "0", "-1", "1", "2", "0.5", "-0.5", "1e-300", "1e18", "-1e18",
    "1e308", "65536", "1_000_000", "2147483648", "9223372036854775807", "18446744073709551616",
    "nan", "inf", "-inf", "[]", "[1]", "[[1]]", "[nan]", "[[0,1],[1e18,2]]", "{}", "{a: 1}",
    "{a: {b: [1]}}", "{_target_: os.getcwd}", "{_target_: 3}", "it's", "'it s'", "jos\u00e9",
    "\u65e5\u672c", "a b", '"', "a=b", "x" * 300, "${seed}", "${nothing}", "???", "\\", "[", "}",
    "linear_1", "auto", "random", "a/../b", "0,1", "range(0,3)", "\x1b[31m", "a\nb", "\x00",
    "os.path", "hf://a/b", "minari:a/b-v0", "[a,b]", "*", "default",
)  # fmt: skip
"""Of wrong types, huge, tiny, not finite, nested, empty, or with letters that few write; as paths
they stay below the working directory."""
AMOUNTS = ("n_trials", "n_seeds", "n_jobs", "n_episodes")
"""Settings that may ask for hours of work: of these no large numbers are drawn."""
HYDRA = (
    "hydra/launcher", "hydra/sweeper", "hydra/output", "hydra.launcher.n_jobs", "hydra.sweep.dir",
    "hydra.sweep.subdir", "hydra.searchpath", "hydra.job.num", "hydra.job.name", "hydra.mode",
    "hydra.launcher.gpus", "hydra", "hydra.job.chdir", "hydra.verbose", "hydra.output_subdir",
    "hydra.sweeper.max_batch_size",
)  # fmt: skip


def bases(command: str) -> list[tuple[list[str], list[str]]]:
    """Command lines that work, each with the keys that it has."""
    from maze_train.config.commands import CompareConfig, ExportConfig, PushConfig
    from maze_train.config.loading import keys_of, named_option
    from maze_train.config.options import group_names, list_options
    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.config.search_config import SearchConfig
    from maze_train.config.train_config import TrainConfig

    def trial(algorithm: str, runner: str) -> tuple[list[str], list[str]]:
        env = "Pendulum-v1" if algorithm in ("sac", "td3") else "CartPole-v1"
        given = ["runner.fast_dev_run=true", "total_steps=64", "tracking.progress=quiet", "seed=0"]
        given += ["runner.dataset=data"] if algorithm == "bc" else []
        values: dict[str, Any] = {
            group: named_option(group, name)
            for group, name in (("algorithm", algorithm), ("runner", runner))
        }
        keys = [*keys_of(TrainConfig, values), *group_names()]
        given += ["runner.start_method=fork"] if runner == "local" else []
        argv = [f"algorithm={algorithm}", f"env={env}", f"runner={runner}", *given]
        return argv, keys

    if command == "train":
        names = [name for name in list_options("algorithm") if name != "sacfd"]
        return [trial(name, runner) for name in names for runner in ("dev", "dev", "dev", "local")]
    if command == "search":
        argv, _ = trial("ppo", "dev")
        own = ["n_trials=1", "study=study", "search.algorithm.lr=[1e-3,1e-4]"]
        keys = [*keys_of(SearchConfig, {}), "search", "search.algorithm.lr.low", "search.seed"]
        return [(["-cn", "search", *argv, *own], [*keys, "search.nothing"])]
    cls, *given = {
        "rollout": (
            RolloutConfig,
            "run=run n_episodes=2",
            "policy=random env=CartPole-v1 n_episodes=2",
        ),
        "compare": (CompareConfig, "runs=[run]"),
        "export": (ExportConfig, "run=run output=policy.onnx"),
        "push": (PushConfig, "run=run repo_id=me/it"),
    }[command]
    keys = [*keys_of(cls, {}), *(["env", "runner", "policies.a"] if command == "rollout" else [])]
    return [(["-cn", command, *words.split()], keys) for words in given]


def draw(command: str, seed: int, count: int) -> Iterator[list[str]]:
    """Command lines with one to two random overrides."""
    chosen = random.Random(f"{command} {seed}")
    choices = bases(command)
    for _ in range(count):
        argv, keys = chosen.choice(choices)
        words = []
        for _ in range(chosen.choice((1, 1, 1, 2))):
            key = chosen.choice(HYDRA if chosen.random() < 0.08 else keys)
            value = chosen.choice(VALUES)
            if key in AMOUNTS and any(letter.isdigit() for letter in value):
                value = chosen.choice(("0", "-1", "0.5", "nan", "inf", "[[1]]"))
            kind = chosen.random()
            word = f"~{key}" if kind < 0.04 else f"~{key}={value}" if kind < 0.06 else ""
            words.append(word or f"{'+' * chosen.choice((0, 0, 0, 1, 2))}{key}={value}")
        if chosen.random() < 0.05:
            words.append("-m")
        yield [*argv, *words]


class TooLong(BaseException):
    """The command takes longer than `LIMIT_S`."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise `TooLong` after so much computing, or four times as much waiting on a busy machine."""

    def end(*_: Any) -> None:
        raise TooLong

    limits = {signal.ITIMER_PROF: LIMIT_S, signal.ITIMER_REAL: 4 * LIMIT_S}
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, end)
    for clock, seconds in limits.items():
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for clock in limits:
            signal.setitimer(clock, 0)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Send all that this process and those that it starts print to a file."""
    kept = os.dup(1), os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)


def fault_of(argv: list[str], log: Path) -> str:
    """What is wrong with the end of a command, and what it printed; empty if nothing is."""
    from maze_train.cli import main as maze_run

    here, fault, code = os.getcwd(), "", 0
    with printed_to(log):
        try:
            with limited():
                code = maze_run(argv)
        except BaseException as error:
            fault = f"{type(error).__name__}: {error}"
    os.chdir(here)
    text = log.read_text(encoding="utf-8", errors="replace")
    if "Traceback" in text or TooLong.__name__ in text:
        fault = fault or "a traceback"
    elif code and not ("maze-run: error: " in text or "jobs failed" in text):
        fault = fault or f"exit code {code} without a message"
    elif code not in (0, 1, 2):
        fault = fault or f"exit code {code}"
    return f"{fault}\n{text[-3000:]}" if fault else ""


def main() -> None:
    """Print the faults, and leave the command that runs in `command.txt`."""
    from maze_train.cli import main as maze_run

    command, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    log = Path("log.txt").absolute()
    with printed_to(log):
        trial = ("algorithm=ppo", "env=CartPole-v1", "runner.fast_dev_run=true", "run_dir=run")
        assert maze_run(trial) == 0
        played = ("run=run", "n_episodes=2", "record=true", "record_dir=data")
        assert command != "train" or maze_run(("-cn", "rollout", *played)) == 0
    for argv in draw(command, seed, count):
        Path("command.txt").write_text(repr(argv), encoding="utf-8")
        fault = fault_of(argv, log)
        if fault:
            print(f"{argv}: {fault}\n", flush=True)


if __name__ == "__main__":
    main()
