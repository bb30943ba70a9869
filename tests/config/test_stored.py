"""Names in the configuration of a run: provided, trusted, or set by the user."""

from __future__ import annotations

import copy
import pickle
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import pytest
import yaml

from maze_train import ConfigError, load_config
from maze_train.config.compose import merged
from maze_train.config.stored import (
    PARTS,
    check_text,
    config_text,
    parsed_settings,
    read_settings,
    write_config,
)
from maze_train.config.trust import modules_to_trust
from maze_train.core.conversion import config_to_dict
from maze_train.core.targets import InlineObject, build_targets
from maze_train.envs.building import module_of_argument, module_of_id
from maze_train.envs.factory import EnvFactory
from maze_train.envs.third_party import build_native
from maze_train.run.resuming import resume_hint, resumed_config
from maze_train.training.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from maze_train.config.train_config import TrainConfig

ENV = "own_stored.OwnEnv"
BASE: dict[str, Any] = {"algorithm": "ppo", "env": {"_target_": ENV}, "seed": 3}


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a user's module, which imports names from other modules."""
    (tmp_path / "own_stored.py").write_text(
        textwrap.dedent("""
            import os
            from os import system
            from own_elsewhere import Elsewhere
            import gymnasium

            class OwnEnv(gymnasium.Env):
                pass

            def make_env():
                return OwnEnv()
        """)
    )
    (tmp_path / "own_elsewhere.py").write_text("class Elsewhere: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """Return the directory of a run."""
    directory = tmp_path / "run"
    directory.mkdir()
    text = yaml.safe_dump({**config_to_dict(load_config(BASE)), "trust": ["own_stored"]})
    (directory / "config.yaml").write_text(text)
    return str(directory)


def refused(path: str, trust: Sequence[str], place: str = "env") -> str:
    """Return why a target in an environment is rejected, or an empty string."""
    try:
        text = yaml.safe_dump({place: {"_target_": path}})
        stored = parsed_settings(text, Path("run"), trust)
        stored.check(stored.values, tuple(PARTS))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", [ENV, "own_stored:OwnEnv", "own_stored.make_env"])
def test_trusted_module_allows_its_names(path: str) -> None:
    """Trusting a module allows its classes and functions; other names do not."""
    assert refused(path, ["own_stored"]) == ""
    for trust in ([], ["own_store"], ["stored"], ["own_stored.py"]):
        assert f"env._target_ = {path}" in refused(path, trust)


def test_error_shows_the_complete_trust() -> None:
    """The error shows the complete `trust`, for the command line and for Python."""
    text = refused(ENV, ["a"])
    assert text.endswith("trust=[a,own_stored] (in Python trust=['a', 'own_stored'])")


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ("own_stored.os.system", "(os is a separate module)"),
        ("own_stored.system", "(defined in posix)"),
        ("own_stored.Elsewhere", "(defined in own_elsewhere)"),
        ("own_stored.OwnEnv.__subclasses__", "(defined in builtins)"),
    ],
)
def test_imports_of_a_trusted_module_are_not_trusted(path: str, note: str) -> None:
    """Trusting a module does not trust the names that it imports."""
    assert note in refused(path, ["own_stored"])


def test_script_names_are_trusted_as_main() -> None:
    """Names of the running script are trusted as `__main__`."""
    assert "env._target_ = __main__.Own\n" in refused("__main__.Own", ["own_stored"])
    assert refused("__main__.Own", ["__main__"]) == ""


def test_stored_trust_is_ignored(run_dir: str) -> None:
    """Only the `trust` given by the user is used."""
    with pytest.raises(ConfigError, match="trust=\\[own_stored\\]"):
        resumed_config(run_dir, {})
    assert "trust" not in read_settings(Path(run_dir)).values
    assert resumed_config(run_dir, {"trust": ["own_stored"]}).trust == ["own_stored"]


@pytest.mark.parametrize(
    "own",
    [{"env._target_": ENV}, {"env": {"_target_": ENV}}, {"env": "CartPole-v1"}],
    ids=["a name", "a mapping", "another one"],
)
def test_targets_given_by_the_user_need_no_trust(run_dir: str, own: dict[str, Any]) -> None:
    """Targets given by the user, and stored targets that they replace or repeat, need no trust."""
    assert resumed_config(run_dir, own).trust == []
    given = {"env._target_": InlineObject(dict, ENV)}
    assert resumed_config(run_dir, given).env.target == ENV


def test_trust_must_be_a_list(run_dir: str) -> None:
    """A single string raises ConfigError."""
    with pytest.raises(ConfigError, match=r"trust = 'own_stored': expected a list"):
        resumed_config(run_dir, {"trust": "own_stored"})


@pytest.mark.parametrize("algorithm", ["a2c", "ppo", "impala", "sac", "es", "bc"])
def test_package_targets_need_no_trust(algorithm: str) -> None:
    """Everything that this package writes is allowed, including wrappers of gymnasium."""
    env = "CartPole-v1" if algorithm != "impala" else "pettingzoo:mpe/simple_spread_v3"
    settings: dict[str, Any] = {"algorithm": algorithm, "env": env}
    if algorithm == "bc":
        settings["runner.dataset"] = "somewhere"
    if algorithm in ("a2c", "ppo"):
        settings["model.rnn"] = {"size": 8}
        settings["model.value_transform"] = {"_target_": "maze_train.ReduceScaleValueTransform"}
    wrappers = ["maze_train.RewardScalingWrapper", "gymnasium.wrappers.FlattenObservation"]
    settings["env.wrappers"] = [{"_target_": name} for name in wrappers]
    settings["tracking.writers"] = [{"_target_": "maze_train.MLflowWriter"}]
    config = load_config(settings)
    own = {"runner": {"dataset": config.runner.dataset}}  # see `test_reach.py`
    stored = parsed_settings(yaml.safe_dump(config_to_dict(config)), Path("run"), [], own)
    stored.check(stored.values, tuple(PARTS))
    assert modules_to_trust(config) == []


def build(nodes: Any, kind: type) -> Any:
    """Build a list of components."""
    return build_targets(nodes, "components", kind)


FORGETFUL: dict[str, tuple[dict[str, Any], Callable[[TrainConfig], Any]]] = {
    "a section": ({"algorithm": {"_target_": "own_marking.Part"}}, lambda config: config),
    "a setting": ({"algorithm": {"lr": {"_target_": "own_marking.Part"}}}, lambda config: config),
    "a class": (
        {"env": {"id": None, "_target_": "own_marking.Part"}},
        lambda config: EnvFactory(config.env)(),
    ),
    "an id": ({"env": {"id": "own_marking:E-v0"}}, lambda config: EnvFactory(config.env)()),
    "an id like the name of an object": (
        {"env": {"id": "own_marking:<E>"}},
        lambda config: EnvFactory(config.env)(),
    ),
    "a vector id": (
        {"env": {"id": "own_marking:E-v0", "backend": "native"}},
        lambda config: build_native(config.env, 1, 1, None),
    ),
    "an id as argument": (
        {"env": {"id": "CartPole-v1", "kwargs": {"a": [{"b": "own_marking:E-v0"}]}}},
        lambda config: EnvFactory(config.env)(),
    ),
    "a wrapper": (
        {"env": {"id": "CartPole-v1", "wrappers": [{"_target_": "own_marking:Part"}]}},
        lambda config: EnvFactory(config.env)(),
    ),
    "a callback": (
        {"callbacks": [{"_target_": "own_marking.Part"}]},
        lambda config: build(config.callbacks, Callback),
    ),
    "a nested argument": (
        {
            "callbacks": [
                {"_target_": "maze_train.StopAtReturn", "a": {"_target_": "own_marking.P"}}
            ]
        },
        lambda config: build(config.callbacks, Callback),
    ),
}


@pytest.mark.parametrize("place", FORGETFUL)
@pytest.mark.parametrize(
    "copied", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_unchecked_names_are_not_imported(
    place: str, copied: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Names are checked where they are resolved, in copies and in worker processes as well."""
    marker = tmp_path / "marker"
    (tmp_path / "own_marking.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    settings, use = FORGETFUL[place]
    values = merged(config_to_dict(load_config({**BASE, "env": "CartPole-v1"})), settings)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"(?s)^trust: .*own_marking.*trust=\[own_marking\]"):
        use(copied(load_config(copied(read_settings(tmp_path).values))))
    assert not marker.exists()


def test_stored_yaml_can_be_read(tmp_path: Path) -> None:
    """Keys keep their order; values that occur twice are written twice, without an alias."""
    shared = [1, {"a": 2}]
    config = load_config({**BASE, "env.kwargs": {"one": shared, "other": shared}})
    write_config(tmp_path, config_text(config))
    settings = read_settings(tmp_path).values
    assert load_config(settings) == config
    assert list(settings) == [
        key for key in config_to_dict(config) if key not in ("trust", "moved")
    ]


def test_resume_command_includes_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command includes `trust` for custom modules unless the run is signed."""
    given = {"env": dict, "tracking.writers": [dict, {"_target_": "my.Writer"}]}
    call = "train(env=..., **{'tracking.writers': ...}, resume='run'"
    assert resume_hint(Path("run"), load_config(BASE)) == "to continue: maze-run resume=run"
    assert resume_hint(Path("run"), load_config({**BASE, **given})) == f"to continue: {call})"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/dev/null")
    config = load_config({**BASE, "tracking.writers": [{"_target_": "my.Writer"}]})
    command = resume_hint(Path("run"), config)
    assert command == "to continue: maze-run resume=run trust=[my,own_stored]"
    told = resume_hint(Path("run"), load_config({**BASE, **given}))
    assert told == f"to continue: {call}, trust=['my'])"


def test_unreadable_values_are_not_written() -> None:
    """An error is raised before the file is written."""
    config = config_to_dict(load_config({**BASE, "env.kwargs": {"walls": [1] * 50_000}}))
    with pytest.raises(ConfigError, match=r"config\.yaml: would not be a valid file: .*larger"):
        check_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("entry", "module"),
    [
        ("shimmy.openai_gym_compatibility:GymV26CompatibilityV0", "shimmy"),
        ("shimmy:GymV26CompatibilityV0", "shimmy"),
        ("shimmy.dm_control_compatibility:DmControlCompatibilityV0", ""),
        ("gymnasium.envs.classic_control.cartpole:CartPoleEnv", ""),
    ],
)
def test_environment_ids_resolve_to_their_module(entry: str, module: str) -> None:
    """Ids with and without a version resolve to the module of the entry point."""
    for i, kind in enumerate(("entry_point", "vector_entry_point")):
        name = f"test/Old{len(entry)}x{i}"
        gymnasium.register(f"{name}-v3", **{kind: entry})
        try:
            assert {module_of_id(name), module_of_id(f"{name}-v3")} == {module}
            assert module_of_argument(name) == module
        finally:
            del gymnasium.registry[f"{name}-v3"]


@pytest.mark.parametrize(
    ("text", "module"),
    [
        *(("own_stored:E", "own_stored"), ("own_stored.below:E-v0", "own_stored.below")),
        *(("own_stored:", "own_stored"), ("own_stored:a b", "own_stored"), ("no_such:E-v0", "")),
        *(("http://own_stored", ""), ("cuda:0", ""), ("C:\\own_stored", ""), ("no_module: b", "")),
    ],
)
def test_arguments_that_name_modules_are_ids(text: str, module: str) -> None:
    """The text must name an existing module; addresses, devices and paths do not."""
    assert module_of_argument(text) == module
