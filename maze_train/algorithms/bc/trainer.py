"""Trainer for behavioral cloning, with validation on held-out episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from maze_train.algorithms.bc.data import BatchLoader, TransitionData
from maze_train.algorithms.bc.learner import BCBatch, BCLoss, ImitationEvents, ImitationMetrics
from maze_train.core.errors import TrainingError
from maze_train.core.events import Statistics
from maze_train.core.types import precise_dtype, tree_leaves, tree_map
from maze_train.learner.config import Progress
from maze_train.learner.learners import Learners
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.nets.acting import device_of
from maze_train.nets.policy_model import PolicyModel
from maze_train.training.config import AlgorithmConfig
from maze_train.training.evaluators import Evaluator
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.services import TrainerServices
from maze_train.training.trainer import Trainer

METRICS_INTERVAL = 16
"""Interval in minibatches at which action metrics are computed; computing them takes as long as a
gradient step."""


class BCTrainer(Trainer):
    """Trainer for behavioral cloning: gradient steps on minibatches of recorded transitions.

    Each use of a recorded step for training counts as one step.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The policy being trained.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        loaders: Minibatch loaders by policy id; all must be at the same position.
        fingerprints: Digests of the parts of the dataset.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        learners: Learners,
        model: nn.Module,
        services: TrainerServices,
        *,
        loaders: Mapping[str, BatchLoader],
        fingerprints: Sequence[str] = (),
    ) -> None:
        super().__init__(config, learners, model, services)
        self.loaders = dict(loaders)
        self._fingerprints = list(fingerprints)

    @property
    def epoch_length(self) -> int:
        """Number of updates per epoch; by default one pass over the data.

        With several policies, the default is one pass over the data of the policy with the most
        data.
        """
        passes = [loader.batches_per_pass for loader in self.loaders.values()]
        return self.algorithm_config.epoch_length or max(passes)

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Take one gradient step on the next minibatch of each policy."""
        started = time.perf_counter()
        is_measured = self._updates_in_epoch % METRICS_INTERVAL == 0
        batches = {
            policy: BCBatch(*loader.next(), is_measured=is_measured)
            for policy, loader in self.loaders.items()
        }
        loaded = time.perf_counter()
        statistics.merge(self.learners.update(batches, progress))
        statistics.record(TimeEvents.collect_s, loaded - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - loaded)
        return sum(len(tree_leaves(batch.actions)[0]) for batch in batches.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and the position of the loaders."""
        place = next(iter(self.loaders.values())).state_dict()
        own = {"loader": place, "fingerprints": self._fingerprints}
        return {**super().state_dict(), **own}

    def load_experience(self, state: dict[str, Any]) -> None:
        """Restore the position of the loaders.

        Raises:
            TrainingError: If the dataset differs from the dataset of the checkpoint.
        """
        if state["fingerprints"] != self._fingerprints:
            raise TrainingError("the dataset differs from the dataset of this run")
        for loader in self.loaders.values():
            loader.load_state_dict(state["loader"])


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
