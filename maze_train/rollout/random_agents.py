"""Random actions of several agents, while replay buffers are filled for the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze_train.nets.joint import JointModel, acting_alone
from maze_train.rollout.initial_policies import FixedPolicy, RandomPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.spaces.agents import AgentSpaces


class RandomAgents:
    """A model in which the agents whose policy learns act as a `RandomPolicy`, the others with it.

    It acts with a memory if one of these policies has one: the memory of all agents is that of the
    model with which they act later.

    Args:
        model: The policies that will act later, and who acts with which.
        spaces: Spaces of the agents.
        learns: Says of the id of a policy whether it learns.
        repeat: See `RandomPolicy`.
    """

    def __init__(
        self,
        model: JointModel,
        spaces: AgentSpaces,
        learns: Callable[[str], bool],
        repeat: int = 1,
    ) -> None:
        self._random: dict[str, RandomPolicy] = {}
        acting: dict[str, Any] = {}
        for agent, policy in model.agents.items():
            own: Any = model.by_policy[policy]
            if learns(policy):
                space = spaces.actions[agent]
                random = RandomPolicy(own.distribution, space, own.masking, repeat=repeat)
                self._random[agent], own = random, FixedPolicy(random)
            acting[agent] = own
        joint = acting_alone(acting)
        self.members, self.distribution = model.members, joint.distribution
        self.state_size, self.state_sizes = joint.state_size, joint.state_sizes
        self.policy_params, self.policy_step = joint.policy_params, joint.policy_step
        self.end_episodes = joint.end_episodes

    def state_dict(self) -> dict[str, Any]:
        """The state of each random policy, by agent."""
        return {agent: policy.state_dict() for agent, policy in self._random.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for agent, policy in self._random.items():
            if agent in state:  # else its policy did not learn
                policy.load_state_dict(state[agent])
