"""The samples that actor-critic losses are taken of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from maze_train.trees import tree_map

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout
    from maze_train.types import Tensor, TensorTree

__all__ = ["ActorCriticBatch"]

ADVANTAGES, TARGETS, OLD_VALUES, OLD_LOG_PROBS = range(4)


@dataclass(frozen=True, slots=True)
class ActorCriticBatch:
    """N samples of a rollout, without their order in time."""

    obs: TensorTree
    """Observations, `[N, ...]`."""

    actions: TensorTree
    """Actions as the distribution sampled them, `[N, ...]`."""

    columns: Tensor
    """Advantages, targets of the critic, old values (on the scale of the targets) and old
    log-probabilities, `[4, N]`: one tensor, so that a minibatch gathers them in one operation."""

    rollout: Rollout | None = None
    """The rollout that all samples come from; None for a minibatch."""

    @property
    def size(self) -> int:
        """N."""
        return self.columns.shape[1]

    @property
    def advantages(self) -> Tensor:
        """Advantages, `[N]`."""
        return self.columns[ADVANTAGES]

    @property
    def targets(self) -> Tensor:
        """What the critic regresses on, `[N]`."""
        return self.columns[TARGETS]

    @property
    def old_values(self) -> Tensor:
        """Values before this pass, on the scale of the targets, `[N]`."""
        return self.columns[OLD_VALUES]

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probabilities of the actions under the policy that took them, `[N]`."""
        return self.columns[OLD_LOG_PROBS]

    def select(self, indices: Tensor) -> ActorCriticBatch:
        """The samples at `indices`, `[n]` int64."""
        return ActorCriticBatch(
            obs=tree_map(lambda x: x.index_select(0, indices), self.obs),
            actions=tree_map(lambda x: x.index_select(0, indices), self.actions),
            columns=self.columns.index_select(1, indices),
        )
