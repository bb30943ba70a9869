"""Faster ways to the losses and gradients of a learner than autograd: by hand, or compiled.

A reader can skip this file: numbers are those of `Learner.loss_of`, but for the rounding of other
sums, and modules keep their names and state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch

from maze_train.core.events import Statistics
from maze_train.core.types import Tensor

AnyLearner: TypeAlias = Any
"""A `Learner`."""


class FasterLosses(ABC):
    """Computes the losses of some modules in the place of `Learner.loss_of`.

    Args:
        learner: The learner.
    """

    modules: Collection[str] = ()
    """Ids of the modules that this update computes by this object."""

    def __init__(self, learner: AnyLearner) -> None:
        self.learner = learner

    @abstractmethod
    def begin(self) -> None:
        """Choose the modules of an update, before all else in it."""

    @abstractmethod
    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d; without a graph, if `add_gradients` knows its gradient."""

    def add_gradients(self) -> None:  # noqa: B027 (not all have some)
        """Add gradients of losses without a graph to those that autograd found."""

    def report(self, statistics: Statistics) -> None:  # noqa: B027 (not all take time)
        """Record what took time, at the end of an update."""


class LossesByHand(FasterLosses):
    """Computes losses without a graph, and their gradients, where it can: see `supports`."""

    _backward: tuple[Callable[[], object], ...] = ()

    @abstractmethod
    def supports(self, module_id: str) -> bool:
        """Whether losses and gradients of a module that may learn are those of its learner."""

    @abstractmethod
    def loss_and_backward(
        self, module_id: str, batch: Any, statistics: Statistics
    ) -> tuple[Tensor, Callable[[], object]]:
        """The loss of a module, 0-d without a graph, and what adds its gradients to `.grad`."""

    def begin(self) -> None:
        """Look which modules are supported: networks and methods may have changed."""
        self._backward = ()
        learner, modules = self.learner, self.learner.modules
        is_other = learner.loss_function or modules.with_loss or torch.is_anomaly_enabled()
        if is_other or learner.settings.autocast != "none":
            self.modules = ()
        else:
            self.modules = {key for key in modules.keys() - modules.frozen if self.supports(key)}

    def loss_of(self, module_id: str, batch: Any, statistics: Statistics) -> Tensor:
        """The loss of a module, 0-d."""
        loss, backward = self.loss_and_backward(module_id, batch, statistics)
        self._backward = (*self._backward, backward)
        return loss

    def add_gradients(self) -> None:
        """Add the gradients of the losses since the last call."""
        backward, self._backward = self._backward, ()
        for add in backward:
            add()
