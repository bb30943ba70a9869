"""Infos of last steps: copied before the reset, requested keys only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from toy_envs import BACKENDS, FORKS, CountingEnv, workers

from maze_train import EnvConfig, EnvFactory, RolloutEvaluator, SequentialVectorEnv
from maze_train.collect.collector import RolloutCollector
from maze_train.core.targets import InlineObject
from maze_train.envs.batch import numbers_of
from maze_train.envs.third_party import GymVectorEnv
from maze_train.nets.actor_critic import build_actor_critic
from maze_train.nets.config import ModelConfig

pytestmark = FORKS
HUGE = 2**127


def make_model(env: Any) -> Any:
    """Return a small policy."""
    spaces = env.single_observation_space, env.single_action_space
    return build_actor_critic(ModelConfig(hidden_sizes=[4]), *spaces, 0)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"x": 3, "_x": [5.0]}, {"x": 3.0, "_x": 5.0}),
        ({"x": np.ones(1, bool), "_x": np.ones(2)}, {"x": 1.0}),
        ({"x": HUGE, "_x": 10**400, "x/y": 2, 7: 1}, {"x": float(HUGE), "x/y": 2.0}),
        ({"x": "7", "_x": None, "x/y": [[1], [2, 3]]}, {}),
        ({"x": {"y": 4, "_x": 1}}, {"x/y": 4.0}),
        ({"a": {"x": 1}, "b": {"x": 4, "_x": 2}, "c": 5}, {"x": 2.5, "_x": 2.0, "b/x": 4.0}),
    ],
)
def test_info_scalars_are_returned_by_path(info: Any, expected: Any) -> None:
    """Scalars of any size are returned by path; agents are averaged, other values are left out."""
    assert numbers_of(info, ("x", "_x", "x/y", "b/x"), ("a", "b", "c")) == expected


class Reusing(CountingEnv):
    """Environment that reuses the memory of its infos and clears it at reset."""

    def __init__(self, length: int = 3) -> None:
        super().__init__(length)
        self.told: dict[str, Any] = {"is_success": np.zeros(1, bool), "deep": {"count": [0]}}

    def reset(self, **arguments: Any) -> Any:
        self.told["is_success"][:] = False
        self.told["deep"]["count"][0] = self.told["t"] = 0
        return super().reset(**arguments)[0], self.told

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        self.told["is_success"][:] = self.t == self.length
        self.told["deep"]["count"][0] = self.told["t"] = self.t
        return *result, self.told


class ReusedColumns(VectorWrapper):
    """Vector environment that reuses the memory of its infos and clears it at reset."""

    def __init__(self, factories: Any) -> None:
        disabled = AutoresetMode.DISABLED
        super().__init__(SyncVectorEnv(factories, autoreset_mode=disabled))
        self.told: dict[str, Any] = {"is_success": np.zeros(2, bool), "t": np.zeros(2)}

    def reset(self, **arguments: Any) -> Any:
        obs, _ = self.env.reset(**arguments)
        self.told["is_success"][:] = self.told["t"][:] = 0
        return obs, self.told

    def step(self, actions: Any) -> Any:
        *result, infos = self.env.step(actions)
        self.told["is_success"][:], self.told["t"][:] = result[2], infos["t"]
        return *result, self.told


def of_columns(factories: Any, **settings: Any) -> Any:
    """Return third-party environments."""
    return GymVectorEnv(ReusedColumns(factories), **settings)


@pytest.mark.parametrize("info_keys", [None, ["deep/count", "t"]])
@pytest.mark.parametrize("make", [*BACKENDS, of_columns])
def test_infos_are_read_before_the_reset(make: Any, info_keys: Any) -> None:
    """Infos are read before the reset, even if an environment reuses arrays, lists or dicts."""
    expected = {"is_success": 1, "t": 3} | ({"deep/count": 3} if make is not of_columns else {})
    with make([Reusing, Reusing], info_keys=info_keys) as env:
        env.reset(seed=0)
        for _ in range(2):
            env.step([0, 0])
        env.step_async([0, 0])
        ends = env.receive().ends
        assert [end.env for end in ends] == [0, 1]
        for end in ends:
            assert numbers_of(end.info, ("is_success", "deep/count", "t"), ()) == expected
        for _ in range(3):
            infos = env.step([0, 0])[4]
        assert infos["final_info"]["is_success"].all()


class Telling(CountingEnv):
    """Environment whose infos have names used by Gymnasium, its wrappers or this package."""

    def __init__(self) -> None:
        super().__init__(3)
        self.number = 0

    def reset(self, **arguments: Any) -> Any:
        self.number += 1
        return super().reset(**arguments)[0], self.info()

    def info(self) -> dict[Any, Any]:
        taken = {"final_info": 1, "final_obs": 2, "lost": True, "ignored": True, 3: 1.0}
        pairs = {"v": np.zeros(2), "_v": np.ones(2), "w": {"x": 1}, "_w": 4.0, "_final_info": 5}
        return {"episode": self.number, "id": HUGE, "agent_returns": 6, **taken, **pairs}


CLIP = {"_target_": "gymnasium.wrappers.ClipReward", "min_reward": -1, "max_reward": 1}


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("info_keys", [None, ["episode", "id", "_w"]])
def test_info_keys_of_other_packages_do_not_collide(make: Any, info_keys: Any) -> None:
    """Info values belong to their episode, in training and in evaluations."""
    keys = ["episode", "id", "_w"]
    for wrappers in ([], [CLIP]):
        factory = EnvFactory(EnvConfig(target=InlineObject(Telling), training_wrappers=wrappers))
        with make([factory] * 2, info_keys=info_keys) as env:
            collector = RolloutCollector(env, 7, env_seed=0, action_seed=0, info_keys=keys)
            _, episodes = collector.collect_steps(make_model(env))
            assert episodes.infos == {"episode": [1, 1, 2, 2], "id": [HUGE] * 4, "_w": [4.0] * 4}
            assert (episodes.returns, episodes.lost) == ([6.0] * 4, 0)
            evaluator = RolloutEvaluator(lambda _: env, 4, concurrency=2, info_keys=keys)
            metrics = evaluator.evaluate(make_model(env))
            assert metrics["eval/info/episode"] == np.mean([4, 4, 5, 5])
            assert metrics["eval/info/_w"] == 4.0


class Unpicklable(CountingEnv):
    """Environment whose infos have a value that cannot be pickled."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, {**info, "function": lambda: 0}


def test_only_requested_infos_leave_the_worker() -> None:
    """Infos that are not requested are neither copied nor sent."""
    with workers([Unpicklable] * 2, info_keys=["t"]) as env:
        env.reset(seed=0)
        for _ in range(5):
            env.step_async([0, 0])
            report = env.receive()
        assert [end.info for end in report.ends] == [{"t": 5.0}] * 2


def test_record_episode_statistics_works_in_training() -> None:
    """RecordEpisodeStatistics works as a training wrapper, and its values become metrics."""
    statistics = {"_target_": "gymnasium.wrappers.RecordEpisodeStatistics"}
    config = EnvConfig(target=InlineObject(CountingEnv), training_wrappers=[CLIP, statistics])
    env = SequentialVectorEnv([EnvFactory(config)] * 2)
    keys = ["episode/r", "episode/l"]
    collector = RolloutCollector(env, 5, env_seed=0, action_seed=0, info_keys=keys)
    _, episodes = collector.collect_steps(make_model(env))
    assert episodes.infos == {"episode/r": [5.0] * 2, "episode/l": [5.0] * 2}
    assert (episodes.returns, episodes.lengths) == ([15.0] * 2, [5] * 2)
