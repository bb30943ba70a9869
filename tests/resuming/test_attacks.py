"""Hostile run directories: nothing is written outside, and no code in them is executed.

Each entry of `ATTACKS` modifies the directory of a run, a study or a sweep. Every command that
reads or writes such a directory is then called, and everything outside must remain unchanged.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from strangers import COMMANDS, MARKER, QUIET, SMALL, WORDS, change, line, run, trained

from maze_train import MazeTrainError, load_learner, search, train
from maze_train.tracking.curves import write_leagues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["run", "trained"]

PLACES = {
    "run": (
        *(".lock", "best", "best/policy.pt", "checkpoints", "checkpoints/epoch_000001", "plots"),
        *("environment.json", "files.json", "run.log", "services.json"),
        *("plots/learning_curve.png", "policies", "policies/epoch_000001", "profile", "rollouts"),
        *("metrics.csv", "summary.json", "mlflow.db", "mlartifacts", "a/b/own.txt"),
        *("venv/x", ".venv/bin/x", ".git/hooks/x", "wandb/x", "plots/venv/x", "best/wandb/x"),
    ),
    "study": (
        *(".lock", "study.journal", "study.yaml", "trials.csv", "0", "0/job.log", "0/metrics.csv"),
        *("0/checkpoints", "0/seed_1", "1", "0/venv/x"),
    ),
    "sweep": (
        *("multirun.yaml", "optimization_results.yaml", "jobs.csv", "0", "0/job.log"),
        *("0/.hydra", "0/checkpoints", "1", "comparison.csv", ".git/x", "0/wandb/x"),
    ),
    "several": ("0/out", "0/out/new"),
}
"""Paths that a run, a study and a sweep write to, including a custom writer's file and folders in
which other programs create links. `several` contains runs; commands write into one of them.
"""

KINDS = ("a link", "a dangling link", "a link to a folder", "a link by a folder", "a pipe")
CSV = {"_target_": "maze_train.tracking.tracker.CSVWriter", "columns": [f"$(touch {MARKER})"]}
TOO_LONG_S = 30
"""Longer than any rejected command takes on a busy machine."""


class Attack(NamedTuple):
    """Modification of a directory by an attacker."""

    where: str
    """`run`, `study`, `sweep` or `several`."""
    plant: Callable[[Path], None]
    """Function that modifies the directory."""
    refused: tuple[str, ...] = ()
    """Commands that must end with one message; other commands may succeed, but do no harm."""
    says: str = (
        r"is a symbolic link (to a target outside|inside)|not a regular file|[Nn]ot a directory"
        "|no saved policy|pt is damaged|is a sparse file"
    )
    """Regular expression for the message; an unreadable policy is also a valid reason."""


SEARCHED = {"search": {"algorithm.lr": [0.1, 0.2]}, "n_trials": 1, "n_jobs": 1, "study": "study"}
SMALL_JOB = [word for word in WORDS if not word.startswith("seed=")]
SWEPT = ("-m", *SMALL_JOB, "hydra.sweep.dir=sweep", "resume=auto")
OUT = "several/0/out/new"
ROLLOUT = ("-cn", "rollout", "run=several/0", "n_episodes=1", "progress=quiet")
CALLS: dict[str, dict[str, Callable[[], Any]]] = {
    "run": {
        **{name: command.run for name, command in COMMANDS.items()},
        "load_learner": lambda: load_learner("run"),
        "compare": lambda: line("-cn", "compare", "runs=[run,other]", "output=compared"),
        "export": lambda: line("-cn", "export", "run=run", "format=torch_export"),
    },
    "study": {
        "search": lambda: search("CartPole-v1", "ppo", **SEARCHED, **QUIET),
        "compare": lambda: line("-cn", "compare", "runs=[study,other]", "output=compared"),
    },
    "sweep": {
        "sweep": lambda: line(*SWEPT, "seed=1,2"),
        "jobs": lambda: line(*SWEPT, "seed=1,2", "hydra/launcher=local"),
        "compare": lambda: line("-cn", "compare", "runs=[sweep,other]", "output=compared"),
    },
    "several": {
        "rollout": lambda: line(*ROLLOUT, f"output_dir={OUT}"),
        "record": lambda: line(
            *ROLLOUT, "record=true", f"record_dir={OUT}", "output_dir=several/played"
        ),
        "compare": lambda: line("-cn", "compare", "runs=[several,other]", f"output={OUT}"),
        "export": lambda: line(
            *("-cn", "export", "run=several/0", "format=torch_export", f"output={OUT}/policy.pt2")
        ),
        "train": lambda: train(**{**SMALL, "run_dir": OUT}),
        "search": lambda: search("CartPole-v1", "ppo", **{**SEARCHED, "study": OUT}, **QUIET),
        "sweep": lambda: line(*SWEPT, "seed=1,2", f"hydra.sweep.dir={OUT}"),
    },
}
"""All commands that read or write each kind of directory."""


WRITERS = {
    "run": ("train resume", "rollout"),
    "study": ("search",),
    "sweep": ("sweep", "jobs"),
    "several": tuple(CALLS["several"]),
}
"""Commands that write into each kind of directory and reject links in it."""


def linked(place: str, kind: str) -> Callable[[Path], None]:
    """Return a function that creates a link to a user file, or a named pipe."""

    def plant(directory: Path) -> None:
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        targets = {"a link": "profile", "a dangling link": "new", "a link to a folder": "folder"}
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind in targets:
            path.symlink_to(Path.cwd() / "own" / targets[kind])
        else:  # A path with `x/..` does not resolve to its parent if `x` is a link.
            (directory / "x").symlink_to(Path.cwd() / "own" / "folder")
            path.symlink_to(directory / "x" / ".." / "profile")

    return plant


def stored(key: str, value: Any) -> Callable[[Path], None]:
    """Return a function that changes a stored setting."""
    return lambda directory: change(directory, key, value)


def written(name: str, data: bytes) -> Callable[[Path], None]:
    """Return a function that replaces all files with a name, without digests of the content."""

    def plant(directory: Path) -> None:
        for path in [*directory.glob(name), *directory.glob(f"*/**/{name}")]:
            path.write_bytes(data)
            path.with_name("score.json").unlink(missing_ok=True)

    return plant


def sparse(directory: Path) -> None:
    """Replace weights by files that are large, but take no space on the disk."""
    written("policy.pt", b"")(directory)
    for path in directory.glob("**/policy.pt"):
        os.truncate(path, 3 << 30)


def saved_as(
    content: object, compression: int = zipfile.ZIP_STORED, pickled: bytes | None = None
) -> bytes:
    """Return a file of `torch.save` with other compression, or another pickle."""
    stored, file = io.BytesIO(), io.BytesIO()
    torch.save(content, stored)
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(file, "w", compression) as new:
        for entry in old.infolist():
            is_replaced = pickled is not None and entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, pickled if is_replaced else old.read(entry))
    return file.getvalue()


LARGE = b"\x80\x02}X\x01\x00\x00\x00wcbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85Rs."
WEIGHTS = {
    "allocate memory": written("policy.pt", saved_as({}, pickled=LARGE)),
    "are compressed": written(
        "policy.pt", saved_as({"w": torch.zeros(1 << 20)}, zipfile.ZIP_DEFLATED)
    ),
    "are a sparse file": sparse,
    "are sparse tensors": written("policy.pt", saved_as({"w": torch.ones(2).to_sparse()})),
    "are on no device": written("policy.pt", saved_as({"w": torch.ones(2, device="meta")})),
    "repeat memory": written("policy.pt", saved_as({"w": torch.ones(1).expand(1 << 40)})),
}
READING = (
    "load_policy",
    "load_policy epoch",
    "rollout",
    "run_rollout",
    "train base_run",
    "base_run",
)
"""Commands that read saved weights."""
HTML = "<img src=x onerror=y>"
CONTROL = f"{HTML}\x1b]0;x\x07|`[a](javascript:b)"

RAY = {"_target_": "maze_train.RayRunnerConfig", "concurrency": 2}
REACHING = (
    ("runner", {**RAY, "address": "127.0.0.1:9"}),
    ("runner", {**RAY, "address": "local", "working_dir": "own"}),
    ("runner.dataset", "own"),
    ("base_run", "hf://stranger/policy"),
    ("evaluation.opponents", {"first": "own"}),
    ("env.kwargs", {"path": "/etc/passwd"}),
    ("tracking.writers", [{"_target_": "maze_train.MLflowWriter", "tracking_uri": "sqlite:///x"}]),
    ("tracking.writers", [{"_target_": "maze_train.WandbWriter", "dir": "own"}]),
)
"""Settings that make a run access the network or other directories."""


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that applies all `plants`."""

    def plant(directory: Path) -> None:
        for each in plants:
            each(directory)

    return plant


ATTACKS = {
    **{
        f"{where}/{place} is {kind}": Attack(where, linked(place, kind), WRITERS[where])
        for where, places in PLACES.items()
        for place in places
        for kind in KINDS
    },
    **{
        f"a writer of {name}": Attack(
            "run",
            stored("tracking.writers", [{**CSV, "filename": name}]),
            ("train resume",),
            r"nothing was accessed:(\n.*)*\n  tracking\.writers\[0\]\.filename = ",
        )
        for name in ("../own/profile", "/tmp/attack.csv", "a/../../own/profile")
    },
    **{
        f"{key} reaches elsewhere: {value}": Attack(
            "run",
            stored(key, value),
            ("train resume", "resume", "resume checkpoint")
            + (("load_learner",) if key != "runner" else ()),  # load_learner uses another runner
            rf"nothing was accessed:\n  {re.escape(key)}.* = ",
        )
        for key, value in REACHING
    },
    **{f"the weights {name}": Attack("run", plant, READING) for name, plant in WEIGHTS.items()},
    **{
        f"{key} is {value!r}": Attack(
            "run", stored(key, {"_target_": value} if key == "model.policy" else value)
        )
        for key in ("env.id", "tracking.name", "algorithm.lr", "model.policy")
        for value in (CONTROL, f"$(touch {MARKER}).Net", f"a;touch {MARKER}.Net", "\0", "x" * 300)
    },
    **{
        f"{key} leads to a link in {folder}": Attack(
            "run", both(linked(folder, "a link to a folder"), stored(key, value)), ("train resume",)
        )
        for folder in ("venv/x", "plots/.venv/x", "wandb/x")
        for key, value in {
            "tracking.writers": [
                {"_target_": f"maze_train.{name}", "filename": f"{folder}/profile", **own}
                for name, own in {
                    "CSVWriter": {"columns": [f"; touch {MARKER}"]},
                    "JSONSummaryWriter": {},
                    "LearningCurveWriter": {},
                }.items()
            ],
            "tracking.name": folder,
        }.items()
    },
}
EVERYDAY = ("train resume", "load_policy", "search")
"""Commands that `make test` runs with attacks."""
SHIFTS = {"one kind": (0,), "another kind": (2,)}
"""Offsets into `KINDS`: the kind of link at the first path; later paths rotate through `KINDS`."""


def everything(folder: Path) -> dict[str, Any]:
    """Return inode, mode and content of every file below a folder."""
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {
        str(path): (stat.st_ino, stat.st_mode, path.read_bytes() if path.is_file() else b"")
        for path, stat in found.items()
    }


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer than `seconds`."""

    def end(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(
    attack: Attack, name: str, trained: Path, capfd: pytest.CaptureFixture[str]
) -> str | None:
    """Return what went wrong when a command met an attack, or None."""
    for folder in (*PLACES, "own", "other", "compared", "new"):
        shutil.rmtree(folder, ignore_errors=True)
    for copy in ("run", "other", *(f"{attack.where}/{i}" for i in (0, 1) if attack.where != "run")):
        shutil.copytree(trained, copy)
    Path("own/folder").mkdir(parents=True)
    Path("own/profile").write_text("mine\n")
    attack.plant(Path(attack.where))
    before, refusal, raised = everything(Path("own")), "", ""
    capfd.readouterr()
    try:
        with at_most(TOO_LONG_S):
            CALLS[attack.where][name]()
    except MazeTrainError as error:
        refusal = str(error)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    printed = "".join(capfd.readouterr()) + refusal
    problems = {
        raised: bool(raised),
        "changed what is outside": everything(Path("own")) != before,
        "called something": Path(MARKER).exists(),
        "printed a traceback": "Traceback" in printed,
        "printed what a terminal obeys": "\x1b" in printed or "\x07" in printed,
        "suggests a command of a file": re.search(r"trust=\[[^\]]*[;$]", printed) is not None,
        "wrote HTML or control characters": any(
            re.search(r"\x1b|(?<!\\)(<img|\]\(java)" if path.suffix == ".md" else "\x1b", text)
            for path in Path("compared").glob("*.*")
            if path.suffix in (".md", ".csv")
            for text in [path.read_text()]
        ),
        "is not refused": name in attack.refused
        and not (refusal and re.search(attack.says, printed)),
        "printed several messages": name in attack.refused and printed.count("error: ") > 1,
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)


ALL = pytest.mark.exhaustive
MEETINGS = [
    pytest.param(
        *(where, name, kinds),
        id=f"{where}: {name}, {kinds} of links",
        marks=() if kinds == "one kind" and name in EVERYDAY else ALL,
    )
    for where, calls in CALLS.items()
    for name in calls
    for kinds in SHIFTS
    if kinds == "one kind" or name in WRITERS[where]
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name", "kinds"), MEETINGS)
def test_attacks_change_nothing_outside_the_run(
    run: Path,
    trained: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    name: str,
    kinds: str,
) -> None:
    """Nothing outside changes, no code runs, and commands that write report the attack."""
    monkeypatch.setattr("maze_train.core.report.save_picture", lambda *_, dpi: None)
    planted = {key: attack for key, attack in ATTACKS.items() if attack.where == where}
    links = [key for key in planted if key.startswith(f"{where}/")]
    shifts = {key: (i - i // len(KINDS)) % len(KINDS) for i, key in enumerate(links)}
    turn = list(CALLS[where]).index(name)
    chosen = [
        key
        for i, (key, attack) in enumerate(planted.items())
        if shifts.get(key, 0) in SHIFTS[kinds]
        # Read-only commands share their code: each gets a third of the attacks that need no
        # message.
        and (name in (*WRITERS[where], *attack.refused) or (i + turn) % 3 == 0)
    ]
    found = {key: outcome(planted[key], name, trained, capfd) for key in chosen}
    succeeded = {key: problem for key, problem in found.items() if problem}
    with capfd.disabled():
        print(f"\n{where}, {name}: {len(found)} planted, {len(succeeded)} succeeded")
    assert found
    assert succeeded == {}


def test_invalid_policy_names_in_metrics_csv_create_no_file(tmp_path: Path) -> None:
    """Invalid policy names in `metrics.csv` are not used as file names."""
    (tmp_path / "run").mkdir()
    row = {"epoch": 1, "league/a/../../../own@1/win_rate": 0.5}
    write_leagues([row], tmp_path / "run" / "plots", "")
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]
