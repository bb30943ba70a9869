"""Logits without those of actions that are not legal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from maze_train.distributions.categorical import Categorical, MultiCategorical, impossible_logit
from maze_train.distributions.mapping import KEY
from maze_train.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maze_train.distributions.base import Distribution
    from maze_train.spaces.mask_layouts import MaskedPart, MaskLayout
    from maze_train.types import Tensor, TensorTree


class ActionMasking:
    """Sets the logits of actions that are not legal to a number that means probability 0.

    The number is finite (half of the lowest one), so log-probabilities, entropies and divergences
    of what `apply` returns are those of the distribution over the legal actions, and no gradient is
    nan. Source: Huang and Ontañón (2022), arXiv:2006.14171, section 3.

    Args:
        distribution: The family of the whole action space, a joint one for Dict and Tuple spaces.
        layout: Where observations tell which actions are legal.

    Raises:
        ConfigError: If a masked part has another family than `categorical` or `multi_categorical`.
    """

    def __init__(self, distribution: Distribution, layout: MaskLayout) -> None:
        self._segments = tuple(_segments(distribution, layout))
        self._sizes: dict[str, int] = {}
        for part in layout.parts:
            self._sizes[part.leaf] = max(part.stop, self._sizes.get(part.leaf, 0))

    def apply(self, params: Tensor, obs: TensorTree) -> Tensor:
        """The parameters with the logits of illegal actions replaced, differentiable.

        Args:
            params: Parameters of the distribution, [..., param_size].
            obs: Observations with the masks, which are not 0 for legal actions, [..., *shape].

        Returns:
            Parameters, [..., param_size]. Their gradient reaches those that were not replaced.
        """
        return torch.where(self._legal(params, obs), params, impossible_logit(params.dtype))

    def _legal(self, params: Tensor, obs: TensorTree) -> Tensor:
        """Mask of the params that are kept, bool, [..., param_size]."""
        assert isinstance(obs, dict), "masks are entries of a Dict observation"
        batch = params.shape[:-1]
        masks = {k: obs[k].reshape((*batch, size)) != 0 for k, size in self._sizes.items()}
        kept = torch.ones((), dtype=torch.bool, device=params.device)
        pieces = [
            kept.expand((*batch, segment.size))
            if segment.leaf is None
            else masks[segment.leaf].narrow(-1, segment.start, segment.size)
            for segment in self._segments
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


@dataclass(frozen=True)
class _Segment:
    """Consecutive parameters that have one slice of a mask, or none."""

    size: int
    leaf: str | None = None
    start: int = 0


def _segments(distribution: Distribution, layout: MaskLayout) -> Iterator[_Segment]:
    """Yield the segments of `params`, in their order."""
    masked = {part.part: part for part in layout.parts}
    for key, family in distribution.parts.items():
        if key in masked:
            _check_family(key, family, masked[key])
            yield _Segment(family.param_size, masked[key].leaf, masked[key].start)
        elif family.param_size > family.free_param_size:
            yield _Segment(family.param_size - family.free_param_size)
    if distribution.free_param_size:
        yield _Segment(distribution.free_param_size)


def _check_family(key: str, family: Distribution, part: MaskedPart) -> None:
    """Refuse a family whose params are not one logit for each action."""
    name = key or ("Discrete" if len(part.sizes) == 1 else "MultiDiscrete")
    is_fit = isinstance(family, (Categorical, MultiCategorical))
    if not is_fit or family.param_size != sum(part.sizes):
        raise ConfigError(
            f"{KEY}.{name}",
            f"the observation {part.leaf!r} masks the actions of this part, which only categorical "
            "and multi_categorical can do: remove the setting, or the mask",
            type(family).__name__,
        )
