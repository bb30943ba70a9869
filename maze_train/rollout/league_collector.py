"""Collects turns of a policy that plays against its snapshots, and adds these."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.events import Event, EventInterface
from maze_train.rollout.config import SNAPSHOT
from maze_train.rollout.episodes import FinishedEpisodes
from maze_train.rollout.league import OWN, League, LeagueModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maze_train.data.rollout import Rollout
    from maze_train.events import Statistics
    from maze_train.learner.group import LearnerGroup
    from maze_train.learner.learner import Learner
    from maze_train.nets.joint import JointModel
    from maze_train.rollout.turn_collector import TurnCollector
    from maze_train.types import Array, Tensor


def make_snapshot(learners: LearnerGroup | Learner[Any, Any, Any], module_id: str) -> Any:
    """The frozen module of a snapshot, with the present weights of its policy."""
    policy = module_id.partition(SNAPSHOT)[0]
    weights = learners.get_weights()[policy]
    return learners.add_module(module_id, weights, frozen=True, like=policy).eval()


def make_snapshots(
    learners: LearnerGroup | Learner[Any, Any, Any], module_ids: Iterable[str]
) -> None:
    """Make the snapshots among the modules of a checkpoint, which gives them their weights."""
    for module_id in module_ids:
        if SNAPSHOT in module_id:
            make_snapshot(learners, module_id)


class LeagueEvents(EventInterface, prefix="league"):
    """Self-play against snapshots; with the policy in between, as `league/<policy>/elo`."""

    win_rate = Event(
        "Share of points against snapshots: 1 for a larger return, 0.5 for an equal one; against "
        "snapshot k as `league/<policy>@<k>/win_rate`."
    )
    episodes = Event("Number of results against snapshots.", reduce="sum")
    elo = Event("Elo rating of the policy; that of the first snapshot began with 0.", reduce="last")
    snapshots = Event("Number of snapshots.", reduce="last")


@dataclass
class LeagueEpisodes(FinishedEpisodes):
    """Episodes that ended, with points of policies against their snapshots."""

    points: dict[str, list[float]] = field(default_factory=dict)
    """Points by the id of the policy, and of the snapshot."""

    leagues: Sequence[League] = ()

    def record(self, statistics: Statistics) -> None:
        """Add the episodes, and the standing of the leagues, to statistics."""
        super().record(statistics)
        events = LeagueEvents
        for owner, points in self.points.items():
            statistics.record_many(events.win_rate.of_owner(owner), points)
            if SNAPSHOT not in owner:
                statistics.record(events.episodes.of_owner(owner), float(len(points)))
        for league in self.leagues:
            statistics.record(events.elo.of_owner(league.policy), league.rating)
            count = float(len(league.snapshots))
            statistics.record(events.snapshots.of_owner(league.policy), count)


class LeagueCollector:
    """Collects rollouts in which snapshots of policies play as well, whose turns are left out.

    Args:
        turns: Collects the turns of the policies.
        model: The policies, and who acts with which.
        leagues: The leagues.
        learners: They get a frozen module for each snapshot.
        epoch_length: Updates per epoch, one rollout each.
        module_ids: Modules of the checkpoint from which the run goes on; those of snapshots are
            made, and get their weights with it.
    """

    def __init__(
        self,
        turns: TurnCollector,
        model: JointModel,
        leagues: Sequence[League],
        learners: LearnerGroup,
        epoch_length: int,
        module_ids: Iterable[str] = (),
    ) -> None:
        self._turns, self._leagues, self._learners = turns, leagues, learners
        self._acting = LeagueModel(model, leagues)
        self._agents = list(model.agents)
        self._epoch_length, self._rollouts = epoch_length, 0
        make_snapshots(learners, module_ids)

    @property
    def env_s(self) -> float:
        """See `RolloutCollector`."""
        return self._turns.env_s

    def collect(self, model: JointModel) -> tuple[dict[str, Rollout], FinishedEpisodes]:
        """The turns of the policies, as `TurnCollector` gives them, and the episodes."""
        self._add_snapshots()
        rollout, episodes = self._turns.collector.collect(self._acting)
        self._rollouts += 1
        seats = self._acting.take_seats()
        assert rollout.hidden_states is not None
        size = rollout.hidden_states.shape[-1] - len(self._agents)
        memory, kept = torch.split(rollout.hidden_states, [size, len(self._agents)], dim=-1)
        # Where an episode begins after the last step, seats are not drawn yet.
        learns = torch.cat([seats, kept[-1:]]) <= OWN
        points = self._points(rollout, seats, episodes)
        rollout = replace(rollout, hidden_states=memory if size else None)
        found = LeagueEpisodes(**vars(episodes), points=points, leagues=self._leagues)
        return self._turns.splitter.split(rollout, learns), found

    def _add_snapshots(self) -> None:
        epoch, rest = divmod(self._rollouts, self._epoch_length)
        for league in self._leagues:
            if league.is_due(None if rest else epoch):
                for old in league.add(partial(make_snapshot, self._learners)):
                    self._learners.remove_module(old)

    def _points(
        self, rollout: Rollout, seats: Tensor, episodes: FinishedEpisodes
    ) -> dict[str, list[float]]:
        """Points of the policies in the episodes that ended, which come in the order of time."""
        over = rollout.ended if rollout.valid is None else rollout.ended & rollout.valid
        found: dict[str, list[float]] = {}
        for number, row in enumerate(seats[over].tolist()):
            for league in self._leagues:
                own = [row[i] for i in league.agents]
                names = [self._agents[i] for i in league.agents]
                returns = [episodes.agent_returns[agent][number] for agent in names]
                points = league.note(own, returns)
                others = [seat for seat in own if int(seat) - OWN - 1 in league.snapshots]
                for seat, point in zip(others, points, strict=False):
                    for owner in (league.policy, league.module_id(int(seat) - OWN - 1)):
                        found.setdefault(owner, []).append(point)
        return found

    def state_dict(self) -> dict[str, Any]:
        """State of the environments, of running turns, and of the leagues."""
        leagues = {league.policy: league.state_dict() for league in self._leagues}
        return {**self._turns.state_dict(), "rollouts": self._rollouts, "leagues": leagues}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Continue from `state`, when the learners have done so; see `RolloutCollector`."""
        self._rollouts = state["rollouts"]
        for league in self._leagues:
            league.load_state_dict(state["leagues"][league.policy], self._learners.first.modules)
        return self._turns.load_state_dict(state)
