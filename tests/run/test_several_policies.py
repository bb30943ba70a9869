"""Rollouts with several policies, each for some agents."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cases import everyday
from own_policies import TakesOne
from rollouts import play, rows
from short_runs import short_run, summary

from maze_train import ConfigError, RolloutRunner, load_rollout_config, open_dataset

pytestmark = pytest.mark.usefixtures("empty_directory")

ENV: dict[str, Any] = {"_target_": "agent_envs.Heaps"}
ONE: dict[str, Any] = {"_target_": "own_policies.TakesOne"}
ALL_ONE = {"one": {"agents": ["f*"], "source": ONE}, "second": ONE, "referee": ONE}
TRUST = {"trust": ["agent_envs", "own_policies"]}
RECURRENT = {
    "model.rnn": {"cell": "gru", "size": 6},
    "algorithm.n_rollout_steps": 12,
    "algorithm.sequence_length": 4,
}


class Engine(TakesOne):
    """Policy that cannot be copied."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__(*spaces)
        self.lock = threading.Lock()


def run(name: str, **more: Any) -> None:
    """Train a policy `first` of both players, and a policy of the referee."""
    short_run(name, "ppo", env=ENV, **{"total_steps": 128, **more})


def play_heaps(**settings: Any) -> Any:
    """Play a rollout in which players take stones from a heap."""
    given = {"env": ENV, "policies": ALL_ONE} if "run" not in settings else {}
    return play(**{**given, **TRUST, **settings})


def test_agent_returns_and_turns_match_the_game() -> None:
    """Returns and turns match the game."""
    result = play_heaps(record=True, seed=3)
    heaps = [int(np.random.default_rng(seed).integers(6, 13)) for seed in range(3, 8)]
    assert len({heap % 2 for heap in heaps}) == 2
    wins = [1.0 if heap % 2 else -1.0 for heap in heaps]
    dataset = open_dataset("out/trajectories")
    for heap, win, row, episode in zip(heaps, wins, rows(), dataset, strict=True):
        turns = {"first": (heap + 1) // 2, "second": heap // 2, "referee": 2}
        returns = {"first": win, "second": -win, "referee": 0.5}
        assert {agent: int(row[f"turns/{agent}"]) for agent in turns} == turns
        assert {agent: float(row[f"return/{agent}"]) for agent in turns} == returns
        assert episode.obs["acts"][:-1].sum(0).tolist() == list(turns.values())
        assert episode.obs["rewards"].sum(0).tolist() == list(returns.values())
        assert float(row["return"]) == pytest.approx(0.5 / 3)
    found = summary("out")
    share = wins.count(1.0) / 5
    first, second, referee = (found["agents"][name] for name in ("first", "second", "referee"))
    assert first == {
        "policy": "one",
        "return_mean": pytest.approx(2 * share - 1),
        "return_std": pytest.approx(np.std(wins)),
        "return_min": -1.0,
        "return_max": 1.0,
        "turns_mean": np.mean([(heap + 1) // 2 for heap in heaps]),
        "win_rate": share,
        "draw_rate": 0.0,
        "loss_rate": 1 - share,
    }
    assert (second["win_rate"], referee["loss_rate"]) == (first["loss_rate"], 1.0)
    assert result.summary.agents["second"].return_mean == second["return_mean"]
    played = {"one": {"agents": ["first"], "source": ONE}}
    played |= {name: {"agents": [name], "source": ONE} for name in ("second", "referee")}
    assert found["policy"] == dataset.metadata.policy == {"policies": played}
    assert found["deterministic"] is None


def test_win_rate_without_opponents_is_nan() -> None:
    """Win rates are NaN without opponents with another policy."""
    policies = {"players": {"agents": ["first", "second"], "source": ONE}, "referee": ONE}
    play_heaps(policies=policies)
    first = summary("out")["agents"]["first"]
    heaps = [int(np.random.default_rng(seed).integers(6, 13)) for seed in range(5)]
    assert first["win_rate"] == np.mean([heap % 2 for heap in heaps])  # 1 against 0.5
    game = {"_target_": "agent_envs.Rochambeau"}
    play(env=game, policies={"all": {"agents": ["*"], "source": "random"}}, output_dir="all")
    assert summary("all")["agents"]["left"]["win_rate"] is None


def test_win_rates_compare_team_sums() -> None:
    """Win rates compare sums of teams with other policies."""
    teams = {"red": ["red_*"], "blue": ["blue_*"]}
    for env, named in (("Pairs", {}), ("Loners", teams)):
        ones = {"_target_": "own_policies.AlwaysOne"}
        policies = {
            "ones": {"agents": ["red_*"], "source": ones},
            "zeros": {"agents": ["b*"], "source": ONE},
        }
        given = {"env": {"_target_": f"agent_envs.{env}", "teams": named}, "output_dir": env}
        play(policies=policies, **given, **TRUST)
        rates = {name: own["win_rate"] for name, own in summary(env)["agents"].items()}
        assert rates == {"red_0": 1.0, "blue_0": 0.0, "red_1": 1.0, "blue_1": 0.0}


@pytest.mark.parametrize(
    "more",
    everyday(1, [{}, RECURRENT, {"model.centralized_critic": True}]),
    ids=["plain", "memory", "centralised critic"],
)
def test_explicit_policies_equal_the_defaults(more: dict[str, Any]) -> None:
    """Explicit policies of a run equal the defaults, also sampled."""
    run("run", **more)
    for chance in (True, False):
        plain = play_heaps(run="run", output_dir=f"plain{chance}", deterministic=chance)
        policies = {"judge": {"agents": ["ref*"], "source": "run:referee"}, "second": "run:first"}
        result = play_heaps(
            run="run", policies=policies, output_dir=f"named{chance}", deterministic=chance
        )
        assert rows(f"named{chance}") == rows(f"plain{chance}")
        assert summary(f"named{chance}")["policy"]["policies"]["first"]["agents"] == ["first"]
    assert plain.summary.agents["second"].policy == "first"
    assert result.summary.agents["second"].policy == "second"


@pytest.mark.exhaustive
def test_agents_are_identified_by_name() -> None:
    """Agents are identified by name."""
    run("run", **RECURRENT, **{"algorithm.lr": 0.05, "total_steps": 512})
    played = [
        [(episode.agent_returns, episode.agent_turns) for episode in found.episodes]
        for found in (
            play_heaps(run="run", n_episodes=30, output_dir=name, env={"_target_": name})
            for name in ("agent_envs.Heaps", "agent_envs.HeapsFromBehind")
        )
    ]
    assert played[0] == played[1]


def test_unnamed_agents_use_policies_of_the_run() -> None:
    """Names match agents first, then policies of the run."""
    run("run")
    cases: dict[str, Any] = {
        "first": {"first": ["first"], "first_of_run": ["second"], "referee": ["referee"]},
        "second": {"first": ["first"], "second": ["second"], "referee": ["referee"]},
        "referee": {"first": ["first", "second"], "referee": ["referee"]},
    }
    for name, agents in cases.items():
        play_heaps(run="run", policies={name: "random"}, output_dir=name)
        found = summary(name)["policy"]["policies"]
        assert {key: own["agents"] for key, own in found.items()} == agents
        assert found[name] == {"agents": [name], "source": "random"}
        for owner in agents.keys() - {name}:
            of_run = owner.removesuffix("_of_run")
            assert found[owner]["source"] == f"run:{of_run}"
            assert found[owner]["algorithm"] == "ppo"
    policies = {"old": {"agents": ["main"], "source": "base:main"}}
    named = {"main": {"agents": ["first", "second"]}, "judge": {"agents": ["ref*"], "source": ONE}}
    for name in ("base", "other"):
        run(name, policies=named, **TRUST)
    play_heaps(run="other", policies=policies)
    found = summary("out")["policy"]["policies"]
    assert {key: own["agents"] for key, own in found.items()} == {
        "old": ["first", "second"],
        "judge": ["referee"],
    }
    assert (found["old"]["source"], found["judge"]["source"]) == ("base:main", ONE)


def test_agents_without_policy_raise() -> None:
    """Agents without a policy raise an error."""
    policies = {"one": {"agents": ["left"]}, "two": {"agents": ["right"]}}
    for name, more in (("apart", {"policies": policies}), ("shared", {})):
        short_run(name, "ppo", env={"_target_": "agent_envs.Peek"}, total_steps=32, **more)
        given = {"run": name, "env": {"_target_": "agent_envs.Onlookers"}}
        play_heaps(**given, policies={"judge": "random"}, output_dir=f"{name}_out")
        found = summary(f"{name}_out")["policy"]["policies"]
        owners = {"one": ["left"], "two": ["right"]} if more else {"default": ["left", "right"]}
        assert {key: own["agents"] for key, own in found.items()} == {"judge": ["judge"], **owners}
    with pytest.raises(ConfigError, match=r"policies = .*no policy for judge; add them"):
        play_heaps(run="apart", env=given["env"], policies={"left": "random"})


def test_policy_random_applies_to_unnamed_agents() -> None:
    """`policy=random` applies to all other agents; Python objects are allowed."""
    result = play_heaps(policy="random", policies={"second": Engine}, n_episodes=20)
    found = {key: own["agents"] for key, own in summary("out")["policy"]["policies"].items()}
    assert found == {
        "random_first": ["first"],
        "second": ["second"],
        "random_referee": ["referee"],
    }
    game = {"_target_": "agent_envs.Rochambeau"}
    play(env=game, policy="random", policies={"left": "random"}, output_dir="one")
    assert list(summary("one")["policy"]["policies"]) == ["left", "random"]
    turns = [episode.agent_turns["second"] for episode in result.episodes]
    assert len(set(turns)) > 2
    few = {"runner.concurrency": 3, "output_dir": "few"}
    play_heaps(policy="random", policies={"second": Engine}, n_episodes=20, **few)
    assert rows("few") == rows("out")


def test_written_configuration_repeats_the_rollout() -> None:
    """Short forms are written as settings with absolute directories."""
    run("run")
    play_heaps(run="run", policies={"second": "run", "first": ONE}, video=False)
    node = yaml.safe_load(Path("out/rollout.yaml").read_text())
    assert node["policies"]["second"]["source"] == str(Path("run").absolute())
    RolloutRunner(load_rollout_config({**node, "output_dir": "again"})).run()
    assert rows("again") == rows("out")


def test_policies_accept_sources_settings_and_classes() -> None:
    """Sources, single settings, and classes with arguments are accepted."""
    config = load_rollout_config(
        {
            "env._target_": "agent_envs.Heaps",
            "policies.first": "random",
            "policies.second.source": "runs/a:main",
            "policies.second.agents": ["second", "other"],
            "policies.referee._target_": "my.Policy",
            "policies.referee.size": 3,
        }
    )
    found = {key: (own.agents, own.source) for key, own in config.policies.items()}
    assert found == {
        "first": (["first"], "random"),
        "second": (["second", "other"], f"{Path('runs/a').absolute()}:main"),
        "referee": (["referee"], {"_target_": "my.Policy", "size": 3}),
    }


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"policies": {"first": "random"}}, r"policies = \['first'\]: no policy for second, ref"),
        (
            {"policy": "random", "policies": {"frist": "random"}},
            r"policies\.frist\.agents = 'frist': no such agent.*available: first, second, referee",
        ),
        (
            {"policy": "random", "policies": {"a.b": {"agents": ["first"], "source": "random"}}},
            r"policies = 'a\.b': expected a name without \. / @ :; choose another ID",
        ),
        (
            {"policies": {**ALL_ONE, "all": {"agents": ["*"], "source": "random"}}},
            r"policies\.all\.agents .*first already has the policy one",
        ),
        (
            {"policies": {"all": {"agents": ["*"], "source": "random"}}},
            r"policies\.all\.agents .*first and referee have different spaces",
        ),
        ({"policies": {**ALL_ONE, "second": None}}, r"policies\.second\.source = None: expected"),
        (
            {"policies": {**ALL_ONE, "second": {"source": "random", "frozen": True}}},
            r"policies\.second\.frozen = True: only used for training",
        ),
        ({"policy": ONE, "policies": ALL_ONE}, "with policies, use random or null"),
        (
            {"env": "CartPole-v1", "policies": ALL_ONE},
            r"policies = .*only for multi-agent environments",
        ),
        ({"env": None, "policies": ALL_ONE}, r"env: choose one"),
        ({"policies": {}}, r"run = None: expected one of run=.*policies\.<agent>=<source>"),
    ],
    ids=[
        *("left out", "typo", "id", "twice", "different spaces", "no source"),
        *("training", "all agents", "one agent", "no env", "nothing"),
    ],
)
def test_invalid_policies_raise_before_anything_is_played(
    given: dict[str, Any], problem: str
) -> None:
    """The error contains key, value and allowed values; nothing is written."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError, match=problem):
        play(**{"env": ENV, **TRUST, **given})
    assert sorted(Path().rglob("*")) == before
