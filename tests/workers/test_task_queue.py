"""Assignment of tasks to workers, and tasks of failed workers."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from maze_train.core.errors import SpaceError, WorkerError
from maze_train.workers.pool import WorkerFailedError
from maze_train.workers.task_queue import MAX_DEATHS, MAX_RAISES, TaskQueue

SPACES = ("obs", "act")


class ScriptedPool:
    """Workers as a script has them: the calls that they got, and what comes of these.

    Args:
        count: How many.
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
        """Note a call."""
        self.calls[index].append((method, *args))
        self.seen[index].append(method)

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """The spaces of all workers."""
        return list(self.spaces.values())

    call_new = call_all

    def cancel(self, index: int) -> None:
        """Note it."""
        self.cancelled.append(index)

    def ready(self, timeout_s: float) -> list[int]:
        """Those that have something to say."""
        for index, calls in enumerate(self.calls):
            while index not in self.says and calls and calls[0][0] in ("begin_round", "set_up"):
                self.says[index] = None
        return sorted(self.says)

    def receive(self, index: int) -> Any:
        """What a worker says; raises failures."""
        said = self.says.pop(index)
        if isinstance(said, Exception):
            raise said
        self.calls[index].popleft()
        return said

    def restart(self, failure: WorkerFailedError, told: str, outlook: str) -> None:
        """Note a failure; raise it if a restart is no remedy."""
        self.told.append((failure.index, told, outlook))
        self.calls[failure.index].clear()
        if failure.final:
            raise WorkerError(told)

    def pending(self, index: int) -> int:
        """Number of calls whose results were not received."""
        return len(self.calls[index])

    def close(self) -> None:
        """End the workers."""
        self.calls = []


class Script:
    """A queue with scripted workers, whose tasks have the seeds 100, 100, 101, 101, ..."""

    def __init__(self, count: int = 2, slots: int = 2) -> None:
        self.pool: Any = ScriptedPool(count)
        self.queue: TaskQueue[int] = TaskQueue(self.pool, slots, int)
        assert self.queue.spaces == SPACES
        self.results: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self.queue.begin(task_of=str, seed_of=lambda number: 100 + number // 2)

    def advance(self, limit: int = 0) -> None:
        """Hand out and listen, until the workers have nothing to say any more."""
        self.queue.advance(limit, self.results.append)
        while self.pool.ready(0.0):
            self.queue.advance(limit, self.results.append)

    def tasks(self) -> list[list[str]]:
        """The tasks that were sent to each worker and are not answered."""
        return [
            [task for name, *args in calls if name == "advance" for task in args[0]]
            for calls in self.pool.calls
        ]

    def done(self, index: int, *numbers: int) -> None:
        """A worker tells of results."""
        self.pool.says[index] = list(numbers)
        self.advance()

    def fail(self, index: int, *, seed: int | None = None, begins: bool = True) -> None:
        """A worker fails, and begins again."""
        self.pool.says[index] = WorkerFailedError(index, "it failed", seed=seed)
        self.advance()
        if begins:
            self.begun(index)

    def begun(self, index: int, spaces: Any = SPACES) -> None:
        """A new worker tells of its spaces."""
        self.pool.says[index] = spaces
        self.advance()


def test_tasks_of_a_worker_that_fails_come_first() -> None:
    """In their order; it gets none before its environments are built."""
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


def test_tasks_that_are_dropped() -> None:
    """Workers that have some are reported, and late results are not among the next round."""
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


def test_results_are_taken_before_another_worker_ends_the_run() -> None:
    """Nothing that is done gets lost."""
    script = Script()
    script.advance(2)
    script.pool.says = {0: [0], 1: WorkerFailedError(1, "it failed", final=True)}
    with pytest.raises(WorkerError, match="it failed"):
        script.queue.advance(2, script.results.append)
    assert script.results == [0]


def test_spaces_that_differ() -> None:
    """They are refused at first, and when a worker was started again."""
    pool: Any = ScriptedPool(2, ("obs", "other"))
    with pytest.raises(SpaceError, match=r"environment 1 are obs and other.*equal spaces"):
        TaskQueue(pool, 1, int)
    assert len(pool) == 0
    script = Script()
    script.fail(1, begins=False)
    with pytest.raises(SpaceError, match="environment 2 are obs and other"):
        script.begun(1, ("obs", "other"))


# -- failures that come again --------------------------------------------------------------------


def test_an_episode_that_raises_again() -> None:
    """It ends the run; others that were with the same worker are not blamed."""
    script = Script(1, 4)
    script.advance(6)
    assert MAX_RAISES == 2
    for seed in (100, 101, 102):
        script.fail(0, seed=seed)
        script.advance(6)
    assert [told for _, told, _ in script.pool.told] == ["it failed"] * 3
    with pytest.raises(WorkerError, match=r"^it failed; a repetition failed as well$"):
        script.fail(0, seed=101)


def test_two_tasks_with_one_seed() -> None:
    """If they raise with two workers, that is not one that raised again."""
    script = Script()
    script.advance(2)
    script.pool.says = {i: WorkerFailedError(i, "it failed", seed=100) for i in range(2)}
    script.advance()
    assert len(script.pool.told) == 2
    script.begun(1)
    script.advance()
    with pytest.raises(WorkerError, match="a repetition failed as well"):
        script.fail(1, seed=100)


def test_a_seed_of_an_earlier_round() -> None:
    """A worker that fails of it is no matter of the tasks that it has now."""
    script = Script(1)
    for _ in range(4):
        script.advance(2)
        script.fail(0, seed=77)
    assert len(script.pool.told) == 4


def test_a_task_with_which_workers_die() -> None:
    """The third of them ends the run, and tasks that came later were there as well."""
    script = Script(1)
    assert MAX_DEATHS == 3
    for limit in (1, 2):
        script.advance(limit)
        script.fail(0)
    script.advance(3)
    with pytest.raises(WorkerError, match=r"^it failed; .* seeds 100, 101; a repetition failed"):
        script.fail(0)


def test_tasks_that_are_done_are_not_blamed() -> None:
    """Workers may die again and again, while others get done; nor are earlier rounds counted."""
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
