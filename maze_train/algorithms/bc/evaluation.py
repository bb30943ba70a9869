"""Evaluation of a policy on recorded episodes that it did not learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.events import Statistics
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.rollout.acting import device_of
from maze_train.training.evaluators import Evaluator
from maze_train.training.models import modules_of
from maze_train.types import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        policy: Id of the policy that is judged, where there are several; metrics have it in their
            names then: `validation/<policy>/loss`.
    """

    def __init__(
        self,
        data: TransitionData,
        loss: BCLoss,
        metrics: ImitationMetrics,
        policy: str = DEFAULT_MODULE,
    ) -> None:
        self.data = data
        self.loss_name = validation_name("loss", policy)
        self._loss = loss
        self._metrics = metrics
        self._policy = policy

    @torch.no_grad()
    def evaluate(self, policy: Any) -> dict[str, float]:
        """The metrics of a policy."""
        policy = modules_of(policy)[self._policy]
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
        named = {"loss": loss, **means}
        return {validation_name(name, self._policy): value for name, value in named.items()}


class JointValidationEvaluator(Evaluator):
    """Validation of several policies, with `validation/loss`, the mean over all transitions.

    Args:
        evaluators: Those of each policy.
    """

    def __init__(self, evaluators: Sequence[BCValidationEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def evaluate(self, policy: Any) -> dict[str, float]:
        """The metrics of all policies."""
        metrics: dict[str, float] = {}
        total, count = 0.0, 0
        for evaluator in self._evaluators:
            found = evaluator.evaluate(policy)
            total += found[evaluator.loss_name] * evaluator.data.num_samples
            count += evaluator.data.num_samples
            metrics.update(found)
        return {**metrics, "validation/loss": total / count}


def validation_name(name: str, policy: str) -> str:
    """Name of a metric of recorded episodes, of a policy if there are several."""
    return f"validation/{name}" if policy == DEFAULT_MODULE else f"validation/{policy}/{name}"
