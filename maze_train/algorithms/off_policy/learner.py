"""Base classes and events of learners with a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar, Generic, TypeVar, cast

import torch

from maze_train.algorithms.off_policy.config import OffPolicyConfig, PolicyAndCriticsConfig
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor, TensorTree, is_on, on_device, send
from maze_train.data.replay import Transitions
from maze_train.functional.losses import critic_loss
from maze_train.learner.apis import HasTargets
from maze_train.learner.events import LearnerEvents
from maze_train.learner.learner import Learner
from maze_train.learner.steps import Part
from maze_train.nets.critics import PolicyAndCritics


class ReplayEvents(EventInterface, prefix="replay"):
    """Statistics of the replay buffer."""

    size = Event("Number of transitions in the replay buffer.", reduce="last")
    samples_per_transition = Event(
        "Mean number of times each collected transition has been sampled.",
        reduce="last",
    )


class ReplayTimeEvents(EventInterface, prefix="time"):
    """Wall-clock time of parts of an update, in seconds."""

    sample_s = Event("Sampling from the replay buffer, part of `time/update_s`.", reduce="sum")


class PolicyAndCriticsEvents(LearnerEvents):
    """Statistics of learners with a policy and Q-functions, averaged over gradient steps.

    Nothing is recorded during warm-up.
    """

    critic_loss = Event("Critic loss: half the mean squared error, summed over critics.")
    critic_value = Event("Q-value of the actions in the batch, mean over critics.")
    critic_spread = Event("Difference between the largest and smallest Q-value of the critics.")
    policy_loss = Event("Policy loss: negative state value; for SAC the soft value.")


Config = TypeVar("Config", bound=OffPolicyConfig)
PolicyConfig = TypeVar("PolicyConfig", bound=PolicyAndCriticsConfig)
Model = TypeVar("Model", bound=PolicyAndCritics)

POLICY, CRITICS = "policy", "critics"


class OffPolicyLearner(Learner[Transitions, Transitions, Transitions], Generic[Config]):
    """Base class of off-policy learners, with one gradient step per batch of transitions.

    Subclasses define the loss (`compute_loss_for_module`) and the optimizers
    (`configure_optimizers_for_module`). Models must have a method `update_targets(tau)`, which
    updates the target networks. A loss passes its absolute TD errors to prioritized replay by
    `statistics.keep("td_errors", errors)`, `[n]`.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the random generator for the losses.
    """

    most_empty_updates: ClassVar[int] = 100
    required_apis: ClassVar[tuple[type, ...]] = (HasTargets,)
    config: Config

    def preprocess(
        self, module_id: str, experience: Transitions, statistics: Statistics
    ) -> Transitions:
        """Move the transitions to the device. Targets are computed together with the loss."""
        is_there = is_on(experience.rewards, self.device)
        return experience if is_there else on_device(experience, self.device)

    def minibatches(
        self, prepared: Mapping[str, Transitions], statistics: Statistics
    ) -> Iterator[Mapping[str, Transitions]]:
        """Yield all transitions as one minibatch."""
        yield prepared

    @property
    def target_update_interval(self) -> int:
        """Number of gradient steps between updates of the target networks."""
        return self.config.target_update_interval

    def after_gradient_step(self, module_ids: Collection[str]) -> None:
        """If due, update the target networks."""
        if self.gradient_steps % self.target_update_interval == 0:
            for module_id in module_ids:
                tau = self.config_of(module_id).tau
                cast("HasTargets", self.modules[module_id]).update_targets(tau)


class PolicyAndCriticsLearner(OffPolicyLearner[PolicyConfig], Generic[PolicyConfig, Model]):
    """Base class of learners of a policy and Q-functions.

    Subclasses define the value targets (`targets`) and the policy loss (`policy_loss`). In each
    gradient step, the critics are updated first, then the policy with the updated critics, unless
    `algorithm.update_order` is `joint`. Targets are treated as constants in the critic loss, and
    critics as constants in the policy loss.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the random generator for the losses.
    """

    required_apis: ClassVar[tuple[type, ...]] = (PolicyAndCritics,)
    policy_optimizers: ClassVar[tuple[str, ...]] = (POLICY,)
    """Names of the optimizers of the policy loss."""

    def model(self, module_id: str) -> Model:
        """Return a module as a `PolicyAndCritics`."""
        module = self.modules[module_id]
        assert isinstance(module, PolicyAndCritics)
        return cast("Model", module)  # The algorithm settings select the class.

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """Register one optimizer for the policy and one for the critics."""
        config, model = self.config_of(module_id), self.model(module_id)
        critic_lr = config.lr if config.critic_lr is None else config.critic_lr
        parts = {POLICY: (model.policy, config.lr), CRITICS: (model.critics, critic_lr)}
        for name, (part, lr) in parts.items():
            params = list(part.parameters())
            self.register_optimizer(
                module_id, name, optimizer=config.optimizer, params=params, lr_or_lr_schedule=lr
            )

    def policy_is_due(self, step: int) -> bool:
        """Return whether gradient step number `step` (from 0) updates the policy."""
        return step % self.config.policy_update_interval == 0

    def parts(self, step: int) -> Sequence[Part[Transitions]]:
        """Return the losses of a gradient step; see `algorithm.update_order`."""
        critics = Part(CRITICS, self.critic_loss, (CRITICS,))
        if not self.policy_is_due(step):
            return (critics,)
        if self.config.update_order == "joint":
            return (Part("loss", None, (CRITICS, *self.policy_optimizers)),)
        return critics, Part(POLICY, self.policy_loss, self.policy_optimizers)

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """Sum of the losses that are due, 0-d, for joint steps and custom losses."""
        loss = self.critic_loss(module_id, batch, statistics)
        if self.policy_is_due(self.gradient_steps):
            loss = loss + self.policy_loss(module_id, batch, statistics)
        return loss

    @abstractmethod
    def targets(self, model: Model, batch: Transitions, config: PolicyConfig) -> Tensor:
        """Compute the targets y for the Q-values of stored actions, `[n]`, detached."""

    @abstractmethod
    def policy_loss(self, module_id: str, batch: Transitions, statistics: Statistics) -> Tensor:
        """Policy loss, 0-d, with constant critics."""

    def critic_loss(self, module_id: str, batch: Transitions, statistics: Statistics) -> Tensor:
        """Critic loss, 0-d."""
        config, model = self.config_of(module_id), self.model(module_id)
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
        features: TensorTree = model.critics.encode(inputs)
        targets = self.targets(model, batch, config)
        actions = model.actions
        q = model.critics.values(features, actions.critic_input(batch.actions))
        loss, errors = critic_loss(q, actions.choices(batch.actions), targets, batch.weights)
        if batch.weights is not None:
            statistics.keep("td_errors", errors.abs().mean(0))
        statistics.record(PolicyAndCriticsEvents.critic_loss, loss)
        statistics.record(PolicyAndCriticsEvents.critic_value, errors.mean() + targets.mean())
        if errors.shape[0] > 1:
            spread = (errors.amax(0) - errors.amin(0)).mean()
            statistics.record(PolicyAndCriticsEvents.critic_spread, spread)
        return loss

    def complete_batch(self, module_id: str, batch: Transitions) -> Transitions:
        """Sample the noise for the losses, always on the CPU for identical noise on all devices."""
        names = self.noise_columns(self.config_of(module_id))
        draw, shape = self.model(module_id).distribution.draw_noise, (len(batch.rewards),)
        cpu = torch.device("cpu")
        noise = {name: send(draw(shape, self.generator, cpu), self.device) for name in names}
        return batch.with_columns(noise) if noise else batch

    def noise_columns(self, config: PolicyConfig) -> Sequence[str]:
        """Return the names of the noise columns of the next step, `[n, noise_size]` each."""
        return ()
