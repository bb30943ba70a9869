"""Actors in processes: what arrives, who is first, and what happens when one fails."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from actor_envs import (
    SEED_OF,
    ActorEnv,
    BrokenLaterEnv,
    E,
    ExitsEnv,
    FaultyEnv,
    GatedEnv,
    OddOneOutEnv,
    SlowEnv,
    T,
    assert_same,
    maker_for,
    model_maker,
    reference_collector,
    set_version,
    slow_log_probs,
    stacked_env,
    vector_of,
)
from leftovers import has_ended, left_of, run_owner

from maze_train.data.joining import join_rollouts
from maze_train.errors import ConfigError, MazeTrainError, SpaceError, WorkerError
from maze_train.rollout import subproc_actors
from maze_train.rollout.actors import SequentialDistributedActors
from maze_train.rollout.subproc_actors import SubprocDistributedActors
from maze_train.training.state_files import dumps, loads
from maze_train.workers.places import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import gymnasium

    from maze_train.data.rollout import Rollout
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.rollout.actors import GatheredRollouts
    from maze_train.rollout.collector import RolloutCollector
    from maze_train.rollout.episodes import FinishedEpisodes

    MakeEnv = Callable[[], gymnasium.Env[Any, Any]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

A = 2
PATIENCE_S = 60.0
SHORT_S = 1.0
"""Seconds after which an actor counts as hung, where that is tested."""


class Learner:
    """Actors, and the model with which they act."""

    def __init__(
        self, make: MakeEnv, *, memory: bool = False, skips: bool = False, **settings: Any
    ) -> None:
        num_envs, num_steps = settings.pop("num_envs", E), settings.pop("num_steps", T)
        settings = {"start_method": "fork", "timeout_s": 30.0, "queue_size": 2, **settings}
        queue_size = settings.pop("queue_size")
        self.actors = SubprocDistributedActors(
            partial(vector_of, make, num_envs, skips),
            A,
            num_envs,
            num_steps,
            SEED_OF,
            LocalProcesses(**settings),
            queue_size=queue_size,
        )
        make_model = model_maker(*self.actors.spaces, memory=memory)
        self.model = make_model()
        self.actors.begin(self.model, make_model)
        self.trained = 0
        self._deadline = time.monotonic() + PATIENCE_S

    def publish(self, version: int) -> None:
        """Let actors act with weights of a version."""
        set_version(self.model, version)
        self.actors.publish(version)

    def gather(self, count: int = 1) -> GatheredRollouts:
        """Rollouts, and a look at the counts."""
        gathered = self.actors.gather(count, self._check_time)
        self._check_time()
        self.trained += gathered.rollout.num_samples
        counts = self.actors.counts
        assert counts.trained == self.trained
        capacity = A * self.actors.num_slots * T * self.actors.num_envs
        assert 0 <= counts.in_flight <= capacity
        assert counts.made == counts.trained + counts.in_flight + counts.dropped
        return gathered

    def gather_until_failure(self) -> None:
        """Rollouts without an end."""
        while True:
            self.gather()

    def _check_time(self) -> None:
        assert time.monotonic() < self._deadline, "what is waited for does not come"

    @property
    def processes(self) -> list[Any]:
        """The processes, in the order of the actors."""
        return self.actors._pool.processes

    @property
    def made(self) -> int:
        """Steps that the processes say they made."""
        return sum(self.actors._pool.steps(i) for i in range(A))

    def wait_for_pause(self, rollouts: int) -> None:
        """Wait until actors made so many rollouts, and see that they make no more."""
        expected = rollouts * T * self.actors.num_envs
        while self.made < expected:
            self._check_time()
            time.sleep(0.01)
        for _ in range(6):
            assert self.made == expected
            time.sleep(0.02)

    def close(self) -> None:
        """End the actors."""
        self.actors.close()
        counts = self.actors.counts
        assert counts.in_flight == 0
        assert counts.made == counts.trained + counts.dropped
        assert counts.trained == self.trained


class References:
    """The rollouts that collectors in this process collect, with the seeds of actors."""

    def __init__(self, make: MakeEnv, *, memory: bool = False, skips: bool = False) -> None:
        self._make = partial(vector_of, make, E, skips)
        self.model = maker_for(self._make(), memory=memory)()
        set_version(self.model, 0)
        self._collectors: list[RolloutCollector] = []
        self._next: list[tuple[Rollout, FinishedEpisodes]] = []
        for actor in range(A):
            self.begin(actor)

    def begin(self, actor: int, generation: int = 0) -> None:
        """Expect rollouts of a process as well."""
        collector = reference_collector(self._make(), actor, generation)
        self._collectors.append(collector)
        self._next.append(self._collect(collector))

    def _collect(self, collector: RolloutCollector) -> tuple[Rollout, FinishedEpisodes]:
        rollout, episodes = collector.collect(self.model)
        seq_nos = torch.zeros(E, dtype=torch.int64)
        return join_rollouts([replace(rollout, weights_seq_no=seq_nos)]), episodes

    def take(self, gathered: GatheredRollouts) -> int:
        """Check one rollout of whatever process; returns which one."""
        for i, (rollout, episodes) in enumerate(self._next):
            if torch.equal(gathered.rollout.rewards, rollout.rewards):
                assert_same(gathered.rollout, rollout)
                assert gathered.episodes.returns == episodes.returns
                assert gathered.episodes.lengths == episodes.lengths
                self._next[i] = self._collect(self._collectors[i])
                return i
        raise AssertionError("a rollout that no process should have collected next")


@pytest.fixture
def start(no_file_is_left: None) -> Iterator[Callable[..., Learner]]:
    """Starts actors; afterwards nothing is left of them."""
    learners: list[Learner] = []

    def start(make: MakeEnv = ActorEnv, **settings: Any) -> Learner:
        learner = Learner(make, **settings)
        learners.append(learner)
        learner.publish(0)
        return learner

    yield start
    while learners:
        learners.pop().close()


# -- what arrives ------------------------------------------------------------------------------

KINDS: dict[str, tuple[MakeEnv, dict[str, Any]]] = {
    "box, discrete": (ActorEnv, {"start_method": "forkserver"}),
    "box, box": (partial(ActorEnv, "box", "box"), {}),
    "dict, dict": (partial(ActorEnv, "dict", "dict"), {}),
    "stacks, discrete": (stacked_env, {}),
    "mask, discrete, memory": (partial(ActorEnv, "mask"), {"memory": True}),
    "stacks, dict, memory": (partial(stacked_env, "dict"), {"memory": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_arrives_is_what_collectors_collect(start: Any, kind: str) -> None:
    """All columns and episodes of all rollouts, to the bit, whoever is faster."""
    make, settings = KINDS[kind]
    learner = start(make, **settings)
    expected = References(make, memory=settings.get("memory", False))
    taken = [expected.take(learner.gather()) for _ in range(12)]
    assert set(taken) == {0, 1}
    batch = learner.gather(3).rollout
    assert batch.rewards.shape == (T, 3 * E)
    torch.testing.assert_close(slow_log_probs(batch, expected.model), batch.log_probs)


def test_first_come_first_served(start: Any, tmp_path: Path) -> None:
    """Nobody waits for an actor that is slow, and nobody overtakes."""
    learner = start(partial(GatedEnv, tmp_path, (1,)), num_envs=1, queue_size=4)
    numbers = [float(learner.gather().rollout.obs[0, 0, 0]) for _ in range(5)]
    assert numbers == [0.0] * 5
    learner.wait_for_pause(5 + 3)
    (tmp_path / "open1").touch()
    learner.wait_for_pause(5 + 3 + 3)
    gathered = learner.gather(4)
    assert gathered.rollout.obs[0, :, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (gathered.queue_before, gathered.queue_after) == (6, 2)


@pytest.mark.parametrize(("queue_size", "num_slots"), [(0, 1), (1, 2), (2, 2), (3, 3)])
def test_the_queue_is_bounded(start: Any, queue_size: int, num_slots: int) -> None:
    """Actors pause when all of their slots are full, and go on when the learner took some."""
    learner = start(queue_size=queue_size)
    assert learner.actors.num_slots == num_slots
    expected = References(ActorEnv)
    expected.take(learner.gather())
    for taken in range(1, 4):
        learner.wait_for_pause(taken + A * num_slots)
        gathered = learner.gather()
        expected.take(gathered)
        assert gathered.queue_before == A * num_slots
        assert gathered.queue_after == A * num_slots - 1
    learner.wait_for_pause(4 + A * num_slots)
    learner.gather(A * num_slots)


def test_weights_are_used_from_the_next_rollout_on(start: Any) -> None:
    """Rollouts say truly which weights acted."""
    learner = start()
    model: ActorCriticModel = model_maker(*learner.actors.spaces)()
    learner.gather()
    taken, old = 1, A * learner.actors.num_slots
    for version in (3, 4, 8):
        learner.wait_for_pause(taken + old)
        learner.publish(version)
        set_version(learner.model, 99)
        before = {0, 3, 4} - {version}
        for i in range(2 * old):
            rollout = learner.gather().rollout
            (seq_no,) = set(rollout.weights_seq_no.tolist())
            assert seq_no == version if i >= old else seq_no in before
            set_version(model, seq_no)
            torch.testing.assert_close(slow_log_probs(rollout, model), rollout.log_probs)
        taken += 2 * old


def test_idle_may_raise(start: Any) -> None:
    """Nothing is lost: neither rollouts nor what was counted."""

    class Enough(Exception):  # noqa: N818  # not an error
        pass

    def idle() -> None:
        raise Enough

    learner = start()
    expected = References(ActorEnv)
    expected.take(learner.gather())
    learner.wait_for_pause(1 + 4)
    for process in learner.processes:
        os.kill(process.pid, signal.SIGSTOP)
    expected.take(learner.gather())
    counts = replace(learner.actors.counts)
    for _ in range(3):
        with pytest.raises(Enough):
            learner.actors.gather(4, idle)
        assert learner.actors.queued == 3
        assert learner.actors.counts == counts
    for process in learner.processes:
        os.kill(process.pid, signal.SIGCONT)
    for _ in range(8):
        expected.take(learner.gather())


def test_steps_of_lost_episodes_are_dropped(start: Any) -> None:
    """Rows that are no transitions are counted as such."""
    learner = start(partial(FaultyEnv, "lost", 3), skips=True)
    ignored = lost = 0
    for _ in range(6):
        gathered = learner.gather()
        lost += gathered.episodes.lost
        if gathered.rollout.ignored is not None:
            ignored += int(gathered.rollout.ignored.sum())
    assert ignored == learner.actors.counts.dropped
    assert 0 < lost <= A * E


def test_a_learner_that_is_slow(start: Any) -> None:
    """Actors that wait for it, or whose rollouts wait to be looked at, do not hang."""
    learner = start(queue_size=8, timeout_s=SHORT_S)
    learner.gather()
    for _ in range(2):
        learner.wait_for_pause(learner.trained // (T * E) + A * learner.actors.num_slots)
        time.sleep(1.3 * SHORT_S)
        assert learner.gather().queue_before == A * learner.actors.num_slots


def test_waiting_is_measured(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves when the learner has nothing to do, and when it joins rollouts."""
    clock, idle_s, joining_s = [0.0], 1.0, 100.0

    def idle() -> None:
        clock[0] += idle_s
        (tmp_path / "open0").touch()
        (tmp_path / "open1").touch()

    def join(rollouts: list[Rollout]) -> Rollout:
        clock[0] += joining_s
        return join_rollouts(rollouts)

    learner = start(partial(GatedEnv, tmp_path, (0, 1)), num_envs=1)
    monkeypatch.setattr(subproc_actors, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(subproc_actors, "join_rollouts", join)
    waited_s = learner.actors.gather(1, idle).waited_s
    assert waited_s == clock[0] - joining_s >= idle_s
    learner.trained += T
    learner.wait_for_pause(1 + 4)
    gathered = learner.gather(4)
    assert (gathered.queue_before, gathered.waited_s) == (4, 0.0)


# -- failures ----------------------------------------------------------------------------------

FAILURES = {
    "raise": r"environment [0-3] failed at step \d of .*: RuntimeError: the wheel came off",
    "exit": r"died in a step of a rollout \(exit code 7\)",
    "hang": r"hangs: it did not finish a step of a rollout within timeout_s = 1 seconds",
}
TRACEBACK = 'In the worker process:\n(?s:.*)raise RuntimeError\\("the wheel came off"\\)'


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_ends_training(start: Any, how: str, tmp_path: Path) -> None:
    """The error says what happened, and no process is left, even before anybody closes them."""
    make = partial(FaultyEnv, how, 7, tmp_path / "failed")
    learner = start(make, timeout_s=SHORT_S)
    pids = [process.pid for process in learner.processes]
    with pytest.raises(WorkerError) as caught:
        learner.gather_until_failure()
    message = str(caught.value)
    assert re.match(r"actor [01] \(environments (0 to 1|2 to 3)\)", message)
    assert re.search(FAILURES[how], message)
    assert "2 steps of its rollout are dropped (workers were restarted 0 times; " in message
    assert "on_worker_failure = fail)" in message
    assert bool(re.search(TRACEBACK, message)) == (how == "raise")
    assert all(has_ended(pid) for pid in pids)
    assert multiprocessing.active_children() == []
    assert learner.actors.counts.in_flight == 0
    with pytest.raises(WorkerError, match="closed"):
        learner.gather()


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_actor_is_started_again(
    start: Any, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told, what is lost is counted, and new episodes have other seeds."""
    make = partial(FaultyEnv, how, 7, tmp_path / "failed")
    learner = start(make, timeout_s=SHORT_S, on_worker_failure="restart")
    expected = References(partial(FaultyEnv, "nothing", 7))
    after: list[int] = []
    told, twin = "", -1
    # The third of those that are expected is the one that was started again.
    while after.count(twin) < 2 or after.count(2) < 2:
        gathered = learner.gather()
        assert gathered.episodes.lost == E * gathered.episodes.worker_restarts
        if gathered.episodes.worker_restarts:
            told += capfd.readouterr().err
            failed = int(told.removeprefix("warning: actor ")[0])
            twin = 1 - failed
            assert learner.actors._generations == [int(failed == i) for i in range(A)]
            expected.begin(failed, generation=1)
        after.append(expected.take(gathered))
    assert re.search(FAILURES[how], told)
    assert "; 2 steps of its rollout are dropped; it is started again (restart 1 of at" in told
    assert "most 10), and its environments begin new episodes" in told
    assert bool(re.search(TRACEBACK, told)) == (how == "raise")
    assert told.count("warning:") == learner.actors.worker_restarts == 1
    assert learner.actors.counts.dropped == 2


def test_restarts_are_limited(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """What fails again and again ends training."""
    make = partial(FaultyEnv, "raise", 7)
    learner = start(make, on_worker_failure="restart", max_worker_restarts=3)
    with pytest.raises(
        WorkerError, match=r"restarted 3 times; max_worker_restarts = 3\)"
    ) as caught:
        learner.gather_until_failure()
    assert re.search(TRACEBACK, str(caught.value))
    assert multiprocessing.active_children() == []
    assert capfd.readouterr().err.count("warning:") == 3
    # Four times, a step of two environments of a second rollout.
    assert learner.actors.counts.dropped >= 4 * E
    assert learner.trained > 0


def test_killed_actors(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Two at once; what they had finished is still learned from."""
    learner = start(on_worker_failure="restart")
    expected = References(ActorEnv)
    expected.take(learner.gather())
    learner.wait_for_pause(5)
    for process in learner.processes:
        process.kill()
        process.join()
    old = []
    for i in range(4):
        gathered = learner.gather()
        assert gathered.episodes.worker_restarts == (2 if i == 0 else 0)
        assert gathered.episodes.lost == (2 * E if i == 0 else 0)
        old.append(expected.take(gathered))
    assert set(old) == {0, 1}
    for actor in range(A):
        expected.begin(actor, generation=1)
    new: set[int] = set()
    while not new >= {2, 3}:  # However long one of them takes to start.
        new.add(expected.take(learner.gather()))
    assert new == {2, 3}
    told = capfd.readouterr().err
    words = (
        r"died in waiting \(signal SIGKILL; was memory exhausted\?\); 0 steps of its rollout are"
    )
    assert len(re.findall(words, told)) == 2
    assert learner.actors.counts.dropped == 0


def test_a_killed_actor_ends_training(start: Any) -> None:
    """The error names the actor and the signal."""
    learner = start()
    learner.gather()
    learner.processes[1].kill()
    words = (
        r"^actor 1 \(environments 2 to 3\) died .*SIGKILL.*; \d+ steps of its rollout are dropped"
    )
    with pytest.raises(WorkerError, match=words):
        learner.gather_until_failure()


def test_an_environment_that_exits(start: Any) -> None:
    """It is an error of the environment, whose number is that among all."""
    words = r"^actor 1 \(environments 2 to 3\): environment [23] failed at step 2 .*SystemExit: 0"
    with pytest.raises(WorkerError, match=words):
        start(ExitsEnv).gather_until_failure()


def test_a_stopped_actor(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """One that stands still although it has something to do is killed and started again."""
    learner = start(on_worker_failure="restart", timeout_s=SHORT_S)
    expected = References(ActorEnv)
    expected.begin(0, generation=1)
    expected.take(learner.gather())
    learner.wait_for_pause(1 + 4)
    os.kill(learner.processes[0].pid, signal.SIGSTOP)
    taken: set[int] = set()
    restarts = 0
    while taken != {0, 1, 2}:
        gathered = learner.gather()
        taken.add(expected.take(gathered))
        restarts += gathered.episodes.worker_restarts
    told = capfd.readouterr().err
    assert told.startswith("warning: actor 0 (environments 0 to 1) hangs")
    assert told.count("warning:") == restarts == 1


@pytest.mark.parametrize("on_worker_failure", ["fail", "restart"])
def test_environments_that_can_not_be_built(
    start: Any, tmp_path: Path, on_worker_failure: str
) -> None:
    """That is told at once; and when a process is started again, after so many attempts."""
    marker = tmp_path / "broken"
    make = partial(BrokenLaterEnv, marker)
    learner = start(make, on_worker_failure=on_worker_failure, max_worker_restarts=3)
    learner.gather()
    marker.touch()
    with pytest.raises(WorkerError, match=r"actor 0 .*ValueError: no such level") as caught:
        start(make, on_worker_failure=on_worker_failure)
    assert "Traceback" in str(caught.value)
    learner.processes[1].kill()
    spent = "no such level.*restarted 3 times; max_worker_restarts = 3"
    words = {"fail": "SIGKILL.*on_worker_failure = fail", "restart": spent}[on_worker_failure]
    with pytest.raises(WorkerError, match=rf"(?s)^actor 1 .*{words}"):
        learner.gather_until_failure()


def test_environments_that_can_not_be_sent(start: Any) -> None:
    """The error says what to do, before any process is started."""
    lock = threading.Lock()

    def make() -> gymnasium.Env[Any, Any]:
        with lock:
            return ActorEnv()

    with pytest.raises(ConfigError, match=r"^env: can not be sent .*lock.*within the function"):
        start(make)


def test_different_spaces(start: Any, tmp_path: Path) -> None:
    """All actors need the same."""
    make = partial(OddOneOutEnv, tmp_path / "one")
    with pytest.raises(SpaceError, match=r"environment 1 are .*all environments must have equal"):
        start(make, num_envs=1)
    assert multiprocessing.active_children() == []


# -- ending, state -----------------------------------------------------------------------------


def test_closing(start: Any) -> None:
    """At any time, several times; what was in flight is dropped, and the counts stay."""
    learner = start()
    learner.close()
    with pytest.raises(WorkerError, match="closed"):
        learner.gather()
    learner = start()
    learner.gather(3)
    learner.wait_for_pause(3 + 4)
    pids = [process.pid for process in learner.processes]
    os.kill(pids[0], signal.SIGINT)  # They leave it to the learner to end them.
    os.kill(pids[1], signal.SIGTERM)
    learner.gather(4)
    learner.wait_for_pause(7 + 4)
    learner.close()
    counts = replace(learner.actors.counts)
    assert counts.made == 11 * T * E
    assert counts.dropped == 4 * T * E
    assert all(has_ended(pid) for pid in pids)
    learner.close()
    assert learner.actors.counts == counts


def test_closing_in_the_middle_of_a_long_rollout(start: Any, tmp_path: Path) -> None:
    """Actors end after the step that they are making, and close their environments."""
    learner = start(partial(SlowEnv, tmp_path), num_envs=1, num_steps=1000)
    expected = {f"closed{process.pid}" for process in learner.processes}

    class Begun(Exception):  # noqa: N818  # not an error
        pass

    def idle() -> None:
        learner._check_time()
        if all(learner.actors._pool.steps(i) for i in range(A)):
            raise Begun

    with pytest.raises(Begun):
        learner.actors.gather(1, idle)
    assert list(tmp_path.iterdir()) == []
    learner.close()
    assert 0 < learner.actors.counts.dropped < 1000
    # Those that are killed, after five seconds, leave none.
    assert {file.name for file in tmp_path.iterdir()} == expected


def test_more_rollouts_than_there_is_room_for(start: Any) -> None:
    """That would never come to an end."""
    learner = start(queue_size=0)
    with pytest.raises(MazeTrainError, match="queue_size"):
        learner.gather(A + 1)
    learner.gather(A)


def test_a_run_that_is_continued(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """With the published weights and new episodes; what was in flight is dropped."""
    first = start()
    first.gather()
    first.wait_for_pause(1 + 4)
    set_version(first.model, 99)
    state = loads(dumps(first.actors.state_dict()))
    second = Learner(ActorEnv)
    try:
        set_version(second.model, 99)
        second.actors.load_state_dict(state)
        second.trained = first.trained
        assert second.actors.has_weights
        assert second.actors.counts.dropped == 4 * T * E
        assert second.actors.counts.made == 5 * T * E
        expected = References(ActorEnv)
        for actor in range(A):
            expected.begin(actor, generation=1)
        gathered = [second.gather() for _ in range(6)]
        assert [one.episodes.lost for one in gathered] == [A * E, 0, 0, 0, 0, 0]
        assert {expected.take(one) for one in gathered} <= {2, 3}
        assert f"and {4 * T * E} steps that were in flight are dropped" in capfd.readouterr().err
    finally:
        second.close()


def test_a_run_that_is_continued_in_one_process(
    start: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is told that episodes begin anew there, too, and what is dropped."""
    first = start()
    first.gather()
    first.wait_for_pause(1 + 4)
    state = loads(dumps(first.actors.state_dict()))
    actors = SequentialDistributedActors([vector_of(ActorEnv) for _ in range(A)], T, SEED_OF)
    make_model = model_maker(*actors.spaces)
    actors.begin(make_model(), make_model)
    actors.load_state_dict(state)
    assert capfd.readouterr().err == (
        "warning: the environments of the actors begin new episodes, and "
        f"{4 * T * E} steps that were in flight are dropped\n"
    )
    assert actors.counts.dropped == 4 * T * E
    expected = References(ActorEnv)
    for actor in range(A):
        expected.begin(actor, generation=1)
    gathered = [actors.gather(1, lambda: None) for _ in range(4)]
    assert [one.episodes.lost for one in gathered] == [A * E, 0, 0, 0]
    assert [expected.take(one) for one in gathered] == [2, 3, 2, 3]


PARENT = """
import sys, time
from functools import partial
from pathlib import Path
from actor_envs import *
from maze_train.rollout.subproc_actors import SubprocDistributedActors
from maze_train.workers.places import LocalProcesses

if __name__ == "__main__":
    is_slow = sys.argv[2] == "waits"
    make = partial(SlowEnv, Path(sys.argv[4])) if is_slow else ActorEnv
    make_env = partial(vector_of, make, E, False)
    actors = SubprocDistributedActors(
        make_env,
        int(sys.argv[3]),
        E,
        1000 if is_slow else T,
        SEED_OF,
        LocalProcesses(start_method=sys.argv[1]),
        queue_size=2,
    )
    pids = [process.pid for process in actors._pool.processes]

    def idle():
        if is_slow and all(actors._pool.steps(i) for i in range(2)):
            print(*pids, flush=True)
            time.sleep(600.0)

    make_model = model_maker(*actors.spaces)
    actors.begin(make_model(), make_model)
    actors.publish(0)
    actors.gather(1, idle)
    print(*pids, flush=True)
    if sys.argv[2] == "ends":
        sys.exit(3)
    while sys.argv[2] == "learns":
        actors.gather(1, lambda: None)
    while actors.queued < actors.num_slots * actors.num_actors:
        actors._look(100)  # All is read: the actors wait, and find the end of the pipe.
    print("sleeps", flush=True)
    time.sleep(600.0)
"""


@pytest.mark.parametrize(
    ("start_method", "does", "num_actors"),
    [
        ("fork", "sleeps", 2),
        ("forkserver", "learns", 1),
        ("fork", "ends", 2),
        ("fork", "waits", 2),
    ],
)
def test_the_process_of_the_learner_ends(
    tmp_path: Path, start_method: str, does: str, num_actors: int
) -> None:
    """Killed, or without closing its actors: they end by themselves, also within a rollout."""
    arguments = (start_method, does, str(num_actors), str(tmp_path))
    with run_owner(PARENT, tmp_path, *arguments) as (parent, pids):
        assert len(pids) == num_actors
        if does == "sleeps":
            assert parent.stdout.readline() == "sleeps\n"
        if does != "ends":
            assert not any(has_ended(pid) for pid in pids)
            parent.kill()
        assert parent.wait(PATIENCE_S) == (3 if does == "ends" else -signal.SIGKILL)
        assert left_of(pids, PATIENCE_S) == []
        closed = {f"closed{pid}" for pid in pids} if does == "waits" else set()
        assert {file.name for file in tmp_path.glob("closed*")} == closed
