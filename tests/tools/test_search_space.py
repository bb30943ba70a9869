"""Ranges of a search: syntax, validation, sampling."""

from __future__ import annotations

from typing import Any

import pytest
from cases import sweep

from maze_train import ConfigError, TrainConfig, config_to_dict
from maze_train.config.compose import load_config
from maze_train.config.options import list_options
from maze_train.config.search_config import SearchConfig, load_search_config, without_search
from maze_train.core.conversion import field_of_key
from maze_train.tools.search import Space, short_names, shown

pytest.importorskip("optuna", reason="needs the extra optuna")

PPO = {"env": "CartPole-v1", "algorithm": "ppo"}


def space_of(ranges: dict[str, Any], **settings: Any) -> Space:
    """Return the search space of a search with PPO."""
    config, own = load_search_config({**PPO, **settings, "search": ranges})
    return Space(config.ranges, own)


def test_search_and_run_settings_have_distinct_names() -> None:
    """Settings of searches and of runs share the command line."""
    assert not field_of_key(SearchConfig).keys() & field_of_key(TrainConfig).keys()


def test_ranges_may_be_nested_or_dotted() -> None:
    """Ranges are nested or dotted; lists are choices; null removes a range."""
    node = {
        "algorithm": {"lr": {"low": 1e-4, "high": 1e-2, "log": True}, "gamma": [0.9, 0.99]},
        "algorithm.batch_size": {"low": 64, "high": 256, "step": 64},
        "model": {"hidden_sizes": {"choices": [[8], [8, 8]]}, "activation": None},
        "env": {},
    }
    config, settings = load_search_config({**PPO, "search": node, "search.algorithm.gamma": None})
    assert list(config.ranges) == ["algorithm.lr", "algorithm.batch_size", "model.hidden_sizes"]
    assert config.ranges["model.hidden_sizes"].choices == [[8], [8, 8]]
    assert settings == PPO
    parts = {"search.algorithm.lr.high": 0.1, "search.algorithm.gamma": {"choices": [0.5]}}
    changed = load_search_config({**PPO, "search": node, **parts})[0].ranges
    assert (changed["algorithm.lr"].low, changed["algorithm.lr"].high) == (1e-4, 0.1)
    assert changed["algorithm.gamma"].choices == [0.5]
    group = {"search": {"algorithm": {"lr": [0.1]}}, "search.algorithm": {"gamma": [0.5]}}
    assert [*load_search_config({**PPO, **group})[0].ranges] == ["algorithm.lr", "algorithm.gamma"]
    whole = {"search": "ppo", "search.algorithm.lr": {"choices": [0.1]}}
    named = load_search_config({**PPO, **whole, "search.algorithm.gamma": None})[0].ranges
    assert named["algorithm.lr"].choices == [0.1]
    assert "algorithm.gamma" not in named


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"algorithm.lr": {"low": 1.0}}, "search.algorithm.lr.high = None: expected {low: a"),
        ({"algorithm.lr": {"low": 2, "high": 1}}, "search.algorithm.lr.high = 1: expected a numb"),
        ({"algorithm.lr": {"low": 1, "high": "x"}}, "search.algorithm.lr.high = 'x': expected"),
        ({"algorithm.lr": {"low": 1, "hi": 2}}, "search.algorithm.lr.hi = 2: unknown"),
        ({"algorithm.lr": 1e-3}, "search.algorithm.lr = 0.001: expected a mapping with"),
        ({"algorithm.lr": {"low": 0, "high": 1, "log": True}}, "search.algorithm.lr.low = 0: "),
        (
            {"algorithm.lr": []},
            "search.algorithm.lr.choices = []: expected either a list of",
        ),
        ({"algorithm.lr": {"low": 1, "choices": [1]}}, "search.algorithm.lr.choices = [1]"),
        (
            {"algorithm.lr": {"low": 1e-3, "high": 1, "log": True, "step": 0.1}},
            "search.algorithm.lr.step = 0.1: expected a number > 0, and log: false",
        ),
        ({}, "search = {}: expected ranges: search=a2c"),
        (
            {"algorithm.learning_rate": [1e-3]},
            "search.algorithm.learning_rate = 0.001: not a valid setting: "
            "algorithm.learning_rate = 0.001: unknown; did you mean algorithm.lr?",
        ),
        (
            {"algorithm.gamma": {"low": 0.9, "high": 1.1}},
            "search.algorithm.gamma = 1.1: not a valid setting: algorithm.gamma = 1.1: expected",
        ),
        ({"algorithm.batch_size": [64, 2.5]}, "search.algorithm.batch_size = 2.5: not a valid"),
    ],
)
def test_invalid_ranges_raise(ranges: dict[str, Any], message: str) -> None:
    """One message contains setting, value and what is expected; values must be valid for a run."""
    with pytest.raises(ConfigError) as caught:
        space_of(ranges)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_trial": 3}, "n_trial = 3: unknown; did you mean n_trials? allowed: search, n_trials"),
        ({"total_step": 3}, "total_step = 3: unknown; did you mean total_steps?"),
        ({"n_trials": 0}, "n_trials = 0: expected a number >= 1"),
        ({"value": "last"}, "value = 'last': "),
        ({"run_dir": "a"}, "run_dir: trials are stored in the study directory"),
        ({"search": "pp"}, "search = 'pp': no such option; did you mean ppo?"),
        ({"search": [1], "search.seed": [1]}, "search = [1]: expected ranges by setting"),
        (
            {"search": {"algorithm.lr": [0.1]}, "search.algorithm.lr.high": 1},
            "search.algorithm.lr.high = 1: cannot change a part of a list",
        ),
    ],
)
def test_invalid_search_settings_raise(settings: dict[str, Any], message: str) -> None:
    """Errors name the settings of the search or those of its runs."""
    with pytest.raises(ConfigError) as caught:
        load_search_config({**PPO, "search": "ppo", **settings})
    assert str(caught.value).startswith(message)


def test_ranges_become_distributions() -> None:
    """Ranges of integer settings are integers; ranges of floats may have integer bounds."""
    space = space_of(
        {
            "algorithm.lr": {"low": 1e-4, "high": 1e-2, "log": True, "linear": True},
            "algorithm.entropy_coef": {"low": 0, "high": 1},
            "algorithm.batch_size": {"low": 64, "high": 256, "step": 64},
            "algorithm.n_rollout_steps": {"low": 64, "high": 256, "log": True},
            "model.hidden_sizes": [[8], [8, 8]],
            "model.activation": [None, "tanh"],
        }
    )
    kinds = {key: type(found).__name__ for key, found in space.distributions.items()}
    assert list(kinds.values()) == [
        *("FloatDistribution", "FloatDistribution", "IntDistribution", "IntDistribution"),
        *("CategoricalDistribution", "CategoricalDistribution"),
    ]
    assert vars(space.distributions["algorithm.batch_size"])["step"] == 64
    params = {
        "algorithm.lr": 0.002,
        "algorithm.entropy_coef": 0.5,
        "algorithm.batch_size": 128,
        "algorithm.n_rollout_steps": 64,
        "model.hidden_sizes": "[8, 8]",
        "model.activation": "null",
    }
    settings = space.settings_of(params)
    assert list(settings.values()) == ["linear_0.002", 0.5, 128, 64, [8, 8], None]
    config = load_config({**PPO, **settings})
    assert space.given(config) == params
    others = {
        r"entropy_coef = 2.0: outside": {"algorithm.entropy_coef": 2},
        r"hidden_sizes = \[9\]: outside": {"model.hidden_sizes": [9]},
        r"lr = 0.0003: the range has schedules": {"algorithm.lr": 3e-4},
        r"lr = 'adaptive_kl.*the range has schedules": {"algorithm.lr": "adaptive_kl"},
        r"lr = .*0.001.*the range has schedules": {"algorithm.lr": {"start": 0.002, "end": 0.001}},
        r"lr = 'linear_0.02': outside": {"algorithm.lr": "linear_0.02"},
        r"batch_size = 100: between two steps": {"algorithm.batch_size": 100},
    }
    for message, change in others.items():
        with pytest.raises(ConfigError, match=message):
            space.given(load_config({**PPO, **settings, **change}))


@sweep("name", list_options("search"))
def test_shipped_ranges_include_the_defaults(name: str) -> None:
    """The shipped ranges include the defaults of the algorithm."""
    env = {"sac": "Pendulum-v1", "td3": "Pendulum-v1"}.get(name, "CartPole-v1")
    node = {"env": env, "algorithm": name, "search": name}
    config, settings = load_search_config({**node, "runner.dataset": "x" if name == "bc" else None})
    base = load_config(settings)
    space = Space(config.ranges, settings)
    again = load_config({**settings, **space.settings_of(space.given(base))})
    assert config_to_dict(again) == config_to_dict(base)


def test_every_algorithm_has_ranges() -> None:
    """Only algorithms derived from another one have no ranges."""
    assert set(list_options("algorithm")) - set(list_options("search")) == {"sacfd"}


def test_without_search_keeps_run_settings_only() -> None:
    """Settings of the search are removed for the command that trains with the best settings."""
    words = ["algorithm=ppo", "++n_trials=3", "++search.algorithm.lr=[1]", "search=ppo", "++seed=1"]
    assert without_search(words) == ["algorithm=ppo", "seed=1"]


def test_values_and_names_are_shortened() -> None:
    """Numbers are rounded to four digits; names are shortened if they are unambiguous."""
    assert [shown(text) for text in ("0.00123456", "linear_0.00123456", "tanh", "65536")] == [
        *("0.001235", "linear_0.001235", "tanh", "65536")
    ]
    assert list(short_names(["a.lr", "b.lr", "b.c"]).values()) == ["a.lr", "b.lr", "c"]
