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


class HasPolicy(Protocol):
    """Module with a policy and an action distribution."""

    policy: nn.Module
    distribution: Distribution


@runtime_checkable
class HasTargets(Protocol):
    """Module with target networks."""

    def update_targets(self, tau: float) -> None:
        """Update the target networks: θ' <- (1 - tau) θ' + tau θ."""


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


def missing_names(api: type, module: nn.Module) -> list[str]:
    """Return the attributes and methods of a protocol that a module does not have.

    In contrast to `isinstance`, this also finds submodules and buffers in all Python versions.
    """
    names = [*inspect.get_annotations(api), *vars(api)]
    return [name for name in names if not name.startswith("_") and not hasattr(module, name)]


def check_apis(learner: str, required: Sequence[type], module_id: str, module: nn.Module) -> None:
    """Raise ConfigError if a module lacks required attributes, see `Learner.check_module`.

    Args:
        learner: Name of the learner.
        required: Protocols from `learner.apis` that the module must implement, or base classes.
        module_id: ID of the module.
        module: The module.
    """
    kind = type(module).__name__
    for api in required:
        if issubclass(api, nn.Module):
            lack = "" if isinstance(module, api) else "is not derived from it"
        else:
            missing = " and no ".join(missing_names(api, module))
            lack = f"has no {missing}" if missing else ""
        if lack:
            problem = (
                f"{learner} only trains modules with the interface {api.__name__}, but {kind} "
                f"{lack}; implement it, or freeze the module: add_module(..., frozen=True), "
                "policies.<id>.frozen=true"
            )
            raise ConfigError("module", problem, module_id)
