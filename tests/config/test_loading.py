"""Plain values become validated configuration dataclasses, or a message that helps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest
from omegaconf import OmegaConf

from maze_train.algorithms.a2c.config import A2CAlgorithmConfig
from maze_train.algorithms.ppo.config import PPOAlgorithmConfig
from maze_train.checks import check_positive
from maze_train.config.conversion import build_dataclass
from maze_train.config.loading import choose_one, load_config, unknown_option
from maze_train.config.writing import config_to_dict
from maze_train.envs.config import EnvConfig
from maze_train.errors import ConfigError
from maze_train.learner.config import Schedule

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(kw_only=True)
class Part:
    """A nested section."""

    size: int = 1
    """Size, > 0."""

    def __post_init__(self) -> None:
        check_positive("size", self.size)


@dataclass(kw_only=True)
class LargePart(Part):
    """A section that someone derived."""

    depth: int = 2
    """Depth."""


@dataclass(kw_only=True)
class Settings:
    """Every kind of type that settings have."""

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
    """The settings below the path `top`."""
    return build_dataclass(Settings, values, "top")


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("count", 3, 3),
        ("count", 1e6, 1_000_000),
        ("count", "1e6", 1_000_000),
        ("count", "1_000_000", 1_000_000),
        ("count", "-2", -2),
        ("rate", 1, 1.0),
        ("rate", "1e-3", 1e-3),
        ("flag", True, True),
        ("name", "x", "x"),
        ("name", None, None),
        ("mode", "min", "min"),
        ("limit", None, None),
        ("limit", "1e2", 100),
        ("lr", 1, 1.0),
        ("lr", "3e-4", 3e-4),
        ("lr", {"start": 1, "end": 0}, Schedule(start=1.0, end=0.0)),
        ("lr", Schedule(start=1.0, end=0.0), Schedule(start=1.0, end=0.0)),
        ("sizes", (64, 1e2), [64, 100]),
        ("pairs", [[0, 1], (2, "3")], [[0.0, 1.0], [2.0, 3.0]]),
        ("pairs", None, None),
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
def test_a_value_is_converted_to_the_type_of_its_field(key: str, given: Any, expected: Any) -> None:
    """Values in every accepted spelling reach the field with the type that it declares."""
    value = getattr(build(**{key: given}), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ("count", 1.5, "top.count = 1.5: expected an integer"),
        ("count", True, "top.count = True: expected an integer"),
        ("count", "many", "top.count = 'many': expected an integer"),
        ("count", None, "top.count = None: expected an integer"),
        ("count", "inf", "top.count = 'inf': expected an integer"),
        ("rate", "fast", "top.rate = 'fast': expected a number"),
        ("rate", False, "top.rate = False: expected a number"),
        ("flag", 1, "top.flag = 1: expected true or false"),
        ("flag", "true", "top.flag = 'true': expected true or false"),
        (
            "name",
            20261120,
            "top.name = 20261120: expected a string; quote what looks like a number",
        ),
        ("name", ["x"], "top.name = ['x']: expected a string"),
        ("mode", "maxx", "top.mode = 'maxx': expected one of max, min; did you mean 'max'?"),
        ("limit", "x", "top.limit = 'x': expected an integer"),
        (
            "lr",
            "x",
            "top.lr = 'x': expected a number, linear_<start>, or a schedule",
        ),
        ("lr", {"start": 1}, "top.lr: expected {start: 0.001, end: 0}"),
        ("lr", {"begin": 1}, "top.lr.begin = 1: unknown"),
        ("lr", {"start": "a", "end": 0}, "top.lr.start = 'a': expected a number"),
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
        ("kwargs", {"a": {(1, 2): 3}}, "top.kwargs.a = (1, 2): expected texts or numbers as keys"),
        ("wrappers", ["a.B"], "top.wrappers[0] = 'a.B': expected a mapping"),
        ("part", "big", "top.part = 'big': expected a mapping with the keys size"),
        ("part", {"size": 0}, "top.part.size = 0: expected a number > 0"),
        (
            "part",
            {"siz": 1},
            "top.part.siz = 1: unknown; did you mean top.part.size? allowed: size",
        ),
        ("part", {"_target_": "nowhere.X"}, "top.part._target_ = 'nowhere.X': there is no module"),
        (
            "part",
            {"_target_": "maze_train.learner.config.Schedule"},
            f"expected a dataclass that derives from {__name__}.Part",
        ),
        ("cuont", 1, "top.cuont = 1: unknown; did you mean top.count? allowed: count, rate, flag"),
        ("zzz", 1, "top.zzz = 1: unknown; allowed: count"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_remedy(
    key: str, given: Any, message: str
) -> None:
    """The message names the full key, the value, what is allowed, and the nearest correct name."""
    with pytest.raises(ConfigError) as caught:
        build(**{key: given})
    assert message in str(caught.value)


def test_the_configuration_shares_no_part_with_its_source() -> None:
    """Changing the given mapping later leaves the configuration alone."""
    kwargs: dict[str, Any] = {"sizes": [1]}
    settings = build(kwargs=kwargs)
    kwargs["sizes"].append(2)
    assert settings.kwargs == {"sizes": [1]}


def test_a_missing_required_field_is_named() -> None:
    """A field without default that is left out gives a message, no TypeError."""

    @dataclass(kw_only=True)
    class Required:
        size: int

    with pytest.raises(ConfigError, match="size"):
        build_dataclass(Required, {}, "top")


def test_names_select_options() -> None:
    """Strings choose options; an environment name is a registered id."""
    config = load_config({"env": "CartPole-v1", "algorithm": "ppo", "runner": "local"})
    assert config.env == EnvConfig(id="CartPole-v1")
    assert config.algorithm == PPOAlgorithmConfig()
    assert config.runner.name == "local"


def test_a_mapping_can_name_its_option() -> None:
    """`{name: ppo, lr: 0.01}` starts from the option and sets the rest."""
    config = load_config({"env": "E-v0", "algorithm": {"name": "ppo", "lr": 0.01}})
    assert config.algorithm == PPOAlgorithmConfig(lr=0.01)


def test_ready_made_dataclasses_are_accepted() -> None:
    """Python code can pass configuration objects."""
    algorithm = A2CAlgorithmConfig(lr=0.5)
    config = load_config({"env": EnvConfig(id="CartPole-v1"), "algorithm": algorithm})
    assert config.algorithm is algorithm


def test_dotted_keys_set_single_values() -> None:
    """`algorithm.lr` sets one value of the named option and leaves the given mappings alone."""
    env = {"id": "CartPole-v1"}
    node = {"env": env, "algorithm": "ppo", "algorithm.lr": "1e-2", "env.kwargs.size": 2}
    config = load_config(node)
    assert config.algorithm == PPOAlgorithmConfig(lr=1e-2)
    assert config.env.kwargs == {"size": 2}
    assert env == {"id": "CartPole-v1"}


def test_a_dotted_key_below_a_value_is_refused() -> None:
    """A value has no keys."""
    with pytest.raises(ConfigError, match=r"seed\.x = 1: seed is 3, which has no keys"):
        load_config({"env": "CartPole-v1", "algorithm": "ppo", "seed": 3, "seed.x": 1})


def test_the_runner_has_the_class_of_its_default() -> None:
    """Settings of the runner without a class are those of the default runner."""
    config = load_config({"env": "E-v0", "algorithm": "a2c", "runner": {"concurrency": 3}})
    assert (config.runner.name, config.runner.concurrency) == ("dev", 3)


@pytest.mark.parametrize("algorithm", [None, {"lr": 0.1}])
def test_without_algorithm_all_are_listed(algorithm: Any) -> None:
    """The message lists the algorithms, each with the first line of its text."""
    with pytest.raises(ConfigError) as caught:
        load_config({"env": "CartPole-v1", "algorithm": algorithm})
    assert "algorithm: choose one: algorithm=<name>" in str(caught.value)
    assert "\n  a2c     Advantage actor-critic" in str(caught.value)
    assert "\n  ppo     Proximal policy optimization" in str(caught.value)


def test_an_unknown_algorithm_names_the_nearest() -> None:
    """A misspelled name is answered with the nearest one and the list."""
    with pytest.raises(ConfigError, match=r"algorithm = 'pp0': no such option; did you mean ppo\?"):
        load_config({"env": "CartPole-v1", "algorithm": "pp0"})


def test_errors_of_a_section_carry_its_path() -> None:
    """Range checks inside a section, and across sections, name the full key."""
    base = {"env": "CartPole-v1", "algorithm": "ppo"}
    with pytest.raises(ConfigError, match=r"^algorithm\.gamma = 2\.0: "):
        load_config({**base, "algorithm.gamma": 2})
    with pytest.raises(ConfigError, match=r"^algorithm\.batch_size = 4096: larger than"):
        load_config({**base, "algorithm.batch_size": 4096})
    with pytest.raises(ConfigError, match=r"^env\.max_episode_steps = 0: "):
        load_config({**base, "env.max_episode_steps": 0})


def test_messages_for_choices_can_be_made_by_other_rooms() -> None:
    """The lists of options are those of the folders."""
    assert "ppo" in str(choose_one("algorithm"))
    assert "did you mean local?" in str(unknown_option("runner", "locla"))


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
def test_a_configuration_survives_the_way_to_yaml_and_back(node: dict[str, Any]) -> None:
    """`load_config(config_to_dict(c)) == c`, also through the text of a YAML file."""
    config = load_config(node)
    assert load_config(config_to_dict(config)) == config
    text = OmegaConf.to_yaml(OmegaConf.create(config_to_dict(config)))
    again = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(again, dict)
    assert load_config({str(key): value for key, value in again.items()}) == config


def test_the_dump_names_classes_and_targets() -> None:
    """Choices carry `_target_`; sections with one class do not."""
    dumped = config_to_dict(load_config({"env": {"_target_": "my.Env"}, "algorithm": "ppo"}))
    assert dumped["env"]["_target_"] == "my.Env"
    assert dumped["algorithm"]["_target_"].endswith("PPOAlgorithmConfig")
    assert dumped["runner"]["_target_"].endswith("DevRunnerConfig")
    assert "_target_" not in dumped["evaluation"]


def test_options_that_change_others_are_resolved():
    """An option with a defaults list is read as on the command line."""
    config = load_config({"env": "CartPole-v1", "algorithm": "ppo", "model": "vector_rnn"})
    assert config.model.memory is not None
    assert config.model.memory.cell == "lstm"
    assert config.model.hidden_sizes is None


def test_an_option_keeps_what_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of the options in its defaults list hold where it sets nothing itself."""
    texts = {
        "small": "hidden_sizes: [4]\nbranch_size: 2",
        "smaller": "defaults: [small, _self_]\nbranch_size: 1",
    }
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    monkeypatch.setattr("maze_train.config.options.shipped_root", lambda: tmp_path)
    config = load_config({"env": "E-v0", "algorithm": PPOAlgorithmConfig(), "model": "smaller"})
    assert (config.model.hidden_sizes, config.model.branch_size) == ([4], 1)
