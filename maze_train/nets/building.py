"""Builders of networks from spaces and settings."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import Dict
from torch import nn

from maze_train.errors import ConfigError, SpaceError
from maze_train.nets.template import TemplateNet
from maze_train.spaces.describe import is_mask_key
from maze_train.spaces.tensors import sampled_for
from maze_train.targets import build_target, locate

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    "build_own",
    "input_space",
    "readable",
]

POLICY_GAIN = 0.01
"""Gain of the orthogonal initialisation of the output layer of a policy."""

NORMALIZER = "maze_train.nets.normalization.ObservationNormalizer"
MASKING = "maze_train.nets.masking.ActionMasking"
"""Parts of a model that are imported when a configuration or a space asks for them."""

ROWS = 2
"""Observations that a network of a user is tried out on."""


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
    return build_own(node, f"model.{role}", space, output_size)


def build_own(
    node: Mapping[str, Any],
    key: str,
    space: spaces.Space[Any],
    output_size: int,
    action_size: int | None = None,
) -> nn.Module:
    """Build a network of a user, and run it once: a wrong output is refused before training.

    Args:
        node: Names the network, see `build_target`.
        key: Where the configuration names it.
        space: Flat observation space, without masks.
        output_size: Units of its output.
        action_size: Numbers that describe an action, which the network also reads; None: it
            reads observations only.

    Raises:
        ConfigError: If the network can not be built, fails, or has another output.
    """
    sizes = {"output_size": output_size}
    inputs, described = [sampled_for(space, ROWS)], f"observations of {space}"
    if action_size is not None:
        sizes["action_size"] = action_size
        inputs.append(torch.zeros(ROWS, action_size))
        described += f" and actions [{ROWS}, {action_size}]"
    net: nn.Module = build_target(node, key=key, kind=nn.Module, observation_space=space, **sizes)
    net.eval()
    with torch.no_grad():
        try:
            output = net(*inputs)
        except Exception as error:
            raise ConfigError(key, f"a forward pass on {described} failed: {error}") from error
    if not isinstance(output, torch.Tensor) or output.shape != (ROWS, output_size):
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(
            key, f"expected outputs of shape [batch, {output_size}] (argument output_size)", got
        )
    return net
