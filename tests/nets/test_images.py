"""Convolutional encoders match sums over windows in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import sweep
from gymnasium import spaces

from maze_train.nets import blocks as images
from maze_train.nets.blocks import ImageEncoder

KINDS = ("nature", "impala")


def space_of(*shape, high=255):
    """Return a Box of bytes."""
    return spaces.Box(0, high, shape, np.uint8)


def encoder_of(space, kind, seed=0, orthogonal=True):
    """Return an encoder with seeded weights and non-zero biases."""
    torch.manual_seed(seed)
    encoder = ImageEncoder(space, kind, orthogonal)
    with torch.no_grad():
        for layer in convolutions(encoder):
            layer.bias.uniform_(-0.2, 0.2)
    return encoder


def convolutions(module):
    """Return the convolutions in the order of their use."""
    return [m for m in module.modules() if isinstance(m, torch.nn.Conv2d)]


def bytes_for(space, *lead, seed=0):
    """Return random observations."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, *space.shape)
    return torch.randint(0, int(space.high.max()) + 1, shape, generator=generator).to(torch.uint8)


# -- references ----------------------------------------------------------------------------------


def conv(x, layer, stride, padding=0):
    """Return the cross-correlation of [N, C, H, W] as a sum over each window."""
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (2, 3))
    windows = windows[:, :, :: stride[0], :: stride[1]]
    return np.einsum("nchwij,fcij->nfhw", windows, weight) + bias[:, None, None]


def max_pool(x):
    """Return the maximum of 3x3 windows with stride 2, without padding values."""
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    return windows[:, :, ::2, ::2].max(axis=(-2, -1))


def relu(x):
    """Return the positive part."""
    return np.maximum(x, 0.0)


def nature(x, layers, strides):
    """Return the output of three convolutions, each followed by relu."""
    for layer, stride in zip(layers, strides, strict=True):
        x = relu(conv(x, layer, stride))
    return x


def impala(x, layers):
    """Return the output of three stages of convolution, pooling and two residual blocks."""
    layers = iter(layers)
    for _ in range(3):
        x = max_pool(conv(x, next(layers), (1, 1), 1))
        for _ in range(2):
            change = conv(relu(x), next(layers), (1, 1), 1)
            x = x + conv(relu(change), next(layers), (1, 1), 1)
    return relu(x)


def features_of(x):
    """Reshape [N, F, H, W] to [N, H * W * F]."""
    return torch.from_numpy(x.transpose(0, 2, 3, 1).reshape(len(x), -1))


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "strides"),
    [
        ((36, 44), [(4, 4), (2, 2), (1, 1)]),
        ((84, 84), [(4, 4), (2, 2), (1, 1)]),
        ((7, 7), [(1, 1), (1, 1), (1, 1)]),
        ((11, 25), [(1, 2), (1, 2), (1, 1)]),
        ((35, 50), [(2, 2), (2, 2), (1, 1)]),
        *((size, None) for size in ((7, 7), (12, 9), (21, 36))),
    ],
)
def test_image_features_match_the_papers(size, strides):
    """Nature networks (with strides for small images) and IMPALA networks match the references."""
    space = space_of(4, *size)
    encoder = encoder_of(space, "nature" if strides else "impala")
    obs, layers = bytes_for(space, 2), convolutions(encoder)
    x = obs.numpy() / 255.0
    expected = features_of(nature(x, layers, strides) if strides else impala(x, layers))
    torch.testing.assert_close(encoder(obs).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(encoder.double()(obs), expected)
    assert encoder.output_size == expected.shape[1]


@pytest.mark.parametrize(
    ("kind", "shape", "output_size", "filters"),
    [
        ("nature", (4, 84, 84), 7 * 7 * 64, [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]),
        ("nature", (210, 160, 3), 22 * 16 * 64, [(32, 3, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3)]),
        ("nature", (7, 7, 3), 64, [(32, 3, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3)]),
        ("nature", (35, 36), 6 * 6 * 64, [(32, 1, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3)]),
        (
            "impala",
            (84, 84, 3),
            11 * 11 * 32,
            [(16, 3, 3, 3), *[(16, 16, 3, 3)] * 4, (32, 16, 3, 3), *[(32, 32, 3, 3)] * 9],
        ),
    ],
)
def test_image_encoders_have_the_filters_of_the_papers(kind, shape, output_size, filters):
    """Filter shapes and output sizes match the papers."""
    encoder = ImageEncoder(space_of(*shape), kind)
    assert [tuple(layer.weight.shape) for layer in convolutions(encoder)] == filters
    assert encoder.output_size == output_size


@sweep("side", range(7, 43))
def test_images_of_every_size_have_output_positions(side):
    """Images of at least 7 pixels have between 1 and 49 output positions."""
    for shape in ((3, side, side), (side, 7), (7, side, 2)):
        encoder = ImageEncoder(space_of(*shape), "nature", orthogonal=False)
        assert 64 <= encoder.output_size <= 49 * 64
        assert encoder(bytes_for(space_of(*shape))).shape == (encoder.output_size,)


@pytest.mark.parametrize("kind", KINDS)
def test_channel_orders_give_equal_features(kind):
    """Equal pixels give equal features for any channel order and frame stacking."""
    colours, grey = bytes_for(space_of(6, 40, 48), 3), bytes_for(space_of(40, 48), 3)
    stacked = colours.view(3, 2, 3, 40, 48)
    for same in (
        [
            colours,
            colours.permute(0, 2, 3, 1),
            colours.permute(0, 2, 3, 1).contiguous(),
            stacked,
            stacked.permute(0, 1, 3, 4, 2),
            stacked.permute(0, 1, 3, 4, 2).contiguous(),
        ],
        [grey, grey.unsqueeze(1), grey.unsqueeze(-1)],
    ):
        found = [encoder_of(space_of(*x.shape[1:]), kind)(x) for x in same]
        torch.testing.assert_close(found, found[:1] * len(same), rtol=1e-4, atol=1e-5)


def test_pixels_are_scaled_by_the_bound_of_the_space():
    """The upper bound of the space becomes 1, and the observation is not modified."""
    for high in (1, 10, 255):
        space = space_of(3, 36, 36, high=high)
        encoder = encoder_of(space, "nature")
        obs = torch.full((2, *space.shape), high, dtype=torch.uint8)
        ones = nature(np.ones((2, 3, 36, 36)), convolutions(encoder), [(4, 4), (2, 2), (1, 1)])
        for _ in range(2):
            torch.testing.assert_close(
                encoder(obs).double(), features_of(ones), rtol=1e-4, atol=1e-5
            )
        assert obs.dtype is torch.uint8
        assert int(obs.min()) == high


# -- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_empty_image_batches_have_zero_gradients(kind):
    """Empty batches give empty features and zero gradients."""
    space = space_of(3, 9, 8)
    encoder = encoder_of(space, kind)
    for lead in [(0,), (0, 4), (4, 0)]:
        features = encoder(bytes_for(space, *lead))
        assert features.shape == (*lead, encoder.output_size)
    features.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in encoder.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_image_chunks_equal_a_single_chunk(kind, monkeypatch):
    """Features and gradients of images computed in chunks match a single chunk."""
    space = space_of(9, 8, 3)
    encoder = encoder_of(space, kind).double()
    obs = bytes_for(space, 11)
    weights = torch.randn(11, encoder.output_size, dtype=torch.float64)
    results = []
    for chunk in (11, 4):
        monkeypatch.setattr(images, "CHUNK", chunk)
        encoder.zero_grad()
        features = encoder(obs)
        (features * weights).sum().backward()
        results.append([features, *(p.grad for p in encoder.parameters())])
    torch.testing.assert_close(results[0], results[1])


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "gain"), [("nature", math.sqrt(2)), ("impala", 1.0)])
def test_orthogonal_weights(kind, gain):
    """Filters are orthogonal with the gain of the architecture; biases are 0."""
    for layer in convolutions(ImageEncoder(space_of(4, 40, 40), kind)):
        rows = layer.weight.detach().double().flatten(1)
        expected = gain**2 * torch.eye(len(rows), dtype=torch.float64)
        torch.testing.assert_close(rows @ rows.T, expected, rtol=0, atol=1e-5)
        assert not layer.bias.any()


def test_default_initialization_of_pytorch_is_optional():
    """Without `orthogonal_init`, weights and biases are those of nn.Conv2d."""
    torch.manual_seed(3)
    encoder = ImageEncoder(space_of(4, 84, 84), "nature", orthogonal=False)
    torch.manual_seed(3)
    first = torch.nn.Conv2d(4, 32, 8, 4)
    assert torch.equal(convolutions(encoder)[0].weight, first.weight)
    assert torch.equal(convolutions(encoder)[0].bias, first.bias)


# -- gradients -----------------------------------------------------------------------------------
