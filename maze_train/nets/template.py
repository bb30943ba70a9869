"""Template network: encoder, hidden layers and linear output layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.errors import SpaceError
from maze_train.core.torch_private import is_hooked
from maze_train.core.types import Tensor, TensorTree
from maze_train.nets.blocks import MLP, Backward, ImageEncoder, is_stock, mlp_forward_and_backward
from maze_train.nets.config import ModelConfig
from maze_train.spaces.describe import check_categories, holds_images, is_image

IMAGE_FACTOR = 4
"""Ratio of the size of an image branch to the size of other branches."""


class BoxEncoder(nn.Module):
    """Flattens Box and MultiBinary observations, and scales uint8 to [0, 1] by the upper bound.

    Maps `[..., *space.shape]` to `[..., output_size]` in the default dtype; float32 rounds integers
    above 2^24. Floating-point observations, such as normalized ones, are not scaled.
    """

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        super().__init__()
        self.output_size = math.prod(space.shape)
        self.dims = len(space.shape)
        highest = 0.0
        if isinstance(space, spaces.Box) and space.dtype == np.uint8:
            highest = float(space.high.max(initial=0))
        self.scale = 1 / highest if highest > 1 else None

    def forward(self, obs: Tensor) -> Tensor:
        """Flatten, convert and scale observations."""
        if not obs.is_floating_point():
            obs = obs.to(torch.get_default_dtype())
            if self.scale is not None:
                obs = obs.mul_(self.scale)
        if self.dims == 1:
            return obs
        return obs.unsqueeze(-1) if self.dims == 0 else obs.flatten(-self.dims)


class OneHotEncoder(nn.Module):
    """Discrete and MultiDiscrete observations as concatenated one-hot vectors.

    Maps `[..., *space.shape]` integers to `[..., output_size]`.
    """

    shifts: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        counts = np.atleast_1d(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        counts = counts.ravel().astype(np.int64)
        starts = np.broadcast_to(np.asarray(space.start, np.int64).ravel(), counts.shape)
        self.dims = len(space.shape or ())
        self.output_size = int(counts.sum())
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        # Offset from values to indices in the concatenated vector.
        self.register_buffer("shifts", torch.as_tensor(offsets - starts), persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        """Return one-hot vectors, `[..., output_size]`."""
        values = obs.unsqueeze(-1) if self.dims == 0 else obs.flatten(-self.dims)
        positions = values.long() + self.shifts
        # The shape is derived from the positions, which contain the batch dimension of vmap.
        shape = (*positions.shape[:-1], self.output_size)
        zeros = positions.new_zeros(shape, dtype=torch.get_default_dtype())
        return zeros.scatter_(-1, positions, 1.0)


class DictEncoder(nn.Module):
    """Encoder of Dict observations: a linear layer and a nonlinearity per key, concatenated.

    A branch has `config.branch_size` units, or four times as many for images. Unknown keys and
    empty observations (a Box of shape (0,)) are ignored.
    """

    def __init__(self, space: spaces.Dict, config: ModelConfig) -> None:
        super().__init__()
        assert config.activation is not None
        encoders = {
            key: leaf_encoder(leaf, config, key)
            for key, leaf in space.spaces.items()
            if 0 not in (leaf.shape or ())
        }
        self.keys = list(encoders)
        self.encoders = nn.ModuleList(encoders.values())
        self.sizes = [
            config.branch_size * (1 if isinstance(e, BoxEncoder | OneHotEncoder) else IMAGE_FACTOR)
            for e in encoders.values()
        ]
        self.branches = nn.ModuleList(
            MLP(e.output_size, [size], config.activation, orthogonal=bool(config.orthogonal_init))
            for e, size in zip(encoders.values(), self.sizes, strict=True)
        )
        self.output_size = sum(self.sizes)

    def forward(self, obs: TensorTree) -> Tensor:
        """Return the features of all keys in order, `[..., output_size]`."""
        assert isinstance(obs, dict)
        parts = zip(self.keys, self.encoders, self.branches, strict=True)
        return torch.cat([branch(encoder(obs[key])) for key, encoder, branch in parts], dim=-1)


Encoder: TypeAlias = "BoxEncoder | OneHotEncoder | ImageEncoder | DictEncoder"


def leaf_encoder(
    space: spaces.Space[object], config: ModelConfig, key: str = ""
) -> BoxEncoder | OneHotEncoder | ImageEncoder:
    """Build the encoder of one leaf of an observation space.

    Raises:
        SpaceError: If the type of the space is not supported.
    """
    if isinstance(space, spaces.Box) and is_image(space) and config.image_encoder != "flat":
        return ImageEncoder(space, config.image_encoder, bool(config.orthogonal_init))
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return BoxEncoder(space)
    where = f" (key {key!r})" if key else ""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        check_categories(f"observation space{where}", space)
        return OneHotEncoder(space)
    raise SpaceError(
        f"observation space {space}{where}: expected Box, Discrete, MultiDiscrete, MultiBinary, or "
        "a Dict of these; convert it with an observation wrapper (env.wrappers)"
    )


def encoder_for(space: spaces.Space[object], config: ModelConfig) -> Encoder:
    """Build the encoder of a flat observation space, with the attribute `output_size`.

    Args:
        space: Flat observation space, without action masks.
        config: Resolved settings of the model.

    Raises:
        SpaceError: If a leaf has an unsupported type, or all leaves are empty.
    """
    encoder: Encoder
    if isinstance(space, spaces.Dict):
        encoder = DictEncoder(space, config)
    else:
        encoder = leaf_encoder(space, config)
    if encoder.output_size == 0:
        raise SpaceError(f"observation space {space}: it has no elements")
    return encoder


def resolve(config: ModelConfig, space: spaces.Space[object]) -> ModelConfig:
    """Replace null settings by defaults, which depend on the space.

    With `image_encoder: flat`, images are treated as vectors. By default, policy and critic do not
    share layers if the settings describe two networks (custom networks, critic sizes, no hidden
    layers).

    Args:
        config: Model settings; resolved settings are returned unchanged.
        space: Flat observation space.
    """
    images = config.image_encoder != "flat" and holds_images(space)
    are_two = (
        config.policy is not None
        or config.critic is not None
        or config.critic_hidden_sizes is not None
        or config.hidden_sizes == []
    )
    hidden_sizes, shared_trunk = config.hidden_sizes, config.shared_trunk
    if hidden_sizes is None:
        hidden_sizes = [512] if images else [64, 64]
    if shared_trunk is None:
        shared_trunk = config.rnn is not None or (images and not are_two)
    return replace(
        config,
        hidden_sizes=hidden_sizes,
        activation=config.activation or ("relu" if images else "tanh"),
        shared_trunk=shared_trunk,
        orthogonal_init=config.orthogonal_init is not False,
    )


class TemplateNet(nn.Module):
    """Network for any flat observation space, with one branch per key of a Dict.

    Maps observations `[..., *obs shape]` to `[..., output_size]`.

    Args:
        space: Flat observation space.
        config: Activation, initialisation and encoder settings.
        hidden_sizes: Units of each hidden layer.
        output_size: Units of the linear output layer; 0: the last hidden layer is the output.
        output_gain: Gain of the orthogonal initialisation of the output layer.
    """

    def __init__(
        self,
        space: spaces.Space[object],
        config: ModelConfig,
        hidden_sizes: list[int],
        output_size: int = 0,
        output_gain: float = 1.0,
    ) -> None:
        super().__init__()
        config = resolve(config, space)
        assert config.activation is not None
        self.encoder = encoder_for(space, config)
        self.layers = MLP(
            self.encoder.output_size,
            hidden_sizes,
            config.activation,
            output_size=output_size,
            orthogonal=bool(config.orthogonal_init),
            output_gain=output_gain,
        )
        self.output_size = self.layers.output_size

    def forward(self, obs: TensorTree) -> Tensor:
        """Outputs, `[..., output_size]`."""
        parts: Any = self._modules  # Avoids the slow attribute lookup of nn.Module.
        features: Tensor = parts["layers"](parts["encoder"](obs))
        return features


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has only linear layers, on vectors or discrete observations.

    Types are compared exactly, because subclasses and modules with hooks may compute different
    results.
    """
    if is_hooked(module):
        return False
    if type(module) is TemplateNet:
        return is_plain(module.encoder) and is_plain(module.layers)
    if type(module) is DictEncoder:
        return all(map(is_plain, [*module.encoders, *module.branches]))
    if type(module) is MLP:
        return all(is_stock(layer, nn.Linear) for layer in module.layers)
    return type(module) in (BoxEncoder, OneHotEncoder)


def supports_analytic_gradients(net: nn.Module) -> bool:
    """Return whether `forward_and_backward` supports a network.

    Supported are MLPs whose inputs are vectors, discrete observations, or Dicts of these.
    """
    return type(net) in (TemplateNet, MLP) and is_plain(net)


@torch.no_grad()
def forward_and_backward(net: nn.Module, obs: TensorTree) -> tuple[Tensor, Backward]:
    """Compute the outputs of a network, and return a function that computes the gradients.

    Args:
        net: The network, see `supports_analytic_gradients`.
        obs: Observations, `[N, ...]`.

    Returns:
        Outputs `[N, output_size]` without a graph, and the backward function. Gradients of Dict
        observations are not supported.
    """
    if isinstance(net, MLP):
        assert isinstance(obs, torch.Tensor)
        return mlp_forward_and_backward(net, obs)
    assert isinstance(net, TemplateNet)
    if not isinstance(net.encoder, DictEncoder):
        return mlp_forward_and_backward(net.layers, net.encoder(obs))
    assert isinstance(obs, dict)
    parts = zip(net.encoder.keys, net.encoder.encoders, net.encoder.branches, strict=True)
    branches = [forward_and_backward(branch, leaf(obs[key])) for key, leaf, branch in parts]
    outputs, layers_backward = mlp_forward_and_backward(
        net.layers, torch.cat([x for x, _ in branches], dim=-1)
    )
    sizes = net.encoder.sizes

    def backward(grad: Tensor, of_input: bool) -> Tensor | None:
        d_features = layers_backward(grad, True)
        assert d_features is not None
        pieces = torch.split(d_features, sizes, dim=-1)
        for piece, (_, branch_backward) in zip(pieces, branches, strict=True):
            branch_backward(piece.contiguous(), False)
        return None

    return outputs, backward
