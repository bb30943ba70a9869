"""Random actions of several agents, while replay buffers are filled for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.nets.joint import AgentsDistribution, JointModel
from maze_train.rollout.initial_policies import RandomPolicy
from maze_train.spaces.agent_trees import part_of
from maze_train.spaces.agents import AGENTS, AgentSpaces

if TYPE_CHECKING:
    from maze_train.types import Tensor, TensorTree


class RandomAgents:
    """An `ActingModel` in which each agent acts as a `RandomPolicy`.

    Agents whose policy never learns, and has no part that rules out actions, act with it.

    Args:
        model: The policies that will act later, and who acts with which.
        spaces: Spaces of the agents.
        repeat: See `RandomPolicy`.
    """

    def __init__(self, model: JointModel, spaces: AgentSpaces, repeat: int = 1) -> None:
        self.members = model.members
        self.state_sizes = dict.fromkeys(spaces.agents, 0)
        self._policies: dict[str, Any] = {}
        for agent, policy in model.agents.items():
            own: Any = model.by_policy[policy]
            if hasattr(own, "masking"):
                space = spaces.actions[agent]
                own = RandomPolicy(own.distribution, space, own.masking, repeat=repeat)
            self._policies[agent] = own
        parts: dict[str, Any] = {
            agent: policy.distribution for agent, policy in self._policies.items()
        }
        self.distribution = AgentsDistribution(parts)

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions of all agents, `[n, param_size]`, for n observations."""
        assert isinstance(obs, dict)
        parts = part_of(obs, AGENTS)
        params = [
            policy.policy_params(part_of(parts, agent)) for agent, policy in self._policies.items()
        ]
        return torch.cat(params, dim=-1)

    def state_dict(self) -> dict[str, Any]:
        """The state of each policy."""
        return {agent: policy.state_dict() for agent, policy in self._policies.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for agent, policy in self._policies.items():
            policy.load_state_dict(state[agent])
