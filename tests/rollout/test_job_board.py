"""Who does which job: shares, failures that come again, processes that stand still."""

from __future__ import annotations

import multiprocessing
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from es_problems import PLAIN, SIGMA, make_table, model_maker, set_version
from player_problems import FailsForSeedEnv, UnequalEnv
from reference_population import slow_draw

from maze_train.envs.workers import WorkerFailedError
from maze_train.errors import SpaceError, WorkerError
from maze_train.rollout.es_rollouts import trained_size
from maze_train.rollout.job_board import MOST_DEATHS, MOST_RAISES, JobBoard
from maze_train.rollout.subproc_es import ESSubprocDistributedRollouts

if TYPE_CHECKING:
    from collections.abc import Iterator

DROP = b"d"
TIMEOUT_S = 30.0
"""Seconds after which a process counts as hung; none does."""


class ScriptedWorker:
    """A process as a script has it: what it says, and what it was sent."""

    def __init__(self, index: int) -> None:
        self.index, self.first = index, index
        self.says: list[Any] = []
        self.sent: list[bytes] = []

    def send(self, command: bytes) -> None:
        """Remember a command."""
        self.sent.append(command)

    def receive(self, what: str, timeout_s: float) -> Any:
        """The next thing that it says; raises failures."""
        told = self.says.pop(0)
        if isinstance(told, WorkerFailedError):
            raise told
        return told

    def fails(self, text: str = "it failed") -> WorkerFailedError:
        """A failure of it."""
        return WorkerFailedError(self, text)  # type: ignore[arg-type]  # stands for a process

    def hung(self, what: str, timeout_s: float) -> WorkerFailedError:
        """That it hangs."""
        return self.fails(f"it did not finish {what}")


class ScriptedCrew:
    """Processes as a script has them, and what it was told of failures.

    Args:
        count: How many.
    """

    timeout_s = 0.0

    def __init__(self, count: int) -> None:
        self.workers = [ScriptedWorker(i) for i in range(count)]
        self.told: list[tuple[int, str, str]] = []

    def first_replies(self, what: str) -> list[Any]:
        """What each process says first."""
        return [worker.receive(what, self.timeout_s) for worker in self.workers]

    def ready(self, timeout_ms: int) -> list[int]:
        """Those that have something to say."""
        return [worker.index for worker in self.workers if worker.says]

    def close(self) -> None:
        """End the processes."""
        self.workers = []

    def replace(self, index: int, failure: WorkerFailedError, told: str, outlook: str) -> None:
        """Remember a failure; raises it if a restart is no remedy."""
        self.told.append((index, told, outlook))
        if failure.final:
            raise WorkerError(told)


def make_board(count: int = 2, slots: int = 2) -> tuple[JobBoard, Any]:
    """A board with scripted processes, whose jobs have the seeds 100, 100, 101, 101, ..."""
    crew: Any = ScriptedCrew(count)
    for worker in crew.workers:
        worker.says.append(("obs", "act"))
    board = JobBoard(crew, slots)
    assert board.spaces == ("obs", "act")
    board.begin(lambda number: 100 + number // 2)
    return board, crew


def take_in(index: int, told: Any) -> list[Any]:
    """What a process says is its result."""
    return [(index, told)]


def fail(board: JobBoard, crew: Any, index: int, *, seed: int | None = None) -> None:
    """Have a process fail and begin again, without jobs."""
    board.suspect(index, seed)
    crew.workers[index].says = [crew.workers[index].fails()]
    board.listen(take_in)
    crew.workers[index].says = [("obs", "act")]
    board.listen(take_in)


# -- shares --------------------------------------------------------------------------------------


def test_jobs_go_where_the_fewest_are() -> None:
    """One after the other, up to the limit and to what a process has at most."""
    board, _ = make_board()
    assert board.capacity == 4
    assert board.most_jobs == 4
    assert board.hand_out(3) == {0: [0, 2], 1: [1]}
    assert board.hand_out(3) == {}
    assert board.next == 3
    board.done(0, [0, 2])
    assert board.hand_out(6) == {0: [3, 4], 1: [5]}
    assert board.hand_out(100) == {0: [6, 8], 1: [7, 9]}
    assert board.hand_out(100) == {}
    assert board.next == 10


def test_jobs_of_a_process_that_fails_come_first() -> None:
    """In their order; it gets none before its environments are built."""
    board, crew = make_board()
    assert board.hand_out(4) == {0: [0, 2], 1: [1, 3]}
    board.done(1, [1])
    crew.workers[1].says = [crew.workers[1].fails(), ("obs", "act")]
    assert board.listen(take_in) == []
    assert board.hand_out(5) == {0: [3, 4]}
    started: list[int] = []
    assert board.listen(take_in, started.append) == []
    assert started == [1]
    assert board.hand_out(7) == {1: [5, 6]}
    ((index, told, outlook),) = crew.told
    assert (index, told) == (1, "it failed; it had the episodes with the seeds 101")
    assert outlook == "and its 1 episodes are played again, with the same numbers"


def test_results_of_all_processes() -> None:
    """One message of each is taken in at a time."""
    board, crew = make_board(3)
    crew.workers[0].says = ["a", "b"]
    crew.workers[2].says = ["c"]
    assert board.listen(take_in) == [(0, "a"), (2, "c")]
    assert board.listen(take_in) == [(0, "b")]
    assert board.listen(take_in) == []


def test_jobs_that_are_dropped() -> None:
    """Only processes that have some are told, and those of a failed one are forgotten, too."""
    board, crew = make_board(3)
    board.hand_out(2)
    crew.workers[1].says = [crew.workers[1].fails()]
    board.listen(take_in)
    board.drop(DROP)
    board.drop(DROP)
    assert [worker.sent for worker in crew.workers] == [[DROP], [], []]
    board.begin(int)
    assert board.hand_out(3) == {0: [0, 2], 2: [1]}


def test_processes_that_are_closed() -> None:
    """Nobody gets a job, and dropping them is no error."""
    board, crew = make_board()
    board.hand_out(1)
    crew.close()
    assert board.hand_out(9) == {}
    board.drop(DROP)


@pytest.mark.parametrize("again", [False, True])
def test_spaces_that_differ(again: bool) -> None:
    """They are refused at first, and when a process was started again."""
    if again:
        board, crew = make_board()
        crew.workers[1].says = [crew.workers[1].fails(), ("obs", "other")]
        board.listen(take_in)
        with pytest.raises(SpaceError, match=r"environment 1 are obs and other"):
            board.listen(take_in)
        return
    crew = ScriptedCrew(2)
    crew.workers[0].says, crew.workers[1].says = [("obs", "act")], [("obs", "other")]
    with pytest.raises(SpaceError, match="equal spaces"):
        JobBoard(crew, 1)  # type: ignore[arg-type]  # stands for processes
    assert crew.workers == []


# -- what comes again ----------------------------------------------------------------------------


def test_an_episode_that_raises_again() -> None:
    """It ends it all; others that were in the same process are not blamed."""
    board, crew = make_board(1, 4)
    board.hand_out(6)
    assert MOST_RAISES == 2
    for seed in (100, 101, 102):
        fail(board, crew, 0, seed=seed)
        board.hand_out(6)
    assert [told for _, told, _ in crew.told] == ["it failed"] * 3
    with pytest.raises(WorkerError, match=r"^it failed; it failed when it was played again, too$"):
        fail(board, crew, 0, seed=101)


def test_both_members_of_a_pair_at_once() -> None:
    """Two jobs with one seed that raise in two processes are not one that raised again."""
    board, crew = make_board()
    assert board.hand_out(2) == {0: [0], 1: [1]}
    fail(board, crew, 0, seed=100)
    fail(board, crew, 1, seed=100)
    board.hand_out(2)
    with pytest.raises(WorkerError, match="played again, too"):
        fail(board, crew, 1, seed=100)


def test_a_seed_of_an_earlier_round() -> None:
    """A process that fails of it is no matter of the jobs that it has now."""
    board, crew = make_board(1)
    for _ in range(4):
        board.hand_out(2)
        fail(board, crew, 0, seed=77)
    assert len(crew.told) == 4


def test_a_job_with_which_processes_die() -> None:
    """The third of them ends it all, and jobs that came later were there as well."""
    board, crew = make_board(1)
    assert MOST_DEATHS == 3
    for limit in (1, 2):
        board.hand_out(limit)
        fail(board, crew, 0)
    board.hand_out(3)
    with pytest.raises(WorkerError, match=r"^it failed; .* seeds 100, 101; it failed when"):
        fail(board, crew, 0)


def test_jobs_that_are_done_are_not_blamed() -> None:
    """Processes may die again and again, while others get done; nor are earlier rounds counted."""
    board, crew = make_board(1, 1)
    for number in range(4):
        board.hand_out(number + 1)
        fail(board, crew, 0)
        board.hand_out(number + 1)
        board.done(0, [number])
    for _ in range(4):
        board.begin(int)
        board.hand_out(1)
        fail(board, crew, 0)
        board.drop(DROP)
    fail(board, crew, 0)
    assert crew.told[-1][1] == "it failed"


def test_a_process_that_had_nothing_to_do() -> None:
    """Nothing is said of episodes that it had."""
    board, crew = make_board(1)
    fail(board, crew, 0)
    outlook = "and its 0 episodes are played again, with the same numbers"
    assert crew.told == [(0, "it failed", outlook)]


def test_few_seeds_are_told() -> None:
    """Each of them once, those of the first jobs."""
    board, crew = make_board(1, 20)
    board.hand_out(18)
    fail(board, crew, 0)
    seeds = "100, 101, 102, 103, 104, 105, 106, 107, ..."
    assert crew.told[0][1] == f"it failed; it had the episodes with the seeds {seeds}"


# -- what stands still ---------------------------------------------------------------------------


def test_processes_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those hang that have something to do and make no step, or do not begin again."""
    clock = SimpleNamespace(now=100.0)
    time = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("maze_train.envs.crew.time", time)
    board, crew = make_board(3)
    crew.timeout_s = 10.0
    clock.now += 50.0
    board.hand_out(2)
    clock.now += 6.0
    board.repair_hung([5, 0, 0])
    clock.now += 6.0
    board.repair_hung([5, 0, 0])
    assert [(index, told[:24]) for index, told, _ in crew.told] == [(1, "it did not finish a step")]
    clock.now += 8.0
    board.repair_hung([6, 0, 0])
    clock.now += 8.0
    board.repair_hung([7, 0, 0])
    assert crew.told[1:] == [
        (
            1,
            "it did not finish building its environments",
            "and its 0 episodes are played again, with the same numbers",
        )
    ]


# -- members of a population ---------------------------------------------------------------------


@pytest.fixture
def start(no_file_is_left: None) -> Iterator[Any]:
    """Starts populations that have a policy; afterwards no process is left of them."""
    started: list[Any] = []

    def start(make: Any) -> ESSubprocDistributedRollouts:
        table = make_table()
        rollouts = ESSubprocDistributedRollouts(
            make,
            2,
            4,
            table,
            PLAIN,
            start_method="fork",
            timeout_s=TIMEOUT_S,
            on_worker_failure="restart",
            max_worker_restarts=100,
        )
        started.extend((rollouts, table))
        model = model_maker(make)()
        set_version(model, 1)
        rollouts.begin(model, model_maker(make))
        return rollouts

    yield start
    while started:
        started.pop(0).close()


def seed_of_pair(pair: int, iteration: int = 2) -> int:
    """Seed of the episodes of a pair."""
    dim = trained_size(model_maker(UnequalEnv)())
    with closing(make_table()) as table:
        return slow_draw(PLAIN.seed, iteration, pair, table.count, dim)[1]


FAILURES = {
    "raise": "episode with seed {seed}: RuntimeError: the wheel came off",
    "kill": r"died in an episode \(signal SIGKILL.*it had the episodes with the seeds .*{seed}",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", FAILURES)
def test_a_member_that_fails_again(start: Any, how: str) -> None:
    """It ends the iteration with its error, instead of one process after the other."""
    seed = seed_of_pair(3)
    rollouts = start(partial(FailsForSeedEnv, how, seed))
    found: list[int] = []
    with pytest.raises(WorkerError, match=FAILURES[how].format(seed=seed)) as caught:
        found += [pair.pair for pair in rollouts.generate_rollouts(2, SIGMA, 12)]
    assert "it failed when it was played again, too" in str(caught.value)
    assert ("In the worker process:" in str(caught.value)) == (how == "raise")
    # Two members have the seed, and each of them may be the first to fail.
    assert rollouts.worker_restarts in ((1, 2) if how == "raise" else (2, 3, 4))
    assert multiprocessing.active_children() == []
