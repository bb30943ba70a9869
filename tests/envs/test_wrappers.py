"""Wrappers of this package and of Gymnasium, also in vector environments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from cases import sweep
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from toy_envs import BACKENDS, FORKS, AwkwardEnv, CountingEnv, NestedEnv, here

from maze_train import (
    ConfigError,
    EnvConfig,
    EnvFactory,
    PooledVectorEnv,
    SelectEntriesWrapper,
    SpaceError,
)
from maze_train.core.errors import EnvError
from maze_train.envs.factory import BoundedEnvFactory
from maze_train.envs.wrappers import (
    DiscretizeActionsWrapper,
    MonitoringWrapper,
    ObservationStackWrapper,
    RandomResetWrapper,
    RewardScalingWrapper,
)

pytestmark = FORKS

OURS = "maze_train.envs.wrappers."


class MaskedEnv(CountingEnv):
    """Environment that reports legal actions and records the actions taken."""

    def __init__(self, where="obs"):
        super().__init__(length=1000)
        self.where = where
        self.action_space = spaces.Discrete(4)
        parts = {"x": spaces.Box(0.0, 1.0, (1,))}
        if where == "obs":
            parts["action_mask"] = spaces.MultiBinary(4)
        self.observation_space = spaces.Dict(parts)
        self.taken = []

    def info(self):
        mask = np.zeros(4, np.int8)
        mask[[self.t % 4, (self.t + 1) % 4]] = 1
        return {"action_mask": mask}

    def observe(self):
        obs = {"x": self.np_random.random(1, np.float32)}
        return obs | self.info() if self.where == "obs" else obs

    def reward(self, action):
        self.taken.append((self.t - 1, int(action)))
        return 0.0


class TwoParts(CountingEnv):
    """Environment with a bounded, a discrete and an integer action component."""

    SPACE = spaces.Dict(
        {
            "arm": spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float64),
            "deep": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 10, (1, 1), np.int64))),
        }
    )

    def __init__(self, space=SPACE):
        super().__init__()
        self.action_space = space

    def reward(self, action):
        self.taken = action
        return 0.0


def wrapped(env, *nodes, training=True):
    """Return two environments with the wrappers of a configuration."""
    config = EnvConfig(target=env, wrappers=[dict(node) for node in nodes])
    return here([EnvFactory(config, training=training)] * 2)


@pytest.mark.filterwarnings("ignore:.*different from the unwrapped version")
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space")
@pytest.mark.parametrize(
    "wrap",
    [
        MonitoringWrapper,
        lambda env: RewardScalingWrapper(env, 0.5),
        lambda env: RandomResetWrapper(env, 1, 5),
        lambda env: DiscretizeActionsWrapper(env, 5),
        lambda env: ObservationStackWrapper(env, 3),
    ],
)
def test_wrappers_pass_the_gymnasium_checker(wrap):
    """Gymnasium's environment checker passes, and equal seeds give equal episodes."""
    env = wrap(gymnasium.make("Pendulum-v1", disable_env_checker=True))
    check_env(env, skip_render_check=True, skip_close_check=True)
    episodes = []
    for seed in (3, 3, 4):
        obs = [env.reset(seed=seed)[0]]
        env.action_space.seed(0)
        obs += [env.step(env.action_space.sample())[0] for _ in range(5)]
        episodes.append(np.stack(obs))
    np.testing.assert_array_equal(episodes[0], episodes[1])
    assert (episodes[0] != episodes[2]).any()


# -- stacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_class", [CountingEnv, AwkwardEnv])
def test_stack_contains_the_last_observations(env_class):
    """Newest observation last; resets repeat the first observation; reused buffers are copied."""
    env = ObservationStackWrapper(env_class(length=9), 3)
    assert env.observation_space.shape == (3, 2)
    obs, _ = env.reset(seed=7)
    assert obs.dtype == np.float32
    assert obs.tolist() == [[7.0, 0.0]] * 3
    seen = [obs] + [env.step(0)[0] for _ in range(4)]
    assert [o[:, 1].tolist() for o in seen] == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
    ]
    assert env.reset(seed=8)[0].tolist() == [[8.0, 0.0]] * 3


def test_stacks_are_selected_by_key():
    """Stacks are selected by flattened key; by default masks and integers are not stacked."""
    env = ObservationStackWrapper(NestedEnv(), 4, keys=["robot/0"])
    space = env.observation_space
    assert space["robot"][0].shape == (4, 2, 2)
    assert space["robot"][1] == spaces.Discrete(10)
    assert space["image"].shape == (3, 4, 1)
    assert env.metadata["frame_stack"] == {"robot/0": 4}
    obs, _ = env.reset(seed=1)
    assert obs in space
    later = env.step((0, {"force": np.zeros(2)}))[0]
    np.testing.assert_array_equal(later["robot"][0][:-1], obs["robot"][0][1:])
    assert ObservationStackWrapper(NestedEnv(), 4).metadata["frame_stack"] == {
        "image": 4,
        "robot/0": 4,
    }
    masked = MaskedEnv()
    masked.observation_space["action_mask"] = spaces.Box(0, 1, (4,), np.int8)
    assert ObservationStackWrapper(masked, 2).metadata["frame_stack"] == {"x": 2}


@pytest.mark.parametrize("make", BACKENDS)
def test_stacks_in_vector_environments_share_frames(make):
    """Within an episode, older frames are the newer frames of the previous step."""
    node = {"_target_": OURS + "ObservationStackWrapper", "n": 3}
    config = EnvConfig(target="toy_envs.NestedEnv", kwargs={"length": 5}, wrappers=[node])
    with make([EnvFactory(config)] * 2) as vector:
        assert vector.frame_stack == {"image": 3, "robot/0": 3}
        assert vector.monitored is False
        before, _ = vector.reset(seed=0)
        before = {key: column.copy() for key, column in before.items()}
        ends = 0
        for _ in range(12):
            actions = {"0": np.zeros(2, np.int64), "1/force": np.zeros((2, 2), np.float32)}
            obs, _, terminated, _, infos = vector.step(actions)
            for key, n in vector.frame_stack.items():
                assert obs[key].shape[1] == n
                for i in range(2):
                    last = infos["final_obs"][i] if terminated[i] else None
                    reached = obs[key][i] if last is None else last[key]
                    np.testing.assert_array_equal(reached[:-1], before[key][i][1:])
            ends += int(terminated.sum())
            before = {key: column.copy() for key, column in obs.items()}
    assert ends == 4


STACK = {"_target_": OURS + "ObservationStackWrapper", "n": 4}
GYM = "gymnasium.wrappers."


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        ([], {"": 4}),
        ([{"_target_": GYM + "ClipReward", "max_reward": 1.0}], {"": 4}),
        ([{"_target_": "maze_train.MonitoringWrapper"}], {"": 4}),
        ([{"_target_": GYM + "TimeLimit", "max_episode_steps": 3}], {"": 4}),
        ([{"_target_": GYM + "FlattenObservation"}], {}),
        ([{"_target_": "toy_envs.AddOne"}], {}),
        ([{"_target_": GYM + "TransformObservation", "func": abs, "observation_space": None}], {}),
        ([{"_target_": OURS + "ObservationStackWrapper", "n": 2}], {"": 2}),
    ],
)
@pytest.mark.parametrize(
    "stack", [STACK, {"_target_": GYM + "FrameStackObservation", "stack_size": 4}]
)
def test_stacks_behind_other_wrappers_are_reported_if_unchanged(stack, outside, expected):
    """Stacks are reported only if no outer wrapper changes the observations."""
    vector = wrapped("toy_envs.CountingEnv", stack, *outside)
    assert vector.frame_stack == expected


class Screens(CountingEnv):
    """Environment that observes colour images."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)

    def observe(self):
        return np.full((32, 32, 3), self.t, np.uint8)


class OwnNormalizer(gymnasium.wrappers.NormalizeObservation):
    """Subclass of a wrapper with running statistics."""


def normalized(env):
    """Wrap an environment in a function."""
    return gymnasium.wrappers.ClipReward(gymnasium.wrappers.NormalizeReward(env), -1, 1)


STATISTICS = r"keeps separate statistics in each environment.*"
OBSERVATIONS = STATISTICS + "model.normalization.mode=running"
REWARDS = STATISTICS + "algorithm.reward_scaling"


@pytest.mark.parametrize("key", ["wrappers", "training_wrappers"])
@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([{"_target_": GYM + "NormalizeObservation"}], OBSERVATIONS),
        ([{"_target_": GYM + "NormalizeReward"}], REWARDS),
        ([{"_target_": GYM + "vector.NormalizeObservation"}], OBSERVATIONS),
        ([{"_target_": GYM + "vector.NormalizeReward"}], REWARDS),
        ([{"_target_": "test_wrappers.OwnNormalizer"}], OBSERVATIONS),
        ([{"_target_": "test_wrappers.normalized"}], REWARDS),
        ([{"_target_": GYM + "RecordVideo", "video_folder": "videos"}], "overwrite each other"),
        *(
            ([stack, {"_target_": GYM + name, **arguments}], "processes single frames")
            for stack in (STACK, {"_target_": GYM + "FrameStackObservation", "stack_size": 4})
            for name, arguments in (
                ("GrayscaleObservation", {}),
                ("ResizeObservation", {"shape": [8, 8]}),
                ("FrameStackObservation", {"stack_size": 2}),
                ("MaxAndSkipObservation", {}),
            )
        ),
    ],
)
def test_wrappers_with_wrong_results_raise(key, nodes, problem):
    """The error names the entry, and the setting or the order to use instead."""
    config = EnvConfig(target="test_wrappers.Screens", wrappers=nodes[:-1])
    config = replace(config, **{key: [*getattr(config, key), nodes[-1]]})
    number = len(getattr(config, key)) - 1
    with pytest.raises(ConfigError, match=rf"env\.{key}\[{number}\].*: .*{problem}"):
        EnvFactory(config)()


def writing(env, paths):
    """Create files in the constructor of a wrapper."""
    for path in paths["all"]:
        Path(path).touch(exist_ok=False)
    return MonitoringWrapper(env)


def test_wrappers_get_the_environment_index(tmp_path):
    """Each environment of training and evaluation writes its own files."""
    paths = {"all": [f"{tmp_path}/{{env_index}}"]}
    node = {"_target_": "test_wrappers.writing", "paths": paths}
    factory = EnvFactory(EnvConfig(id="CartPole-v1", wrappers=[node]))
    bounded = BoundedEnvFactory(factory.for_evaluation(), 10)
    for factories, first in (([factory] * 2, 3), ([bounded] * 2, 0)):
        PooledVectorEnv(factories, first_env=first).close()
    names = ["eval-0", "eval-1", "train-3", "train-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_declared_stacks_must_match_their_space():
    """Declared stacks are ignored if they do not match the shape of the space."""

    class Boasting(CountingEnv):
        metadata = {"frame_stack": {"": 4, "other": 2}}  # noqa: RUF012

    class Right(CountingEnv):
        metadata = {"frame_stack": {"": 2}}  # noqa: RUF012

    assert here([Boasting]).frame_stack == {}
    assert here([Right]).frame_stack == {"": 2}
    assert here([CountingEnv]).frame_stack == {}


# -- monitoring and rewards ------------------------------------------------------------------------


def test_reported_returns_exclude_training_wrappers():
    """Reported returns and lengths exclude training wrappers, which may scale rewards.

    Gymnasium's RecordEpisodeStatistics may be inside, or outside with a different key.
    """
    node = {"_target_": GYM + "RecordEpisodeStatistics"}
    scale = {"_target_": OURS + "RewardScalingWrapper", "scale": 2.0}
    config = EnvConfig(
        target="toy_envs.CountingEnv",
        kwargs={"length": 3},
        wrappers=[scale, node],
        training_wrappers=[{**scale, "scale": 0.5}, {**node, "stats_key": "scaled"}],
    )
    with here([EnvFactory(config)] * 2) as vector:
        assert vector.monitored is True
        vector.reset(seed=0)
        rewards = []
        for _ in range(6):
            _, reward, terminated, _, infos = vector.step([0, 0])
            rewards.append(reward[0])
            assert ("final_info" in infos) == terminated.any()
        assert rewards == [1.0, 2.0, 3.0] * 2
        final = infos["final_info"]
        assert final["episode"]["r"].tolist() == [12.0, 12.0]
        assert final["episode"]["l"].tolist() == [3, 3]
        assert final["scaled"]["r"].tolist() == [6.0, 6.0]


def test_monitor_counts_truncated_and_reset_episodes():
    """Truncated episodes and episodes ended by a reset are counted; infos are not changed."""
    env = MonitoringWrapper(CountingEnv(length=3, truncate=True))
    assert "episode" not in env.reset(seed=0)[1]
    env.step(0)
    assert env.take() is None
    assert "episode" not in env.reset(seed=0)[1]
    assert env.take() == (1.0, 1)
    infos = [env.step(0)[4] for _ in range(3)]
    assert infos[-1] == {"t": 3, "half": 1.5}
    assert (env.take(), env.take()) == ((6.0, 3), None)
    assert CountingEnv.metadata.get("monitored") is None


def test_episodes_ended_by_training_wrappers_are_reported():
    """Episodes ended by a training wrapper are reported at the step that ended them."""
    limit = {"_target_": "gymnasium.wrappers.TimeLimit", "max_episode_steps": 2}
    config = EnvConfig(
        target="toy_envs.CountingEnv", kwargs={"length": 3}, training_wrappers=[limit]
    )
    with here([EnvFactory(config)]) as vector:
        vector.reset(seed=0)
        vector.step([0])
        for _ in range(2):
            infos = vector.step([0])[4]
            assert infos["final_info"]["episode"]["r"].tolist() == [3.0]
            assert infos["final_info"]["episode"]["l"].tolist() == [2]
            vector.step([0])


# -- random resets ---------------------------------------------------------------------------------


def test_random_reset_takes_a_random_number_of_steps():
    """The number of initial steps covers the range between both bounds and depends on the seed."""
    env = RandomResetWrapper(CountingEnv(length=100), 2, 4)
    steps = [int(env.reset(seed=seed)[0][1]) for seed in range(40)]
    assert set(steps) == {2, 3, 4}
    assert steps == [int(env.reset(seed=seed)[0][1]) for seed in range(40)]
    assert env.step(0)[1] == steps[-1] + 1.0


def test_random_reset_starts_over_when_the_episode_ends():
    """If an episode ends within the initial steps, another begins; 100 in a row raise an error.

    Further seeds follow from the first, also if the environment creates its generator in
    `reset`.
    """
    begun, steps = [], set()
    for _ in range(2):
        env = RandomResetWrapper(CountingEnv(length=3), 0, 4)
        steps |= {int(env.reset(seed=seed)[0][1]) for seed in (*range(40), *[None] * 4)}
        begun.append(env.unwrapped.seeds)
    assert steps == {0, 1, 2}
    assert begun[0] == begun[1]
    further = set(begun[0]) - {*range(40), None}
    assert len(further) == len(begun[0]) - 44 > 5
    with pytest.raises(EnvError, match=r"100 episodes in a row ended.*min_initial_steps"):
        RandomResetWrapper(CountingEnv(length=3), 3, 4).reset()


@pytest.mark.parametrize("where", ["obs", "info"])
def test_random_reset_respects_masks(where):
    """Initial steps take legal actions only and do not use the generator of the action space."""
    env = RandomResetWrapper(MaskedEnv(where), 30, 30)
    env.action_space.seed(5)
    env.reset(seed=0)
    assert all(action in (t % 4, (t + 1) % 4) for t, action in env.unwrapped.taken)
    assert len({(action - t) % 4 for t, action in env.unwrapped.taken}) == 2
    fresh = spaces.Discrete(4, seed=5)
    assert [env.action_space.sample() for _ in range(5)] == [fresh.sample() for _ in range(5)]


# -- discrete actions ------------------------------------------------------------------------------


def test_discretized_parts():
    """Boxes become one choice per value, selected by key; integers are rounded."""
    env = DiscretizeActionsWrapper(TwoParts(), {"arm": 3, "deep/1": 4})
    assert env.action_space["arm"] == spaces.MultiDiscrete([3, 3])
    assert env.action_space["deep"] == spaces.Tuple((spaces.Discrete(2), spaces.Discrete(4)))
    env.reset(seed=0)
    action = {"arm": np.array([2, 1]), "deep": (1, 2)}
    assert action in env.action_space
    env.step(action)
    given = env.unwrapped.taken
    assert given["arm"].tolist() == [1.0, 2.0]
    assert given["deep"][0] == 1
    assert given["deep"][1].tolist() == [[7]]
    assert given in TwoParts.SPACE
    only = DiscretizeActionsWrapper(TwoParts(), {"arm": 2})
    assert only.action_space["deep"] == TwoParts.SPACE["deep"]
    assert DiscretizeActionsWrapper(TwoParts(), 11).action_space["deep"][1] == spaces.Discrete(11)


def test_discretized_matrix_keeps_its_order():
    """Choice k of a matrix is its k-th entry in row-major order; actions are copies."""
    low = np.arange(6.0).reshape(2, 3) - 10.0
    wrapper = DiscretizeActionsWrapper(TwoParts(spaces.Box(low, low + 10.0, dtype=float)), 2)
    assert wrapper.action_space == spaces.MultiDiscrete([2] * 6)
    for _ in range(2):
        action = wrapper.action(np.zeros(6, np.int64))
        assert action.tolist() == low.tolist()
        action[:] = 7.0
    assert wrapper.action(np.array([0, 0, 1, 0, 0, 0]))[0, 2] == low[0, 2] + 10.0


UNBOUNDED = spaces.Dict({"push": spaces.Box(-np.inf, 1.0, (1,))})


@sweep(
    "case",
    [
        (lambda: DiscretizeActionsWrapper(TwoParts(), 1), r"num_bins\[arm\] = 1"),
        (
            lambda: DiscretizeActionsWrapper(TwoParts(), {"leg": 3}),
            r"num_bins = \{'leg': 3\}.*'arm', 'deep/1'",
        ),
        (lambda: DiscretizeActionsWrapper(TwoParts(), {}), "num_bins"),
        (lambda: DiscretizeActionsWrapper(TwoParts(), {"deep/0": 3}), "num_bins"),
        (lambda: DiscretizeActionsWrapper(TwoParts(UNBOUNDED), 3), "'push' is unbounded"),
        (lambda: RandomResetWrapper(CountingEnv(), 2, 1), r"max_initial_steps = 1.*>= 2"),
        (lambda: RewardScalingWrapper(CountingEnv(), 0.0), "scale = 0"),
        (lambda: ObservationStackWrapper(NestedEnv(), 4, ["robot/1"]), r"keys.*'robot/1'.*robot/0"),
        (lambda: ObservationStackWrapper(NestedEnv(), 0), "n = 0"),
        *[
            (lambda i=i: SelectEntriesWrapper(gymnasium.make("CartPole-v1"), i), "from 0 to 3")
            for i in ([], [4], [-1], [0.5])
        ],
        (lambda: SelectEntriesWrapper(gymnasium.make("FrozenLake-v1"), [0]), "vector observations"),
    ],
)
def test_invalid_wrapper_arguments_raise(case):
    """Invalid arguments and spaces raise an error."""
    make, message = case
    with pytest.raises((ConfigError, SpaceError), match=message):
        make()


# -- selected entries ------------------------------------------------------------------------------


def test_selected_entries_keep_their_order():
    """Selected entries keep the given order; values, bounds and dtype match."""
    plain, env = gymnasium.make("CartPole-v1"), gymnasium.make("CartPole-v1")
    selected = SelectEntriesWrapper(env, [2, 0])
    obs, _ = plain.reset(seed=3)
    assert selected.reset(seed=3)[0].tolist() == obs[[2, 0]].tolist()
    assert selected.step(1)[0].tolist() == plain.step(1)[0][[2, 0]].tolist()
    assert np.array_equal(selected.observation_space.high, plain.observation_space.high[[2, 0]])
    assert selected.observation_space.dtype == np.float32
    assert selected.observation_space.contains(obs[[2, 0]])
