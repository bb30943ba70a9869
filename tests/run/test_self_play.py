"""Self-play against snapshots of a policy."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from agent_envs import Loners, Pairs
from cases import everyday
from short_runs import rows, short_run
from toy_envs import here

from maze_train import ConfigError, EnvConfig, EnvFactory
from maze_train.collect.fixed_policies import fixed_policy
from maze_train.core.targets import InlineObject
from maze_train.nets.joint import JointModel
from maze_train.run.opponents import OpponentEvaluator

pytestmark = pytest.mark.usefixtures("empty_directory")

HEAPS: dict[str, Any] = {
    "env": {"_target_": "agent_envs.Heaps"},
    "algorithm.n_rollout_steps": 13,
    "algorithm.lr": 0.01,
    "checkpoint.interval": 1,
    "total_steps": 0,
    "trust": ["agent_envs"],
}
EVAL_RETURN = "eval/episode_return_mean"
METRIC_OF_THIRD = "eval/third/episode_return_mean"


def run(name: str, **more: Any) -> Any:
    """Run a short game in which players face their snapshots."""
    settings = {**HEAPS, **more}
    opponents = settings.pop("opponents", {"add_every": 1, "keep": 2, "draw": "by_strength"})
    policies = {
        "main": {"agents": ["first", "second"], "opponents": opponents},
        "judge": {"agents": ["referee"]},
    }
    algorithm = settings.pop("algorithm", "ppo")
    return short_run(name, algorithm, **{"policies": policies, **settings})


@pytest.mark.exhaustive
def test_league_results_are_a_table_and_a_plot() -> None:
    """The table contains the values of metrics.csv, with a plot."""
    run("run", **{"algorithm.n_epochs": 3, "tracking.plot": True})
    with Path("run/plots/league_main.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["epoch"] for row in table] == ["1", "2", "3"]
    for row, metrics in zip(table, rows("run"), strict=True):
        assert row["elo"] == metrics["league/main/elo"]
        for number in ("0", "1"):
            assert row[number] == metrics[f"league/main@{number}/win_rate"]
    assert Path("run/plots/league_main.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_opponents_play_the_policies() -> None:
    """Opponents control agents with their spaces; other agents keep their policies."""
    run("base", **{"algorithm.n_epochs": 1})
    opponents = {
        "old": "base",
        "main": "base:main",
        "random": "random",
        "one": {"_target_": "own_policies.TakesOne"},
    }
    more = {
        "algorithm.n_epochs": 2,
        "evaluation.opponents": opponents,
        "evaluation.n_episodes": 6,
        "evaluation.metric": "eval/vs_random/loss_rate",
        "policies_to_train": ["main"],
        "trust": ["agent_envs", "own_policies"],
    }
    run("run", **more)
    for row in rows("run"):
        for name in opponents:
            start = f"eval/vs_{name}"
            found = [float(row[f"{start}/{key}_rate"]) for key in ("win", "draw", "loss")]
            assert sum(found) == pytest.approx(1.0)
        # One player gets 1 and the other -1.
        for name in ("main", "old"):
            returns, wins, losses = (
                float(row[f"eval/vs_{name}/{key}"])
                for key in ("return_mean", "win_rate", "loss_rate")
            )
            assert returns == pytest.approx(wins - losses)
    best = min(float(row["eval/vs_random/loss_rate"]) for row in rows("run"))
    assert json.loads(Path("run/best/score.json").read_text())["score"] == best
    short_run("game", "ppo", env={"_target_": "agent_envs.Rochambeau"}, total_steps=32)
    problems = {
        "game": "cannot be an opponent: its spaces match no agent of another team",
        "none": "no saved policy",
    }
    for source, problem in problems.items():
        with pytest.raises(ConfigError, match=rf"evaluation\.opponents\.old .*{problem}"):
            run("other", **{**more, "evaluation.opponents": {"random": "random", "old": source}})


def fixed(action: int) -> Any:
    """Return a policy that always takes the same action in `Pairs`."""
    own = {"_target_": InlineObject(lambda *_: lambda _: action)}
    return fixed_policy(own, "own", Pairs().observation_space(""), Pairs().action_space(""))


PAIRS = [["red_0", "red_1"], ["blue_0", "blue_1"]]


@pytest.mark.parametrize(
    ("env", "named", "teams", "wins"),
    [
        (Pairs, {}, PAIRS, 1.0),
        (Loners, {"red": ["red_1", "red_0"], "blue": ["blue*"]}, PAIRS, 1.0),
        (Loners, {"red": ["red_*"]}, [PAIRS[0], ["blue_0"], ["blue_1"]], 1 / 3),
        (Loners, {}, [["red_0"], ["blue_0"], ["red_1"], ["blue_1"]], 0.0),
    ],
)
def test_team_members_are_no_opponents(env: Any, named: Any, teams: Any, wins: float) -> None:
    """A pair that always plays 1 beats a pair that plays 0, as each team.

    Without teams the opponent also plays the other member of the pair, which is a draw.
    """
    factory = EnvFactory(EnvConfig(target=InlineObject(env), teams=named))
    assert factory().metadata["teams"] == tuple(map(tuple, teams))
    judged = JointModel({"main": fixed(1)}, dict.fromkeys(env.possible_agents, "main"))
    foes = {"zero": dict.fromkeys(env.possible_agents, fixed(0))}
    evaluator = OpponentEvaluator(lambda n: here([factory] * n), 3, foes, teams, teams)
    metrics = evaluator.evaluate(judged)
    evaluator.close()
    assert metrics == {
        "eval/vs_zero/win_rate": pytest.approx(wins),
        "eval/vs_zero/draw_rate": pytest.approx(1.0 - wins),
        "eval/vs_zero/loss_rate": 0.0,
        "eval/vs_zero/return_mean": 1.0,
    }


def test_leagues_and_evaluations_use_teams() -> None:
    """Leagues and evaluations use teams; `env.teams` takes precedence."""
    policies = {"main": {"agents": ["*"], "opponents": {"add_every": 1, "share": 1.0}}}
    settings: dict[str, Any] = {
        "env": {"_target_": "agent_envs.Loners"},
        "policies": policies,
        "env.teams": {"red": ["red*"], "blue": ["blue*"]},
        "total_steps": 256,
        "evaluation.n_episodes": 5,
        "evaluation.opponents": {"random": "random"},
    }
    row = short_run("pairs", "ppo", **settings).history[-1]
    assert {f"eval/vs_random/{name}_rate" for name in ("win", "draw", "loss")} <= row.keys()
    assert row["league/main/episodes"] == row["train/episodes"], "one result in each episode"
    wrong: dict[str, Any] = {
        "red_2": r"env\.teams\.red = 'red_2': no such agent; did you mean red_",
        "blue_0": r"env\.teams\.blue .*blue_0 is already in team red",
        "*": r"policies\.main\.opponents .*agents of main in at least two teams",
    }
    for name, problem in wrong.items():
        teams = {"red": ["red_0", name], **({"blue": ["blue_0"]} if name == "blue_0" else {})}
        with pytest.raises(ConfigError, match=problem):
            short_run(
                "other", "ppo", **{**settings, "env.teams": teams, "evaluation.opponents": {}}
            )
    with pytest.raises(ConfigError, match=r"env\.teams .*the environment has one agent"):
        short_run("other", "ppo", **{"env.teams": {"red": ["*"]}}, total_steps=32)


def test_the_first_evaluation_notes_that_returns_of_agents_cancel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The note is printed once, unless opponents or a metric are set or returns do not cancel."""
    game = {"env": {"_target_": "agent_envs.Rochambeau"}, "tracking.progress": "lines"}
    short_run("game", "ppo", **game)
    assert capsys.readouterr().err.count("the returns of the agents sum to zero") == 1
    foes = {"evaluation.opponents": {"random": "random"}}
    for i, other in enumerate(
        ({"env": {"_target_": "agent_envs.Peek"}}, {"evaluation.metric": EVAL_RETURN}, foes)
    ):
        short_run(f"other{i}", "ppo", **{**game, **other})
        assert "the returns of the agents" not in capsys.readouterr().err


def test_return_against_the_first_opponent_selects(capsys: pytest.CaptureFixture[str]) -> None:
    """By default, the return against the first opponent selects."""
    more = {"algorithm.n_epochs": 3, "evaluation.n_episodes": 4}
    usual = {"evaluation.metric": EVAL_RETURN}
    result = short_run("game", "ppo", env={"_target_": "agent_envs.Rochambeau"}, **usual)
    assert (result.summary.best_metric, result.summary.best_epoch) == (0.0, 3)
    foes = {"one": {"_target_": "own_policies.TakesOne"}, "random": "random"}
    for name, settings in (
        ("eval/vs_one/return_mean", {"evaluation.opponents": foes}),
        (
            "eval/second/episode_return_mean",
            {"evaluation.metric": "eval/second/episode_return_mean"},
        ),
        ("league/main/elo", {"evaluation.metric": "league/main/elo"}),
    ):
        result = run(None, **more, **settings, trust=["agent_envs", "own_policies"])
        assert result.best_metric == max(row[name] for row in result.history)
    agents = {"first": "agent_envs.Heaps", "": "own_envs.SpacesEnv"}
    for known, target in agents.items():
        with pytest.raises(ConfigError, match=rf"evaluation\.metric = .* not reported; .*{known}"):
            short_run("other", env={"_target_": target}, **{"evaluation.metric": METRIC_OF_THIRD})
        assert not Path("other").exists()


@pytest.mark.parametrize(
    "metric",
    everyday(
        1, ["train/first/episode_return_mean", "league/main/win_rate", "league/main@0/win_rate"]
    ),
)
def test_agent_metrics_may_be_missing_in_an_epoch(metric: str) -> None:
    """Metrics of agents may be missing in an epoch; unknown agents raise an error."""
    short = {"algorithm.n_rollout_steps": 2, "algorithm.batch_size": 2, "algorithm.epoch_length": 1}
    chosen = {"evaluation.metric": metric, "opponents": {"share": 1.0}}
    result = run(None, **short, **chosen, **{"algorithm.n_epochs": 12})
    found = [row[metric] for row in result.history if metric in row]
    assert len(found) < len(result.history)
    assert result.best_metric == max(found)
    chosen["evaluation.metric"] = metric.replace("first", "third").replace("main", "judge")
    with pytest.raises(ConfigError, match="not reported; did you mean"):
        run(None, **short, **chosen, **{"algorithm.n_epochs": 1})


@pytest.mark.parametrize(
    ("opponents", "more", "problem"),
    [
        ({"share": 1.5}, {}, r"opponents\.share = 1\.5: expected a number in \[0, 1\]"),
        ({"add_every": 0}, {}, r"opponents\.add_every = 0: no snapshots would be added"),
        ({}, {"algorithm": "impala"}, "does not support self-play|trains a single agent"),
        (
            {},
            {"policies.main.agents": ["first"], "policies.foe.agents": ["second"]},
            r"policies\.main\.opponents = 'uniform': self-play requires agents of main in at least",
        ),
        ({}, {"runner.envs_per_actor": 1}, r"opponents = 'uniform': self-play against"),
        ({}, {"policies.main.frozen": True}, r"opponents = 'uniform': this policy is not"),
    ],
    ids=["share", "never", "algorithm", "one agent", "actors", "frozen"],
)
def test_invalid_multi_agent_settings_raise(
    opponents: dict[str, Any], more: dict[str, Any], problem: str
) -> None:
    """The error contains key, value and allowed values."""
    with pytest.raises(ConfigError, match=problem):
        run("run", opponents=opponents, **{"algorithm.n_epochs": 1, **more})
