"""Policies of multiple agents combined into one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from maze_train.core.types import Device, Shape, Tensor, TensorTree, tree_map
from maze_train.distributions.base import Distribution
from maze_train.nets.acting import Acted, ActingModel, DistributionPolicy, acting
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.spaces.agents import ACTS, AGENTS
from maze_train.spaces.tensors import joined, part_of, parts_by_name, stacked, unstacked, with_name


class JointModel(ActingModel):
    """Acts for all agents of an environment, each with its policy.

    Observations have the form of `maze_train.spaces.agents`. Agents with the same policy are
    evaluated in one batch. Noise, parameters and recurrent states are the concatenation over
    agents. The recurrent state of an agent is kept while it does not act.

    Args:
        policies: Models by policy id.
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
        self._groups = self.members
        # In a dict, so that the weights are not registered under a second name.
        self._acting = {policy: acting(own) for policy, own in policies.items()}
        models = {agent: self._acting[policy] for agent, policy in agents.items()}
        self.state_sizes = {agent: own.state_size for agent, own in models.items()}
        self._noise_sizes = [own.noise_size for own in models.values()]
        self._param_sizes = [own.param_size for own in models.values()]
        self.is_random = any(own.is_random for own in models.values())

    @property
    def state_size(self) -> int:
        """Size S of the recurrent state of all agents per environment; 0: none."""
        return sum(self.state_sizes.values())

    @property
    def noise_size(self) -> int:
        """Number of random values for the actions of all agents."""
        return sum(self._noise_sizes)

    @property
    def param_size(self) -> int:
        """Number of distribution parameters of all agents."""
        return sum(self._param_sizes)

    @property
    def centralized(self) -> list[str]:
        """Ids of the policies that have a centralised critic."""
        critics = {k: m for k, m in self.policies.items() if isinstance(m, ActorCriticModel)}
        return [policy for policy, own in critics.items() if own.is_centralized]

    @property
    def by_policy(self) -> dict[str, nn.Module]:
        """Models by policy id."""
        return dict(self.policies.items())

    def states_by_agent(self, states: Tensor) -> dict[str, Tensor]:
        """Split recurrent states `[..., S]` by agent."""
        return self._split(states, list(self.state_sizes.values()))

    def draw_noise(
        self, shape: Shape, generator: torch.Generator | None = None, device: Device = None
    ) -> Tensor:
        """Draw the noise of all agents; see `ActingModel`."""
        models = [self._acting[policy] for policy in self.agents.values()]
        return torch.cat([own.draw_noise(shape, generator, device) for own in models], dim=-1)

    def act(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> Acted:
        """Choose actions of all agents; see `ActingModel`."""
        return joint_acted(self.act_by_agent(obs, hidden_state, noise, deterministic))

    def act_by_agent(
        self, obs: TensorTree, hidden_state: Tensor, noise: Tensor | None, deterministic: bool
    ) -> dict[str, Acted]:
        """Choose actions; return the result of each agent."""
        leaves = cast("dict[str, Tensor]", obs)
        parts = parts_by_name(part_of(leaves, AGENTS))
        states, noises = self.states_by_agent(hidden_state), self.noises_by_agent(noise)
        found: dict[str, Acted] = {}
        for policy, agents in self._groups.items():
            if not agents:
                continue
            model = self._acting[policy]
            own = joined([parts[agent] for agent in agents])
            given = torch.cat([states[agent] for agent in agents])
            drawn = [noises[agent] for agent in agents]
            own_noise = None if drawn[0] is None else torch.cat(cast("list[Tensor]", drawn))
            if model.state_size:
                who = self._who_acts(leaves, agents)
                acted = model.act_in_turns(own, given, own_noise, deterministic, who)
            else:
                acted = model.act(own, given, own_noise, deterministic)
            rows = (_of_each_agent(tree, len(agents)) for tree in acted)
            found.update(zip(agents, map(Acted._make, zip(*rows, strict=True)), strict=True))
        return {agent: found[agent] for agent in self.agents}

    def noises_by_agent(self, noise: Tensor | None) -> Mapping[str, Tensor | None]:
        """Split noise `[..., noise_size]` by agent."""
        if noise is None:
            return dict.fromkeys(self.agents)
        return self._split(noise, self._noise_sizes)

    def on_episode_end(self, hidden_state: Tensor) -> None:
        """Notify the policies of all agents; see `ActingModel`."""
        for agent, own in self.states_by_agent(hidden_state).items():
            self._acting[self.agents[agent]].on_episode_end(own)

    def log_probs(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Log-probabilities of the actions of A agents, `[..., A]`; 0 for models without any."""
        own_params = self._split(params, self._param_sizes)
        given = own_params, parts_by_name(actions)
        found = self._of_each(lambda own, params, taken: own.log_probs(params, taken), *given)
        return torch.stack(cast("list[Tensor]", list(found.values())), dim=-1)

    def to_env(self, actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the agents' actions to inputs of `env.step`."""
        return _flat(self._of_each(lambda own, taken: own.to_env(taken), parts_by_name(actions)))

    def example_actions(self) -> dict[str, Tensor]:
        """Return one example action of all agents, `[1, ...]`."""
        owners = self.agents.items()
        return _flat({agent: self._acting[own].example_actions() for agent, own in owners})

    def parts(self, params: Tensor) -> dict[str, tuple[Distribution, Tensor]]:
        """Return the distribution and params of each agent that has a distribution."""
        pairs = self._split(params, self._param_sizes).items()
        models = {agent: self._acting[policy] for agent, policy in self.agents.items()}
        return {
            agent: (own.distribution, given)
            for agent, given in pairs
            if isinstance(own := models[agent], DistributionPolicy)
        }

    def _of_each(
        self, function: Callable[..., TensorTree], *given: Mapping[str, TensorTree]
    ) -> dict[str, TensorTree]:
        """Call `function(model, ...)` for each policy; arguments and results are by agent."""
        found: dict[str, TensorTree] = {}
        for policy, agents in self._groups.items():
            if agents:
                own = [stacked([trees[agent] for agent in agents]) for trees in given]
                results = unstacked(function(self._acting[policy], *own))
                found.update(zip(agents, results, strict=True))
        return {agent: found[agent] for agent in self.agents}

    def _split(self, tensor: Tensor, sizes: list[int]) -> dict[str, Tensor]:
        return dict(zip(self.agents, torch.split(tensor, sizes, dim=-1), strict=True))

    def _who_acts(self, obs: dict[str, Tensor], agents: Sequence[str]) -> Tensor:
        """Return a mask of the acting agents, `[len(agents) * n]`, grouped by agent."""
        numbers = {agent: i for i, agent in enumerate(self.agents)}
        return obs[ACTS].bool()[:, [numbers[agent] for agent in agents]].T.flatten()


def joint_acted(found: Mapping[str, Acted]) -> Acted:
    """Combine the results of the agents."""
    return Acted(
        _flat({agent: acted.actions for agent, acted in found.items()}),
        _flat({agent: acted.env_actions for agent, acted in found.items()}),
        torch.cat([acted.hidden_state for acted in found.values()], dim=-1),
        torch.cat([acted.params for acted in found.values()], dim=-1),
    )


def _flat(trees: Mapping[str, TensorTree]) -> dict[str, Tensor]:
    """Flatten trees by agent to one mapping."""
    found: dict[str, Tensor] = {}
    for agent, tree in trees.items():
        found.update(with_name(agent, tree))
    return found


def acting_alone(models: Mapping[str, nn.Module]) -> JointModel:
    """Build a model in which each agent has a separate model; see `by_number`."""
    return JointModel(*by_number(models))


def members_of(model: nn.Module) -> Mapping[str, list[str]]:
    """Return the agents of each policy of a joint model; empty for a single-agent model."""
    return model.members if isinstance(model, JointModel) else {}


def by_number(models: Mapping[str, nn.Module]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Name models by number; return them with the number for each agent.

    Args:
        models: Models by agent, whose names may not be valid names of PyTorch modules.
    """
    numbers = {agent: str(i) for i, agent in enumerate(models)}
    return {numbers[agent]: own for agent, own in models.items()}, numbers


def _of_each_agent(rows: TensorTree, count: int) -> list[TensorTree]:
    """Split the rows of a batch by agent."""
    # Unlike `chunk`, unflatten can be exported for a variable number of environments.
    return unstacked(tree_map(lambda x: torch.unflatten(x, 0, (count, -1)), rows))
