"""Conversion of plain values to validated configuration dataclasses, and error messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.config.compose import load_config
from maze_train.config.train_config import DevRunnerConfig, TrainConfig
from maze_train.core.checks import check_positive
from maze_train.core.conversion import Settings as BaseSettings
from maze_train.core.conversion import build_dataclass, config_to_dict
from maze_train.core.errors import ConfigError
from maze_train.envs.config import EnvConfig
from maze_train.learner.config import Schedule


@dataclass(kw_only=True)
class Part(BaseSettings):
    """A nested section."""

    size: int = 1
    """Size, > 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("size", self.size)


@dataclass(kw_only=True)
class LargePart(Part):
    """Section derived from `Part`."""

    depth: int = 2
    """Depth."""


@dataclass(kw_only=True)
class Settings(BaseSettings):
    """Settings with every supported type."""

    count: int = 0
    rate: float = 0.0
    flag: bool = False
    name: str | None = None
    mode: Literal["max", "min"] = "max"
    limit: int | None = None
    lr: float | Schedule = 0.1
    sizes: list[int] = field(default_factory=list)
    pairs: list[list[float]] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[dict[str, Any]] = field(default_factory=list)
    anything: Any = None
    part: Part = field(default_factory=Part)


def build(**values: Any) -> Settings:
    """Return the settings built from `values` below the path `top`."""
    return build_dataclass(Settings, values, "top")


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("count", 3, 3),
        ("count", 1e6, 1_000_000),
        ("count", "1e6", 1_000_000),
        ("count", "10k", 10_000),
        ("count", "1M", 1_000_000),
        ("limit", "1.001m", 1_001_000),
        ("rate", 1, 1.0),
        ("rate", "1e-3", 1e-3),
        ("flag", True, True),
        ("name", "x", "x"),
        ("mode", "min", "min"),
        ("limit", "1e2", 100),
        ("lr", 1, 1.0),
        ("lr", "3e-4", 3e-4),
        ("lr", {"start": 1, "end": 0}, Schedule(start=1.0, end=0.0)),
        ("lr", Schedule(start=1.0, end=0.0), Schedule(start=1.0, end=0.0)),
        ("lr", [[0, 1], ("1e2", "5e-1")], Schedule(points=[[0, 1], [100, 0.5]], by="env_steps")),
        ("sizes", (64, 1e2), [64, 100]),
        ("pairs", [[0, 1], (2, "3")], [[0.0, 1.0], [2.0, 3.0]]),
        ("kwargs", {"a": {"b": [1, None]}}, {"a": {"b": [1, None]}}),
        ("wrappers", [{"_target_": "a.B"}], [{"_target_": "a.B"}]),
        ("anything", (1, 2), (1, 2)),
        ("anything", {"_tuple_": [1, {"_tuple_": []}]}, (1, ())),
        ("kwargs", {"sizes": [(8, 4)], "by": {1: "a"}}, {"sizes": [(8, 4)], "by": {1: "a"}}),
        ("part", {"size": 2}, Part(size=2)),
        ("part", Part(size=3), Part(size=3)),
        ("part", {"_target_": f"{__name__}.LargePart", "depth": 4}, LargePart(depth=4)),
    ],
)
def test_values_are_converted_to_field_types(key: str, given: Any, expected: Any) -> None:
    """Values in every accepted form are converted to the declared type."""
    value = getattr(build(**{key: given}), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("count", 1.5, "top.count = 1.5: expected an integer"),
        ("count", True, "top.count = True: expected an integer"),
        ("count", "inf", "top.count = 'inf': expected an integer"),
        ("count", "1e3k", "top.count = '1e3k': expected an integer"),
        ("rate", "10m", "top.rate = '10m': expected a number"),
        ("rate", "fast", "top.rate = 'fast': expected a number"),
        ("flag", 1, "top.flag = 1: expected true or false"),
        (
            "name",
            20261120,
            "top.name = 20261120: expected a string; quote strings that look like numbers",
        ),
        ("mode", "maxx", "top.mode = 'maxx': expected one of max, min; did you mean 'max'?"),
        ("lr", "x", "top.lr = 'x': expected a number, linear_<start>, or a schedule"),
        ("lr", {"start": 1}, "top.lr: expected {start: 0.001, end: 0}"),
        ("lr", {"begin": 1}, "top.lr.begin = 1: unknown"),
        ("lr", {"start": "a", "end": 0}, "top.lr.start = 'a': expected a number"),
        ("lr", [0, 0.1], "top.lr = [0, 0.1]: expected pairs [environment steps, value] with step"),
        ("lr", [[1, 0.1], [2, 0]], "from 0, such as [[0, 1e-3], [100_000, 1e-4]]"),
        ("lr", [[0, 0.1], [2, 0], [1, 0]], "top.lr = [[0, 0.1], [2, 0], [1, 0]]: expected pairs"),
        ("lr", [], "top.lr = []: expected pairs"),
        ("sizes", 64, "top.sizes = 64: expected a list"),
        ("sizes", [64, "b"], "top.sizes[1] = 'b': expected an integer"),
        ("pairs", [[0, "b"]], "top.pairs[0][1] = 'b': expected a number"),
        ("kwargs", [1], "top.kwargs = [1]: expected a mapping"),
        (
            "kwargs",
            {"a": {"_tuple_": 1}},
            "top.kwargs.a = {'_tuple_': 1}: expected {_tuple_: [a, b]}",
        ),
        ("kwargs", {"a": {"_tuple_": [], "b": 1}}, "expected {_tuple_: [a, b]} for the tuple"),
        (
            "kwargs",
            {"a": {(1, 2): 3}},
            "top.kwargs.a = (1, 2): expected strings or numbers as keys",
        ),
        ("wrappers", ["a.B"], "top.wrappers[0] = 'a.B': expected a mapping"),
        ("part", "big", "top.part = 'big': expected a mapping with the keys size"),
        ("part", {"size": 0}, "top.part.size = 0: expected a number > 0"),
        (
            "part",
            {"siz": 1},
            "top.part.siz = 1: unknown; did you mean top.part.size? allowed: size",
        ),
        ("part", {"_target_": "nowhere.X"}, "top.part._target_ = 'nowhere.X': no module"),
        (
            "part",
            {"_target_": "maze_train.learner.config.Schedule"},
            f"expected a dataclass derived from {__name__}.Part",
        ),
        ("cuont", 1, "top.cuont = 1: unknown; did you mean top.count? allowed: count, rate, flag"),
        ("zzz", 1, "top.zzz = 1: unknown; allowed: count"),
    ],
)
def test_invalid_values_raise_with_key_and_remedy(key: str, given: Any, message: str) -> None:
    """The message names the full key, the value, what is allowed, and the nearest correct name."""
    with pytest.raises(ConfigError) as caught:
        build(**{key: given})
    assert message in str(caught.value)


def test_configuration_copies_its_source() -> None:
    """Later changes of the given mapping do not affect the configuration."""
    kwargs: dict[str, Any] = {"sizes": [1]}
    settings = build(kwargs=kwargs)
    kwargs["sizes"].append(2)
    assert settings.kwargs == {"sizes": [1]}


def test_missing_required_field_raises() -> None:
    """A missing field without default raises ConfigError instead of TypeError."""

    @dataclass(kw_only=True)
    class Required(BaseSettings):
        size: int

    with pytest.raises(ConfigError, match="size"):
        build_dataclass(Required, {}, "top")


PPO = {"env": "CartPole-v1", "algorithm": "ppo"}


def test_choices_may_be_names_mappings_or_objects() -> None:
    """A choice is a name, a mapping with a name or with changes of the default, or an object."""
    config = load_config({**PPO, "runner": "local"})
    assert config.env == EnvConfig(id="CartPole-v1")
    assert config.algorithm == PPOAlgorithmConfig(reward_scaling=False)
    assert config.runner.name == "local"
    named = {"algorithm": {"name": "ppo", "lr": 0.01}, "runner": {"concurrency": 3}}
    config = load_config({**PPO, **named})
    assert config.algorithm == PPOAlgorithmConfig(lr=0.01, reward_scaling=False)
    assert (config.runner.name, config.runner.concurrency) == ("dev", 3)
    algorithm = A2CAlgorithmConfig(lr=0.5, reward_scaling=False)
    config = load_config({"env": EnvConfig(id="CartPole-v1"), "algorithm": algorithm})
    assert config.algorithm is algorithm


def test_dotted_keys_set_single_values() -> None:
    """`algorithm.lr` changes one value of the named option; the given mappings are not modified."""
    env = {"id": "CartPole-v1"}
    node = {"env": env, "algorithm": "ppo", "algorithm.lr": "1e-2", "env.kwargs.size": 2}
    config = load_config(node)
    assert config.algorithm == PPOAlgorithmConfig(lr=1e-2, reward_scaling=False)
    assert config.env.kwargs == {"size": 2}
    assert env == {"id": "CartPole-v1"}


def test_defaults_depend_on_the_algorithm() -> None:
    """Defaults depend on the algorithm, also for `TrainConfig(...)`; arguments are not modified."""
    runner = DevRunnerConfig()
    config = TrainConfig(
        env=EnvConfig(id="E-v0"), algorithm=ESAlgorithmConfig(), run_dir="run", runner=runner
    )
    assert (config.runner.concurrency, config.total_steps) == (64, 100_000)
    assert config.run_dir == str(Path("run").absolute())
    assert config == load_config({**config_to_dict(config), "run_dir": "run"})
    assert runner == DevRunnerConfig()


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"seed": 3, "seed.x": 1}, ["seed.x = 1: seed is 3 and has no keys"]),
        (
            {"experiment": "ppo/CartPol-v1"},
            ["experiment = 'ppo/CartPol-v1': no such option"],
        ),
        ({"algorithm": "pp0"}, ["algorithm = 'pp0': no such option; did you mean ppo?"]),
        ({"runner": "locla"}, ["did you mean local?"]),
        *(
            (
                {"algorithm": algorithm},
                ["algorithm: choose one: algorithm=<name>", "\n  ppo     Proximal policy"],
            )
            for algorithm in (None, {"lr": 0.1})
        ),
        ({"algorithm.gamma": 2}, ["algorithm.gamma = 2.0: "]),
        ({"env.max_episode_steps": 0}, ["env.max_episode_steps = 0: "]),
    ],
)
def test_invalid_choices_raise(changes: dict[str, Any], messages: list[str]) -> None:
    """The message contains the full key, and the closest name or all options with descriptions."""
    with pytest.raises(ConfigError) as caught:
        load_config({**PPO, **changes})
    assert all(message in str(caught.value) for message in messages)
    assert str(caught.value).startswith(next(iter({**changes}.keys())).partition(".")[0])


@pytest.mark.parametrize(
    "node",
    [
        {"env": "CartPole-v1", "algorithm": "ppo"},
        {
            "env": {"_target_": "my.Env", "kwargs": {"a": [1, (2, (3,))], "b": {4: ()}}},
            "algorithm": "a2c",
            "runner": "local",
        },
        {"env": "E-v0", "algorithm": "ppo", "algorithm.lr": {"start": 1e-5, "end": 0}},
        {
            "env": "E-v0",
            "algorithm": "ppo",
            "seed": 1,
            "algorithm.entropy_coef": {"points": [[0, 1e-5], [10, 0]], "by": "updates"},
            "model.value_support": [-3, 3],
        },
    ],
)
def test_configuration_round_trips_through_yaml(node: dict[str, Any]) -> None:
    """`load_config(config_to_dict(c)) == c`, also through the text of a YAML file."""
    config = load_config(node)
    assert load_config(config_to_dict(config)) == config
    text = OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))
    again = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(again, dict)
    assert load_config({str(key): value for key, value in again.items()}) == config


def test_config_to_dict_names_classes() -> None:
    """Choices have `_target_`; sections with a single class do not."""
    dumped = config_to_dict(load_config({"env": {"_target_": "my.Env"}, "algorithm": "ppo"}))
    assert dumped["env"]["_target_"] == "my.Env"
    assert dumped["algorithm"]["_target_"].endswith("PPOAlgorithmConfig")
    assert dumped["runner"]["_target_"].endswith("DevRunnerConfig")
    assert "_target_" not in dumped["evaluation"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sizes", [1, "${count}"]),
        ("pairs", [[1.0, 2.0], [3.0, 4.0]]),
        ("kwargs", {"a": [1, {"b": [2]}], "c": "${name}"}),
        ("wrappers", [{"_target_": "my.Wrapper", "sizes": [1]}]),
        ("anything", [{"a": [1]}]),
        ("part", {"size": 2}),
        ("lr", {"start": 0.5, "end": 0.0}),
        ("limit", "${count}"),
    ],
)
def test_omegaconf_containers_are_settings(key: str, value: Any) -> None:
    """OmegaConf containers, with and without interpolations, are accepted as settings."""
    node = OmegaConf.create({key: value, "count": 7, "name": "n"})
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    expected = config_to_dict(build(**{str(key): value for key, value in plain.items()}))
    given: list[dict[str, Any]] = [{**node}, {"count": 7, "name": "n", key: node[key]}]
    for values in given:
        for built in (build(**values), Settings(**values)):
            assert json.dumps(config_to_dict(built)) == json.dumps(expected)
            assert type(vars(built)[key]) is type(vars(build(**plain))[key])


def test_environment_replaces_that_of_a_preset() -> None:
    """Both an id and a class replace the environment of a preset."""
    config = load_config({"experiment": "ppo/robot", "env": "InvertedPendulum-v5"})
    assert (config.env.id, config.model.activation) == ("InvertedPendulum-v5", "elu")
    config = load_config({"experiment": "ppo/robot", "env": {"id": None, "_target_": "my.Env"}})
    assert (config.env.id, config.env.target) == (None, "my.Env")


@pytest.mark.parametrize(
    ("algorithm", "settings", "expected"),
    [
        ("ppo", {"model.rnn.size": 8}, "large"),
        ("ppo", {"model": "vector_rnn"}, "large"),
        ("ppo", {"policies": {"a": {"agents": ["a"], "model": {"rnn": {"size": 8}}}}}, "large"),
        ("ppo", {"model": "vector_rnn", "algorithm.reward_scaling": False}, False),
        ("ppo", {"model.shared_trunk": True}, False),
        ("ppo", {"algorithm.reward_scaling": True}, True),
        ("a2c", {"model": "vector_rnn"}, False),
        ("impala", {"model": "vector_rnn"}, False),
    ],
    ids=str,
)
def test_recurrent_ppo_scales_rewards_by_default(algorithm, settings, expected):
    """The default of `reward_scaling` for shared recurrent networks; explicit values win."""
    config = load_config({"env": "CartPole-v1", "algorithm": algorithm, **settings})
    assert config.algorithm.reward_scaling == expected
    assert replace(config) == config
