"""Assignment of tasks to workers, and tasks of failed workers."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

import pytest

from maze_train.core.errors import SpaceError, WorkerError
from maze_train.workers.pool import WorkerFailedError
from maze_train.workers.task_queue import MAX_DEATHS, MAX_RAISES, TaskQueue

SPACES = ("obs", "act")


class ScriptedPool:
    """Pool of scripted workers that records their calls.

    Args:
        count: Number of workers.
    """

    def __init__(self, count: int, spaces: Any = SPACES) -> None:
        self.calls: list[deque[tuple[Any, ...]]] = [deque() for _ in range(count)]
        self.seen: list[list[str]] = [[] for _ in range(count)]
        self.says: dict[int, Any] = {}
        self.told: list[tuple[int, str, str]] = []
        self.cancelled: list[int] = []
        self.spaces = {index: SPACES for index in range(count)} | {count - 1: spaces}

    def __len__(self) -> int:
        return len(self.calls)

    def call(self, index: int, method: str, *args: Any) -> None:
        """Record a call."""
        self.calls[index].append((method, *args))
        self.seen[index].append(method)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Return the spaces of all workers."""
        return list(self.spaces.values())

    call_new = call_all

    def cancel(self, index: int) -> None:
        """Record the index."""
        self.cancelled.append(index)

    def ready(self, timeout_s: float) -> list[int]:
        """Return the indices of workers with results."""
        for index, calls in enumerate(self.calls):
            while index not in self.says and calls and calls[0][0] in ("begin_round", "set_up"):
                self.says[index] = None
        return sorted(self.says)

    def receive(self, index: int) -> Any:
        """Return the result of a worker, or raise its failure."""
        said = self.says.pop(index)
        if isinstance(said, Exception):
            raise said
        self.calls[index].popleft()
        return said

    def restart(self, failure: WorkerFailedError, told: str, outlook: str) -> None:
        """Record a failure; raise an error if it is final."""
        self.told.append((failure.index, told, outlook))
        self.calls[failure.index].clear()
        if failure.final:
            raise WorkerError(told)

    def pending(self, index: int) -> int:
        """Return the number of calls whose results were not received."""
        return len(self.calls[index])

    def close(self) -> None:
        """Close the workers."""
        self.calls = []


class Script:
    """Queue with scripted workers, whose tasks have the seeds 100, 100, 101, 101, ..."""

    def __init__(self, count: int = 2, slots: int = 2) -> None:
        self.pool: Any = ScriptedPool(count)
        self.queue: TaskQueue[int] = TaskQueue(self.pool, [slots] * count, int)
        assert self.queue.spaces == SPACES
        self.results: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.queue.begin(task_of=str, seed_of=lambda number: 100 + number // 2)

    def advance(self, limit: int = 0) -> None:
        """Assign tasks and receive results until no worker has results."""
        self.queue.advance(limit, self.results.append)
        while self.pool.ready(0.0):
            self.queue.advance(limit, self.results.append)

    def tasks(self) -> list[list[str]]:
        """Return the tasks that were sent to each worker and have no result."""
        return [
            [task for name, *args in calls if name == "advance" for task in args[0]]
            for calls in self.pool.calls
        ]

    def done(self, index: int, *numbers: int) -> None:
        """Return results from a worker."""
        self.pool.says[index] = list(numbers)
        self.advance()

    def fail(self, index: int, *, seed: int | None = None, begins: bool = True) -> None:
        """Let a worker fail and restart."""
        self.pool.says[index] = WorkerFailedError(index, "it failed", seed=seed)
        self.advance()
        if begins:
            self.begun(index)

    def begun(self, index: int, spaces: Any = SPACES) -> None:
        """Return spaces from a new worker."""
        self.pool.says[index] = spaces
        self.advance()


def test_tasks_of_failed_workers_are_repeated_first() -> None:
    """Tasks of a failed worker are repeated first, in order, once its environments are built."""
    script = Script()
    script.queue.set_up("set_up", 7)
    script.advance(4)
    script.done(1, 1)
    script.fail(1, begins=False)
    assert script.tasks()[1] == []
    script.advance(5)
    assert script.tasks() == [["0", "2", "3", "4"], []]
    assert [call[0] for call in script.pool.calls[1]] == ["describe", "set_up"]
    script.begun(1)
    script.advance(7)
    assert script.tasks()[1] == ["5", "6"]
    assert script.pool.seen[1][-4:] == ["describe", "set_up", "begin_round", "advance"]
    ((index, told, outlook),) = script.pool.told
    assert (index, told) == (1, "it failed; it was running the episodes with the seeds 101")
    assert outlook == "and its 1 episodes are repeated with the same seeds"


def test_dropped_tasks_are_cancelled() -> None:
    """Dropped tasks are cancelled, and late results do not appear in the next round."""
    script = Script(3)
    script.advance(2)
    script.fail(1, begins=False)
    script.queue.drop()
    script.queue.drop()
    assert script.pool.cancelled == [0]
    assert [seen.count("drop") for seen in script.pool.seen] == [1, 0, 0]
    script.begin()
    script.done(0, 0)
    assert script.results == []
    script.advance(3)
    assert [len(tasks) for tasks in script.tasks()] == [2, 0, 1]


def test_finished_results_precede_worker_failures() -> None:
    """Finished results are returned before the failure of another worker ends the run."""
    script = Script()
    script.advance(2)
    script.pool.says = {0: [0], 1: WorkerFailedError(1, "it failed", final=True)}
    with pytest.raises(WorkerError, match="it failed"):
        script.queue.advance(2, script.results.append)
    assert script.results == [0]


def test_workers_with_different_spaces_raise() -> None:
    """Different spaces raise SpaceError, at first and after a restart."""
    pool: Any = ScriptedPool(2, ("obs", "other"))
    with pytest.raises(SpaceError, match=r"environment 1 are obs and other.*equal spaces"):
        TaskQueue(pool, [1, 1], int)
    assert len(pool) == 0
    script = Script()
    script.fail(1, begins=False)
    with pytest.raises(SpaceError, match="environment 2 are obs and other"):
        script.begun(1, ("obs", "other"))


# -- repeated failures ---------------------------------------------------------------------------


def test_repeated_episode_error_ends_the_run() -> None:
    """A repeated error of an episode ends the run; other tasks of the worker are not counted."""
    script = Script(1, 4)
    script.advance(6)
    assert MAX_RAISES == 2
    for seed in (100, 101, 102):
        script.fail(0, seed=seed)
        script.advance(6)
    assert [told for _, told, _ in script.pool.told] == ["it failed"] * 3
    with pytest.raises(WorkerError, match=r"^it failed; a repetition failed as well$"):
        script.fail(0, seed=101)


def test_errors_of_equal_seeds_in_two_workers_are_separate() -> None:
    """Errors of two tasks with equal seeds in two workers are not a repetition."""
    script = Script()
    script.advance(2)
    script.pool.says = {i: WorkerFailedError(i, "it failed", seed=100) for i in range(2)}
    script.advance()
    assert len(script.pool.told) == 2
    script.begun(1)
    script.advance()
    with pytest.raises(WorkerError, match="a repetition failed as well"):
        script.fail(1, seed=100)


def test_failures_of_earlier_rounds_do_not_count() -> None:
    """A failure with a seed of an earlier round does not count for the current tasks."""
    script = Script(1)
    for _ in range(4):
        script.advance(2)
        script.fail(0, seed=77)
    assert len(script.pool.told) == 4


def test_third_death_with_one_task_ends_the_run() -> None:
    """The third death of a worker with the same task ends the run."""
    script = Script(1)
    assert MAX_DEATHS == 3
    for limit in (1, 2):
        script.advance(limit)
        script.fail(0)
    script.advance(3)
    with pytest.raises(WorkerError, match=r"^it failed; .* seeds 100, 101; a repetition failed"):
        script.fail(0)


def test_finished_tasks_are_not_blamed_for_deaths() -> None:
    """Deaths do not count for tasks that finish, nor across rounds."""
    script = Script(1, 1)
    for number in range(4):
        script.advance(number + 1)
        script.fail(0)
        script.advance(number + 1)
        script.done(0, number)
    for _ in range(4):
        script.queue.drop()
        script.begin()
        script.advance(1)
        script.fail(0)
    script.queue.drop()
    script.fail(0)
    assert script.pool.told[-1] == (
        0, "it failed", "and its 0 episodes are repeated with the same seeds",
    )  # fmt: skip


def test_tasks_of_workers_that_fail_at_once_are_all_repeated() -> None:
    """The second failure does not replace the waiting tasks of the first one."""
    script = Script(3)
    script.advance(6)
    assert script.tasks() == [["0", "3"], ["1", "4"], ["2", "5"]]
    for index in range(3):
        script.pool.says[index] = WorkerFailedError(index, "it failed")
    script.advance(6)
    for index in range(3):
        script.begun(index)
    script.advance(6)
    assert sorted(chain(*script.tasks())) == list("012345")
