"""Self-play against earlier versions of a policy: who plays, and how good they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from maze_train.rollout.config import SNAPSHOT
from maze_train.spaces.agent_trees import part_of
from maze_train.spaces.agents import ACTS, AGENTS
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from maze_train.nets.joint import JointModel
    from maze_train.rollout.config import OpponentsConfig
    from maze_train.types import Tensor, TensorTree


OWN = 1
"""Seat of an agent for which the policy itself acts; 0: it is not drawn yet, 2 + k: snapshot k."""

RATING_STEP = 16.0
RATING_SCALE = 400.0


class League:
    """A policy and its snapshots: draws opponents, and rates them by the results of episodes.

    Ratings are those of Elo: who has R_a points against R_b is expected to get
    1 / (1 + 10^((R_b - R_a) / 400)) of a point, and 16 times what the result is above that is added
    to R_a and taken from R_b. Weights of `by_strength` are those of prioritised fictitious
    self-play. Sources: Elo (1978), The Rating of Chessplayers, section 8; Vinyals et al. (2019),
    doi:10.1038/s41586-019-1724-z, methods.

    Args:
        policy: Id of the policy.
        agents: Numbers of its agents.
        config: Settings.
        seed: Seed of what is drawn.

    Attributes:
        snapshots: The snapshots by number, the oldest first.
        rating: Elo rating of the policy.
    """

    def __init__(
        self, policy: str, agents: Sequence[int], config: OpponentsConfig, seed: int
    ) -> None:
        self.policy, self.agents, self.config = policy, list(agents), config
        self.snapshots: dict[int, Any] = {}
        self.rating = 0.0
        self._generator = torch.Generator().manual_seed(seed)
        self._ratings: dict[int, float] = {}
        self._scores: dict[int, list[float]] = {}
        self._recent = [0.0, 0]
        self._added = 0

    def is_due(self, epoch_begins: int | None) -> bool:
        """Whether a snapshot is to be added.

        Args:
            epoch_begins: Number of the epoch, from 0, that begins now; None: none does.
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
        """Id of the module of a snapshot."""
        return f"{self.policy}{SNAPSHOT}{number}"

    def add(self, make_module: Callable[[str], Any]) -> list[str]:
        """Add a snapshot, which has the rating of the policy.

        Args:
            make_module: Makes the module of an id.

        Returns:
            Ids of the modules of snapshots that are no longer kept.
        """
        number = self._added
        self.snapshots[number] = make_module(self.module_id(number))
        self._ratings[number] = self.rating
        self._added += 1
        self._recent = [0.0, 0]
        # The policy becomes another one: what it did before says less of it.
        self._scores = {key: [x / 2 for x in score] for key, score in self._scores.items()}
        self._scores[number] = [0.0, 0.0]
        old = list(self.snapshots)[: -self.config.keep]
        for key in old:
            del self.snapshots[key], self._ratings[key], self._scores[key]
        return [self.module_id(key) for key in old]

    def module(self, seat: int) -> Any:
        """The module of a seat; of a snapshot that is no longer kept the oldest one that is."""
        number = seat - OWN - 1
        return self.snapshots[number if number in self.snapshots else next(iter(self.snapshots))]

    def draw(self, count: int) -> Tensor:
        """Seats of the agents in so many new episodes, `[count, A]` float32."""
        size = len(self.agents)
        against = torch.rand(count, generator=self._generator) < self.config.share
        own = torch.randint(size, (count,), generator=self._generator)
        weights = torch.tensor([self._weight(key) for key in self.snapshots])
        drawn = torch.multinomial(
            weights, count * size, replacement=True, generator=self._generator
        )
        seats = torch.tensor(list(self.snapshots))[drawn].view(count, size) + OWN + 1
        seats[torch.arange(count), own] = OWN
        seats[~against] = OWN
        return seats.float()

    def _weight(self, number: int) -> float:
        if self.config.draw == "latest":
            return float(number == self._added - 1)
        return 1.0 if self.config.draw == "uniform" else (1.0 - self.win_rate(number)) ** 2

    def win_rate(self, number: int) -> float:
        """Share of points of the policy against a snapshot, with two draws that count as well."""
        points, episodes = self._scores[number]
        return (points + 1.0) / (episodes + 2.0)

    def note(self, seats: Sequence[float], returns: Sequence[float]) -> list[float]:
        """Take in the result of an episode; returns the points against each snapshot in it.

        Args:
            seats: Who acted for each agent of the policy.
            returns: Their returns.
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
        """Ratings, results and the generator; the learner has the modules."""
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
        """Continue from `state` with the modules of a learner."""
        self._generator.set_state(state["generator"])
        self.rating, self._added = state["rating"], state["added"]
        numbers, self._recent = state["numbers"], list(state["recent"])
        self.snapshots = {number: modules[self.module_id(number)] for number in numbers}
        self._ratings = dict(zip(numbers, state["ratings"], strict=True))
        self._scores = dict(zip(numbers, map(list, state["scores"]), strict=True))


class LeagueModel:
    """Acts for all agents, with snapshots in the seats that leagues drew for them.

    The memory of an environment has one more number per agent, its seat, which is drawn where an
    episode begins, since the memory is empty there.

    Args:
        model: The policies that learn, and who acts with which.
        leagues: The leagues.
    """

    def __init__(self, model: JointModel, leagues: Sequence[League]) -> None:
        self.model, self.leagues = model, leagues
        self.distribution = model.distribution
        self.state_size = model.state_size + len(model.agents)
        self._seats: list[Tensor] = []

    def policy_step(self, obs: TensorTree, state: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions `[n, param_size]`, and the memory `[n, S]` after `obs`."""
        model = self.model
        sizes = [model.state_size, len(model.agents)]
        memory, seats = torch.split(state, sizes, dim=-1)
        seats = self._drawn(seats)
        self._seats.append(seats.cpu())
        before = model.states_by_agent(memory)
        if model.state_size:
            params, memory = model.policy_step(obs, memory)
        else:
            params = model.policy_params(obs)
        pieces = torch.split(params, model.distribution.param_sizes, dim=-1)
        after = model.states_by_agent(memory)
        leaves = cast("dict[str, Tensor]", obs)
        parts = part_of(leaves, AGENTS)
        agents = list(model.agents)
        for league in self.leagues:
            for i in league.agents:
                agent, acts = agents[i], leaves[ACTS][:, i].bool()
                for seat in sorted(set(seats[:, i].tolist()) - {OWN}):
                    snapshot, rows = league.module(int(seat)), seats[:, i] == seat
                    own = _rows(part_of(parts, agent), rows)
                    if not model.state_sizes[agent]:
                        pieces[i][rows] = snapshot.policy_params(own)
                        continue
                    old = before[agent][rows]
                    pieces[i][rows], new = snapshot.policy_step(own, old)
                    after[agent][rows] = torch.where(acts[rows].unsqueeze(1), new, old)
        return params, torch.cat([memory, seats], dim=-1)

    def end_episodes(self, states: Tensor) -> None:
        """See `JointModel`."""
        self.model.end_episodes(states[:, : self.model.state_size])

    def _drawn(self, seats: Tensor) -> Tensor:
        """The seats, with new ones where episodes begin."""
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
        """The seats of all steps since the last call, `[T, n, A]`."""
        seats, self._seats = self._seats, []
        return torch.stack(seats)


def _rows(tree: TensorTree, rows: Tensor) -> TensorTree:
    return tree_map(lambda leaf: leaf[rows], tree)
