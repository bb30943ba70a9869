"""Actors that take turns in the process of the learner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from actor_envs import (
    SEED_OF,
    ActorEnv,
    E,
    FaultyEnv,
    T,
    assert_same,
    columns_of,
    maker_for,
    reference_collector,
    set_version,
    slow_log_probs,
    stacked_env,
    vector_of,
)

from maze_train.data.frames import FrameStacks
from maze_train.data.joining import join_rollouts, select_envs
from maze_train.rollout.actors import SequentialDistributedActors, StepCounts
from maze_train.rollout.episodes import FinishedEpisodes
from maze_train.training.state_files import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium

    from maze_train.data.rollout import Rollout
    from maze_train.nets.actor_critic import ActorCriticModel
    from maze_train.rollout.actors import GatheredRollouts
    from maze_train.rollout.collector import RolloutCollector

A = 2
KINDS: dict[str, tuple[Callable[[], gymnasium.Env[Any, Any]], bool]] = {
    "box, discrete": (ActorEnv, False),
    "box, box": (partial(ActorEnv, "box", "box"), False),
    "dict, dict": (partial(ActorEnv, "dict", "dict"), False),
    "stacks, discrete": (stacked_env, False),
    "mask, discrete": (partial(ActorEnv, "mask"), False),
    "box, discrete, memory": (ActorEnv, True),
    "stacks, dict, memory": (partial(stacked_env, "dict"), True),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make_actors(
    kind: str = "box, discrete", num_actors: int = A
) -> tuple[SequentialDistributedActors, ActorCriticModel]:
    """Actors that have begun, and the model of the learner."""
    make, memory = KINDS[kind]
    envs = [vector_of(make) for _ in range(num_actors)]
    actors = SequentialDistributedActors(envs, T, SEED_OF)
    make_model = maker_for(envs[0], memory=memory)
    model = make_model()
    actors.begin(model, make_model)
    return actors, model


def make_references(kind: str) -> tuple[list[RolloutCollector], ActorCriticModel]:
    """Collectors with the seeds of the actors, and a model for them."""
    make, memory = KINDS[kind]
    collectors = [reference_collector(vector_of(make), i) for i in range(A)]
    return collectors, maker_for(collectors[0].env, memory=memory)()


def publish(actors: SequentialDistributedActors, model: ActorCriticModel, version: int) -> None:
    """Let actors act with weights of a version."""
    set_version(model, version)
    actors.publish(version)


def gather(actors: SequentialDistributedActors, count: int) -> GatheredRollouts:
    """Rollouts; there is never a reason to wait."""

    def idle() -> None:
        raise AssertionError("nothing to wait for")

    return actors.gather(count, idle)


@every_kind
def test_rollouts_are_those_of_collectors(kind: str) -> None:
    """Actor by actor in turn, with the weights that were published, and their number."""
    actors, model = make_actors(kind)
    collectors, reference = make_references(kind)
    turn = 0
    for version, count in ((3, 1), (3, 2), (8, 3), (9, 1), (9, 5)):
        publish(actors, model, version)
        set_version(model, 99)  # The learner's weights do not matter until they are published.
        set_version(reference, version)
        gathered = gather(actors, count)
        expected, episodes = [], FinishedEpisodes()
        for _ in range(count):
            rollout, finished = collectors[turn].collect(reference)
            episodes.extend(finished)
            torch.testing.assert_close(slow_log_probs(rollout, reference), rollout.log_probs)
            seq_nos = torch.full((E,), version)
            expected.append(join_rollouts([replace(rollout, weights_seq_no=seq_nos)]))
            turn = (turn + 1) % A
        assert_same(gathered.rollout, join_rollouts(expected))
        assert gathered.episodes == episodes
        assert (gathered.queue_before, gathered.queue_after) == (0, 0)
    assert len(expected) == 5
    assert gathered.rollout.rewards.shape == (T, 5 * E)
    leaf = next(column for name, column in columns_of(gathered.rollout) if name == "obs0")
    assert leaf.shape[:2] == (T + 1, 5 * E)
    assert (gathered.rollout.states is not None) == KINDS[kind][1]
    assert isinstance(gathered.rollout.obs, FrameStacks) == kind.startswith("stacks")


@every_kind
def test_several_turns_of_an_actor_are_different_rollouts(kind: str) -> None:
    """The second one is not written over the first, and begins where that one ended."""
    actors, model = make_actors(kind, num_actors=1)
    publish(actors, model, 1)
    rollout = gather(actors, 3).rollout
    parts = [select_envs(rollout, slice(i * E, (i + 1) * E)) for i in range(3)]
    rewards = [part.rewards for part in parts]
    assert not torch.equal(rewards[0], rewards[1])
    assert not torch.equal(rewards[1], rewards[2])
    for one, following in itertools.pairwise(parts):
        ours, theirs = dict(columns_of(one)), dict(columns_of(following))
        for name, column in ours.items():
            if name.startswith(("obs", "states")):
                assert torch.equal(column[T], theirs[name][0]), name


def test_a_batch_is_not_overwritten_by_the_next() -> None:
    """The learner may keep what it got."""
    actors, model = make_actors()
    publish(actors, model, 1)
    first = gather(actors, 1).rollout
    kept = {name: column.clone() for name, column in columns_of(first)}
    gather(actors, 4)
    for name, column in columns_of(first):
        assert torch.equal(column, kept[name]), name


def batches(actors: SequentialDistributedActors, count: int) -> list[Rollout]:
    """So many batches of three rollouts."""
    return [gather(actors, 3).rollout for _ in range(count)]


@every_kind
def test_a_run_goes_on_where_its_state_says(kind: str) -> None:
    """To the bit, in the middle of a round, and with weights older than those of the learner."""
    first, model = make_actors(kind)
    for version in (4, 5):
        publish(first, model, version)
        batches(first, 1)
    assert first.counts.made == 6 * T * E
    gather(first, 1)
    set_version(model, 6)
    state = loads(dumps(first.state_dict()))
    expected = batches(first, 3)
    second, other_model = make_actors(kind)
    set_version(other_model, 6)
    second.load_state_dict(state)
    assert second.has_weights
    for ours, theirs in zip(batches(second, 3), expected, strict=True):
        assert_same(ours, theirs)
        assert ours.weights_seq_no is not None
        assert set(ours.weights_seq_no.tolist()) == {5}
    assert second.counts == first.counts
    publish(first, model, 7)
    publish(second, other_model, 7)
    assert_same(*(batches(actors, 1)[0] for actors in (first, second)))
    assert dumps(first.state_dict()) == dumps(second.state_dict())


def test_a_state_before_the_first_weights() -> None:
    """Nothing is published then, and the first rollouts are those of a new run."""
    first, model = make_actors()
    state = loads(dumps(first.state_dict()))
    second, other_model = make_actors()
    second.load_state_dict(state)
    assert not second.has_weights
    for actors, its_model in ((first, model), (second, other_model)):
        publish(actors, its_model, 1)
        assert actors.has_weights
    assert_same(*(batches(actors, 1)[0] for actors in (first, second)))


def test_a_run_that_was_begun_with_processes() -> None:
    """Steps in flight are dropped, environments begin new episodes, with other seeds."""
    actors, model = make_actors()
    publish(actors, model, 4)
    state = {**actors.state_dict(), "collectors": None, "generations": [0, 2]}
    state["counts"] = {"made": 500, "trained": 300, "dropped": 40}
    actors, model = make_actors()
    actors.load_state_dict(state)
    assert actors.counts == StepCounts(500, 300, 200)
    set_version(model, 4)
    make, _ = KINDS["box, discrete"]
    collectors = [reference_collector(vector_of(make), i, (1, 3)[i]) for i in range(A)]
    expected = [collector.collect(model)[0] for collector in collectors]
    gathered = gather(actors, 1)
    assert gathered.episodes.lost == A * E
    seq_nos = torch.full((E,), 4)
    assert_same(gathered.rollout, join_rollouts([replace(expected[0], weights_seq_no=seq_nos)]))
    # The next actor has not begun yet; one that goes on from here begins as it would have.
    state = loads(dumps(actors.state_dict()))
    other, _ = make_actors()
    other.load_state_dict(state)
    for each in (actors, other):
        gathered = gather(each, 1)
        assert gathered.episodes.lost == 0
        assert_same(gathered.rollout, join_rollouts([replace(expected[1], weights_seq_no=seq_nos)]))


def test_steps_of_lost_episodes_are_dropped() -> None:
    """All steps are counted: those learned from, and those that are no transitions."""
    envs = [vector_of(partial(FaultyEnv, how, 3), skips=True) for how in ("lost", "nothing")]
    actors = SequentialDistributedActors(envs, T, SEED_OF)
    make_model = maker_for(envs[0])
    actors.begin(make_model(), make_model)
    actors.publish(0)
    gathered = gather(actors, 2)
    assert gathered.rollout.ignored is not None
    ignored = int(gathered.rollout.ignored.sum())
    assert ignored > 0
    assert not gathered.rollout.ignored[:, E:].any()
    assert gathered.episodes.lost == E
    counts = actors.counts
    assert (counts.made, counts.trained, counts.dropped) == (
        2 * T * E,
        2 * T * E - ignored,
        ignored,
    )
    assert counts.in_flight == 0


def test_environments_are_left_to_their_owner() -> None:
    """Closing actors closes no environment."""
    actors, model = make_actors()
    publish(actors, model, 1)
    gather(actors, 1)
    actors.close()
    actors.close()
    envs: Any = actors._envs
    envs[0].step(np.ones(E, np.int64))
