"""Builders of networks from spaces and settings."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import Dict
from torch import nn

from maze_train.errors import SpaceError
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import is_mask_key
from maze_train.targets import locate

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.distributions.base import Distribution
    from maze_train.nets.config import ModelConfig
    from maze_train.nets.masking import ActionMasking
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.spaces.masks import MaskLayout
    from maze_train.types import Tensor, TensorTree

__all__ = [
    "POLICY_GAIN",
    "Policy",
    "build_masking",
    "build_network",
    "build_normalizer",
    "input_space",
    "readable",
]

POLICY_GAIN = 0.01
"""Gain of the orthogonal initialisation of the output layer of a policy."""

NORMALIZER = "maze_train.nets.normalization.ObservationNormalizer"
MASKING = "maze_train.nets.masking.ActionMasking"
BUILD_OWN = "maze_train.nets.own.build_own"
"""Parts of a model that are imported when a configuration or a space asks for them."""


class Policy(nn.Module):
    """Maps observations to the parameters of an action distribution.

    Args:
        net: Maps observations (or features of a shared trunk) to
            `[..., param_size - free_param_size]`.
        distribution: The family of distributions; it says how many parameters it needs and which
            of them do not depend on the state.
    """

    def __init__(self, net: nn.Module, distribution: Distribution) -> None:
        super().__init__()
        self.net = net
        self.distribution = distribution
        self.free_params: nn.Parameter | None = None
        if distribution.free_param_size:
            self.free_params = nn.Parameter(distribution.initial_free_params())

    def forward(self, obs: TensorTree) -> Tensor:
        """Distribution parameters, `[..., param_size]`."""
        params: Tensor = self.net(obs)
        if self.free_params is None:
            return params
        free = self.free_params.expand(*params.shape[:-1], -1)
        return torch.cat([params, free], dim=-1)


def input_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Part of a flat observation space that networks read: all but masks."""
    if not isinstance(space, Dict):
        return space
    parts = OrderedDict((k, leaf) for k, leaf in space.spaces.items() if not is_mask_key(k))
    if not parts:
        raise SpaceError(f"{space} holds masks only: expected something to act on besides")
    return Dict(parts)


def build_normalizer(config: ModelConfig, space: spaces.Space[Any]) -> ObservationNormalizer | None:
    """The normaliser that a configuration asks for; None if there is nothing to normalise."""
    if config.normalization.mode == "none":
        return None
    normalizer: ObservationNormalizer = locate(NORMALIZER)(space, config.normalization)
    return normalizer if normalizer.keys else None


def build_masking(distribution: Distribution, masks: MaskLayout | None) -> ActionMasking | None:
    """What rules out actions that the observations call illegal; None where there are no masks."""
    if masks is None:
        return None
    masking: ActionMasking = locate(MASKING)(distribution, masks)
    return masking


def readable(
    obs: TensorTree, normalizer: ObservationNormalizer | None, has_masks: bool
) -> TensorTree:
    """Part of observations that networks read: no masks, normalised."""
    if has_masks:
        assert isinstance(obs, dict)
        obs = {key: leaf for key, leaf in obs.items() if not is_mask_key(key)}
    return obs if normalizer is None else normalizer(obs)


def build_network(
    config: ModelConfig,
    role: str,
    space: spaces.Space[Any],
    hidden_sizes: list[int],
    output_size: int,
    gain: float,
) -> nn.Module:
    """The network named in `config` for this role, or the template."""
    node = getattr(config, role)
    if node is None:
        if role == "trunk":
            return TemplateNet(space, config, hidden_sizes)
        return TemplateNet(space, config, hidden_sizes, output_size, gain)
    net: nn.Module = locate(BUILD_OWN)(node, f"model.{role}", space, output_size)
    return net
