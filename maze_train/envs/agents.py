"""Environments with several agents: their interface, and how they are run as one environment.

An episode is a sequence of turns. A turn says who acts next; the following one comes from the
actions of exactly these agents. So it makes no difference whether agents act one at a time, several
at once or all of them, whether some end early or are born late, or whether an "agent" is one of the
decisions that a step consists of, such as `choose_item` and then `choose_place`.
"""

from __future__ import annotations

import textwrap
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.core.errors import EnvError, SpaceError
from maze_train.envs.batch import numbers_in
from maze_train.envs.building import ConvertibleEnv
from maze_train.envs.faults import NonFiniteError, check_finite
from maze_train.envs.monitoring import gives_state, metadata_of
from maze_train.envs.types import Space
from maze_train.envs.vector import Array, masked_writer, row_writer, zeroed_columns
from maze_train.spaces.agents import AGENT_RETURNS, REWARDS, TEAMS, AgentSpaces, partition
from maze_train.spaces.describe import FlatView, is_mask_key
from maze_train.spaces.masks import mask_layout


@dataclass(frozen=True)
class Turn:
    """Result of a reset or a step of a `MultiAgentEnv`.

    An agent that is in `obs` and has not ended acts next. The episode is over when no one does.
    """

    obs: Mapping[str, Any]
    """Observations of the agents that act next, and the last ones of those that have just ended,
    which a truncated agent must have: its value is estimated from it."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards since the turn before, of any agents that have not ended, also of those that did not
    act; none after a reset. A reward belongs to the last action of its agent, or to the first one
    if the agent has not acted yet. A step that consists of decisions gives its reward to each."""
    terminated: Collection[str] | Mapping[str, bool] = ()
    """Agents whose episode has ended since the turn before."""
    truncated: Collection[str] | Mapping[str, bool] = ()
    """Agents whose episode was cut off since the turn before, such as by a time limit."""
    infos: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Diagnostics by agent."""


class MultiAgentEnv(ConvertibleEnv):
    """Base of environments with several agents.

    An environment whose episodes do not follow from seed and actions alone should also define
    `state_dict()`, which returns plain values and arrays, and `load_state_dict(state)`.

    Attributes:
        possible_agents: Names of all agents that may ever act, in a fixed order; any text without
            `/`.
        metadata: As gymnasium has it: `render_modes`, `render_fps`.
        render_mode: Kind of result of `render`, as in gymnasium.
        teams: Agents of each team, by any name, as in `env.teams`.
    """

    possible_agents: Sequence[str]
    teams: Mapping[str, Sequence[str]] = MappingProxyType({})
    metadata: Mapping[str, Any] = MappingProxyType({})
    render_mode: str | None = None

    @abstractmethod
    def observation_space(self, agent: str) -> Space:
        """Return the observation space of an agent; it never changes."""

    @abstractmethod
    def action_space(self, agent: str) -> Space:
        """Return the action space of an agent; it never changes."""

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Turn:
        """Begin an episode, which follows from the seed and the actions."""

    @abstractmethod
    def step(self, actions: dict[str, Any]) -> Turn:
        """Continue to the next turn.

        Args:
            actions: One action of each agent that acts, and of no other.
        """

    def render(self) -> Any:
        """Return a picture of the present state, by `render_mode`."""
        return None

    def converted(self) -> JointEnv:
        """Return this environment as one of gymnasium."""
        return JointEnv(self)


class JointEnv(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """An environment of A agents as one gymnasium environment; a turn of it is a step.

    It works with workers, exact resume, time limits, evaluation and recording, as any environment
    does. `maze_train.spaces.agents` says what its observations and actions are, with agents in the
    order of `possible_agents`, which `metadata["agents"]` holds as well; `metadata["teams"]` has
    the agents of each team, one that is in no team as a team by itself. Before its first
    observation an agent is shown something of its space (as near to 0 as it may be, all actions
    legal). The reward is the mean of the rewards over all possible agents, so one that is given to
    all of them counts once. When no one acts, the episode is truncated if the episode of an agent
    was, otherwise it is terminated. Infos are under the names of their agents, and `agent_returns`
    has the sum of rewards of each agent since the reset. After the end of an agent,
    infos keep the numbers of its last info.

    Legal actions of an agent are the key `action_mask` of its observation
    (`maze_train.spaces.masks`). Where the environment has `state_dict()` and
    `load_state_dict(state)`, this one has them too.

    A last observation that is not finite is not shown. No one needs that of a terminated agent.
    That of a truncated one is an error unless `skips_non_finite`; then the agent is flagged as
    terminated as well, and its turn is not learned from.

    Args:
        env: The environment.

    Attributes:
        skips_non_finite: Whether the last turn of a truncated agent is given up if its last
            observation is not finite, as `algorithm.on_non_finite=skip` says.

    Raises:
        EnvError: If names of agents cannot be used; in reset and step also if a turn names an
            unknown agent or one that has ended before, gives a reward to one, an observation is not
            of its space or an agent that acts has no legal action, the last observation of a
            truncated agent is missing, or if after a reset no one acts or an agent has a reward.
        SpaceError: If a space cannot be flattened, or a mask does not fit the actions.
    """

    def __init__(self, env: MultiAgentEnv) -> None:
        self.env = env
        self.agents = agents = checked_names(env.possible_agents)
        teams = partition(env.teams, agents)
        self.metadata = {**metadata_of(env), "agents": agents, TEAMS: teams}
        self.render_mode = env.render_mode
        each = AgentSpaces(
            {agent: env.observation_space(agent) for agent in agents},
            {agent: env.action_space(agent) for agent in agents},
        )
        self._seats = {agent: _Seat(agent, *each.of(agent)) for agent in agents}
        self.observation_space = each.observation_space
        self.action_space = each.action_space
        self._shown: dict[str, Any] = {}
        self._acting: list[str] = []
        self._gone: set[str] = set()
        self._was_cut = False
        self._returns: dict[str, float] = {}
        self._last_numbers: dict[str, dict[str, Any]] = {}
        self.skips_non_finite = False
        if gives_state(env):
            self.state_dict, self.load_state_dict = self._whole_state, self._load_whole_state

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._shown = {agent: seat.neutral() for agent, seat in self._seats.items()}
        self._gone = set()
        self._was_cut = False
        self._returns = dict.fromkeys(self.agents, 0.0)
        self._last_numbers = {}
        turn = self.env.reset(seed=seed, options=options)
        obs, _ = self._read(turn)
        if not self._acting:
            raise EnvError(
                f"reset() gave observations of {sorted(turn.obs)}, and no one acts: expected those "
                "of the agents that act first"
            )
        if obs[REWARDS].any():
            raise EnvError(
                f"reset() gave rewards {dict(turn.rewards)}, and no one has acted yet: give them "
                "in the turn after the first action"
            )
        return obs, self._infos(turn)

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Let those act whose turn it is."""
        if not self._acting:
            raise EnvError("step() was called while no one acts: call reset() first")
        turn = self.env.step({agent: action[agent] for agent in self._acting})
        obs, total = self._read(turn)
        is_over = not self._acting
        ends = is_over and not self._was_cut, is_over and self._was_cut
        return obs, total / len(self.agents), *ends, self._infos(turn)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether this environment, or the one with several agents, has an attribute."""
        return super().has_wrapper_attr(name) or hasattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of this environment, or of the one with several agents."""
        return getattr(self if super().has_wrapper_attr(name) else self.env, name)

    def render(self) -> Any:
        """Return what the environment renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _whole_state(self) -> dict[str, Any]:
        inner: Any = self.env
        return {
            "env": inner.state_dict(),
            "_shown": self._shown,
            "_acting": self._acting,
            "_was_cut": self._was_cut,
            "_returns": self._returns,
            "_gone": sorted(self._gone),
            "_last_numbers": self._last_numbers,
        }

    def _load_whole_state(self, state: dict[str, Any]) -> None:
        inner: Any = self.env
        inner.load_state_dict(state["env"])
        self._shown, self._acting = state["_shown"], state["_acting"]
        self._was_cut, self._returns = state["_was_cut"], state["_returns"]
        self._gone = set(state["_gone"])
        self._last_numbers = state.get("_last_numbers", {})

    def _read(self, turn: Turn) -> tuple[dict[str, Any], float]:
        """Note who acts and who has ended; returns the observation, and the sum of rewards."""
        check_form(turn)
        terminated, truncated = ended(turn.terminated), ended(turn.truncated)
        self._check(turn, terminated, truncated)
        over, cut = terminated | truncated, truncated - terminated
        self._gone |= over
        for agent in over:
            self._last_numbers[agent] = numbers_in(turn.infos.get(agent, {}))
        self._was_cut = self._was_cut or bool(truncated)
        self._acting = [agent for agent in self.agents if agent in turn.obs and agent not in over]
        unknown: set[str] = set()
        rewards, total = np.zeros(len(self.agents), np.float32), 0.0
        for i, agent in enumerate(self.agents):
            if agent in over and agent in turn.obs:
                if not self._show_last(agent, turn.obs[agent], agent in cut):
                    unknown.add(agent)
            elif agent in turn.obs:
                self._shown[agent] = self._seats[agent].show(turn.obs[agent], acts=True)
            if agent in turn.rewards:
                reward = turn.rewards[agent]
                total += float(reward)
                rewards[i] = reward
                self._returns[agent] += float(reward)
        return {
            "agents": dict(self._shown),
            "acts": self._flags(self._acting),
            "rewards": rewards,
            "terminated": self._flags(terminated | (unknown & cut)),
            "truncated": self._flags(cut),
        }, total

    def _show_last(self, agent: str, obs: Any, is_cut: bool) -> bool:
        """Show the last observation of an agent if it is finite; returns whether it is.

        Raises:
            NonFiniteError: If it is not, and the value after it is needed.
        """
        seat = self._seats[agent]
        shown = seat.show(obs, acts=False)
        try:
            seat.check_finite()
        except NonFiniteError:
            if is_cut and not self.skips_non_finite:
                raise
            return False
        self._shown[agent] = shown
        return True

    def _infos(self, turn: Turn) -> dict[str, Any]:
        infos: dict[str, Any] = dict(turn.infos)
        for agent, numbers in self._last_numbers.items():
            infos[agent] = {**numbers, **infos.get(agent, {})}
        infos[AGENT_RETURNS] = dict(self._returns)
        return infos

    def _flags(self, chosen: Collection[str]) -> Array:
        if not chosen:
            return np.zeros(len(self.agents), np.int8)
        return np.array([agent in chosen for agent in self.agents], np.int8)

    def _check(self, turn: Turn, terminated: set[str], truncated: set[str]) -> None:
        """Refuse a turn with agents that cannot be meant."""
        named = {
            "obs": turn.obs.keys(),
            "rewards": turn.rewards.keys(),
            "terminated": terminated,
            "truncated": truncated,
            "infos": turn.infos.keys(),
        }
        for key, agents in named.items():
            if not agents <= self._seats.keys():
                raise EnvError(
                    f"{key} names the agents {sorted(map(str, agents - self._seats.keys()))}: "
                    f"expected some of possible_agents {list(self.agents)}"
                )
        for key in ("obs", "terminated", "truncated") if self._gone else ():
            if not self._gone.isdisjoint(named[key]):
                raise EnvError(
                    f"{key} names the agents {sorted(self._gone & named[key])}, which have ended "
                    "before in this episode: leave them out until the next reset"
                )
        late = [agent for agent in sorted(self._gone & turn.rewards.keys()) if turn.rewards[agent]]
        if late:
            raise EnvError(
                f"rewards names the agents {late}, which have ended before in this episode: a "
                "reward belongs to the last action of its agent, which was learned from when the "
                "agent ended. End these agents later: until then leave them out of obs, so that "
                "they wait without acting, and rewards count"
            )
        if not truncated <= turn.obs.keys():
            raise EnvError(
                f"the agents {sorted(truncated - turn.obs.keys())} are truncated without a last "
                "observation: put it into obs, because their values are estimated from it"
            )


class _Seat:
    """The place of one agent in joint observations."""

    def __init__(self, agent: str, observation_space: Space, action_space: Space) -> None:
        self._agent = agent
        self._view = FlatView(observation_space)
        self._columns = zeroed_columns(self._view, 1)
        self._write = self._write_acting = row_writer(self._view, self._columns)
        masks = mask_layout(observation_space, action_space)
        self._has_masks = masks is not None
        if masks is not None:
            self._write_acting = masked_writer(self._write, masks, self._columns)

    def show(self, obs: Any, *, acts: bool) -> Any:
        """A copy of an observation of the agent, in the types of its space."""
        try:
            (self._write_acting if acts else self._write)(0, obs)
        except SpaceError as error:
            raise EnvError(f"agent {self._agent!r}: {error}") from error
        return self._view.build(
            {key: column[0, ...].copy() for key, column in self._columns.items()}
        )

    def check_finite(self) -> None:
        """Refuse the observation that was shown last, of an agent that has ended.

        Raises:
            NonFiniteError: If it is not finite; names the agent.
        """
        check_finite(
            {key: column[0, ...] for key, column in self._columns.items()},
            f"last observation of agent {self._agent!r}",
        )

    def neutral(self) -> Any:
        """Return a neutral element of the space; all actions are legal in it."""
        return self._view.build(
            {
                key: np.ones_like(self._columns[key][0, ...])
                if self._has_masks and is_mask_key(key)
                else nearest_to_zero(leaf)
                for key, leaf in self._view.leaves.items()
            }
        )


def nearest_to_zero(leaf: Any) -> Any:
    """The value of a leaf of a space that is 0, or as near to it as it may be."""
    if isinstance(leaf, spaces.Box):
        return np.asarray(np.clip(np.zeros(leaf.shape, leaf.dtype), leaf.low, leaf.high))
    is_choice = isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete))
    start = leaf.start if is_choice else 0  # categories are counted from there
    return np.full(leaf.shape or (), start, leaf.dtype)


def check_form(turn: Any) -> None:
    """Refuse a result that is not a turn.

    Raises:
        EnvError: Naming what it is, and what was expected.
    """
    if not isinstance(turn, Turn):
        raise EnvError(
            f"reset() or step() returned {shortened(turn)}: expected a maze_train.Turn(obs, "
            "rewards, terminated, truncated, infos)"
        )
    for name, value in (("obs", turn.obs), ("rewards", turn.rewards), ("infos", turn.infos)):
        check_mapping(f"{name} of the Turn", value)
    for name, ends in (("terminated", turn.terminated), ("truncated", turn.truncated)):
        if not isinstance(ends, Collection):
            problem = "expected names of agents, or flags by agent"
            raise EnvError(f"{name} of the Turn is {shortened(ends)}: {problem}")


def check_mapping(what: str, value: Any) -> None:
    """Refuse a result that is not a mapping by agent.

    Raises:
        EnvError: Naming what it is.
    """
    if not isinstance(value, Mapping):
        raise EnvError(f"{what} is {shortened(value)}: expected a dict by agent")


def shortened(value: Any) -> str:
    """A value as text of limited length."""
    return textwrap.shorten(f"{type(value).__name__} {value!r}", 80)


def ended(flags: Collection[str] | Mapping[str, bool]) -> set[str]:
    """The agents that are named, or flagged in a mapping."""
    if isinstance(flags, Mapping):
        return {agent for agent, flag in flags.items() if flag}
    return set(flags)


def checked_names(possible_agents: Sequence[str]) -> tuple[str, ...]:
    """Return the names of agents.

    Raises:
        EnvError: If there are no agents, one cannot be a part of a key, or two are the same.
    """
    agents = tuple(possible_agents)
    wrong = [name for name in agents if not is_name(name)]
    if wrong or not agents or len(set(agents)) < len(agents):
        raise EnvError(
            f"possible_agents = {list(agents)!r}: expected at least one name, each of them another "
            f"text that is not empty, is not {AGENT_RETURNS!r} and holds no '/'; rename them"
        )
    return agents


def is_name(name: Any) -> bool:
    """Whether a value can be the name of an agent, which is a part of keys."""
    return isinstance(name, str) and name not in ("", AGENT_RETURNS) and "/" not in name
