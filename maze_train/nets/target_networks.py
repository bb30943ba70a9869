"""Target networks with Polyak averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.errors import ConfigError
from maze_train.core.types import TensorTree
from maze_train.nets.acting import DistributionPolicy
from maze_train.nets.config import ModelConfig
from maze_train.nets.normalization import ObservationNormalizer
from maze_train.nets.policy_model import ActionMasking, readable
from maze_train.nets.template import resolve
from maze_train.spaces.describe import holds_images


class TargetNetwork:
    """Updates a target network towards its source.

    Args:
        target: The target network.
        source: The trained network.
    """

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        self.network = target
        # Parameters are stored, because iterating over a module takes longer than the update.
        self._params = tuple(zip(target.parameters(), source.parameters(), strict=True))
        # The owners of buffers are stored, because a change of device or dtype replaces buffers.
        owners = zip(target.modules(), source.modules(), strict=True)
        self._owners = tuple((t, s) for t, s in owners if [*s.buffers(recurse=False)])

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Update the target: θ' <- (1 - τ) θ' + τ θ; buffers are copied."""
        for param, source in self._params:
            param.lerp_(source, tau)
        for target, current in self._owners:
            pairs = zip(target.buffers(recurse=False), current.buffers(recurse=False), strict=True)
            for buffer, value in pairs:
                buffer.copy_(value)


class ModelWithTargets(DistributionPolicy):
    """Base class of models with target networks.

    Args:
        normalizer: Observation normalizer, or None.
        masking: Action masking, or None.
    """

    def __init__(
        self, normalizer: ObservationNormalizer | None, masking: ActionMasking | None
    ) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.masking = masking
        self._targets: list[TargetNetwork] = []

    def target_of(self, network: nn.Module) -> Any:
        """Create a target network: a frozen copy, to be updated by `update_targets`."""
        copy = deepcopy(network).requires_grad_(False).eval()
        self._targets.append(TargetNetwork(copy, network))
        return copy

    def train(self, mode: bool = True) -> ModelWithTargets:
        """Set training mode; target networks remain in evaluation mode."""
        super().train(mode)
        for target in self._targets:
            target.network.eval()
        return self

    def requires_grad_(self, requires_grad: bool = True) -> ModelWithTargets:
        """Enable or disable gradients of the parameters; target networks remain frozen."""
        super().requires_grad_(requires_grad)
        for target in self._targets:
            target.network.requires_grad_(False)
        return self

    def inputs(self, obs: TensorTree) -> TensorTree:
        """Return the network inputs: normalized observations without masks."""
        return readable(obs, self.normalizer, self.masking is not None)

    def update_targets(self, tau: float) -> None:
        """Update the target networks: θ' <- (1 - τ) θ' + τ θ; buffers are copied."""
        for target in self._targets:
            target.update(tau)


def resolve_with_targets(
    config: ModelConfig, space: spaces.Space[Any], hidden_sizes: Sequence[int] = (256, 256)
) -> ModelConfig:
    """Fill in the defaults of models with targets.

    Args:
        config: Model settings; resolved settings are returned unchanged.
        space: Flat observation space.
        hidden_sizes: Default hidden sizes for observations without images.
    """
    images = config.image_encoder != "flat" and holds_images(space)
    sizes = config.hidden_sizes
    own = replace(
        config,
        hidden_sizes=list(hidden_sizes) if sizes is None and not images else sizes,
        activation=config.activation or "relu",
        shared_trunk=False,
        orthogonal_init=bool(config.orthogonal_init),
    )
    return resolve(own, space)


def refuse_settings(config: ModelConfig, reasons: Mapping[str, str]) -> None:
    """Raise if an unsupported setting is set.

    Args:
        config: Model settings.
        reasons: Unsupported settings, each with the reason.

    Raises:
        ConfigError: If an unsupported setting is set.
    """
    for key, reason in reasons.items():
        if value := config.value_of(key):
            raise ConfigError(f"model.{key}", f"{reason}; remove this setting", value)
