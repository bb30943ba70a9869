"""Deterministic actions with noise that explores, as a family of distributions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium.spaces import Box

from maze_train.checks import check_at_least
from maze_train.distributions.base import Distribution, check_space
from maze_train.distributions.box import BoxScale, VectorLayout
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from gymnasium import Space

    from maze_train.types import Tensor


HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NoisyActions(Distribution):
    """Actions x = clip(tanh(u) + σ ε, -1, 1), ε ~ N(0, 1), scaled to the bounds of a box.

    `params` are u, [..., D] with D the number of elements of the box; σ is a constant. The agent's
    actions are x, those of the environment c + h x, with the centre c and half the width h of the
    bounds. The mode is tanh(u).

    Densities, entropies and divergences are those of x before it is clipped; without noise there
    are none.

    Source: Fujimoto et al. (2018), arXiv:1802.09477, algorithm 1.

    Args:
        space: The action space; all bounds must be finite.
        noise_stddev: σ, >= 0; 0: no noise.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Box
    has_fixed_entropy = True

    def __init__(self, space: Box, noise_stddev: float = 0.1) -> None:
        check_space(type(self), space)
        check_at_least("noise_stddev", noise_stddev, 0.0)
        self.noise_stddev = float(noise_stddev)
        self._layout, self._scale = VectorLayout(space), BoxScale(type(self), space)
        size = self._layout.size
        self.param_size = self.noise_size = self.critic_input_size = size
        self.action_shape, self.action_dtype = space.shape, torch.float32
        self.log_scale = self._scale.log_scale

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """clip(tanh(u) + σ · noise, -1, 1), [..., *space.shape]."""
        noisy = torch.add(params.tanh(), noise, alpha=self.noise_stddev)
        return self._layout.to_box(noisy.clamp(-1.0, 1.0))

    def mode(self, params: Tensor) -> Tensor:
        """tanh(u), [..., *space.shape]."""
        return self._layout.to_box(params.tanh())

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-density of the action of the environment, before it is clipped, [...]."""
        scaled = (self._layout.to_vector(actions) - params.tanh()) / self._stddev()
        return -0.5 * scaled.square().sum(-1) - self._log_normalizer()

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the action of the environment, before it is clipped, [...]."""
        entropy = self._log_normalizer() + 0.5 * self.param_size
        return params.new_full(params.shape[:-1], entropy)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i (tanh(p_i) - tanh(q_i))² / (2 σ²), [...]."""
        distance = (params_p.tanh() - params_q.tanh()) / self._stddev()
        return 0.5 * distance.square().sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Actions c + h x, rounded in an integer box, [..., *space.shape]."""
        return self._scale.to_bounds(actions.to(self._scale.work_dtype))

    def from_env(self, actions: Tensor) -> Tensor:
        """Actions x = (actions - c) / h, float32, [..., *space.shape]."""
        return self._scale.from_bounds(actions).to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """The action x, [..., D]."""
        return self._layout.to_vector(actions)

    def _stddev(self) -> float:
        if not self.noise_stddev:
            raise SpaceError("a deterministic policy has no density: set a noise_stddev above 0")
        return self.noise_stddev

    def _log_normalizer(self) -> float:
        """Minus the log-density of the mode."""
        return self.param_size * (math.log(self._stddev()) + HALF_LOG_2PI) + self.log_scale
