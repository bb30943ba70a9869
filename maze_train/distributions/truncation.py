"""Integrals and quantiles of a normal density that is cut to an interval, safe far from its mean.

Differences of two almost equal tail probabilities, and probabilities that underflow, are avoided by
coordinates whose origin is the mode c, which is the mean clipped to the interval:

x = c ± σ y,   p(x) ∝ exp(-t y - ½ y²),   y in [lo, hi],   lo <= 0 <= hi,   t = |c - μ| / σ >= 0

with the sign that makes lo = 0 where the mean lies outside (t > 0). All quantities of such a
density are of ordinary size, however far the mean is. Everything here is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.special import erfcx, log_ndtr, ndtri

if TYPE_CHECKING:
    from maze_train.types import Tensor

__all__ = ["CutNormal"]

ROOT_2 = math.sqrt(2.0)
ROOT_HALF_PI = math.sqrt(0.5 * math.pi)
OPEN = 40.0
"""An end this many deviations from the mode is no end: exp(-½ 40²) < 1e-347."""
STEEPEST = 1e3
"""From this slope t on, ½ y² is below 1e-5 of t y wherever there is mass."""
NARROWEST = 1e-3
"""Below this width hi - lo, ½ y² changes the density by less than 1e-6."""
NEWTON_STEPS = 4


@dataclass(frozen=True)
class CutNormal:
    """Normal distributions cut to intervals, in the coordinates above; all fields are [..., D]."""

    mode: Tensor
    """c."""
    std: Tensor
    """Standard deviation > 0."""
    sign: Tensor
    """±1: x = mode + sign · std · y."""
    slope: Tensor
    """t."""
    low: Tensor
    """lo."""
    high: Tensor
    """hi."""
    width: Tensor
    """hi - lo; its gradient does not depend on the mode, as that of the difference would."""

    @classmethod
    def of(cls, mean: Tensor, log_std: Tensor, low: Tensor, high: Tensor) -> CutNormal:
        """The normal distribution cut to [low, high], whose ends are finite numbers."""
        inverse_std = (-log_std).exp()
        mode = mean.clamp(low, high)
        slope = (mode - mean).abs() * inverse_std
        below = ((low - mode) * inverse_std).clamp(min=-OPEN)
        above = ((high - mode) * inverse_std).clamp(max=OPEN)
        is_turned = mean > high
        return cls(
            mode=mode,
            std=log_std.exp(),
            sign=torch.where(is_turned, -1.0, 1.0).to(mean.dtype),
            slope=slope,
            low=torch.where(is_turned, -above, below),
            high=torch.where(is_turned, -below, above),
            width=((high - low) * inverse_std).clamp(max=2.0 * OPEN),
        )

    def exponent(self, x: Tensor) -> Tensor:
        """The t y + ½ y² of values x: minus the logarithm of the density, up to a constant."""
        y = self.sign * (x - self.mode) / self.std
        return y * (self.slope + 0.5 * y)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logarithm of M = ∫ exp(-t y - ½ y²) dy, and the means of y and y²."""
        scale, t, lo, hi = self._tamed()
        at_lo, at_hi = _kernel(t, lo), _kernel(t, hi)
        inside = ROOT_HALF_PI * (torch.erf(hi / ROOT_2) - torch.erf(lo / ROOT_2))
        mass = torch.where(t > 0, _mills(t) - at_hi * _mills(t + hi), inside)
        # By integration of the derivatives of exp(-t y - ½ y²) and of y exp(-t y - ½ y²).
        first = (at_lo - at_hi) / mass - t
        second = 1.0 - t * first + (lo * at_lo - hi * at_hi) / mass
        # Around the mean, the density of a narrow interval is flat, and the differences above lose
        # their digits.
        is_flat = (t == 0) & (self.width < NARROWEST)
        square = (lo * lo + lo * hi + hi * hi) / 3.0
        log_mass = torch.where(is_flat, self.width.log() - 0.5 * square, mass.log())
        first = torch.where(is_flat, 0.5 * (lo + hi), first)
        second = torch.where(is_flat, square, second)
        return log_mass - scale.log(), first / scale, second / scale.square()

    def quantile(self, noise: Tensor) -> Tensor:
        """The x whose probability from below is that of standard normal `noise`, differentiable."""
        scale, t, lo, hi = self._tamed()
        y = _quantile(t, lo, hi, self.sign * noise)
        return self.mode + self.sign * self.std * y / scale

    def _tamed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A factor r, and t / r, r lo, r hi: almost the same density, of r y instead of y.

        The factor is 1 unless the mean lies outside, and the density is so steep or the interval so
        narrow that y² does not matter; there it brings slope or width back to a size where no
        digits are lost.
        """
        r = torch.maximum(self.slope / STEEPEST, NARROWEST / self.width).clamp(min=1.0)
        r = torch.where(self.slope > 0, r, 1.0)
        return r, self.slope / r, self.low * r, (self.high * r).clamp(max=OPEN)


def _quantile(t: Tensor, lo: Tensor, hi: Tensor, noise: Tensor) -> Tensor:
    """`_Quantile` with types."""
    y: Tensor = _Quantile.apply(t, lo, hi, noise)  # type: ignore[no-untyped-call]
    return y


class _Quantile(torch.autograd.Function):
    """The y at which ∫_lo^y exp(-q) / ∫_lo^hi exp(-q) = Φ(ε), with q(y) = t y + ½ y².

    With F = Φ(ε), differentiating this equation gives ∂y/∂lo = (1 - F) exp(q(y) - q(lo)),
    ∂y/∂hi = F exp(q(y) - q(hi)) and ∂y/∂t = ∂y/∂lo + ∂y/∂hi - 1.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, lo: Tensor, hi: Tensor, noise: Tensor) -> Tensor:
        y = torch.where(t > 0, _outer_quantile(t, hi, noise), _inner_quantile(lo, hi, noise))
        y = y.clamp(lo, hi)
        ctx.save_for_backward(t, lo, hi, noise, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        t, lo, hi, noise, y = ctx.saved_tensors
        # In one exponential: F can be 0 where the other factor overflows.
        d_lo = torch.exp(log_ndtr(-noise) + (y - lo) * (t + 0.5 * (y + lo)))
        d_hi = torch.exp(log_ndtr(noise) + (y - hi) * (t + 0.5 * (y + hi)))
        return grad * (d_lo + d_hi - 1.0), grad * d_lo, grad * d_hi, None


def _inner_quantile(lo: Tensor, hi: Tensor, noise: Tensor) -> Tensor:
    """For t = 0: the smaller tail is inverted, so neither is rounded to 1."""
    mass = _normal_cdf(hi) - _normal_cdf(lo)
    left = _normal_cdf(lo) + _normal_cdf(noise) * mass
    right = _normal_cdf(-hi) + _normal_cdf(-noise) * mass
    y: Tensor = torch.where(left < right, ndtri(left), -ndtri(right))
    return y


def _outer_quantile(t: Tensor, hi: Tensor, noise: Tensor) -> Tensor:
    """For t > 0 and lo = 0: y with q(y) - log m(t + y) = w - log m(t), m as in `_mills`.

    Both sides are minus the logarithm of the mass above y. The left one is convex and increasing,
    its slope is 1 / m(t + y), and q(y) = w has a solution right of the wanted one: Newton's
    iteration descends from there to it without passing it. Four steps leave an error of 1e-13.
    """
    start = _mills(t)
    above = _kernel(t, hi) * _mills(t + hi) / start
    w = -(_normal_cdf(-noise) + _normal_cdf(noise) * above).log()
    y: Tensor = 2.0 * w / (t + (t.square() + 2.0 * w).sqrt())
    for _ in range(NEWTON_STEPS):
        ratio = _mills(t + y)
        y = y - ratio * (y * (t + 0.5 * y) - (ratio / start).log() - w)
    return y


def _normal_cdf(z: Tensor) -> Tensor:
    """Φ(z), with all digits also of small probabilities, which `torch.special.ndtr` loses."""
    return 0.5 * torch.erfc(z / -ROOT_2)


def _kernel(t: Tensor, y: Tensor) -> Tensor:
    """exp(-t y - ½ y²)."""
    return torch.exp(-y * (t + 0.5 * y))


def _mills(t: Tensor) -> Tensor:
    """Mills' ratio m(t) = ∫_0^∞ exp(-t y - ½ y²) dy of t >= 0."""
    ratio: Tensor = ROOT_HALF_PI * erfcx(t / ROOT_2)
    return ratio
