"""Random actions for agents with trained policies, for the warm-up steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze_train.collect.fixed_policies import RandomPolicy
from maze_train.nets.joint import JointModel, by_number
from maze_train.spaces.agents import AgentSpaces


class RandomAgents(JointModel):
    """Multi-agent model in which trained policies are replaced by a `RandomPolicy` per agent.

    The recurrent state has the layout of `model`, so that `model` can continue the episodes.

    Args:
        model: The policies that act after the warm-up, and their agents.
        spaces: Spaces of the agents.
        learns: Returns whether a policy is trained, by id.
        repeat: See `RandomPolicy`.
    """

    def __init__(
        self,
        model: JointModel,
        spaces: AgentSpaces,
        learns: Callable[[str], bool],
        repeat: int = 1,
    ) -> None:
        random: dict[str, RandomPolicy] = {}
        acting: dict[str, Any] = {}
        for agent, policy in model.agents.items():
            own: Any = model.by_policy[policy]
            if learns(policy):
                space = spaces.actions[agent]
                own = RandomPolicy(own.distribution, space, own.masking, repeat=repeat)
                random[agent] = own
            acting[agent] = own
        super().__init__(*by_number(acting))
        self.members, self._random = model.members, random

    def policy_state(self) -> dict[str, Any]:
        """Return the state of each random policy, by agent."""
        return {agent: policy.policy_state() for agent, policy in self._random.items()}

    def load_policy_state(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        for agent, policy in self._random.items():
            if agent in state:  # Missing if the policy was frozen.
                policy.load_policy_state(state[agent])
