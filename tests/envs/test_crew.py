"""Processes that work for this one: replies, failures, new starts, and nothing that is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from leftovers import has_ended

from maze_train.envs import crew as crew_module
from maze_train.envs.crew import Crew
from maze_train.envs.worker import REPORT, commands, reply, run_process
from maze_train.envs.workers import WorkerFailedError
from maze_train.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack
    from multiprocessing.connection import Connection

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

ECHO, RAISE, REFUSE, EXIT, HANG = b"e", b"r", b"c", b"x", b"h"
"""Commands: reply what follows; raise an error, one of the configuration; end; stand still."""

ENVS = [range(2), range(2, 3), range(3, 7)]
SHORT_S = 0.5
"""Seconds after which a process counts as hung, where that is tested."""
PATIENCE_S = 30.0


@dataclass(frozen=True)
class ToyTask:
    """What a toy process is to do.

    Args:
        parent: Process that gives the commands.
        folder: Where it leaves the file `closed{process}` when it ends in good order.
        first: What the process that finds no file `begun` in the folder does at once; a command.
    """

    parent: int
    folder: Path
    first: bytes = b""


def fail(command: bytes) -> None:
    """Fail in the way that a command names; nothing, if it names none."""
    if command == RAISE:
        raise RuntimeError("the wheel came off")
    if command == REFUSE:
        raise ConfigError("wheels", "expected four", 3)
    if command == EXIT:
        os._exit(7)
    if command == HANG:
        time.sleep(600.0)


def toy_main(conn: Connection, inherited: Sequence[Connection], task: ToyTask) -> None:
    """Say hello, then obey."""

    def work(closing: ExitStack) -> None:
        closing.callback((task.folder / f"closed{os.getpid()}").touch)
        if task.first and not (task.folder / "begun").exists():
            (task.folder / "begun").touch()
            fail(task.first)
        reply(conn, REPORT, pickle.dumps(("hello", os.getpid())))
        for command in commands(conn, task.parent):
            fail(command)
            reply(conn, REPORT, conn.recv_bytes())

    run_process(conn, inherited, work)


@pytest.fixture
def start(no_file_is_left: None, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Starts crews; afterwards nothing is left of them."""
    crews: list[Crew] = []

    def start(first: bytes = b"", **settings: Any) -> Crew:
        task = ToyTask(os.getpid(), tmp_path, first)
        settings = {"start_method": "fork", "timeout_s": PATIENCE_S, **settings}
        crews.append(Crew(toy_main, task, ENVS, kind="toy", **settings))
        return crews[-1]

    yield start
    while crews:
        crews.pop().close()


def begin(crew: Crew) -> list[int]:
    """Take the first replies; returns the processes."""
    replies = crew.first_replies("beginning")
    assert [word for word, _ in replies] == ["hello"] * len(ENVS)
    return [pid for _, pid in replies]


def ask(crew: Crew, index: int, word: str) -> None:
    """Ask a process for a word."""
    crew.workers[index].send(ECHO, pickle.dumps(word))


def answers(crew: Crew, count: int) -> dict[int, Any]:
    """So many answers, by process."""
    told: dict[int, Any] = {}
    while len(told) < count:
        ready = crew.ready(int(PATIENCE_S * 1000))
        assert ready, "what is waited for does not come"
        told |= {i: crew.workers[i].receive("a word", PATIENCE_S) for i in ready}
    return told


def failure_of(crew: Crew, index: int, command: bytes) -> WorkerFailedError:
    """Have a process fail; returns what is known of it, without its frames."""
    crew.workers[index].send(command)
    try:
        crew.workers[index].receive("a word", crew.timeout_s)
    except WorkerFailedError as failure:
        return failure.with_traceback(None)
    raise AssertionError("it did not fail")


def replace(crew: Crew, index: int, command: bytes) -> Any:
    """Have a process fail and replaced."""
    failure = failure_of(crew, index, command)
    return crew.replace(index, failure, f"{failure.text}; a word is lost", "and says hello")


def closed_in_order(folder: Path) -> set[int]:
    """The processes that ended in good order."""
    return {int(file.name.removeprefix("closed")) for file in folder.glob("closed*")}


# -- replies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_replies(start: Any, start_method: str, tmp_path: Path) -> None:
    """Each process answers for itself, and the crew says who has something to say."""
    crew = start(start_method=start_method)
    pids = begin(crew)
    assert [worker.process.pid for worker in crew.workers] == pids
    assert [worker.envs for worker in crew.workers] == ENVS
    (kind,) = {type(worker.process).__name__ for worker in crew.workers}
    assert kind.lower() == f"{start_method}process"
    assert str(crew.workers[2]) == "toy 2 (environments 3 to 6)"
    assert crew.ready(0) == []
    ask(crew, 2, "two")
    assert answers(crew, 1) == {2: "two"}
    for index in range(3):
        ask(crew, index, f"word {index}")
    assert answers(crew, 3) == {0: "word 0", 1: "word 1", 2: "word 2"}
    assert crew.ready(0) == []
    crew.close()
    assert closed_in_order(tmp_path) == set(pids)


# -- failures ----------------------------------------------------------------------------------

FAILURES = {
    RAISE: r"toy 1 \(environments 2 to 2\): RuntimeError: the wheel came off",
    EXIT: r"toy 1 \(environments 2 to 2\) died in a word \(exit code 7\)",
    HANG: r"toy 1 \(environments 2 to 2\) hangs: it did not finish a word within timeout_s = 0\.5 "
    "seconds, and was killed",
}
TRACEBACK = '\n\nIn the worker process:\n(?s:.*)raise RuntimeError\\("the wheel came off"\\)'


def settings_for(command: bytes) -> dict[str, Any]:
    """A short time-out for what hangs; others have all the time that they need."""
    return {"timeout_s": SHORT_S} if command == HANG else {}


@pytest.mark.parametrize("command", FAILURES)
def test_a_failure_is_an_error(start: Any, command: bytes, tmp_path: Path) -> None:
    """It says what happened, and ends all processes, the others in good order."""
    crew = start()
    pids = begin(crew)
    crew.timeout_s = settings_for(command).get("timeout_s", PATIENCE_S)
    appendix = TRACEBACK if command == RAISE else r"\Z"
    reason = r" \(workers were restarted 0 times; on_worker_failure = fail\)"
    with pytest.raises(
        WorkerError, match=rf"\A{FAILURES[command]}; a word is lost{reason}{appendix}"
    ):
        replace(crew, 1, command)
    assert crew.workers == []
    assert crew.restarts == 0
    assert all(map(has_ended, pids))
    assert multiprocessing.active_children() == []
    assert closed_in_order(tmp_path) >= {pids[0], pids[2]}
    with pytest.raises(WorkerError, match=r"\Athese toys are closed: build new ones\Z"):
        crew.ready(0)


@pytest.mark.parametrize("command", FAILURES)
@pytest.mark.parametrize("stops_before", [False, True])
def test_a_process_is_started_again(
    start: Any, command: bytes, stops_before: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told, the others go on, and the crew listens to the new one."""
    crew = start(on_worker_failure="restart")
    pids = begin(crew)
    ask(crew, 2, "before")
    crew.timeout_s = settings_for(command).get("timeout_s", PATIENCE_S)
    failure = failure_of(crew, 1, command)
    if stops_before:
        crew.stop(1)
        assert has_ended(pids[1])
        assert answers(crew, 1) == {2: "before"}
        ask(crew, 2, "before")
    worker = crew.replace(1, failure, failure.text, "and says hello")
    assert worker is crew.workers[1]
    assert crew.restarts == 1
    told = answers(crew, 2)
    assert told == {1: ("hello", worker.process.pid), 2: "before"}
    assert [worker.process.pid == pid for worker, pid in zip(crew.workers, pids, strict=True)] == [
        True, False, True,
    ]  # fmt: skip
    assert has_ended(pids[1])
    assert (worker.envs, str(worker)) == (ENVS[1], "toy 1 (environments 2 to 2)")
    for index in range(3):
        ask(crew, index, f"word {index}")
    assert answers(crew, 3) == {0: "word 0", 1: "word 1", 2: "word 2"}
    warning = capfd.readouterr().err
    outlook = r"it is started again \(restart 1 of at most 10\), and says hello"
    appendix = TRACEBACK if command == RAISE else r"\n\Z"
    assert re.match(rf"warning: {FAILURES[command]}; {outlook}{appendix}", warning)


def test_restarts_are_limited(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of all processes together."""
    crew = start(on_worker_failure="restart", max_worker_restarts=2)
    begin(crew)
    for index in (1, 0):
        assert replace(crew, index, EXIT) is crew.workers[index]
        assert answers(crew, 1)[index][0] == "hello"
    words = r"\Atoy 1 .*; a word is lost \(workers were restarted 2 times; max_worker_restarts = 2"
    with pytest.raises(WorkerError, match=words):
        replace(crew, 1, EXIT)
    assert (crew.restarts, crew.workers) == (2, [])
    assert capfd.readouterr().err.count("is started again (restart") == 2


def test_what_a_new_start_does_not_mend(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """An error of the configuration is raised as it is, with whatever setting."""
    crew = start(on_worker_failure="restart")
    begin(crew)
    with pytest.raises(ConfigError, match=r"\Awheels = 3: expected four"):
        replace(crew, 0, REFUSE)
    assert (crew.restarts, crew.workers) == (0, [])
    assert capfd.readouterr().err == ""


# -- starting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (RAISE, rf"\Atoy [012] .*: RuntimeError: the wheel came off{TRACEBACK}"),
        (EXIT, r"\Atoy [012] \(.*\) died in beginning \(exit code 7\)\Z"),
        (HANG, r"\Atoy [012] \(.*\) hangs: it did not finish beginning within timeout_s = 0\.5 "),
    ],
)
def test_a_process_that_fails_while_it_starts(start: Any, first: bytes, words: str) -> None:
    """It is not started again: it never worked. Whoever asked for it closes the crew."""
    crew = start(first, on_worker_failure="restart", **settings_for(first))
    with pytest.raises(WorkerError, match=words):
        crew.first_replies("beginning")
    assert crew.restarts == 0
    crew.close()
    assert multiprocessing.active_children() == []


def test_settings_that_a_process_refuses_while_it_starts(start: Any) -> None:
    """The error is the one of the configuration."""
    with pytest.raises(ConfigError, match=r"\Awheels = 3: expected four"):
        start(REFUSE).first_replies("beginning")


def refuse_start(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let no process be started after so many."""
    allowed, start_worker = iter(range(after)), crew_module.start_worker

    def refusing(*arguments: Any, **settings: Any) -> Any:
        if next(allowed, None) is None:
            raise OSError("no more processes")
        return start_worker(*arguments, **settings)

    monkeypatch.setattr(crew_module, "start_worker", refusing)


def test_a_process_that_can_not_be_started(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started before are ended, at once."""
    refuse_start(monkeypatch, after=2)
    with pytest.raises(OSError, match="no more processes"):
        start()
    assert multiprocessing.active_children() == []


def test_a_process_that_can_not_be_started_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The crew is closed; what is left of the failed process is not touched once more."""
    crew = start(on_worker_failure="restart")
    begin(crew)
    refuse_start(monkeypatch, after=0)
    with pytest.raises(OSError, match="no more processes"):
        replace(crew, 1, EXIT)
    assert crew.workers == []
    assert multiprocessing.active_children() == []


# -- ending ------------------------------------------------------------------------------------


def test_closing_twice(start: Any, tmp_path: Path) -> None:
    """Processes end in good order, once."""
    crew = start()
    pids = begin(crew)
    crew.close()
    assert closed_in_order(tmp_path) == set(pids)
    assert all(map(has_ended, pids))
    assert crew.workers == []
    crew.close()
    with pytest.raises(WorkerError, match="closed"):
        crew.ready(0)


def test_a_descriptor_that_another_file_got(start: Any) -> None:
    """The crew neither listens to it nor writes to it after the process was ended."""
    crew = start()
    begin(crew)
    descriptor = crew.workers[1].descriptor
    with tempfile.TemporaryFile() as file:
        crew.stop(1)
        os.dup2(file.fileno(), descriptor)
        try:
            assert crew.ready(0) == []
            crew.stop(1)
            crew.close()
            assert os.fstat(descriptor).st_size == 0
        finally:
            os.close(descriptor)


def test_a_number_that_a_new_process_got(start: Any) -> None:
    """News of a new process is its own, though its descriptor once was that of another one."""
    crew = start(on_worker_failure="restart")
    begin(crew)
    number = crew.workers[2].descriptor
    failure = failure_of(crew, 0, EXIT)
    crew.stop(0)
    crew.stop(2)
    # A new descriptor gets the lowest number that is free.
    lower = [os.dup(0)]
    while lower[-1] < number:
        lower.append(os.dup(0))
    os.close(lower.pop())
    assert crew.replace(0, failure, "it failed", "and says hello").descriptor == number
    assert answers(crew, 1)[0][0] == "hello"
    for descriptor in lower:
        os.close(descriptor)


class Owner:
    """Has a crew, and closes it.

    Args:
        start: Starts the crew.
    """

    def __init__(self, start: Callable[..., Crew], **settings: Any) -> None:
        self.seen: list[int] = []
        self.crew = start(owner=self, **settings)

    def close(self) -> None:
        """Close the crew, and note how many processes it had."""
        self.seen.append(len(self.crew.workers))
        self.crew.close()


def test_the_owner_is_closed_with_the_crew(start: Any) -> None:
    """When a process is not started again, and before its processes ended."""
    owner = Owner(start)
    begin(owner.crew)
    with pytest.raises(WorkerError, match="on_worker_failure = fail"):
        replace(owner.crew, 1, EXIT)
    assert owner.seen == [3]


def test_nothing_keeps_a_crew_alive(tmp_path: Path) -> None:
    """Neither the crew nor its owner; processes end when nobody holds the other ends of pipes."""
    task = ToyTask(os.getpid(), tmp_path)

    def make(**settings: Any) -> Crew:
        return Crew(toy_main, task, ENVS, kind="toy", start_method="fork", **settings)

    gc.collect()
    gc.disable()
    try:
        crew, owner = make(), Owner(make)
        begin(crew)
        begin(owner.crew)
        references = [weakref.ref(crew), weakref.ref(owner), weakref.ref(owner.crew)]
        del crew, owner
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
    for process in multiprocessing.active_children():
        process.join(PATIENCE_S)
    assert multiprocessing.active_children() == []
    assert len(closed_in_order(tmp_path)) == 2 * len(ENVS)


PARENT = """
import atexit, os, sys
from multiprocessing.util import _exit_function
from pathlib import Path
from test_crew import ENVS, Owner, ToyTask, begin, toy_main, ask, answers
from maze_train.envs.crew import Crew

class Loud(Owner):
    def close(self):
        print("closed", os.getpid() == parent, len(self.crew.workers), flush=True)
        super().close()

def make(**settings):
    task = ToyTask(parent, Path(sys.argv[1]))
    return Crew(toy_main, task, ENVS, kind="toy", start_method="fork", **settings)

parent = os.getpid()
owner, crew, closed, gone = Loud(make), make(), Loud(make), Loud(make)
for each in (owner.crew, crew, closed.crew, gone.crew):
    print(*begin(each))
closed.close()
del gone
child = os.fork()
if child == 0:
    atexit.unregister(_exit_function)  # It can not wait for what is not its own.
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
for each in (owner.crew, crew):
    ask(each, 0, "still there")
    assert answers(each, 1) == {0: "still there"}
"""


def test_the_end_of_the_process(tmp_path: Path) -> None:
    """Crews are closed then, through their owners; not by a process that was forked from it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    paths = [str(Path(__file__).parent), *sys.path]
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    lines = finished.stdout.splitlines()
    assert lines[4:] == ["closed True 3", "closed True 3"]
    pids = {int(word) for line in lines[:4] for word in line.split()}
    assert len(pids) == 4 * len(ENVS)
    assert all(map(has_ended, pids))
    assert closed_in_order(tmp_path) == pids
