"""Joint model of the policies of multiple agents."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple, cast

import torch
from torch import nn

from maze_train.core.types import Device, Shape, Tensor, TensorTree, rows_of, tree_map
from maze_train.distributions.base import Distribution
from maze_train.nets.acting import (
    Acted,
    ActingModel,
    DistributionPolicy,
    acted_with,
    acting,
    dtype_of,
)
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.blocks import is_traced
from maze_train.spaces.agents import ACTS, AGENTS
from maze_train.spaces.tensors import joined, part_of, parts_by_name, stacked, unstacked, with_name

MIN_SKIP_ROWS = 256
"""Minimum number of rows for which selecting the acting agents saves time."""


class Inputs(NamedTuple):
    """Inputs of one policy in a `JointModel`.

    Row `k * n + i` belongs to agent k of the policy in environment i.

    Attributes:
        obs: Observations.
        hidden_state: Recurrent state before `obs`.
        noise: Noise of the actions; see `ActingModel.act`.
        acts: Mask of the acting rows; None if the results of all rows are required.
    """

    obs: TensorTree
    hidden_state: Tensor
    noise: Tensor | None
    acts: Tensor | None

    def at(self, rows: Tensor) -> Inputs:
        """Return the inputs at the given rows."""
        obs, state, *others = self
        noise, acts = (None if x is None else x[rows] for x in others)
        return Inputs(rows_of(obs, rows), state[rows], noise, acts)

    def acted(self, model: ActingModel, deterministic: bool) -> Acted:
        """Choose actions; see `ActingModel.act`."""
        obs, state, noise, acts = self
        if acts is None:
            return model.act(obs, state, noise, deterministic)
        if model.state_size or not isinstance(model, DistributionPolicy):
            return model.act_in_turns(obs, state, noise, deterministic, acts)
        rows = acts.nonzero().squeeze(1)
        if len(rows):
            own = model.policy_params(rows_of(obs, rows))
            params = own.new_zeros(len(acts), model.param_size).index_copy(0, rows, own)
        else:
            params = torch.zeros(len(acts), model.param_size, dtype=dtype_of(model))
        return acted_with(model.distribution, params, state, noise, deterministic)


class JointModel(ActingModel):
    """Chooses the actions of all agents of an environment, each with the agent's policy.

    Observations have the form of `maze_train.spaces.agents`. Agents with the same policy are
    evaluated in one batch. Noise, parameters and recurrent states are concatenated over agents. The
    recurrent state of an agent is unchanged in steps without an action. On the CPU, large batches
    of feedforward policies are evaluated only for the agents that act; the parameters of other
    agents are zeros.

    Args:
        policies: Models, keyed by policy id.
        agents: Policy id of each agent.

    Attributes:
        members: Agents of each policy.
    """

    def __init__(self, policies: Mapping[str, nn.Module], agents: Mapping[str, str]) -> None:
        super().__init__()
        self.policies = nn.ModuleDict(policies)
        self.agents = dict(agents)
        self.members: dict[str, list[str]] = {
            policy: [agent for agent, own in agents.items() if own == policy] for policy in policies
        }
        self._groups = {policy: own for policy, own in self.members.items() if own}
        self._runs = _runs_of(self.agents)
        # A plain dict does not register the weights under a second name.
        self._acting = {policy: acting(own) for policy, own in policies.items()}
        models = {policy: self._acting[policy] for policy in self._groups}
        self._state_sizes = {policy: own.state_size for policy, own in models.items()}
        self._noise_sizes = {policy: own.noise_size for policy, own in models.items()}
        self._param_sizes = {policy: own.param_size for policy, own in models.items()}
        self.state_sizes = {agent: self._state_sizes[own] for agent, own in agents.items()}
        self.is_random = any(own.is_random for own in models.values())
        self._skips_waiting = {
            policy: isinstance(own, DistributionPolicy) and not any(self._state_sizes.values())
            for policy, own in models.items()
        }

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of all agents per environment; 0 if not recurrent."""
        return sum(self.state_sizes.values())

    @property
    def noise_size(self) -> int:
        """Number of random values for the actions of all agents."""
        return sum(self._noise_sizes[policy] for policy in self.agents.values())

    @property
    def param_size(self) -> int:
        """Number of distribution parameters of all agents."""
        return sum(self._param_sizes[policy] for policy in self.agents.values())

    @property
    def centralized(self) -> list[str]:
        """Ids of the policies that have a centralised critic."""
        critics = {k: m for k, m in self.policies.items() if isinstance(m, ActorCriticModel)}
        return [policy for policy, own in critics.items() if own.is_centralized]

    @property
    def by_policy(self) -> dict[str, nn.Module]:
        """Models, keyed by policy id."""
        return dict(self.policies.items())

    def states_by_agent(self, states: Tensor) -> dict[str, Tensor]:
        """Split recurrent states `[..., S]` by agent."""
        return self._split(states, self._state_sizes)

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Sample the noise of all agents; see `ActingModel`."""
        models = [self._acting[policy] for policy in self.agents.values()]
        return torch.cat([own.draw_noise(shape, generator, device) for own in models], dim=-1)

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions of all agents; see `ActingModel`."""
        inputs = self.inputs(obs, hidden_state, noise)
        return self.combined(self.acted(inputs, deterministic), hidden_state)

    def inputs(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None
    ) -> dict[str, Inputs]:
        """Return the inputs of each policy in use."""
        leaves = cast("dict[str, Tensor]", obs)
        parts = parts_by_name(part_of(leaves, AGENTS))
        states = self._stacked(hidden_state, self._state_sizes)
        noises = None if noise is None else self._stacked(noise, self._noise_sizes)
        return {
            policy: Inputs(
                joined([parts[agent] for agent in agents]),
                states[policy].flatten(0, 1),
                None if noises is None else noises[policy].flatten(0, 1),
                self._who_acts(leaves, policy),
            )
            for policy, agents in self._groups.items()
        }

    def acted(self, inputs: Mapping[str, Inputs], deterministic: bool) -> dict[str, Acted]:
        """Choose the actions of the agents of each policy, in the order of the policy's inputs."""
        return {
            policy: own.acted(self._acting[policy], deterministic) for policy, own in inputs.items()
        }

    def combined(self, found: Mapping[str, Acted], hidden_state: Tensor) -> Acted:
        """Combine the results of `acted`; `hidden_state` is the recurrent state before the step."""
        rows = {
            policy: _of_each_agent(own, len(self._groups[policy])) for policy, own in found.items()
        }
        actions = self._by_agent({policy: own.actions for policy, own in rows.items()})
        env_actions = actions
        if any(own.env_actions is not own.actions for own in found.values()):
            env_actions = self._by_agent({policy: own.env_actions for policy, own in rows.items()})
        if hidden_state.shape[-1]:
            states = {policy: own.hidden_state for policy, own in rows.items()}
            hidden_state = self._concatenated(states)
        params = self._concatenated({policy: own.params for policy, own in rows.items()})
        return Acted(actions, env_actions, hidden_state, params)

    def acted_with(self, params: Tensor, noise: Tensor | None, deterministic: bool) -> Acted:
        """Choose actions from the distribution parameters of feedforward policies, `[n, ...]`."""
        noises = None if noise is None else self._stacked(noise, self._noise_sizes)
        found: dict[str, Acted] = {}
        for policy, own in self._stacked(params, self._param_sizes).items():
            model = cast("DistributionPolicy", self._acting[policy])
            drawn = None if noises is None else noises[policy].flatten(0, 1)
            given, state = own.flatten(0, 1), own.new_zeros(own.shape[0] * own.shape[1], 0)
            found[policy] = acted_with(model.distribution, given, state, drawn, deterministic)
        return self.combined(found, params.new_zeros(len(params), 0))

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Notify the policies of all agents; see `ActingModel`."""
        for agent, own in self.states_by_agent(hidden_state).items():
            self._acting[self.agents[agent]].on_episode_end(own)

    def log_probs(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities of the actions of A agents, `[..., A]`; 0 without a distribution."""
        own_params, taken = self._stacked(params, self._param_sizes), self._stacked_actions(actions)
        return self._concatenated(
            {
                policy: self._acting[policy].log_probs(own, taken[policy]).unsqueeze(-1)
                for policy, own in own_params.items()
            }
        )

    def to_env(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the agents' actions to inputs of `env.step`."""
        taken = self._stacked_actions(actions).items()
        return self._by_agent({policy: self._acting[policy].to_env(own) for policy, own in taken})

    def example_actions(self) -> dict[str, Tensor]:
        """Return one example action of all agents, `[1, ...]`."""
        owners = self.agents.items()
        return _flat({agent: self._acting[own].example_actions() for agent, own in owners})

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """Return distribution and parameters of each agent with a distribution."""
        pairs = self._split(params, self._param_sizes).items()
        models = {agent: self._acting[policy] for agent, policy in self.agents.items()}
        return {
            agent: (own.distribution, given)
            for agent, given in pairs
            if isinstance(own := models[agent], DistributionPolicy)
        }

    def _split(self, tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Split a tensor concatenated over agents; `sizes` are by policy."""
        widths = [sizes[policy] for policy in self.agents.values()]
        return dict(zip(self.agents, torch.split(tensor, widths, dim=-1), strict=True))

    def _stacked(self, tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Split a tensor concatenated over agents by policy, `[agents, ..., size]`."""
        if not tensor.shape[-1]:
            empty = {policy: (len(own), *tensor.shape) for policy, own in self._groups.items()}
            return {policy: tensor.new_zeros(shape) for policy, shape in empty.items()}
        pieces: dict[str, list[Tensor]] = {policy: [] for policy in self._groups}
        widths = [count * sizes[policy] for policy, _, count in self._runs]
        found = torch.split(tensor, widths, dim=-1)
        for (policy, _, count), piece in zip(self._runs, found, strict=True):
            by_agent = piece.view(*piece.shape[:-1], count, sizes[policy])
            pieces[policy].append(by_agent.movedim(-2, 0))
        return {policy: torch.cat(own) for policy, own in pieces.items()}

    def _concatenated(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Concatenate `[agents, ..., size]` of each policy over all agents."""
        pieces = [
            rows[policy][first : first + count].movedim(0, -2).flatten(-2)
            for policy, first, count in self._runs
        ]
        return torch.cat(pieces, dim=-1)

    def _stacked_actions(self, actions: Mapping[str, Tensor]) -> dict[str, TensorTree]:
        """Stack the actions of the agents of each policy, `[agents, ...]`."""
        parts = parts_by_name(actions)
        return {
            policy: stacked([parts[agent] for agent in agents])
            for policy, agents in self._groups.items()
        }

    def _by_agent(self, trees: Mapping[str, TensorTree]) -> dict[str, Tensor]:
        """Split `[agents, ...]` of each policy by agent; return one flat mapping."""
        rows = {policy: iter(unstacked(tree)) for policy, tree in trees.items()}
        return _flat({agent: next(rows[policy]) for agent, policy in self.agents.items()})

    def _who_acts(self, obs: dict[str, Tensor], policy: str) -> Tensor | None:
        """Return a mask of the acting agents of a policy, `[agents * n]`, grouped by agent.

        Returns None if the policy is to be evaluated for all agents: if all agents act, if there
        are few rows, if the observation does not contain the acting agents, or on an accelerator,
        where reading the mask would synchronise the device.
        """
        agents, is_recurrent = self._groups[policy], self._state_sizes[policy] > 0
        if not is_recurrent and not (self._skips_waiting[policy] and ACTS in obs):
            return None
        given = obs[ACTS]
        if not is_recurrent and (len(agents) * len(given) < MIN_SKIP_ROWS or not given.is_cpu):
            return None
        numbers = {agent: i for i, agent in enumerate(self.agents)}
        acts = given.bool()[:, [numbers[agent] for agent in agents]].T.flatten()
        return acts if is_recurrent or not (is_traced(acts) or bool(acts.all())) else None


def _runs_of(agents: Mapping[str, str]) -> list[tuple[str, int, int]]:
    """Return the runs of consecutive agents with the same policy.

    Args:
        agents: Policy id of each agent.

    Returns:
        Policy id of each run, index of the run's first agent within the policy, and number of
        agents in the run.
    """
    runs: list[tuple[str, int, int]] = []
    seen = dict.fromkeys(agents.values(), 0)
    for policy, own in groupby(agents.values()):
        count = len(list(own))
        runs.append((policy, seen[policy], count))
        seen[policy] += count
    return runs


def _flat(trees: Mapping[str, TensorTree]) -> dict[str, Tensor]:
    """Flatten the trees of all agents to one mapping."""
    found: dict[str, Tensor] = {}
    for agent, tree in trees.items():
        found.update(with_name(agent, tree))
    return found


def acting_alone(models: Mapping[str, nn.Module]) -> JointModel:
    """Build a joint model with a separate model for each agent; see `by_number`."""
    return JointModel(*by_number(models))


def members_of(model: nn.Module) -> Mapping[str, list[str]]:
    """Return the agents of each policy of a joint model; empty for a single-agent model."""
    return model.members if isinstance(model, JointModel) else {}


def by_number(models: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the models keyed by number, and the number of each agent's model.

    Args:
        models: Models, keyed by agent. Names of agents might not be valid names of PyTorch modules.
    """
    numbers = {agent: str(i) for i, agent in enumerate(models)}
    return {numbers[agent]: own for agent, own in models.items()}, numbers


def _of_each_agent(acted: Acted, count: int) -> Acted:
    """Reshape the rows to `[count, n, ...]`, one slice per agent."""
    # Unlike `chunk`, unflatten can be exported for a variable number of environments.
    return Acted._make(
        tree_map(lambda x: torch.unflatten(x, 0, (count, -1)), tree) for tree in acted
    )
