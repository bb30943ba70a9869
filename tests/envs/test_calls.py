"""Calls of environments, and their repetition in restored environments."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import pytest
from agent_envs import Heaps
from called_envs import KeptLevelEnv, LevelEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import TimeLimit
from toy_envs import FORKS, assert_equal_steps, here, restarted, workers

from maze_train import ConfigError, PooledVectorEnv
from maze_train.core.errors import EnvError
from maze_train.envs import calls as calls_module
from maze_train.envs.calls import CALL_ENVS, EnvCall, EnvCalls, calls_to_state
from maze_train.envs.slice import EnvSlice
from maze_train.envs.third_party import GymVectorEnv

if TYPE_CHECKING:
    from pathlib import Path

LEVEL_2 = EnvCall("set_level", [2], {"bonus": 0.5})


def sets(name: str, value: Any) -> EnvCall:
    """Return a call that sets an attribute."""
    return EnvCall(name, [value], is_attribute=True)


def test_calls_reach_the_outermost_layer() -> None:
    """Calls reach methods and attributes of the outermost layer that has them."""

    class Outer(gymnasium.Wrapper[Any, Any, Any, Any]):
        volume = 1

        def louder(self) -> None:
            self.volume += 1

    env = Outer(TimeLimit(LevelEnv(), 9))
    for call in (LEVEL_2, sets("size", 4.0), EnvCall("louder"), sets("_max_episode_steps", 7)):
        call.make(env)
    inner: Any = env.unwrapped
    assert (inner.level, inner.size, env.volume) == (2.5, 4.0, 2)
    assert env.env._max_episode_steps == 7
    EnvCall("set_level", only_checks=True).make(env)
    assert inner.level == 2.5


def test_calls_reach_multi_agent_environments() -> None:
    """Calls reach a multi-agent environment through its adapter."""
    env = Heaps().converted()
    sets("possible_agents", ("x",)).make(env)
    assert env.env.possible_agents == ("x",)


def test_environments_get_copies_of_call_arguments() -> None:
    """Each environment gets copies of the arguments in every call."""
    given = [1]
    call = EnvCall("keep", [given]).checked()
    given.append(5)
    envs = [LevelEnv() for _ in range(2)]
    for env in envs:
        call.make(env)
    assert [env.bag for env in envs] == [[1, 1], [1, 1]]
    assert call.args == [[1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (EnvCall("set_levl"), "no such method.*mean set_level.*; it has die, draw_level"),
        (EnvCall("size"), "no such method"),
        (sets("levels", 1), "no such attribute.*level.*size"),
        (EnvCall("draw_level"), "samples from the random generator .* add state_dict"),
    ],
)
def test_invalid_calls_raise(call: EnvCall, message: str) -> None:
    """Wrong calls raise an error with the name of the call and valid names."""
    env = TimeLimit(LevelEnv(), 9)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=f"run.call_envs = '{call.name}': .*({message})"):
        call.make(env, may_draw=False)


def test_unsupported_calls_raise(monkeypatch, capsys) -> None:
    """Reserved names, objects and missing environments are errors; many calls print a warning."""
    calls = EnvCalls()
    with pytest.raises(ConfigError, match="'reset': this method is reserved"):
        calls.add(EnvCall("reset"), evaluate=True)
    with pytest.raises(ConfigError, match=r"'keep': args\[0\] is object"):
        calls.add(EnvCall("keep", [object()]), evaluate=True)
    with pytest.raises(ConfigError, match="'keep': the run has no training environments"):
        calls.add(EnvCall("keep"))
    monkeypatch.setattr(calls_module, "MANY_CALLS", 3)
    for _ in range(5):
        calls.add(EnvCall("keep"), evaluate=True)
        calls.make()
    assert capsys.readouterr().err.count("warning: 3 environment calls so far") == 1
    assert len(calls.training) == len(calls.evaluation) == 5


def test_helper_environments_receive_calls() -> None:
    """Helper environments receive calls, too; calls that fail are removed."""
    calls = EnvCalls()
    with PooledVectorEnv([LevelEnv]) as one, PooledVectorEnv([LevelEnv]) as helper:
        calls.in_training_envs.append(partial(one.make_calls, calls.training))
        calls.in_helpers.append(partial(helper.make_calls, calls.training))
        calls.add(LEVEL_2)
        levels = [lambda env=env: env.envs[0].level for env in (one, helper)]
        assert [level() for level in levels] == [0.0, 0.0]
        calls.make()
        assert [level() for level in levels] == [2.5, 2.5]
        calls.add(sets("size", 3.0))
        calls.add(EnvCall("fail"))
        with pytest.raises(EnvError, match="no such floor"):
            calls.make()
        calls.make()
        assert calls.training == [LEVEL_2]


def test_environments_with_more_calls_raise() -> None:
    """Environments that received more calls than given raise an error."""
    with PooledVectorEnv([LevelEnv]) as env:
        played = EnvSlice.for_playing([LevelEnv])
        for each in (env, played):
            each.make_calls([LEVEL_2, LEVEL_2])
            with pytest.raises(EnvError, match="received 2 calls, but there are only 1"):
                each.make_calls([LEVEL_2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (EnvCall("close"), "reserved for maze_train"),
        (EnvCall("_secret"), "private"),
        (EnvCall("__init__", [3]), "private"),
        (sets("__class__", 1), "private"),
        (EnvCall("env.die"), "without dots"),
        (EnvCall(""), "without dots"),
        (EnvCall("call", ["_secret"]), "give the name itself"),
        (EnvCall("set_wrapper_attr", ["__dict__", {}]), "give the name itself"),
    ],
)
def test_reserved_and_private_call_names_raise(call: EnvCall, message: str) -> None:
    """Reserved and private names are not allowed in callbacks, curricula and checkpoints."""
    key = "curriculum.stages[0].calls"
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} = .*{message}"):
        EnvCalls().add(replace(call, key=key), evaluate=True)
    with PooledVectorEnv([LevelEnv]) as env:
        env.reset(seed=0)
        state = {**env.state_dict(), "calls": calls_to_state([call])}
        with pytest.raises(ConfigError, match=message):
            env.load_state_dict(state)
    assert sets("_max_episode_steps", 7).checked()


def test_damaged_calls_in_states() -> None:
    """Damaged calls in a state raise EnvError with the index of the environment."""
    with PooledVectorEnv([lambda: LevelEnv(99)] * 2) as env, PooledVectorEnv([LevelEnv] * 2) as new:
        env.make_calls([LEVEL_2])
        env.reset(seed=0)
        env.step([0, 0])
        env.make_calls([LEVEL_2] * 2)
        state = env.state_dict()
        call = state["calls"][0]
        for calls in ({}, "", [call], [call] * 3, [call, 3], [call, {"name": "die"}]):
            with pytest.raises(EnvError, match=r"the calls of environment.* damaged"):
                new.load_state_dict({**state, "calls": calls})
        with pytest.raises(EnvError, match="expected a list of calls, each with name, args, kw"):
            new.load_state_dict({key: state[key] for key in ("root_seed", "envs")})
        assert (state["envs"][1]["calls"], state["envs"][1]["calls_at"]) == (1, [1])
        for name, wrong in [
            *(("calls", value) for value in (-1, 2, 1.0, None)),
            *(("calls_at", value) for value in ([2], [-1], [], [1, 1], [0.5], 1, None)),
        ]:
            record = {**state["envs"][1], name: wrong}
            with pytest.raises(EnvError, match="the calls of environment 1 in the state are dam"):
                new.load_state_dict({**state, "envs": [state["envs"][0], record]})


def random_calls(rng: np.random.Generator, *, draws: bool) -> list[EnvCall]:
    """Return random calls, often none."""
    found = [sets("size", rng.random())] if rng.random() < 0.2 else []
    if rng.random() < 0.3:
        found.append(EnvCall("set_level", [int(rng.integers(9))], {"bonus": rng.random()}))
    return [*found, EnvCall("draw_level")] if draws and found else found


@pytest.mark.parametrize("kind", [LevelEnv, KeptLevelEnv])
def test_environments_are_restored_with_their_calls(kind: Any) -> None:
    """Restored environments repeat their calls, made before, within or after an episode."""
    rng, make = np.random.default_rng(3), [lambda: TimeLimit(kind(), 20)] * 3
    calls: list[EnvCall] = []
    env = PooledVectorEnv(make)
    env.make_calls([LEVEL_2])
    calls.append(LEVEL_2)
    env.reset(seed=5)
    for step in range(70):
        calls += random_calls(rng, draws=kind is KeptLevelEnv)
        env.make_calls(calls)
        assert env.calls_made == calls
        if step % 5 == 4:
            state, other = env.state_dict(), PooledVectorEnv(make)
            other.load_state_dict(state)
            assert str(other.state_dict()) == str(state)
            env = other
        actions = rng.integers(2, size=3)
        with PooledVectorEnv(make) as again:
            again.load_state_dict(env.state_dict())
            assert_equal_steps(env.step(actions), again.step(actions))


def test_environments_with_other_calls_are_not_restored() -> None:
    """Environments that received other calls cannot be restored."""
    with PooledVectorEnv([LevelEnv]) as env, PooledVectorEnv([LevelEnv]) as other:
        env.reset(seed=0)
        other.make_calls([LEVEL_2])
        with pytest.raises(EnvError, match="received different calls before"):
            other.load_state_dict(env.state_dict())


def test_new_episodes_begin_with_all_calls() -> None:
    """If a replay fails, the new episode begins with all calls, including later ones."""
    with (
        PooledVectorEnv([lambda: LevelEnv(99)]) as env,
        PooledVectorEnv([lambda: LevelEnv(1)]) as other,
    ):
        env.reset(seed=0)
        for _ in range(9):
            env.step([0])
        env.make_calls([LEVEL_2])
        obs, began = other.load_state_dict(env.state_dict(), allow_new_episodes=True)
        assert began.all()
        assert np.asarray(obs)[0, 0] == 2.5


@pytest.mark.slow
@FORKS
@pytest.mark.parametrize("dies", ["in a step", "in a call", "in a first call", "in a reset"])
def test_restarted_workers_repeat_calls(dies: str, tmp_path: Path) -> None:
    """Results match a single process whenever a worker dies."""
    marker = str(tmp_path / "died") if dies != "in a step" else ""
    rng = np.random.default_rng(1)
    first = [EnvCall("set_level", [3 * (dies == "in a first call")]), sets("size", 0.5)]
    with (
        here([LevelEnv] * 4) as one,
        restarted([LevelEnv] * 3 + [lambda: LevelEnv(5, marker, dies[3:])]) as many,
    ):
        calls = list(first)
        one.make_calls(calls)
        many.make_calls(calls)
        one.reset(seed=2)
        many.reset(seed=2)
        for step in range(40):
            calls += random_calls(rng, draws=False) if step > 3 else []
            one.make_calls(calls)
            many.make_calls(calls)
            if dies == "in a step" and step % 12 == 11:
                many._pool.processes[1].kill()
                many._pool.processes[1].join()
            actions = rng.integers(2, size=4)
            assert_equal_steps(one.step(actions), many.step(actions))
        assert many.worker_restarts == (3 if dies == "in a step" else 1)
        assert str(one.state_dict()) == str(many.state_dict())


@pytest.mark.slow
@FORKS
def test_failing_calls_in_workers_raise() -> None:
    """A wrong name raises an error at once; a repeated error, after a restart."""
    with workers([LevelEnv] * 2) as many, pytest.raises(ConfigError, match=r"'jump': .*it has"):
        many.make_calls([EnvCall("jump")])
    with restarted([LevelEnv] * 2) as many:
        many.reset(seed=0)
        with pytest.raises(EnvError, match="no such floor"):
            many.make_calls([EnvCall("fail")])


def test_environments_are_reset_before_the_first_call() -> None:
    """Before the first call, since methods may use the state of an episode, and only then."""

    class InAnEpisode(LevelEnv):
        def set_level(self, *level: float, bonus: float = 0.0) -> None:
            assert self._np_random is not None

    with PooledVectorEnv([InAnEpisode]) as env:
        env.make_calls([LEVEL_2])
    calls = [LEVEL_2, EnvCall("draw_level"), EnvCall("draw_level")]
    with PooledVectorEnv([KeptLevelEnv]) as at_once, PooledVectorEnv([KeptLevelEnv]) as in_turn:
        at_once.make_calls(calls)
        for number in (1, 2, 3):
            in_turn.make_calls(calls[:number])
        assert at_once.own_states() == in_turn.own_states()


def test_call_error_names_the_environment() -> None:
    """An error of a call names the environment."""
    with PooledVectorEnv([LevelEnv] * 2) as env:
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"environment 0 failed .*ZeroDivisionError: no such"):
            env.make_calls([EnvCall("fail")])
        with pytest.raises(EnvError, match="state of the environments is unknown"):
            env.state_dict()


def test_played_episodes_do_not_depend_on_call_times() -> None:
    """Played episodes do not depend on the time of a call, even if calls draw random numbers."""
    for kind in (LevelEnv, KeptLevelEnv):
        calls = [LEVEL_2, *([EnvCall("draw_level")] if kind is KeptLevelEnv else [])]
        old, new = (EnvSlice.for_playing([kind]) for _ in range(2))
        old.start(0, 4)
        old.step()
        for each in (old, new):
            each.make_calls(calls)
            each.start(0, 9)
        assert old.obs[""].tobytes() == new.obs[""].tobytes()
        assert old.obs[""][0, 0] == pytest.approx(old.envs[0].unwrapped.level) != 0.0


class Fleet(SyncVectorEnv):
    """Vector environment with an additional method."""

    speed = 1.0

    def hurry(self, speed: float) -> None:
        self.speed = speed


@pytest.mark.parametrize("kind", [Fleet, AsyncVectorEnv])
def test_calls_reach_third_party_vector_environments(kind: Any) -> None:
    """Calls reach methods of the vector environment or of its environments."""
    inner = kind([LevelEnv] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    with GymVectorEnv(VectorWrapper(inner)) as env:
        env.make_calls([LEVEL_2, sets("size", 3.0), EnvCall("set_level", only_checks=True)])
        if kind is Fleet:
            env.make_calls([*env.calls_made, EnvCall("hurry", [5.0])])
            assert inner.speed == 5.0
        assert inner.get_attr("size") == (3.0, 3.0)
        obs, _ = env.reset(seed=0)
        assert np.asarray(obs)[:, 0].tolist() == [2.5, 2.5]
        for wrong in (EnvCall("jump"), sets("levels", 1)):
            with pytest.raises(ConfigError, match="no such"):
                env.make_calls([*env.calls_made, wrong])
        if kind is AsyncVectorEnv:  # cannot be closed after an error
            return
        with pytest.raises(EnvError, match=f"{CALL_ENVS}: fail.. of .* failed: .*no such floor"):
            env.make_calls([*env.calls_made, EnvCall("fail")])
