"""Validation of behavioral cloning on held-out episodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from maze_train.algorithms.bc.data import TransitionData
from maze_train.algorithms.bc.learner import BCLoss, ImitationEvents, ImitationMetrics
from maze_train.core.events import Statistics
from maze_train.core.types import precise_dtype, tree_map
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import device_of
from maze_train.nets.policy_model import PolicyModel
from maze_train.training.evaluators import Evaluator
from maze_train.training.models import modules_of

BLOCK_NBYTES = 2**22
"""Size of a validation block in bytes."""


class BCValidationEvaluator(Evaluator):
    """Computes loss, entropy and action metrics on recorded transitions.

    Metrics are means over transitions. The metric names are those of training with the prefix
    `validation`: `validation/loss` (including the entropy bonus), `validation/policy_loss`,
    `validation/policy_entropy`, `validation/discrete_accuracy` and so on.

    Args:
        data: The transitions, at least one.
        loss: The loss.
        metrics: The action metrics.
        policy: Id of the evaluated policy if there are several policies; included in the metric
            names: `validation/<policy>/loss`.
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
    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Compute the metrics of a policy."""
        policy = modules_of(policy)[self._policy]
        assert isinstance(policy, PolicyModel)
        device, statistics, bonus = device_of(policy), Statistics(), 0.0
        precise = precise_dtype(device)
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
                statistics.record(event, value.to(precise).mean(), float(len(params)))
            bonus += float(self._loss.bonus(params).to(precise).sum())
        means = {tag.partition("/")[2]: value for tag, value in statistics.reduce().items()}
        loss = means["policy_loss"] - bonus / self.data.num_samples
        named = {"loss": loss, **means}
        return {validation_name(name, self._policy): value for name, value in named.items()}


class JointValidationEvaluator(Evaluator):
    """Validation of several policies; `validation/loss` is the mean over all transitions.

    Args:
        evaluators: Evaluators of the individual policies.
    """

    def __init__(self, evaluators: Sequence[BCValidationEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def evaluate(self, policy: nn.Module) -> dict[str, float]:
        """Compute the metrics of all policies."""
        metrics: dict[str, float] = {}
        total, count = 0.0, 0
        for evaluator in self._evaluators:
            found = evaluator.evaluate(policy)
            total += found[evaluator.loss_name] * evaluator.data.num_samples
            count += evaluator.data.num_samples
            metrics.update(found)
        return {**metrics, "validation/loss": total / count}


def validation_name(name: str, policy: str) -> str:
    """Return the name of a validation metric, with the policy id if there are several policies."""
    return f"validation/{name}" if policy == DEFAULT_MODULE else f"validation/{policy}/{name}"
