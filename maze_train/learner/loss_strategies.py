"""Strategies to compute losses and gradients: autograd and analytic gradients.

`maze_train.learner.compiled` adds compiled losses. The results of all strategies are equal up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from maze_train.core.conversion import Settings
from maze_train.core.events import Statistics
from maze_train.core.types import Tensor

Batch = TypeVar("Batch")

LossOf: TypeAlias = Callable[[str, Batch, Statistics], Tensor]
"""Computes the loss of a module (0-d) from module ID, minibatch and statistics."""

AnalyticLossOf: TypeAlias = Callable[[str, Batch, Statistics], tuple[Tensor, Callable[[], object]]]
"""Returns the loss without a graph, and a function that adds its gradients to `.grad`."""


class Autograd(Generic[Batch]):
    """Losses with gradients from autograd; the reference for the other strategies.

    Args:
        loss_of: Computes the loss of a module.
    """

    def __init__(self, loss_of: LossOf[Batch]) -> None:
        self._loss_of = loss_of

    def begin(self) -> None:
        """Begin an update."""

    def uses_autograd(self, module_id: str) -> bool:
        """Return whether autograd computes the gradients of a module in this update."""
        return True

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d, with a graph if autograd computes its gradients."""
        return self._loss_of(module_id, batch, statistics)

    def add_gradients(self) -> None:
        """Add the gradients of losses without a graph to `.grad`."""

    def report(self, statistics: Statistics) -> None:
        """Record the compilation time, if any, at the end of an update."""


class Analytic(Autograd[Batch]):
    """Losses with analytic gradients, for the modules that support them.

    Args:
        loss_of: Computes the loss of the other modules.
        analytic_loss_of: Computes loss and gradients of the modules returned by `modules`.
        modules: Returns the IDs of modules with analytic gradients; called once per update.
    """

    def __init__(
        self,
        loss_of: LossOf[Batch],
        analytic_loss_of: AnalyticLossOf[Batch],
        modules: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(loss_of)
        self._analytic_loss_of, self._find_modules = analytic_loss_of, modules
        self._modules: Collection[str] = ()
        self._backward: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Select the modules with analytic gradients; networks and methods may have changed."""
        self._backward.clear()
        self._modules = self._find_modules()

    def uses_autograd(self, module_id: str) -> bool:
        """Return False for modules with analytic gradients."""
        return module_id not in self._modules

    def loss_of(self, module_id: str, batch: Batch, statistics: Statistics) -> Tensor:
        """Return the loss of a module, 0-d."""
        if module_id not in self._modules:
            return self._loss_of(module_id, batch, statistics)
        loss, backward = self._analytic_loss_of(module_id, batch, statistics)
        self._backward.append(backward)
        return loss

    def add_gradients(self) -> None:
        """Add the gradients of the losses since the last call."""
        for backward in self._backward:
            backward()
        self._backward.clear()


def declares_gradients(
    learner: object,
    config: Settings,
    methods: Sequence[str],
    pair: tuple[str, str] | tuple[()] = (),
) -> bool:
    """Return whether each class that defines one of `methods` declares analytic gradients.

    The class attribute `analytic_gradients` contains the settings for which the gradients are
    correct. A class that defines both methods of `pair`, a loss and its gradient, and no other
    method in `methods` does not need the attribute.

    Args:
        learner: The learner.
        config: Settings of the module.
        methods: Names of the methods replaced by analytic gradients, including `pair`.
        pair: Names of the method that computes a loss and the method that computes its gradient.
    """
    if any(method in vars(learner) for method in methods):
        return False
    for base in type(learner).__mro__:
        defined = vars(base)
        own = [method for method in methods if method in defined]
        of_pair = [method for method in pair if method in defined]
        declared: Mapping[str, object] | None
        declared = defined.get("analytic_gradients", None if own != of_pair else {})
        if len(of_pair) == 1 or declared is None:
            return False
        if any(config.value_of(key) != value for key, value in declared.items()):
            return False
        # A different function may have been assigned to the name of a method.
        names = (getattr(defined[method], "__qualname__", "") for method in own)
        if any(name.rpartition(".")[0] != base.__qualname__ for name in names):
            return False
    return True
