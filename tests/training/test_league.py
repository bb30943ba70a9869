"""Opponents and ratings in self-play."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from maze_train.collect.episodes import FinishedEpisodes, ReportedInfos
from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.data.rollout import Rollout
from maze_train.distributions.mapping import distribution_for
from maze_train.nets.joint import JointModel
from maze_train.training.config import OpponentsConfig
from maze_train.training.league import (
    OWN,
    League,
    LeagueCollector,
    LeagueEpisodes,
    LeagueModel,
    leagues_of,
)


def league(*added: float, **settings: Any) -> League:
    """Return a league of two seats with a snapshot for each win rate."""
    found = League("main", [0, 1], OpponentsConfig(**settings), seed=3)
    for _ in added:
        found.add(lambda module_id: module_id)
    for number, share in enumerate(added):
        found._scores[number] = [share * 1e6, 1e6]
    return found


@pytest.mark.parametrize(
    ("draw", "shares"),
    [
        ("latest", [0.0, 0.0, 1.0]),
        ("uniform", [1 / 3, 1 / 3, 1 / 3]),
        ("by_strength", [0.25 / 1.25, 1.0 / 1.25, 0.0]),
    ],
)
def test_opponents_are_drawn_in_the_given_fraction(draw: Any, shares: list[float]) -> None:
    """In a fraction of the episodes, one agent is the policy and the others are a snapshot."""
    seats = league(0.5, 0.0, 1.0, draw=draw, share=0.25).draw(20_000)
    against = (seats != OWN).any(1)
    assert against.float().mean() == pytest.approx(0.25, abs=0.015)
    pairs = seats[against]
    assert ((pairs == OWN).sum(1) == 1).all()
    assert (pairs[:, 0] == OWN).float().mean() == pytest.approx(0.5, abs=0.03)
    numbers = pairs[pairs != OWN].long() - OWN - 1
    found = torch.bincount(numbers, minlength=3) / len(numbers)
    np.testing.assert_allclose(found, shares, atol=0.03)


def test_elo_ratings_match_known_values() -> None:
    """Elo: a win between equals adds 8; a draw against a rating 16 lower subtracts 0.368."""
    own = league(0.5)
    assert own.note([OWN, OWN + 1], [1.0, -1.0]) == [1.0]
    assert own.rating == 8.0
    assert own.note([OWN + 1, OWN], [0.5, 0.5]) == [0.5]
    assert own.rating == pytest.approx(8.0 + 16 * (0.5 - 1 / (1 + 10 ** (-16 / 400))))
    assert own.rating == pytest.approx(7.632, abs=1e-3)
    assert own.note([OWN, OWN], [1.0, -1.0]) == []
    assert own.note([OWN, 9.0], [1.0, -1.0]) == []


def test_team_is_controlled_by_one_policy() -> None:
    """A team is controlled by one policy, and results are based on the returns of teams."""
    own = League("main", [0, 1, 2, 3], OpponentsConfig(share=0.75), seed=3, teams=[0, 1, 0, 1])
    for _ in range(2):
        own.add(lambda module_id: module_id)
    seats = own.draw(4000)
    assert seats[:, :2].equal(seats[:, 2:])
    against = seats[(seats != OWN).any(1)]
    assert len(against) == pytest.approx(3000, abs=100)
    assert ((against == OWN).sum(1) == 2).all()
    model = JointModel({"main": Fixed(1, 0), "goalie": Fixed(1, 0)}, TEAMMATES)
    (found,) = leagues_of(model, {"main": OpponentsConfig()}, lambda _: 0, [list("abc"), ["d"]])
    assert (found.agents, found.teams) == ([0, 2, 3], [0, 0, 1])
    with pytest.raises(ConfigError, match="agents of main in at least two teams; its agents are a"):
        leagues_of(model, {"main": OpponentsConfig()}, lambda _: 0, [list("acd"), ["b"]])


TEAMMATES = {"a": "main", "b": "goalie", "c": "main", "d": "main"}


def test_league_reports_points_ratings_and_snapshots() -> None:
    """Reported are mean points per snapshot, number of results, rating, and number of snapshots."""
    own = league(0.5, 0.5)
    own.rating = 12.5
    statistics = Statistics()
    points = {"main": [1.0, 0.5, 0.0, 1.0], "main@1": [1.0, 0.5]}
    LeagueEpisodes(points=points, leagues=[own]).record(statistics, ReportedInfos())
    assert {k: v for k, v in statistics.reduce().items() if k.startswith("league/")} == {
        "league/main/win_rate": 0.625,
        "league/main/episodes": 4.0,
        "league/main@1/win_rate": 0.75,
        "league/main/elo": 12.5,
        "league/main/snapshots": 2.0,
    }


def test_snapshots_are_added_by_rule_and_the_oldest_removed() -> None:
    """Snapshots are added by epochs or by win rate, and the oldest is removed."""
    own = league(add_every=2, at_win_rate=0.75, least_episodes=4, keep=2)
    assert own.is_due(0)
    assert own.add(str) == []
    assert [own.is_due(epoch) for epoch in (None, 0, 1, 2, 3, 4)] == [
        False,
        *[False, False, True] * 1,
        False,
        True,
    ]
    for value in (1.0, 1.0, 1.0):
        own.note([OWN, OWN + 1], [value, 0.0])
    assert not own.is_due(None)
    own.note([OWN, OWN + 1], [0.0, 1.0])
    assert own.is_due(None)
    assert own.add(str) == []
    assert not own.is_due(None)
    assert own.add(str) == ["main@0"]
    assert list(own.snapshots) == [1, 2]
    assert own.module(OWN + 1) == "main@1"  # replaces a removed snapshot


@pytest.mark.parametrize(
    ("draw", "expected"), [("uniform", [0.25, 0.5, 0.25]), ("latest", [1 / 3] * 3)]
)
def test_play_against_snapshots_converges_on_average(draw: Any, expected: list[float]) -> None:
    """Rock-paper-scissors: against all snapshots, play converges; against the latest, it cycles."""
    gains = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])
    own = league(draw=draw, share=1.0, keep=1000)
    own.add(lambda _: 0)
    for _ in range(600):
        seats = own.draw(100)
        met = [own.module(int(seat)) for seat in seats[seats != OWN]]
        answer = int((gains @ np.bincount(met, minlength=3)).argmax())
        own.add(lambda _, answer=answer: answer)
    found = np.bincount(list(own.snapshots.values()), minlength=3) / len(own.snapshots)
    np.testing.assert_allclose(found, expected, atol=0.05)


class Fixed(nn.Module):
    """Policy that prefers an action and adds it to its recurrent state in each step."""

    def __init__(self, action: int, state_size: int) -> None:
        super().__init__()
        self.distribution = distribution_for(spaces.Discrete(4))
        self.action, self.state_size = action, state_size

    def policy_params(self, obs: Any) -> torch.Tensor:
        return torch.eye(4)[self.action].expand(len(obs), 4)

    def policy_step(self, obs: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy_params(obs), state + self.action


@pytest.mark.parametrize("state_size", [0, 2])
def test_seats_keep_policy_and_hidden_state_in_an_episode(state_size: int) -> None:
    """Codes are constant within an episode; only agents that act change their state."""
    model: Any = JointModel({"main": Fixed(1, state_size)}, {"a": "main", "b": "main"})
    own = League("main", [0, 1], OpponentsConfig(share=0.7), seed=1)
    for action in (2, 3):
        own.add(lambda _, action=action: Fixed(action, state_size))
    acting = LeagueModel(model, [own])
    n = 40
    acts = torch.tensor([[1.0, 0.0]]).expand(n, 2)
    obs: Any = {"agents/a": torch.zeros(n, 1), "agents/b": torch.zeros(n, 1), "acts": acts}
    state = torch.zeros(n, acting.state_size)
    acted = acting.act(obs, state, None, True)
    chosen: Any = torch.stack([acted.actions["a"], acted.actions["b"]], 1)  # type: ignore[index]
    after = acted.hidden_state
    seats = after[:, -2:]
    assert set(seats.flatten().tolist()) == {1.0, 2.0, 3.0}
    assert chosen.equal(seats.long())
    assert acted.params.view(n, 2, 4).argmax(-1).equal(chosen)
    if state_size:
        assert after[:, :2].equal(seats[:, :1].expand(n, 2))
        assert not after[:, 2:4].any()
    again = acting.act(obs, after, None, True)
    later = again.hidden_state
    assert again.params.equal(acted.params)
    assert later[:, -2:].equal(seats)
    later[:10] = 0.0
    new = acting.act(obs, later, None, True).hidden_state
    assert new[10:, -2:].equal(seats[10:])
    assert not new[:10, -2:].equal(seats[:10])
    assert acting.take_seats().shape == (3, n, 2)


class Steps:
    """Collector of three steps in 20 environments; all episodes end with the second step."""

    def __init__(self) -> None:
        self.turns = self
        self.seats: list[torch.Tensor] = []
        self.learns = torch.zeros(0)

    env_s = 0.0

    def collect_steps(self, acting: LeagueModel, overlap: Any) -> tuple[Rollout, FinishedEpisodes]:
        obs = {"agents/a": torch.zeros(20, 1), "agents/b": torch.zeros(20, 1)}
        obs["acts"] = torch.ones(20, 2)
        states = [torch.zeros(20, acting.state_size)]
        for step in range(3):
            after = acting.act(obs, states[-1], None, True).hidden_state
            self.seats.append(after[:, -2:])
            states.append(after * (step != 1))
        ended = torch.tensor([False, True, False])[:, None].expand(3, 20)
        nothing = torch.zeros(0)
        rollout = Rollout(
            obs={key: leaf.expand(4, *leaf.shape) for key, leaf in obs.items()},
            actions=nothing,
            rewards=torch.zeros(3, 20),
            end=ended.byte(),
            final_obs=nothing,
            final_positions=nothing,
            hidden_states=torch.stack(states),
        )
        returns = {"a": [1.0] * 20, "b": [-1.0] * 20}
        return rollout, FinishedEpisodes(agent_returns=returns)

    def split(self, rollout: Rollout, learns: torch.Tensor) -> dict[str, Rollout]:
        assert rollout.hidden_states is None
        self.learns = learns
        return {}


def test_snapshot_turns_are_dropped_from_training() -> None:
    """Samples of snapshots are dropped, and results of episodes are recorded."""
    model: Any = JointModel({"main": Fixed(1, 0)}, {"a": "main", "b": "main"})
    learners: Any = SimpleNamespace(
        get_weights=lambda: {"main": {}}, add_module=lambda *_, **__: Fixed(2, 0)
    )
    own, steps = League("main", [0, 1], OpponentsConfig(share=0.8), seed=2), Steps()
    collector = LeagueCollector(steps, model, [own], learners, 2, ["a", "b"])  # type: ignore[arg-type]
    _, episodes = collector.collect(model)
    seats = torch.stack(steps.seats)
    assert seats[0].equal(seats[1])
    assert not seats[1].equal(seats[2])
    assert steps.learns[:3].equal(seats == OWN)
    assert steps.learns[3].equal(seats[2] == OWN)
    against = seats[1][(seats[1] != OWN).any(1)]
    assert 0 < len(against) < 20
    expected = (against[:, 0] == OWN).float().tolist()
    assert episodes.points == {"main": expected, "main@0": expected}  # type: ignore[attr-defined]
    collector.collect(model)
    assert list(own.snapshots) == [0]
    for _ in range(19):
        collector.collect(model)
    assert list(own.snapshots) == [0, 1]
