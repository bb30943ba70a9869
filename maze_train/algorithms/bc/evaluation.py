"""Evaluation of a policy on recorded episodes that it did not learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.events import Statistics
from maze_train.rollout.acting import device_of
from maze_train.training.evaluators import Evaluator
from maze_train.types import tree_map

if TYPE_CHECKING:
    from maze_train.algorithms.bc.loss import BCLoss
    from maze_train.algorithms.bc.metrics import ImitationMetrics
    from maze_train.data.transition_data import TransitionData


BLOCK_NBYTES = 2**22
"""Bytes of the transitions that are evaluated at a time."""


class BCValidationEvaluator(Evaluator):
    """Loss, entropy and metrics of the actions of recorded transitions, all of them.

    Metrics are called as in training, after another prefix: `validation/loss` (with the entropy
    bonus), `validation/policy_loss`, `validation/policy_entropy`, `validation/discrete_accuracy`
    and so on. They are means over transitions.

    Args:
        data: The transitions, at least one.
        loss: The loss.
        metrics: Compares actions.
    """

    def __init__(self, data: TransitionData, loss: BCLoss, metrics: ImitationMetrics) -> None:
        self.data = data
        self._loss = loss
        self._metrics = metrics

    @torch.no_grad()
    def evaluate(self, policy: Any) -> dict[str, float]:
        """The metrics of a policy."""
        device, statistics, bonus = device_of(policy), Statistics(), 0.0
        for obs, actions in self.data.blocks(BLOCK_NBYTES):
            obs = tree_map(lambda x: x.to(device), obs)
            actions = tree_map(lambda x: x.to(device), actions)
            params = policy.policy_params(obs)
            found = [
                (ImitationEvents.policy_loss, self._loss.per_sample(params, actions)),
                (ImitationEvents.policy_entropy, policy.distribution.entropy(params)),
                *self._metrics(params, actions),
            ]
            for event, value in found:
                statistics.record(event, value.double().mean(), float(len(params)))
            bonus += float(self._loss.bonus(params).double().sum())
        means = {tag.partition("/")[2]: value for tag, value in statistics.reduce().items()}
        loss = means["policy_loss"] - bonus / self.data.num_samples
        return {f"validation/{k}": v for k, v in {"loss": loss, **means}.items()}
