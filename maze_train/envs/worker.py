"""The process that steps a slice of environments, and the words it speaks with its parent.

A message is one byte, which the hot path reads and writes without the framing of `Connection`; some
are followed by a framed pickle. Observations, actions, rewards and flags do not travel: they lie in
memory that both sides map. Both ends run the same code on the same machine, and the pipe is private
to them, so pickle is safe here.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

from maze_train.envs.buffers import StepBuffers, map_shared
from maze_train.envs.stepping import EnvSlice, StepReport, build_envs
from maze_train.envs.wrappers import described_metadata
from maze_train.errors import ConfigError, EnvError, MazeTrainError, MissingExtraError
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    import gymnasium

__all__ = ["DONE", "FAILED", "MAP", "QUIT", "REPORT", "RESET", "STEP", "WorkerTask", "worker_main"]

STEP, RESET, MAP, QUIT = b"s", b"r", b"m", b"q"
"""Commands: step; reset (seed, options); map the memory whose descriptor follows; close the
environments and end."""

DONE, REPORT, FAILED = b"d", b"i", b"f"
"""Replies: done, nothing to tell; done, with what is pickled; failed, with message and
traceback."""

ORPHAN_CHECK_MS = 2000
"""How often an idle worker looks whether its parent lives. The end of the pipe normally tells; but
processes forked by the parent for other purposes may hold a copy of the parent's end."""


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


def worker_main(conn: Connection, inherited: Sequence[Connection], task: WorkerTask) -> None:
    """Build environments, then obey until told to quit or the parent is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        task: The environments to build.
    """
    prepare_process()
    for other in inherited:
        other.close()
    envs: list[gymnasium.Env[Any, Any]] = []
    with suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            envs = build_envs(pickle.loads(task.factories), task.first)
            limit_threads()  # again: building the environments may have imported torch
            serve(conn, envs, task)
        except Exception as error:
            reply(conn, FAILED, pickle.dumps(describe_failure(error)))
    with suppress(Exception):
        for env in envs:
            env.close()
    conn.close()


def prepare_process() -> None:
    """Give up what a process that steps environments must not have from its parent."""
    # Ctrl+C reaches the whole process group; the parent decides what to do about it, and it may
    # want to save first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    limit_threads()


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
    reply(conn, REPORT, encode_spaces(envs[0]))
    parent = os.getppid()
    poller = select.poll()
    descriptor = conn.fileno()
    poller.register(descriptor, select.POLLIN)
    env_slice: EnvSlice | None = None
    while True:
        while not poller.poll(ORPHAN_CHECK_MS):
            if os.getppid() != parent:
                return
        command = os.read(descriptor, 1)
        if command == STEP and env_slice is not None:
            report = env_slice.step()
        elif command == RESET and env_slice is not None:
            report = env_slice.reset(*pickle.loads(conn.recv_bytes()))
        elif command == MAP:
            env_slice = EnvSlice(
                envs,
                map_buffers(conn, envs[0], task.num_envs).rows(task.first, task.first + len(envs)),
                first=task.first,
                num_envs=task.num_envs,
                step_infos=task.step_infos,
            )
            report = None
        else:
            return
        if report is None:
            os.write(descriptor, DONE)
        else:
            reply(conn, REPORT, encode_report(report))


def reply(conn: Connection, kind: bytes, content: bytes) -> None:
    """Send a reply that carries something."""
    os.write(conn.fileno(), kind)
    conn.send_bytes(content)


def map_buffers(conn: Connection, env: gymnasium.Env[Any, Any], num_envs: int) -> StepBuffers:
    """The arrays of the whole vector environment in the memory that the parent sends."""
    observation, action = FlatView(env.observation_space), FlatView(env.action_space)
    nbytes = StepBuffers.nbytes(observation, action, num_envs)
    return StepBuffers.over(map_shared(recv_handle(conn), nbytes), observation, action, num_envs)


def encode_spaces(env: gymnasium.Env[Any, Any]) -> bytes:
    """What the parent needs to know about an environment: its spaces, metadata and render mode."""
    import cloudpickle  # Imported here, since only worker processes and their parents need it.

    metadata = described_metadata(env)
    described = (env.observation_space, env.action_space, metadata, env.render_mode)
    return bytes(cloudpickle.dumps(described))


def encode_report(report: StepReport) -> bytes:
    """The infos of a step.

    Raises:
        EnvError: If they hold something that can not be sent to another process.
    """
    try:
        return pickle.dumps((report.final, report.ordinary))
    except Exception as error:
        raise EnvError(
            f"infos can not be sent to the main process ({error}): remove what can not be pickled "
            "from the info dict of the environment, or use SequentialVectorEnv"
        ) from error


def describe_failure(error: Exception) -> tuple[str, str, MazeTrainError | None]:
    """One line, the traceback of what the environment raised, and an error of the configuration."""
    message = str(error) if isinstance(error, EnvError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return message, trace, error if isinstance(error, (ConfigError, MissingExtraError)) else None
