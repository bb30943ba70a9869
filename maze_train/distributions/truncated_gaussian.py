"""Normal distributions cut to the bounds of a box."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from maze_train.distributions.constant import Constant
from maze_train.distributions.gaussian import GaussianFamily
from maze_train.distributions.truncation import CutNormal
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from gymnasium.spaces import Box

    from maze_train.types import Tensor

__all__ = ["TruncatedGaussian"]

WIDEST = 1e150
"""Bounds beyond this are as good as none; its square is still a float64 number."""


class TruncatedGaussian(GaussianFamily):
    """Independent normal distributions, cut to the bounds [low, high] and scaled to mass 1.

    log p(a) = Σ_i [ log N(a_i; μ_i, σ_i) - log(Φ((high_i - μ_i)/σ_i) - Φ((low_i - μ_i)/σ_i)) ]

    A side without a bound is not cut. `params` are μ ++ log σ, [..., 2 D], as for
    `DiagonalGaussian`; the means may lie outside of the bounds. The agent's actions are those of
    the environment. All values and gradients are finite and exact to at least four digits however
    far the mean is outside; computation is in float64.

    Sampling: the action whose distribution function is Φ(ε), ε standard normal noise. Without
    bounds that is μ + σ ε. Source: Robert (1995), "Simulation of truncated normal variables",
    Statistics and Computing 5, section 1, for the density and the inversion.

    Args:
        space: The action space; any bound may be infinite.
        state_dependent_std: Whether the network computes log σ; else it is a free parameter.
        initial_log_std: Start of log σ. With a state-dependent std it is added to what the network
            computes.
        log_std_min: Lower limit of a state-dependent log σ.
        log_std_max: Upper limit of a state-dependent log σ.

    Raises:
        SpaceError: If an interval is empty.
    """

    def __init__(
        self,
        space: Box,
        state_dependent_std: bool = False,
        initial_log_std: float = 0.0,
        log_std_min: float = -20.0,
        log_std_max: float = 2.0,
    ) -> None:
        super().__init__(space, state_dependent_std, initial_log_std, log_std_min, log_std_max)
        if not (space.low < space.high).all():
            raise SpaceError(
                f"TruncatedGaussian needs low < high in every dimension, the action space is "
                f"{space}: remove the constant dimensions, or set "
                "model.distributions.Box=diagonal_gaussian"
            )
        low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
        self.log_scale = self._bounds.log_scale
        self._low, self._high = Constant(low.clip(-WIDEST)), Constant(high.clip(max=WIDEST))

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """The quantile Φ(noise), differentiable by the implicit derivative, [..., *space.shape]."""
        actions = self._cut(params)[0].quantile(noise.double())
        return self._layout.to_box(actions.to(params.dtype))

    def mode(self, params: Tensor) -> Tensor:
        """μ clipped to the bounds, [..., *space.shape]."""
        return self._layout.to_box(self._cut(params)[0].mode.to(params.dtype))

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-density of actions inside the bounds, before any rounding to integers, [...]."""
        cut, log_std = self._cut(params)
        return self._log_density(cut, log_std, cut.moments()[0], actions).to(params.dtype)

    def entropy(self, params: Tensor) -> Tensor:
        """Σ_i [ log σ + log M + E[t y + ½ y²] ] in the coordinates of `CutNormal`, [...]."""
        cut, log_std = self._cut(params)
        return _entropy(cut, log_std, *cut.moments()).to(params.dtype)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i E_p[log p_i - log q_i], from the first two moments of p, [...]."""
        (p, log_std_p), (q, log_std_q) = self._cut(params_p), self._cut(params_q)
        moments_p, log_mass_q = p.moments(), q.moments()[0]
        # The moments of x - q.mode under p, and with them the mean of q's exponent.
        gap = p.mode - q.mode
        shift = p.sign * p.std * moments_p[1]
        first = shift + gap
        second = p.std.square() * moments_p[2] + gap * (2.0 * shift + gap)
        exponent = q.sign * q.slope * first / q.std + 0.5 * second / q.std.square()
        cross = (log_std_q + log_mass_q + exponent).sum(-1)
        return (cross - _entropy(p, log_std_p, *moments_p)).to(params_p.dtype)

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both from one set of integrals, each [...]."""
        cut, log_std = self._cut(params)
        moments = cut.moments()
        log_prob = self._log_density(cut, log_std, moments[0], actions)
        return log_prob.to(params.dtype), _entropy(cut, log_std, *moments).to(params.dtype)

    def to_env(self, actions: Tensor) -> Tensor:
        """The same actions, rounded in an integer box, [..., *space.shape]."""
        return self._bounds.fit(actions.to(self._bounds.work_dtype))

    def from_env(self, actions: Tensor) -> Tensor:
        """The same actions as float32, clipped to the bounds, [..., *space.shape]."""
        return self._bounds.fit(actions.to(self._bounds.work_dtype)).to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """The actions scaled where both bounds are finite, else as they are, [..., D]."""
        return self._layout.to_vector(self._bounds.to_unit(actions))

    def unit_mode(self, params: Tensor) -> Tensor:
        """μ, scaled where both bounds are finite, [..., D]; it may lie beyond them."""
        mean, _ = self._layout.split(params)
        return self._layout.to_vector(self._bounds.to_unit(self._layout.to_box(mean)))

    def reparameterized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Both in float64, so that an action close to a bound is not rounded to it."""
        cut, log_std = self._cut(params)
        actions = cut.quantile(noise.double())
        log_probs = self._log_density(cut, log_std, cut.moments()[0], self._layout.to_box(actions))
        features = self.critic_input(self._layout.to_box(actions))
        return features.to(params.dtype), (log_probs + self.log_scale).to(params.dtype)

    def _cut(self, params: Tensor) -> tuple[CutNormal, Tensor]:
        """The distributions of all dimensions, and log σ, float64."""
        mean, log_std = (part.double() for part in self._layout.split(params))
        return CutNormal.of(mean, log_std, self._low.like(mean), self._high.like(mean)), log_std

    def _log_density(
        self, cut: CutNormal, log_std: Tensor, log_mass: Tensor, actions: Tensor
    ) -> Tensor:
        exponent = cut.exponent(self._layout.to_vector(actions).double())
        return -(exponent + log_std + log_mass).sum(-1)


def _entropy(
    cut: CutNormal, log_std: Tensor, log_mass: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Minus the mean of the log-density, summed over dimensions, [...]."""
    return (log_std + log_mass + cut.slope * first + 0.5 * second).sum(-1)
