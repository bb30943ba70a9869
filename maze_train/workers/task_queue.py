"""Shares numbered tasks out to the workers of a pool; those of a worker that fails come again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from maze_train.workers.pool import WorkerFailedError, WorkerPool, check_spaces

Result = TypeVar("Result")

POLL_S = 0.1
"""Longest wait for a result of the workers, in seconds."""

CALLS_AHEAD = 2
"""Calls that a worker has at a time, so that it need not wait for the next one."""

MOST_RAISES = 2
"""Number of times that an episode may raise before it ends the run."""

MOST_DEATHS = 3
"""Number of workers that may die or hang during a task before it ends the run."""

MAX_LISTED_SEEDS = 8
"""Seeds that a message names at most."""


class TaskQueue(Generic[Result]):
    """Tasks 0, 1, 2, ... of a round, an episode each, and the workers that do them.

    Tasks of a worker that fails are given to others, or to the worker that takes its place. A task
    that fails again after that ends the run: when its episode raised for the second time, or when
    the third worker died or hung with it.

    A worker has these methods: `describe()` gives the observation and action space of its
    environments; `begin_round(*args)` begins a round; `advance(tasks)` takes tasks over, continues
    with all of its tasks for a while, and returns results; `drop()` forgets its tasks.

    Args:
        pool: The workers, which were just made. It is closed if one fails.
        slots: Tasks that a worker does at a time, >= 1.
        number_of: Gives the number of the task of a result.

    Attributes:
        capacity: Tasks that all workers do at a time.
        most_tasks: Tasks that a worker has at most; some wait, so that no slot is empty while
            messages travel.
        next: The first task that was not given to anybody.
        spaces: Observation and action space of one environment.

    Raises:
        MazeTrainError: If a worker cannot be made.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(self, pool: WorkerPool, slots: int, number_of: Callable[[Result], int]) -> None:
        self.capacity = slots * len(pool)
        self.most_tasks = slots + slots // 2 + 1
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

    def set_up(self, method: str, *args: Any) -> None:
        """Make every worker call a method now, and later each replacement of a worker."""
        self._setup.append((method, args))
        self._pool.call_all(method, *args)  # waited for, so that no worker begins before others

    def begin(
        self, *args: Any, task_of: Callable[[int], Any], seed_of: Callable[[int], int]
    ) -> None:
        """Begin a round; `drop` comes before it, unless it is the first one.

        Args:
            *args: What `begin_round` of the workers gets.
            task_of: Gives the description of a task for its worker, by number.
            seed_of: Gives the seed of a task.
        """
        self._round, self._task_of, self._seed_of = args, task_of, seed_of
        self.next = 0
        for state in self._states:
            state.in_round = False

    def drop(self) -> None:
        """Forget all tasks."""
        for index in range(len(self._pool)):
            state = self._states[index]
            if state.tasks and not state.preparations:
                self._pool.cancel(index)
                # Not as many as there are handlers: an interrupt may come between call and handler.
                state.handlers = deque([_ignored] * self._pool.pending(index))
                self._call(index, _ignored, "drop")
            state.tasks.clear()
        self._again.clear()
        self._raises.clear()
        self._deaths.clear()

    def advance(self, limit: int, take: Callable[[Result], object]) -> None:
        """Hand out tasks, and wait a while for results; repair workers that failed.

        Args:
            limit: Tasks 0, ..., limit - 1 are done; it never falls within a round.
            take: Called with each result at once, since another worker may fail meanwhile.

        Raises:
            MazeTrainError: If a worker failed and is not to be started again.
            SpaceError: If the environments of a new worker differ in their spaces.
        """
        given = self.hand_out(limit)
        for index, state in enumerate(self._states[: len(self._pool)]):
            tasks = given.get(index, [])
            if tasks or (state.tasks and len(state.handlers) < CALLS_AHEAD):
                self._advance(index, [self._task_of(number) for number in tasks])
        for index in self._pool.ready(POLL_S):
            try:
                result = self._pool.receive(index)
            except WorkerFailedError as failure:
                # Without its frames, which would keep this object alive.
                self._repair(failure.with_traceback(None))
                continue
            except BaseException:
                handlers = self._states[index].handlers
                # An interrupt may come before the result was taken.
                if len(handlers) > self._pool.pending(index):
                    handlers.popleft()
                raise
            for found in self._states[index].handlers.popleft()(result):
                take(found)

    def hand_out(self, limit: int) -> dict[int, list[int]]:
        """Give tasks to those workers that have the fewest, those first that were given before.

        Returns:
            The new tasks of each worker.
        """
        given: dict[int, list[int]] = {}
        made = [i for i in range(len(self._pool)) if not self._states[i].preparations]
        while made and (self._again or self.next < limit):
            index = min(made, key=lambda i: len(self._states[i].tasks))
            if len(self._states[index].tasks) >= self.most_tasks:
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
            self._call(index, _ignored, "begin_round", *self._round)
        self._call(index, partial(self._done, index), "advance", tasks)

    def _call(
        self, index: int, handler: Callable[[Any], list[Result]], method: str, *args: Any
    ) -> None:
        self._pool.call(index, method, *args)
        self._states[index].handlers.append(handler)

    def _done(self, index: int, results: list[Result]) -> list[Result]:
        self._states[index].tasks.difference_update(map(self._number_of, results))
        return results

    def _repair(self, failure: WorkerFailedError) -> None:
        """Start a worker again, and have its tasks done again.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        index = failure.index
        state = self._states[index]
        description = failure.text + self._blame(state, failure)
        outlook = f"and its {len(state.tasks)} episodes are played again, with the same numbers"
        self._again = sorted([*self._again, *state.tasks])
        self._states[index] = _WorkerState()
        self._pool.restart(failure, description, outlook)
        self._prepare(index, "describe")
        for method, args in self._setup:
            self._prepare(index, method, *args)

    def _prepare(self, index: int, method: str, *args: Any) -> None:
        """Call a method before a worker gets tasks: dropping these must not cancel it."""
        self._states[index].preparations += 1
        self._call(index, partial(self._prepared, index), method, *args)

    def _prepared(self, index: int, spaces: tuple[Any, Any] | None) -> list[Result]:
        """Note a call that comes before the tasks of a worker; a new one describes its spaces."""
        if spaces is not None:
            self._check_spaces(index, spaces)
        self._states[index].preparations -= 1
        return []

    def _check_spaces(self, index: int, spaces: tuple[Any, Any]) -> None:
        check_spaces(index * self._slots, spaces, self.spaces)

    def _blame(self, state: _WorkerState, failure: WorkerFailedError) -> str:
        """Count the failure for the tasks that may have caused it; returns text about them."""
        if not state.tasks:
            return ""
        if failure.seed is None:
            suspects, counts, most = set(state.tasks), self._deaths, MOST_DEATHS
            description = f"; it had the episodes with the seeds {self._list_seeds(suspects)}"
        else:
            suspects = {task for task in state.tasks if self._seed_of(task) == failure.seed}
            counts, most, description = self._raises, MOST_RAISES, ""
        counts.update(suspects)
        if all(counts[task] < most for task in suspects):
            return description
        failure.final = True
        return f"{description}; it failed when it was played again, too"

    def _list_seeds(self, tasks: set[int]) -> str:
        seeds = list(dict.fromkeys(self._seed_of(task) for task in sorted(tasks)))
        rest = ", ..." if len(seeds) > MAX_LISTED_SEEDS else ""
        return ", ".join(map(str, seeds[:MAX_LISTED_SEEDS])) + rest


class _WorkerState:
    """Tasks and calls of a worker.

    Attributes:
        preparations: Calls that come before the first task.
    """

    def __init__(self) -> None:
        self.preparations = 0
        self.in_round = False
        self.tasks: set[int] = set()
        # What to do with the results of its calls.
        self.handlers: deque[Callable[[Any], list[Any]]] = deque()


def _ignored(result: Any) -> list[Any]:
    return []
