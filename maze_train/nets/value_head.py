"""Interpretation of a critic's raw output: a scalar or a categorical, transformed or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maze_train.functional.losses import (
    clipped_value_loss,
    squared_value_loss,
)
from maze_train.functional.value_transforms import support_to_scalar, two_hot_loss
from maze_train.nets.own import build_value_transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.functional.value_transforms import ValueTransform
    from maze_train.nets.config import ModelConfig
    from maze_train.types import Tensor


class ValueHead:
    """Decodes a critic's raw output and compares it with target returns.

    Args:
        transform: h of the targets (Pohlen et al., 2018, arXiv:1805.11593); None: identity.
        support: `(low, high)`: the output is a categorical distribution over these integers
            (Schrittwieser et al., 2020, arXiv:1911.08265, appendix F); None: a scalar.
    """

    def __init__(
        self, transform: ValueTransform | None = None, support: tuple[int, int] | None = None
    ) -> None:
        self.transform = transform
        self.support = support
        self.output_size = 1
        if support is not None:
            self.output_size = support[1] - support[0] + 1
            self._expected: Callable[..., Tensor] = support_to_scalar
            self._two_hot_loss: Callable[..., Tensor] = two_hot_loss

    @classmethod
    def from_config(cls, config: ModelConfig) -> ValueHead:
        """The head that a model configuration asks for."""
        transform = None
        if config.value_transform is not None:
            transform = build_value_transform(config.value_transform)
        low_and_high = config.value_support
        return cls(transform, None if low_and_high is None else (low_and_high[0], low_and_high[1]))

    def _transformed(self, raw: Tensor) -> Tensor:
        return raw.squeeze(-1) if self.support is None else self._expected(raw, self.support)

    def values(self, raw: Tensor) -> Tensor:
        """State values in units of returns, `[...]`, from raw outputs `[..., output_size]`."""
        values = self._transformed(raw)
        return values if self.transform is None else self.transform.transform_value_inv(values)

    def targets(self, returns: Tensor) -> Tensor:
        """Targets of the regression in `loss`, `[...]`: transformed returns."""
        return returns if self.transform is None else self.transform.transform_value(returns)

    def loss(
        self, raw: Tensor, targets: Tensor, old_values: Tensor, clip_range: float = 0.0
    ) -> Tensor:
        """Value loss of raw outputs `[..., output_size]`.

        Args:
            raw: Outputs of the critic.
            targets: Result of `targets`, `[...]`.
            old_values: Values at collection, on the same scale as `targets`, `[...]`.
            clip_range: Half-width of the interval around `old_values`; 0: no clipping.
        """
        if self.support is not None:
            return self._two_hot_loss(raw, targets, self.support)
        if clip_range > 0:
            return clipped_value_loss(raw.squeeze(-1), old_values, targets, clip_range)
        return squared_value_loss(raw.squeeze(-1), targets)
