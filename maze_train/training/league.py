"""Self-play against snapshots of a policy: opponent sampling, ratings and collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.collect.episodes import FinishedEpisodes, ReportedInfos, return_of_team
from maze_train.core.errors import ConfigError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Array, Tensor, TensorTree, leaves_by_key
from maze_train.data.rollout import Rollout
from maze_train.learner.group import LearnerGroup
from maze_train.learner.learner import Learner
from maze_train.nets.acting import Acted, acting
from maze_train.nets.joint import JointModel
from maze_train.spaces.agents import teams_in
from maze_train.training.config import SNAPSHOT, OpponentsConfig
from maze_train.training.trainer import Run

OWN = 1
"""Code of an agent that the current policy controls. Other codes: 0: not sampled yet; 2 + k:
controlled by snapshot k. Variables named `seats` contain these codes."""

RATING_STEP = 16.0
RATING_SCALE = 400.0


class League:
    """A policy and its snapshots: samples opponents and computes Elo ratings from results.

    All agents of a team are controlled by the policy or by the same snapshot.

    In the Elo system, a policy with rating R_a has the expected score
    E = 1 / (1 + 10^((R_b - R_a) / 400)) against an opponent with rating R_b. After each game with
    score S, 16 (S - E) is added to R_a and subtracted from R_b.
    `by_strength` uses the weights of prioritised fictitious self-play. Sources: Elo (1978), The
    Rating of Chessplayers, section 8; Vinyals et al. (2019), doi:10.1038/s41586-019-1724-z.

    Args:
        policy: ID of the policy.
        agents: Indices of the agents of the policy.
        config: Settings.
        seed: Seed of the opponent sampling.
        teams: Index of the team of each of these agents, from 0; None: each agent is a team.

    Attributes:
        snapshots: Snapshots by number, oldest first.
        rating: Elo rating of the policy.
    """

    def __init__(
        self,
        policy: str,
        agents: Sequence[int],
        config: OpponentsConfig,
        seed: int,
        teams: Sequence[int] | None = None,
    ) -> None:
        self.policy, self.agents, self.config = policy, list(agents), config
        self.teams = list(range(len(agents)) if teams is None else teams)
        self.snapshots: dict[int, nn.Module] = {}
        self.rating = 0.0
        self._generator = torch.Generator().manual_seed(seed)
        self._ratings: dict[int, float] = {}
        self._scores: dict[int, list[float]] = {}
        self._recent = [0.0, 0]
        self._added = 0

    def is_due(self, epoch_begins: int | None) -> bool:
        """Return whether to add a snapshot.

        Args:
            epoch_begins: Index of the epoch that starts now, from 0; None if no epoch starts.
        """
        if not self._added:
            return True
        every, rate = self.config.add_every, self.config.at_win_rate
        if epoch_begins and every and epoch_begins % every == 0:
            return True
        points, episodes = self._recent
        enough = episodes >= self.config.least_episodes
        return bool(rate and enough and points >= rate * episodes)

    def module_id(self, number: int) -> str:
        """Return the module ID of a snapshot."""
        return f"{self.policy}{SNAPSHOT}{number}"

    def add(self, make_module: Callable[[str], Any]) -> list[str]:
        """Add a snapshot with the rating of the policy.

        Args:
            make_module: Creates a module, given its ID.

        Returns:
            Module IDs of removed snapshots.
        """
        number = self._added
        self.snapshots[number] = make_module(self.module_id(number))
        self._ratings[number] = self.rating
        self._added += 1
        self._recent = [0.0, 0]
        # Discount earlier results, since the policy changes.
        self._scores = {key: [x / 2 for x in score] for key, score in self._scores.items()}
        self._scores[number] = [0.0, 0.0]
        old = list(self.snapshots)[: -self.config.keep]
        for key in old:
            del self.snapshots[key], self._ratings[key], self._scores[key]
        return [self.module_id(key) for key in old]

    def module(self, seat: int) -> nn.Module:
        """Return the snapshot with a code, or the oldest snapshot if that snapshot was removed."""
        number = seat - OWN - 1
        return self.snapshots[number if number in self.snapshots else next(iter(self.snapshots))]

    def draw(self, count: int) -> Tensor:
        """Sample the codes of the agents for `count` new episodes, `[count, A]` float32."""
        size = max(self.teams) + 1
        against = torch.rand(count, generator=self._generator) < self.config.share
        own = torch.randint(size, (count,), generator=self._generator)
        weights = torch.tensor([self._weight(key) for key in self.snapshots])
        drawn = torch.multinomial(
            weights, count * size, replacement=True, generator=self._generator
        )
        seats = torch.tensor(list(self.snapshots))[drawn].view(count, size) + OWN + 1
        seats[torch.arange(count), own] = OWN
        seats[~against] = OWN
        return seats[:, self.teams].float()

    def _weight(self, number: int) -> float:
        if self.config.draw == "latest":
            return float(number == self._added - 1)
        return 1.0 if self.config.draw == "uniform" else (1.0 - self.win_rate(number)) ** 2

    def win_rate(self, number: int) -> float:
        """Return the win rate against a snapshot, smoothed by two additional draws."""
        points, episodes = self._scores[number]
        return (points + 1.0) / (episodes + 2.0)

    def note(self, seats: Sequence[float], returns: Sequence[float]) -> list[float]:
        """Record the result of an episode; return the points against each snapshot.

        Args:
            seats: Code of the policy or snapshot that controls each team.
            returns: Return of each team.
        """
        own = [value for seat, value in zip(seats, returns, strict=True) if seat == OWN]
        found: list[float] = []
        for seat, value in zip(seats, returns, strict=True):
            number = int(seat) - OWN - 1
            if number not in self.snapshots or len(own) != 1:
                continue
            point = 0.5 * ((own[0] > value) - (own[0] < value)) + 0.5
            for score in (self._recent, self._scores[number]):
                score[0] += point
                score[1] += 1
            gap = (self._ratings[number] - self.rating) / RATING_SCALE
            step = RATING_STEP * (point - 1.0 / (1.0 + 10.0**gap))
            self.rating += step
            self._ratings[number] -= step
            found.append(point)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return ratings, results and generator state; modules are part of the learner's state."""
        return {
            "generator": self._generator.get_state(),
            "rating": self.rating,
            "added": self._added,
            "recent": list(self._recent),
            "numbers": list(self.snapshots),
            "ratings": list(self._ratings.values()),
            "scores": [list(score) for score in self._scores.values()],
        }

    def load_state_dict(self, state: dict[str, Any], modules: Mapping[str, Any]) -> None:
        """Restore a result of `state_dict`, with the modules of the learner."""
        self._generator.set_state(state["generator"])
        self.rating, self._added = state["rating"], state["added"]
        numbers, self._recent = state["numbers"], list(state["recent"])
        self.snapshots = {number: modules[self.module_id(number)] for number in numbers}
        self._ratings = dict(zip(numbers, state["ratings"], strict=True))
        self._scores = dict(zip(numbers, map(list, state["scores"]), strict=True))


def leagues_of(
    model: JointModel,
    opponents: Mapping[str, OpponentsConfig],
    seed_of: Callable[[str], int],
    teams: Sequence[Sequence[str]],
) -> list[League]:
    """Create the leagues of policies with self-play.

    Args:
        model: Policies of all agents.
        opponents: Settings, keyed by policy ID.
        seed_of: Returns the seed of a named random stream.
        teams: Agents of each team.

    Raises:
        ConfigError: If all agents of a policy are in one team, so that a snapshot cannot be an
            opponent.
    """
    agents, leagues = list(model.agents), []
    for policy, config in opponents.items():
        members = model.members[policy]
        own = teams_with(members, teams)
        if len(own) < 2:
            problem = (
                f"self-play requires agents of {policy} in at least two teams; its agents are "
                f"{', '.join(members)}"
            )
            raise ConfigError(f"policies.{policy}.opponents", problem, config.draw)
        seats = [agents.index(agent) for agent in members]
        numbers = [next(i for i, team in enumerate(own) if agent in team) for agent in members]
        leagues.append(League(policy, seats, config, seed_of(f"league/{policy}"), numbers))
    return leagues


def teams_with(members: Sequence[str], teams: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return the teams that contain at least one of the agents."""
    return [team for team in teams if not set(team).isdisjoint(members)]


class LeagueModel(JointModel):
    """Joint model in which some agents are controlled by snapshots that the leagues sample.

    The code of the policy that controls each agent (see `OWN`) is appended to the recurrent state.
    The recurrent state is zero at the start of an episode, so new codes are sampled.

    Args:
        model: Trained policies of all agents.
        leagues: The leagues.
    """

    def __init__(self, model: JointModel, leagues: Sequence[League]) -> None:
        super().__init__(model.by_policy, model.agents)
        self.leagues = leagues
        self._seats: list[Tensor] = []

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of all agents per environment, with opponent codes."""
        return super().state_size + len(self.agents)

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions of all agents; see `ActingModel`."""
        before, seats = self._without_seats(hidden_state)
        seats = self._drawn(seats)
        self._seats.append(seats.cpu())
        inputs = self.inputs(obs, before, noise)
        found = self.acted(inputs, deterministic)
        for league in self.leagues:
            given = inputs[league.policy]
            for k, i in enumerate(league.agents):
                for seat in sorted(set(seats[:, i].tolist()) - {OWN}):
                    rows = (seats[:, i] == seat).nonzero().squeeze(1) + k * len(seats)
                    own = given.at(rows).acted(acting(league.module(int(seat))), deterministic)
                    found[league.policy] = _with_rows(found[league.policy], rows, own)
        acted = self.combined(found, before)
        return acted._replace(hidden_state=torch.cat([acted.hidden_state, seats], dim=-1))

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Notify the policies of all agents; see `ActingModel`."""
        super().on_episode_end(self._without_seats(hidden_state)[0])

    def _without_seats(self, hidden_state: Tensor) -> tuple[Tensor, ...]:
        """Split the recurrent state into the states of the policies and the codes of all agents."""
        count = len(self.agents)
        return torch.split(hidden_state, [self.state_size - count, count], dim=-1)

    def _drawn(self, seats: Tensor) -> Tensor:
        """Return the codes of all agents, newly sampled at episode starts."""
        begins = (seats[:, 0] == 0).nonzero().squeeze(1)
        if not len(begins):
            return seats
        seats = seats.clone()
        seats[begins] = OWN
        for league in self.leagues:
            drawn = league.draw(len(begins)).to(seats.device)
            seats[begins.unsqueeze(1), torch.tensor(league.agents, device=seats.device)] = drawn
        return seats

    def take_seats(self) -> Tensor:
        """Return the codes of all steps since the last call, `[T, n, A]`."""
        seats, self._seats = self._seats, []
        return torch.stack(seats)


def _with_rows(acted: Acted, rows: Tensor, own: Acted) -> Acted:
    """Return `acted` with some rows replaced by the rows of `own`."""

    def written(tree: TensorTree, other: TensorTree) -> TensorTree:
        others = leaves_by_key(other)
        leaves = {k: x.index_copy(0, rows, others[k]) for k, x in leaves_by_key(tree).items()}
        return leaves.get("", leaves)

    return Acted._make(map(written, acted, own))


def make_snapshot(learners: LearnerGroup | Learner[Any, Any, Any], module_id: str) -> nn.Module:
    """Add a frozen module with the current weights of a policy."""
    policy = module_id.partition(SNAPSHOT)[0]
    weights = learners.get_weights()[policy]
    return learners.add_module(module_id, weights, frozen=True, like=policy).eval()


def make_snapshots(
    learners: LearnerGroup | Learner[Any, Any, Any], module_ids: Iterable[str]
) -> None:
    """Create modules for the snapshots in a checkpoint; their weights are loaded later."""
    for module_id in module_ids:
        if SNAPSHOT in module_id:
            make_snapshot(learners, module_id)


class LeagueEvents(EventInterface, prefix="league"):
    """Metrics of self-play against snapshots, per policy, such as `league/<policy>/elo`."""

    win_rate = Event(
        "Mean points against snapshots: 1 for a larger return, 0.5 for an equal return; "
        "against "
        "snapshot k as `league/<policy>@<k>/win_rate`."
    )
    episodes = Event("Number of results against snapshots.", reduce="sum")
    elo = Event("Elo rating of the policy; the first snapshot starts at 0.", reduce="last")
    snapshots = Event("Number of snapshots.", reduce="last")


@dataclass
class LeagueEpisodes(FinishedEpisodes):
    """Finished episodes, with the points of each policy against its snapshots."""

    points: dict[str, list[float]] = field(default_factory=dict)
    """Points by policy ID and snapshot ID."""

    leagues: Sequence[League] = ()

    def record(self, statistics: Statistics, infos: ReportedInfos) -> None:
        """Record the episodes and the state of the leagues."""
        super().record(statistics, infos)
        events = LeagueEvents
        for owner, points in self.points.items():
            statistics.record_many(events.win_rate.of_owner(owner), points)
            if SNAPSHOT not in owner:
                statistics.record(events.episodes.of_owner(owner), float(len(points)))
        for league in self.leagues:
            statistics.record(events.elo.of_owner(league.policy), league.rating)
            count = float(len(league.snapshots))
            statistics.record(events.snapshots.of_owner(league.policy), count)


class LeagueCollector(Collector):
    """Collects rollouts with snapshots as opponents, and drops the samples of the snapshots.

    Args:
        collector: Steps the environments and splits rollouts by policy.
        model: Policies of all agents.
        leagues: The leagues.
        learners: Learners, to which each snapshot is added as a frozen module.
        epoch_length: Updates per epoch, with one rollout per update.
        teams: Agents of each team.
        module_ids: Module IDs in the checkpoint to resume from. Modules of snapshots are created
            immediately; their weights are loaded with the checkpoint.
    """

    def __init__(
        self,
        collector: Collector,
        model: JointModel,
        leagues: Sequence[League],
        learners: LearnerGroup,
        epoch_length: int,
        teams: Sequence[Sequence[str]],
        module_ids: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self._teams = teams
        self._collector, self._leagues, self._learners = collector, leagues, learners
        self._acting = LeagueModel(model, leagues)
        self._agents = list(model.agents)
        self._epoch_length, self._rollouts = epoch_length, 0
        make_snapshots(learners, module_ids)

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps the environments; None with actors."""
        return self._collector.stepping

    def make_calls(self) -> None:
        """Make new calls in the environments between two rollouts, see `EnvCalls`."""
        self._collector.make_calls()

    def collect_steps(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect steps of all agents; the recurrent state includes the codes of the agents."""
        found = self._collector.collect_steps(self._acting, overlap)
        self.env_s = self._collector.env_s
        return found

    def collect(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[dict[str, Rollout], FinishedEpisodes]:
        """Collect rollouts of the trained policies."""
        self._add_snapshots()
        rollout, episodes = self.collect_steps(model, overlap)
        self._rollouts += 1
        seats = self._acting.take_seats()
        assert rollout.hidden_states is not None
        size = rollout.hidden_states.shape[-1] - len(self._agents)
        memory, kept = torch.split(rollout.hidden_states, [size, len(self._agents)], dim=-1)
        # If an episode starts after the last step, its codes are not sampled yet.
        learns = torch.cat([seats, kept[-1:]]) <= OWN
        points = self._points(rollout, seats, episodes)
        rollout = replace(rollout, hidden_states=memory if size else None)
        found = LeagueEpisodes(**vars(episodes), points=points, leagues=self._leagues)
        turns: Any = self._collector.turns
        return turns.split(rollout, learns), found

    def _add_snapshots(self) -> None:
        epoch, rest = divmod(self._rollouts, self._epoch_length)
        for league in self._leagues:
            if league.is_due(None if rest else epoch):
                for old in league.add(partial(make_snapshot, self._learners)):
                    self._learners.remove_module(old)

    def _points(
        self, rollout: Rollout, seats: Tensor, episodes: FinishedEpisodes
    ) -> dict[str, list[float]]:
        """Return the points of the policies in the finished episodes, in temporal order."""
        over = rollout.ended
        found: dict[str, list[float]] = {}
        played = [dict(zip(self._agents, row, strict=True)) for row in seats[over].tolist()]
        for league in self._leagues if played else ():
            members = [self._agents[i] for i in league.agents]
            teams = teams_with(members, self._teams)
            totals = [return_of_team(team, episodes.agent_returns).tolist() for team in teams]
            firsts = [next(agent for agent in team if agent in members) for team in teams]
            for number, seat_of in enumerate(played):
                own = [seat_of[agent] for agent in firsts]
                points = league.note(own, [total[number] for total in totals])
                others = [seat for seat in own if int(seat) - OWN - 1 in league.snapshots]
                for seat, point in zip(others, points, strict=False):
                    for owner in (league.policy, league.module_id(int(seat) - OWN - 1)):
                        found.setdefault(owner, []).append(point)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of environments, unfinished steps and leagues."""
        leagues = {league.policy: league.state_dict() for league in self._leagues}
        return {**self._collector.state_dict(), "rollouts": self._rollouts, "leagues": leagues}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore a state, after restoring the learners; see `RolloutCollector`."""
        self._rollouts = state["rollouts"]
        for league in self._leagues:
            league.load_state_dict(state["leagues"][league.policy], self._learners.first.modules)
        lost = self._collector.load_state_dict(state)
        self.is_exact = self._collector.is_exact
        return lost


def make_league_collector(
    run: Run, collector: Collector, opponents: Mapping[str, OpponentsConfig]
) -> LeagueCollector:
    """Create the collector of a run with self-play against snapshots.

    Args:
        run: The run.
        collector: See `LeagueCollector`.
        opponents: See `leagues_of`.

    Raises:
        ConfigError: If the run uses actors, or `leagues_of` raises an error.
    """
    if run.config.runner.envs_per_actor:
        policy, own = next(iter(opponents.items()))
        problem = "self-play against snapshots does not support actors; use runner.envs_per_actor=0"
        raise ConfigError(f"policies.{policy}.opponents", problem, own.draw)
    model = run.model
    assert isinstance(model, JointModel)
    teams = teams_in(run.env.metadata, list(model.agents))
    leagues = leagues_of(model, opponents, run.seeds.integer, teams)
    checkpoint = run.read_checkpoint()
    saved = checkpoint.state["learners"]["learner"]["modules"] if checkpoint else ()
    length = run.config.algorithm.epoch_length
    return LeagueCollector(collector, model, leagues, run.learners, length, teams, saved)
