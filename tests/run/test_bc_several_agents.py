"""Behavioral cloning of recorded multi-agent episodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rollouts import play
from short_runs import QUIET, rows, summary

from maze_train import ConfigError, DatasetError, load_policy, open_dataset, train
from maze_train.algorithms.bc.data import split_episodes
from maze_train.core.seeding import Seeds
from maze_train.core.types import tree_map

if TYPE_CHECKING:
    from maze_train.data.trajectories import Trajectory
    from maze_train.data.trajectory_dataset import TrajectoryDataset

pytestmark = pytest.mark.usefixtures("empty_directory")

ENV: dict[str, Any] = {"_target_": "agent_envs.Heaps"}
ONE = {"_target_": "own_policies.TakesOne"}
PLAYERS = {"agents": ["first", "second"]}
POLICIES = {"players": PLAYERS, "judge": {"agents": ["referee"]}}
"""The judge acts twice per episode, the players once per step."""
SETTINGS: dict[str, Any] = {
    "algorithm": "bc",
    "algorithm.n_epochs": 3,
    "algorithm.batch_size": 16,
    "algorithm.lr": 0.02,
    "model.hidden_sizes": [8],
    "evaluation.n_episodes": 2,
    "policies": POLICIES,
    "runner.dataset": "data/trajectories",
    "seed": 1,
    "trust": ["agent_envs", "own_policies"],
    **QUIET,
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record twelve episodes with random players and a referee that adds no stone."""
    directory = tmp_path_factory.mktemp("recorded") / "data"
    more = {"record": True, "n_episodes": 12, "output_dir": str(directory)}
    play(env=ENV, policy="random", policies={"referee": ONE}, **more)
    return directory


@pytest.fixture(autouse=True)
def data(recorded: Path, empty_directory: None) -> None:
    """Link the recorded episodes to `data`."""
    Path("data").symlink_to(recorded)


def run(name: str, **more: Any) -> Any:
    """Train for three epochs."""
    return train(**{"env": ENV, **SETTINGS, "run_dir": name, **more})


def numbers(name: str) -> dict[str, float]:
    """Return the last row of metrics.csv as numbers."""
    return {key: float(cell) for key, cell in rows(name)[-1].items() if cell}


def turns_of(episode: Trajectory, agents: list[int]) -> int:
    """Return the number of actions of some agents in an episode."""
    acts: Any = episode.obs
    return int(acts["acts"][:-1][:, agents].sum())


def test_policies_learn_from_turns_of_their_agents() -> None:
    """Steps and validation losses match a loop over episodes, steps and agents."""
    run("run", **{"algorithm.n_epochs": 1, "model.normalization.mode": "running"})
    dataset = open_dataset("data/trajectories")
    training, validation = split_episodes(len(dataset), 20, Seeds(1).integer("validation"))
    found = numbers("run")
    turns = {
        policy: sum(turns_of(dataset[int(k)], agents) for k in training)
        for policy, agents in (("players", [0, 1]), ("judge", [2]))
    }
    passes = -(-turns["players"] // 16)
    assert passes > -(-turns["judge"] // 16)
    repeated, rest = divmod(passes, -(-turns["judge"] // 16))
    assert found["updates"] == passes
    assert found["env_steps"] == turns["players"] + repeated * turns["judge"] + 16 * rest
    policy: Any = load_policy("run", trust=["agent_envs"]).model
    assert {name: int(own.normalizer.count) for name, own in policy.by_policy.items()} == turns
    losses: dict[str, list[float]] = {"players": [], "judge": []}
    for k in validation:
        episode: Any = dataset[int(k)]
        for t in range(episode.num_steps):
            for i, agent in enumerate(("first", "second", "referee")):
                if episode.obs["acts"][t, i]:
                    name = "judge" if agent == "referee" else "players"
                    seen = {
                        key.removeprefix(f"agents/{agent}").removeprefix("/"): leaf[t : t + 1]
                        for key, leaf in episode.obs.items()
                        if key.startswith(f"agents/{agent}")
                    }
                    own, obs = policy.by_policy[name], tree_map(torch.tensor, seen.get("", seen))
                    action = torch.tensor(episode.actions[agent][t : t + 1])
                    params = own.policy_params(obs)
                    losses[name].append(-float(own.distribution.log_prob(params, action).detach()))
    for name, own_losses in losses.items():
        assert found[f"validation/{name}/loss"] == pytest.approx(np.mean(own_losses), abs=1e-5)
    both = losses["players"] + losses["judge"]
    assert found["validation/loss"] == pytest.approx(np.mean(both), abs=1e-5)
    assert found["eval/first/episode_return_mean"] == -found["eval/second/episode_return_mean"]


def test_clone_learns_a_deterministic_rule() -> None:
    """A deterministic rule is learned, also with default policies."""
    more = {"record": True, "n_episodes": 12, "output_dir": "rule"}
    play(env=ENV, policies={"all": {**PLAYERS, "source": ONE}, "referee": ONE}, **more)
    given = {"runner.dataset": "rule/trajectories", "policies": {}, "algorithm.n_epochs": 20}
    run("run", **given, **{"evaluation.metric": "validation/loss"})
    assert numbers("run")["validation/first/discrete_accuracy"] == 1.0
    result = play(run="run", trust=["agent_envs"])
    heaps = [int(np.random.default_rng(seed).integers(6, 13)) for seed in range(5)]
    for heap, episode in zip(heaps, result.episodes, strict=True):
        assert episode.agent_turns == {"first": -(-heap // 2), "second": heap // 2, "referee": 2}


@pytest.mark.parametrize(
    "other",
    [
        {"policies": {**POLICIES, "judge": {"agents": ["referee"], "source": ONE}}},
        {"policies": {**POLICIES, "judge": {"agents": ["referee"], "frozen": True}}},
        {"policies_to_train": ["players"]},
    ],
    ids=["own", "frozen", "not chosen"],
)
def test_frozen_policies_act_in_evaluations_only(other: dict[str, Any]) -> None:
    """Frozen policies act in evaluations but are not trained."""
    result = run("run", **other, **{"evaluation.metric": "validation/players/loss"})
    names = numbers("run")
    assert not [name for name in names if "judge" in name]
    assert names["validation/players/loss"] == names["validation/loss"]
    losses = [float(row["validation/players/loss"]) for row in rows("run")]
    assert result.summary.best_metric == min(losses)
    assert "eval/referee/episode_return_mean" in names


def test_reinforcement_learning_continues_from_clones() -> None:
    """All or single cloned policies can be used as base or in rollouts."""
    run("clone")
    ppo = {"algorithm": "ppo", "algorithm.n_rollout_steps": 16, "algorithm.batch_size": 16}
    common = {key: SETTINGS[key] for key in ("trust", "seed", *QUIET)}
    more = {"env": ENV, **ppo, **common, "total_steps": 64, "runner.concurrency": 2}
    train(**more, base_run="clone", policies=POLICIES, run_dir="ppo")
    policies = {"foe": {**PLAYERS, "source": "clone:players"}, "judge": POLICIES["judge"]}
    train(**more, policies=policies, run_dir="one")
    play(run="ppo", policies={"second": "clone"}, trust=SETTINGS["trust"])
    assert summary("out")["policy"]["policies"]["second"]["algorithm"] == "bc"


def test_recorded_illegal_actions_name_the_agent() -> None:
    """The error names episode, step and agent; inactive agents are not checked."""
    run("fine")
    dataset = open_dataset("data/trajectories", mmap=False)
    part: Any = dataset.parts[0]
    start, step = int(part.starts[1]), 1  # the second player acts in step 1 of episode 1
    part.obs["agents/second/action_mask"][
        start + 1 + step, part.actions["second"][start + step]
    ] = 0
    Path("masked").mkdir()
    node = {"_target_": f"{__name__}.given"}
    given.dataset = dataset  # type: ignore[attr-defined]
    with pytest.raises(DatasetError, match=r"episode 1, .*observation of second excludes"):
        run("run", **{"runner.dataset": node})


def given() -> TrajectoryDataset:
    """Return the dataset set by a test."""
    found: TrajectoryDataset = given.dataset  # type: ignore[attr-defined]
    return found


MEMORY = {"agents": ["referee"], "model": {"rnn": {"cell": "gru", "size": 4}}}


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            {"policies": {**POLICIES, "judge": MEMORY}},
            r"policies\.judge\.model\.rnn: not supported, because bc is trained",
        ),
        (
            {"env": None, "algorithm.validation_percentage": 0},
            r"evaluation\.metric = '': required to select .* of train/players/policy_loss, train/j",
        ),
        ({"policies": {"players": PLAYERS}}, r"policies = \['players'\]: no policy for referee"),
        ({"policies_to_train": []}, r"policies_to_train = \[\]: no policy would be trained"),
        (
            {"env": None, "evaluation.opponents": {"random": "random"}},
            r"evaluation\.opponents = \['random'\]: requires an environment: set env",
        ),
        ({"env": "CartPole-v1"}, r"env = 'CartPole-v1': has the observation space"),
    ],
    ids=["memory", "metric", "left out", "no one", "opponents", "env"],
)
def test_invalid_multi_agent_settings_raise(more: dict[str, Any], problem: str) -> None:
    """The error contains key, value and allowed values; no run is created."""
    with pytest.raises(ConfigError, match=problem):
        run("run", **more)
    assert not Path("run").exists()


def test_policy_without_samples_raises() -> None:
    """A policy without samples raises an error before training."""
    dataset = open_dataset("data/trajectories", mmap=False)
    part: Any = dataset.parts[0]
    part.obs["acts"][:, 2] = 0
    given.dataset = dataset  # type: ignore[attr-defined]
    more: dict[str, Any] = {"runner.dataset": {"_target_": f"{__name__}.given"}}
    with pytest.raises(DatasetError, match=r"policy judge has no data.* \(referee\) acts"):
        run("run", **more)
    run("run", **more, policies_to_train=["players"])
