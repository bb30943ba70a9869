"""Episodes from Python: all forms of environments and policies, identical results."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from actor_envs import FailsForSeedEnv
from cases import sweep
from es_problems import RememberingPolicy, UnequalEnv, WalkEnv, bits, closing_env, model_for

from maze_train.collect.episode_pool import RolloutGenerator, model_of, spaces_of_policy
from maze_train.collect.recording import PlaySettings
from maze_train.core.errors import ConfigError, EnvError, WorkerError
from maze_train.envs.config import EnvConfig
from maze_train.training.policy_files import TrainedPolicy


def generated(env, policy="random", n=4, **settings):
    """Return trajectories of the first episodes."""
    with RolloutGenerator(env, policy, **settings) as generator:
        return generator.rollout(n)


def assert_equal(ours, theirs):
    """Check that episodes are identical."""
    assert [one.seed for one in ours] == [one.seed for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.obs, other.obs)
        np.testing.assert_array_equal(one.actions, other.actions)
        np.testing.assert_array_equal(one.rewards, other.rewards)


def cartpole():
    """Return a CartPole environment."""
    return gymnasium.make("CartPole-v1")


def lean(observation):
    """Push the cart to the side where the pole leans."""
    return int(observation[2] > 0)


class Leaning:
    """`lean` as a class."""

    def act(self, observation):
        """Push the cart to the side where the pole leans."""
        return lean(observation)


@sweep("env", [cartpole, EnvConfig(id="CartPole-v1"), "CartPole-v1"])
@sweep("policy", [lean, Leaning, Leaning(), lambda obs: lean(obs)])
def test_all_forms(env, policy):
    """Environments and policies can be a name, a class, an object or a function."""
    found = generated(env, policy)
    assert [one.seed for one in found] == [0, 1, 2, 3]
    assert all(20 <= one.num_steps <= 80 for one in found)
    assert_equal(found, generated("CartPole-v1", lean))


def test_trained_policy_plays_like_its_model():
    """A trained policy acts like its model, deterministic or sampled."""
    model = model_for(WalkEnv, "memory")
    env = WalkEnv()
    trained = TrainedPolicy(model, env.observation_space, env.action_space)
    likely = generated(WalkEnv, model)
    assert_equal(likely, generated(WalkEnv, trained, concurrency=1))
    sampled = generated(WalkEnv, model, deterministic=False)
    assert_equal(sampled, generated(WalkEnv, trained, deterministic=False, concurrency=3))
    assert any(len(a.rewards) != len(b.rewards) for a, b in zip(likely, sampled, strict=True))


def test_an_object_stays_as_it_is():
    """Each environment gets a copy of a policy object."""
    policy = RememberingPolicy()
    policy.seen.append("mine")
    found = generated(WalkEnv, policy)
    assert policy.seen == ["mine"]
    assert_equal(found, generated(WalkEnv, RememberingPolicy, concurrency=1))


def test_consecutive_calls_play_the_next_seeds():
    """Each call plays the next seeds, or the given seeds."""
    with RolloutGenerator(WalkEnv, seed=7) as generator:
        first = generator.rollout(3)
        told = generator.rollout(2, seeds=[3, 8])
        second = generator.rollout(2)
        assert [one.seed for one in (*first, *told, *second)] == [7, 8, 9, 3, 8, 10, 11]
        assert_equal([told[1]], [first[1]])
        assert [episode.seed for episode in generator.play([5, 6])] == [5, 6]
        assert generator.spaces == (WalkEnv().observation_space, WalkEnv().action_space)


def test_wrappers_of_training_are_left_out():
    """Wrappers for training only are not applied."""
    wrapper = {"_target_": "maze_train.envs.wrappers.RewardScalingWrapper", "scale": 10.0}
    plain = generated("CartPole-v1")
    for name, scale in (("wrappers", 10.0), ("training_wrappers", 1.0)):
        config = EnvConfig(id="CartPole-v1", **{name: [wrapper]})
        for one, other in zip(generated(config), plain, strict=True):
            np.testing.assert_array_equal(one.rewards, scale * other.rewards)


def test_invalid_rollout_arguments_raise():
    """Invalid settings, numbers of episodes and seeds raise ConfigError."""
    for settings, words in (
        ({"policy": "rendom"}, r"policy = 'rendom': expected 'random', a model"),
        ({"policy": 3}, r"policy = 3: expected 'random', a model"),
        ({"seed": -1}, "seed"),
        ({"n_workers": -1}, "n_workers"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            RolloutGenerator(WalkEnv, **settings)
    with RolloutGenerator(WalkEnv) as generator:
        for given, words in (
            ((0,), "n_episodes"),
            ((2, [1]), "seeds = .* expected 2 seeds"),
            ((2, [1, -1]), r"^seeds\[1\] = -1: expected an integer >= 0"),
        ):
            with pytest.raises(ConfigError, match=words):
                generator.rollout(*given)
    with (
        RolloutGenerator(WalkEnv, settings=PlaySettings()) as generator,
        pytest.raises(ConfigError, match=r"settings\.record"),
    ):
        generator.rollout(1)
    with pytest.raises(EnvError, match='build the environment with render_mode="rgb_array"'):
        RolloutGenerator(WalkEnv, settings=PlaySettings(record=True, video_dir="none"))


def test_policies_of_other_spaces():
    """If the spaces differ, the error names both; the environments are closed."""
    make, closed = closing_env()
    other = partial(WalkEnv, "box", "box")()
    trained = TrainedPolicy(model_for(WalkEnv), other.observation_space, other.action_space)
    with pytest.raises(ConfigError, match=r"its action_space is Box.*environment has Discrete"):
        RolloutGenerator(make, trained)
    assert len(closed) == 8


def test_spaces_that_policies_tell():
    """Only objects can report spaces; classes and functions do not."""
    env = WalkEnv()
    trained = TrainedPolicy(model_for(WalkEnv), env.observation_space, env.action_space)
    assert spaces_of_policy(trained) == (env.observation_space, env.action_space)
    assert model_of(trained) is trained.model is model_of(trained.model)
    for policy in (lean, Leaning, Leaning(), TrainedPolicy):
        assert spaces_of_policy(policy) == (None, None)
        assert model_of(policy) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_worker_trajectories_are_identical():
    """Trajectories of worker processes are identical; their settings are passed on."""
    model = model_for(WalkEnv)
    for policy in (model, "random", RememberingPolicy()):
        expected = generated(WalkEnv, policy, 9, deterministic=False)
        settings = {"n_workers": 2, "concurrency": 4, "start_method": "fork"}
        assert_equal(generated(WalkEnv, policy, 9, deterministic=False, **settings), expected)
    with (
        RolloutGenerator(
            partial(FailsForSeedEnv, "raise", 2),
            n_workers=2,
            start_method="fork",
            on_worker_failure="restart",
            max_worker_restarts=0,
        ) as generator,
        pytest.raises(WorkerError, match="max_worker_restarts = 0"),
    ):
        generator.rollout(4)
    with RolloutGenerator(UnequalEnv, n_workers=1, start_method="fork") as generator:
        found = [bits(episode) for episode in generator.play(range(3))]
    with RolloutGenerator(UnequalEnv) as generator:
        assert [bits(episode) for episode in generator.play(range(3))] == found
