"""Gaussian distributions over boxes, and the layout and scaling of box actions."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box

from maze_train.core.checks import check_between
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.types import Array, Tensor, precise_dtype
from maze_train.distributions.base import (
    Constant,
    Distribution,
    ParamsGradient,
    check_space,
    env_dtype,
)


class VectorLayout:
    """Conversion between vectors [..., D] and actions [..., *space.shape]."""

    def __init__(self, space: Space[Any]) -> None:
        self._shape = space.shape or ()
        self.size = math.prod(self._shape)
        if not self.size:
            raise SpaceError(f"the action space {space} has no elements: remove it")

    def to_box(self, vectors: Tensor) -> Tensor:
        """[..., D] -> [..., *space.shape]."""
        if len(self._shape) == 1:
            return vectors
        return vectors.reshape((*vectors.shape[:-1], *self._shape))

    def to_vector(self, actions: Tensor) -> Tensor:
        """[..., *space.shape] -> [..., D]."""
        if len(self._shape) == 1:
            return actions
        batch = actions.shape[: actions.dim() - len(self._shape)]
        return actions.reshape((*batch, self.size))


class InnerBound(Constant):
    """Bound of a box, rounded towards the interior in dtypes that cannot represent it.

    Args:
        bound: The bound.
        towards: Infinity with the sign of the direction of the interior.
    """

    def __init__(self, bound: Array, towards: float) -> None:
        super().__init__(bound.astype(np.float64))
        # Python compares these numbers exactly, also integers with floats.
        self._exact, self._towards = bound.flatten().tolist(), towards

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the values as `dtype`, rounded towards the interior, on the CPU."""
        values = super().rounded(dtype)
        pairs = zip(values.flatten().tolist(), self._exact, strict=True)
        outside = torch.tensor([v < b if self._towards > 0 else v > b for v, b in pairs])
        if outside.any():
            inner = values.nextafter(torch.full_like(values, self._towards))
            values = torch.where(outside.view_as(values), inner, values)
        return values


class BoxBounds:
    """Bounds and dtype of a box.

    `centre` and `half_width` scale elements to [-1, 1]. If a bound is infinite, the values are 0
    and 1; `half_width` is also 1 if the interval is a single point.
    """

    def __init__(self, space: Box) -> None:
        self._env_dtype = env_dtype(space)
        self._is_integer = not self._env_dtype.is_floating_point
        # float32 cannot represent all integers of an int32 box; float64 can, except for int64.
        self._work_dtype = torch.float64 if self._is_integer else self._env_dtype
        self._low, self._high = InnerBound(space.low, math.inf), InnerBound(space.high, -math.inf)
        # Halved before subtracting, because the difference of the widest bounds would overflow.
        low, high = space.low.astype(np.float64) / 2, space.high.astype(np.float64) / 2
        is_finite = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(is_finite, low, -0.5), np.where(is_finite, high, 0.5)
        half_width = np.where(low < high, high - low, 1.0)
        self.centre, self.half_width = Constant(high + low), Constant(half_width)
        self.log_scale = float(np.log(half_width).sum())
        """Σ_i log((high_i - low_i) / 2)."""

    def prepared(self, values: Tensor) -> Tensor:
        """Convert values to the dtype of computations with these bounds."""
        return values.to(precise_dtype(values.device, self._work_dtype))

    def fit(self, values: Tensor) -> Tensor:
        """Clip `prepared` values to the bounds, round for integer boxes, cast to the dtype."""
        if self._is_integer:
            values = values.round()
        return self.clip(values).to(precise_dtype(values.device, self._env_dtype))

    def clip(self, values: Tensor) -> Tensor:
        """Clip values to the bounds."""
        return values.clamp(self._low.like(values), self._high.like(values))

    def to_unit(self, values: Tensor) -> Tensor:
        """Scale dimensions with finite bounds to [-1, 1], [..., *space.shape]."""
        return (values - self.centre.like(values)) / self.half_width.like(values)


class BoxScale:
    """Affine map v -> c + h v from [-1, 1] to the finite bounds of a box.

    c = (high + low) / 2 and h = (high - low) / 2, per dimension.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    def __init__(self, family: type[Distribution], space: Box) -> None:
        _check_intervals(family, space)
        self._bounds = BoxBounds(space)
        self.log_scale = self._bounds.log_scale
        self.log_width = self.log_scale + math.prod(space.shape) * math.log(2.0)
        """Σ_i log(high_i - low_i)."""

    def to_bounds(self, values: Tensor) -> Tensor:
        """Map `prepared` values in [-1, 1] to the box, rounded for integer boxes."""
        centre, half_width = self._bounds.centre.like(values), self._bounds.half_width.like(values)
        # Rounding errors can exceed the bounds by one ulp, and strict environments check bounds.
        return self._bounds.fit(torch.addcmul(centre, half_width, values))

    def prepared(self, values: Tensor) -> Tensor:
        """Convert values to the dtype of `to_bounds`."""
        return self._bounds.prepared(values)

    def from_bounds(self, actions: Tensor) -> Tensor:
        """Map actions of the environment to [-1, 1], float64 (float32 on MPS)."""
        return self._bounds.to_unit(actions.to(precise_dtype(actions.device)))


def _check_intervals(family: type[Distribution], space: Box) -> None:
    """Raise if the box cannot be scaled to [-1, 1]."""
    name = family.__name__
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise SpaceError(
            f"{name} requires finite bounds, the action space is {space}: use finite bounds, or "
            "set model.distributions.Box=diagonal_gaussian"
        )
    if not (space.low < space.high).all():
        raise SpaceError(
            f"{name} requires low < high in every dimension, the action space is {space}: remove "
            "the constant dimensions, or set model.distributions.Box=diagonal_gaussian"
        )


HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
LOG_2 = math.log(2.0)
QUADRATURE_NODES = 32
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Default limits of a state-dependent log std."""
ATANH_MARGIN = 1e-6


class GaussianFamily(Distribution):
    """Base class of families over boxes with params μ ++ log σ, [..., 2 D].

    Args:
        space: The action space.
        state_dependent_std: Whether the network outputs log σ; otherwise log σ is a free parameter.
        initial_log_std: Initial log σ; if the std is state-dependent, this value is added to the
            network output.
        log_std_min: Lower limit of log σ; None: -20 with a state-dependent std, else no limit.
        log_std_max: Upper limit of log σ; None: 2 with a state-dependent std, else no limit.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Box
    free_params_move_mode = False

    def __init__(
        self,
        space: Box,
        state_dependent_std: bool = False,
        initial_log_std: float = 0.0,
        log_std_min: float | None = None,
        log_std_max: float | None = None,
    ) -> None:
        check_space(type(self), space)
        if state_dependent_std is True:
            log_std_min = LOG_STD_MIN if log_std_min is None else log_std_min
            log_std_max = LOG_STD_MAX if log_std_max is None else log_std_max
        _check_settings(state_dependent_std, initial_log_std, log_std_min, log_std_max)
        self._state_dependent = state_dependent_std
        self._initial_log_std = float(initial_log_std)
        self._limits = log_std_min, log_std_max
        self._is_limited = self._limits != (None, None)
        self._layout = VectorLayout(space)
        self._bounds = BoxBounds(space)
        size = self._layout.size
        self.param_size, self.noise_size = 2 * size, size
        self.free_param_size = 0 if state_dependent_std else size
        self.action_shape = space.shape
        self.action_dtype = torch.float32
        self.critic_input_size = size
        self._log_prob_constant = -size * HALF_LOG_2PI
        self._entropy_constant = size * (0.5 + HALF_LOG_2PI)

    def initial_free_params(self) -> Tensor:
        """Return `initial_log_std` for each dimension, [D]; empty if the std is state-dependent."""
        return torch.full((self.free_param_size,), self._initial_log_std)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Return μ + σ · noise, differentiable, [..., *space.shape]."""
        mean, log_std = self._split(params)
        return self._layout.to_box(torch.addcmul(mean, log_std.exp(), noise))

    def mode(self, params: Tensor) -> Tensor:
        """Return μ, [..., *space.shape]."""
        return self._layout.to_box(self._split(params)[0])

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log-density of the actions, [...]."""
        return self._log_density(*self._split(params), self._layout.to_vector(actions))

    def entropy(self, params: Tensor) -> Tensor:
        """Entropy of the actions in nats, [...]."""
        return self._entropy(*self._split(params))

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy from one split of the params, [...] each."""
        mean, log_std = self._split(params)
        log_prob = self._log_density(mean, log_std, self._layout.to_vector(actions))
        return log_prob, self._entropy(mean, log_std)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i [ log(σ_q/σ_p) + (σ_p² + (μ_p - μ_q)²) / (2 σ_q²) - ½ ], [...]."""
        mean_p, log_std_p = self._split(params_p)
        mean_q, log_std_q = self._split(params_q)
        log_ratio = log_std_p - log_std_q
        distance = (mean_p - mean_q) * (-log_std_q).exp()
        return (0.5 * ((2.0 * log_ratio).exp() + distance.square() - 1.0) - log_ratio).sum(-1)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log σ, each [..., D]."""
        mean, log_std = params.chunk(2, -1)
        if self._state_dependent and self._initial_log_std:
            log_std = log_std + self._initial_log_std
        return mean, self._limited(log_std)

    def _limited(self, log_std: Tensor) -> Tensor:
        """Clamp log σ to the limits, if any; the gradient is 0 outside the limits."""
        return log_std.clamp(*self._limits) if self._is_limited else log_std

    def limit_free_params(self, params: Tensor) -> None:
        """Clamp a state-independent log σ [D] to its limits, in place.

        Outside the limits the gradient is 0, so a free parameter would stay constant. Network
        outputs still change, because the gradients of other states change the weights.
        """
        if self._is_limited:
            params.clamp_(*self._limits)

    @abstractmethod
    def _log_density(self, mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
        """Log-density of actions x, [..., D] -> [...]."""

    @abstractmethod
    def _entropy(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Entropy of the distribution, [...]."""


class DiagonalGaussian(GaussianFamily):
    """Independent normal distributions: a_i = μ_i + σ_i ε_i, ε_i ~ N(0, 1).

    log p(a) = -Σ_i [ (a_i - μ_i)² / (2 σ_i²) + log σ_i + ½ log 2π ]

    `params` are μ ++ log σ, [..., 2 D], where D is the number of elements of the box.

    For a bounded box this is the *clipped* Gaussian, as in most PPO implementations: the unclipped
    action is stored and has the density above, and `to_env` clips actions for the environment. If
    much of the probability mass lies outside the bounds, actions on the bounds are frequent.

    Args:
        space: The action space; bounds may be infinite.
        state_dependent_std: Whether the network outputs log σ; otherwise log σ is a free parameter.
        initial_log_std: Initial log σ; if the std is state-dependent, this value is added to the
            network output.
        log_std_min: Lower limit of log σ; None: -20 with a state-dependent std, else no limit.
        log_std_max: Upper limit of log σ; None: 2 with a state-dependent std, else no limit.
    """

    def to_env(self, actions: Tensor) -> Tensor:
        """Clip actions to the bounds (and round for integer boxes), [..., *space.shape]."""
        return self._bounds.fit(self._bounds.prepared(actions))

    def from_env(self, actions: Tensor) -> Tensor:
        """Return the actions as float32, [..., *space.shape]."""
        return actions.to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """Clip like `to_env` without rounding, and scale bounded dimensions, [..., D]."""
        return self._layout.to_vector(self._bounds.to_unit(self._bounds.clip(actions)))

    def unit_mode(self, params: Tensor) -> Tensor:
        """Return μ with bounded dimensions scaled, [..., D]; may lie outside [-1, 1]."""
        return self._layout.to_vector(self._bounds.to_unit(self.mode(params)))

    def _log_density(self, mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
        return self._log_prob_constant - _surprise(mean, log_std, x).sum(-1)

    def _entropy(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Sum over dimensions of log σ_i + ½ + ½ log 2π."""
        return log_std.sum(-1) + self._entropy_constant

    def analytic_log_prob_and_entropy(
        self, params: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, ParamsGradient]:
        """Compute log-probability and entropy without autograd, and their analytic gradient.

        Requires a state-independent log σ.

        With z = (a - μ) / σ and s = log σ:

        ∂log p/∂μ = z / σ,  ∂log p/∂s = z² - 1,  ∂H/∂s = 1.

        Outside the limits of s the derivatives with respect to s are 0.
        """
        mean, free = params.chunk(2, -1)
        log_std = self._limited(free)
        dims = mean.shape[-1]
        inverse_std = log_std.neg().exp_()
        z = (actions.view_as(mean) - mean) * inverse_std
        z_squared = z.square()
        total_log_std = log_std.sum(-1)
        log_prob = (z_squared.sum(-1) * -0.5).add_(-dims * HALF_LOG_2PI).sub_(total_log_std)

        def gradient(g: Tensor, h: float | Tensor) -> Tensor:
            columns = g.unsqueeze(-1)
            d_log_std = torch.addcmul(h - columns, columns, z_squared)
            if self._is_limited:
                d_log_std *= log_std == free
            return torch.cat((z * inverse_std * columns, d_log_std), -1)

        return log_prob, total_log_std + dims * (0.5 + HALF_LOG_2PI), gradient


class SquashedGaussian(GaussianFamily):
    """Gaussian squashed to the bounds: a = c + h tanh(u), u_i = μ_i + σ_i ε_i, ε_i ~ N(0, 1).

    c = (high + low) / 2 and h = (high - low) / 2 per dimension. By the change of variables

    log p(a) = log N(u; μ, σ) - Σ_i [ log h_i + log(1 - tanh² u_i) ]
    log(1 - tanh² u) = 2 (log 2 - u - softplus(-2u)) = 2 (log 2 - log(eᵘ + e⁻ᵘ)),

    The right-hand side avoids differences of nearly equal values, so values and gradients are
    finite for saturated actions. `params` are μ ++ log σ, [..., 2 D]. The agent's actions are u.

    `mode` is the mode of u; c + h tanh(μ) is the median of the environment's action, which is
    customary for evaluation. The density of the action may have its maximum elsewhere (at the
    bounds for large σ).

    The entropy is H(a) = H(u) + Σ_i E[ log |da_i / du_i| ], with the expectation computed by
    Gauss-Hermite quadrature with 32 nodes, deterministic and differentiable in `params`. The error
    per dimension is below 1e-7 nats for σ <= 1, 2e-3 for σ <= e, and 0.1 for σ <= e². The KL
    divergence equals the divergence of the Gaussians of u, because bijections preserve KL
    divergences.

    Source: Haarnoja et al. (2018), arXiv:1801.01290, appendix C, with scaling to the bounds added.

    Args:
        space: The action space; all bounds must be finite.
        state_dependent_std: Whether the network outputs log σ; otherwise log σ is a free parameter.
        initial_log_std: Initial log σ; if the std is state-dependent, this value is added to the
            network output.
        log_std_min: Lower limit of log σ; None: -20 with a state-dependent std, else no limit.
        log_std_max: Upper limit of log σ; None: 2 with a state-dependent std, else no limit.

    Raises:
        SpaceError: If a bound is infinite or an interval is empty.
    """

    def __init__(
        self,
        space: Box,
        state_dependent_std: bool = True,
        initial_log_std: float = 0.0,
        log_std_min: float | None = None,
        log_std_max: float | None = None,
    ) -> None:
        super().__init__(space, state_dependent_std, initial_log_std, log_std_min, log_std_max)
        self._scale = BoxScale(type(self), space)
        # log h_i + log(1 - tanh² u_i) = log(high_i - low_i) + log 2 - 2 log(eᵘ + e⁻ᵘ).
        log_scale = self._scale.log_width + self._layout.size * LOG_2
        self._log_prob_constant -= log_scale
        self._entropy_constant += log_scale
        self.log_scale = self._scale.log_scale
        self._unit_constant = -self._layout.size * (HALF_LOG_2PI + 2.0 * LOG_2)
        nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
        self._nodes, self._weights = Constant(nodes), Constant(weights / weights.sum())

    def to_env(self, actions: Tensor) -> Tensor:
        """Return c + h tanh(actions), rounded for integer boxes, [..., *space.shape]."""
        return self._scale.to_bounds(self._scale.prepared(actions).tanh())

    def from_env(self, actions: Tensor) -> Tensor:
        """Return the pre-tanh u = atanh((actions - c) / h), float32, [..., *space.shape].

        The argument is clipped to ±(1 - 1e-6), so an action on a bound becomes |u| ≈ 7.25.
        """
        limit = 1.0 - ATANH_MARGIN
        squashed = self._scale.from_bounds(actions)
        return squashed.clamp(-limit, limit).atanh().to(self.action_dtype)

    def critic_input(self, actions: Tensor) -> Tensor:
        """Return the squashed action tanh(u), [..., D]."""
        return self._layout.to_vector(actions).tanh()

    def reparameterized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return tanh(u), [..., D], and its log-density, [...], which do not depend on the bounds.

        log p = Σ_i [ -½ ε_i² - log σ_i - ½ log 2π - log(1 - tanh² u_i) ]
        """
        mean, log_std = self._split(params)
        u = torch.addcmul(mean, log_std.exp(), noise)
        return u.tanh(), self._unit_log_density(log_std, noise, u)

    def _unit_log_density(self, log_std: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        """Log-density of tanh(u), u = μ + σ · noise."""
        surprise = torch.addcmul(log_std, noise, noise, value=0.5)
        return self._unit_constant - _squashed(surprise, u).sum(-1)

    def _log_density(self, mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
        return self._log_prob_constant - _squashed(_surprise(mean, log_std, x), x).sum(-1)

    def _entropy(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """H(u) + Σ_i E[ log |da_i / du_i| ] by Gauss-Hermite quadrature."""
        u = torch.addcmul(mean.unsqueeze(-1), log_std.exp().unsqueeze(-1), self._nodes.like(mean))
        bends = torch.logaddexp(u, -u) @ self._weights.like(mean)
        return torch.sub(log_std, bends, alpha=2).sum(-1) + self._entropy_constant


def _surprise(mean: Tensor, log_std: Tensor, x: Tensor) -> Tensor:
    """-log N(x; mean, std) - ½ log 2π of each dimension, [..., D]."""
    scaled = (x - mean) * (-log_std).exp()
    return torch.addcmul(log_std, scaled, scaled, value=0.5)


def _squashed(surprise: Tensor, u: Tensor) -> Tensor:
    """Convert the surprise of u to the surprise of tanh(u), up to a constant; each [..., D]."""
    return torch.sub(surprise, torch.logaddexp(u, -u), alpha=2)


def _check_settings(
    state_dependent_std: bool,
    initial_log_std: float,
    log_std_min: float | None,
    log_std_max: float | None,
) -> None:
    """Raise if a setting has a wrong type or is out of range; keys are relative to the family."""
    if not isinstance(state_dependent_std, bool):
        raise ConfigError("state_dependent_std", "expected true or false", state_dependent_std)
    limits = {"log_std_min": log_std_min, "log_std_max": log_std_max}
    given = {key: value for key, value in limits.items() if value is not None}
    for key, value in {**given, "initial_log_std": initial_log_std}.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(key, "expected a number", value)
        # At these limits, the variance is a normal float32 value.
        check_between(key, value, -40.0, 40.0)
    low, high = given.get("log_std_min", -math.inf), given.get("log_std_max", math.inf)
    if low >= high:
        raise ConfigError("log_std_min", f"expected less than log_std_max={high:g}", log_std_min)
    check_between("initial_log_std", initial_log_std, low, high)
