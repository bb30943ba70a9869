from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from toy_envs import AwkwardEnv, CountingEnv, FailingEnv, NestedEnv, OddInfoEnv

from maze_train import EnvFactory, SequentialVectorEnv
from maze_train.errors import ConfigError, EnvError, ShapeError, SpaceError
from maze_train.seeding import EpisodeSeeds


class Reseeding(gymnasium.Wrapper):
    """Resets with the seeds that our vector environments use, whatever the caller asks for."""

    def __init__(self, env, root, index, num_envs):
        super().__init__(env)
        self.episode_seeds = EpisodeSeeds(root, index, num_envs)

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=self.episode_seeds.next(), options=options)


def assert_same_infos(ours, theirs):
    """Same keys, dtypes and values at every level."""
    assert sorted(ours) == sorted(theirs)
    for key, value in theirs.items():
        if isinstance(value, dict):
            assert_same_infos(ours[key], value)
        else:
            assert ours[key].dtype == value.dtype
            for a, b in zip(ours[key], value, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("step_infos", [False, True])
@pytest.mark.parametrize("env", ["CartPole-v1", CountingEnv])
def test_equals_gymnasium(env, step_infos):
    """Every number and every info is that of gymnasium's SyncVectorEnv in SAME_STEP mode."""
    n, root = 3, 11
    factory = EnvFactory.from_any(env)
    ours = SequentialVectorEnv([factory] * n, step_infos=step_infos)
    makers = [lambda i=i: Reseeding(factory(), root, i, n) for i in range(n)]
    theirs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    np.testing.assert_array_equal(ours.reset(seed=root)[0], theirs.reset(seed=0)[0])
    theirs.action_space.seed(0)
    episodes = 0
    for _ in range(200):
        actions = theirs.action_space.sample()
        *ours_step, ours_infos = ours.step(actions)
        *theirs_step, theirs_infos = theirs.step(actions)
        for a, b in zip(ours_step, theirs_step, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        if not step_infos:
            final = ("final_obs", "_final_obs", "final_info", "_final_info")
            theirs_infos = {k: v for k, v in theirs_infos.items() if k in final}
        assert_same_infos(ours_infos, theirs_infos)
        episodes += int((ours_step[2] | ours_step[3]).sum())
    assert episodes > 5


def test_every_episode_has_its_own_seed():
    """Seeds are those of EpisodeSeeds; no two episodes, and no two runs, share one."""
    seen = []
    for root in (0, 1):
        vector = SequentialVectorEnv([lambda: CountingEnv(2)] * 3)
        vector.reset(seed=root)
        for _ in range(10):
            vector.step(np.zeros(3, np.int64))
        for i, env in enumerate(vector.envs):
            expected = EpisodeSeeds(root, i, 3)
            assert env.seeds == [expected.next() for _ in range(6)]
            seen += env.seeds
    assert len(set(seen)) == len(seen) == 36


def test_reset_without_seed_draws_one():
    """The drawn seed is kept and gives the same episodes again."""
    vector = SequentialVectorEnv([CountingEnv])
    first = vector.reset()[0].copy()
    assert vector.root_seed is not None
    np.testing.assert_array_equal(vector.reset(seed=vector.root_seed)[0], first)
    with pytest.raises(SpaceError, match="seed=-1"):
        vector.reset(seed=-1)


@pytest.mark.parametrize("env_class", [CountingEnv, AwkwardEnv])
@pytest.mark.parametrize("truncate", [False, True])
def test_final_obs_is_the_true_last_observation(env_class, truncate):
    """final_obs is of the last step, obs of the next episode, also from a reused buffer."""
    vector = SequentialVectorEnv([lambda: env_class(2, truncate), lambda: env_class(3, truncate)])
    vector.reset(seed=0)
    seeds = [env.seeds[-1] % 1000 for env in vector.envs]
    vector.step([0, 0])
    obs, rewards, terminated, truncated, infos = vector.step([0, 0])
    assert infos["_final_obs"].tolist() == [True, False]
    assert infos["final_obs"][0].tolist() == [seeds[0], 2.0]
    assert infos["final_obs"][0].dtype == np.float32
    assert infos["final_obs"][1] is None
    assert infos["final_info"]["t"].tolist() == [2, 0]
    assert (truncated if truncate else terminated).tolist() == [True, False]
    assert not (terminated if truncate else truncated).any()
    assert rewards.tolist() == [2.0, 2.0]
    assert obs[:, 1].tolist() == [0.0, 2.0]
    kept = infos["final_obs"][0]
    for _ in range(4):
        vector.step([0, 0])
    assert kept.tolist() == [seeds[0], 2.0]


def test_buffers_and_copies():
    """Observations are one buffer unless copies are asked for; rewards are always copies."""
    for copy in (False, True):
        vector = SequentialVectorEnv([CountingEnv], copy=copy)
        vector.reset(seed=0)
        first = vector.step([0])
        second = vector.step([0])
        assert np.shares_memory(first[0], second[0]) is not copy
        assert bool(first[0][0, 1] == 1.0) is copy
        assert (first[1][0], second[1][0]) == (1.0, 2.0)


def test_nested_spaces():
    """Observations are a flat dict in their own dtypes, and so are actions."""
    vector = SequentialVectorEnv([NestedEnv] * 2)
    assert list(vector.single_observation_space.spaces) == ["image", "robot/0", "robot/1"]
    assert list(vector.observation_space.spaces) == ["image", "robot/0", "robot/1"]
    obs, _ = vector.reset(seed=3)
    assert {key: (part.shape, part.dtype.name) for key, part in obs.items()} == {
        "image": ((2, 3, 4, 1), "uint8"),
        "robot/0": ((2, 2, 2), "float64"),
        "robot/1": ((2,), "int64"),
    }
    force = np.array([[0.5, 0.25], [-1.0, 0.0]])
    for _ in range(7):
        obs, rewards, terminated, _, infos = vector.step({"0": [2, 0], "1/force": force})
        assert rewards.tolist() == [2.75, -1.0]
    assert terminated.all()
    assert sorted(infos["final_obs"][1]) == ["image", "robot/0", "robot/1"]
    assert force[0, 0] == 0.5


def test_wrong_actions():
    """Actions of a wrong shape or kind are refused before anything is stepped."""
    vector = SequentialVectorEnv([CountingEnv] * 2)
    vector.reset(seed=0)
    with pytest.raises(ShapeError, match=r"actions has shape \(2, 1\), expected \(2,\)"):
        vector.step(np.zeros((2, 1), np.int64))
    with pytest.raises(SpaceError, match="float64"):
        vector.step(np.zeros(2))
    nested = SequentialVectorEnv([NestedEnv])
    nested.reset(seed=0)
    with pytest.raises(ShapeError, match=r"actions\['1/force'\]"):
        nested.step({"0": [1], "1/force": np.zeros((1, 3))})
    with pytest.raises(SpaceError, match="1/force"):
        nested.step({"0": [1]})


def test_infos_may_differ_between_environments():
    """A later float is not cut down to an integer, and arrays of different length are kept."""
    vector = SequentialVectorEnv([lambda i=i: OddInfoEnv(i) for i in range(3)])
    vector.reset(seed=0)
    final = vector.step([0, 0, 0])[4]["final_info"]
    assert final["score"].tolist() == [0.0, 0.5, 2.0]
    assert [len(path) for path in final["path"]] == [1, 2, 3]


def test_reset_infos_and_options():
    """Options reach every environment, and the infos of an explicit reset are returned."""
    vector = SequentialVectorEnv([CountingEnv] * 2)
    _, infos = vector.reset(seed=0, options={"level": 2})
    assert list(infos["options"]) == ["{'level': 2}"] * 2


def test_exception_names_environment_seed_and_step():
    """An exception in an environment says where it happened, and keeps its cause."""
    vector = SequentialVectorEnv([CountingEnv, FailingEnv])
    vector.reset(seed=5)
    seed = vector.envs[1].seeds[0]
    for _ in range(2):
        vector.step([0, 0])
    pattern = rf"environment 1 failed at step 3 of the episode with seed {seed}: RuntimeError: the"
    with pytest.raises(EnvError, match=pattern) as caught:
        vector.step([0, 0])
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("observation", "pattern"),
    [
        (np.zeros((1, 2), np.float32), r"shape \(1, 2\), its space says \(2,\)"),
        (np.float32(0.0), r"shape \(\), its space says \(2,\)"),
        (np.array(["a", "b"]), "dtype"),
        (None, "shape"),
    ],
)
def test_invalid_observation(observation, pattern):
    """An observation that does not fit its space is an error, not a broadcast."""
    vector = SequentialVectorEnv([CountingEnv])
    vector.envs[0].observe = lambda: observation
    with pytest.raises(EnvError, match=rf"in the reset of the episode.*{pattern}"):
        vector.reset(seed=0)


def test_invalid_nested_observation():
    """A missing key, and a float image, are named by key."""
    vector = SequentialVectorEnv([NestedEnv])
    image = np.zeros((3, 4, 1), np.uint8)
    vector.envs[0].observe = lambda: {"image": image}
    with pytest.raises(EnvError, match="'robot/0' is missing"):
        vector.reset(seed=0)
    vector.envs[0].observe = lambda: {"image": image / 255.0, "robot": (np.zeros((2, 2)), 1)}
    with pytest.raises(EnvError, match=r"'image' has dtype float64.*uint8"):
        vector.reset(seed=0)


def test_step_before_reset():
    """Stepping before the first reset is refused."""
    with pytest.raises(EnvError, match=r"call reset\(\) first"):
        SequentialVectorEnv([CountingEnv]).step([0])


def test_construction_errors():
    """Factories that raise, differ in spaces or return something else are named by index."""
    with pytest.raises(EnvError, match=r"environment 1 could not be built.*no such level"):
        SequentialVectorEnv([CountingEnv, lambda: FailingEnv("constructor")])
    with pytest.raises(EnvError, match="observation_space of environment 2"):
        SequentialVectorEnv([CountingEnv, CountingEnv, lambda: FailingEnv("spaces")])
    with pytest.raises(EnvError, match=r"expected a gymnasium\.Env"):
        SequentialVectorEnv([lambda: "hello"])
    with pytest.raises(ConfigError, match="at least one"):
        SequentialVectorEnv([])


def test_what_can_not_be_restored_keeps_nothing():
    """No actions of an episode that never ends; there is no state then, but the same numbers."""
    makers = [lambda: CountingEnv(length=10**9)] * 2
    vector = SequentialVectorEnv(makers, can_be_restored=False)
    other = SequentialVectorEnv(makers)
    assert not vector.can_be_restored
    assert other.can_be_restored
    for one in (vector, other):
        one.reset(seed=3)
    for _ in range(2000):
        ours, theirs = vector.step([0, 1]), other.step([0, 1])
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert vector._journal is None
    assert len(other.state_dict()["envs"]) == 2
    with pytest.raises(EnvError, match="can_be_restored=False"):
        vector.state_dict()


def test_close_is_idempotent():
    """Closing twice, and leaving a with block, is fine."""
    with SequentialVectorEnv([CountingEnv]) as vector:
        vector.reset(seed=0)
    assert vector.closed
    vector.close()


def test_torch_is_not_imported():
    """Worker processes start without torch: nothing in these rooms imports it."""
    code = "import sys, maze_train.envs, maze_train.spaces.describe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_one_environment_for_all_is_refused():
    """A factory that always returns the same environment would step it several times a step."""
    env = gymnasium.make("CartPole-v1")
    with pytest.raises(EnvError, match="same environment twice"):
        SequentialVectorEnv([lambda: env, lambda: env])
