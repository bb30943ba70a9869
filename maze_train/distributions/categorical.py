"""Distributions over finite sets of actions."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from torch.nn.functional import log_softmax

from maze_train.distributions.base import Constant, Distribution, check_space, env_dtype

if TYPE_CHECKING:
    from gymnasium import Space

    from maze_train.distributions.base import ParamsGradient
    from maze_train.types import Tensor


LEAST_LOG_PROB = -1e4
"""Below this probabilities are 0 in every dtype; finite, so that products with them are 0."""


def impossible_logit(dtype: torch.dtype) -> float:
    """The logit of an action that must never be taken: its probability is exactly 0.

    Finite, so that no sum or product of logits is nan; half of the lowest number, because the
    normalisation subtracts from it.
    """
    return torch.finfo(dtype).min / 2


def weighted(probs: Tensor, values: Tensor) -> Tensor:
    """The products p x, 0 where p is 0, even if x is infinite or nan; so are their gradients."""
    return probs * values.masked_fill(probs == 0, 0.0)


class CategoricalFamily(Distribution):
    """Base of the families of independent choices, each of one action out of several.

    A subclass lays the logits out as a table with the actions of a choice in its last dimension.

    Args:
        space: The action space; the agent's actions are counted from 0.
        start: The number from which the environment counts them, of the shape of an action.
        num_choices: Number of actions of all choices together.
    """

    action_dtype = torch.int64
    table_dims: tuple[int, ...]
    """The dimensions of the table that one action fills."""

    def __init__(self, space: Space[Any], start: Any, num_choices: int) -> None:
        self.param_size = self.noise_size = self.num_choices = num_choices
        starts = np.asarray(start, dtype=np.int64)
        self.action_shape = tuple(int(n) for n in starts.shape)
        self._start = Constant(starts) if starts.any() else None
        self._env_dtype = env_dtype(space)

    def _fill(self, noise: Tensor, generator: torch.Generator | None) -> None:
        """Draw Gumbel noise, [*shape, num_choices]."""
        noise.exponential_(generator=generator)
        # A draw of exactly 0 would become infinite noise, which could select a forbidden action.
        noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_()

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """The actions argmax(params + noise) of each choice, int64, [..., *action_shape]."""
        return self.mode(params + noise)

    def mode(self, params: Tensor) -> Tensor:
        """The first action with the largest logit of each choice, int64, [..., *action_shape]."""
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
        """Both from one normalisation of the logits, each [...]."""
        log_probs = log_softmax(self._table(params), -1)
        return self._pick(log_probs, actions), self._entropy(log_probs)

    def to_env(self, actions: Tensor) -> Tensor:
        """Actions counted from `space.start`, in the type of the space, [..., *action_shape]."""
        shifted = actions if self._start is None else actions + self._start.like(actions)
        return shifted.to(self._env_dtype)

    def from_env(self, actions: Tensor) -> Tensor:
        """Actions counted from 0, int64, [..., *action_shape]."""
        counted = actions.to(self.action_dtype)
        return counted if self._start is None else counted - self._start.like(counted)

    @abstractmethod
    def _table(self, params: Tensor) -> Tensor:
        """The logits by choice, [..., n] or [..., K, max n_k]."""

    @abstractmethod
    def _pick(self, log_probs: Tensor, actions: Tensor) -> Tensor:
        """Sum over choices of the entries of a table that `actions` name, [...]."""

    def _entropy(self, log_probs: Tensor) -> Tensor:
        return -weighted(log_probs.exp(), log_probs).sum(self.table_dims)


class Categorical(CategoricalFamily):
    """One choice among n actions: P(a) = exp(l_a) / Σ_b exp(l_b).

    `params` are the logits l, [..., n]. A forbidden action is one with the logit -inf, or with a
    large negative one: it has probability 0 and adds nothing to entropy and divergence. Where all
    logits are -inf there is no distribution: everything is nan.

    Sampling uses the Gumbel-max trick: argmax_a (l_a + g_a) with g_a = -log e_a, e_a ~ Exp(1), has
    exactly the distribution P, and is a function of logits and noise. Source: Maddison et al.
    (2014), arXiv:1411.0030, section 2.

    Args:
        space: The action space; the agent's actions are counted from 0, those of the environment
            from `space.start`.
    """

    space_type: ClassVar[type[Space[Any]] | None] = Discrete
    table_dims = (-1,)

    def __init__(self, space: Discrete) -> None:
        check_space(type(self), space)
        super().__init__(space, space.start, int(space.n))

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Logarithms of P(a) of all actions, [..., n]."""
        return log_softmax(params, -1)

    def choices(self, actions: Tensor) -> Tensor:
        """The actions, [..., 1]."""
        return actions.unsqueeze(-1)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Logarithm of the number of legal actions, [...]."""
        return _log_legal(params)

    def _table(self, params: Tensor) -> Tensor:
        return params

    def _pick(self, log_probs: Tensor, actions: Tensor) -> Tensor:
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def log_prob_and_entropy_by_hand(
        self, params: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, ParamsGradient]:
        """Both without a graph, and their gradient, see `ParamsGradient`.

        ∂log P(a)/∂l_j = 1[j = a] - P(j), ∂H/∂l_j = -P(j) (log P(j) + H).
        """
        log_probs = log_softmax(params, -1)
        probs = log_probs.exp()
        finite = log_probs.clamp(min=LEAST_LOG_PROB)
        entropy = (probs * finite).sum(-1).neg_()
        index = actions.unsqueeze(-1)

        def gradient(g: Tensor, h: float) -> Tensor:
            columns = g.unsqueeze(-1)
            result = (probs * columns).neg_().scatter_add_(-1, index, columns)
            if h:
                result.addcmul_(probs, finite + entropy.unsqueeze(-1), value=-h)
            return result

        return log_probs.gather(-1, index).squeeze(-1), entropy, gradient


class MultiCategorical(CategoricalFamily):
    """K independent choices among n_1 ... n_K actions: P(a) = Π_k P_k(a_k).

    `params` are the logits of all choices one after the other, [..., Σ n_k], choices in the
    row-major order of `space.nvec`. Computation is on one table [..., K, max n_k]: a view of the
    params when all n_k are equal, else a copy padded with logits of probability 0.

    Args:
        space: The action space; `nvec` may have any shape. The agent's actions are counted from 0,
            those of the environment from `space.start`.
    """

    space_type: ClassVar[type[Space[Any]] | None] = MultiDiscrete
    table_dims = (-2, -1)

    def __init__(self, space: MultiDiscrete) -> None:
        check_space(type(self), space)
        sizes = np.asarray(space.nvec, dtype=np.int64).ravel()
        super().__init__(space, space.start, int(sizes.sum()))
        self._table_shape = (len(sizes), int(sizes.max()))
        self._is_even = bool((sizes == sizes[0]).all())
        # Cell of the flattened table [K * max n_k] that each logit goes to.
        in_table = np.arange(self._table_shape[1]) < sizes[:, None]
        self._cells = Constant(np.flatnonzero(in_table))
        self._offsets = Constant(sizes.cumsum() - sizes)

    def mode(self, params: Tensor) -> Tensor:
        """The first action with the largest logit of each choice, int64, [..., *nvec.shape]."""
        return super().mode(params).reshape((*params.shape[:-1], *self.action_shape))

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Logarithms of P_k(a) of all actions of all choices, [..., Σ n_k]."""
        log_probs = log_softmax(self._table(params), -1).flatten(-2)
        if not self._is_even:
            log_probs = log_probs.index_select(-1, self._cells.on(params.device, torch.int64))
        return log_probs

    def choices(self, actions: Tensor) -> Tensor:
        """The actions of each choice, counted from the first action of the first, [..., K]."""
        batch = actions.shape[: actions.dim() - len(self.action_shape)]
        return actions.reshape((*batch, self._table_shape[0])) + self._offsets.like(actions)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Σ_k of the logarithms of the numbers of legal actions, [...]."""
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
    """Logarithm of the number of legal actions, [...], for logits [..., n]."""
    count = (logits > impossible_logit(logits.dtype)).sum(-1)
    # Where nothing is legal there is no choice either.
    return count.clamp_(min=1).to(logits.dtype).log()
