from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from maze_train import SequentialVectorEnv
from maze_train.core.errors import ConfigError, EnvError, SpaceError
from maze_train.core.seeding import distinct_seeds
from maze_train.envs.batch import info_of
from maze_train.envs.third_party import GymVectorEnv, autoreset_mode

MODES = list(AutoresetMode)
SAME_STEP, NEXT_STEP, DISABLED = (
    AutoresetMode.SAME_STEP,
    AutoresetMode.NEXT_STEP,
    AutoresetMode.DISABLED,
)
N = 3


def length_of(env: int, episode: int) -> int:
    """Return the number of steps of an episode."""
    return 1 + (3 * env + 5 * episode) % 7


def flags_of(env: int, episode: int) -> tuple[bool, bool]:
    """Return (terminated, truncated): one of them or both."""
    return [(True, False), (False, True), (True, True)][(env + episode) % 3]


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Environment that observes (environment, episode, step); lengths and ends are known."""

    def __init__(self, index: int, nested: bool = False) -> None:
        self.index, self.episode, self.t, self.nested = index, -1, 0, nested
        self.observation_space = spaces.Box(0.0, 1e6, (3,), np.float32)
        self.action_space = spaces.Discrete(3)
        if nested:
            clock = spaces.Dict({"t": spaces.Discrete(10)})
            place = spaces.Box(0.0, 1e6, (2,), np.float32)
            self.observation_space = spaces.Dict({"b": spaces.Tuple((place, clock))})
            force = spaces.Box(0.0, 9.0, (2,), np.float64)
            self.action_space = spaces.Tuple((spaces.Discrete(3), spaces.Dict({"f": force})))

    def observe(self) -> Any:
        obs = np.array([self.index, self.episode, self.t], np.float32)
        return {"b": (obs[:2], {"t": self.t})} if self.nested else obs

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {"seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        number = float(action[0]) + action[1]["f"].sum() if self.nested else float(action)
        reward = number + 10.0 * self.t + 0.5 * self.episode + 100.0 * self.index
        ended = self.t >= length_of(self.index, self.episode)
        terminated, truncated = flags_of(self.index, self.episode)
        info = {"is_success": self.episode % 2 == 0}
        return self.observe(), reward, ended and terminated, ended and truncated, info


class ScriptedVectorEnv(VectorEnv[Any, Any, Any]):
    """Vector of `ScriptedEnv` that behaves like native vector environments.

    Observations may be in one buffer that every call overwrites. `final_obs` is one array with
    invalid values in other rows; rewards and flags of steps that only reset are invalid, too.
    """

    def __init__(self, mode: Any, *, reused: bool = False) -> None:
        makers = [lambda i=i: ScriptedEnv(i) for i in range(N)]
        known = mode if mode in MODES else NEXT_STEP
        self.inner = SyncVectorEnv(makers, autoreset_mode=known)
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = N
        self.single_observation_space = self.inner.single_observation_space
        self.single_action_space = self.inner.single_action_space
        self.mode, self.reused = mode, reused
        self.buffer = np.zeros((N, 3), np.float32)

    @property
    def episode(self) -> Any:
        return np.array([env.episode for env in self.inner.envs])

    @property
    def t(self) -> Any:
        return np.array([env.t for env in self.inner.envs])

    def deliver(self, obs: Any, *rest: Any) -> Any:
        if self.reused:
            self.buffer[:] = obs
            obs = self.buffer
        return (obs, *rest)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        rows = (options or {}).get("reset_mask", np.ones(N, bool))
        obs, _ = self.inner.reset(options=options)
        self.ended = np.zeros(N, bool)
        return self.deliver(np.where(rows[:, None], obs, -7.0).astype(np.float32), {})

    def step(self, actions: Any) -> Any:
        resetting = self.ended if self.mode is NEXT_STEP else np.zeros(N, bool)
        episode = self.episode
        obs, rewards, terminated, truncated, given = self.inner.step(actions)
        self.flags, self.ended = (terminated, truncated), terminated | truncated
        infos: dict[str, Any] = {"is_success": episode % 2 == 0}
        if "final_obs" in given:
            rows = zip(given["final_obs"], self.ended, strict=True)
            infos["final_obs"] = np.stack([row if over else np.full(3, -5.0) for row, over in rows])
        flags = terminated | resetting, truncated | resetting
        return self.deliver(obs, np.where(resetting, 1e9, rewards), *flags, infos)


def flat_row(obs: Any, i: int | None = None) -> tuple[float, ...]:
    """Return one observation as a flat tuple of floats."""
    parts = [obs[key] for key in sorted(obs)] if isinstance(obs, dict) else [obs]
    rows = parts if i is None else [part[i] for part in parts]
    return tuple(float(x) for row in rows for x in np.ravel(row))


def successes_in(infos: Any) -> dict[int, bool]:
    """Return the successes of the ended episodes by index of the environment."""
    final = infos.get("final_info", {})
    return {int(i): final["is_success"][i] for i in np.flatnonzero(final.get("_is_success", []))}


def transitions(vector: Any, steps: int, nested: bool = False) -> list[list[Any]]:
    """Return, per environment: observation, action, reward, flags, next observation, success."""
    obs, _ = vector.reset(seed=0)
    found: list[list[Any]] = [[] for _ in range(vector.num_envs)]
    for _ in range(steps):
        before = [flat_row(obs, i) for i in range(vector.num_envs)]
        actions: Any = np.array([int(sum(row)) % 3 for row in before])
        given = {"0": actions, "1/f": np.stack([actions, actions + 0.25], 1)} if nested else actions
        obs, rewards, terminated, truncated, infos = vector.step(given)
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (float, bool, bool)
        assert not (terminated & truncated).any()
        ignored = infos.get("ignored", np.zeros(vector.num_envs, bool))
        successes = successes_in(infos)
        for i in range(vector.num_envs):
            ended = bool(terminated[i] or truncated[i])
            if "_final_obs" in infos:
                assert bool(infos["_final_obs"][i]) is ended
                assert (infos["final_obs"][i] is not None) is ended
            else:
                assert not ended
            if ignored[i]:
                assert (rewards[i], ended) == (0.0, False)
                continue
            after = flat_row(infos["final_obs"][i]) if ended else flat_row(obs, i)
            flags = (bool(terminated[i]), bool(truncated[i]))
            step = (before[i], int(actions[i]), float(rewards[i]), flags, after)
            found[i].append((*step, successes.get(i)))
    return found


def expected(steps: int, nested: bool = False) -> list[list[Any]]:
    """Return the transitions of `SequentialVectorEnv`."""
    factories = [lambda i=i: ScriptedEnv(i, nested) for i in range(N)]
    return transitions(SequentialVectorEnv(factories), steps, nested)


def without_successes(found: list[list[Any]]) -> list[list[Any]]:
    """Return all steps without their last entry."""
    return [[step[:-1] for step in steps] for steps in found]


def scripted(mode: Any, nested: bool) -> Any:
    """Return a vector environment of Gymnasium."""
    makers = [lambda i=i: ScriptedEnv(i, nested) for i in range(N)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("make", "nested"),
    [
        (partial(scripted, nested=False), False),
        (partial(scripted, nested=True), True),
        (ScriptedVectorEnv, False),
        (partial(ScriptedVectorEnv, reused=True), False),
    ],
    ids=["plain", "nested", "native", "reused"],
)
def test_third_party_transitions_match_sequential_vector_env(mode, make, nested):
    """Transitions match `SequentialVectorEnv` in every autoreset mode, also with reused buffers."""
    vector = GymVectorEnv(make(mode))
    told = NEXT_STEP if mode is NEXT_STEP else SAME_STEP
    assert vector.metadata["autoreset_mode"] is told
    found, reference = transitions(vector, 60, nested), expected(60, nested)
    if isinstance(vector._env, ScriptedVectorEnv):  # reports successes in its own way
        found, reference = without_successes(found), without_successes(reference)
    for mine, theirs in zip(found, reference, strict=True):
        assert len(mine) >= (40 if mode is NEXT_STEP else 60)
        assert mine == theirs[: len(mine)]


class AsList(VectorWrapper):
    """Infos as one dict per environment, as by Gymnasium's `DictInfoToList`."""

    def told(self, *result: Any) -> Any:
        return (*result[:-1], [info_of(result[-1], i, N) for i in range(N)])

    def reset(self, **given: Any) -> Any:
        return self.told(*self.env.reset(**given))

    def step(self, actions: Any) -> Any:
        return self.told(*self.env.step(actions))


class AsTensors(AsList):
    """Infos as tensors, as by Gymnasium's `NumpyToTorch`."""

    def told(self, *result: Any) -> Any:
        def tensors(infos: Any) -> Any:
            if isinstance(infos, dict):
                return {key: tensors(value) for key, value in infos.items()}
            return infos if infos.dtype == object else torch.as_tensor(infos)

        return (*result[:-1], tensors(result[-1]))


class AsRows(AsList):
    """`final_info` as an array of dicts, as before Gymnasium 1.0."""

    def told(self, *result: Any) -> Any:
        infos = dict(result[-1])
        if "final_info" in infos:
            rows = [info_of(infos["final_info"], i, N) for i in range(N)]
            infos["final_info"] = np.array(rows, object)
        return (*result[:-1], infos)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", [AsList, AsTensors, AsRows])
def test_infos_of_other_formats_are_read(mode, wrapper):
    """The infos of ended episodes are the same."""
    found = []
    for wrap in (wrapper, VectorWrapper):
        vector = GymVectorEnv(wrap(scripted(mode, nested=False)))
        vector.reset(seed=0)
        ends = []
        for _ in range(20):
            vector.step_async(np.zeros(N, np.int64))
            ends += [(end.env, dict(end.info)) for end in vector.receive().ends]
        found.append(ends)
    assert found[0] == found[1]
    assert found[0]


def test_reset_begins_anew():
    """A reset during an episode discards pending resets."""
    vector = GymVectorEnv(ScriptedVectorEnv(NEXT_STEP))
    vector.reset(seed=0)
    assert vector.step([0, 0, 0])[2].any()
    vector.reset(seed=0)
    infos = vector.step([0, 0, 0])[4]
    assert "ignored" not in infos


def test_copies_and_infos_are_returned_on_request():
    """Copies of observations and the infos of all steps are returned on request."""
    for copy in (False, True):
        source = ScriptedVectorEnv(DISABLED, reused=True)
        vector = GymVectorEnv(source, copy=copy, step_infos=copy)
        vector.reset(seed=0)
        vector.step([0, 0, 0])
        second = vector.step([0, 0, 0])
        assert second[0][2].tolist() == [2.0, 0.0, 2.0]
        assert np.shares_memory(second[0], source.buffer) is not copy
        assert ("is_success" in second[4]) is copy
        vector.step([0, 0, 0])
        assert second[0][2, 2] == (2.0 if copy else 3.0)


def test_time_limit_applies_in_autoreset_mode_disabled():
    """Time limits apply only in the autoreset mode `DISABLED`."""
    vector = GymVectorEnv(ScriptedVectorEnv(DISABLED), max_episode_steps=2)
    vector.reset(seed=0)
    seen = []
    for _ in range(6):
        seen.append(vector.step([0, 0, 0])[3].tolist())
    lengths = [length_of(2, k) for k in range(3)]
    assert lengths == [7, 5, 3]
    assert [row[2] for row in seen] == [False, True] * 3
    with pytest.raises(ConfigError, match=r"env\.max_episode_steps = 2: ScriptedVectorEnv resets"):
        GymVectorEnv(ScriptedVectorEnv(NEXT_STEP), max_episode_steps=2)


class Lives(ScriptedVectorEnv):
    """Vector environment that loses lives before the end of an episode; rewards are 5 and -3."""

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        rewards = np.where(np.arange(N) == 0, 5.0, -3.0)
        return obs, rewards, terminated, truncated, {**infos, "lives": self.lives()}

    def reset(self, **kwargs: Any) -> Any:
        obs, infos = super().reset(**kwargs)
        return obs, {**infos, "lives": self.lives()}

    def lives(self) -> Any:
        left = np.array([length_of(i, self.episode[i]) - self.t[i] for i in range(N)])
        # At most 3, and 0 in the last two steps; environment 2 never reaches 0.
        return np.where(np.arange(N) == 2, left + 1, np.clip(left - 1, 0, 3)).astype(np.int32)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_lost_lives_end_third_party_episodes(mode):
    """A lost life terminates an episode, and the game continues; whole games are reported."""
    vector = GymVectorEnv(Lives(mode), atari_training=True, frame_stack={"": 3})
    assert vector.monitored
    assert vector.frame_stack == {"": 3}
    _, infos = vector.reset(seed=0)
    lives = infos["lives"]
    games: list[tuple[int, float, int]] = []
    played = np.zeros(N)
    for _ in range(40):
        obs, rewards, terminated, truncated, infos = vector.step([0, 0, 0])
        ignored = infos.get("ignored", np.zeros(N, bool))
        played += ~ignored
        source = vector._env
        now = source.lives()
        game_over = source.ended
        lost = (now < lives) & (now > 0) & ~game_over & ~ignored
        lives = now
        signs = np.array([1.0, -1.0, -1.0])
        assert rewards.tolist() == np.where(ignored, 0.0, signs).tolist()
        assert (terminated == (source.flags[0] | lost)).all()
        assert (truncated == (source.flags[1] & ~source.flags[0])).all()
        if (lost | game_over).any():
            assert (infos["_final_obs"] == (lost | game_over)).all()
            reported = infos["final_info"].get("_episode", np.zeros(N, bool))
            assert (reported == game_over).all()
            told = np.flatnonzero(game_over) if mode is NEXT_STEP else []
            assert list(successes_in(infos)) == list(told)
        for i in np.flatnonzero(lost):
            assert infos["final_obs"][i].tolist() == obs[i].tolist()
            assert not np.shares_memory(infos["final_obs"][i], obs)
        for i in np.flatnonzero(game_over):
            episode = infos["final_info"]["episode"]
            assert episode["l"][i] == played[i]
            assert episode["r"][i] == played[i] * (5.0 if i == 0 else -3.0)
            games.append((int(i), float(episode["r"][i]), int(episode["l"][i])))
            played[i] = 0
    by_env = [[length for env, _, length in games if env == i] for i in range(N)]
    for i, lengths in enumerate(by_env):
        assert len(lengths) >= 5
        assert lengths == [length_of(i, k) for k in range(len(lengths))]


def test_lives_are_needed():
    """Training on Atari games requires lives in the infos; evaluation does not."""
    with pytest.raises(EnvError, match=r"does not report infos\['lives'\]"):
        GymVectorEnv(ScriptedVectorEnv(NEXT_STEP), atari_training=True).reset(seed=0)
    plain = GymVectorEnv(Lives(NEXT_STEP))
    plain.reset(seed=0)
    assert not plain.monitored
    assert plain.step([0, 0, 0])[1].tolist() == [5.0, -3.0, -3.0]


def taking(kind: str) -> Any:
    """Return a vector environment that records its seeds; `kind` is the annotation of `seed`."""

    class Taking(ScriptedVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.seen = seed
            return super().reset(options=options)

    Taking.reset.__annotations__["seed"] = kind
    return Taking(NEXT_STEP)


def test_third_party_environments_get_distinct_seeds():
    """Environments get distinct seeds in the annotated type."""
    seen = []
    for kind in ("int | list[int | None] | None", "int | np.ndarray | None", "int | None"):
        source = taking(kind)
        vector = GymVectorEnv(source)
        vector.reset(seed=5)
        seen.append(source.seen)
        assert vector.root_seed == 5
    expected = distinct_seeds(5, N)
    assert isinstance(seen[1], np.ndarray)
    assert [seen[0], seen[1].tolist(), seen[2]] == [expected, expected, expected[0]]
    many = [seed for root in range(50) for seed in distinct_seeds(root, 100)]
    assert len(set(many)) == len(many)
    assert 0 <= min(many) <= max(many) < 2**31
    assert distinct_seeds(3, 10) == distinct_seeds(3, 1000)[:10]
    makers = [lambda i=i: ScriptedEnv(i) for i in range(N)]
    _, infos = GymVectorEnv(SyncVectorEnv(makers)).reset(seed=5)
    assert infos["seed"].tolist() == distinct_seeds(5, N)


def test_autoreset_modes():
    """Autoreset modes can be an enum or a string; other values raise an error with a remedy."""
    for mode in MODES:
        assert autoreset_mode(ScriptedVectorEnv(mode)) is mode
        assert autoreset_mode(ScriptedVectorEnv(mode.value)) is mode
    for mode in ("next", None):
        with pytest.raises(EnvError, match="expected one of NextStep, SameStep, Disabled; declare"):
            GymVectorEnv(ScriptedVectorEnv(mode))


def test_mode_that_another_environment_left_is_not_believed(monkeypatch):
    """The mode in the metadata shared by all vector environments, set by ale-py, is ignored."""
    source = ScriptedVectorEnv(NEXT_STEP)
    del source.metadata
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", SAME_STEP)
    with pytest.raises(EnvError, match="autoreset mode None"):
        autoreset_mode(source)
    source.autoreset_mode = NEXT_STEP
    assert autoreset_mode(source) is NEXT_STEP


def broken(*_: Any, **__: Any) -> Any:
    """Raise an error."""
    raise RuntimeError("the wheel came off")


def spoilt(mode: Any, where: str, spoil: Any) -> Any:
    """Return a vector environment with a modified result of one method."""
    source = ScriptedVectorEnv(mode)
    method = getattr(source, where)
    setattr(source, where, lambda *args, **kwargs: spoil(*method(*args, **kwargs)))
    return source


@pytest.mark.parametrize(
    ("mode", "spoil", "words"),
    [
        (NEXT_STEP, broken, r"step\(\) of ScriptedV.* failed: RuntimeError: the wheel"),
        (NEXT_STEP, lambda o, *rest: (o[:, :2], *rest), r"shape \(3, 2\), its space has"),
        (NEXT_STEP, lambda o, r, *rest: (o, r[:2], *rest), r"shapes \(2,\), \(3,\), \(3,\)"),
        (SAME_STEP, lambda *parts: (*parts[:-1], {}), r"infos\['final_obs'\] is missing"),
        (
            SAME_STEP,
            lambda *parts: (*parts[:-1], {"final_obs": np.full(N, None, object)}),
            r"infos\['final_obs'\] is missing",
        ),
        *[
            (NEXT_STEP, lambda o, r, *rest, bad=bad: (o, [1.0, bad, 1.0], *rest), words)
            for bad, words in [
                (1e300, r"environment 5 failed at step 1 .* reward is 1e\+300"),
                (-1e300, r"environment 5 failed at step 1 .* reward is -1e\+300"),
                (float("nan"), "environment 5 failed at step 1 .* reward is nan"),
            ]
        ],
    ],
)
def test_invalid_third_party_values_raise(mode, spoil, words):
    """Errors and invalid results raise an error with the index of the environment among all."""
    vector = GymVectorEnv(spoilt(mode, "step", spoil))
    vector.first_env = 4
    vector.reset(seed=0)
    with pytest.raises((EnvError, SpaceError), match=words):
        vector.step([0, 0, 0])


@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_exiting_environment_raises_env_error(monkeypatch, where):
    """An environment that exits raises EnvError."""
    source = ScriptedVectorEnv(NEXT_STEP)
    vector = GymVectorEnv(source)
    vector.reset(seed=0)
    monkeypatch.setattr(source, where, lambda *_, **__: sys.exit(0))
    calls = {"reset": vector.reset, "step": lambda: vector.step([0, 0, 0]), "close": vector.close}
    with pytest.raises(EnvError, match="failed: SystemExit: 0"):
        calls[where]()


def test_integer_observations_get_the_space_dtype():
    """Integer observations are converted to the dtype of the space; floats are not."""
    vectors = []
    for kind in (np.int32, np.float32):
        source = spoilt(NEXT_STEP, "reset", lambda o, infos, kind=kind: (o.astype(kind), infos))
        source.single_observation_space = spaces.MultiDiscrete([9, 99, 99])
        vectors.append(GymVectorEnv(source))
    assert vectors[0].reset(seed=0)[0].dtype == np.int64
    with pytest.raises(SpaceError, match="dtype float32"):
        vectors[1].reset(seed=0)
