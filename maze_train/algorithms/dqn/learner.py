"""Learner, trainer and events of DQN."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from maze_train.algorithms.dqn import quantiles
from maze_train.algorithms.dqn.config import DQNAlgorithmConfig
from maze_train.algorithms.dqn.model import DQNModel
from maze_train.algorithms.off_policy.learner import OffPolicyLearner
from maze_train.algorithms.off_policy.trainer import OffPolicy
from maze_train.core.events import Event
from maze_train.functional.losses import critic_loss, critic_loss_gradient
from maze_train.learner.part import HasPolicy, HasTargets
from maze_train.learner.steps import LearnerEvents, statistics_of
from maze_train.nets.mlp_gradients import forward_and_backward, has_gradients_by_hand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from maze_train.core.events import Statistics
    from maze_train.core.types import Tensor
    from maze_train.data.replay import Transitions
    from maze_train.learner.config import Progress


class DQNEvents(LearnerEvents):
    """Statistics of DQN learners, means over gradient steps unless said otherwise.

    All but epsilon are empty while the buffer is filled for the first time.
    """

    critic_loss = Event("Loss of the values, see `algorithm.loss`.")
    critic_value = Event("Value of the actions in the batch.")
    epsilon = Event("Probability of a random action in the last update.", reduce="last")


DELTA = {"huber": 1.0, "squared": math.inf}
"""Errors from which on a loss is linear."""


class DQNLearner(OffPolicyLearner[DQNAlgorithmConfig]):
    """Deep Q-learning: one gradient step of the values on each batch.

    Source: Mnih et al. (2015), doi:10.1038/nature14236, algorithm 1.

    Args:
        modules: Models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Unused: losses take no random numbers.
    """

    required_apis: ClassVar[tuple[type, ...]] = (HasPolicy, HasTargets)
    _backward: Sequence[Callable[[], object]] = ()

    def model(self, module_id: str) -> DQNModel:
        """A module under its type."""
        module: Any = self.modules[module_id]
        assert isinstance(module, DQNModel)
        return module

    @torch.no_grad()
    def targets(self, model: DQNModel, batch: Transitions) -> Tensor:
        """Targets of the values, `[n]`, or of M quantiles of the return, `[n, M]`.

        y = Σ γ^i r + γ^k Q'(s', a'),  a' = argmax_a Q(s', a), or Q' without `double_q`,

        over the legal actions; of quantiles, with each one of Q' in the place of their mean.

        Source: Mnih et al. (2015), algorithm 1; van Hasselt et al. (2016), arXiv:1509.06461, eq. 4;
        Dabney et al. (2018), arXiv:1710.10044, algorithm 1.
        """
        inputs = model.inputs(batch.next_obs)
        values: Tensor = model.target_policy(inputs)
        judged = model.action_values(model.policy(inputs) if self.config.double_q else values)
        chosen = model.legal(judged, batch.next_obs).argmax(-1, keepdim=True)
        if model.num_quantiles:
            found = quantiles.taken(quantiles.of_actions(values, model.num_quantiles), chosen)
            return torch.addcmul(batch.rewards[:, None], batch.discounts[:, None], found)
        # A final observation may have no legal action: the values themselves are finite.
        return torch.addcmul(batch.rewards, batch.discounts, values.gather(-1, chosen).squeeze(-1))

    def compute_losses(
        self, minibatch: Mapping[str, Transitions], statistics: Statistics
    ) -> dict[str, Tensor]:
        """The loss of each module; without a graph where gradients are taken by hand."""
        self._backward = ()
        # A subclass may have another loss.
        if type(self) is not DQNLearner or not self.may_differentiate_by_hand:
            return super().compute_losses(minibatch, statistics)
        losses = {}
        for key, batch in minibatch.items():
            self.part.turn_to(key)
            model = self.model(key)
            with self.settings_of(key):
                by_hand = not model.num_quantiles and has_gradients_by_hand(model.policy)
                losses[key] = self._loss(model, batch, statistics_of(key, statistics), by_hand)
        return losses

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """Loss of the values, 0-d."""
        return self._loss(self.model(module_id), batch, statistics, by_hand=False)

    def _loss(
        self, model: DQNModel, batch: Transitions, statistics: Statistics, by_hand: bool
    ) -> Tensor:
        """Loss of the values, 0-d; by hand without a graph, whose walk takes as long as all else.

        The gradients are then those that `_backward` writes.
        """
        targets = self.targets(model, batch)
        if model.num_quantiles:
            loss, errors = self._quantile_loss(model, batch, targets)
        else:
            loss, errors = self._value_loss(model, batch, targets, by_hand)
        if batch.weights is not None:
            self.errors = self.part.gather(errors.abs())
        statistics.record(DQNEvents.critic_loss, loss)
        statistics.record(DQNEvents.critic_value, errors.mean() + targets.mean())
        return loss

    def _value_loss(
        self, model: DQNModel, batch: Transitions, targets: Tensor, by_hand: bool
    ) -> tuple[Tensor, Tensor]:
        """Loss of the values, 0-d, and their errors `[n]`."""
        actions: Any = batch.actions
        delta, choices = DELTA[self.config.loss], model.distribution.choices(actions)
        inputs = model.inputs(batch.obs)
        q, backward = (
            forward_and_backward(model.policy, inputs) if by_hand else (model.policy(inputs), None)
        )
        loss, errors = critic_loss(q.unsqueeze(0), choices, targets, batch.weights, delta)
        if backward is not None:
            slopes = critic_loss_gradient(errors, batch.weights, delta).squeeze(0).unsqueeze(-1)
            gradient = torch.zeros_like(q).scatter_(-1, choices, slopes)
            self._backward = (*self._backward, partial(backward, gradient, False))
        return loss, errors.squeeze(0)

    def _quantile_loss(
        self, model: DQNModel, batch: Transitions, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of the quantiles, 0-d, and the errors of their means `[n]`."""
        actions: Any = batch.actions
        outputs = model.policy(model.inputs(batch.obs))
        everything = quantiles.of_actions(outputs, model.num_quantiles)
        found = quantiles.taken(everything, model.distribution.choices(actions))
        loss = quantiles.quantile_loss(found, targets, batch.weights)
        return loss, found.detach().mean(1) - targets.mean(1)

    def compute_gradients(self, losses: Mapping[str, Tensor]) -> None:
        """Replace the gradients of the modules by those of their losses."""
        super().compute_gradients(losses)
        for backward in self._backward:
            backward()


class DQN(OffPolicy):
    """Deep Q-learning: acts at random with probability epsilon; see `DQNLearner`."""

    algorithm_config: DQNAlgorithmConfig

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Set epsilon, step the environments, and learn meanwhile."""
        setting = self.algorithm_config.exploration
        self.explore(DQNEvents.epsilon, setting, progress, statistics)
        return super().update_once(progress, statistics)
