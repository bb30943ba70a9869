"""Distributions over arrays of bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium.spaces import MultiBinary
from torch.nn.functional import logsigmoid, softplus

from maze_train.distributions.base import (
    Distribution,
    check_space,
    env_dtype,
)
from maze_train.distributions.box import VectorLayout
from maze_train.distributions.categorical import impossible_logit, weighted

if TYPE_CHECKING:
    from gymnasium import Space

    from maze_train.types import Tensor


LOG_2 = math.log(2.0)
LEAST_UNIFORM = 2.0**-25
"""Half of the step between uniform float32 numbers, taken for a draw of 0."""


class Bernoulli(Distribution):
    """Independent bits: P(a) = Π_i s(l_i) if a_i = 1 else 1 - s(l_i), s(l) = 1 / (1 + exp(-l)).

    `params` are the logits l, [..., D] with D the number of bits. All functions use
    log s(l) = -log(1 + exp(-l)) and 1 - s(l) = s(-l), so they are exact for large logits.

    Sampling compares logits with logistic noise: l + log(u / (1 - u)) > 0 for uniform u has the
    probability s(l), by the inverse of the logistic distribution function s.

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
        """Draw standard logistic noise, [*shape, D]."""
        noise.uniform_(generator=generator).logit_(LEAST_UNIFORM)

    def sample(self, params: Tensor, noise: Tensor) -> Tensor:
        """Bits [params + noise > 0], int8, [..., *space.shape]."""
        return self.mode(params + noise)

    def mode(self, params: Tensor) -> Tensor:
        """The more probable value of each bit (0 where both are alike), int8, [..., *shape]."""
        return self._layout.to_box(params > 0).to(self.action_dtype)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Σ_i log s(l_i) for ones, log s(-l_i) for zeros, [...]."""
        signs = self._layout.to_vector(actions).to(params.dtype) * 2 - 1
        return logsigmoid(signs * params).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Σ_i [ log(1 + exp(-|l_i|)) + |l_i| s(-|l_i|) ], in [0, D log 2], [...]."""
        # The entropy is even in l; for this sign no term is a difference of large numbers.
        size = params.abs()
        return (softplus(-size) + weighted(torch.sigmoid(-size), size)).sum(-1)

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_i Σ_a P_i(a) (log P_i(a) - log Q_i(a)), [...]."""
        ones = weighted(torch.sigmoid(params_p), logsigmoid(params_p) - logsigmoid(params_q))
        zeros = weighted(torch.sigmoid(-params_p), logsigmoid(-params_p) - logsigmoid(-params_q))
        return (ones + zeros).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """The bits in the type of the space, [..., *space.shape]."""
        return actions.to(self._env_dtype)

    def from_env(self, actions: Tensor) -> Tensor:
        """The bits as int8, [..., *space.shape]."""
        return actions.to(self.action_dtype)

    def choice_log_probs(self, params: Tensor) -> Tensor:
        """Log-probabilities of 0 and 1 for the first bit, then for the second, ..., [..., 2 D]."""
        return logsigmoid(torch.stack((-params, params), -1)).flatten(-2)

    def choices(self, actions: Tensor) -> Tensor:
        """Twice the number of each bit, plus the bit, [..., D]."""
        bits = self._layout.to_vector(actions).to(torch.int64)
        return bits + torch.arange(0, self.num_choices, 2, device=bits.device)

    def max_entropy(self, params: Tensor) -> Tensor:
        """Logarithm of 2 for each bit that may be 1, [...]."""
        return (params > impossible_logit(params.dtype)).sum(-1).to(params.dtype) * LOG_2
