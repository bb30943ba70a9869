from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from cases import small_discrete
from gymnasium import spaces

from maze_train.core.errors import SpaceError
from maze_train.nets.blocks import ImageEncoder
from maze_train.nets.config import ModelConfig
from maze_train.nets.template import DictEncoder, encoder_for
from maze_train.spaces.tensors import as_tensors

IMAGE = spaces.Box(0, 255, (2, 3, 1), np.uint8)
"""Space of images too small for convolutions."""

PICTURE = spaces.Box(0, 255, (7, 8, 3), np.uint8)


def encoder(space, **settings):
    """Return the encoder of a flat space with branches of 4 units."""
    return encoder_for(space, ModelConfig(branch_size=4, activation="tanh", **settings))


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Discrete(3), 0, [1, 0, 0]),
        (spaces.Discrete(3), 2, [0, 0, 1]),
        (spaces.Discrete(3, start=-5), -4, [0, 1, 0]),
        (spaces.MultiDiscrete([2, 3]), [1, 0], [0, 1, 1, 0, 0]),
        (spaces.MultiDiscrete([2, 3], start=[10, -2]), [10, 0], [1, 0, 0, 0, 1]),
        (spaces.MultiDiscrete([[2, 1], [1, 2]]), [[1, 0], [0, 1]], [0, 1, 1, 1, 0, 1]),
        (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
        (spaces.MultiBinary((2, 2)), [[1, 0], [0, 1]], [1, 0, 0, 1]),
        (spaces.Box(-9, 9, (2,), np.float32), [0.5, -3.0], [0.5, -3.0]),
        (spaces.Box(-9, 9, (2, 2), np.float64), [[1, 2], [3, 4]], [1, 2, 3, 4]),
        (spaces.Box(-9, 9, (), np.float32), 2.5, [2.5]),
        (spaces.Box(-9, 9, (2,), np.int16), [7, -9], [7, -9]),
        (spaces.Box(0, 255, (2,), np.uint8), [255, 51], [1.0, 0.2]),
        (spaces.Box(0, 255, (), np.uint8), 51, [0.2]),
        (spaces.Box(0, 10, (2,), np.uint8), [0, 1], [0, 0.1]),
        (spaces.Box(0, 1, (2,), np.uint8), [0, 1], [0, 1]),
        (spaces.Box(0, 255, (1,), np.int32), [255], [255]),
        (spaces.Box(0, 255, (1,), np.float32), [255], [255]),
        (spaces.Box(-np.inf, np.inf, (2,), np.float64), [-1e6, 0.5], [-1e6, 0.5]),
        (spaces.Box(0, 1, (3,), np.bool_), [True, False, True], [1, 0, 1]),
        (small_discrete(2, 254), 255, [0, 1]),
        (spaces.MultiDiscrete([[2], [2]], start=[[-1], [5]]), [[0], [5]], [0, 1, 1, 0]),
        (spaces.MultiDiscrete([3, 2], dtype=np.uint8, start=[250, 0]), [252, 1], [0, 0, 1, 0, 1]),
        (spaces.MultiDiscrete(3), 1, [0, 1, 0]),
        (spaces.MultiBinary(()), 1, [1]),
    ],
    ids=str,
)
def test_encoders_of_leaves_match_known_values(space, value, expected):
    """Categories become one-hot vectors from their start, and bytes values in [0, 1]."""
    obs = as_tensors(space, np.array(value))
    encoded = encoder(space)(obs)
    assert encoded.dtype is torch.float32
    torch.testing.assert_close(encoded, torch.tensor(expected, dtype=torch.float32))
    assert encoder(space).output_size == len(expected)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([[2, 3], [4, 1]], start=[[1, 0], [2, 3]]),
        spaces.MultiBinary((2, 2)),
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(0, 1, (2, 2), np.bool_),
        IMAGE,
    ],
    ids=str,
)
def test_leading_dimensions_are_kept(space):
    """Single observations, batches and rollouts are encoded in the same way."""
    space.seed(0)
    rows = np.stack([space.sample() for _ in range(6)])
    encode = encoder(space)
    flat = encode(as_tensors(space, rows))
    assert flat.shape == (6, encode.output_size)
    for lead in [(2, 3), (1, 6, 1), (3, 1, 2)]:
        nested = encode(as_tensors(space, rows.reshape(*lead, *rows.shape[1:])))
        assert torch.equal(nested, flat.view(*lead, -1))
    assert torch.equal(encode(as_tensors(space, rows[0])), flat[0])
    assert encode(as_tensors(space, rows[:0])).shape == (0, encode.output_size)


def test_bytes_are_scaled_once():
    """The largest byte becomes 1 in every call, and the input is not modified."""
    encode = encoder(IMAGE)
    obs = torch.full((2, 2, 3, 1), 255, dtype=torch.uint8)
    for _ in range(2):
        assert torch.equal(encode(obs), torch.ones(2, 6))
    assert obs.dtype is torch.uint8
    assert int(obs.min()) == 255


def test_normalized_image_floats_are_not_scaled():
    """Normalized bytes are floats, which are passed on unchanged."""
    obs = torch.tensor([[2.0, -1.0]])
    assert encoder(spaces.Box(0, 255, (2,), np.uint8))(obs).tolist() == [[2.0, -1.0]]
    assert obs.tolist() == [[2.0, -1.0]]


def test_images_use_convolutions_unless_flat_or_small():
    """Images use convolutions unless `image_encoder` is `flat` or they are too small."""
    assert isinstance(encoder(PICTURE), ImageEncoder)
    assert encoder(PICTURE).output_size == 1 * 2 * 64
    assert encoder(PICTURE, image_encoder="impala").output_size == 1 * 1 * 32
    flat = encoder(PICTURE, image_encoder="flat")
    obs = torch.full((1, 7, 8, 3), 51, dtype=torch.uint8)
    torch.testing.assert_close(flat(obs), torch.full((1, 168), 0.2))
    assert not isinstance(encoder(IMAGE), ImageEncoder)
    for orthogonal in (True, False):
        first = next(encoder(PICTURE, orthogonal_init=orthogonal).parameters()).detach().flatten(1)
        assert torch.allclose(first.T @ first, 2 * torch.eye(27), atol=1e-5) == orthogonal


def test_leaf_encoders_have_no_weights():
    """Encoders of leaves are determined by the space and have no state."""
    for space in (spaces.MultiDiscrete([3, 2]), IMAGE):
        assert not list(encoder(space).parameters())
        assert not encoder(space).state_dict()


def test_dict_encoder_has_one_branch_per_key():
    """Each key has a separate layer; outputs follow the order of the keys."""
    space = spaces.Dict(
        OrderedDict([("z", IMAGE), ("a", spaces.Discrete(3)), ("m", spaces.MultiBinary(2))])
    )
    torch.manual_seed(0)
    encode = encoder(space)
    assert encode.output_size == 12
    layers = [m for m in encode.modules() if isinstance(m, torch.nn.Linear)]
    assert [(m.in_features, m.out_features) for m in layers] == [(6, 4), (3, 4), (2, 4)]
    obs = {
        "m": torch.tensor([[1, 0]], dtype=torch.int8),
        "a": torch.tensor([2]),
        "z": torch.full((1, 2, 3, 1), 51, dtype=torch.uint8),
    }
    vectors = [torch.full((1, 6), 0.2), torch.tensor([[0.0, 0, 1]]), torch.tensor([[1.0, 0]])]
    expected = [torch.tanh(layer(x)) for layer, x in zip(layers, vectors, strict=True)]
    torch.testing.assert_close(encode(obs), torch.cat(expected, -1))


def test_image_branches_have_four_times_the_units():
    """The branch of an image has four times the units of other branches."""
    space = spaces.Dict({"a": spaces.Discrete(3), "camera": PICTURE, "z": spaces.Box(-1, 1, (2,))})
    encode = encoder(space)
    assert isinstance(encode, DictEncoder)
    assert encode.output_size == 4 + 16 + 4
    layers = [m for m in encode.modules() if isinstance(m, torch.nn.Linear)]
    assert [(m.in_features, m.out_features) for m in layers] == [(3, 4), (128, 16), (2, 4)]
    obs = {
        "a": torch.tensor([[0, 1]]),
        "camera": torch.randint(0, 256, (1, 2, 7, 8, 3)).to(torch.uint8),
        "z": torch.zeros(1, 2, 2),
    }
    features = encode(obs)
    assert features.shape == (1, 2, 24)
    picture = torch.tanh(layers[1](encode.encoders[1](obs["camera"])))
    torch.testing.assert_close(features[..., 4:20], picture)
    flat = encoder(space, image_encoder="flat")
    assert flat.output_size == 12


def test_dict_encoder_ignores_empty_and_unknown_keys():
    """A single key works like several; empty and unknown keys are ignored."""
    vector = spaces.Box(-1, 1, (2,), np.float32)
    torch.manual_seed(0)
    one = encoder(spaces.Dict({"a": vector}))
    torch.manual_seed(0)
    with_empty = encoder(spaces.Dict({"a": vector, "none": spaces.Box(-1, 1, (3, 0))}))
    obs = {"a": torch.ones(5, 2), "none": torch.ones(5, 3, 0), "mask": torch.ones(5, 4)}
    assert one(obs).shape == (5, 4)
    assert torch.equal(one(obs), with_empty(obs))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({}),
        spaces.Box(-1, 1, (0,)),
        spaces.Dict({"a": spaces.Box(-1, 1, (2, 0))}),
    ],
    ids=str,
)
def test_encoder_of_an_empty_space_raises(space):
    """A space without elements raises SpaceError."""
    with pytest.raises(SpaceError, match="it has no elements"):
        encoder(space)


@pytest.mark.parametrize(
    "leaf",
    [
        spaces.Text(3),
        spaces.Sequence(IMAGE),
        spaces.OneOf((IMAGE, IMAGE)),
        spaces.Graph(PICTURE, None),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_encoder_of_an_unsupported_space_raises(leaf):
    """The error contains the key, the supported spaces and a remedy."""
    with pytest.raises(SpaceError, match=r"key 'words'.*expected Box, Discrete.*env\.wrappers"):
        encoder(spaces.Dict({"words": leaf}))
    with pytest.raises(SpaceError, match=rf"observation space {type(leaf).__name__}"):
        encoder(leaf)
