"""Learner, trainer and events of DQN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from maze_train.algorithms.dqn import quantiles
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.model import DQNModel
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.core.events import Event, Statistics
from maze_train.core.types import Tensor
from maze_train.data.replay import Transitions
from maze_train.functional.losses import critic_loss, critic_loss_gradient
from maze_train.learner.config import Progress
from maze_train.learner.events import LearnerEvents
from maze_train.nets.template import forward_and_backward, supports_analytic_gradients


class DQNEvents(LearnerEvents):
    """Statistics of DQN learners, averaged over gradient steps unless stated otherwise.

    During warm-up, only epsilon is recorded.
    """

    critic_loss = Event("Q-value loss, see `algorithm.loss`.")
    critic_value = Event("Q-value of the actions in the batch.")
    epsilon = Event("Probability of a random action in the last update.", reduce="last")


METHODS = (*("compute_losses", "compute_gradients", "compute_loss_for_module", "loss_of_outputs"),)
"""Methods whose gradient is computed by `analytic_loss`."""

DELTA = {"huber": 1.0, "squared": math.inf}
"""Absolute TD error above which the Huber loss is linear."""


class DQNLearner(OffPolicyLearner[DQNAlgorithmConfig]):
    """Deep Q-learning, with one gradient step per batch.

    Source: Mnih et al. (2015), doi:10.1038/nature14236, algorithm 1.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Unused, because the loss is deterministic.
    """

    required_apis: ClassVar[tuple[type, ...]] = (DQNModel,)
    analytic_gradients: ClassVar[Mapping[str, object]] = {}

    def model(self, module_id: str) -> DQNModel:
        """Return a module as a `DQNModel`."""
        module = self.modules[module_id]
        assert isinstance(module, DQNModel)
        return module

    @torch.no_grad()
    def targets(self, model: DQNModel, batch: Transitions, config: DQNAlgorithmConfig) -> Tensor:
        """Compute the targets of the Q-values, `[n]`, or of M quantiles of the return, `[n, M]`.

        y = Σ γ^i r + γ^k Q'(s', a'),  a' = argmax_a Q(s', a), or of Q' without `double_q`,

        over the legal actions. With quantiles, each quantile of Q' is used instead of their mean.

        Source: Mnih et al. (2015), algorithm 1; van Hasselt et al. (2016), arXiv:1509.06461, eq. 4;
        Dabney et al. (2018), arXiv:1710.10044, algorithm 1.
        """
        inputs = model.inputs(batch.next_obs)
        values: Tensor = model.target_policy(inputs)
        judged = model.action_values(model.policy(inputs) if config.double_q else values)
        chosen = model.legal(judged, batch.next_obs).argmax(-1, keepdim=True)
        if model.num_quantiles:
            found = quantiles.taken(quantiles.of_actions(values, model.num_quantiles), chosen)
            return torch.addcmul(batch.rewards[:, None], batch.discounts[:, None], found)
        # Unmasked values, because a final observation may have no legal action.
        return torch.addcmul(batch.rewards, batch.discounts, values.gather(-1, chosen).squeeze(-1))

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """Q-value loss, 0-d."""
        model = self.model(module_id)
        return self.loss_of_outputs(
            module_id, model.policy(model.inputs(batch.obs)), batch, statistics
        )[0]

    def has_analytic_loss(self, module_id: str) -> bool:
        """Return whether a module is a multilayer perceptron with an analytic loss gradient."""
        model = self.model(module_id)
        is_known = self.declares_gradients(module_id, METHODS)
        return is_known and not model.num_quantiles and supports_analytic_gradients(model.policy)

    def analytic_loss(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """Compute the loss, 0-d, and its backward function without autograd."""
        model, actions = self.model(module_id), batch.actions
        assert isinstance(actions, torch.Tensor)
        delta = DELTA[self.config_of(module_id).loss]
        outputs, backward = forward_and_backward(model.policy, model.inputs(batch.obs))
        loss, errors = self.loss_of_outputs(module_id, outputs, batch, statistics)
        slopes = critic_loss_gradient(errors.unsqueeze(0), batch.weights, delta).squeeze(0)
        choices = model.distribution.choices(actions)
        gradient = torch.zeros_like(outputs).scatter_(-1, choices, slopes.unsqueeze(-1))
        return loss, partial(backward, gradient, False)

    def loss_of_outputs(
        self, module_id: str, outputs: Tensor, batch: Transitions, statistics: Statistics
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss, 0-d, and the TD errors, `[n]`; with quantiles, TD errors of the means.

        Args:
            module_id: Id of the module.
            outputs: Network outputs for the observations, `[n, output_size]`.
            batch: Transitions.
            statistics: Statistics of the update.
        """
        config, model = self.config_of(module_id), self.model(module_id)
        actions: Any = batch.actions
        targets, choices = self.targets(model, batch, config), model.distribution.choices(actions)
        if model.num_quantiles:
            found = quantiles.taken(quantiles.of_actions(outputs, model.num_quantiles), choices)
            loss = quantiles.quantile_loss(found, targets, batch.weights)
            errors = found.detach().mean(1) - targets.mean(1)
        else:
            values, delta = outputs.unsqueeze(0), DELTA[config.loss]
            loss, errors = critic_loss(values, choices, targets, batch.weights, delta)
            errors = errors.squeeze(0)
        if batch.weights is not None:
            statistics.keep("td_errors", errors.abs())
        statistics.record(DQNEvents.critic_loss, loss)
        statistics.record(DQNEvents.critic_value, errors.mean() + targets.mean())
        return loss, errors


class DQN(OffPolicy):
    """Trainer for DQN with epsilon-greedy exploration; see `DQNLearner`."""

    algorithm_config: DQNAlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set epsilon, step the environments and take gradient steps."""
        setting = self.algorithm_config.exploration
        self.explore(DQNEvents.epsilon, setting, progress, statistics)
        return super().update_once(progress, statistics)
