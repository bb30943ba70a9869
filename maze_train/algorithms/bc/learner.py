"""Learner of behavioral cloning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.learner.learner import Learner
from maze_train.types import on_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.algorithms.bc.config import BCAlgorithmConfig
    from maze_train.algorithms.bc.loss import BCLoss
    from maze_train.algorithms.bc.metrics import ImitationMetrics
    from maze_train.events import Statistics
    from maze_train.nets.policy_model import PolicyModel
    from maze_train.types import Tensor, TensorTree


@dataclass(frozen=True)
class BCBatch:
    """n recorded transitions."""

    obs: TensorTree
    """Observations, `[n, ...]`."""

    actions: TensorTree
    """Actions as the distribution has them, `[n, ...]`."""

    is_measured: bool = False
    """Whether metrics of its actions are recorded."""


class BCLearner(Learner[BCBatch, BCBatch, BCBatch]):
    """One gradient step on one minibatch of recorded transitions; see `BCLoss`.

    Args:
        module: The policy, or several by id.
        config: Settings.
        loss: The loss, or that of each module by id.
        metrics: Further metrics of the actions, likewise; None: no metrics.
        device: Where the policy and its updates live.
    """

    most_empty_updates: ClassVar[int] = 100
    """An update has one step: without it nothing is left of the update."""

    def __init__(
        self,
        module: PolicyModel | Mapping[str, PolicyModel],
        config: BCAlgorithmConfig,
        loss: BCLoss | Mapping[str, BCLoss],
        metrics: ImitationMetrics | Mapping[str, ImitationMetrics] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(module, config, device=device)
        self.loss = loss
        self.metrics = metrics

    def preprocess(self, module_id: str, experience: BCBatch, statistics: Statistics) -> BCBatch:
        """The minibatch on the device of the policy."""
        return experience if self.device.type == "cpu" else on_device(experience, self.device)

    def minibatches(
        self, prepared: Mapping[str, BCBatch], statistics: Statistics
    ) -> Iterator[Mapping[str, BCBatch]]:
        """The minibatch."""
        yield prepared

    def compute_loss_for_module(
        self, module_id: str, batch: BCBatch, statistics: Statistics
    ) -> Tensor:
        """Loss of the recorded actions."""
        model: PolicyModel = self.modules[module_id]  # type: ignore[assignment]  # as constructed
        params = model.policy_params(batch.obs)
        own, metrics = _of(self.loss, module_id), _of(self.metrics, module_id)
        loss: Tensor = own(params, batch.actions)
        weight = float(len(params))
        with torch.no_grad():
            policy_loss = loss + own.bonus(params).mean()
            entropy = model.distribution.entropy(params).mean()
        statistics.record(ImitationEvents.policy_loss, policy_loss, weight)
        statistics.record(ImitationEvents.policy_entropy, entropy, weight)
        if metrics is not None and batch.is_measured:
            for event, value in metrics(params.detach(), batch.actions):
                statistics.record(event, value, weight)
            norms = [torch.linalg.vector_norm(p.detach()) for p in model.parameters()]
            norm = torch.linalg.vector_norm(torch.stack(norms))
            statistics.record(ImitationEvents.policy_l2_norm, norm)
        return loss


def _of(each: Any, module_id: str) -> Any:
    """What belongs to a module: that which all have, or its own."""
    return each[module_id] if isinstance(each, Mapping) else each
