"""Base classes and events of learners with a replay buffer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from maze_train.algorithms.off_policy.config import OffPolicyConfig, PolicyAndCriticsConfig
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor, TensorTree, is_on, on_device, send, tree_map
from maze_train.data.replay import Transitions
from maze_train.functional.losses import critic_loss
from maze_train.learner.apis import HasTargets
from maze_train.learner.config import Progress
from maze_train.learner.events import LearnerEvents
from maze_train.learner.learner import Learner
from maze_train.learner.optimizers import ModuleOptimizer
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
    updates the target networks.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the random generator for the losses.

    Attributes:
        gradient_steps: Total number of gradient steps.
    """

    most_empty_updates: ClassVar[int] = 100
    required_apis: ClassVar[tuple[type, ...]] = (HasTargets,)
    config: Config
    gradient_steps = 0

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
        self.errors = None  # Errors of the previous batch.
        yield prepared

    def after_minibatch(self, number: int) -> None:
        """Gather the TD errors of all data-parallel learners."""
        if self.errors is not None:
            self.errors = self.parallel.gather(self.errors)

    @property
    def target_update_interval(self) -> int:
        """Number of gradient steps between updates of the target networks."""
        return self.config.target_update_interval

    def after_gradient_step(self) -> None:
        """If due, update the target networks of the modules trained in this step."""
        self.gradient_steps += 1
        if self.gradient_steps % self.target_update_interval == 0:
            learned = {key for (key, _), own in self.optimizers.items() if own in self.active}
            for module_id in learned:
                tau = self.config_of(module_id).tau
                cast("HasTargets", self.modules[module_id]).update_targets(tau)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the learner, including the number of gradient steps."""
        return {**super().state_dict(), "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        super().load_state_dict(state)
        self.gradient_steps = state["gradient_steps"]


class PolicyAndCriticsLearner(OffPolicyLearner[PolicyConfig], Generic[PolicyConfig, Model]):
    """Base class of learners of a policy and Q-functions.

    Subclasses define the value targets (`targets`) and the policy loss (`policy_loss`). On each
    batch, the critics take a step, followed by the policy with the updated critics, unless
    `algorithm.update_order` is `joint`. Targets are treated as constants in the critic loss, and
    critics as constants in the policy loss.

    Args:
        modules: Models, keyed by id, or a single model.
        config: Settings of the algorithm.
        device: Device on which the models are stored and updated.
        seed: Seed of the random generator for the losses.
    """

    required_apis: ClassVar[tuple[type, ...]] = (PolicyAndCritics,)
    losses: tuple[str, ...] = (CRITICS, POLICY)
    """Losses of the next gradient step."""
    _following: Sequence[tuple[str, ...]] = ()
    """Losses of later gradient steps on the same batch."""

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

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Update schedules and the losses of the next gradient step."""
        self._select(self.losses_by_step)
        super().before_gradient_based_update(progress, statistics)

    @property
    def updates_policy(self) -> bool:
        """Whether the next batch updates the policy."""
        return self.gradient_steps % self.config.policy_update_interval == 0

    @property
    def losses_by_step(self) -> list[tuple[str, ...]]:
        """Losses of each gradient step on the next batch; see `algorithm.update_order`."""
        if not self.updates_policy:
            return [(CRITICS,)]
        is_joint = self.config.update_order == "joint"
        return [(CRITICS, POLICY)] if is_joint else [(CRITICS,), (POLICY,)]

    def minibatches(
        self, prepared: Mapping[str, Transitions], statistics: Statistics
    ) -> Iterator[Mapping[str, Transitions]]:
        """Yield all transitions, once per gradient step."""
        following = self.losses_by_step[1:]
        yield from super().minibatches(prepared, statistics)
        for _ in following:
            yield prepared

    def active_optimizers(self, losses: Mapping[str, Tensor]) -> list[ModuleOptimizer]:
        """Return the optimizers for this step; temperatures are part of the policy loss."""
        return [
            optimizer
            for (module_id, name), optimizer in self.optimizers.items()
            if module_id in losses and (CRITICS if name == CRITICS else POLICY) in self.losses
        ]

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """Sum of the `losses` of this step, 0-d."""
        config, model = self.config_of(module_id), self.model(module_id)
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
        features: TensorTree = model.critics.encode(inputs)
        terms = []
        if CRITICS in self.losses:
            terms.append(self.critic_loss(model, batch, features, config, statistics))
        if POLICY in self.losses:
            features = tree_map(torch.Tensor.detach, features)
            terms.append(self.policy_loss(model, batch, inputs, features, config, statistics))
        return sum(terms[1:], terms[0])

    def after_gradient_step(self) -> None:
        """If due, update the target networks after the last step on a batch."""
        if not self._following:
            super().after_gradient_step()

    def after_minibatch(self, number: int) -> None:
        """Gather the TD errors of all learners, and select the losses of the next step."""
        if CRITICS in self.losses:
            super().after_minibatch(number)
        self._select(self._following or self.losses_by_step)

    def _select(self, losses_by_step: Sequence[tuple[str, ...]]) -> None:
        """Select the losses of the next step, and of those that follow on the same batch."""
        self.losses, *self._following = losses_by_step
        self.steps.counts = CRITICS in self.losses

    @abstractmethod
    def targets(self, model: Model, batch: Transitions, config: PolicyConfig) -> Tensor:
        """Compute the targets y for the Q-values of stored actions, `[n]`, detached."""

    @abstractmethod
    def policy_loss(
        self,
        model: Model,
        batch: Transitions,
        inputs: TensorTree,
        features: TensorTree,
        config: PolicyConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Policy loss, 0-d, with constant critics.

        Args:
            model: The model.
            batch: Transitions.
            inputs: Network inputs of the observations.
            features: Result of `critics.encode` for the inputs, detached.
            config: Settings of the module.
            statistics: Statistics of the update.
        """

    def critic_loss(
        self,
        model: Model,
        batch: Transitions,
        features: TensorTree,
        config: PolicyConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Critic loss, 0-d; `features` is the result of `critics.encode` for the observations."""
        targets = self.targets(model, batch, config)
        actions = model.actions
        q = model.critics.values(features, actions.critic_input(batch.actions))
        loss, errors = critic_loss(q, actions.choices(batch.actions), targets, batch.weights)
        if batch.weights is not None:
            self.errors = errors.abs().mean(0)
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
        """Return the names of the noise columns of the next loss, `[n, noise_size]` each."""
        return ()
