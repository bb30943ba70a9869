"""What learners ask of modules, by the names that a module has to have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from maze_train.events import Statistics
    from maze_train.types import Tensor


@runtime_checkable
class HasPolicy(Protocol):
    """A module with a policy and the distribution of its actions."""

    policy: Any
    distribution: Any


@runtime_checkable
class HasStateValues(Protocol):
    """A module with a critic of states."""

    critic: Any
    value_head: Any


@runtime_checkable
class HasActionValues(Protocol):
    """A module with critics of actions."""

    critics: Any
    target_critics: Any


@runtime_checkable
class HasTargets(Protocol):
    """A module with target networks."""

    def update_targets(self, tau: float) -> None:
        """Move the targets towards the networks that are trained, by a share of tau."""


@runtime_checkable
class HasOwnLoss(Protocol):
    """A module that brings its own loss, whatever the algorithm is."""

    def compute_self_supervised_loss(
        self, batch: Any, statistics: Statistics
    ) -> Tensor | Mapping[str, Tensor]:
        """Loss of a minibatch, 0-d, or its named terms."""


def missing_names(module: nn.Module, api: type) -> list[str]:
    """Names of an API that a module does not have."""
    names = [*getattr(api, "__annotations__", {}), *vars(api)]
    return [name for name in names if not name.startswith("_") and not hasattr(module, name)]
