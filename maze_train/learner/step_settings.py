"""What settings add to gradient steps: gathered gradients, scaled losses. A reader can skip it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from maze_train.core.types import Tensor
    from maze_train.learner.optimizers import ModuleOptimizer


class Accumulation:
    """Means of the gradients of several minibatches, each taken at the same weights.

    Args:
        count: Minibatches per step, >= 1; at the end of an update there may be fewer.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._begin()

    def _begin(self) -> None:
        self._minibatches = 0
        self._taken_part: dict[ModuleOptimizer, int] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that no step was taken of."""
        return self._minibatches > 0

    def add(self, optimizers: Sequence[ModuleOptimizer]) -> bool:
        """Add the gradients of a minibatch; returns whether it is time for a step."""
        self._minibatches += 1
        for optimizer in optimizers:
            self._taken_part[optimizer] = self._taken_part.get(optimizer, 0) + 1
            for param in optimizer.owned():
                if param.grad is not None:
                    kept = self._sums.get(param)
                    self._sums[param] = param.grad.clone() if kept is None else kept + param.grad
        return self._minibatches == self._count

    def take(self) -> list[ModuleOptimizer]:
        """Give each optimizer the mean over the minibatches that it took part in; start over."""
        for optimizer, count in self._taken_part.items():
            for param in optimizer.owned():
                if param in self._sums:
                    mean = self._sums[param].div_(count)
                    if param.grad is None:
                        param.grad = mean
                    else:
                        param.grad.copy_(mean)
        optimizers = list(self._taken_part)
        self._begin()
        return optimizers


class LossScaler:
    """A factor of the loss that keeps gradients in float16 from vanishing.

    It is halved when a gradient overflows, whose step is left out, and doubled after many steps.

    Source: Micikevicius et al. (2018), arXiv:1710.03740, section 3.2.
    """

    FIRST = 65536.0
    STEPS_TO_GROW = 2000

    def __init__(self) -> None:
        self.scale = self.FIRST
        self._steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Bring gradients of a loss that was scaled back to their size."""
        for gradient in gradients:
            gradient.div_(self.scale)

    def lower(self) -> bool:
        """Halve the factor after an overflow; returns whether it was above 1, where it stays."""
        self._steps = 0
        if self.scale <= 1.0:
            return False
        self.scale /= 2.0
        return True

    def count_step(self) -> None:
        """Count a step without an overflow."""
        self._steps += 1
        if self._steps == self.STEPS_TO_GROW:
            self._steps = 0
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Factor, and steps since it changed."""
        return {"scale": self.scale, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.scale, self._steps = state["scale"], state["steps"]
