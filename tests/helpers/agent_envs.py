"""Small multi-agent environments with known turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze_train import MultiAgentEnv, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Script(MultiAgentEnv):
    """Environment that plays given turns and records the actions.

    Agent `a` observes two values, `b` a Tuple with a mask of its three actions, `c` one of five
    categories that start at 2.
    """

    possible_agents: Sequence[str] = ("a", "b", "c")
    observation_spaces: ClassVar[dict[str, Any]] = {
        "a": spaces.Box(1.0, 9.0, (2,), np.float32),
        "b": spaces.Dict(
            {
                "action_mask": spaces.MultiBinary(3),
                "seen": spaces.Tuple((spaces.Box(-9, 9, (), np.int16), spaces.MultiBinary(2))),
            }
        ),
        "c": spaces.Discrete(5, start=2),
    }
    action_spaces: ClassVar[dict[str, Any]] = {
        "a": spaces.Dict({"go": spaces.Box(-1, 1, (1,)), "say": spaces.Discrete(4)}),
        "b": spaces.Discrete(3),
        "c": spaces.MultiDiscrete([2, 2]),
    }

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.actions: list[dict[str, Any]] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self.action_spaces[agent]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        self.actions = []
        return self.turns[0]

    def step(self, actions: dict[str, Any]) -> Turn:
        self.actions.append(actions)
        return self.turns[len(self.actions)]


class Heaps(MultiAgentEnv):
    """Nim: two players take 1 to 3 stones in turn; the player who takes the last stone wins.

    A referee joins when at most five stones are left; it acts together with the player, may add a
    stone, and is truncated after two turns. Observations reuse one buffer per agent.

    Args:
        most: Maximum initial number of stones; the minimum is 6.
        render_mode: `rgb_array` renders the heap.
    """

    possible_agents: Sequence[str] = ("first", "second", "referee")
    players = ("first", "second")

    def __init__(self, most: int = 12, render_mode: str | None = None) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 3}
        self.most, self.render_mode = most, render_mode
        self.buffers = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        heap = spaces.Box(0.0, self.most + 9.0, (2,), np.float32)
        if agent == "referee":
            return heap
        return spaces.Dict({"observation": heap, "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2 if agent == "referee" else 3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        self.heap = int(np.random.default_rng(seed).integers(6, self.most + 1))
        self.turn = self.judged = 0
        return Turn({"first": self.observe("first")})

    def step(self, actions: dict[str, Any]) -> Turn:
        player, other = self.players[self.turn % 2], self.players[1 - self.turn % 2]
        assert actions.keys() == {player} | ({"referee"} if 0 < self.judged <= 2 else set())
        taken = int(actions[player]) + 1
        assert taken <= self.heap
        self.heap -= taken
        self.turn += 1
        acting, rewards = [other], {}
        truncated = []
        if not self.heap:
            seen = {agent: self.observe(agent) for agent in (player, other)}
            return Turn(seen, {player: 1.0, other: -1.0}, {player: True, other: True})
        if "referee" in actions:
            self.heap += int(actions["referee"])
            rewards["referee"] = 0.25
        if self.heap <= 5 and self.judged < 3:
            self.judged += 1
            acting.append("referee")
            truncated = ["referee"] * (self.judged == 3)
        seen = {agent: self.observe(agent) for agent in acting}
        return Turn(seen, rewards, truncated=truncated, infos={other: {"heap": self.heap}})

    def observe(self, agent: str) -> Any:
        self.buffers[agent][:] = self.heap, self.turn
        if agent == "referee":
            return self.buffers[agent]
        mask = np.arange(1, 4) <= self.heap
        return {"observation": self.buffers[agent], "action_mask": mask.astype(np.int8)}

    def render(self) -> Any:
        return np.full((4, 4, 3), 10 * self.heap, np.uint8)


class HeapsFromBehind(Heaps):
    """`Heaps` with its agents in a different order."""

    possible_agents: Sequence[str] = ("referee", "second", "first")


class LuckyHeaps(Heaps):
    """`Heaps` whose initial heap does not depend on the seed; the environment has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        return super().reset(seed=int(self.chance.integers(2**31)))

    def state_dict(self) -> dict[str, Any]:
        counts = {"heap": self.heap, "turn": self.turn, "judged": self.judged}
        return {**counts, "chance": self.chance.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance.bit_generator.state = state.pop("chance")
        vars(self).update(state)


class Pushers(MultiAgentEnv):
    """Two agents push a cart simultaneously, with Boxes of one and two entries, for 2 to 6 steps.

    Each agent is rewarded for a cart on its side. The right agent ends a step before the left one.
    """

    possible_agents: Sequence[str] = ("left", "right")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (1 + (agent == "right"),), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        self.place, self.left = 0.0, int(np.random.default_rng(seed).integers(2, 7))
        return Turn({agent: self.observe() for agent in self.possible_agents})

    def step(self, actions: dict[str, Any]) -> Turn:
        self.left -= 1
        self.place += sum(float(np.sum(action)) for action in actions.values())
        rewards = {agent: self.place if agent == "right" else -self.place for agent in actions}
        ended = [agent for agent in actions if self.left < 1 + (agent == "right")]
        return Turn({agent: self.observe() for agent in actions}, rewards, truncated=ended)

    def observe(self) -> Any:
        return np.array([self.place, self.left], np.float32)


class Peek(MultiAgentEnv):
    """Each of two agents observes a bit; its reward is the bit of the other agent."""

    possible_agents: Sequence[str] = ("left", "right")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        bits = np.random.default_rng(seed).integers(0, 2, 2)
        self.bits = dict(zip(self.possible_agents[:2], bits, strict=True))
        return Turn(self.bits)

    def step(self, actions: dict[str, Any]) -> Turn:
        first, second, *_ = self.possible_agents
        rewards = {first: float(self.bits[second]), second: float(self.bits[first])}
        return Turn(self.bits, rewards, terminated=self.possible_agents)


class Onlookers(Peek):
    """`Peek` with a third agent that has different spaces and no effect."""

    possible_agents: Sequence[str] = ("left", "right", "judge")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3 if agent == "judge" else 2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        super().reset(seed=seed)
        self.bits["judge"] = 2
        return Turn(self.bits)


class Fuelled(MultiAgentEnv):
    """Environment with agent names that differ by `_`; the first agent ends before the other.

    Rewards per step are 1 and 4; both agents report success in their last infos.
    """

    possible_agents = ("a", "_a")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        self.t = 0
        return Turn(dict.fromkeys(self.possible_agents, np.zeros(1, np.float32)))

    def step(self, actions: dict[str, Any]) -> Turn:
        self.t += 1
        over = {2: ["a"], 3: ["_a"]}.get(self.t, [])
        own = {"a": {"is_success": True, "fuel": 7}, "_a": {"is_success": False, "fuel": [3.0]}}
        return Turn(
            dict.fromkeys(actions, np.zeros(1, np.float32)),
            {agent: {"a": 1.0, "_a": 4.0}[agent] for agent in actions},
            terminated=over,
            infos={agent: own[agent] if agent in over else {"fuel": -1.0} for agent in actions},
        )


class Rochambeau(MultiAgentEnv):
    """Rock, paper, scissors: two players choose simultaneously."""

    possible_agents: Sequence[str] = ("left", "right")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Turn:
        return Turn(self.observe())

    def step(self, actions: dict[str, Any]) -> Turn:
        ahead = (int(actions["left"]) - int(actions["right"])) % 3
        won = (0.0, 1.0, -1.0)[ahead]
        rewards = {"left": won, "right": -won}
        return Turn(self.observe(), rewards, terminated=self.possible_agents)

    def observe(self) -> dict[str, Any]:
        return {agent: np.ones(1, np.float32) for agent in self.possible_agents}


class Pairs(Rochambeau):
    """Two teams of two choose 0 or 1 simultaneously; the team with the larger sum wins."""

    possible_agents: Sequence[str] = ("red_0", "blue_0", "red_1", "blue_1")
    teams: Mapping[str, Sequence[str]] = {"red": ["red_*"], "blue": ["blue_*"]}

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def step(self, actions: dict[str, Any]) -> Turn:
        red, blue = (sum(int(actions[f"{team}_{i}"]) for i in (0, 1)) for team in ("red", "blue"))
        won = float(np.sign(red - blue))
        rewards = {agent: won if "red" in agent else -won for agent in actions}
        return Turn(self.observe(), rewards, terminated=self.possible_agents)


class Loners(Pairs):
    """`Pairs` without teams."""

    teams: Mapping[str, Sequence[str]] = {}
