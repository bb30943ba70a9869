"""Actors: order of rollouts in one and several processes, failures, shutdown."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import threading
import time
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from actor_envs import (
    KINDS,
    SEED_OF,
    ActorEnv,
    BrokenLaterEnv,
    E,
    FaultyEnv,
    GatedEnv,
    T,
    model_maker,
    reference_collector,
    set_version,
    slow_log_probs,
    vector_of,
)
from cases import everyday
from leftovers import has_ended
from rollouts_compared import assert_same_rollouts

from maze_train.collect.actors import ActorPolicy, DistributedActors, GatheredRollouts, StepCounts
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.collect.gathering import GatheringActors
from maze_train.core.errors import WorkerError
from maze_train.core.state_files import dumps, loads
from maze_train.data.rollout import join_rollouts, select_envs
from maze_train.workers.backends import Pickled, ThisProcess
from maze_train.workers.process_pool import LocalProcesses

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
every_backend = pytest.mark.parametrize("remote", [False, pytest.param(True, marks=slow)])

A = 2
PATIENCE_S = 60.0
SHORT_S = 1.0
"""Timeout in seconds after which an actor counts as hung."""


def seeds_of(actor, generation):
    """Return the seeds of episodes and of actions."""
    name = f"actors/{actor}/{generation}"
    return SEED_OF(f"{name}/episodes"), SEED_OF(f"{name}/actions")


class Learner:
    """Actors in processes (`remote`) or in this process, and the model with which they act."""

    def __init__(
        self,
        make=ActorEnv,
        *,
        remote=True,
        memory=False,
        skips=False,
        num_envs=E,
        queue_size=2,
        **processes,
    ):
        processes = {"start_method": "fork", "timeout_s": 30.0, **processes}
        backend = LocalProcesses(**processes) if remote else ThisProcess()
        make_env = partial(vector_of, make, num_envs, skips)
        self.actors = DistributedActors(make_env, A, num_envs, backend)
        make_model = model_maker(*self.actors.spaces, memory=memory)
        self.model = make_model()
        policy = ActorPolicy(Pickled(make_model, "model"), T, False)
        self.actors.begin(self.model, policy, seeds_of, queue_size=queue_size)
        self.trained = 0
        self._deadline = time.monotonic() + PATIENCE_S

    def publish(self, version):
        """Publish the weights of a version, then set other weights in the model."""
        set_version(self.model, version)
        self.actors.publish(version)
        set_version(self.model, 99)

    def gather(self, count=1):
        """Gather rollouts and check the counts."""
        gathered = self.actors.gather(count, self.check_time)
        self.check_time()
        self.trained += gathered.rollouts["default"].num_samples
        actors, counts = self.actors, self.actors.counts
        assert counts.trained == self.trained
        slots = A * actors.num_slots if self.processes else 0
        assert 0 <= counts.in_flight <= slots * T * self.actors.num_envs
        return gathered

    def check_time(self, *, restart=False):
        """Fail if the deadline has passed."""
        if restart:
            self._deadline = time.monotonic() + PATIENCE_S
        assert time.monotonic() < self._deadline, "what is waited for does not come"

    @property
    def processes(self):
        """Processes in the order of the actors."""
        return getattr(self.actors.pool, "processes", [])

    def made(self):
        """Return the number of steps of each actor."""
        return [self.actors.pool.steps(i) for i in range(A)]

    def wait_for_pause(self, rollouts):
        """Wait until the actors have made this number of rollouts, and check that they pause."""
        expected = rollouts * T * self.actors.num_envs
        while sum(self.made()) < expected:
            self.check_time()
            time.sleep(0.01)
        for _ in range(6):
            assert sum(self.made()) == expected
            time.sleep(0.02)

    def close(self):
        """Close the actors."""
        self.actors.close()
        counts = self.actors.counts
        assert counts.in_flight == 0
        assert counts.trained == self.trained


class References:
    """Rollouts of collectors in this process with the seeds of the actors."""

    def __init__(self, make=ActorEnv, *, memory=False):
        self._make = partial(vector_of, make)
        env = self._make()
        spaces = env.env_observation_space, env.single_action_space
        self.model = model_maker(*spaces, memory=memory)()
        set_version(self.model, 0)
        self._collectors = []
        self._next = []
        for actor in range(A):
            self.begin(actor)

    def begin(self, actor, generation=0):
        """Add the expected rollouts of an actor."""
        collector = reference_collector(self._make(), actor, generation)
        self._collectors.append(collector)
        self._next.append(self._collect(collector))

    def _collect(self, collector):
        rollout, episodes = collector.collect_steps(self.model)
        seq_nos = torch.zeros(E, dtype=torch.int64)
        return join_rollouts([replace(rollout, weights_seq_no=seq_nos)]), episodes

    def take(self, gathered):
        """Check one rollout of any actor; return the index of its reference."""
        for i, (rollout, episodes) in enumerate(self._next):
            if torch.equal(gathered.rollouts["default"].rewards, rollout.rewards):
                assert_same_rollouts(gathered.rollouts["default"], rollout)
                assert gathered.episodes.returns == episodes.returns
                assert gathered.episodes.lengths == episodes.lengths
                self._next[i] = self._collect(self._collectors[i])
                return i
        raise AssertionError("a rollout that no actor should have collected next")


@pytest.fixture
def start(no_file_is_left):
    """Function that starts actors; they are closed after the test."""
    with ExitStack() as stack:

        def start(*args, **settings):
            learner = stack.enter_context(closing(Learner(*args, **settings)))
            learner.publish(0)
            return learner

        yield start


def test_weights_are_sent_by_the_calling_thread(start):
    """Weights are sent by the thread that calls the actors; other threads only copy them."""
    learner, senders = start(remote=False), []
    pool = learner.actors.pool
    pool.publish = lambda *memory: senders.append(threading.current_thread())
    learner.gather()
    senders.clear()
    for version in (1, 2):
        thread = threading.Thread(target=learner.publish, args=(version,))
        thread.start()
        thread.join()
    assert not senders
    gathered = learner.gather()
    assert senders == [threading.main_thread()]
    assert gathered.rollouts["default"].weights_seq_no.unique().tolist() == [2]
    learner.gather()
    assert len(senders) == 1


# -- rollouts ----------------------------------------------------------------------------------

every_kind = pytest.mark.parametrize("kind", KINDS)
ELSEWHERE = "box, discrete", "stacks, dict, memory"
"""Kinds that are tested with processes in `make test`."""


@pytest.mark.parametrize(
    ("kind", "remote"),
    [(kind, False) for kind in KINDS]
    + [pytest.param(kind, True, marks=slow) for kind in ELSEWHERE]
    + [
        pytest.param(kind, True, marks=[slow, pytest.mark.exhaustive])
        for kind in KINDS
        if kind not in ELSEWHERE
    ],
)
def test_actor_rollouts_equal_collectors(start, kind, remote):
    """Rollouts and episodes match collectors bit for bit; in one process, actors take turns."""
    make, settings = KINDS[kind]
    learner = start(make, remote=remote, **settings)
    expected = References(make, memory=settings.get("memory", False))
    taken = [expected.take(learner.gather()) for _ in range(12)]
    assert set(taken) == {0, 1}
    assert remote or taken == [0, 1] * 6
    kept = [expected._next[i][0] for i in (0, 1)]
    gathered = learner.gather(3)
    batch = gathered.rollouts["default"]
    assert batch.rewards.shape == (T, 3 * E)
    torch.testing.assert_close(slow_log_probs(batch, expected.model), batch.log_probs)
    if not remote:
        assert (gathered.queue_before, gathered.queue_after) == (0, 0)
        assert_same_rollouts(select_envs(batch, slice(0, 2 * E)), join_rollouts(kept))
    assert (batch.hidden_states is not None) == ("memory" in kind)
    kept = deepcopy(batch)
    learner.gather(3)  # must not modify the previous batch
    assert_same_rollouts(batch, kept)


@slow
def test_rollouts_arrive_in_order_of_completion(start, tmp_path):
    """Rollouts arrive in order of completion; no one waits for a slow actor."""
    learner = start(partial(GatedEnv, tmp_path, (1,)), num_envs=1, queue_size=4)
    numbers = [float(learner.gather().rollouts["default"].obs[0, 0, 0]) for _ in range(5)]
    assert numbers == [0.0] * 5
    learner.wait_for_pause(5 + 3)
    (tmp_path / "open1").touch()
    learner.wait_for_pause(5 + 3 + 3)
    gathered = learner.gather(4)
    assert gathered.rollouts["default"].obs[0, :, 0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (gathered.queue_before, gathered.queue_after) == (6, 2)


class TwoProcesses:
    """Two processes of torchrun with equal values."""

    rank, count = 0, 2

    def gather(self, value):
        return [value, deepcopy(value)]

    def gather_tensor(self, tensor):
        return [tensor, tensor]


def test_metrics_cover_actors_of_all_processes(monkeypatch):
    """With torchrun, the metrics of IMPALA describe the actors of all processes."""
    actors = GatheringActors(TwoProcesses(), partial(vector_of, ActorEnv, E, False), 2 * A, E)
    episodes = FinishedEpisodes(steps=T)
    own = GatheredRollouts({}, episodes, np.zeros(A * E, bool), 6, 2, 0.0, 0.0)
    monkeypatch.setattr(DistributedActors, "gather", lambda *_, **how: own)
    actors.counts = StepCounts(made=50, trained=30, dropped=1)
    found = actors.gather(4)
    assert (found.queue_before, found.queue_after) == (12, 4)
    assert found.episodes.steps == 2 * T
    assert actors.total_counts == StepCounts(made=100, trained=60, dropped=2)


@slow
@pytest.mark.parametrize(
    ("queue_size", "num_slots"), everyday(1, [(0, 1), (1, 2), (3, 3)], are_rows=True)
)
def test_actor_queue_is_bounded(start, queue_size, num_slots):
    """Actors pause when all of their slots are full, and continue when slots are free."""
    # Actors that wait do not count as hung.
    learner = start(queue_size=queue_size, timeout_s=SHORT_S)
    assert learner.actors.num_slots == num_slots
    expected = References()
    expected.take(learner.gather())
    for taken in range(1, 4):
        learner.wait_for_pause(taken + A * num_slots)
        if taken == 1:
            time.sleep(1.3 * SHORT_S)
        gathered = learner.gather()
        expected.take(gathered)
        assert gathered.queue_before == A * num_slots
        assert gathered.queue_after == A * num_slots - 1
    learner.wait_for_pause(4 + A * num_slots)
    learner.gather(A * num_slots)


@every_backend
def test_new_weights_apply_from_the_next_rollout(start, remote):
    """New weights apply from the next rollout on; rollouts report the weights they used."""
    learner = start(remote=remote)
    model = model_maker(*learner.actors.spaces)()
    learner.gather()
    taken, old = 1, A * learner.actors.num_slots if remote else 0
    for version in (3, 4, 8):
        if remote:
            learner.wait_for_pause(taken + old)
        learner.publish(version)
        before = {0, 3, 4} - {version}
        for i in range(2 * old or 3):
            rollout = learner.gather().rollouts["default"]
            (seq_no,) = set(rollout.weights_seq_no.tolist())
            assert seq_no == version if i >= old else seq_no in before
            set_version(model, seq_no)
            torch.testing.assert_close(slow_log_probs(rollout, model), rollout.log_probs)
        taken += 2 * old


@slow
def test_idle_exception_loses_no_rollout(start):
    """If `idle` raises an exception, no rollouts or counts are lost."""

    def idle():
        raise KeyboardInterrupt

    learner = start()
    expected = References()
    expected.take(learner.gather())
    learner.wait_for_pause(1 + 4)
    for process in learner.processes:
        os.kill(process.pid, signal.SIGSTOP)
    expected.take(learner.gather())
    counts = replace(learner.actors.counts)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            learner.actors.gather(4, idle)
        assert len(learner.actors._queue) == 3
        assert learner.actors.counts == counts
    for process in learner.processes:
        os.kill(process.pid, signal.SIGCONT)
    for _ in range(8):
        expected.take(learner.gather())


@every_backend
def test_steps_of_dropped_episodes_are_counted(start, remote):
    """Rows that are not transitions are counted as dropped."""
    learner = start(partial(FaultyEnv, "lost", 4), skips=True, remote=remote)
    invalid = lost = 0
    for _ in range(6):
        gathered = learner.gather()
        lost += gathered.episodes.lost
        if gathered.rollouts["default"].valid is not None:
            invalid += int((~gathered.rollouts["default"].valid).sum())
    counts = learner.actors.counts
    assert invalid == counts.dropped == lost
    assert lost > A * E  # several in each collector
    assert remote or counts.made == 6 * T * E


# -- failures ----------------------------------------------------------------------------------

FAILURES = {
    "raise": r"environment [0-3] failed at step \d of .*: RuntimeError: the wheel came off",
    "exit": r"died in a step of a rollout \(exit code 7\)",
    "hang": r"hangs: .* a step of a rollout within timeout_s = 1 seconds, and was killed; 2 steps",
}
TRACEBACK = 'In the worker process:\n(?s:.*)raise RuntimeError\\("the wheel came off"\\)'


@slow
@pytest.mark.parametrize("how", everyday(2, FAILURES))
def test_failed_actor_is_restarted_with_new_seeds(start, how, tmp_path, capfd):
    """A failed actor is restarted and reported; lost steps are counted, and new seeds are used."""
    make = partial(FaultyEnv, how, 7, tmp_path / "failed")
    learner = start(make, timeout_s=SHORT_S, on_worker_failure="restart")
    expected = References(partial(FaultyEnv, "nothing", 7))
    after = []
    told, twin = "", -1
    # The third reference is the restarted actor.
    while after.count(twin) < 2 or after.count(2) < 2:
        gathered = learner.gather()
        assert gathered.episodes.lost == E * gathered.episodes.worker_restarts
        if gathered.episodes.worker_restarts:
            told += capfd.readouterr().err
            failed = int(told.removeprefix("warning: actor ")[0])
            twin = 1 - failed
            assert learner.actors.generations == [int(failed == i) for i in range(A)]
            expected.begin(failed, generation=1)
        after.append(expected.take(gathered))
    assert re.search(FAILURES[how], told)
    assert "; 2 steps of its rollout are dropped; it is restarted (restart 1 of at" in told
    first = E * failed
    assert f"most 10), and its environments {first} to {first + E - 1} begin new" in told
    assert bool(re.search(TRACEBACK, told)) == (how == "raise")
    assert told.count("warning:") == learner.actors.pool.restarts == 1
    assert learner.actors.counts.dropped == 2


@slow
@pytest.mark.exhaustive
def test_repeatedly_killed_actors_lose_no_step(start):
    """With repeated kills and stops, no step is lost or counted twice."""
    learner = start(on_worker_failure="restart", timeout_s=SHORT_S, max_worker_restarts=1000)
    rng = random.Random(0)
    kinds = [signal.SIGKILL] * 20 + [signal.SIGSTOP] * 5
    for kind in kinds:
        for _ in range(rng.randrange(20)):
            learner.gather(rng.randrange(1, 4))
        time.sleep(rng.uniform(0.0, 0.05))  # the actors may be in any state
        os.kill(rng.choice(learner.processes).pid, kind)
        learner.check_time(restart=True)
    while learner.actors.pool.restarts < len(kinds) / 2:
        learner.gather()
    learner.close()
    counts = learner.actors.counts
    assert counts.made == counts.trained + counts.dropped
    assert counts.trained > 100 * T * E


@slow
def test_finished_rollouts_of_killed_actors_are_used(start, capfd):
    """After two actors are killed, their finished rollouts are still used."""
    learner = start(on_worker_failure="restart")
    expected = References()
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
    new = set()
    while not new >= {2, 3}:  # one of them may start late
        new.add(expected.take(learner.gather()))
    assert new == {2, 3}
    words = (
        r"died in waiting \(signal SIGKILL; was memory exhausted\?\); 0 steps of its rollout are"
    )
    assert len(re.findall(words, capfd.readouterr().err)) == 2
    assert learner.actors.counts.dropped == 0


@slow
def test_unbuildable_environments_raise(start, tmp_path):
    """Environments that cannot be built raise an error: at once, or after all restarts failed."""
    marker = tmp_path / "broken"
    make = partial(BrokenLaterEnv, marker)
    learner = start(make, on_worker_failure="restart", max_worker_restarts=3)
    learner.gather()
    marker.touch()
    with pytest.raises(WorkerError, match=r"actor 0 .*ValueError: no such level") as caught:
        start(make)
    assert "Traceback" in str(caught.value)
    learner.processes[1].kill()
    spent = "restarted 3 times; max_worker_restarts = 3.*no such level"
    with pytest.raises(WorkerError, match=rf"(?s)^actor 1 .*its rollout are dropped .*{spent}"):
        list(iter(learner.gather, None))
    assert learner.actors.counts.in_flight == 0
    assert multiprocessing.active_children() == []  # even before the actors are closed
    with pytest.raises(WorkerError, match="closed"):
        learner.gather()


# -- closing, state ----------------------------------------------------------------------------


@every_backend
def test_actors_can_be_closed_at_any_time(start, tmp_path, remote):
    """Actors can be closed at any time and repeatedly; steps in flight are counted as dropped."""
    learner = start(remote=remote)
    learner.close()
    with pytest.raises(WorkerError, match="closed"):
        learner.gather()
    learner = start(remote=remote)
    learner.gather(3)
    if remote:
        learner.wait_for_pause(3 + 4)
        pids = [process.pid for process in learner.processes]
        os.kill(pids[0], signal.SIGINT)  # ignored: the learner ends the actors
        os.kill(pids[1], signal.SIGTERM)
    learner.gather(4)
    if remote:
        learner.wait_for_pause(7 + 4)
    learner.close()
    counts = replace(learner.actors.counts)
    in_flight = 4 * T * E if remote else 0
    assert counts == StepCounts(7 * T * E + in_flight, 7 * T * E, in_flight)
    assert not remote or all(has_ended(pid) for pid in pids)
    learner.close()
    assert learner.actors.counts == counts


@every_kind
def test_actors_resume_bit_for_bit(start, kind):
    """Restored actors continue bit for bit, in the middle of a round and with older weights."""
    make, settings = KINDS[kind]
    memory = settings.get("memory", False)
    first, second = (start(make, remote=False, memory=memory) for _ in range(2))
    first.gather(3)
    first.publish(5)
    first.gather(4)
    state = loads(dumps(first.actors.state_dict()))
    assert state["counts"] == {"made": 7 * T * E, "trained": 7 * T * E, "dropped": 0}
    second.actors.load_state_dict(state)
    second.trained = first.trained
    for count in (3, 3, 1):
        ours, theirs = (learner.gather(count).rollouts["default"] for learner in (first, second))
        assert_same_rollouts(ours, theirs)
        assert set(ours.weights_seq_no.tolist()) == {5}
    first.publish(7)
    second.publish(7)
    assert_same_rollouts(*(learner.gather().rollouts["default"] for learner in (first, second)))
    assert second.actors.counts == first.actors.counts
    assert dumps(first.actors.state_dict()) == dumps(second.actors.state_dict())


@slow
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_resume_on_another_backend_begins_new_episodes(start, capfd, before, after):
    """A run resumed with another backend begins new episodes; steps in flight are dropped."""
    first, second = start(remote=before), Learner(remote=after)
    first.gather()
    if before:
        first.wait_for_pause(1 + 4)
    state = loads(dumps(first.actors.state_dict()))
    in_flight = 4 * T * E if before else 0
    second.actors.load_state_dict(state)
    assert second.actors.has_weights
    assert second.actors.counts == StepCounts(T * E + in_flight, T * E, in_flight)
    lost = f", and {in_flight} steps that were in flight are dropped" if in_flight else ""
    told = f"warning: the environments of the actors begin new episodes{lost}\n"
    assert capfd.readouterr().err == told
    second.trained = first.trained
    expected = References()
    for actor in range(A):
        expected.begin(actor, generation=1)
    gathered = [second.gather() for _ in range(6)]
    assert [one.episodes.lost for one in gathered] == [A * E, 0, 0, 0, 0, 0]
    taken = [expected.take(one) for one in gathered]
    assert set(taken) <= {2, 3}
    assert after or taken == [2, 3] * 3
    second.close()
