"""Synchronous actors: results do not depend on the number of workers."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from actor_envs import (
    KINDS,
    ActorEnv,
    E,
    FailsForSeedEnv,
    FaultyEnv,
    T,
    model_maker,
    set_version,
    vector_of,
)
from cases import everyday
from rollouts_compared import assert_same_rollouts

from maze_train.collect.actors import ActorCollector, DistributedActors
from maze_train.collect.collector import RolloutCollector, SingleModule
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.errors import EnvError, WorkerError
from maze_train.core.seeding import EpisodeSeeds, Seeds
from maze_train.core.state_files import dumps, loads
from maze_train.data.rollout import join_rollouts
from maze_train.workers.backends import ThisProcess
from maze_train.workers.process_pool import LocalProcesses

slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

A = 3
"""Number of actors; two workers have one and two of them."""


class TwoWorkers(ThisProcess):
    """Backend with two workers in this process."""

    def num_workers(self, at_most):
        """Return 2."""
        return 2


def processes(n_workers, **settings):
    """Return a backend with `n_workers` processes."""
    settings = {"start_method": "fork", "timeout_s": 120.0, **settings}
    return LocalProcesses(n_workers=n_workers, **settings)


BACKENDS = {
    "here": ThisProcess(),
    "2 here": TwoWorkers(),
    "1 process": processes(1),
    "2 processes": processes(2),
    "3 processes": processes(3),
}


@pytest.fixture
def start(no_file_is_left):
    """Function that starts actors; they are closed after the test."""
    with ExitStack() as stack:

        def start(make=ActorEnv, backend=None, *, memory=False, skips=False, **settings):
            backend = backend or ThisProcess()
            actors = DistributedActors(
                partial(vector_of, make, E, skips),
                A,
                E,
                backend,
                num_workers=backend.num_workers(A),
                can_be_restored=True,
            )
            stack.enter_context(closing(actors))
            make_model = model_maker(*actors.spaces, memory=memory)
            model = make_model()
            settings = {"env_seed": 5, "action_seed": 7, **settings}
            return ActorCollector(actors, model, make_model, T, **settings), model

        yield start


class References:
    """Rollouts of one collector per actor."""

    def __init__(self, make=ActorEnv, *, memory=False, skips=False, records_log_probs=False):
        self.model = None
        self.collectors = []
        for actor in range(A):
            self.collectors.append(
                RolloutCollector(
                    vector_of(make, E, skips),
                    T,
                    env_seed=Seeds(5).integer(f"{actor}/0"),
                    action_seed=Seeds(7).integer(f"{actor}/0"),
                    records_log_probs=records_log_probs,
                )
            )
        env = self.collectors[0].env
        self.model = model_maker(
            env.env_observation_space, env.single_action_space, memory=memory
        )()

    def collect(self, version):
        """Return the next joined rollout with the weights of a version."""
        set_version(self.model, version)
        rollouts, episodes = [], FinishedEpisodes()
        for collector in self.collectors:
            rollout, found = collector.collect_steps(self.model)
            rollouts.append(rollout)
            episodes.extend(found)
        return join_rollouts(rollouts), episodes


def assert_collects(collector, model, references, versions=(0, 1, 2)):
    """Check that rollouts and episodes match the references."""
    for version in versions:
        set_version(model, version)
        rollout, episodes = collector.collect_steps(model)
        expected, expected_episodes = references.collect(version)
        assert_same_rollouts(rollout, expected)
        # Episodes without a success have NaN, which does not equal itself.
        assert repr(replace(episodes, worker_restarts=0)) == repr(expected_episodes)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((next(iter(KINDS)), backend) for backend in BACKENDS),
        *everyday(0, [(kind, "2 here") for kind in [*KINDS][1:]], are_rows=True),
        *everyday(0, [(kind, "2 processes") for kind in [*KINDS][1::2]], are_rows=True),
    ],
)
def test_actor_rollouts_equal_single_collectors(start, kind, backend):
    """Rollouts and episodes match the references bit for bit, for any number of workers."""
    make, settings = KINDS[kind]
    memory = settings.get("memory", False)
    collector, model = start(make, BACKENDS[backend], memory=memory)
    collector.records_log_probs = kind.startswith("stacks")
    expected = References(make, memory=memory, records_log_probs=collector.records_log_probs)
    assert_collects(collector, model, expected)


def test_actor_collector_keeps_terminal_observations(start):
    """Terminal observations are kept on request; lost episodes have rows without transitions."""
    make = partial(FaultyEnv, "lost", 4)
    collector, model = start(make, skips=True)
    expected = References(make, skips=True)
    collector.keeps_terminal_obs = True
    for one in expected.collectors:
        one.keeps_terminal_obs = True
    assert_collects(collector, model, expected)
    rollout, episodes = collector.collect_steps(model)
    assert episodes.lost == int((~rollout.valid).sum()) > 0
    assert bool(rollout.terminated.flatten()[rollout.final_positions].any())


@pytest.mark.parametrize("backend", ["2 here", pytest.param("2 processes", marks=slow)])
def test_overlapping_updates_affect_the_next_rollout_only(start, backend):
    """`overlap` is called once, with gradients enabled; actors keep the weights they received."""
    collector, model = start(backend=BACKENDS[backend])
    expected, calls = References(), []

    def overlap():
        calls.append(torch.is_grad_enabled())
        set_version(model, 9)

    set_version(model, 0)
    assert_same_rollouts(collector.collect_steps(model, overlap)[0], expected.collect(0)[0])
    assert calls == [True]
    assert_same_rollouts(collector.collect_steps(model)[0], expected.collect(9)[0])


@pytest.mark.parametrize(
    ("kind", "backends"),
    everyday(
        2,
        [
            *((kind, ("here", "2 here")) for kind in KINDS),
            *((kind, ("2 processes", "3 processes")) for kind in [*KINDS][:2]),
        ],
        are_rows=True,
    ),
)
def test_actors_resume_bit_for_bit(start, kind, backends):
    """Restored actors continue bit for bit with another number of workers."""
    make, settings = KINDS[kind]
    memory = settings.get("memory", False)
    first, second = (start(make, BACKENDS[backend], memory=memory) for backend in backends)
    expected = References(make, memory=memory)
    assert not second[0].load_state_dict(loads(dumps(first[0].state_dict()))).any()
    assert_collects(*first, expected)
    state = loads(dumps(first[0].state_dict()))
    assert dumps(first[0].state_dict()) == dumps(state)
    third = start(make, BACKENDS[backends[1]], memory=memory)
    assert not third[0].load_state_dict(state).any()
    assert_collects(*third, expected, (3, 4))


class Forgetful(ActorEnv):
    """Environment whose observations after reset differ in each instance."""

    def __init__(self):
        super().__init__()
        self.offset = time.monotonic()

    def observe(self):
        """Return the observation."""
        return super().observe() + (self.offset if self.t else 0.0)


@pytest.mark.parametrize(
    "backend",
    [ThisProcess(), pytest.param(processes(2, on_worker_failure="restart"), marks=slow)],
    ids=["here", "processes"],
)
def test_unrestorable_environments_raise_or_begin_new_episodes(start, backend, monkeypatch):
    """Environments that cannot be restored raise an error or, if allowed, begin new episodes.

    The unfinished turns of aborted episodes are dropped.
    """
    first, model = start(Forgetful, backend)
    first.collect_steps(model)
    state = first.state_dict()
    records = [record for actor in state["actors"] for record in actor["env"]["envs"]]
    running = [record["steps"] > 0 for record in records]
    second, _ = start(Forgetful, backend)
    with pytest.raises(EnvError, match=r"could not be restored.*checkpoint\.allow_new_episodes"):
        second.load_state_dict(state)
    third, _ = start(Forgetful, backend, allow_new_episodes=True)
    told = []
    monkeypatch.setattr(
        SingleModule, "load_state_dict", lambda own, state, lost: told.append(lost.tolist())
    )
    assert third.load_state_dict(state).tolist() == running
    assert any(running)
    *of_actors, of_all = told
    assert of_all == running
    times = 2 if isinstance(backend, ThisProcess) else 1  # here, also in the actors themselves
    assert sum(map(sum, of_actors)) == times * sum(running)


# -- failures ----------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("n_workers", everyday(1, [1, 2]))
def test_killed_workers_do_not_change_results(start, n_workers, memory, tmp_path, capfd):
    """Killed workers are restored and repeat the lost rollout with identical results."""
    marker = tmp_path / "failed"
    make = partial(FaultyEnv, "kill", 7, marker)
    backend = processes(n_workers, on_worker_failure="restart")
    collector, model = start(make, backend, memory=memory, on_lost=pytest.fail)
    expected = References(partial(FaultyEnv, "nothing", 7), memory=memory)
    assert_collects(collector, model, expected)
    assert marker.exists()
    workers = collector._actors.pool.processes
    os.kill(workers[-1].pid, signal.SIGKILL)
    collector.state_dict()
    os.kill(collector._actors.pool.processes[0].pid, signal.SIGKILL)
    set_version(model, 3)
    rollout, episodes = collector.collect_steps(model)
    assert_same_rollouts(rollout, expected.collect(3)[0])
    assert (episodes.worker_restarts, episodes.lost) == (2, 0)
    told = capfd.readouterr().err
    words = r"worker \d \(environments \d to \d\) died in .* SIGKILL.*; it is restarted \(re"
    assert len(re.findall(words, told)) == 3
    assert told.count("restored to their state after the last rollout") == 3


@slow
def test_repeated_failure_begins_new_episodes(start, capfd):
    """If an actor fails twice, only its environments begin new episodes."""
    seed = EpisodeSeeds(Seeds(5).integer("1/0"), 0, E)
    seed.next()
    make = partial(FailsForSeedEnv, "raise", seed.next())
    lost = []
    backend = processes(2, on_worker_failure="restart", max_worker_restarts=9)
    collector, model = start(make, backend, on_lost=lost.append)
    found = [collector.collect_steps(model)[1] for _ in range(4)]
    assert sum(episodes.lost for episodes in found) == E
    assert sum(episodes.worker_restarts for episodes in found) == 2
    assert [mask.tolist() for mask in lost] == [[False] * E + [True] * E + [False] * E]
    assert collector.state_dict()["generations"] == [0, 1, 0]
    told = capfd.readouterr().err
    assert f"and its environments {E} to {2 * E - 1} begin new episodes" in told


@slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "on_worker_failure = fail"),
        ({"on_worker_failure": "restart", "max_worker_restarts": 2}, "max_worker_restarts = 2"),
    ],
)
def test_final_worker_failure_names_the_reason(start, settings, reason):
    """The error names the worker, the failure and why the worker is not restarted."""
    make = partial(FaultyEnv, "raise", 3)
    collector, model = start(make, processes(2, **settings))
    with pytest.raises(WorkerError, match=rf"(?s)worker [01] .*the wheel came off.*{reason}"):
        collector.collect_steps(model)
    with pytest.raises(WorkerError, match="closed"):
        collector.collect_steps(model)
