"""Shares numbered jobs out to processes, and has those processes started again that fail."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from maze_train.envs.crew import Movement
from maze_train.envs.workers import WorkerFailedError, check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from maze_train.envs.crew import Crew

__all__ = ["MOST_DEATHS", "MOST_RAISES", "JobBoard"]

Result = TypeVar("Result")

POLL_MS = 100
"""How long to wait at most for news of the processes."""

MOST_RAISES = 2
"""How many times an episode may raise, before that is held to be its own doing."""

MOST_DEATHS = 3
"""How many processes may die or hang while a job is done in them, before that is held to be the
doing of the job."""

SEEDS_TOLD = 8
"""Seeds that a message names at most."""


class JobBoard:
    """Who does which job, an episode each.

    The jobs of a round have the numbers 0, 1, 2, ... Jobs of a process that fails are given to
    others, or to the one that takes its place. A job that fails again after that ends it all: when
    its episode raised for the second time, or when the third process died or hung with it.

    Args:
        crew: The processes, which were just started. The first that each of them tells are the
            spaces of its environments; that is waited for. The crew is closed if one fails.
        slots: Jobs that a process does at a time, >= 1.

    Attributes:
        capacity: Jobs that all processes do at a time.
        most_jobs: Jobs that a process has at most; some wait, so that no slot is empty while
            messages travel.
        next: The first job that was not given to anybody.
        spaces: Observation and action space of one environment.

    Raises:
        MazeTrainError: If a process fails while it builds its environments.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(self, crew: Crew, slots: int) -> None:
        self.capacity = slots * len(crew.workers)
        self.most_jobs = slots + slots // 2 + 1
        self.next = 0
        self._crew = crew
        self._states = [_ProcessState() for _ in crew.workers]
        self._seed_of: Callable[[int], int] = int
        self._again: list[int] = []
        self._raises: Counter[int] = Counter()
        self._deaths: Counter[int] = Counter()
        try:
            described = crew.first_replies("building its environments")
            for worker, spaces in zip(crew.workers, described, strict=True):
                check_spaces(worker, spaces, described[0])
        except BaseException:
            crew.close()
            raise
        self.spaces: tuple[Any, Any] = described[0]

    def begin(self, seed_of: Callable[[int], int]) -> None:
        """Begin a round; `drop` comes before it, unless it is the first one.

        Args:
            seed_of: Gives the seed of a job, by its number.
        """
        self._seed_of = seed_of
        self.next = 0

    def drop(self, command: bytes) -> None:
        """Forget all jobs.

        Args:
            command: What is sent to those processes that have some.
        """
        for worker, state in zip(self._crew.workers, self._states, strict=False):
            if state.jobs and state.begun:
                worker.send(command)
            state.jobs.clear()
        self._again.clear()
        self._raises.clear()
        self._deaths.clear()

    def hand_out(self, limit: int) -> dict[int, list[int]]:
        """Give jobs to those processes that have the fewest, those first that were given before.

        Args:
            limit: Jobs 0, ..., limit - 1 are to be done.

        Returns:
            The jobs that each process is to be told now, by the number of the process.
        """
        given: dict[int, list[int]] = {}
        # After the crew was closed there is none of them.
        begun = [i for i in range(len(self._crew.workers)) if self._states[i].begun]
        while begun and (self._again or self.next < limit):
            index = min(begun, key=lambda i: len(self._states[i].jobs))
            if len(self._states[index].jobs) >= self.most_jobs:
                break
            if self._again:
                number = self._again.pop(0)
            else:
                number, self.next = self.next, self.next + 1
            self._states[index].give(number)
            given.setdefault(index, []).append(number)
        return given

    def done(self, index: int, numbers: Iterable[int]) -> None:
        """Note jobs that a process has done."""
        self._states[index].jobs.difference_update(numbers)

    def suspect(self, index: int, seed: int | None) -> None:
        """Note the seed of the episode of which a process is about to fail; None: of no one."""
        self._states[index].failed_seed = seed

    def listen(
        self,
        take_in: Callable[[int, Any], list[Result]],
        started: Callable[[int], object] = lambda _: None,
    ) -> list[Result]:
        """Wait a while for news, and repair processes that failed.

        Args:
            take_in: Called with the number of a process and what it says; returns results.
            started: Called with the number of a process that was started again, once its
                environments are built.

        Returns:
            The results of all processes.

        Raises:
            MazeTrainError: If a process failed and is not to be started again.
            SpaceError: If the environments of a new process differ in their spaces.
        """
        results: list[Result] = []
        for index in self._crew.ready(POLL_MS):
            worker, state = self._crew.workers[index], self._states[index]
            try:
                told = worker.receive("an episode", self._crew.timeout_s)
            except WorkerFailedError as failure:
                self._repair(index, failure.with_traceback(None))
                continue
            if state.begun:
                results += take_in(index, told)
                continue
            check_spaces(worker, told, self.spaces)
            state.begun = True
            started(index)
        return results

    def repair_hung(self, steps: Sequence[int]) -> None:
        """Repair processes that have something to do but were not seen to move for too long.

        Args:
            steps: Environment steps that each process made, those of its predecessors included.

        Raises:
            MazeTrainError: If one is not to be started again.
        """
        timeout_s = self._crew.timeout_s
        for index, state in enumerate(self._states):
            if state.still_s(steps[index]) > timeout_s:
                what = "a step" if state.begun else "building its environments"
                self._repair(index, self._crew.workers[index].hung(what, timeout_s))

    def _repair(self, index: int, failure: WorkerFailedError) -> None:
        """Have a process started again, and its jobs done again.

        Raises:
            MazeTrainError: If it is not to be started again.
        """
        state = self._states[index]
        told = failure.text + self._blame(state, failure)
        outlook = f"and its {len(state.jobs)} episodes are played again, with the same numbers"
        self._again = sorted([*self._again, *state.jobs])
        state.restart()
        self._crew.replace(index, failure, told, outlook)

    def _blame(self, state: _ProcessState, failure: WorkerFailedError) -> str:
        """Note which jobs may have made a process fail; returns what to say of them."""
        if not state.jobs:
            return ""
        if state.failed_seed is None:
            suspects, counts, most = set(state.jobs), self._deaths, MOST_DEATHS
            told = f"; it had the episodes with the seeds {self._seeds_told(suspects)}"
        else:
            suspects = {job for job in state.jobs if self._seed_of(job) == state.failed_seed}
            counts, most, told = self._raises, MOST_RAISES, ""
        counts.update(suspects)
        if all(counts[job] < most for job in suspects):
            return told
        failure.final = True
        return f"{told}; it failed when it was played again, too"

    def _seeds_told(self, jobs: set[int]) -> str:
        seeds = list(dict.fromkeys(self._seed_of(job) for job in sorted(jobs)))
        rest = ", ..." if len(seeds) > SEEDS_TOLD else ""
        return ", ".join(map(str, seeds[:SEEDS_TOLD])) + rest


class _ProcessState:
    """What is known of a process, which may be another one later."""

    def __init__(self) -> None:
        self.begun = True
        """Whether its environments are built."""
        self.jobs: set[int] = set()
        """Jobs that were given to it."""
        self.failed_seed: int | None = None
        """Seed of an episode that failed there just now."""
        self._movement = Movement()

    def give(self, number: int) -> None:
        """Note a job that is to be done there."""
        if not self.jobs:
            self._movement.expect()
        self.jobs.add(number)

    def still_s(self, steps: int) -> float:
        """Seconds since the steps grew; 0 while it has nothing to do."""
        return self._movement.still_s(steps, has_work=not self.begun or bool(self.jobs))

    def restart(self) -> None:
        """Wait for a new process."""
        self.begun = False
        self.jobs.clear()
        self.failed_seed = None
        self._movement.expect()
