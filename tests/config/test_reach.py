"""Untrusted settings that access the network or other directories raise an error."""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Any

import pytest

from maze_train import ConfigError
from maze_train.config.compose import PARTS, options
from maze_train.config.options import list_options
from maze_train.config.stored import PARTS_OF_POLICY, StoredSettings
from maze_train.config.train_config import TrainConfig
from maze_train.config.trust import REACHES, check_reach
from maze_train.core.conversion import NO_SETTING, key_of_field
from maze_train.core.targets import is_within, locate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = {
    *("algorithm.device", "env.device", "learner_group.device"),  # PyTorch devices
    *("env._target_", "env.id"),  # covered by trust
    *("algorithm.freeze.params", "algorithm.lr_factors", "algorithm.overrides"),  # names of weights
    *(
        "curriculum.metric",
        "evaluation.metric",
        "tracking.info_keys",
        "tracking.name",
        "tracking.group",
    ),  # names of metrics, and a validated name
    *("model.critic_obs", "model.normalization.exclude"),  # observations
    *("env.teams", "policies", "policies.agents", "policies_to_train"),  # agents and policies
    *("resume", "trust", "moved"),  # not read from a stored configuration
}
"""Settings whose text never refers to anything outside the run."""

CHANGES = {"curriculum.stages.attributes", "curriculum.stages.calls"}
NODES = {*PARTS, *CHANGES, "algorithm.loss_function", "env.kwargs"} - REACHES.keys()
"""Settings with text at any depth, which is checked by its form."""


def takes_text(hint: Any) -> bool:
    """Return whether a type accepts arbitrary text."""
    if hint in (str, Any):
        return True
    is_literal = typing.get_origin(hint) is typing.Literal
    return not is_literal and any(map(takes_text, typing.get_args(hint)))


def subclasses(cls: type) -> Iterator[type]:
    """Yield a class and all classes derived from it."""
    yield cls
    for derived in cls.__subclasses__():
        yield from subclasses(derived)


def text_settings(cls: type, path: str = "") -> Iterator[str]:
    """Yield the settings that accept arbitrary text, for all dataclasses of a configuration."""
    for each in subclasses(cls):
        hints = typing.get_type_hints(each)
        for field in dataclasses.fields(each):
            if not field.init or field.metadata == NO_SETTING:
                continue
            hint = hints[field.name]
            key = f"{path}.{key_of_field(field.name)}".lstrip(".")
            if takes_text(hint):
                yield key
            for arm in (hint, *typing.get_args(hint)):
                if dataclasses.is_dataclass(arm):
                    yield from text_settings(arm, key)  # type: ignore[arg-type]  # a class


def test_every_text_setting_is_in_a_reach_table() -> None:
    """A new setting must be added to one of the tables."""
    for group in ("algorithm", "runner"):
        for name in list_options(group):
            if target := options("train", ((group, name),))[group].get("_target_"):
                locate(target)  # imports the class
    found = {key.replace("policies.model.", "model.") for key in text_settings(TrainConfig)}
    assert {"runner.address", "algorithm.optimizer"} <= found
    assert found - NAMES - REACHES.keys() - NODES == set()
    assert {key for key in REACHES if not is_within(key, found)} == set()


WRITER = {"_target_": "maze_train.MLflowWriter", "tracking_uri": "http://stranger"}
REACHING: list[tuple[dict[str, Any], str]] = [
    ({"runner": {"address": "10.0.0.1:6379"}}, "runner.address=10.0.0.1:6379"),
    ({"runner": {"working_dir": "a"}}, "runner.working_dir=a"),
    ({"runner": {"dataset": "minari:a/b-v0"}}, "runner.dataset=minari:a/b-v0"),
    ({"runner": {"dataset": {"_target_": "maze_train.X", "path": "a"}}}, "runner.dataset.path=a"),
    ({"base_run": "hf://a/b"}, "base_run=hf://a/b"),
    ({"run_dir": "a"}, "run_dir=a"),
    ({"policies": {"wolf": {"source": "a"}}}, "policies.wolf.source=a"),
    ({"evaluation": {"opponents": {"first": "a"}}}, "evaluation.opponents.first=a"),
    ({"tracking": {"writers": [WRITER]}}, "tracking.writers=[...]"),
    ({"tracking": {"writers": [{"_target_": "maze_train:WandbWriter"}]}}, "tracking.writers=[...]"),
    ({"env": {"kwargs": {"a": [{"b": "/x"}]}}}, "env.kwargs.a=[...]"),
    ({"curriculum": {"stages": [{"calls": {"a": ["/x"]}}]}}, "curriculum.stages=[...]"),
    ({"env": {"kwargs": {"host": "example.com"}}}, "env.kwargs.host=example.com"),
    ({"callbacks": [{"_target_": "a.B", "token": "x"}]}, "callbacks=[...]"),
    *(
        ({"env": {"kwargs": {"x": text}}}, "env.kwargs.x=")
        for text in ("/x", "~/x", "$HOME/x", "x/../../y", "..", "http://x", "a\nfile://x", "C:\\x")
    ),
]


@pytest.mark.parametrize(("settings", "words"), REACHING)
def test_untrusted_settings_suggest_overrides(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The error suggests overrides that allow the settings; the user's settings are allowed."""
    with pytest.raises(ConfigError, match="is not signed by you; nothing was accessed") as caught:
        check_reach(settings, {"seed": 1}, "config.yaml")
    assert words in str(caught.value)
    check_reach(settings, settings, "config.yaml")
    stored = StoredSettings(tmp_path / "config.yaml", settings)
    stored.check(settings, PARTS_OF_POLICY)  # none of them is used by a policy
    StoredSettings(stored.path, settings, is_own=True).check(settings, PARTS)


def test_values_inside_the_run_are_allowed() -> None:
    """Values inside the run, and services that store their data in the run, are allowed."""
    check_reach(
        {
            "env": {"id": "ALE/Pong-v5", "kwargs": {"map": "4x4", "file": "maps/a.xml"}},
            "base_run": None,
            "policies": {"wolf": {"source": "random"}, "b": {"source": {"_target_": "torch.nn.X"}}},
            "evaluation": {"opponents": {"a": "random"}, "metric": "eval/episode_return_mean"},
            "runner": {"address": "auto", "dataset": None},
            "tracking": {"writers": [{"_target_": "maze_train.MLflowWriter", "experiment": "a"}]},
        },
        None,
        "config.yaml",
    )


def test_unrelated_override_does_not_allow_the_stored_value(tmp_path: Path) -> None:
    """An override that does not replace the stored value does not allow it."""
    settings = {"runner": {"dataset": "a", "concurrency": 2}}
    with pytest.raises(ConfigError, match=r"runner\.dataset"):
        check_reach(settings, {"runner": {"dataset": None, "concurrency": 2}}, "config.yaml")
