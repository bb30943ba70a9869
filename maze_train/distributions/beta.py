"""Beta distributions over bounded boxes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from gymnasium import Space
from gymnasium.spaces import Box
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import softplus

from maze_train.core.types import Tensor, precise_dtype
from maze_train.distributions.base import Distribution, check_space
from maze_train.distributions.gaussian import BoxScale, VectorLayout

PROPOSALS = 8
"""Proposals per Gamma variate. The probability that all are rejected is below 0.05⁸ = 4e-11."""
MARGIN = 2.0**-24
"""Minimum distance of an action from 0 and 1: the spacing of float32 values below 1."""


class Beta(Distribution):
    """Independent Beta distributions on the bounds: a_i = low_i + (high_i - low_i) x_i.

    log p(a) = Σ_i [ (α_i - 1) log x_i + (β_i - 1) log(1 - x_i) - log B(α_i, β_i)
                     - log(high_i - low_i) ],  log B(α, β) = log Γ(α) + log Γ(β) - log Γ(α + β)

    `params` are r ++ s, [..., 2 D], with α = 1 + log(1 + exp(r)) and β = 1 + log(1 + exp(s)). The
    density is unimodal with support between the bounds, so actions are never clipped. The agent's
    actions are x, in (0, 1).

    Source: Chou et al. (2017), "Improving stochastic policy gradients in continuous control with
    deep reinforcement learning using the beta distribution", ICML, section 4.

    Sampling: x = g / (g + h) with g ~ Gamma(α) and h ~ Gamma(β), each the first accepted of 8
    proposals. Source: Marsaglia and Tsang (2000), "A simple method for generating gamma variables",
    ACM TOMS 26(3), section 6; the acceptance rate is at least 95 % for shapes >= 1.

    Args:
        space: The action space; all bounds must be finite.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Box

    def __init__(self, space: Box) -> None:
        check_space(type(self), space)
        self._scale = BoxScale(type(self), space)
        self._layout = VectorLayout(space)
        self.param_size = 2 * self._layout.size
        self.noise_size = 4 * PROPOSALS * self._layout.size
        self.critic_input_size = self._layout.size
        self.log_scale = self._scale.log_scale
        self.action_shape = space.shape
        self.action_dtype = torch.float32

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Sample normal, then uniform noise for the proposals of both variates, [*shape, 32 D]."""
        half = self.noise_size // 2
        noise[..., :half].normal_(generator=generator)
        noise[..., half:].uniform_(generator=generator)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Sample x in (0, 1), differentiable by the implicit gradient, [..., *space.shape]."""
        a, b = _excesses(params)
        x: Tensor = _BetaSample.apply(1.0 + a, 1.0 + b, noise)  # type: ignore[no-untyped-call]  # untyped in torch
        return self._layout.to_box(x.to(params.dtype))

    def mode(self, params: Tensor) -> Tensor:
        """Return (α - 1) / (α + β - 2), or the mean ½ if α = β = 1, [..., *space.shape]."""
        a, b = _excesses(params)
        total = a + b
        is_flat = total == 0
        peak = torch.where(is_flat, 0.5, a / torch.where(is_flat, 1.0, total))
        return self._layout.to_box(peak.clamp(MARGIN, 1.0 - MARGIN).to(params.dtype))

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-density of the environment's actions low + (high - low) · actions, [...]."""
        a, b = _excesses(params)
        x = self._layout.to_vector(actions).to(a.dtype)
        kernel = a * x.log() + b * (-x).log1p()
        total = (kernel - _log_beta(1.0 + a, 1.0 + b)).sum(-1) - self._scale.log_width
        return total.to(params.dtype)

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the environment's action, with ψ = (log Γ)', [...].

        Σ_i [ log B(α, β) - (α - 1) ψ(α) - (β - 1) ψ(β) + (α + β - 2) ψ(α + β) + log(high - low) ]
        """
        a, b = _excesses(params)
        alpha, beta = 1.0 + a, 1.0 + b
        slopes = a * torch.digamma(alpha) + b * torch.digamma(beta)
        slopes = slopes - (a + b) * torch.digamma(alpha + beta)
        total = (_log_beta(alpha, beta) - slopes).sum(-1) + self._scale.log_width
        return total.to(params.dtype)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """KL divergence of the distributions of x, equal to the divergence of the actions.

        Σ_i [ log B(α_q, β_q) - log B(α_p, β_p) + (α_p - α_q) ψ(α_p) + (β_p - β_q) ψ(β_p)
              + (α_q - α_p + β_q - β_p) ψ(α_p + β_p) ]
        """
        a_p, b_p = (1.0 + excess for excess in _excesses(params_p))
        a_q, b_q = (1.0 + excess for excess in _excesses(params_q))
        slopes = (a_p - a_q) * torch.digamma(a_p) + (b_p - b_q) * torch.digamma(b_p)
        slopes = slopes - (a_p - a_q + b_p - b_q) * torch.digamma(a_p + b_p)
        total = (_log_beta(a_q, b_q) - _log_beta(a_p, b_p) + slopes).sum(-1)
        return total.to(params_p.dtype)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return low + (high - low) · actions, rounded for integer boxes, [..., *space.shape]."""
        return self._scale.to_bounds(self._scale.prepared(actions) * 2 - 1)

    def from_env(self, actions: Tensor) -> Tensor:
        """Return (actions - low) / (high - low), clipped to [2⁻²⁴, 1 - 2⁻²⁴], float32."""
        x = (self._scale.from_bounds(actions) + 1) / 2
        return x.clamp(MARGIN, 1.0 - MARGIN).to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """Return the scaled action 2 x - 1, [..., D]."""
        return self._layout.to_vector(actions) * 2 - 1


class _BetaSample(torch.autograd.Function):
    """x(α, β, noise) with the implicit reparameterisation gradient.

    F(x; α, β) = const implies ∂x/∂α = -(∂F/∂α) / p(x), and the same for β. PyTorch implements this
    quotient for Dirichlet distributions, and (x, 1 - x) has a Dirichlet distribution.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, alpha: Tensor, beta: Tensor, noise: Tensor) -> Tensor:
        shapes = torch.stack((alpha, beta), -1)
        table = noise.to(shapes.dtype).reshape(
            (*noise.shape[:-1], 2, *shapes.shape[-2:], PROPOSALS)
        )
        variates = _gamma(shapes, *table.unbind(-4))
        x = (variates[..., 0] / variates.sum(-1)).clamp(MARGIN, 1.0 - MARGIN)
        ctx.save_for_backward(x, alpha, beta)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, alpha, beta = ctx.saved_tensors
        total = alpha + beta
        d_alpha = torch._dirichlet_grad(x, alpha, total) * (1 - x)
        d_beta = torch._dirichlet_grad(1 - x, beta, total) * -x
        return grad * d_alpha, grad * d_beta, None


def _gamma(shapes: Tensor, normal: Tensor, uniform: Tensor) -> Tensor:
    """Gamma variates: the first accepted proposal, or the first proposal if none is accepted.

    Args:
        shapes: Shape parameters >= 1, [...].
        normal: Standard normal values, [..., PROPOSALS].
        uniform: Uniform values in [0, 1), [..., PROPOSALS].

    Returns:
        Positive values, [...].
    """
    d = (shapes - 1.0 / 3.0).unsqueeze(-1)
    root = 1.0 + normal / (9.0 * d).sqrt()
    is_positive = root > 0
    # Proposals outside the support are never accepted; 1 keeps the logarithm finite.
    v = torch.where(is_positive, root, 1.0) ** 3
    bound = 0.5 * normal.square() + d * (1.0 - v + v.log())
    accepted = is_positive & (uniform.log() < bound)
    chosen = accepted.to(torch.uint8).argmax(-1, keepdim=True)
    return (d * v.gather(-1, chosen)).squeeze(-1)


def _excesses(params: Tensor) -> tuple[Tensor, Tensor]:
    """Return α - 1 and β - 1, float64 (float32 on MPS), each [..., D]."""
    # float64, because differences of log Γ and its derivatives are imprecise in float32 for peaked
    # distributions.
    a, b = softplus(params.to(precise_dtype(params.device))).chunk(2, -1)
    return a, b


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    """Return log B(α, β)."""
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
