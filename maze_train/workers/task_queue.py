"""Distribute tasks over the workers of a pool, and repeat the tasks of failed workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from maze_train.workers.pool import WorkerFailedError, WorkerPool, check_spaces

Result = TypeVar("Result")

POLL_S = 0.1
"""Maximum time in seconds to wait for a result."""

CALLS_AHEAD = 2
"""Number of pending calls per worker; more than one keeps workers busy between calls."""

MAX_RAISES = 2
"""Maximum number of exceptions per episode before the run ends."""

MAX_DEATHS = 3
"""Number of workers that die or hang during a task after which the run ends."""

MAX_LISTED_SEEDS = 8
"""Maximum number of seeds listed in a message."""


class TaskQueue(Generic[Result]):
    """Queue of episodes (tasks 0, 1, 2, ... of a round) for the workers of a pool.

    Tasks of a failed worker are repeated. The run ends if the episode of a task raises twice, or if
    three workers die or hang during a task. Workers have the methods `describe()` (returns
    observation and action space), `begin_round(*args)`, `advance(tasks)` (adds tasks, continues all
    tasks for a limited time, and returns results) and `drop()` (discards all tasks).

    Args:
        pool: Newly created workers. The pool is closed if a worker fails.
        slots: Number of concurrent tasks of each worker (>= 1).
        number_of: Returns the task number of a result.

    Attributes:
        capacity: Total number of concurrent tasks.
        most_tasks: Maximum number of tasks of each worker, including waiting tasks that keep all
            slots busy.
        next: Number of the next new task.
        spaces: Observation and action space of one environment.

    Raises:
        MazeTrainError: If a worker cannot be created.
        SpaceError: If the spaces of the environments differ.
    """

    def __init__(
        self, pool: WorkerPool, slots: Sequence[int], number_of: Callable[[Result], int]
    ) -> None:
        self.capacity = sum(slots)
        self.most_tasks = [own + own // 2 + 1 for own in slots]
        self.next = 0
        self._pool, self._slots, self._number_of = pool, slots, number_of
        self._states = [_WorkerState() for _ in range(len(pool))]
        self._setup: list[tuple[str, tuple[Any, ...]]] = []
        self._round: tuple[Any, ...] = ()
        self._task_of: Callable[[int], Any] = int
        self._seed_of: Callable[[int], int] = int
        self._again: list[int] = []
        self._raises: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        described = pool.call_new("describe")
        self.spaces: tuple[Any, Any] = described[0]
        try:
            for index, spaces in enumerate(described):
                self._check_spaces(index, spaces)
        except BaseException:
            pool.close()
            raise

    def set_up(self, method: str, *args: object) -> None:
        """Call a method of every worker, and register it for restarted workers."""
        self._setup.append((method, args))
        self._pool.call_all(method, *args)  # Waiting lets all workers start a round together.

    def ask_all(self, method: str, *args: object) -> None:
        """Call a method of every worker between two rounds, and wait until all calls end.

        A restarted worker repeats the call.

        Raises:
            MazeTrainError: If a worker cannot be restarted, or a method raises twice.
        """
        raised: set[int] = set()
        for index in range(len(self._pool)):
            self._call(index, method, *args)
        for index in range(len(self._pool)):
            while self._pool.pending(index):
                try:
                    self._receive(index)
                except WorkerFailedError as failure:
                    failure.final = failure.final or (failure.raised and index in raised)
                    if failure.raised:
                        raised.add(index)
                    self._repair(failure.with_traceback(None))
                    self._call(index, method, *args)

    def begin(
        self, *args: object, task_of: Callable[[int], Any], seed_of: Callable[[int], int]
    ) -> None:
        """Begin a round. Call `drop` first, except before the first round.

        Args:
            *args: Arguments of the workers' `begin_round`.
            task_of: Returns the description of a task, given its number.
            seed_of: Returns the seed of a task.
        """
        self._round, self._task_of, self._seed_of = args, task_of, seed_of
        self.next = 0
        for state in self._states:
            state.in_round = False

    def drop(self) -> None:
        """Discard all tasks."""
        for index in range(len(self._pool)):
            state = self._states[index]
            if state.tasks and not state.preparations:
                self._pool.cancel(index)
                self._pool.call(index, "drop")
                state.calls = 0
            state.tasks.clear()
        self._again.clear()
        self._raises.clear()
        self._deaths.clear()

    def advance(self, limit: int, take: Callable[[Result], object]) -> None:
        """Assign tasks, receive the available results, and restart failed workers.

        Args:
            limit: Run tasks 0, ..., limit - 1. The limit must not decrease within a round.
            take: Function to call with each result as soon as the result is received, so that a
                later failure of a worker does not lose the result.

        Raises:
            MazeTrainError: If a worker failed and cannot be restarted.
            SpaceError: If the environments of a restarted worker have different spaces.
        """
        given = self.hand_out(limit)
        for index, state in enumerate(self._states[: len(self._pool)]):
            tasks = given.get(index, [])
            if tasks or (state.tasks and self._pool.pending(index) < CALLS_AHEAD):
                self._advance(index, [self._task_of(number) for number in tasks])
        for index in self._pool.ready(POLL_S):
            try:
                results = self._receive(index)
            except WorkerFailedError as failure:
                # The frames of the traceback would keep this object alive.
                self._repair(failure.with_traceback(None))
                continue
            for found in results:
                take(found)

    def _receive(self, index: int) -> list[Result]:
        """Receive the result of the oldest call; return the results of this round."""
        state, pending = self._states[index], self._pool.pending(index)
        # An interrupt may have occurred after an earlier result was received.
        state.calls = min(state.calls, pending)
        state.preparations = min(state.preparations, pending)
        result = self._pool.receive(index)
        if state.preparations:
            state.preparations -= 1
            if result is not None:
                self._check_spaces(index, result)
            return []
        if result is None or pending > state.calls:
            return []
        found: list[Result] = result
        state.tasks.difference_update(map(self._number_of, found))
        return found

    def hand_out(self, limit: int) -> dict[int, list[int]]:
        """Assign tasks to the least busy workers, starting with tasks to repeat.

        Returns:
            The new tasks of each worker.
        """
        given: dict[int, list[int]] = {}
        made = [i for i in range(len(self._pool)) if not self._states[i].preparations]
        while made and (self._again or self.next < limit):
            index = min(made, key=lambda i: len(self._states[i].tasks) - self.most_tasks[i])
            if len(self._states[index].tasks) >= self.most_tasks[index]:
                break
            if self._again:
                number = self._again.pop(0)
            else:
                number, self.next = self.next, self.next + 1
            self._states[index].tasks.add(number)
            given.setdefault(index, []).append(number)
        return given

    def _advance(self, index: int, tasks: list[Any]) -> None:
        state = self._states[index]
        if not state.in_round:
            state.in_round = True
            self._call(index, "begin_round", *self._round)
        self._call(index, "advance", tasks)

    def _call(self, index: int, method: str, *args: object) -> None:
        self._states[index].calls += 1
        self._pool.call(index, method, *args)

    def _repair(self, failure: WorkerFailedError) -> None:
        """Restart a worker, and repeat its tasks.

        Raises:
            MazeTrainError: If the worker cannot be restarted.
        """
        index = failure.index
        state = self._states[index]
        description = failure.text + self._blame(state, failure)
        outlook = f"and its {len(state.tasks)} episodes are repeated with the same seeds"
        self._again = sorted([*self._again, *state.tasks])
        self._states[index] = _WorkerState()
        self._pool.restart(failure, description, outlook)
        for method, args in [("describe", ()), *self._setup]:
            self._states[index].preparations += 1
            self._call(index, method, *args)

    def _check_spaces(self, index: int, spaces: tuple[Any, Any]) -> None:
        check_spaces(sum(self._slots[:index]), spaces, self.spaces)

    def _blame(self, state: _WorkerState, failure: WorkerFailedError) -> str:
        """Count the failure for all tasks that may have caused it; return a message text."""
        if not state.tasks:
            return ""
        if failure.seed is None:
            suspects, counts, most = set(state.tasks), self._deaths, MAX_DEATHS
            description = (
                f"; it was running the episodes with the seeds {self._list_seeds(suspects)}"
            )
        else:
            suspects = {task for task in state.tasks if self._seed_of(task) == failure.seed}
            counts, most, description = self._raises, MAX_RAISES, ""
        counts.update(suspects)
        if all(counts[task] < most for task in suspects):
            return description
        failure.final = True
        return f"{description}; a repetition failed as well"

    def _list_seeds(self, tasks: set[int]) -> str:
        seeds = list(dict.fromkeys(self._seed_of(task) for task in sorted(tasks)))
        rest = ", ..." if len(seeds) > MAX_LISTED_SEEDS else ""
        return ", ".join(map(str, seeds[:MAX_LISTED_SEEDS])) + rest


class _WorkerState:
    """Tasks and pending calls of a worker.

    Attributes:
        calls: Number of pending calls since the last `drop`; older calls belong to an earlier
            round.
        preparations: Number of pending calls before the first task.
        in_round: Whether the worker was notified of the round.
        tasks: Numbers of the assigned tasks.
    """

    def __init__(self) -> None:
        self.calls = self.preparations = 0
        self.in_round = False
        self.tasks: set[int] = set()
