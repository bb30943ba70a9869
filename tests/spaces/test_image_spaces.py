"""Which spaces are images, and where their channels are."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze_train.spaces.describe import holds_images, image_layout, is_image


def of_bytes(*shape, low=0, high=255):
    """A Box of bytes."""
    return spaces.Box(low, high, shape, np.uint8)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 7, 3), (3, 7, 7, True)),
        ((7, 7, 20), (20, 7, 7, True)),
        ((3, 64, 64), (3, 64, 64, False)),
        ((4, 84, 84), (4, 84, 84, False)),
        ((84, 84, 4), (4, 84, 84, True)),
        ((84, 84, 1), (1, 84, 84, True)),
        ((1, 84, 84), (1, 84, 84, False)),
        ((12, 96, 96), (12, 96, 96, False)),
        ((210, 160, 3), (3, 210, 160, True)),
        ((3, 210, 160), (3, 210, 160, False)),
        ((7, 7, 7), (7, 7, 7, True)),
        ((9, 30, 9), (9, 9, 30, True)),
        ((8, 8, 111), (111, 8, 8, True)),
        ((4, 96, 96, 3), (12, 96, 96, True)),
        ((4, 84, 84, 1), (4, 84, 84, True)),
        ((4, 3, 64, 48), (12, 64, 48, False)),
        ((84, 84), (1, 84, 84, False)),
        ((16, 160), (1, 16, 160, False)),
    ],
)
def test_images(shape, layout):
    """Pictures as environments give them: which dimension holds the channels, and the sizes."""
    assert is_image(of_bytes(*shape))
    assert image_layout(of_bytes(*shape)) == layout


@pytest.mark.parametrize(
    "space",
    [
        of_bytes(128),
        of_bytes(),
        of_bytes(6, 7, 2),
        of_bytes(3, 3, 27),
        of_bytes(10, 5, 8),
        of_bytes(15, 84),
        of_bytes(84, 15),
        of_bytes(84, 84, high=5),
        of_bytes(84, 84, low=1),
        of_bytes(2, 4, 16, 16, 3),
        of_bytes(3, 0, 84),
        spaces.Box(0, 255, (84, 84, 3), np.float32),
        spaces.Box(0, 255, (84, 84, 3), np.int16),
        spaces.Box(-128, 127, (84, 84, 3), np.int8),
        spaces.MultiBinary((84, 84, 3)),
        spaces.MultiDiscrete(np.full((20, 20, 3), 255), dtype=np.uint8),
        spaces.Discrete(256),
    ],
    ids=str,
)
def test_vectors_and_tables_are_no_images(space):
    """Anything that is not a picture of bytes is read as numbers."""
    assert not is_image(space)
    assert not holds_images(space)


def test_bounds_of_pictures_with_channels_do_not_matter():
    """Planes of zeros and ones are read by convolutions as well."""
    assert is_image(of_bytes(10, 10, 4, high=1))


def test_a_dict_holds_an_image_if_one_of_its_leaves_is_one():
    """One key is enough."""
    vector = spaces.Box(-1, 1, (3,))
    assert holds_images(spaces.Dict({"a": vector, "camera/0": of_bytes(64, 64, 3)}))
    assert not holds_images(spaces.Dict({"a": vector, "b": of_bytes(64)}))
    assert holds_images(of_bytes(64, 64, 3))
