"""Splits multi-agent rollouts into one rollout per policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

import torch

from maze_train.core.step_end import StepEnd, has_ended, is_transition
from maze_train.core.types import Tensor, TensorTree, rows_of, tree_leaves, tree_map
from maze_train.data.rollout import Rollout
from maze_train.spaces.agents import ACTS, AGENTS, REWARDS, TERMINATED, TRUNCATED
from maze_train.spaces.tensors import (
    JOINT_ACTS,
    joined,
    joint_view,
    part_of,
    parts_by_name,
    with_joint,
)


@dataclass(frozen=True)
class _Steps:
    """T steps of one agent in E environments, or of multiple agents in C columns.

    Attributes:
        obs: `[T + 1, E, ...]`
        actions: `[T, E, ...]`; values are arbitrary in steps in which the agent does not act.
        acts: Whether the agent acts on an observation, `[T + 1, E]` bool.
        rewards: `[T, E]`
        end: `StepEnd` codes of the agent's episode, `[T, E]` uint8; DROPPED if the turn or the
            whole episode was dropped.
        states: Recurrent state before each observation, `[T + 1, E, S]`.
        log_probs: Log-probabilities of the actions, `[T, E]`.
    """

    obs: TensorTree
    actions: TensorTree
    acts: Tensor
    rewards: Tensor
    end: Tensor
    states: Tensor | None
    log_probs: Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[_Steps], dim: int) -> _Steps:
        """Concatenate steps along time (dimension 0) or agents (dimension 1)."""
        columns: dict[str, Any] = {
            name: None if column is None else joined([vars(own)[name] for own in parts], dim)
            for name, column in vars(parts[0]).items()
        }
        return _Steps(**columns)


class TurnOptions(TypedDict, total=False):
    """Optional arguments of `TurnSplitter`, except `centralized`."""

    multiple: int
    as_steps: bool
    at_end: bool
    keeps_terminal_obs: bool


class TurnSplitter:
    """Converts multi-agent rollouts to one rollout per policy.

    A turn begins with an action of an agent and ends before the agent's next action or at the end
    of the episode. The reward of a turn is the sum of the agent's rewards during the turn,
    including rewards caused by actions of other agents. Rewards before the first action are added
    to the first turn, so that the rewards of all turns sum to the return.

    Row i of a column is turn i of one agent in one environment. Columns are ordered by agent, then
    environment, and padded with WAITING rows; dropped turns are DROPPED. Unfinished turns, and
    rewards before the first action, carry over to the next rollout.

    Args:
        policies: Agents of each policy, by policy ID.
        state_sizes: Size of the recurrent state of each agent, in the order of rollouts.
        multiple: The number of rows is rounded up to a multiple of this value.
        as_steps: Whether to return T rows for every policy, even if no agent acted. T steps
            complete at most T turns of an agent.
        at_end: Whether to pad before the turns, with copies of the next observation, so that each
            column continues the column of the previous rollout.
        keeps_terminal_obs: Whether rollouts include final observations of terminated turns.
        centralized: Policies with a centralised critic. Observations of these policies include the
            observations of all agents (`spaces.tensors.with_joint`).
    """

    def __init__(
        self,
        policies: Mapping[str, Sequence[str]],
        state_sizes: Mapping[str, int],
        multiple: int = 1,
        *,
        as_steps: bool = False,
        at_end: bool = False,
        keeps_terminal_obs: bool = False,
        centralized: Collection[str] = (),
    ) -> None:
        self._policies = {policy: list(agents) for policy, agents in policies.items() if agents}
        self._state_sizes = dict(state_sizes)
        self._multiple = multiple
        self._as_steps, self._at_end = as_steps, at_end
        self._keeps_terminal_obs = keeps_terminal_obs
        self._centralized = {agent for policy in centralized for agent in policies[policy]}
        self._running: dict[str, _Steps] = {}

    def split(self, rollout: Rollout, learns: Tensor | None = None) -> dict[str, Rollout]:
        """Return rollouts, keyed by policy ID.

        Without `as_steps`, policies without finished turns are omitted.

        Args:
            rollout: T steps of E environments, with all final observations.
            learns: Whether an agent is controlled by the learning policy, `[T + 1, E, A]` bool,
                constant within an episode. Turns of other agents are omitted. None: all agents.
        """
        steps, last_obs = self._steps_of_agents(rollout)
        if learns is not None:
            for i, (agent, own) in enumerate(steps.items()):
                steps[agent] = replace(own, acts=own.acts & learns[..., i])
        found: dict[str, Rollout] = {}
        for policy, agents in self._policies.items():
            turns = _Turns(
                _Steps.joined([steps[agent] for agent in agents], 1),
                [last_obs[agent] for agent in agents],
                self._running.pop(policy, None),
            )
            rows = rollout.num_steps if self._as_steps else turns.num_rows
            if rows:
                rows += -rows % self._multiple
                found[policy] = turns.rollout(rows, self._at_end, self._keeps_terminal_obs)
            if (running := turns.running()) is not None:
                self._running[policy] = running
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished turns."""
        return {policy: dict(vars(steps)) for policy, steps in self._running.items()}

    def load_state_dict(self, state: dict[str, Any], lost: Tensor) -> None:
        """Restore from `state`.

        Args:
            state: Result of `state_dict`.
            lost: Environments whose episodes were aborted, `[E]` bool; their unfinished turns are
                dropped.
        """
        self._running = {}
        for policy, columns in state.items():
            steps, envs = _Steps(**columns), lost.repeat(len(self._policies[policy]))
            self._running[policy] = replace(
                steps, acts=steps.acts & ~envs, rewards=steps.rewards.masked_fill(envs, 0.0)
            )

    def _steps_of_agents(self, rollout: Rollout) -> tuple[dict[str, _Steps], dict[str, TensorTree]]:
        """Return the steps of each agent, and the observations after each step, `[T, E, ...]`."""
        obs, last_obs = cast("dict[str, Tensor]", rollout.obs), _last_obs(rollout)
        parts, last_parts = (parts_by_name(part_of(tree, AGENTS)) for tree in (obs, last_obs))
        actions = parts_by_name(cast("dict[str, Tensor]", rollout.actions))
        terminated = last_obs[TERMINATED].bool()
        truncated = last_obs[TRUNCATED].bool()
        unknown = terminated & truncated
        # If the environment's episode terminates, all remaining agents terminate.
        terminated |= rollout.terminated.unsqueeze(-1) & ~truncated
        # A time limit truncates the agents that would act next. Other agents have no observation
        # after their last action to bootstrap from, so their turns are dropped.
        limited = rollout.truncated.unsqueeze(-1) & ~terminated & ~truncated
        acts_next = last_obs[ACTS].bool()
        truncated |= limited & acts_next
        lost = (limited & ~acts_next) | unknown
        if rollout.valid is not None:
            lost |= ~rollout.valid.unsqueeze(-1)
        end = truncated.byte() * StepEnd.TRUNCATED
        end.masked_fill_(terminated, StepEnd.TERMINATED).masked_fill_(lost, StepEnd.DROPPED)
        joint, last_joint = joint_view(obs), joint_view(last_obs)
        # Truncated agents would have continued to act; see `_Turns.rollout`.
        last_joint[JOINT_ACTS] = (~terminated).to(joint[JOINT_ACTS].dtype)
        states: list[Tensor | None] = [None] * len(self._state_sizes)
        if rollout.hidden_states is not None:
            states = list(
                torch.split(rollout.hidden_states, list(self._state_sizes.values()), dim=-1)
            )
        steps = {
            agent: _Steps(
                obs=self._seen(agent, i, parts, joint),
                actions=actions[agent],
                acts=obs[ACTS][..., i].bool(),
                rewards=last_obs[REWARDS][..., i],
                end=end[..., i],
                states=None if (state := states[i]) is None or not state.shape[-1] else state,
                log_probs=None if rollout.log_probs is None else rollout.log_probs[..., i],
            )
            for i, agent in enumerate(self._state_sizes)
        }
        agents = enumerate(self._state_sizes)
        return steps, {agent: self._seen(agent, i, last_parts, last_joint) for i, agent in agents}

    def _seen(
        self, agent: str, number: int, parts: Mapping[str, Any], joint: Mapping[str, Tensor]
    ) -> TensorTree:
        """Return the observations of an agent, plus joint observations for a centralised critic."""
        own: TensorTree = parts[agent]
        return with_joint(own, joint, number) if agent in self._centralized else own


class _Turns:
    """Turns of A agents in E environments, in C = A * E columns ordered by agent.

    Args:
        steps: Steps of all agents.
        last_obs: Observations of each agent after each step, `[T, E, ...]`; final observations at
            episode ends.
        earlier: Unfinished turns: the result of `running` for the previous rollout.
    """

    def __init__(
        self, steps: _Steps, last_obs: Sequence[TensorTree], earlier: _Steps | None
    ) -> None:
        self._num_before = 0 if earlier is None else 1
        if earlier is not None:
            steps = _Steps.joined([earlier, steps], 0)
        self._steps, self._last_obs = steps, last_obs
        all_acts, rewards, end = steps.acts, steps.rewards, steps.end
        self._num_steps, num_columns = rewards.shape
        self._num_envs = num_columns // len(last_obs)
        self._columns = torch.arange(num_columns)
        times = torch.arange(self._num_steps + 1).unsqueeze(1)
        acts = all_acts[:-1]
        ends = (end != StepEnd.RUNNING).long()
        ends_before = ends.cumsum(0) - ends
        before = torch.where(acts, times[:-1], -1).cummax(0).values
        after = torch.where(acts, times[:-1], self._num_steps).flip(0).cummin(0).values.flip(0)
        has_acted = before >= 0
        has_acted &= ends_before == ends_before.gather(0, before.clamp(min=0))
        acts_later = ~has_acted & (after < self._num_steps)
        acts_later &= ends_before == ends_before.gather(0, after.clamp(max=self._num_steps - 1))
        self._numbers = (acts.cumsum(0) - 1 + acts_later.long()).clamp(min=0)
        """Index of the turn of each step, `[T, C]`."""
        self._is_open = has_acted | acts_later
        """Whether each step is part of a turn, `[T, C]` bool."""
        is_early = ~has_acted & (after == self._num_steps) & (ends_before == ends.sum(0))
        self._early = (rewards * is_early).sum(0)
        """Rewards of running episodes in which the agent has not acted yet, `[C]`."""
        self._counts = acts.sum(0)
        self._size = int(self._counts.max())
        # Include the turn that starts with the observation after the last step.
        numbers = torch.where(all_acts, all_acts.cumsum(0) - 1, self._size + 1)
        self._times = torch.zeros(self._size + 2, num_columns, dtype=torch.int64)
        self._times.scatter_(0, numbers, times.expand_as(numbers).contiguous())
        self._times = self._times[:-1]
        self.rewards = self._sum(rewards)
        self.end = self._sum(end)
        """End code of each turn, `[N, C]` uint8."""
        self._end_times = self._sum(has_ended(end) * times[:-1])
        """Last step of each terminated or truncated turn, `[N, C]`."""
        self.is_running = (self._counts > 0) & ~all_acts[-1]
        if self._size:
            last = (self._counts - 1).clamp(min=0).unsqueeze(0)
            self.is_running &= self.end.gather(0, last).squeeze(0) == StepEnd.RUNNING
        self.complete = self._counts - self.is_running.long()
        """Number of finished turns, `[C]`."""

    @property
    def num_rows(self) -> int:
        """Maximum number of finished turns per column."""
        return int(self.complete.max())

    def rollout(self, rows: int, at_end: bool, keeps_terminal_obs: bool = False) -> Rollout:
        """Return the finished turns, padded to `rows` rows."""
        numbers = torch.arange(rows + 1).unsqueeze(1).expand(-1, len(self._columns))
        if at_end:
            numbers = numbers - (rows - self.complete)
        times = _at(self._times, numbers.clamp(min=0))
        acted = times[:-1].clamp(max=self._num_steps - 1)
        numbers = numbers[:-1]
        is_turn = (numbers >= 0) & (numbers < self.complete)
        end = _at(self.end, numbers).masked_fill_(~is_turn, StepEnd.WAITING)
        valid = is_transition(end)
        has_final = has_ended(end) if keeps_terminal_obs else end == StepEnd.TRUNCATED
        obs = self._taken("obs", times)
        # Order final observations by agent.
        owners, at, envs = self._by_agent(has_final).transpose(0, 1).nonzero().unbind(1)
        columns = owners * self._num_envs + envs
        positions = at * len(self._columns) + columns
        ends = self._end_times[numbers[at, columns], columns]
        counts = owners.bincount(minlength=len(self._last_obs)).tolist()
        # No turn ends in the step that precedes the rollout.
        where = torch.split(ends - self._num_before, counts), torch.split(envs, counts)
        final_obs: Any = joined(
            [
                rows_of(own, (end, env))
                for own, count, end, env in zip(self._last_obs, counts, *where, strict=True)
                if count or own is self._last_obs[0]
            ]
        )
        if isinstance(obs, dict) and JOINT_ACTS in obs:
            # Agents that acted at the start of the turn and did not terminate would act again.
            final_obs[JOINT_ACTS] &= obs[JOINT_ACTS][:-1].flatten(0, 1)[positions]
        return Rollout(
            obs=obs,
            actions=self._taken("actions", acted),
            rewards=_at(self.rewards, numbers) * valid,
            end=end,
            final_obs=final_obs,
            final_positions=positions,
            hidden_states=self._taken("states", times),
            log_probs=self._taken("log_probs", acted),
        )

    def running(self) -> _Steps | None:
        """Return the unfinished turns as one step; None if all turns are finished.

        In columns without an unfinished turn, the step contains rewards before the first action.
        """
        if not bool((self.is_running | self._early.bool()).any()):
            return None
        last = (self._counts - 1).clamp(min=0)
        times = self._times[last, self._columns].clamp(max=self._num_steps - 1).unsqueeze(0)
        rewards = self._early
        if self._size:
            rewards = torch.where(self.is_running, self.rewards[last, self._columns], rewards)
        names = ("obs", "actions", "states", "log_probs")
        columns: dict[str, Any] = {name: self._taken(name, times) for name in names}
        acts = self.is_running.unsqueeze(0)
        end = torch.zeros_like(acts, dtype=torch.uint8)
        return _Steps(acts=acts, rewards=rewards.unsqueeze(0), end=end, **columns)

    def _taken(self, name: str, times: Tensor) -> Any:
        """Gather rows of a column at the given times, `[N, C]`; None if the column is None."""
        tree = vars(self._steps)[name]
        if tree is None:
            return None
        is_whole = len(times) == len(tree_leaves(tree)[0]) and len(self._last_obs) > 1
        if is_whole and bool((times == torch.arange(len(times)).unsqueeze(1)).all()):
            return tree  # Already copied by `_Steps.joined`.
        return tree_map(lambda x: x[times, self._columns], tree)

    def _by_agent(self, columns: Tensor) -> Tensor:
        """Reshape columns `[..., C]` to `[..., A, E]`."""
        return columns.reshape(*columns.shape[:-1], len(self._last_obs), self._num_envs)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum values over the steps of each turn, `[N, C]`."""
        sums = torch.zeros(self._size, len(self._columns), dtype=values.dtype)
        if self._size:
            sums.scatter_add_(0, self._numbers, values * self._is_open)
        return sums


def _last_obs(rollout: Rollout) -> dict[str, Tensor]:
    """Return the observation after each step, `[T, E, ...]`; final observations at episode ends."""
    obs = cast("dict[str, Tensor]", rollout.obs)
    found = {key: leaf[1:] for key, leaf in obs.items()}
    if not len(rollout.final_positions):
        return found
    final = cast("dict[str, Tensor]", rollout.final_obs)
    for key, leaf in found.items():
        found[key] = leaf.clone()
        found[key].flatten(0, 1)[rollout.final_positions] = final[key]
    return found


def _at(rows: Tensor, numbers: Tensor) -> Tensor:
    """Gather rows by index `[N, E]`; rows with an index out of range are zero."""
    if not len(rows):
        return rows.new_zeros(numbers.shape)
    found = rows.gather(0, numbers.clamp(0, len(rows) - 1))
    return found.masked_fill((numbers < 0) | (numbers >= len(rows)), 0)
