"""An actor in another process, as the process of the learner sees it."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING

import numpy as np

from maze_train.workers.memory import map_shared, open_shared
from maze_train.envs.crew import Movement
from maze_train.rollout.actor_process import ACT, BEGIN, FLAGS_NBYTES, MADE, STOP

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maze_train.data.rollout_slots import RolloutLayout, RolloutSlot
    from maze_train.envs.workers import Worker
    from maze_train.rollout.actor_process import ActorMemory
    from maze_train.types import Array

__all__ = ["ActorProcess"]


class ActorProcess:
    """One actor: a process, which may be another one later, and memory that outlives it.

    Args:
        index: Number of the actor.
        worker: The process.
    """

    def __init__(self, index: int, worker: Worker) -> None:
        self.index = index
        self._worker = worker
        self.slots: list[RolloutSlot] = []
        self.begun = False
        """Whether the process has its policy."""
        self._memory = -1
        self._flags: Array = np.zeros(2, np.int64)
        self._granted: set[int] = set()
        self._arrived = 0
        self._movement = Movement()

    @property
    def worker(self) -> Worker:
        """The process."""
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        self._worker = worker
        self._movement.expect()

    @property
    def made(self) -> int:
        """Steps that the process made."""
        return int(self._flags[MADE])

    def reserve(self, layout: RolloutLayout, num_slots: int) -> None:
        """Get memory for so many rollouts, and for what is told step by step."""
        nbytes = FLAGS_NBYTES + num_slots * layout.nbytes
        self._memory = open_shared(nbytes)
        memory = map_shared(os.dup(self._memory), nbytes)
        self._flags = np.ndarray(2, np.int64, memory)
        offsets = (FLAGS_NBYTES + i * layout.nbytes for i in range(num_slots))
        self.slots = [layout.slot(memory, offset) for offset in offsets]

    def begin(self, memory: ActorMemory, weights: int, free: Iterable[int]) -> None:
        """Let the process act.

        Args:
            memory: What it needs to know.
            weights: Descriptor of the memory of the weights.
            free: Slots that it may write.
        """
        self.worker.send(BEGIN, pickle.dumps(memory))
        with suppress(BrokenPipeError, ConnectionResetError):
            for descriptor in (weights, self._memory):
                send_handle(self.worker.conn, descriptor, self.worker.process.pid)
        self.begun = True
        for slot in free:
            self.grant(slot)

    def grant(self, slot: int) -> None:
        """Let the process collect a rollout into a slot."""
        if not self._granted:
            self._movement.expect()
        self._granted.add(slot)
        self.worker.send(ACT, pickle.dumps(slot))

    def arrive(self, slot: int, num_steps: int) -> None:
        """Note that the process wrote a rollout of so many steps into a slot."""
        self._granted.discard(slot)
        self._arrived += num_steps

    def still_s(self) -> float:
        """Seconds since the process was seen to move; 0 while it has nothing to do."""
        return self._movement.still_s(self.made, has_work=not self.begun or bool(self._granted))

    def stop(self) -> None:
        """Ask the process to end after the step that it is making."""
        self._flags[STOP] = 1

    def reset_counts(self) -> tuple[int, int]:
        """Forget the process, which ended; returns the steps that it made, and that arrived."""
        made, arrived = self.made, self._arrived
        self._flags[:] = 0
        self._arrived = 0
        self._granted.clear()
        self.begun = False
        return made, arrived

    def release(self) -> None:
        """Give the memory back, once nobody looks at it."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
