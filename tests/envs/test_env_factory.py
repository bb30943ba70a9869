from __future__ import annotations

import pickle

import gymnasium
import pytest
from toy_envs import AddOne, CountingEnv, FailingEnv, not_an_env

from maze_train import EnvConfig, EnvFactory
from maze_train.envs.build_failures import nearest_ids
from maze_train.envs.factory import BoundedEnvFactory, env_name
from maze_train.errors import ConfigError, EnvError, MissingExtraError


def test_registered_id():
    """An id gives that environment, with its registered time limit and without the checker."""
    env = EnvFactory.from_any("CartPole-v1")()
    assert env.spec is not None
    assert env.spec.id == "CartPole-v1"
    assert env.spec.max_episode_steps == 500
    assert "PassiveEnvChecker" not in str(env)


def test_kwargs_and_time_limit_of_registered_id():
    """Kwargs reach gymnasium.make, and max_episode_steps replaces the registered limit."""
    config = EnvConfig(id="Pendulum-v1", kwargs={"g": 5.0}, max_episode_steps=3)
    env = EnvFactory(config)()
    assert env.unwrapped.g == 5.0
    env.reset(seed=0)
    cuts = [env.step(env.action_space.sample())[3] for _ in range(3)]
    assert cuts == [False, False, True]


def test_own_environment_by_path():
    """A target is called with kwargs, limited in time, and wrapped from the inside out."""
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


def test_python_callables():
    """Classes, functions and factories are accepted, and keyword arguments are added."""
    assert EnvFactory.from_any(CountingEnv, length=3)().length == 3
    assert EnvFactory.from_any(lambda length: CountingEnv(length), length=2)().length == 2
    again = EnvFactory.from_any(EnvFactory.from_any(CountingEnv, length=3), truncate=True)()
    assert (again.length, again.truncate) == (3, True)
    config = EnvConfig(target="toy_envs.CountingEnv", kwargs={"length": 4})
    assert EnvFactory.from_any(config, length=6)().length == 6
    assert config.kwargs == {"length": 4}


def test_factory_is_picklable():
    """A factory survives pickle."""
    factory = pickle.loads(pickle.dumps(EnvFactory.from_any(CountingEnv, length=3)))
    assert factory().length == 3


def test_instance_is_refused():
    """An environment instead of its class is refused with the remedy."""
    with pytest.raises(ConfigError, match="a class or function"):
        EnvFactory.from_any(CountingEnv())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("HalfCheeta-v5", "HalfCheetah-v5"),
        ("phys3d/Pendulum-v0", "phys2d/Pendulum-v0"),
    ],
)
def test_unknown_id_names_the_nearest(wrong, right):
    """A misspelt name or version leads to the id that was meant."""
    assert right in nearest_ids(wrong)
    with pytest.raises(ConfigError, match=rf"env\.id = '{wrong}'.*nearest ids: .*{right}"):
        EnvFactory.from_any(wrong)()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_retired_version():
    """A version that gymnasium has retired is an error about env.id."""
    with pytest.raises(ConfigError, match=r"env\.id = 'FrozenLake-v0'.*FrozenLake-v1"):
        EnvFactory.from_any("FrozenLake-v0")()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_moved_environment():
    """A moved MuJoCo version says which versions to use."""
    with pytest.raises(ConfigError, match="use version 4 or newer"):
        EnvFactory.from_any("HalfCheetah-v3")()


def test_malformed_id_and_missing_module():
    """Ids that can not be read, and modules that can not be imported, are errors about env.id."""
    with pytest.raises(ConfigError, match=r"env\.id.*Malformed"):
        EnvFactory.from_any("bad id!")()
    with pytest.raises(ConfigError, match=r"env\.id.*no_such_module"):
        EnvFactory.from_any("no_such_module:Foo-v1")()


def test_atari_without_ale_py(monkeypatch):
    """An ALE id without ale-py names the extra that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"maze-train\[atari\]"):
        EnvFactory.from_any("ALE/Pong-v5")()


def test_missing_dependency_has_a_remedy(monkeypatch):
    """A missing package is named together with the extra that installs it."""

    def make(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setattr(gymnasium, "make", make)
    with pytest.raises(ConfigError, match=r'pip install "maze-train\[box2d\]"'):
        EnvFactory.from_any("LunarLander-v3")()


def test_own_environment_errors():
    """Constructors that raise or return something else are named."""
    with pytest.raises(EnvError, match="no such level"):
        EnvFactory.from_any(FailingEnv, how="constructor")()
    with pytest.raises(EnvError, match=r"not_an_env returned str"):
        EnvFactory.from_any(not_an_env)()
    with pytest.raises(ConfigError, match=r"env\.kwargs = .*CartPole-v1 does not take.*gravity"):
        EnvFactory.from_any("CartPole-v1", gravity=1)()
    with pytest.raises(ConfigError, match=r"env\._target_.*did you mean CountingEnv"):
        EnvFactory(EnvConfig(target="toy_envs.CountinEnv"))()


def test_config_checks():
    """Settings that can not be right are refused, some only when the environment is built."""
    with pytest.raises(ConfigError, match=r"max_episode_steps = 0"):
        EnvConfig(id="CartPole-v1", max_episode_steps=0)
    with pytest.raises(ConfigError, match=r"wrappers\[0\].*_target_"):
        EnvConfig(id="CartPole-v1", wrappers=[{"amount": 1}])
    with pytest.raises(ConfigError, match="exactly one of id"):
        EnvFactory(EnvConfig())()
    with pytest.raises(ConfigError, match="exactly one of id"):
        EnvFactory(EnvConfig(id="CartPole-v1", target="toy_envs.CountingEnv"))()
    bad = EnvConfig(id="CartPole-v1", wrappers=[{"_target_": "toy_envs.AddOne", "amout": 1}])
    with pytest.raises(ConfigError, match=r"wrappers\[0\].*amout"):
        EnvFactory(bad)()
    odd = EnvConfig(id="CartPole-v1", wrappers=[{"_target_": "builtins.str"}])
    with pytest.raises(ConfigError, match=r"wrappers\[0\].*a subclass of gymnasium.Env, or a"):
        EnvFactory(odd)()


def test_training_and_evaluation():
    """Evaluation leaves out wrappers for training; their presence alone makes returns reported."""
    shared = {"_target_": "toy_envs.AddOne", "amount": 2.0}
    config = EnvConfig(
        target="toy_envs.CountingEnv",
        wrappers=[shared],
        training_wrappers=[{"_target_": "toy_envs.AddOne"}],
    )
    training = EnvFactory(config)
    evaluation = pickle.loads(pickle.dumps(training.for_evaluation()))
    assert (training.training, evaluation.training) == (True, False)
    env = training()
    assert [type(layer).__name__ for layer in (env, env.env, env.env.env)] == [
        "AddOne",
        "MonitoringWrapper",
        "AddOne",
    ]
    assert (env.amount, env.env.env.amount) == (1.0, 2.0)
    assert env.metadata["monitored"]
    env = evaluation()
    assert isinstance(env.env, CountingEnv)
    assert env.amount == 2.0
    assert not env.metadata.get("monitored")
    assert not EnvFactory(EnvConfig(id="CartPole-v1"))().metadata.get("monitored")
    bounded = BoundedEnvFactory(evaluation, 2)()
    bounded.reset(seed=0)
    assert [bounded.step(0)[3] for _ in range(2)] == [False, True]


def test_maker_is_kept_for_evaluation():
    """A class that can not be named by path builds both kinds of environments."""
    factory = EnvFactory.from_any(lambda: CountingEnv(3)).for_evaluation()
    assert factory().length == 3


def test_wrong_training_wrappers():
    """They are checked like the others, under their own name."""
    with pytest.raises(ConfigError, match=r"training_wrappers\[0\].*_target_"):
        EnvConfig(id="CartPole-v1", training_wrappers=[{"amount": 1}])
    bad = EnvConfig(id="CartPole-v1", training_wrappers=[{"_target_": "toy_envs.AddTwo"}])
    with pytest.raises(ConfigError, match=r"env.training_wrappers\[0\].*AddTwo"):
        EnvFactory(bad)()
    EnvFactory(bad).for_evaluation()()


def test_names_for_directories():
    """Names hold no separators."""
    assert env_name(EnvConfig(id="ALE/Pong-v5")) == "ALE-Pong-v5"
    assert env_name(EnvConfig(id="my_module:Foo-v0")) == "my_module-Foo-v0"
    assert env_name(EnvConfig(target="my.module.Class")) == "Class"
    assert env_name(EnvFactory.from_any(CountingEnv).config) == "CountingEnv"
    assert env_name(EnvFactory.from_any(lambda: CountingEnv()).config) == "lambda"
