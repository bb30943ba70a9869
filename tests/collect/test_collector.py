from __future__ import annotations

import copy
import random
from functools import partial
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from actor_envs import ACTIONS, ActorEnv, stacked_env
from rollouts_compared import assert_same_rollouts

from maze_train import EnvError, SequentialVectorEnv, SubprocVectorEnv
from maze_train.collect.collector import RolloutCollector, SingleModule
from maze_train.collect.gathering import GatheringCollector
from maze_train.core.errors import SpaceError
from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.types import tree_leaves, tree_map
from maze_train.envs.third_party import GymVectorEnv
from maze_train.learner.ranks import RANKS, OneRank
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.spaces.describe import unflatten_value
from maze_train.spaces.tensors import as_tensors

T, B = 8, 3
PROCESSES = partial(SubprocVectorEnv, n_workers=2, start_method="fork")
VECTORS = [
    SequentialVectorEnv,
    pytest.param(PROCESSES, marks=pytest.mark.slow),
]
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def make_model(env, memory=None):
    """Return a model that acts very differently in different states."""
    config = ModelConfig(hidden_sizes=[8], rnn=memory)
    model = build_actor_critic(config, env.single_observation_space, env.single_action_space, 0)
    with torch.no_grad():
        for param in model.policy.net.parameters():
            param.mul_(30.0)
    return model


def make_collector(env_seed=5, action_seed=7, vector=SequentialVectorEnv, make=ActorEnv):
    """Return a collector on environments that depend on seeds and actions, and a model."""
    env = vector([make] * B)
    return RolloutCollector(env, T, env_seed=env_seed, action_seed=action_seed), make_model(env)


def collected(collector, model, *arguments):
    """Return a copy of a rollout, since the next one reuses its memory, and the episodes."""
    return copy.deepcopy(collector.collect_steps(model, *arguments))


def assert_like(found, expected, rtol=1e-5):
    """Check that two trees are equal within single precision."""
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 10)


class HandLoop:
    """Reference that steps and resets each environment separately."""

    def __init__(self, model, make, env_seed=5, action_seed=7):
        self.model = model
        self.envs = [make() for _ in range(B)]
        self.seeds = [EpisodeSeeds(env_seed, i, B) for i in range(B)]
        self.generator = torch.Generator().manual_seed(action_seed)
        self.obs = [
            env.reset(seed=s.next())[0] for env, s in zip(self.envs, self.seeds, strict=True)
        ]

    def collect(self):
        """Return rows of (observation, action, reward, flags), and the final observations."""
        model, rows, finals = self.model, [], {}
        noise = model.distribution.draw_noise((T, B), self.generator)
        for t in range(T):
            for i, env in enumerate(self.envs):
                arrays = tree_map(lambda x: np.asarray(x)[None], self.obs[i])
                obs = as_tensors(env.observation_space, arrays)
                with torch.no_grad():
                    params = model.policy_params(obs)
                    action = model.distribution.sample(params, noise[t, i : i + 1])
                    sent = tree_map(lambda x: x[0].numpy(), model.distribution.to_env(action))
                following, reward, terminated, truncated, _ = env.step(
                    unflatten_value(env.action_space, sent)
                )
                rows.append((t, i, self.obs[i], action, reward, terminated, truncated))
                if terminated or truncated:
                    if not terminated:
                        finals[t * B + i] = following
                    following, _ = env.reset(seed=self.seeds[i].next())
                self.obs[i] = following
        return rows, finals


@pytest.mark.parametrize(
    "make",
    [
        *(partial(ActorEnv, obs, actions) for obs in ("box", "dict") for actions in ACTIONS),
        *(partial(stacked_env, actions) for actions in ("discrete", "dict")),
    ],
)
def test_rollouts_equal_a_loop(make):
    """Rollouts match stepping each environment separately."""
    collector, model = make_collector(make=make)
    hand = HandLoop(model, make)
    seen = set()
    for _ in range(3):
        rollouts, _ = collector.collect(model)
        assert list(rollouts) == ["default"], "the id of the only module"
        rollout = rollouts["default"]
        rows, finals = hand.collect()
        stored = rollout.obs
        for t, i, obs, action, reward, terminated, truncated in rows:
            assert_like(tree_map(lambda x, t=t, i=i: x[t, i], stored), obs)
            ours = tree_map(lambda x, t=t, i=i: x[t, i], rollout.actions)
            assert_like(ours, tree_map(lambda x: x[0], action), 1e-4)
            assert_like(rollout.rewards[t, i], reward, 1e-4)
            assert bool(rollout.terminated[t, i]) == terminated
            assert bool(rollout.truncated[t, i]) == (truncated and not terminated)
            seen.add((terminated, truncated))
        for i, obs in enumerate(hand.obs):
            assert_like(tree_map(lambda x, i=i: x[T, i], stored), obs)
        assert rollout.final_positions.tolist() == sorted(finals)
        for k, position in enumerate(rollout.final_positions.tolist()):
            assert_like(tree_map(lambda x, k=k: x[k], rollout.final_obs), finals[position])
    assert seen == {(False, False), (True, False), (False, True), (True, True)}


@pytest.mark.parametrize("keeps_terminal", [False, True])
def test_terminal_observations_are_kept_on_request(keeps_terminal):
    """If both flags are set, termination wins; terminal observations are kept only on request."""
    for ends, kept in ((("both",), 0), (("terminated",), 0), (("truncated",), None)):
        kept = None if keeps_terminal else kept
        collector, model = make_collector(make=partial(ActorEnv, ends=ends))
        collector.keeps_terminal_obs = keeps_terminal
        rollout, _ = collector.collect_steps(model)
        ended = int((rollout.terminated | rollout.truncated).sum())
        assert ended > 3
        assert len(rollout.final_positions) == (ended if kept is None else kept)
    flags = rollout.truncated.flatten()[rollout.final_positions]
    assert bool(flags.all())
    following = rollout.obs[1:].flatten(0, 1)[rollout.final_positions]
    assert bool((rollout.final_obs[:, 1] > 0).all()), "the last observation of the old episode"
    assert not following[:, 1].any(), "the first observation of the new one"


def test_collecting_leaves_global_generators_alone():
    """The random numbers of actions come from the collector's generator."""
    collector, model = make_collector()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    collector.collect_steps(model)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.slow
@pytest.mark.parametrize("make", [ActorEnv, partial(ActorEnv, "dict", "dict")])
def test_rollouts_are_identical_in_workers(make):
    """Worker processes return the rollouts of one process, bit for bit."""
    sequential, model = make_collector(make=make)
    processes, _ = make_collector(make=make, vector=PROCESSES)
    try:
        for _ in range(2):
            ours, theirs = (c.collect_steps(model)[0] for c in (sequential, processes))
            assert_same_rollouts(ours, theirs)
    finally:
        processes.env.close()


def test_the_environment_gets_clipped_actions_and_storage_keeps_the_sample():
    """The environment gets clipped actions; the rollout stores the unclipped sample."""
    collector, model = make_collector(make=partial(ActorEnv, actions="box"))
    rollout, _ = collector.collect_steps(model)
    outside = (rollout.actions < -0.5) | (rollout.actions > 0.25)
    assert 0.2 < float(outside.float().mean()) < 1.0
    sent = rollout.actions.clamp(torch.tensor(-0.5), torch.tensor(0.25)).sum(-1)
    goes_on = ~(rollout.terminated | rollout.truncated)
    torch.testing.assert_close(rollout.obs[1:, :, 2][goes_on], sent[goes_on])


@pytest.mark.parametrize("fresh", [True, False])
def test_restored_collectors_continue(fresh):
    """A restored collector continues bit-for-bit identically."""
    first, model = make_collector()
    for _ in range(3):
        first.collect_steps(model)
    assert first.episodes.lengths.any()
    state = first.state_dict()
    second, _ = make_collector(env_seed=6)
    if not fresh:
        second.collect_steps(model)
    assert not second.load_state_dict(state).any()
    for _ in range(3):
        (rollout, finished), (expected, expected_finished) = (
            collector.collect_steps(model) for collector in (second, first)
        )
        assert_same_rollouts(rollout, expected)
        assert finished == expected_finished


class Forgetful(ActorEnv):
    """Environment, one in three of which has different observations in each instance."""

    built: ClassVar[int] = 0

    def __init__(self, **settings):
        super().__init__(**settings)
        Forgetful.built += 1
        self.offset = Forgetful.built if Forgetful.built % B == 0 else 0

    def observe(self, *args):
        return super().observe(*args) + self.offset


class NotedTurns(SingleModule):
    """Turns that store which episodes were aborted."""

    def load_state_dict(self, state, lost):
        """Store `lost`."""
        self.lost = lost.tolist()


class TwoProcesses(OneRank):
    """Two processes with equal values."""

    count = 2

    def gather(self, value):
        """Return the value of each process."""
        return [value, value]


def test_unrestorable_episodes_raise_unless_allowed():
    """Loss of episodes on restore raises an error unless allowed; then only these are reset.

    The recurrent state and the turns of lost episodes are reset; others continue.
    """
    env = SequentialVectorEnv([Forgetful] * B)
    model = make_model(env, RecurrentConfig(cell="gru", size=4))
    first = RolloutCollector(env, T, env_seed=5, action_seed=7)
    first.collect_steps(model)
    first.episodes.returns[:] = 100.0
    state = {**first.state_dict(), "memory": torch.ones(B, 4)}
    again = SequentialVectorEnv([Forgetful] * B)
    with pytest.raises(EnvError, match=r"environment 2 .*checkpoint\.allow_new_episodes"):
        RolloutCollector(again, T, env_seed=5, action_seed=7).load_state_dict(state)
    second = RolloutCollector(again, T, env_seed=5, action_seed=7, allow_new_episodes=True)
    second.turns, both = NotedTurns(), GatheringCollector(TwoProcesses(), second)
    both.turns = NotedTurns()
    aborted = both.load_state_dict({RANKS: [state] * 2})
    assert aborted.tolist() == both.turns.lost == [False, False, True] * 2
    assert second.turns.lost == [False, False, True]
    assert second.episodes.returns.tolist() == [100.0, 100.0, 0.0]
    rollout, _ = second.collect_steps(model)
    assert torch.equal(rollout.hidden_states[0, :2], state["memory"][:2])
    assert not rollout.hidden_states[0, 2].any()


def test_third_party_vector_envs_begin_new_episodes():
    """If allowed, third-party vector environments begin new episodes, the same at each restore."""

    def make(allowed):
        env = GymVectorEnv(gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"))
        return RolloutCollector(
            env, T, env_seed=5, action_seed=7, allow_new_episodes=allowed
        ), make_model(env)

    first, model = make(True)
    beginning = first.collect_steps(model)[0].obs[0].clone()
    state = first.state_dict()
    with pytest.raises(EnvError, match=r"were not saved.*checkpoint\.allow_new_episodes=true"):
        make(False)[0].load_state_dict(state)
    seen = []
    for _ in range(2):
        second, _ = make(True)
        assert second.load_state_dict(state).all()
        seen.append(second.collect_steps(model)[0].obs[0].clone())
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], beginning)


def test_overlap_is_called_in_the_last_step():
    """`overlap` is called once per rollout, between sending and receiving the last step."""
    collector, model = make_collector()
    env, calls = collector.env, []
    step_async, receive = env.step_async, env.receive
    env.step_async = lambda actions: (calls.append("step_async"), step_async(actions))
    env.receive = lambda: (calls.append("receive"), receive())[1]
    for _ in range(2):
        calls.clear()
        collector.collect_steps(model, overlap=lambda: calls.append("overlap"))
        steps = ["step_async", "receive"] * T
        assert calls == [*steps[:-1], "overlap", "receive"]


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("memory", [None, RecurrentConfig(cell="gru", size=4)])
def test_overlapping_updates_affect_the_next_rollout_only(vector, memory):
    """Learning during collection affects only the next rollout."""

    def rollouts(learn_meanwhile):
        env = vector([ActorEnv] * B)
        model = make_model(env, memory)
        collector = RolloutCollector(env, T, env_seed=5, action_seed=7)

        def learn():
            assert torch.is_grad_enabled()
            loss = sum(param.square().sum() for param in model.parameters())
            loss.backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(param.grad, alpha=5.0)

        found = []
        with env:
            for _ in range(3):
                found.append(collected(collector, model, learn if learn_meanwhile else None))
                assert torch.is_grad_enabled()
                if not learn_meanwhile:
                    learn()
        return found

    ours, theirs = rollouts(True), rollouts(False)
    for (a, finished), (b, expected) in zip(ours, theirs, strict=True):
        assert_same_rollouts(a, b)
        assert finished == expected


def test_on_step_exceptions_end_the_rollout():
    """`on_step` is called at each step; its exceptions end the rollout."""
    made = []

    def on_step(batch):
        made.append(batch.rewards.sum())
        if len(made) == T + 3:
            raise ArithmeticError("enough")

    env = SequentialVectorEnv([ActorEnv] * B)
    collector = RolloutCollector(env, T, env_seed=5, action_seed=7, on_step=on_step)
    model = make_model(env)
    collector.collect_steps(model)
    assert len(made) == T
    with pytest.raises(ArithmeticError, match="enough"):
        collector.collect_steps(model)
    assert len(made) == T + 3
    env.close()


@pytest.mark.parametrize("vector", VECTORS)
def test_overlap_exceptions_propagate(vector):
    """Exceptions of `overlap` propagate; the environments can be closed afterwards."""
    collector, model = make_collector(vector=vector)

    def fail():
        raise ArithmeticError("the loss is nan")

    collector.collect_steps(model)
    with pytest.raises(ArithmeticError, match="the loss is nan"):
        collector.collect_steps(model, overlap=fail)
    with pytest.raises(EnvError, match=r"step_async\(\) was called between step_async"):
        collector.collect_steps(model)
    collector.env.close()


class Clock(gymnasium.Env):
    """Environment whose observation counts seconds next to a constant entry."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, dtype, start, nested):
        box = gymnasium.spaces.Box(0, 2**40, (2,), dtype)
        self.dtype, self.start, self.nested = dtype, start, nested
        self.observation_space = gymnasium.spaces.Dict({"clock": box}) if nested else box

    def observe(self):
        obs = np.array([self.start, self.start + self.now], self.dtype)
        return {"clock": obs} if self.nested else obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return self.observe(), {}

    def step(self, action):
        self.now += 1
        return self.observe(), 0.0, False, False, {}


@pytest.mark.parametrize("nested", [False, True])
def test_floats_beyond_float32_precision_raise(nested):
    """Floats whose changes are lost in float32 raise SpaceError; integers and small floats pass."""

    def collect(dtype, start):
        env = SequentialVectorEnv([partial(Clock, dtype, start, nested)])
        model = build_actor_critic(
            ModelConfig(), env.single_observation_space, env.single_action_space, 0
        )
        RolloutCollector(env, 8, env_seed=0, action_seed=0).collect(model)

    problem = r"entry \[1\] of the observation.* about 1700000008 and changes by 8, .* is 128"
    with pytest.raises(SpaceError, match=problem):
        collect(np.float64, 1_700_000_000)
    collect(np.int64, 1_700_000_000)
    collect(np.float64, 100_000)
