"""Actions drawn at random, from the legal ones where there are masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy.typing as npt

    from maze_train.spaces.describe import FlatView
    from maze_train.spaces.mask_layouts import MaskLayout

    Array = npt.NDArray[Any]

__all__ = ["masks_of_parts", "random_action"]


def masks_of_parts(
    masks: MaskLayout, leaves: Mapping[str, Array]
) -> Iterator[tuple[str, list[Array]]]:
    """Key and masks, one for each choice, of every masked part of the action space.

    Args:
        masks: Layout of the legal actions in the observation.
        leaves: One observation by leaf.

    Raises:
        SpaceError: If a choice has no legal action.
    """
    problem = masks.illegal_part(leaves)
    if problem is not None:
        raise SpaceError(problem)
    for part in masks.parts:
        entries = leaves[part.leaf].reshape(-1)[part.start : part.stop]
        yield part.part, np.split(entries, np.cumsum(part.sizes)[:-1])


def random_action(
    actions: FlatView,
    legal: Iterable[tuple[str, list[Array]]],
    generator: np.random.Generator,
) -> Any:
    """An action of `actions.space.sample()`, the masked parts of which are drawn anew.

    Args:
        actions: The action space, whose own generator draws what has no masks.
        legal: Key and masks, one for each choice, of each part that has some.
        generator: Draws uniformly from the legal choices.
    """
    parts = dict(actions.read(actions.space.sample()))
    for key, masks in legal:
        leaf: Any = actions.leaves[key]
        drawn = [generator.choice(np.flatnonzero(mask)) for mask in masks]
        parts[key] = np.reshape(drawn, leaf.shape) + leaf.start
    return parts[""] if actions.is_single else actions.build(parts)
