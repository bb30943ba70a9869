"""Gymnasium's interface of vector environments, and libraries that use it."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from toy_envs import FORKS

from maze_train import SequentialVectorEnv, SubprocVectorEnv
from maze_train.core.errors import EnvError, MazeTrainError, ShapeError
from maze_train.envs.third_party import GymVectorEnv, SimulatorVectorEnv

pytestmark = FORKS
MAKERS = [partial(gymnasium.make, "CartPole-v1", render_mode="rgb_array")] * 3


def other(makers):
    """Return an adapter of Gymnasium's vector environment."""
    return GymVectorEnv(SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP))


def wrapped(makers):
    """Return an adapter of a wrapped vector environment."""
    env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    return GymVectorEnv(VectorWrapper(env))


MAKES = {
    "sequential": SequentialVectorEnv,
    "processes": partial(SubprocVectorEnv, n_workers=2, start_method="fork"),
    "third-party": other,
    "third-party, wrapped": wrapped,
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_vector_env_calls_and_attributes_match_gymnasium(make):
    """Values of all environments in order; one value for all, or one per environment."""
    with make(MAKERS) as env:
        env.reset(seed=42)
        assert env.np_random_seed == 42
        assert env.np_random.random() == np.random.default_rng(42).random()
        assert env.autoreset_mode is AutoresetMode.SAME_STEP
        assert env.get_attr("gravity") == (9.8,) * 3
        env.set_attr("gravity", [1.0, 2.0, 3.0])
        assert env.call("get_wrapper_attr", "gravity") == (1.0, 2.0, 3.0)
        env.set_attr("length", 0.7)
        assert env.get_attr("length") == (0.7,) * 3
        with pytest.raises(AttributeError, match="nope"):
            env.get_attr("nope")
        assert env.render_mode == "rgb_array"
        assert [frame.shape for frame in env.render()] == [(400, 600, 3)] * 3
        with pytest.raises(ShapeError, match="1 values for 3 environments") as caught:
            env.set_attr("gravity", [1.0])
        assert isinstance(caught.value, ValueError)
        with pytest.raises(ValueError, match=r"actions has shape \(2,\), expected \(3,\)"):
            env.step([0, 1])
        env.step_async([0, 1, 0])
        with pytest.raises(EnvError, match=r"call\('render'\) was called between") as caught:
            env.render()
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), AlreadyPendingCallError)
        env.step_wait()
        with pytest.raises(NoAsyncCallError, match="without step_async") as waiting:
            env.step_wait()
        assert isinstance(pickle.loads(pickle.dumps(waiting.value)), EnvError)
    for use in (env.reset, env.render, partial(env.step, [0, 1, 0]), env.step_wait):
        with pytest.raises(ClosedEnvironmentError, match="was called after close"):
            use()


def test_calls_without_single_environments_raise():
    """Calls are not supported, and frames are None without a render mode."""
    inner = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    with GymVectorEnv(inner) as env:
        for use in (partial(env.call, "gravity"), partial(env.set_attr, "gravity", 1.0)):
            with pytest.raises(EnvError, match=r"\('gravity'\): not supported by"):
                use()
        with pytest.warns(UserWarning, match="render"):
            assert env.render() == (None, None)


OF_TEXTS = SimpleNamespace(
    **dict.fromkeys(["observation_space", "single_observation_space"], spaces.Text(3)),
    **dict.fromkeys(["action_space", "single_action_space"], spaces.Discrete(2)),
    name="texts",
    metadata={"autoreset_mode": AutoresetMode.SAME_STEP},
    num_envs=2,
    unwrapped=None,
)
"""Environments whose observation space is not supported."""


@pytest.mark.parametrize(
    ("kind", "source", "settings"),
    [
        (SequentialVectorEnv, [], {}),
        (SequentialVectorEnv, MAKERS, {"autoreset_mode": "Never"}),
        (GymVectorEnv, OF_TEXTS, {}),
        (SimulatorVectorEnv, OF_TEXTS, {}),
    ],
)
def test_failed_vector_env_can_be_closed(kind, source, settings):
    """Old versions of Gymnasium call `close` when the object is deleted."""
    env = kind.__new__(kind)
    with pytest.raises(MazeTrainError):
        env.__init__(source, **settings)
    env.close()


@pytest.mark.filterwarnings("ignore:.*WARN:UserWarning")  # the last frame, an existing directory
def test_gymnasium_records_vector_videos(tmp_path):
    """By Gymnasium's wrapper for vector environments."""
    pytest.importorskip("moviepy")
    rendering = pytest.importorskip("gymnasium.wrappers.vector.rendering")
    if "RecordVideo" not in vars(rendering):
        pytest.skip("needs a newer gymnasium")
    env = rendering.RecordVideo(
        SequentialVectorEnv(MAKERS), str(tmp_path), step_trigger=lambda t: t == 0, video_length=5
    )
    env.reset(seed=0)
    for _ in range(8):
        env.step([0, 1, 0])
    env.close()
    assert len([*tmp_path.glob("*.mp4")]) == 1


@pytest.mark.parametrize("make", ["sequential", "processes"])
def test_replay_loop_stores_gymnasium_transitions(make):
    """Observations before and after each step, with final observations and episode infos."""

    def transitions(env):
        env = gymnasium.wrappers.vector.RecordEpisodeStatistics(env)
        obs, _ = env.reset(seed=0)
        found, lengths = [], []
        for step in range(60):
            following, rewards, terminated, truncated, infos = env.step(np.array([0, 1, step % 2]))
            true_next = following.copy()
            for i in np.flatnonzero(terminated | truncated):
                true_next[i] = infos["final_obs"][i]
                lengths.append(int(infos["episode"]["l"][i]))
            found.append((obs, true_next, rewards, terminated))
            obs = following
        env.close()
        return found, lengths

    found, lengths = transitions(MAKES[make](MAKERS))
    for before, after, rewards, terminated in found:
        assert not (before == after).all(axis=1).any()
        assert rewards.tolist() == [1.0] * 3
        assert terminated.dtype == np.bool_
    assert len(lengths) > 5
    assert sum(lengths) <= 180


def test_skrl_wraps_vector_environments():
    """Which it recognises by their direct base class."""
    assert VectorEnv in SequentialVectorEnv.__bases__
    torch_wrappers = pytest.importorskip("skrl.envs.wrappers.torch")
    env = torch_wrappers.wrap_env(SequentialVectorEnv(MAKERS))
    assert env.reset()[0].shape == (3, 4)


def test_torchrl_wraps_vector_environments():
    """It reads the autoreset mode as an attribute."""
    envs = pytest.importorskip("torchrl.envs")
    rollout = envs.GymWrapper(SequentialVectorEnv(MAKERS)).rollout(20, break_when_any_done=False)
    assert rollout.shape == (3, 20)
    assert (rollout["observation"] != rollout["next", "observation"]).any(-1).all()
