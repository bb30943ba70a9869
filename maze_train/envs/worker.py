"""The process that steps a slice of environments, and the words it speaks with its parent.

A message is one byte, which the hot path reads and writes without the framing of `Connection`; some
are followed by a framed pickle. Observations, actions, rewards and flags do not travel: they lie in
memory that both sides map. Both ends run the same code on the same machine, and the pipe is private
to them, so pickle is safe here.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from maze_train.envs.buffers import StepBuffers, map_shared
from maze_train.envs.building import build_envs, close_all
from maze_train.envs.faults import warn
from maze_train.envs.finite import NonFiniteError
from maze_train.envs.layers import offers_own_state
from maze_train.envs.stepping import EnvSlice
from maze_train.envs.wrappers import described_metadata
from maze_train.errors import ConfigError, EnvError, MazeTrainError, MissingExtraError
from maze_train.files import process_runs
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import gymnasium

__all__ = [
    "ALIVE",
    "BEGIN",
    "DONE",
    "FAILED",
    "GUARD",
    "MAP",
    "OWN",
    "PROCESS_NAME",
    "QUIT",
    "REPORT",
    "RESET",
    "RESTORE",
    "SIGNALS",
    "STEP",
    "ParentWatch",
    "WorkerTask",
    "refuse_import",
    "run_process",
    "worker_main",
]

STEP, RESET, MAP, QUIT = b"s", b"r", b"m", b"q"
"""Commands: step; reset (seed, options); map the memory whose descriptor follows; close the
environments and end."""

RESTORE, BEGIN, OWN = b"p", b"b", b"o"
"""Commands: put the environments back (arguments of `EnvSlice.restore`, in a file whose descriptor
follows); begin new episodes (arguments of `EnvSlice.begin`); tell the own states of
environments."""

DONE, REPORT, FAILED, ALIVE = b"d", b"i", b"f", b"a"
"""Replies: done, nothing to tell; done, with what is pickled; failed, with message and traceback;
not done yet, but on the way."""

ALIVE_S = 0.1
"""How often a worker that plays episodes again says so."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that reach all processes of a job: Ctrl+C, a closed terminal, and those of a cluster that
wants it to end. The parent decides what to do about them; it may want to save first."""

ORPHAN_CHECK_MS = 2000
"""How often an idle worker looks whether its parent lives. The end of the pipe normally tells; but
processes forked by the parent for other purposes may hold a copy of the parent's end."""


PROCESS_NAME = "maze-env"
"""How the names of processes begin."""

GUARD = 'A script that starts processes needs the guard `if __name__ == "__main__":`'


@dataclass(frozen=True)
class WorkerTask:
    """What a worker is to do."""

    factories: bytes
    """Functions that build its environments, as pickled by cloudpickle."""
    first: int
    """Index of its first environment."""
    num_envs: int
    """Number of environments of the whole vector environment."""
    step_infos: bool
    """Whether to report the infos of every step."""
    on_non_finite: str
    """What to do about numbers that are not finite."""
    parent: int
    """Process that gives the commands."""


def refuse_import() -> None:
    """End a new process that runs a script which should only be imported; its parent tells.

    Raises:
        SystemExit: In a process that is about to begin, and imports the script of its parent.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself finds out
        raise SystemExit(1 if process.name.startswith(PROCESS_NAME) else GUARD)


def worker_main(conn: Connection, inherited: Sequence[Connection], task: WorkerTask) -> None:
    """Build environments, then obey until told to quit or the parent is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        task: The environments to build.
    """

    def work(closing: ExitStack) -> None:
        envs = build_envs(pickle.loads(task.factories), task.first)
        closing.callback(close_all, envs)
        limit_threads()  # again: building the environments may have imported torch
        serve(conn, envs, task)

    run_process(conn, inherited, work)


def run_process(
    conn: Connection, inherited: Sequence[Connection], work: Callable[[ExitStack], object]
) -> None:
    """Do the work of a process; the parent is told what it raises.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        work: Gets a stack on which it puts what is to be closed in the end.
    """
    prepare_process()
    for other in inherited:
        other.close()
    closing = ExitStack()
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            work(closing)
        except BaseException as error:
            reply(conn, FAILED, pickle.dumps(describe_failure(error)))
    try:
        closing.close()
    except BaseException as error:
        warn(str(error))
    conn.close()


def prepare_process() -> None:
    """Give up what a process that steps environments must not have from its parent."""
    for number in SIGNALS:
        # Not SIG_IGN, which programs that an environment starts would inherit.
        signal.signal(number, survive)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    limit_threads()


def survive(number: int, frame: object) -> None:
    """Do nothing about a signal."""


def limit_threads() -> None:
    """One thread of torch and OpenCV per worker: the workers are what uses the cores.

    After a fork it also keeps the process from hanging: a fork copies torch's thread pool but not
    its threads, and the first large operation would wait for them forever.
    """
    torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
    if torch is not None:
        torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(1)


def serve(conn: Connection, envs: Sequence[gymnasium.Env[Any, Any]], task: WorkerTask) -> None:
    """Tell the parent about the environments, map the memory it sends, obey its commands."""
    reply(conn, REPORT, encode_spaces(envs))
    descriptor = conn.fileno()
    env_slice: EnvSlice | None = None
    for command in commands(conn, task.parent):
        if command == MAP:
            env_slice = map_slice(conn, envs, task)
            report = None
        elif env_slice is not None:
            report = obey(command, env_slice, conn)
        else:
            return
        if report is None:
            os.write(descriptor, DONE)
        else:
            reply(conn, REPORT, encode(report))


class ParentWatch:
    """Tells whether the process that gives the commands is gone.

    Args:
        parent: That process.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._starter = os.getppid()

    def is_gone(self) -> bool:
        """Whether it is; the fork server that started this process may end before."""
        return os.getppid() != self._starter and not process_runs(self._parent)


def commands(conn: Connection, parent: int) -> Iterator[bytes]:
    """The commands of the parent, until it wants this process to end, or is gone."""
    watch = ParentWatch(parent)
    poller = select.poll()
    descriptor = conn.fileno()
    poller.register(descriptor, select.POLLIN)
    while True:
        while not poller.poll(ORPHAN_CHECK_MS):
            if watch.is_gone():
                return
        command = os.read(descriptor, 1)
        if not command or command == QUIT:
            return
        yield command


def obey(command: bytes, env_slice: EnvSlice, conn: Connection) -> Any:
    """Do what the parent asks for; returns what to reply."""
    if command == STEP:
        return env_slice.step()
    if command == OWN:
        try:
            return env_slice.own_states()
        except EnvError as error:
            return str(error)
    if command == RESET:
        return env_slice.reset(*pickle.loads(conn.recv_bytes()))
    if command == BEGIN:
        return env_slice.begin(*pickle.loads(conn.recv_bytes()))
    with open(recv_handle(conn), "rb") as file:
        file.seek(0)  # Both sides share the position.
        seed, records, allow_new_episodes = pickle.load(file)
    return env_slice.restore(
        seed, records, allow_new_episodes=allow_new_episodes, progress=pulse(conn.fileno())
    )


def pulse(descriptor: int) -> Callable[[], None]:
    """A function that tells the parent from time to time that this worker lives."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > ALIVE_S:
            os.write(descriptor, ALIVE)
            last = now

    return beat


def reply(conn: Connection, kind: bytes, content: bytes) -> None:
    """Send a reply that carries something."""
    os.write(conn.fileno(), kind)
    conn.send_bytes(content)


def map_slice(
    conn: Connection, envs: Sequence[gymnasium.Env[Any, Any]], task: WorkerTask
) -> EnvSlice:
    """The environments over the memory of the whole vector environment, which the parent sends."""
    observation, action = FlatView(envs[0].observation_space), FlatView(envs[0].action_space)
    nbytes = StepBuffers.nbytes(observation, action, task.num_envs)
    memory = map_shared(recv_handle(conn), nbytes)
    buffers = StepBuffers.over(memory, observation, action, task.num_envs)
    return EnvSlice(
        envs,
        buffers.rows(task.first, task.first + len(envs)),
        first=task.first,
        num_envs=task.num_envs,
        step_infos=task.step_infos,
        on_non_finite=task.on_non_finite,
    )


def encode_spaces(envs: Sequence[gymnasium.Env[Any, Any]]) -> bytes:
    """What the parent needs to know about the environments.

    Spaces, metadata and render mode, and whether one of them offers its state.
    """
    import cloudpickle  # Imported here, since only worker processes and their parents need it.

    env, offers = envs[0], any(map(offers_own_state, envs))
    metadata = described_metadata(env)
    described = (env.observation_space, env.action_space, metadata, env.render_mode, offers)
    return bytes(cloudpickle.dumps(described))


def encode(report: Any) -> bytes:
    """A reply.

    Raises:
        EnvError: If they hold something that can not be sent to another process.
    """
    try:
        return pickle.dumps(report)
    except Exception as error:
        raise EnvError(
            f"infos can not be sent to the main process ({error}): remove what can not be pickled "
            "from the info dict of the environment, or use SequentialVectorEnv"
        ) from error


def describe_failure(error: BaseException) -> tuple[str, str, MazeTrainError | None, bool]:
    """What the parent is told about an exception.

    Returns:
        One line, the traceback of what the environment raised, the error if it is one of the
        configuration, and whether starting the worker again is no remedy.
    """
    message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    told = error if isinstance(error, (ConfigError, MissingExtraError)) else None
    return message, trace, told, told is not None or isinstance(cause, NonFiniteError)
