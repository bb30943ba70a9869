"""Multi-agent environments: their interface, and the adapter to a single Gymnasium environment.

An episode is a sequence of turns. Each turn contains the observations of the agents that act next;
their actions are passed to the next `step`. Agents can act one at a time or simultaneously, end
early, and join late. The successive decisions within one step can also be modelled as separate
agents, such as `choose_item` followed by `choose_place`.
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
from maze_train.envs.types import Space
from maze_train.envs.vector import Array, masked_writer, row_writer, zeroed_columns
from maze_train.envs.wrappers import gives_state, metadata_of
from maze_train.spaces.agents import AGENT_RETURNS, REWARDS, TEAMS, AgentSpaces, partition
from maze_train.spaces.describe import FlatView, is_mask_key
from maze_train.spaces.masks import mask_layout


@dataclass(frozen=True)
class Turn:
    """Result of a reset or a step of a `MultiAgentEnv`.

    All agents in `obs` that have not terminated or been truncated act next. The episode is over if
    no agent acts.
    """

    obs: Mapping[str, Any]
    """Observations of the agents that act next, and final observations of agents that have just
    ended. Truncated agents require a final observation, because their value is bootstrapped from
    it."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards since the previous turn, by agent; empty after a reset. Agents that did not act may
    have rewards, but not agents that have ended. A reward is credited to the agent's last action,
    or to the agent's first action if the agent has not acted yet. If a step consists of several
    decisions, return a separate reward for each decision."""
    terminated: Collection[str] | Mapping[str, bool] = ()
    """Agents whose episode has terminated since the previous turn."""
    truncated: Collection[str] | Mapping[str, bool] = ()
    """Agents whose episode was truncated since the previous turn, for example by a time limit."""
    infos: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Infos, keyed by agent."""


class MultiAgentEnv(ConvertibleEnv):
    """Base class of multi-agent environments.

    If episodes are not determined by the seed and the actions alone, define `state_dict()`, which
    returns plain values and arrays, and `load_state_dict(state)`.

    Attributes:
        possible_agents: Names of all agents that can act, in a fixed order. Names must not contain
            `/`.
        metadata: As in Gymnasium: `render_modes`, `render_fps`.
        render_mode: Render mode, as in Gymnasium; selects the return type of `render`.
        teams: Agents by team, as in `env.teams`.
    """

    possible_agents: Sequence[str]
    teams: Mapping[str, Sequence[str]] = MappingProxyType({})
    metadata: Mapping[str, Any] = MappingProxyType({})
    render_mode: str | None = None

    @abstractmethod
    def observation_space(self, agent: str) -> Space:
        """Return the observation space of an agent; the space must not change."""

    @abstractmethod
    def action_space(self, agent: str) -> Space:
        """Return the action space of an agent; the space must not change."""

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Turn:
        """Begin an episode. The seed and the actions must fully determine the episode."""

    @abstractmethod
    def step(self, actions: dict[str, Any]) -> Turn:
        """Advance to the next turn.

        Args:
            actions: One action for each agent that acts in this turn.
        """

    def render(self) -> Any:
        """Render the current state according to `render_mode`."""
        return None

    def converted(self) -> JointEnv:
        """Return this environment as a Gymnasium environment."""
        return JointEnv(self)


class JointEnv(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Adapter from a multi-agent environment to a Gymnasium environment with one step per turn.

    The adapter supports workers, exact resume, time limits, evaluation and recording. The
    observation and action spaces are defined in `maze_train.spaces.agents`. Agents are in the order
    of `possible_agents`; `metadata["agents"]` lists them, and `metadata["teams"]` lists the agents
    of each team. An agent without a team forms a team of one. Until an agent receives its first
    observation, the adapter returns the element of the agent's observation space that is closest to
    0, with all actions legal. The reward is the mean over all possible agents. When no agent acts,
    the episode is truncated if any agent was truncated, otherwise terminated. Infos are keyed by
    agent; `agent_returns` is the sum of rewards of each agent since the reset. The scalars of an
    agent's final info remain in the infos until the end of the episode.

    The entry `action_mask` in the observation of an agent is the mask of legal actions
    (`maze_train.spaces.masks`). The adapter has the methods `state_dict()` and
    `load_state_dict(state)` if `env` has them.

    Non-finite final observations of terminated agents are discarded. A non-finite final observation
    of a truncated agent raises an error. With `skips_non_finite`, the observation is discarded
    instead, the agent is flagged as terminated, and its last step is excluded from learning.

    Args:
        env: The environment.

    Attributes:
        skips_non_finite: Whether to exclude the last step of a truncated agent from learning if the
            final observation is not finite (`algorithm.on_non_finite=skip`).

    Raises:
        EnvError: If agent names are invalid. In `reset` and `step`: if a turn contains an unknown
            or ended agent, an observation outside its space, or an acting agent without a legal
            action; if the final observation of a truncated agent is missing; if a reset returns no
            acting agent, or rewards.
        SpaceError: If a space cannot be flattened, or a mask does not match the action space.
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
                f"reset() returned observations of {sorted(turn.obs)}, but no agent acts: return "
                "the observations of the agents that act first"
            )
        if obs[REWARDS].any():
            raise EnvError(
                f"reset() returned rewards {dict(turn.rewards)}, but no agent has acted yet: "
                "return them in the turn after the first action"
            )
        return obs, self._infos(turn)

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Step the environment with the actions of the agents that act."""
        if not self._acting:
            raise EnvError("step() was called while no agent acts: call reset() first")
        turn = self.env.step({agent: action[agent] for agent in self._acting})
        obs, total = self._read(turn)
        is_over = not self._acting
        ends = is_over and not self._was_cut, is_over and self._was_cut
        return obs, total / len(self.agents), *ends, self._infos(turn)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the adapter or the multi-agent environment has an attribute."""
        return super().has_wrapper_attr(name) or hasattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the adapter or the multi-agent environment."""
        return getattr(self if super().has_wrapper_attr(name) else self.env, name)

    def render(self) -> Any:
        """Render the environment."""
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
        """Update the acting and ended agents; return the observation and the sum of rewards."""
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

    def _show_last(self, agent: str, obs: object, is_cut: bool) -> bool:
        """Set the final observation of an agent if it is finite; return whether it was set.

        Raises:
            NonFiniteError: If the observation is not finite and is needed for bootstrapping.
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
        """Raise EnvError if a turn contains agents that are unknown or have ended."""
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
                    f"{key} contains the agents {sorted(map(str, agents - self._seats.keys()))}: "
                    f"expected some of possible_agents {list(self.agents)}"
                )
        for key in ("obs", "terminated", "truncated") if self._gone else ():
            if not self._gone.isdisjoint(named[key]):
                raise EnvError(
                    f"{key} contains the agents {sorted(self._gone & named[key])}, which have "
                    "already ended in this episode: omit them until the next reset"
                )
        late = [agent for agent in sorted(self._gone & turn.rewards.keys()) if turn.rewards[agent]]
        if late:
            raise EnvError(
                f"rewards contains the agents {late}, which have already ended in this episode, so "
                "their last actions were already used for learning. End these agents later: until "
                "then, omit them from obs, so that they wait without acting and can still get "
                "rewards"
            )
        if not truncated <= turn.obs.keys():
            raise EnvError(
                f"the agents {sorted(truncated - turn.obs.keys())} are truncated without a final "
                "observation: add the observations to obs; values are bootstrapped from them"
            )


class _Seat:
    """Converts the observations of one agent for the joint observation."""

    def __init__(self, agent: str, observation_space: Space, action_space: Space) -> None:
        self._agent = agent
        self._view = FlatView(observation_space)
        self._columns = zeroed_columns(self._view, 1)
        self._write = self._write_acting = row_writer(self._view, self._columns)
        masks = mask_layout(observation_space, action_space)
        self._has_masks = masks is not None
        if masks is not None:
            self._write_acting = masked_writer(self._write, masks, self._columns)

    def show(self, obs: object, *, acts: bool) -> object:
        """Return a copy of an observation, with the dtypes of the agent's space."""
        try:
            (self._write_acting if acts else self._write)(0, obs)
        except SpaceError as error:
            raise EnvError(f"agent {self._agent!r}: {error}") from error
        return self._view.build(
            {key: column[0, ...].copy() for key, column in self._columns.items()}
        )

    def check_finite(self) -> None:
        """Check the last returned observation of an agent that has ended.

        Raises:
            NonFiniteError: If the observation is not finite. The message names the agent.
        """
        check_finite(
            {key: column[0, ...] for key, column in self._columns.items()},
            f"last observation of agent {self._agent!r}",
        )

    def neutral(self) -> object:
        """Return a neutral element of the space, with all actions legal."""
        return self._view.build(
            {
                key: np.ones_like(self._columns[key][0, ...])
                if self._has_masks and is_mask_key(key)
                else nearest_to_zero(leaf)
                for key, leaf in self._view.leaves.items()
            }
        )


def nearest_to_zero(leaf: Space) -> Array:
    """Return the element of a leaf space that is closest to 0."""
    if isinstance(leaf, spaces.Box):
        return np.asarray(np.clip(np.zeros(leaf.shape, leaf.dtype), leaf.low, leaf.high))
    start = leaf.start if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)) else 0
    return np.full(leaf.shape or (), start, leaf.dtype)


def check_form(turn: object) -> None:
    """Check that the result of a reset or step is a `Turn`.

    Raises:
        EnvError: If the result is not a `Turn`, or a field has the wrong type.
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


def check_mapping(what: str, value: object) -> None:
    """Check that a value is a mapping keyed by agent.

    Raises:
        EnvError: If the value is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise EnvError(f"{what} is {shortened(value)}: expected a dict by agent")


def shortened(value: object) -> str:
    """Return a value as a string of limited length."""
    return textwrap.shorten(f"{type(value).__name__} {value!r}", 80)


def ended(flags: Collection[str] | Mapping[str, bool]) -> set[str]:
    """Return the agents in a list, or the agents with a true flag in a mapping."""
    if isinstance(flags, Mapping):
        return {agent for agent, flag in flags.items() if flag}
    return set(flags)


def checked_names(possible_agents: Sequence[str]) -> tuple[str, ...]:
    """Check and return the names of agents.

    Raises:
        EnvError: If there are no agents, or a name is invalid or duplicate.
    """
    agents = tuple(possible_agents)
    wrong = [name for name in agents if not is_name(name)]
    if wrong or not agents or len(set(agents)) < len(agents):
        raise EnvError(
            f"possible_agents = {list(agents)!r}: expected at least one name; names must be "
            f"unique, non-empty strings without '/', and not {AGENT_RETURNS!r}"
        )
    return agents


def is_name(name: object) -> bool:
    """Whether a value is a valid agent name. Names must be usable in keys joined by `/`."""
    return isinstance(name, str) and name not in ("", AGENT_RETURNS) and "/" not in name
