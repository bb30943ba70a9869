"""Recognition of image observations, and the meaning of their dimensions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

__all__ = ["ImageLayout", "holds_images", "image_layout", "is_image"]

SMALLEST_SIDE = 7
"""Pixels that each side of an image has at least: MiniGrid's view."""

SMALLEST_GREY_SIDE = 16
"""The same where there are no channels: less is a table."""


class ImageLayout(NamedTuple):
    """Meaning of the dimensions of an image."""

    channels: int
    """Channels of all frames together."""
    height: int
    width: int
    channels_last: bool
    """Whether the last dimension holds channels; false where there are none."""


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether observations are pictures, which convolutions can read.

    Such a space is a Box of bytes (uint8) with

    - three dimensions, height and width at least 7, whatever its bounds: (7, 7, 3), (4, 84, 84);
    - four dimensions: a stack of such pictures, (4, 96, 96, 3); or
    - two dimensions of at least 16 and the bounds 0 and 255: (84, 84).

    All else is read as numbers: bytes in one dimension (the memory of an Atari console), tables
    with few rows or columns or bounds of their own, and whatever is not uint8.
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    if len(space.shape) == 2:
        has_all_bytes = bool(np.all(space.low == 0) and np.all(space.high == 255))
        return has_all_bytes and min(space.shape) >= SMALLEST_GREY_SIDE
    if len(space.shape) in (3, 4):
        layout = image_layout(space)
        return min(layout.height, layout.width) >= SMALLEST_SIDE
    return False


def image_layout(space: spaces.Box) -> ImageLayout:
    """Decide which dimension of an image holds the channels: the first one or the last one.

    If the remaining two are equal for one of the choices only, it is that one: (7, 7, 20) has 20
    channels. Otherwise it is the smaller one, and the last one of equals. A first dimension of four
    counts frames.

    Args:
        space: A Box with two (no channels), three or four (frames) dimensions.
    """
    if len(space.shape) == 2:
        return ImageLayout(1, *space.shape, channels_last=False)
    *stack, first, middle, last = space.shape
    frames = stack[0] if stack else 1
    channels_last = last <= first
    if (first == middle) != (middle == last):
        channels_last = first == middle
    if channels_last:
        return ImageLayout(frames * last, first, middle, channels_last=True)
    return ImageLayout(frames * first, middle, last, channels_last=False)


def holds_images(space: spaces.Space[Any]) -> bool:
    """Whether a flat space is an image, or a Dict with an image in it."""
    leaves = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return any(is_image(leaf) for leaf in leaves)
