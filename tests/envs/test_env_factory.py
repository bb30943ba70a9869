from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from functools import partial
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode
from toy_envs import AddOne, CountingEnv, workers

from maze_train import EnvConfig, EnvFactory, MultiAgentEnv
from maze_train.core.errors import (
    ConfigError,
    EnvError,
    MazeTrainError,
    failed_in_user_code,
    user_cause,
)
from maze_train.core.targets import InlineObject
from maze_train.envs.factory import check_registered, make_registered
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.slice import EnvSlice
from maze_train.envs.third_party import make_third_party_env


def test_kwargs_and_time_limit_of_registered_id():
    """Kwargs are passed to gymnasium.make, and max_episode_steps replaces the registered limit.

    Without these, an id creates the environment with its limit but without the checker.
    """
    plain = EnvFactory.from_any("CartPole-v1")()
    assert (plain.spec.id, plain.spec.max_episode_steps) == ("CartPole-v1", 500)
    assert "PassiveEnvChecker" not in str(plain)
    env = EnvFactory(EnvConfig(id="Pendulum-v1", kwargs={"g": 5.0}, max_episode_steps=3))()
    assert env.unwrapped.g == 5.0
    env.reset(seed=0)
    cuts = [env.step(env.action_space.sample())[3] for _ in range(3)]
    assert cuts == [False, False, True]


def test_env_target_gets_kwargs_limit_and_wrappers():
    """A target gets its kwargs, a time limit, and wrappers from the inside out."""
    wrapper = {"_target_": "toy_envs.AddOne", "amount": 2.0}
    config = EnvConfig(
        target="toy_envs.CountingEnv",
        kwargs={"length": 9},
        wrappers=[wrapper, {"_target_": "toy_envs.AddOne"}],
        max_episode_steps=4,
    )
    env = EnvFactory(config)()
    assert isinstance(env, AddOne)
    assert (env.amount, env.env.amount) == (1.0, 2.0)
    obs, _ = env.reset(seed=7)
    assert obs.tolist() == [10.0, 3.0]
    assert [env.step(0)[3] for _ in range(4)] == [False, False, False, True]


def test_env_factory_accepts_classes_and_functions():
    """Classes, functions and factories are accepted; keyword arguments are added."""
    factory = EnvFactory.from_any(CountingEnv, length=3)
    assert pickle.loads(pickle.dumps(factory))().length == 3
    unnamed = EnvFactory.from_any(lambda length: CountingEnv(length), length=2)
    assert unnamed().length == unnamed.for_evaluation()().length == 2
    again = EnvFactory.from_any(factory, truncate=True)()
    assert (again.length, again.truncate) == (3, True)
    config = EnvConfig(target="toy_envs.CountingEnv", kwargs={"length": 4})
    assert EnvFactory.from_any(config, length=6)().length == 6
    assert config.kwargs == {"length": 4}
    with pytest.raises(ConfigError, match="a class or function"):
        EnvFactory.from_any(CountingEnv())


def wrapped(key="wrappers", **node):
    """Return the settings of an environment with a wrapper."""
    return {"id": "CartPole-v1", key: [node]}


NEAREST = [
    ("CartPol-v1", "CartPole-v1"),
    ("CartPole-v7", "CartPole-v1"),
    ("cartpole", "CartPole-v1"),
    ("HalfCheeta-v5", "HalfCheetah-v5"),
    ("phys3d/Pendulum-v0", "phys2d/Pendulum-v0"),
]
TIME_AWARE = "gymnasium.wrappers.TimeAwareObservation"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("settings", "words"),
    [({"id": wrong}, rf"env\.id = '{wrong}'.*nearest ids: .*{right}") for wrong, right in NEAREST]
    + [
        ({"id": "FrozenLake-v0"}, r"env\.id = 'FrozenLake-v0'.*FrozenLake-v1"),
        ({"id": "HalfCheetah-v3"}, "use a newer|gymnasium-robotics"),
        ({"id": "bad id!"}, r"env\.id.*Malformed"),
        ({"id": "no_such_module:Foo-v1"}, r"env\.id.*no_such_module"),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 1}}, r"env\.kwargs = .*not accept.*gravity"),
        ({"target": "toy_envs.FailingEnv", "kwargs": {"how": "constructor"}}, "no such level"),
        ({"target": "toy_envs.not_an_env"}, "not_an_env returned str"),
        ({"target": "toy_envs.CountinEnv"}, r"env\._target_.*did you mean CountingEnv"),
        ({}, "exactly one of id"),
        ({"id": "CartPole-v1", "target": "toy_envs.CountingEnv"}, "exactly one of id"),
        ({"id": "CartPole-v1", "max_episode_steps": 0}, "max_episode_steps = 0"),
        (
            {"id": "CartPole-v1", "max_episode_steps": 5, "kwargs": {"max_episode_steps": 400}},
            r"env\.kwargs\.max_episode_steps = 400: env\.max_episode_steps = 5 is set too",
        ),
        (
            {"target": "x", "backend": "tensor", "device": "cpu", "kwargs": {"device": "cuda"}},
            r"env\.kwargs\.device = 'cuda': env\.device = 'cpu' is set too",
        ),
        (wrapped(amount=1), r"wrappers\[0\].*_target_"),
        (wrapped(_target_="toy_envs.AddOne", amout=1), r"wrappers\[0\].*amout"),
        (wrapped(_target_="builtins.str"), r"wrappers\[0\].*a subclass of gymnasium.Env, or a"),
        (wrapped("training_wrappers", amount=1), r"training_wrappers\[0\].*_target_"),
        (
            wrapped("training_wrappers", _target_="toy_envs.AddTwo"),
            r"env.training_wrappers\[0\].*AddTwo",
        ),
        (
            wrapped("training_wrappers", _target_=TIME_AWARE),
            r"(?s)training_wrappers\[0\].*move the wrapper to env",
        ),
    ],
    ids=str,
)
def test_invalid_env_settings_raise(settings, words):
    """Invalid settings raise an error that names the key and the nearest valid value."""
    with pytest.raises((ConfigError, EnvError), match=words):
        EnvFactory(EnvConfig(**settings))()


@pytest.mark.parametrize(
    ("text", "extra"), [("Box2D is not installed", "box2d"), ("MuJoCo is too old", "mujoco")]
)
@pytest.mark.parametrize("is_installed", [False, True])
def test_missing_env_package_names_its_extra(monkeypatch, text, extra, is_installed):
    """For a missing package the error names the extra that installs it, but not if it is installed.

    Installing the extra would replace an installed package by another version.
    """

    def make(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled(text)

    monkeypatch.setattr(gymnasium, "make", make)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: is_installed or None)
    with pytest.raises(ConfigError, match=text) as caught:
        EnvFactory.from_any("LunarLander-v3")()
    assert (f'pip install "maze-train[{extra}]"' in str(caught.value)) is not is_installed


MODULES = {
    "no_display": "class NoSuchDisplay(Exception): pass\nraise NoSuchDisplay(':0')",
    "has_a_bug": "value = int('x')",
    "imports_too_much": "from collections import a_name_that_is_missing",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that cannot be imported."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


HINT = "on a machine without a display set PYGLET_HEADLESS=1 or SDL_VIDEODRIVER=dummy or MUJOCO_GL"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("no_display", rf"NoSuchDisplay: :0 \(.*no_display.py, line 2\); {HINT}"),
        ("has_a_bug", r"ValueError: invalid literal.*\(.*has_a_bug.py, line 1\)$"),
        ("imports_too_much", r"cannot import name 'a_name_that_is_missing'.*line 1\)$"),
    ],
)
@pytest.mark.parametrize("form", ["id", "target", "native", "hydra"])
def test_failed_env_import_is_one_message(modules, module, problem, form):
    """The error of a failed import names the line, with a hint if a display is missing."""
    settings = {"target": f"{module}.Env"} if form == "target" else {"id": f"{module}:Env-v0"}
    config = EnvConfig(**settings, backend="native" if form == "native" else "gymnasium")
    build = {
        "native": lambda: make_third_party_env(config, 2, training=True, num_threads=0),
        "hydra": lambda: check_registered(f"{module}:Env-v0"),
    }
    with pytest.raises(ConfigError, match=rf"{problem}") as caught:
        build.get(form, EnvFactory(config))()
    assert not failed_in_user_code(caught.value)


def test_id_registered_by_a_script_names_the_remedy():
    """If only the script registered an id, the error of a worker says where to register it."""
    gymnasium.register("Mine-v0", entry_point=CountingEnv)
    try:
        EnvFactory.from_any("Mine-v0")().close()
        words = r"'Mine-v0': .* register the id in .*env=my_envs:Mine-v0"
        with pytest.raises(ConfigError, match=words):
            workers([EnvFactory.from_any("Mine-v0")], n_workers=1, start_method="forkserver")
    finally:
        gymnasium.registry.pop("Mine-v0")


def test_environment_error_messages_are_shortened(monkeypatch):
    """Error messages of installed environments are shortened, since they may quote a file."""
    text = "XML error:\nsecret " * 100

    def fail(*_, **__):
        raise ValueError(text)

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(EnvError) as caught:
        EnvFactory.from_any("CartPole-v1", xml_file="/etc/passwd")()
    message = "building CartPole-v1 with {'xml_file': '/etc/passwd'} failed: ValueError: XML error:"
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400
    assert user_cause(caught.value) is None


class OpenEnv(CountingEnv):
    """Environment that counts its open instances."""

    opened: ClassVar[int] = 0

    def __init__(self, text: bool = False) -> None:
        super().__init__()
        if text:
            self.observation_space = gymnasium.spaces.Text(5)
        OpenEnv.opened += 1

    def close(self) -> None:
        OpenEnv.opened -= 1


class OpenVectorEnv(gymnasium.vector.VectorEnv):
    """Vector environment that counts its open instances."""

    def __init__(self, num_envs: int, mode: AutoresetMode | None) -> None:
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": mode}
        self.single_observation_space = gymnasium.spaces.Text(5)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        OpenEnv.opened += 1

    def close_extras(self, **kwargs: Any) -> None:
        OpenEnv.opened -= 1


class OpenAgents(MultiAgentEnv):
    """Multi-agent environment with an observation space that no network supports."""

    possible_agents = ("a", "b")

    def __init__(self) -> None:
        self.observation_spaces = dict.fromkeys("ab", gymnasium.spaces.Text(5))
        self.action_spaces = dict.fromkeys("ab", gymnasium.spaces.Discrete(2))
        OpenEnv.opened += 1

    def close(self) -> None:
        OpenEnv.opened -= 1


def refusing(env: gymnasium.Env[Any, Any]) -> None:
    """Wrapper that raises an error."""
    raise ValueError("no")


def unlike(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wrapper that changes the observation space."""
    space = gymnasium.spaces.Box(0, 1, (1,))
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs[:1], space)


REFUSING = [{"_target_": InlineObject(refusing)}]


@pytest.mark.parametrize(
    "build",
    [
        EnvFactory(EnvConfig(target=InlineObject(OpenEnv), wrappers=REFUSING)),
        EnvFactory(EnvConfig(target=InlineObject(OpenEnv), training_wrappers=REFUSING)),
        EnvFactory(
            EnvConfig(
                target=InlineObject(OpenEnv), training_wrappers=[{"_target_": InlineObject(unlike)}]
            )
        ),
        EnvFactory(EnvConfig(target=InlineObject(OpenAgents))),
        lambda: PooledVectorEnv([OpenEnv, partial(OpenEnv, text=True)]),
        lambda: PooledVectorEnv([partial(OpenEnv, text=True)] * 2),
        lambda: EnvSlice.for_playing([partial(OpenEnv, text=True)] * 2),
        *(
            partial(
                make_third_party_env,
                EnvConfig(target=InlineObject(make), backend="native"),
                2,
                training=True,
                num_threads=0,
            )
            for make in (
                partial(OpenVectorEnv, mode=AutoresetMode.SAME_STEP),
                partial(OpenVectorEnv, mode=None),
            )
        ),
    ],
)
def test_failed_construction_closes_built_environments(build):
    """If construction fails, all environments already built are closed."""
    opened = OpenEnv.opened
    with pytest.raises(MazeTrainError):
        build()
    assert OpenEnv.opened == opened


@pytest.mark.parametrize(("display", "driver"), [(None, "dummy"), (":0", None)])
def test_rendering_without_a_display_draws_to_memory(monkeypatch, display, driver):
    """Without a display, pygame would print an error about XDG_RUNTIME_DIR."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    if display is not None:
        monkeypatch.setenv("DISPLAY", display)
    make_registered(EnvConfig(kwargs={"render_mode": "rgb_array"}), "CartPole-v1").close()
    assert os.environ.get("SDL_VIDEODRIVER") == driver
