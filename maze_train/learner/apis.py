"""Protocols of the modules that learners train."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor
from maze_train.distributions.base import Distribution
from maze_train.nets.actor_critic import ValueHead
from maze_train.nets.normalization import ObservationNormalizer


@runtime_checkable
class HasPolicy(Protocol):
    """Module with a policy and an action distribution."""

    policy: nn.Module
    distribution: Distribution


@runtime_checkable
class HasStateValues(Protocol):
    """Module with a state-value critic."""

    critic: nn.Module
    value_head: ValueHead


@runtime_checkable
class HasActionValues(Protocol):
    """Module with Q-networks."""

    critics: nn.Module
    target_critics: nn.Module


@runtime_checkable
class HasTargets(Protocol):
    """Module with target networks."""

    def update_targets(self, tau: float) -> None:
        """Update the target networks: θ' <- (1 - tau) θ' + tau θ."""


@runtime_checkable
class HasNormalizer(Protocol):
    """Module with an optional observation normalizer."""

    normalizer: ObservationNormalizer | None


@runtime_checkable
class Explores(Protocol):
    """Module with an adjustable amount of exploration."""

    def set_exploration(self, value: float) -> None:
        """Set the amount of exploration; 0: none."""


@runtime_checkable
class HasLoss(Protocol):
    """Module with a custom loss, which replaces the loss of the algorithm."""

    def compute_self_supervised_loss(
        self, batch: object, statistics: Statistics
    ) -> Tensor | Mapping[str, Tensor]:
        """Return the loss of a minibatch (0-d) or a mapping of named loss terms."""


def normalizer_of(module: nn.Module) -> ObservationNormalizer | None:
    """Return the observation normalizer of a module, or None."""
    return module.normalizer if isinstance(module, HasNormalizer) else None


def check_apis(learner: str, required: Sequence[type], module_id: str, module: nn.Module) -> None:
    """Raise ConfigError if a module lacks required attributes, see `Learner.check_module`.

    Args:
        learner: Name of the learner.
        required: Protocols from `learner.apis` that the module must implement.
        module_id: ID of the module.
        module: The module.
    """
    for api in required:
        names = [*inspect.get_annotations(api), *vars(api)]
        missing = [n for n in names if not n.startswith("_") and not hasattr(module, n)]
        if missing:
            problem = (
                f"{learner} only trains modules with the interface {api.__name__}, but "
                f"{type(module).__name__} has no {' and no '.join(missing)}; "
                "implement it, or freeze the module: add_module(..., frozen=True), "
                "policies.<id>.frozen=true"
            )
            raise ConfigError("module", problem, module_id)
