"""Base of learners of transitions from a replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from maze_train.algorithms.off_policy.config import OffPolicyConfig
from maze_train.data.transitions import Transitions
from maze_train.learner.learner import DEFAULT_MODULE, Learner

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import nn

    from maze_train.data.rollout import Rollout
    from maze_train.events import Statistics
    from maze_train.types import Tensor

__all__ = ["OffPolicyLearner"]

Config = TypeVar("Config", bound=OffPolicyConfig)


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

    def __init__(
        self,
        modules: nn.Module | Mapping[str, Any],
        config: Config,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config
        self.gradient_steps = 0
        self.errors: Tensor | None = None
        super().__init__(
            modules,
            optimizer=config.optimizer,
            lr=config.lr,
            grad_clip=config.max_grad_norm,
            grad_clip_by=config.grad_clip_by,
            on_non_finite=config.on_non_finite,
            precision=config.matmul_precision,
            device=device,
            seed=seed,
        )

    def preprocess(
        self, module_id: str, experience: Transitions, statistics: Statistics
    ) -> Transitions:
        """The transitions as they are: targets are made from the weights of the moment."""
        return experience

    def minibatches(
        self, prepared: Mapping[str, Transitions], statistics: Statistics
    ) -> Iterator[Mapping[str, Transitions]]:
        """All transitions, once."""
        yield prepared

    def after_gradient_step(self) -> None:
        """Move the targets, when it is their turn."""
        self.gradient_steps += 1
        if self.gradient_steps % self.config.target_update_interval == 0:
            for model in self.modules.values():
                model.update_targets(self.config.tau)  # type: ignore[operator]  # see the class

    def observe(self, rollout: Rollout) -> None:
        """Take the observations of a rollout into the running statistics of the only module."""
        normalizer: Any = self.modules[DEFAULT_MODULE].normalizer
        if normalizer is not None:
            normalizer.update(rollout.to(self.device).acted_on(normalizer.keys))

    def state_dict(self) -> dict[str, Any]:
        """State of every learner, and the number of gradient steps."""
        return {**super().state_dict(), "gradient_steps": self.gradient_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        super().load_state_dict(state)
        self.gradient_steps = state["gradient_steps"]
