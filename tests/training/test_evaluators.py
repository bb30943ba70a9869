from __future__ import annotations

import os
import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from called_envs import KeptLevelEnv, LevelEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from own_envs import Curriculum
from practice import (
    GreedyConstructor,
    GreedyOfGlobals,
    ScriptedEvaluator,
    ShortOrLongEnv,
    make_model,
    make_ppo,
    seed_globals,
    vector,
)
from short_runs import short_run

from benchmarks.tensor_cartpole import TensorCartPole
from maze_train.collect.fixed_policies import RandomPolicy
from maze_train.core.errors import ConfigError
from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.state_files import dumps, loads
from maze_train.distributions.mapping import distribution_for
from maze_train.envs.calls import EnvCall
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.third_party import GymVectorEnv, SimulatorVectorEnv
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig, RecurrentConfig
from maze_train.simulators.tensors import TensorSimulator
from maze_train.training.evaluators import (
    CustomEvaluator,
    Evaluator,
    MultiEvaluator,
    RolloutEvaluator,
)
from maze_train.workers.process_pool import LocalProcesses

N, SEED = 10, 21


def played_by_hand(model, n=N):
    """Return returns and lengths of episodes 0 to n - 1, played one by one with greedy actions."""
    seeds, env = EpisodeSeeds(SEED, 0, 1), ShortOrLongEnv()
    returns, lengths = [], []
    for _ in range(n):
        obs, _ = env.reset(seed=seeds.next())
        returns.append(0.0)
        lengths.append(0)
        ended = False
        while not ended:
            with torch.no_grad():
                action = int(model.policy_params(torch.from_numpy(obs)[None]).argmax())
            obs, reward, ended, _, _ = env.step(action)
            returns[-1] += reward
            lengths[-1] += 1
    return np.array(returns), np.array(lengths)


def evaluate(model, concurrency=1, n=N, **settings):
    """Return the metrics of one evaluation."""
    make_env = partial(vector, ShortOrLongEnv)
    evaluator = RolloutEvaluator(make_env, n, concurrency=concurrency, seed=SEED, **settings)
    return evaluator.evaluate(model)


@pytest.mark.parametrize("deterministic", [True, False])
def test_random_policies_are_evaluated(deterministic):
    """Actions are random in both modes, and equal for equal seeds."""
    env = ShortOrLongEnv()
    policy = RandomPolicy(distribution_for(env.action_space), env.action_space)
    metrics = [evaluate(policy, deterministic=deterministic) for _ in range(2)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["eval/episode_return_std"] > 0


@pytest.mark.parametrize("concurrency", [1, 3, 10, 50])
def test_evaluation_plays_exactly_n_episodes(concurrency):
    """Trap 58: episodes 0 to n - 1 are played, so short episodes are not over-represented."""
    model = make_model()
    returns, lengths = played_by_hand(model)
    assert len(set(returns)) > 4
    assert {1, 12} == set(lengths.tolist())
    metrics = evaluate(model, concurrency, prefix="hard")
    expected = {
        "hard/episode_return_mean": returns.mean(),
        "hard/episode_return_std": returns.std(),
        "hard/episode_return_min": returns.min(),
        "hard/episode_return_max": returns.max(),
        "hard/episode_length_mean": lengths.mean(),
        "hard/episodes": N,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluations_of_a_policy_are_identical(deterministic):
    """Each evaluation plays the same episodes with the same random numbers."""
    evaluator = RolloutEvaluator(
        partial(vector, ShortOrLongEnv), N, concurrency=3, seed=SEED, deterministic=deterministic
    )
    model = make_model()
    first = evaluator.evaluate(model)
    torch.manual_seed(5)
    assert evaluator.evaluate(model) == first
    assert evaluator.evaluate(make_model(seed=3)) != first
    assert evaluator.evaluate(model) == first
    other = RolloutEvaluator(partial(vector, ShortOrLongEnv), N, seed=SEED + 1)
    assert other.evaluate(model) != first


def test_nondeterministic_evaluation_samples_actions():
    """Without `deterministic`, a uniform policy takes all actions."""
    model = make_model()
    with torch.no_grad():
        for param in model.policy.parameters():
            param.zero_()
    fixed = evaluate(model)
    sampled = evaluate(model, deterministic=False)
    assert fixed["eval/episode_return_mean"] == fixed["eval/episode_length_mean"]
    rewards = sampled["eval/episode_return_mean"] / sampled["eval/episode_length_mean"]
    assert 1.1 < rewards < 1.4


def test_evaluation_reuses_environments(monkeypatch):
    """Environments are reused by later evaluations and closed once."""
    made = []
    evaluator = RolloutEvaluator(
        lambda n: made.append(vector(ShortOrLongEnv, n)) or made[-1], 3, concurrency=8, seed=SEED
    )
    assert made == []
    for _ in range(2):
        evaluator.evaluate(make_model())
    assert [env.num_envs for env in made] == [3]
    closed = []
    monkeypatch.setattr(made[0], "close", lambda: closed.append(1))
    evaluator.close()
    evaluator.close()
    assert closed == [1]


class CountedEnv(ShortOrLongEnv):
    """Environment that counts its resets and steps."""

    resets = steps = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        return super().step(action)


def paused(env, n, place=None):
    """Return n environments as in a run, which are paused at the end of their episodes."""
    return PooledVectorEnv([env] * n, place, autoreset=False, copy=False, step_infos=False)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("concurrency", [1, 4, 10])
def test_environments_are_reset_once_per_episode(concurrency, deterministic, recurrent):
    """They are not stepped after their last episode; metrics equal those with autoreset."""
    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(size=4) if recurrent else None)
    model = build_actor_critic(
        config, ShortOrLongEnv.observation_space, ShortOrLongEnv.action_space, 0
    )
    settings = {"concurrency": concurrency, "seed": SEED, "deterministic": deterministic}
    expected = RolloutEvaluator(partial(vector, CountedEnv), N, **settings).evaluate(model)
    made = []
    make_env = lambda n: made.append(paused(CountedEnv, n)) or made[0]  # noqa: E731
    evaluator = RolloutEvaluator(make_env, N, **settings)
    for count in (1, 2):
        assert evaluator.evaluate(model) == expected
        envs = made[0].envs
        assert sum(env.resets for env in envs) == count * N
        steps = count * N * expected["eval/episode_length_mean"]
        assert sum(env.steps for env in envs) == pytest.approx(steps)


class ForgetfulEnv(ShortOrLongEnv):
    """Environment whose observations depend on the process."""

    def observe(self):
        return np.array([os.getpid() % 1000, self.t / 10], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("env", [ShortOrLongEnv, ForgetfulEnv])
def test_workers_killed_while_environments_are_paused(env):
    """Metrics are unchanged; if a replay differs, episodes begin anew and all are played."""
    model = make_model()
    n, settings = 6, {"concurrency": 4, "seed": 6}
    expected = RolloutEvaluator(partial(paused, env), n, **settings).evaluate(model)
    for kill_at in range(1, 12, 3):
        place = LocalProcesses(2, start_method="fork", on_worker_failure="restart")
        evaluator = RolloutEvaluator(partial(paused, env, place=place), n, **settings)
        calls = []

        def kill(count, evaluator=evaluator, kill_at=kill_at, calls=calls):
            calls.append(count)
            if len(calls) == kill_at:
                process = evaluator._env._pool.processes[kill_at % 2]
                process.kill()
                process.join()

        evaluator.on_step = kill
        found = evaluator.evaluate(model)
        assert evaluator._env.worker_restarts >= 1
        if env is ShortOrLongEnv:
            assert found == expected
        assert found["eval/episodes"] == n
        evaluator.close()


def test_reset_steps_do_not_count_in_episode_lengths():
    """Reset steps of vector environments are not counted in episode lengths."""

    class FiveSteps(ShortOrLongEnv):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.length = 5
            return self.observe(), {}

    for mode in AutoresetMode:
        env = GymVectorEnv(SyncVectorEnv([FiveSteps] * 2, autoreset_mode=mode))
        evaluator = RolloutEvaluator(lambda n, env=env: env, N, concurrency=2)
        assert evaluator.evaluate(make_model())["eval/episode_length_mean"] == 5.0


@pytest.mark.parametrize("mode", AutoresetMode)
def test_evaluation_resets_recurrent_states(mode):
    """The recurrent state is reset at the start of each episode."""

    class Alike(ShortOrLongEnv):
        action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

        def reset(self, *, seed=None, options=None):
            self.t, self.length = 0, 4
            return self.observe(), {}

        def observe(self):
            return np.array([1.0, self.t], np.float32)

        def step(self, action):
            return super().step(action[0])

    config = ModelConfig(hidden_sizes=[8], rnn=RecurrentConfig(size=4))
    model = build_actor_critic(config, Alike.observation_space, Alike.action_space, 0)
    with torch.no_grad():
        for param in model.policy.parameters():
            param.mul_(30.0)
    env = GymVectorEnv(SyncVectorEnv([Alike] * 2, autoreset_mode=mode))
    metrics = RolloutEvaluator(lambda n: env, N, concurrency=2).evaluate(model)
    assert metrics["eval/episode_return_std"] < 1e-5


def test_policies_are_notified_of_episode_ends():
    """Policies are notified of the end of all episodes, including dropped episodes."""

    class Numbered(torch.nn.Module):
        state_size, distribution = 1, make_model().distribution

        def __init__(self):
            super().__init__()
            self.began, self.running = 0, set()

        def policy_step(self, obs, state):
            for i in (state[:, 0] == 0).nonzero()[:, 0]:
                self.began += 1
                self.running.add(self.began)
                state[i] = self.began
            return torch.zeros(len(state), 3), state

        def end_episodes(self, states):
            self.running -= set(states[:, 0].tolist())

    model = Numbered()
    evaluate(model, concurrency=3)
    assert model.began >= N
    assert not model.running


def test_success_rate_covers_the_counted_episodes():
    """The success rate is over the n episodes; missing if no environment reports success."""
    model = make_model()
    make_env = partial(vector, partial(ShortOrLongEnv, success=True))
    for concurrency in (1, 4):
        evaluator = RolloutEvaluator(make_env, N, concurrency=concurrency, seed=SEED)
        _, lengths = played_by_hand(model)
        expected = (lengths == 12).mean()
        assert evaluator.evaluate(model)["eval/success_rate"] == expected
    assert "eval/success_rate" not in evaluate(model)


class Failing(GreedyOfGlobals):
    """Environment that draws from every global generator and fails."""

    def step(self, action):
        raise RuntimeError("the wheel came off")


@pytest.mark.parametrize("env", [GreedyOfGlobals, Failing])
def test_evaluation_does_not_change_policy_and_generators(env):
    """Trap 59: weights, mode and global generators are unchanged, even after an error."""
    model = make_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    evaluator = RolloutEvaluator(partial(vector, env), N, concurrency=2, seed=SEED)
    seed_globals(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with pytest.raises(Exception, match="wheel") if env is Failing else nullcontext():
        evaluator.evaluate(model)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("env", [ShortOrLongEnv, GreedyOfGlobals, GreedyConstructor])
def test_evaluation_does_not_change_training(env):
    """Trap 59: training metrics and final weights do not depend on evaluation."""
    curves, weights = [], []
    for n in (0, 4):
        evaluator = RolloutEvaluator(partial(vector, env), n, concurrency=2) if n else None
        trainer = make_ppo(env, evaluator=evaluator)
        seed_globals(2)
        trainer.train()
        curves.append(
            [
                {k: v for k, v in row.items() if not k.startswith(("eval/", "time/"))}
                for row in trainer.run.tracker.history
            ]
        )
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert curves[0] == curves[1]
    assert torch.equal(*weights)
    assert len(curves[0]) == 3


class DrawingEvaluator(Evaluator):
    """Evaluator that draws from every global generator, at construction and in evaluations."""

    def __init__(self):
        self.evaluate(None)

    def evaluate(self, policy):
        return {"own/noise": random.random() + np.random.rand() + torch.rand(1).item()}  # noqa: NPY002


def test_custom_evaluators_do_not_change_training(tmp_path):
    """Custom evaluators may use the global generators without affecting training."""
    with_own = {"evaluation.evaluators": [DrawingEvaluator]}
    plain, own = (
        [
            {k: v for k, v in row.items() if not k.startswith(("own/", "time/"))}
            for row in short_run(tmp_path / name, env=GreedyOfGlobals, **settings).history
        ]
        for name, settings in (("plain", {}), ("own", with_own))
    )
    assert plain == own


class Learned:
    """Simulator with state whose rewards are the number of resets."""

    def __init__(self, num_envs):
        self.sim = TensorCartPole(num_envs, "cpu", 5)
        self.resets = 0

    def __getattr__(self, name):
        return getattr(self.sim, name)

    def reset(self, seed=None):
        self.resets += 1
        return self.sim.reset(seed=seed)

    def step(self, actions):
        obs, rewards, *others = self.sim.step(actions)
        return obs, rewards * self.resets, *others

    def state_dict(self):
        return {"resets": self.resets, "sim": self.sim.state_dict()}

    def load_state_dict(self, state):
        self.resets = state["resets"]
        self.sim.load_state_dict(state["sim"])


def learned(num_envs):
    """Return environments of the simulator `Learned`."""
    return SimulatorVectorEnv(TensorSimulator(Learned(num_envs), "learned"))


def staged(place, num_envs):
    """Return environments with a curriculum."""
    return PooledVectorEnv([Curriculum] * num_envs, place, can_be_restored=False)


class Own(RolloutEvaluator):
    """Custom evaluator."""


@pytest.mark.parametrize("evaluator_class", [RolloutEvaluator, Own])
@pytest.mark.parametrize(
    "make_env",
    [
        partial(staged, None),
        partial(staged, LocalProcesses(2, start_method="fork")),
        learned,
    ],
    ids=["one process", "several", "simulator"],
)
def test_evaluator_state_continues_a_curriculum(make_env, evaluator_class):
    """An evaluator with a loaded state continues in the same stage of a curriculum."""
    env = make_env(2)
    spaces_ = env.env_observation_space, env.single_action_space
    model = build_actor_critic(ModelConfig(hidden_sizes=[4]), *spaces_, seed=0)
    env.close()

    def made():
        evaluator = evaluator_class(make_env, 4, concurrency=2, seed=SEED)
        return CustomEvaluator(evaluator, "own", *spaces_) if evaluator_class is Own else evaluator

    one, other = made(), made()
    before = one.state_dict()
    first, second = one.evaluate(model), one.evaluate(model)
    assert first != second
    state = loads(dumps(one.state_dict()))
    third = one.evaluate(model)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.evaluate(model) == third
    other.load_state_dict(before)  # as after an evaluation that was interrupted
    assert other.evaluate(model) == first
    for evaluator in (one, other):
        evaluator.close()


class UnclosableEnv(LevelEnv):
    """Environment that raises an error when closed."""

    def close(self):
        raise ValueError("the window is gone")


@pytest.mark.parametrize("kind", [LevelEnv, KeptLevelEnv, UnclosableEnv])
def test_loaded_evaluator_state_removes_later_calls(kind):
    """Loading a state removes later calls, with and without states of environments.

    Errors of environments that are closed for this are warnings.
    """
    calls = [EnvCall("set_level", [1.0])]
    evaluator = RolloutEvaluator(lambda n: PooledVectorEnv([kind] * n), 1, calls=calls)
    space = LevelEnv().action_space
    policy = RandomPolicy(distribution_for(space), space)
    expected = evaluator.evaluate(policy)
    state = evaluator.state_dict()
    calls.append(EnvCall("set_level", [100.0]))
    evaluator.make_calls()
    assert evaluator.evaluate(policy) != expected
    evaluator.load_state_dict(state)
    calls.pop()
    evaluator.make_calls()
    assert evaluator.evaluate(policy) == expected
    evaluator.close()


@pytest.mark.parametrize(("n", "concurrency"), [(0, 1), (1, 0)])
def test_evaluation_without_episodes_or_environments_raises(n, concurrency):
    """At least one episode and one environment are required."""
    with pytest.raises(ConfigError, match="expected a number >= 1"):
        RolloutEvaluator(partial(vector, ShortOrLongEnv), n, concurrency=concurrency)


def test_evaluators_run_in_order_with_distinct_metrics():
    """Evaluators run in order and are closed; duplicate metric names raise an error."""
    parts = [
        ScriptedEvaluator([1.0, 1.0], "a"),
        ScriptedEvaluator([2.0], "b"),
        ScriptedEvaluator([3.0], "c"),
    ]
    evaluator = MultiEvaluator(parts)
    assert evaluator.evaluate(make_model()) == {"a": 1.0, "b": 2.0, "c": 3.0}
    with pytest.raises(ConfigError, match="two evaluators report a; change one of the prefixes"):
        MultiEvaluator([parts[0], ScriptedEvaluator([3.0], "a")]).evaluate(make_model())
    evaluator.close()
    assert [part.closed for part in parts] == [1, 1, 1]
