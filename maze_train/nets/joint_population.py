"""Many copies of the policies of several agents, computed side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.nets.population import (
    BatchedPolicy,
    BatchedPopulation,
    Population,
    RowPopulation,
    row_blocks,
)
from maze_train.spaces.agent_trees import part_of
from maze_train.spaces.agents import AGENTS

if TYPE_CHECKING:
    from torch import nn

    from maze_train.nets.joint import JointModel
    from maze_train.types import Tensor, TensorTree


class JointPopulation(Population):
    """Copies of a `JointModel` whose policies are all such as `BatchedPolicy` computes.

    Args:
        model: The policies, and who acts with which.
        count: Number of copies.
    """

    model: JointModel

    def __init__(self, model: JointModel, count: int) -> None:
        super().__init__(model, row_blocks(count))
        self._policies = {
            policy: BatchedPolicy(own, self._view) for policy, own in model.by_policy.items()
        }

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether all policies of a model are of that kind."""
        return all(map(BatchedPolicy.fits, model.by_policy.values()))

    def params(self, count: int, obs: TensorTree) -> Tensor:
        """Distribution parameters of all agents of the first copies, see `Population.params`."""
        assert isinstance(obs, dict)
        parts = part_of(obs, AGENTS)
        found = [
            self._policies[policy].params(count, part_of(parts, agent))
            for agent, policy in self.model.agents.items()
        ]
        return torch.cat(found, dim=-1)


def build_population(model: nn.Module, count: int) -> Population:
    """Copies of a policy, computed together where that can be done."""
    batched = JointPopulation if hasattr(model, "by_policy") else BatchedPopulation
    kind: Any = batched if batched.fits(model) else RowPopulation
    population: Population = kind(model, count)
    return population
