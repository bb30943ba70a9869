"""Bases of learners of transitions from a replay buffer, and their events."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch

from maze_train.algorithms.off_policy.config import OffPolicyConfig, PolicyAndCriticsConfig
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor, TensorTree, is_on, on_device, send, tree_map
from maze_train.data.replay import Transitions
from maze_train.data.rollout import Rollout
from maze_train.functional.losses import critic_loss
from maze_train.learner.config import Progress
from maze_train.learner.learner import Learner
from maze_train.learner.optimizers import ModuleOptimizer
from maze_train.learner.part import HasActionValues, HasPolicy, HasTargets
from maze_train.learner.steps import LearnerEvents
from maze_train.nets.critics import PolicyAndCritics


class ReplayEvents(EventInterface, prefix="replay"):
    """Statistics of the replay buffer."""

    size = Event("Transitions in the replay buffer.", reduce="last")
    picks_per_transition = Event(
        "How often a transition was drawn so far, mean over those that were collected.",
        reduce="last",
    )


class ReplayTimeEvents(EventInterface, prefix="time"):
    """Wall time of updates by what took it, in seconds."""

    sample_s = Event("Sampling from the replay buffer, a part of `time/update_s`.", reduce="sum")


class PolicyAndCriticsEvents(LearnerEvents):
    """Statistics of learners of a policy and critics, means over gradient steps.

    All are empty while the buffer is filled for the first time.
    """

    critic_loss = Event("Loss of the critics: half the mean squared error, summed over critics.")
    critic_value = Event("Value of the actions in the batch, mean over critics.")
    critic_spread = Event("Largest minus smallest value of an action among the critics.")
    policy_loss = Event("Policy loss: minus the value of the states; with SAC the soft value.")


Config = TypeVar("Config", bound=OffPolicyConfig)
PolicyConfig = TypeVar("PolicyConfig", bound=PolicyAndCriticsConfig)
Model = TypeVar("Model", bound=PolicyAndCritics)

POLICY, CRITICS = "policy", "critics"


class OffPolicyLearner(Learner[Transitions, Transitions, Transitions], Generic[Config]):
    """Base of learners that take one gradient step on each batch of transitions.

    A subclass has the loss, `compute_loss_for_module`, and its optimizers,
    `configure_optimizers_for_module`. Its models have `normalizer`, and `update_targets(tau)`,
    which moves the target networks.

    Args:
        modules: Models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Seed of the random numbers that losses are taken of.

    Attributes:
        gradient_steps: Gradient steps since training began.
        errors: |Q - y| of the last batch, `[n]`, for prioritised replay.
    """

    most_empty_updates: ClassVar[int] = 100
    required_apis: ClassVar[tuple[type, ...]] = (HasTargets,)
    config: Config
    gradient_steps = 0
    errors: Tensor | None = None

    def preprocess(
        self, module_id: str, experience: Transitions, statistics: Statistics
    ) -> Transitions:
        """The transitions, on the device: targets are made from the weights of the moment."""
        is_there = is_on(experience.rewards, self.device)
        return experience if is_there else on_device(experience, self.device)

    def minibatches(
        self, prepared: Mapping[str, Transitions], statistics: Statistics
    ) -> Iterator[Mapping[str, Transitions]]:
        """All transitions, once."""
        self.errors = None  # those of another batch say nothing about this one
        yield prepared

    @property
    def target_update_interval(self) -> int:
        """Gradient steps from one update of the targets to the next."""
        return self.config.target_update_interval

    def after_gradient_step(self) -> None:
        """Move the targets of the modules that took the step, when it is their turn."""
        self.gradient_steps += 1
        if self.gradient_steps % self.target_update_interval == 0:
            learned = {key for (key, _), own in self.optimizers.items() if own in self.active}
            for module_id in learned:
                tau = self.config_of(module_id).tau
                self.modules[module_id].update_targets(tau)  # type: ignore[operator]  # see the class

    def observe(self, experience: Rollout | Mapping[str, Rollout]) -> None:
        """Take the observations of a rollout into the running statistics of its module.

        Args:
            experience: Rollout of the only module, or of modules by id.
        """
        for key, rollout in self.modules.by_id(experience).items():
            normalizer: Any = getattr(self.modules[key], "normalizer", None)
            if normalizer is not None and self.may_learn(key):
                normalizer.update(rollout.to(self.device).acted_on(normalizer.keys))

    def state_dict(self) -> dict[str, Any]:
        """State of every learner, and the number of gradient steps."""
        return {**super().state_dict(), "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        super().load_state_dict(state)
        self.gradient_steps = state["gradient_steps"]


class PolicyAndCriticsLearner(OffPolicyLearner[PolicyConfig], Generic[PolicyConfig, Model]):
    """Base of learners of a policy by critics of its actions: one gradient step on each batch.

    A subclass says what critics learn (`targets`) and what the policy learns from them
    (`policy_loss`). Their gradients are taken at the same weights, and none of them reaches what
    belongs to another: targets are constants of the critics' loss, critics are constants of the
    policy's.

    Args:
        modules: Models by id, or the only one.
        config: Settings of the algorithm.
        device: Where the models and their updates live.
        seed: Seed of the random numbers that losses are taken of.
    """

    required_apis: ClassVar[tuple[type, ...]] = (HasPolicy, HasActionValues, HasTargets)
    with_policy = True
    """Whether the loss has that of the policy: `updates_policy`, which changes with every step."""
    _noise: Sequence[Tensor] = ()

    def model(self, module_id: str) -> Model:
        """A module under its type."""
        module: Any = self.modules[module_id]
        assert isinstance(module, PolicyAndCritics)
        return module  # type: ignore[return-value]  # the model that the settings name

    def configure_optimizers_for_module(self, module_id: str) -> None:
        """One optimizer each for policy and critics."""
        config, model = self.config_of(module_id), self.model(module_id)
        critic_lr = config.lr if config.critic_lr is None else config.critic_lr
        parts = {POLICY: (model.policy, config.lr), CRITICS: (model.critics, critic_lr)}
        for name, (part, lr) in parts.items():
            params = list(part.parameters())
            self.register_optimizer(
                module_id, name, optimizer=config.optimizer, params=params, lr_or_lr_schedule=lr
            )

    def before_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Set learning rates and frozen parameters, and whose turn it is."""
        self.with_policy = self.updates_policy
        super().before_gradient_based_update(progress, statistics)

    @property
    def updates_policy(self) -> bool:
        """Whether the policy takes part in the next gradient step."""
        return self.gradient_steps % self.config.policy_update_interval == 0

    def active_optimizers(self, losses: Mapping[str, Tensor]) -> list[ModuleOptimizer]:
        """All optimizers, or those of the critics while the policy waits."""
        return [
            optimizer
            for (module_id, name), optimizer in self.optimizers.items()
            if module_id in losses and (name == CRITICS or self.updates_policy)
        ]

    def compute_loss_for_module(
        self, module_id: str, batch: Transitions, statistics: Statistics
    ) -> Tensor:
        """The sum of the losses of critics and, when it is its turn, of the policy, 0-d."""
        config, model = self.config_of(module_id), self.model(module_id)
        with torch.no_grad():
            inputs = model.inputs(batch.obs)
        features = model.critics.encode(inputs)
        loss = self.critic_loss(model, batch, features, config, statistics)
        if not self.with_policy:
            return loss
        features = tree_map(torch.Tensor.detach, features)
        return loss + self.policy_loss(model, batch, inputs, features, config, statistics)

    def after_gradient_step(self) -> None:
        """Move the targets, when it is their turn."""
        super().after_gradient_step()
        self.with_policy = self.updates_policy

    @abstractmethod
    def targets(self, model: Model, batch: Transitions, config: PolicyConfig) -> Tensor:
        """Targets of the critics: values y of the stored actions, without a graph, `[n]`."""

    @abstractmethod
    def policy_loss(
        self,
        model: Model,
        batch: Transitions,
        inputs: TensorTree,
        features: Any,
        config: PolicyConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the policy, 0-d; critics are constants.

        Args:
            model: The model.
            batch: Transitions.
            inputs: Parts of the observations that the networks read.
            features: What `critics.encode` makes of these, without a graph.
            config: Settings of the module.
            statistics: Statistics of the update.
        """

    def critic_loss(
        self,
        model: Model,
        batch: Transitions,
        features: Any,
        config: PolicyConfig,
        statistics: Statistics,
    ) -> Tensor:
        """Loss of the critics, 0-d; `features` are what `critics.encode` makes of observations."""
        targets = self.targets(model, batch, config)
        actions = model.actions
        q = model.critics.values(features, actions.critic_input(batch.actions))
        loss, errors = critic_loss(q, actions.choices(batch.actions), targets, batch.weights)
        if batch.weights is not None:
            self.errors = self.part.gather(errors.abs().mean(0))
        statistics.record(PolicyAndCriticsEvents.critic_loss, loss)
        statistics.record(PolicyAndCriticsEvents.critic_value, errors.mean() + targets.mean())
        if errors.shape[0] > 1:
            spread = (errors.amax(0) - errors.amin(0)).mean()
            statistics.record(PolicyAndCriticsEvents.critic_spread, spread)
        return loss

    def before_compiled_loss(self, module_id: str, batch: Transitions) -> None:
        """Draw the random numbers of targets and of the policy's own actions."""
        model, n = self.model(module_id), len(batch.rewards)
        num_draws = self.num_draws(self.config_of(module_id))
        self._noise = ()
        self._noise = tuple(self.draw_noise(model, n) for _ in range(num_draws))

    def num_draws(self, config: PolicyConfig) -> int:
        """How often the next loss draws noise, for all its samples each time."""
        return 0

    def draw_noise(self, model: Model, n: int) -> Tensor:
        """Random numbers of n actions, drawn on the CPU whatever the device, `[n, noise_size]`."""
        if self._noise:
            noise, *self._noise = self._noise
            return noise
        cpu = torch.device("cpu")

        def draw(size: int) -> Tensor:
            return model.distribution.draw_noise((size,), self.generator, cpu)

        return send(self.part.draw(draw, n), self.device)
