"""The process of an actor, and the words it speaks with the process of the learner.

The pipe carries one byte per message, some of them followed by a framed pickle, as that of
`envs.worker` does. Weights and rollouts do not travel: they lie in memory that both sides map.
"""

from __future__ import annotations

import pickle
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.data.rollout_slots import RolloutLayout
from maze_train.envs.buffers import map_shared
from maze_train.envs.worker import (
    REPORT,
    ParentWatch,
    commands,
    limit_threads,
    reply,
    run_process,
)
from maze_train.rollout.actors import RolloutActor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.rollout.actors import ActorSettings
    from maze_train.types import Array, TensorTree

__all__ = ["ACT", "BEGIN", "ActorMemory", "ActorTask", "actor_main"]

BEGIN, ACT = b"b", b"a"
"""Commands: begin with a policy (an `ActorMemory`, and the descriptors of the weights and of the
rollouts follow); collect a rollout into a slot (its number follows)."""

MADE, STOP = range(2)
"""Numbers that both sides see at once: the steps that the actor made, and whether it shall end."""

FLAGS_NBYTES = 4096
"""Memory of these before the slots: a page of its own."""

PARENT_CHECK_S = 1.0
"""How often an actor looks whether its parent lives while it collects."""


@dataclass(frozen=True)
class ActorTask:
    """What an actor is to do first: build its environments."""

    make_env: bytes
    """Function of the number of the first one that builds them, as pickled by cloudpickle."""

    parent: int
    """Process that gives the commands."""

    first: int
    """Number of its first environment."""


@dataclass(frozen=True)
class ActorMemory:
    """What an actor needs to act."""

    make_model: bytes
    """Function that builds the policy, as pickled by cloudpickle."""

    settings: ActorSettings
    """Length of the rollouts, seeds."""

    actions: TensorTree
    """An example of the actions of one environment."""

    state_size: int
    """Size of the memory of the policy."""

    weights_nbytes: int
    """Size of the memory of the weights."""

    num_slots: int
    """Number of rollouts that fit into the memory of the actor."""

    def layout(self, env: Any, num_envs: int) -> RolloutLayout:
        """How rollouts lie in a slot.

        Args:
            env: What has `single_observation_space` and `frame_stack`.
            num_envs: Number of environments of the actor.
        """
        return RolloutLayout(
            env.single_observation_space,
            self.actions,
            self.settings.num_steps,
            num_envs,
            frame_stack=env.frame_stack,
            state_size=self.state_size,
        )


@dataclass(frozen=True)
class ActorEnvs:
    """What the learner needs to know about the environments of an actor."""

    single_observation_space: Any
    """Flat observation space."""

    env_observation_space: Any
    """Observation space as the environment has it."""

    single_action_space: Any
    """Action space."""

    frame_stack: dict[str, int]
    """Observations that are stacks of frames, see `MazeVectorEnv`."""


class StoppedError(Exception):
    """Nobody needs the rollout any more."""


class _Watch:
    """Tells the steps that an actor makes, and ends it when it shall end, or the parent is gone.

    Args:
        flags: What both sides see.
        num_envs: Steps that are made at once.
        parent: Process of the learner.
    """

    def __init__(self, flags: Array, num_envs: int, parent: int) -> None:
        self._flags = flags
        self._num_envs = num_envs
        self._parent = ParentWatch(parent)
        self._next_look = time.monotonic() + PARENT_CHECK_S

    def __call__(self) -> None:
        self._flags[MADE] += self._num_envs
        if self._flags[STOP]:
            raise StoppedError
        now = time.monotonic()
        if now > self._next_look:
            self._next_look = now + PARENT_CHECK_S
            if self._parent.is_gone():
                raise StoppedError


def actor_main(conn: Connection, inherited: Sequence[Connection], task: ActorTask) -> None:
    """Build environments, then act until told to quit or the parent is gone.

    Args:
        conn: This end of the pipe to the parent.
        inherited: Ends that belong to the parent and were copied by a fork; they are closed here.
        task: The environments to build.
    """

    def work(closing: ExitStack) -> None:
        env: MazeVectorEnv = pickle.loads(task.make_env)(task.first)
        closing.callback(env.close)
        limit_threads()  # again: building the environments may have imported what has some
        with suppress(StoppedError):
            _act(conn, env, task.parent)

    run_process(conn, inherited, work)


def _act(conn: Connection, env: MazeVectorEnv, parent: int) -> None:
    """Tell the parent about the environments, and collect a rollout for each slot that it names."""
    import cloudpickle  # Imported here, since only worker processes and their parents need it.

    described = ActorEnvs(
        env.single_observation_space,
        env.env_observation_space,
        env.single_action_space,
        dict(env.frame_stack),
    )
    reply(conn, REPORT, cloudpickle.dumps(described))
    actor, slots = None, []
    for command in commands(conn, parent):
        if command == BEGIN:
            memory: ActorMemory = pickle.loads(conn.recv_bytes())
            layout = memory.layout(env, env.num_envs)
            weights = map_shared(recv_handle(conn), memory.weights_nbytes)
            nbytes = FLAGS_NBYTES + memory.num_slots * layout.nbytes
            rollouts = map_shared(recv_handle(conn), nbytes)
            on_step = _Watch(np.ndarray(2, np.int64, rollouts), env.num_envs, parent)
            slots = [
                layout.slot(rollouts, FLAGS_NBYTES + i * layout.nbytes)
                for i in range(memory.num_slots)
            ]
            actor = RolloutActor(
                env, pickle.loads(memory.make_model)(), weights, memory.settings, on_step
            )
            limit_threads()
        elif command == ACT and actor is not None:
            number: int = pickle.loads(conn.recv_bytes())
            rollout, episodes = actor.act()
            slots[number].write(rollout)
            told = (number, rollout.num_samples, episodes, time.monotonic())
            reply(conn, REPORT, pickle.dumps(told))
        else:
            return
