from __future__ import annotations

import os
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import everyday
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from maze_train import SequentialVectorEnv
from maze_train.core.errors import ConfigError, EnvError, MissingExtraError
from maze_train.core.targets import InlineObject
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory
from maze_train.envs.third_party import GymVectorEnv, make_third_party_env, with_true_bounds

BACKENDS = ["native", "envpool"]


def needs(backend: str, env_id: str = "") -> None:
    """Skip the test if the package of a backend is missing."""
    if backend == "envpool":
        pytest.importorskip("envpool")
    elif env_id.startswith("ALE/"):
        pytest.importorskip("ale_py")


def make(
    backend: str, env_id: str | None, num_envs: int, *, training: bool = True, **settings: Any
) -> Any:
    """Return a vector environment with two threads and the given settings."""
    limit = settings.pop("limit", None)
    config = EnvConfig(id=env_id, backend=backend, **settings)
    return make_third_party_env(
        config, num_envs, training=training, num_threads=2, max_episode_steps=limit
    )


def own(name: str, **settings: Any) -> Any:
    """Return a vector environment of this file, wrapped as a third-party environment."""
    return make("native", None, 2, target=f"{__name__}.{name}", **settings)


def threads() -> int:
    """Return the number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def episodes(vector: Any, policy: Any, per_env: int, seed: int) -> tuple[Any, Any]:
    """Return the returns of the first episodes of each environment, and their truncations."""
    obs, _ = vector.reset(seed=seed)
    n = vector.num_envs
    running = np.zeros(n)
    returns: list[list[float]] = [[] for _ in range(n)]
    cuts: list[list[bool]] = [[] for _ in range(n)]
    while min(map(len, returns)) < per_env:
        obs, rewards, terminated, truncated, _ = vector.step(policy(obs))
        running += rewards
        for i in np.flatnonzero(terminated | truncated):
            if len(returns[i]) < per_env:
                returns[i].append(running[i])
                cuts[i].append(bool(truncated[i]))
            running[i] = 0.0
    return np.concatenate(returns), np.concatenate(cuts)


def lean(obs: Any) -> Any:
    """Push the cart to the side where the pole leans."""
    return (obs[:, 2] > 0.0).astype(np.int64)


def balance(obs: Any) -> Any:
    """Push the cart to the side where the pole falls, which balances it for long."""
    return (obs[:, 2] + obs[:, 3] > 0.0).astype(np.int64)


def test_native_cartpole_steps_like_the_single_version():
    """From equal states, equal actions give equal steps up to the end of the episode."""
    n = 8
    single = SequentialVectorEnv([EnvFactory.from_any("CartPole-v1")] * n)
    native = make("native", "CartPole-v1", n)
    single.reset(seed=0)
    native.reset(seed=0)
    native._env.unwrapped.state = np.stack([e.unwrapped.state for e in single.envs], axis=1)
    running = np.ones(n, bool)
    rng = np.random.default_rng(0)
    while running.any():
        actions = rng.integers(0, 2, n)
        theirs, ours = single.step(actions), native.step(actions)
        for part in (1, 2, 3):
            assert theirs[part][running].tolist() == ours[part][running].tolist()
        for i in np.flatnonzero(running):
            ended = theirs[2][i]
            expected = theirs[4]["final_obs"][i] if ended else theirs[0][i]
            given = ours[4]["final_obs"][i] if ended else ours[0][i]
            np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)
        running &= ~theirs[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_runs_are_reproducible(backend):
    """A seed determines the run in any instance, and no two environments share an episode."""
    needs(backend)
    n, steps = 4, 60
    actions = np.random.default_rng(0).integers(0, 2, (steps, n))

    def run(vector: Any, seed: int) -> list[Any]:
        rows = [vector.reset(seed=seed)[0].copy()]
        rows += [vector.step(action)[0].copy() for action in actions]
        return rows

    vector, other = make(backend, "CartPole-v1", n), make(backend, "CartPole-v1", n)
    first = run(vector, 5)
    for again in (run(vector, 5), run(other, 5)):
        np.testing.assert_array_equal(first, again)
    starts = [tuple(row) for seed in range(20) for row in vector.reset(seed=seed)[0]]
    assert len(set(starts)) == len(starts) == 20 * n
    if backend == "envpool":
        # Each environment has its seed; more environments do not affect the first ones.
        np.testing.assert_array_equal(
            make(backend, "CartPole-v1", 9).reset(seed=5)[0][:n], first[0]
        )
    assert vector.reset()[0].shape == (n, 4)
    assert vector.root_seed is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_smallest_time_limit_truncates(backend):
    """The smallest of the registered, configured and requested limits truncates episodes."""
    needs(backend)
    cases = [({}, 500), ({"max_episode_steps": 7}, 7), ({"limit": 6}, 6), ({"limit": 900}, 500)]
    cases += [({"max_episode_steps": 900, "limit": 5}, 5), ({"max_episode_steps": 520}, 520)]
    for settings, expected in cases:
        vector = make(backend, "CartPole-v1", 8, **settings)
        returns, cuts = episodes(vector, balance, 1, seed=0)
        assert returns.max() == expected
        assert (cuts == (returns == expected)).all()
        vector.close()


@pytest.mark.parametrize("env_id", everyday(1, ["CartPole-v1", "ALE/Pong-v5"]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_close_ends_threads(backend, env_id):
    """Closing ends all threads."""
    needs(backend, env_id)
    before = threads()
    vector = make(backend, env_id, 3)
    vector.reset(seed=0)
    vector.step(np.zeros(3, int))
    if (backend, env_id) != ("native", "CartPole-v1"):
        assert threads() > before
    vector.close()
    vector.close()
    assert threads() == before


# -- Atari -----------------------------------------------------------------------------------------


def play(vector: Any, steps: int, seed: int = 0) -> list[list[Any]]:
    """Return transitions per environment under random actions: frame sums, reward, flags, game.

    Environment i takes its sequence of actions, even if rows are ignored.
    """
    n = vector.num_envs
    count = int(vector.single_action_space.n)
    streams = [np.random.default_rng([seed, i]) for i in range(n)]
    obs, _ = vector.reset(seed=seed)
    ignored = np.zeros(n, bool)
    found: list[list[Any]] = [[] for _ in range(n)]
    actions = np.zeros(n, int)
    for _ in range(steps):
        resetting = getattr(vector, "_resetting", np.zeros(n, bool))
        for i in np.flatnonzero(~resetting):
            actions[i] = streams[i].integers(0, count)
        before = obs.astype(np.int64).sum((2, 3)).tolist()
        obs, rewards, terminated, truncated, infos = vector.step(actions)
        ignored = infos.get("ignored", np.zeros(n, bool))
        for i in np.flatnonzero(~ignored):
            ended = bool(terminated[i] or truncated[i])
            after = infos["final_obs"][i] if ended else obs[i]
            # Consecutive stacks share all but one frame.
            sums = after.astype(np.int64).sum((1, 2)).tolist()
            assert sums[:-1] == before[i][1:]
            game = None
            if "episode" in infos.get("final_info", {}) and infos["final_info"]["_episode"][i]:
                episode = infos["final_info"]["episode"]
                game = (float(episode["r"][i]), int(episode["l"][i]))
            flags = (bool(terminated[i]), bool(truncated[i]))
            found[i].append((before[i], float(rewards[i]), flags, sums[-1], game))
    return found


@pytest.fixture(scope="module", params=everyday(1, BACKENDS))
def breakout(request: Any) -> tuple[str, list[list[Any]], list[list[Any]]]:
    """Transitions of Breakout in evaluation and in training, under the same actions."""
    needs(request.param, "ALE/")
    pair = []
    for training in (False, True):
        vector = make(request.param, "ALE/Breakout-v5", 4, training=training)
        assert vector.frame_stack == {"": 4}
        assert vector.monitored is training
        assert vector.single_observation_space == spaces.Box(0, 255, (4, 84, 84), np.uint8)
        pair.append(play(vector, 420))
        vector.close()
    return request.param, pair[0], pair[1]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_atari_training_changes_no_frames(breakout):
    """Training changes no frames; lost lives end episodes, and whole games are reported."""
    _, evaluated, trained = breakout
    lives_lost = 0
    for plain, changed in zip(evaluated, trained, strict=True):
        assert [(step[0], step[3]) for step in plain] == [(step[0], step[3]) for step in changed]
        score, length = 0.0, 0
        for (_, reward, flags, _, game), (_, sign, life_flags, _, whole) in zip(
            plain, changed, strict=True
        ):
            assert sign == np.sign(reward)
            assert game is None
            score, length = score + reward, length + 1
            if any(flags):
                assert flags == life_flags == (True, False)
                assert whole == (score, length)
                score, length = 0.0, 0
            else:
                assert whole is None
                lives_lost += any(life_flags)
        games = sum(any(step[2]) for step in plain)
        ends = sum(any(step[2]) for step in changed)
        assert games >= 1
        assert 5 * games <= ends <= 5 * (games + 1)
    assert lives_lost >= 16


@pytest.mark.exhaustive
def test_atari_same_step_equals_next_step():
    """Both autoreset modes of ale-py give the same transitions, including final observations."""
    pytest.importorskip("ale_py")
    same = make("native", "ALE/Breakout-v5", 3, training=False)
    assert same.mode is AutoresetMode.SAME_STEP
    kwargs = {"repeat_action_probability": 0.25, "reward_clipping": False, "noop_max": 30}
    source = gymnasium.make_vec(
        "ALE/Breakout-v5",
        3,
        vectorization_mode="vector_entry_point",
        autoreset_mode=AutoresetMode.NEXT_STEP,
        **kwargs,
    )
    other = GymVectorEnv(source)
    assert other.mode is AutoresetMode.NEXT_STEP
    for one, two in zip(play(same, 420), play(other, 420), strict=True):
        assert one[: len(two)] == two
        assert sum(any(step[2]) for step in two) >= 1


@pytest.mark.parametrize("backend", everyday(1, BACKENDS))
def test_atari_time_limit(backend):
    """A game that reaches the time limit is truncated, and its return is reported."""
    needs(backend, "ALE/")
    vector = make(backend, "ALE/Pong-v5", 3, limit=20)
    found = play(vector, 45)
    for steps in found:
        ends = [t for t, step in enumerate(steps) if any(step[2])]
        assert len(ends) >= 2
        for t in ends:
            assert steps[t][2] == (False, True)
            assert steps[t][4] is not None
        # ale-py counts the frames of up to 30 no-ops and of one press of the fire button.
        assert 20 - 9 <= ends[0] + 1 <= 20
        if backend == "envpool":
            assert ends[0] + 1 == 20
    vector.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_atari_actions_are_repeated(backend):
    """Actions are repeated with the registered or the given probability."""
    needs(backend, "ALE/")
    for kwargs, expected in (({}, 0.25), ({"repeat_action_probability": 0.0}, 0.0)):
        vector = make(backend, "ALE/Pong-v5", 1, kwargs=kwargs)
        source = vector._env
        given = (
            source.spec.kwargs["repeat_action_probability"]
            if backend == "native"
            else source.config.repeat_action_probability
        )
        assert given == pytest.approx(expected)
        vector.close()


# -- EnvPool ---------------------------------------------------------------------------------------


def test_envpool_nested_observations():
    """Dict observations are flat by key, with correct bounds and the dtypes of the space."""
    pytest.importorskip("envpool")
    vector = make("envpool", "MiniGrid-Empty-5x5-v0", 2)
    obs, _ = vector.reset(seed=0)
    assert {key: (part.shape, part.dtype.name) for key, part in obs.items()} == {
        "direction": ((2,), "int64"),
        "image": ((2, 7, 7, 3), "uint8"),
        "mission": ((2, 96), "uint8"),
    }
    for _ in range(120):
        obs, _, _, truncated, infos = vector.step(np.zeros(2, int))
        if truncated.any():
            break
    assert sorted(infos["final_obs"][0]) == ["direction", "image", "mission"]
    vector.close()


def test_dtype_limits_are_infinite_bounds():
    """Bounds at the limits of the dtype count as infinite."""
    tiny, largest = np.finfo(np.float64).tiny, np.finfo(np.float64).max
    stated = spaces.Box(
        np.array([tiny, -1.0, -largest]), np.array([largest, 1.0, 3.0]), (3,), float
    )
    honest = with_true_bounds(spaces.Dict({"x": stated, "y": spaces.Discrete(3)}))
    assert honest["x"].low.tolist() == [-np.inf, -1.0, -np.inf]
    assert honest["x"].high.tolist() == [np.inf, 1.0, 3.0]
    assert honest["y"] == spaces.Discrete(3)


def test_envpool_options_raise(monkeypatch):
    """EnvPool does not support options; without the package, the error names the extra."""
    pytest.importorskip("envpool")
    vector = make("envpool", "CartPole-v1", 1)
    with pytest.raises(EnvError, match="supports no options"):
        vector.reset(seed=0, options={"level": 1})
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(MissingExtraError, match=r"maze-train\[envpool\]"):
        make("envpool", "CartPole-v1", 1)


# -- registered and custom vector environments -----------------------------------------------------


class OwnVectorEnv(SyncVectorEnv):
    """Custom vector environment with the arguments that the package passes."""

    def __init__(
        self,
        num_envs: int,
        length: int = 9,
        num_threads: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        maker = lambda: gymnasium.make("CartPole-v1", max_episode_steps=length)  # noqa: E731
        super().__init__([maker] * num_envs, autoreset_mode=autoreset_mode)
        self.num_threads = num_threads


def disabled_vector_env(num_envs: int) -> VectorEnv:
    """Return a vector environment with the autoreset mode `DISABLED`."""
    return OwnVectorEnv(num_envs, 500, autoreset_mode=AutoresetMode.DISABLED)


def crowded_vector_env(num_envs: int) -> VectorEnv:
    """Return one environment more than requested."""
    return OwnVectorEnv(num_envs + 1)


def single_env(num_envs: int) -> Any:
    """Return a single environment instead of a vector environment."""
    return gymnasium.make("CartPole-v1")


def test_custom_vector_environment_gets_its_arguments(capsys):
    """A target is called with the number of environments and the arguments in its signature.

    Time limits of evaluations do not apply to environments that reset themselves.
    """
    for limit in (None, 3):
        vector = own("OwnVectorEnv", kwargs={"length": 4}, limit=limit)
        assert ("may never end" in capsys.readouterr().err) is (limit == 3)
        assert isinstance(vector, GymVectorEnv)
        assert (vector._env.num_threads, vector.num_envs) == (2, 2)
        returns, cuts = episodes(vector, balance, 2, seed=0)
        assert returns.tolist() == [4.0] * 4
        assert cuts.all()
    limited = own("disabled_vector_env", limit=3)
    assert isinstance(limited, GymVectorEnv)
    assert episodes(limited, balance, 2, seed=0)[0].tolist() == [3.0] * 4


NODE = {"_target_": "toy_envs.AddOne"}
CART, PONG = "CartPole-v1", "ALE/Pong-v5"

REFUSED_BY_BOTH = [
    (PONG, {"preprocessing": "none"}, r"env\.preprocessing = 'none'.*always"),
    (CART, {"preprocessing": "atari"}, r"env\.preprocessing = 'atari'.*expected an ALE/ id"),
    (PONG, {"kwargs": {"episodic_life": True}}, r"env\.kwargs\.episodic_life = True: remove it"),
    (CART, {"wrappers": [NODE]}, r"env\.wrappers = .*wrappers of single env"),
    (CART, {"training_wrappers": [NODE]}, r"env\.training_wrappers = .*wrappers of single env"),
    (CART, {"kwargs": {"seed": 3}}, r"env\.kwargs\.seed = 3: remove it"),
    (CART, {"kwargs": {"num_envs": 3}}, r"num_envs = 3: remove it: set runner\.concurrency"),
    (None, {}, "exactly one of id"),
]
REFUSED = [
    ("native", PONG, {"kwargs": {"frameskip": (2, 5)}, "limit": 10}, r"env\.kwargs\.frameskip"),
    ("native", PONG, {"kwargs": {"obs_type": "ram"}}, r"env\.kwargs = .*does not accept"),
    ("native", "no_such_module:CartPole-v1", {}, "no_such_module"),
    (
        "native",
        "Acrobot-v1",
        {},
        r"no vector .* for this id: use env.backend=gymnasium.*CartPole-v1",
    ),
    ("native", "Pendulum-v1", {}, r"nearest first: phys2d/Pendulum-v0"),
    ("native", "phys2d/CartPol-v0", {}, r"nearest ids: phys2d/CartPole"),
    ("native", "pettingzoo:classic/go_v5", {}, r"env\.backend = 'native'.*use env.backend=gymn"),
    ("gymnasium", CART, {}, r"env\.backend = 'gymnasium'"),
    ("envpool", "ALE/Pung-v5", {}, r"env\.id = 'ALE/Pung-v5'.*nearest ids: Pong-v5"),
    ("envpool", CART, {"kwargs": {"gravity": 3.0}}, r"env\.kwargs = .*accept these.*gravity"),
    ("envpool", "Go9x9-v1", {}, "multi-player environments"),
    ("envpool", None, {"target": "a.b"}, r"env\._target_"),
]


@pytest.mark.parametrize(
    ("backend", "env_id", "settings", "words"),
    [(backend, *case) for backend in BACKENDS for case in REFUSED_BY_BOTH] + REFUSED,
)
def test_invalid_backend_settings_raise(backend, env_id, settings, words):
    """Incompatible settings raise ConfigError with the key and a remedy."""
    needs(backend, env_id or "")
    with pytest.raises(ConfigError, match=words):
        make(backend, env_id, 1, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("lean", {}, r"env\._target_ = .*returns a gymnasium\.vector"),
        ("single_env", {}, r"expected a gymnasium\.vector\.VectorEnv; for single"),
        ("crowded_vector_env", {}, "crowded_vector_env has 3 environments, expected 2"),
        ("OwnVectorEnv", {"max_episode_steps": 3}, r"env\.max_episode_steps = 3: OwnVe.* resets"),
        ("OwnVectorEnv", {"kwargs": {"tall": True}}, r"env\.kwargs = .*does not accept.*tall"),
        ("made", {"kwargs": {"length": 4}}, r"env\.kwargs = .*is already an instance"),
    ],
)
def test_invalid_custom_vector_environments_raise(name, settings, words):
    """Targets that are not vector environments, wrong sizes and time limits raise an error."""
    target = InlineObject(OwnVectorEnv(2)) if name == "made" else f"{__name__}.{name}"
    with pytest.raises((ConfigError, EnvError), match=words):
        make("native", None, 2, target=target, **settings)
