"""Distributions over finite sets of actions and over binary vectors."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import Space
from gymnasium.spaces import Discrete, MultiBinary, MultiDiscrete
from torch.nn.functional import log_softmax, logsigmoid, softplus

from maze_train.core.types import Tensor
from maze_train.distributions.base import (
    Constant,
    Distribution,
    ParamsGradient,
    check_space,
    env_dtype,
)
from maze_train.distributions.gaussian import VectorLayout

MIN_LOG_PROB = -1e4
"""Log-probabilities below this value correspond to probability 0 in every dtype. The value is
finite, so that products of probability and log-probability are 0."""


def impossible_logit(dtype: torch.dtype) -> float:
    """Return the logit of a masked action, whose probability is exactly 0.

    The value is finite, so that sums and products of logits are never NaN. The logit is half of the
    minimum of the dtype, because normalisation subtracts from the logit.
    """
    return torch.finfo(dtype).min / 2


def weighted(probs: Tensor, values: Tensor) -> Tensor:
    """Return p x, or 0 if p is 0, even for infinite or NaN x; gradients likewise."""
    return probs * values.masked_fill(probs == 0, 0.0)


class CategoricalFamily(Distribution):
    """Base class of families of independent categorical choices.

    Subclasses arrange the logits in a table; its last dimension contains the actions of one choice.

    Args:
        space: The action space; the agent's actions start at 0.
        start: Smallest action of the environment, with the shape of an action.
        num_choices: Number of actions summed over all choices.
    """

    action_dtype = torch.int64
    table_dims: tuple[int, ...]
    """Dimensions of the table that belong to one action."""

    def __init__(self, space: Space[Any], start: npt.ArrayLike, num_choices: int) -> None:
        self.param_size = self.noise_size = self.num_choices = num_choices
        starts = np.asarray(start, dtype=np.int64)
        self.action_shape = tuple(int(n) for n in starts.shape)
        self._start = Constant(starts) if starts.any() else None
        self._env_dtype = env_dtype(space)

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Sample Gumbel noise, [*shape, num_choices]."""
        noise.exponential_(generator=generator)
        # A sample of exactly 0 would become infinite noise, which could select a masked action.
        noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_()

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Return argmax(params + noise) per choice, int64, [..., *action_shape]."""
        return self.mode(params + noise)

    def mode(self, params: Tensor) -> Tensor:
        """Return the first action of maximal logit per choice, int64, [..., *action_shape]."""
        return self._table(params).argmax(-1)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Σ_k log P_k(a_k), [...]."""
        return self._pick(log_softmax(self._table(params), -1), actions)

    def entropy(self, params: Tensor) -> Tensor:
        """-Σ_k Σ_a P_k(a) log P_k(a), [...]."""
        return self._entropy(log_softmax(self._table(params), -1))

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_k Σ_a P_k(a) (log P_k(a) - log Q_k(a)), [...]."""
        log_p = log_softmax(self._table(params_p), -1)
        log_q = log_softmax(self._table(params_q), -1)
        return weighted(log_p.exp(), log_p - log_q).sum(self.table_dims)

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy from one normalisation of the logits, [...] each."""
        log_probs = log_softmax(self._table(params), -1)
        return self._pick(log_probs, actions), self._entropy(log_probs)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return actions counted from the start of the space, with the dtype of the space."""
        shifted = actions if self._start is None else actions + self._start.like(actions)
        return shifted.to(self._env_dtype)

    def from_env(self, actions: Tensor) -> Tensor:
        """Return actions counted from 0, int64, [..., *action_shape]."""
        counted = actions.to(self.action_dtype)
        return counted if self._start is None else counted - self._start.like(counted)

    @abstractmethod
    def _table(self, params: Tensor) -> Tensor:
        """Return the logits by choice, [..., n] or [..., K, max n_k]."""

    @abstractmethod
    def _pick(self, log_probs: Tensor, actions: Tensor) -> Tensor:
        """Sum the table entries selected by `actions` over all choices, [...]."""

    def _entropy(self, log_probs: Tensor) -> Tensor:
        return -weighted(log_probs.exp(), log_probs).sum(self.table_dims)


class Categorical(CategoricalFamily):
    """One choice among n actions: P(a) = exp(l_a) / Σ_b exp(l_b).

    `params` are the logits l, [..., n]. Masked actions have the logit -inf, or a large negative
    logit: their probability is 0, and they do not contribute to entropy and KL divergence. If all
    logits are -inf, all results are NaN.

    Sampling uses the Gumbel-max trick: argmax_a (l_a + g_a) with g_a = -log e_a, e_a ~ Exp(1), is
    distributed exactly as P and is a function of logits and noise. Source: Maddison et al. (2014),
    arXiv:1411.0030, section 2.

    Args:
        space: The action space. The agent's actions start at 0, and the environment's actions start
            at the first action of the space.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Discrete
    table_dims = (-1,)

    def __init__(self, space: Discrete) -> None:
        check_space(type(self), space)
        super().__init__(space, space.start, int(space.n))

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Log-probabilities of all actions, [..., n]."""
        return log_softmax(params, -1)

    def choices(self, actions: Tensor) -> Tensor:
        """Return the actions, [..., 1]."""
        return actions.unsqueeze(-1)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Return the logarithm of the number of legal actions, [...]."""
        return _log_legal(params)

    def _table(self, params: Tensor) -> Tensor:
        return params

    def _pick(self, log_probs: Tensor, actions: Tensor) -> Tensor:
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def analytic_log_prob_and_entropy(
        self, params: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, ParamsGradient]:
        """Compute log-probability and entropy without autograd, and their analytic gradient.

        ∂log P(a)/∂l_j = 1[j = a] - P(j), ∂H/∂l_j = -P(j) (log P(j) + H).
        """
        log_probs = log_softmax(params, -1)
        probs = log_probs.exp()
        finite = log_probs.clamp(min=MIN_LOG_PROB)
        entropy = (probs * finite).sum(-1).neg_()
        index = actions.unsqueeze(-1)

        def gradient(g: Tensor, h: float | Tensor) -> Tensor:
            columns = g.unsqueeze(-1)
            result = (probs * columns).neg_().scatter_add_(-1, index, columns)
            if isinstance(h, torch.Tensor) or h:
                result.addcmul_(probs * -h, finite + entropy.unsqueeze(-1))
            return result

        return log_probs.gather(-1, index).squeeze(-1), entropy, gradient


class MultiCategorical(CategoricalFamily):
    """K independent choices among n_1 ... n_K actions: P(a) = Π_k P_k(a_k).

    `params` are the concatenated logits of all choices, [..., Σ n_k], in the row-major order of
    `space.nvec`. Computations use a table [..., K, max n_k]: a view of the params if all n_k are
    equal, otherwise a copy padded with logits of probability 0.

    Args:
        space: The action space; `nvec` may have any shape. The agent's actions start at 0, and the
            environment's actions start at the first action of the space.
    """

    space_type: ClassVar[type[Space[Any]] | None] = MultiDiscrete
    table_dims = (-2, -1)

    def __init__(self, space: MultiDiscrete) -> None:
        check_space(type(self), space)
        sizes = np.asarray(space.nvec, dtype=np.int64).ravel()
        super().__init__(space, space.start, int(sizes.sum()))
        self._table_shape = (len(sizes), int(sizes.max()))
        self._is_even = bool((sizes == sizes[0]).all())
        # Index of each logit in the flattened table [K * max n_k].
        in_table = np.arange(self._table_shape[1]) < sizes[:, None]
        self._cells = Constant(np.flatnonzero(in_table))
        self._offsets = Constant(sizes.cumsum() - sizes)

    def mode(self, params: Tensor) -> Tensor:
        """Return the first action with the largest logit per choice, int64, [..., *nvec.shape]."""
        return super().mode(params).reshape((*params.shape[:-1], *self.action_shape))

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Log-probabilities of all actions of all choices, [..., Σ n_k]."""
        log_probs = log_softmax(self._table(params), -1).flatten(-2)
        if not self._is_even:
            log_probs = log_probs.index_select(-1, self._cells.on(params.device, torch.int64))
        return log_probs

    def choices(self, actions: Tensor) -> Tensor:
        """Return indices of the actions in the concatenated choices, [..., K]."""
        batch = actions.shape[: actions.dim() - len(self.action_shape)]
        return actions.reshape((*batch, self._table_shape[0])) + self._offsets.like(actions)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Return the log number of legal actions, summed over sub-actions, [...]."""
        return _log_legal(self._table(params)).sum(-1)

    def _table(self, params: Tensor) -> Tensor:
        if not self._is_even:
            rows, columns = self._table_shape
            filler = impossible_logit(params.dtype)
            table = params.new_full((*params.shape[:-1], rows * columns), filler)
            cells = self._cells.on(params.device, torch.int64)
            params = table.index_copy(-1, cells, params)
        return params.reshape((*params.shape[:-1], *self._table_shape))

    def _pick(self, log_probs: Tensor, actions: Tensor) -> Tensor:
        chosen = actions.reshape((*log_probs.shape[:-1], 1))
        return log_probs.gather(-1, chosen).sum((-2, -1))


def _log_legal(logits: Tensor) -> Tensor:
    """Return the logarithm of the number of legal actions, [...], for logits [..., n]."""
    count = (logits > impossible_logit(logits.dtype)).sum(-1)
    # Clamped to 1, so that the result is finite if no action is legal.
    return count.clamp_(min=1).to(logits.dtype).log()


LOG_2 = math.log(2.0)
MIN_UNIFORM = 2.0**-25
"""Replacement for uniform samples of 0: half the spacing between uniform float32 values."""


class Bernoulli(Distribution):
    """Independent bits: P(a) = Π_i s(l_i) if a_i = 1 else 1 - s(l_i), s(l) = 1 / (1 + exp(-l)).

    `params` are the logits l, [..., D], where D is the number of bits. All functions use
    log s(l) = -log(1 + exp(-l)) and 1 - s(l) = s(-l), so results are accurate for large logits.

    Sampling adds logistic noise to the logits: l + log(u / (1 - u)) > 0 with uniform u has the
    probability s(l), by inversion of the logistic distribution function s.

    Args:
        space: The action space, of any shape.
    """

    space_type: ClassVar[type[Space[Any]] | None] = MultiBinary

    def __init__(self, space: MultiBinary) -> None:
        check_space(type(self), space)
        self._layout = VectorLayout(space)
        self.param_size = self.noise_size = self._layout.size
        self.num_choices = 2 * self._layout.size
        self.action_shape = tuple(space.shape)
        self.action_dtype = torch.int8
        self._env_dtype = env_dtype(space)

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Sample standard logistic noise, [*shape, D]."""
        noise.uniform_(generator=generator).logit_(MIN_UNIFORM)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Return the bits [params + noise > 0], int8, [..., *space.shape]."""
        return self.mode(params + noise)

    def mode(self, params: Tensor) -> Tensor:
        """Return the more probable value of each bit (0 if tied), int8, [..., *shape]."""
        return self._layout.to_box(params > 0).to(self.action_dtype)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Σ_i log s(l_i) for ones and log s(-l_i) for zeros, [...]."""
        signs = self._layout.to_vector(actions).to(params.dtype) * 2 - 1
        return logsigmoid(signs * params).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Σ_i [ log(1 + exp(-|l_i|)) + |l_i| s(-|l_i|) ], in [0, D log 2], [...]."""
        # The entropy is even in l. This sign avoids differences of large values.
        size = params.abs()
        return (softplus(-size) + weighted(torch.sigmoid(-size), size)).sum(-1)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i Σ_a P_i(a) (log P_i(a) - log Q_i(a)), [...]."""
        ones = weighted(torch.sigmoid(params_p), logsigmoid(params_p) - logsigmoid(params_q))
        zeros = weighted(torch.sigmoid(-params_p), logsigmoid(-params_p) - logsigmoid(-params_q))
        return (ones + zeros).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Return the bits with the dtype of the space, [..., *space.shape]."""
        return actions.to(self._env_dtype)

    def from_env(self, actions: Tensor) -> Tensor:
        """Return the bits as int8, [..., *space.shape]."""
        return actions.to(self.action_dtype)

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Log-probabilities of 0 and 1, bit by bit, [..., 2 D]."""
        return logsigmoid(torch.stack((-params, params), -1)).flatten(-2)

    def choices(self, actions: Tensor) -> Tensor:
        """Return twice the index of each bit plus the value of the bit, [..., D]."""
        bits = self._layout.to_vector(actions).to(torch.int64)
        return bits + torch.arange(0, self.num_choices, 2, device=bits.device)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Return log 2 times the number of bits for which 1 is legal, [...]."""
        return (params > impossible_logit(params.dtype)).sum(-1).to(params.dtype) * LOG_2
