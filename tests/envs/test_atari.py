"""Preprocessing of Atari games matches a slow reference; training wrappers."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from cases import everyday, sweep
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.wrappers import AtariPreprocessing
from toy_envs import CountingEnv, LivesEnv

from maze_train import EnvConfig, EnvFactory, SequentialVectorEnv
from maze_train.collect.episode_pool import RolloutGenerator
from maze_train.core.errors import ConfigError, EnvError
from maze_train.envs.atari import EpisodicLifeWrapper, FireWrapper, SeededGame
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.wrappers import MonitoringWrapper, monitor_of

pytest.importorskip("ale_py")
cv2 = pytest.importorskip("cv2")

TRAINING_ONLY = ["ClipReward", "EpisodicLifeWrapper", "MonitoringWrapper"]


def game(name, **kwargs):
    """Return a factory of a game."""
    return EnvFactory.from_any(f"ALE/{name}-v5", **kwargs)


def preprocessed(name, **kwargs):
    """Return a game with preprocessing only."""
    raw = EnvConfig(id=f"ALE/{name}-v5", preprocessing="none", kwargs={"frameskip": 1, **kwargs})
    return FireWrapper(AtariPreprocessing(SeededGame(EnvFactory(raw)())))


def layers(env):
    """Return the names of the wrappers from the outside in."""
    names = []
    while isinstance(env, gymnasium.Wrapper):
        names.append(type(env).__name__)
        env = env.env
    return names


class SlowReference:
    """Reference preprocessing, frame by frame with the API of the game."""

    def __init__(self, name, stickiness, limit=108_000):
        self.env = gymnasium.make(
            f"ALE/{name}-v5",
            frameskip=1,
            obs_type="grayscale",
            repeat_action_probability=0.0,
            max_num_frames_per_episode=limit,
        )
        self.fire = self.env.unwrapped.get_action_meanings().index("FIRE")
        self.stickiness = stickiness

    def reset(self, seed):
        self.random, _ = seeding.np_random(seed)
        self.env.reset(seed=seed)
        self.last_action = 0
        for _ in range(self.random.integers(1, 31)):
            self.frame(0)
        self.screens = [self.screen(), 0 * self.screen()]
        self.must_fire = False
        self.step(self.fire)
        return self.observe()

    def screen(self):
        return self.env.unwrapped.ale.getScreenGrayscale()

    def observe(self):
        return cv2.resize(np.max(self.screens, axis=0), (84, 84), interpolation=cv2.INTER_AREA)

    def frame(self, action):
        sticks = self.random.random() < self.stickiness
        self.last_action = self.last_action if sticks else action
        return self.env.step(self.last_action)

    def step(self, action):
        if self.must_fire:
            action = self.fire
        lives = self.env.unwrapped.ale.lives()
        total = 0.0
        self.screens[0] = np.max(self.screens, axis=0)  # A step that ends early repeats screens.
        for t in range(4):
            _, reward, terminated, truncated, info = self.frame(action)
            total += reward
            if terminated or truncated:
                break
            if t > 1:
                self.screens[3 - t] = self.screen()
        self.must_fire = info["lives"] < lives
        return self.observe(), total, terminated, truncated, info["lives"]


@pytest.mark.parametrize(
    ("name", "stickiness", "limit"),
    everyday(
        1,
        [("Breakout", 0.25, 108_000), ("Breakout", 0.0, 333), ("SpaceInvaders", 0.5, 202)],
        are_rows=True,
    ),
)
def test_atari_preprocessing_equals_a_slow_reference(name, stickiness, limit):
    """Whole games match the reference: skip, maximum, sticky actions, no-ops, fire, limit."""
    ours = preprocessed(
        name, repeat_action_probability=stickiness, max_num_frames_per_episode=limit
    )
    reference = SlowReference(name, stickiness, limit)
    assert ours.observation_space == spaces.Box(0, 255, (84, 84), np.uint8)
    actions = np.random.default_rng(0).integers(ours.action_space.n, size=2000)
    for seed in (3, 4):
        obs, info = ours.reset(seed=seed)
        np.testing.assert_array_equal(obs, reference.reset(seed))
        assert obs in ours.observation_space
        for action in actions:
            obs, reward, terminated, truncated, info = ours.step(action)
            expected = reference.step(action)
            np.testing.assert_array_equal(obs, expected[0])
            assert (reward, terminated, truncated, info["lives"]) == expected[1:]
            if terminated or truncated:
                break
        assert truncated == (limit < 1000)
        assert terminated != truncated
        if truncated:
            assert info["episode_frame_number"] == limit


@pytest.mark.parametrize(
    ("name", "steps"), everyday(1, [("Assault", 60), ("Qbert", 250)], are_rows=True)
)
def test_atari_game_depends_on_its_seed_only(name, steps):
    """A game depends only on its seed, not on games played before."""

    def play(env, seed):
        screens = [env.reset(seed=seed)[0]]
        rewards = []
        for action in np.random.default_rng(1).integers(env.action_space.n, size=steps):
            obs, reward, terminated, _, _ = env.step(action)
            screens.append(obs)
            rewards.append(reward)
            if terminated:
                break
        return np.stack(screens), rewards

    env = preprocessed(name)
    first = play(env, seed=5)
    play(env, seed=6)
    again = play(env, seed=5)
    other = play(preprocessed(name), seed=5)
    for screens, rewards in (again, other):
        np.testing.assert_array_equal(screens, first[0])
        assert rewards == first[1]
    different = play(env, seed=7)[0]
    assert different.shape != first[0].shape or (different != first[0]).any()


def test_atari_games_without_seed_follow_the_last_seed():
    """Resets without a seed differ from each other and follow from the last seed."""
    env = preprocessed("Breakout")
    frames = []
    for _ in range(2):
        env.reset(seed=1)
        frames.append([env.reset()[1]["episode_frame_number"] for _ in range(8)])
    assert frames[0] == frames[1]
    assert len(set(frames[0])) > 3
    assert min(frames[0]) >= 5
    assert max(frames[0]) <= 34


def test_games_must_be_reset_before_their_first_step():
    """A step before the first reset raises an error."""
    with pytest.raises(ResetNeeded):
        preprocessed("Freeway").step(0)


# -- training and evaluation -----------------------------------------------------------------------


def test_training_adds_training_wrappers_only():
    """Training and evaluation share preprocessing and wrappers; training has additional ones."""
    flip = {"_target_": "toy_envs.AddOne", "amount": 0.0}
    config = EnvConfig(
        id="ALE/Breakout-v5",
        wrappers=[{"_target_": "gymnasium.wrappers.ClipReward", "max_reward": 3.0}],
        training_wrappers=[flip],
    )
    training = EnvFactory(config)
    games = ["FireWrapper", "AtariPreprocessing", "SeededGame"]
    shared = ["ClipReward", "FrameStackObservation", *games]
    assert layers(training()) == ["AddOne", *TRAINING_ONLY, *shared]
    evaluation = training.for_evaluation()
    assert layers(evaluation()) == shared
    assert layers(BoundedEnvFactory(evaluation, 7)()) == ["TimeLimit", *shared]
    assert evaluation().observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
    vector = SequentialVectorEnv([game("SpaceInvaders")])
    assert vector.frame_stack == {"": 4}
    assert vector.monitored
    again = EnvFactory.from_any(evaluation, mode=0)
    assert layers(again()) == shared
    assert evaluation.for_evaluation() == evaluation


def test_lost_life_ends_training_episodes_only():
    """A lost life ends a training episode; the game continues and reports its score at the end."""
    training, evaluation = game("Breakout")(), game("Breakout").for_evaluation()()
    actions = np.random.default_rng(0).integers(4, size=3000).tolist()
    # Training begins a new episode after each life; actions are recorded for the replay.
    monitor = monitor_of(training)
    assert monitor is not None
    done, lives, reports, frames = [], [], [], []
    _, info = training.reset(seed=3)
    for action in actions:
        frames.append(info["episode_frame_number"])
        _, reward, terminated, truncated, info = training.step(action)
        done.append(action)
        assert reward in (0.0, 1.0)
        if (report := monitor.take()) is not None:
            reports.append(report)
            break
        if terminated:
            lives.append(info["lives"])
            _, info = training.reset(seed=99)
            done.append(0)
            assert info["episode_frame_number"] == frames[-1] + 8
    assert terminated
    assert not truncated
    assert lives == [4, 3, 2, 1]
    # Evaluation has one episode with the same score.
    evaluation.reset(seed=3)
    steps = [evaluation.step(action) for action in done]
    assert [step[2] for step in steps] == [False] * (len(done) - 1) + [True]
    assert reports == [(sum(step[1] for step in steps), len(done))]
    assert reports[0][0] > 0.0
    # After the end of the game, a new game begins.
    assert training.reset(seed=12)[1]["lives"] == 5


# -- settings --------------------------------------------------------------------------------------


@sweep(
    "case",
    [
        ({}, (4, 84, 84)),
        ({"id": "ale_py:ALE/Pong-v5"}, (4, 84, 84)),
        ({"id": "PongNoFrameskip-v4", "preprocessing": "atari"}, (4, 84, 84)),
        ({"kwargs": {"obs_type": "rgb"}}, (4, 84, 84)),
        ({"kwargs": {"frameskip": 1}}, (4, 84, 84)),
        ({"kwargs": {"obs_type": "ram"}}, (128,)),
        ({"kwargs": {"obs_type": "grayscale"}}, (210, 160)),
        ({"preprocessing": "none"}, (210, 160, 3)),
    ],
)
def test_only_color_screens_are_preprocessed(case):
    """Only colour screens are preprocessed and get training wrappers."""
    settings, shape = case
    env = EnvFactory(EnvConfig(**{"id": "ALE/Pong-v5", **settings}))()
    assert env.observation_space.shape == shape
    assert ("MonitoringWrapper" in layers(env)) is (shape == (4, 84, 84))
    if settings.get("preprocessing") == "none":
        assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0.25


def make_pong(frameskip=1, **kwargs):
    """Create a game."""
    return gymnasium.make("ALE/Pong-v5", frameskip=frameskip, **kwargs)


def test_atari_time_limit_counts_agent_steps():
    """`max_episode_steps` counts the steps of the agent.

    Games built by custom functions are preprocessed if requested.
    """
    config = EnvConfig(id="ALE/Pong-v5", max_episode_steps=5)
    own = EnvConfig(**OWN, max_episode_steps=5)
    for factory in (EnvFactory(config), EnvFactory(config).for_evaluation(), EnvFactory(own)):
        env = factory()
        assert env.observation_space.shape == (4, 84, 84)
        _, info = env.reset(seed=0)
        first = info["episode_frame_number"]
        steps = [env.step(0) for _ in range(5)]
        assert [step[3] for step in steps] == [False] * 4 + [True]
        assert steps[-1][4]["episode_frame_number"] == first + 20


OWN = {"target": "test_atari.make_pong", "preprocessing": "atari"}


@sweep(
    "case",
    [
        ({"id": "CartPole-v1", "preprocessing": "atari"}, "env.preprocessing = 'atari'.*CartPole"),
        ({**OWN, "target": "toy_envs.CountingEnv"}, "env.preprocessing: expected an Atari game"),
        (
            {"id": "ALE/Pong-v5", "preprocessing": "atari", "kwargs": {"obs_type": "ram"}},
            r"env.kwargs = \{'obs_type': 'ram'\}.*env.preprocessing=none",
        ),
        ({"id": "ALE/Pong-v5", "kwargs": {"frameskip": 4}}, "env.kwargs.frameskip = 4"),
        ({**OWN, "kwargs": {"frameskip": 4}}, "env.kwargs.frameskip = 4"),
        ({**OWN, "kwargs": {"max_episode_steps": 9}}, "innermost wr.*TimeLimit.*max_episode_steps"),
        ({"id": "ALE/Pong-v5", "kwargs": {"continuous": True}}, "requires discrete actions"),
        ({"id": "ALE/Pongg-v5", "preprocessing": "atari"}, "nearest ids: ALE/Pong-v5"),
    ],
)
def test_contradictory_atari_settings_raise(case):
    """Settings that prevent preprocessing raise ConfigError with a remedy."""
    settings, message = case
    with pytest.raises(ConfigError, match=message):
        EnvFactory(EnvConfig(**settings))()


# -- wrappers --------------------------------------------------------------------------------------


def ended(env, steps):
    """Return flags and time of each step, with a reset after each end."""
    env.reset(seed=0)
    seen = []
    for _ in range(steps):
        obs, _, terminated, truncated, _ = env.step(1)
        seen.append((int(obs[1]), terminated, truncated))
        if terminated or truncated:
            seen.append(int(env.reset(seed=len(seen))[0][1]))
    return seen


ON, LOST = (False, False), (True, False)


@sweep(
    "case",
    [
        # Zero lives mean that the game is about to end; gained lives do not end an episode.
        (
            LivesEnv([2, 3, 2, 2, 1, 1, 0, 0], length=7),
            [(1, *ON), (2, *LOST), 3, (4, *LOST), 5, (6, *ON), (7, *LOST), 0],
            [0, 7],
        ),
        # A life lost at the time limit is a termination; the next reset begins a new game.
        (LivesEnv([3, 3, 2], 2, truncate=True), [(1, *ON), (2, True, True), 0], [0, 2]),
        # If the game ends in the reset after a lost life, a new game begins with the new seed.
        (LivesEnv([3, 2, 2], length=2), [(1, *LOST), 0], [0, 1]),
    ],
)
def test_lost_life_ends_the_episode_and_the_game_continues(case):
    """Every lost life but the last ends an episode, and the game continues."""
    env, expected, seeds = case
    steps = sum(type(seen) is tuple for seen in expected)
    assert ended(EpisodicLifeWrapper(env), steps) == expected
    assert env.seeds == seeds


def test_game_that_ends_in_a_reset_is_reported():
    """A game that ends in the reset after a lost life is reported."""

    def game():
        return EpisodicLifeWrapper(MonitoringWrapper(LivesEnv([3, 2, 2], length=2)))

    found = []
    with PooledVectorEnv([game]) as vector:
        vector.reset(seed=0)
        for _ in range(6):
            infos = vector.step([1])[4]
            found += [*infos["final_info"].get("episode", {"l": []})["l"]]
    assert found == [2] * 6


def test_reset_without_lost_life_begins_a_new_game():
    """A reset without a lost life begins a new game, also after a continued game."""
    env = EpisodicLifeWrapper(LivesEnv([3, 3, 2, 2, 2]))
    env.reset(seed=0)
    env.step(0)
    assert env.reset(seed=4)[0].tolist() == [4.0, 0.0]
    env.step(0)
    assert env.step(0)[2]
    assert env.reset(seed=5)[0].tolist() == [4.0, 3.0]
    assert env.reset(seed=6)[0].tolist() == [6.0, 0.0]


def test_environment_without_lives_raises():
    """The wrapper raises an error if infos have no lives."""
    with pytest.raises(EnvError, match=r"'lives' in infos, got \['half', 'options', 't'\]"):
        EpisodicLifeWrapper(CountingEnv()).reset(seed=0)


class Waits:
    """Policy that never presses the fire button."""

    def act(self, observation):
        return 0


class Renamed(gymnasium.ActionWrapper):
    """Wrapper that hides the mapping to actions of the game."""

    def action(self, action):
        return action


@pytest.mark.parametrize("wrapper", [None, "Renamed"])
def test_recorded_actions_include_fire(wrapper):
    """Recorded actions include the fire button pressed after a lost life."""
    wrappers = [] if wrapper is None else [{"_target_": f"{__name__}.{wrapper}"}]
    env = EnvConfig(id="ALE/Breakout-v5", wrappers=wrappers, max_episode_steps=120)
    with RolloutGenerator(env, Waits(), concurrency=2) as generator:
        trajectories = generator.rollout(3)
    pressed = [int(episode.actions.sum()) for episode in trajectories]
    assert all(0 < count < 5 for count in pressed) if wrapper is None else pressed == [0, 0, 0]
