"""Views of action distributions for soft actor-critics: features, choices, entropies by part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maze_train.core.errors import SpaceError
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import Distribution


@dataclass(frozen=True, slots=True)
class SoftSample:
    """Actions drawn for n observations: continuous parts sampled, discrete ones in full."""

    features: Tensor
    """Features of the continuous parts for critics, [n, D]."""

    log_probs: Tensor
    """Log-densities of the C continuous parts, each scaled to [-1, 1], [n, C]."""

    probs: Tensor
    """Probabilities of the choices of all discrete parts, [n, N]."""

    choice_log_probs: Tensor
    """Their logarithms, 0 where the probability is 0, [n, N]."""


class SoftActions:
    """One view over single and joint distributions, as P parts that are continuous or discrete.

    A critic reads the features of the continuous parts, [n, D], and gives a value q to each of the
    N choices of the discrete parts. The value of an action is the sum over its choices; without
    discrete parts it is one number.

    Args:
        distribution: A family, or a joint distribution of families.

    Attributes:
        part_keys: Keys of the P parts; [""] for a single family.
        parts: Their families.
        is_discrete: Whether each part is discrete.
        critic_input_size: D, the sum over parts.
        num_choices: N, the sum over parts.

    Raises:
        SpaceError: If a part is neither continuous nor discrete.
    """

    def __init__(self, distribution: Distribution) -> None:
        self._distribution, parts = distribution, distribution.parts
        self.part_keys, self.parts = list(parts), list(parts.values())
        self.is_discrete = [part.num_choices > 0 for part in self.parts]
        self._feature_sizes = [
            part.critic_input_size for part in self.parts if not part.num_choices
        ]
        self._choice_sizes = [part.num_choices for part in self.parts if part.num_choices]
        if not all(self._feature_sizes):
            raise SpaceError(
                f"{_names(parts)}: soft actor-critics need actions with critic_input or "
                "choice_log_probs; choose another distribution, or implement one of them"
            )
        self.critic_input_size = sum(self._feature_sizes)
        self.num_choices = sum(self._choice_sizes)

    def critic_input(self, actions: TensorTree) -> Tensor:
        """The features of the continuous parts of actions, one after the other, [n, D]."""
        own = self._own(actions)
        pairs = zip(self.parts, own, strict=True)
        pieces = [part.critic_input(a) for part, a in pairs if not part.num_choices]
        return _joined(pieces) if pieces else own[0].new_empty((len(own[0]), 0), dtype=torch.float)

    def choices(self, actions: TensorTree) -> Tensor:
        """Indices of the K discrete parts of actions among the N choices, int64, [n, K]."""
        own, pieces, offset = self._own(actions), [], 0
        for part, part_actions in zip(self.parts, own, strict=True):
            if part.num_choices:
                chosen = part.choices(part_actions)
                pieces.append(chosen + offset if offset else chosen)
                offset += part.num_choices
        return _joined(pieces) if pieces else own[0].new_empty((len(own[0]), 0), dtype=torch.int64)

    def sample(self, params: Tensor, noise: Tensor) -> SoftSample:
        """Actions that `noise` selects, differentiable in the params.

        Args:
            params: Parameters of the distribution, [n, param_size].
            noise: Its random numbers, [n, noise_size].
        """
        pieces = self._distribution.split(params), self._distribution.split_noise(noise)
        features, log_probs, probs, choice_log_probs = [], [], [], []
        for part, own, own_noise in zip(self.parts, *pieces, strict=True):
            if part.num_choices:
                p, log_p = part.choice_probs(own)
                probs.append(p)
                choice_log_probs.append(log_p)
            else:
                x, log_prob = part.reparameterized(own, own_noise)
                features.append(x)
                log_probs.append(log_prob)
        none = params.new_empty((len(params), 0))
        return SoftSample(
            _joined(features) if features else none,
            _stacked(log_probs) if log_probs else none,
            _joined(probs) if probs else none,
            _joined(choice_log_probs) if probs else none,
        )

    def neg_log_probs(self, sample: SoftSample) -> Tensor:
        """Estimates of the entropies of the parts, [n, P]; temperatures learn from them.

        `-log_probs` of a continuous part, the entropy -Σ_a p_a log p_a of a discrete one (for
        actions scaled to [-1, 1], in nats).
        """
        columns = iter(sample.log_probs.unbind(-1))
        terms = iter(
            (sample.probs * sample.choice_log_probs).split_with_sizes(self._choice_sizes, -1)
        )
        values = [next(terms).sum(-1) if choice else next(columns) for choice in self.is_discrete]
        return _stacked(values).neg()

    def target_entropies(
        self, params: Tensor, multiplier: float, discrete_fraction: float
    ) -> Tensor:
        """The entropies that temperatures hold the parts at, [n, P].

        -multiplier · D for a continuous part of D dimensions; multiplier · discrete_fraction · the
        largest possible entropy for a discrete part, which depends on what is legal.

        Sources: Haarnoja et al. (2018), arXiv:1812.05905, appendix D; Christodoulou (2019),
        arXiv:1910.07207, section 5.

        Args:
            params: Parameters of the distribution, [n, param_size].
            multiplier: Factor of all.
            discrete_fraction: Factor of discrete parts, in [0, 1].
        """
        targets = [
            part.max_entropy(own) * (multiplier * discrete_fraction)
            if part.num_choices
            else own.new_full(own.shape[:-1], -multiplier * part.critic_input_size)
            for part, own in zip(self.parts, self._distribution.split(params), strict=True)
        ]
        return _stacked(targets)

    def _own(self, actions: TensorTree) -> list[Tensor]:
        """The actions of each part."""
        if isinstance(actions, torch.Tensor):
            return [actions]
        return [actions[key] for key in self.part_keys]


def _names(parts: dict[str, Distribution]) -> str:
    """The parts that are neither continuous nor discrete, for a message."""
    lacking = {
        key: type(part).__name__
        for key, part in parts.items()
        if not (part.num_choices or part.critic_input_size)
    }
    return ", ".join(f"{key}: {name}" if key else name for key, name in lacking.items())


def _joined(pieces: list[Tensor]) -> Tensor:
    """Tensors [n, ...] side by side."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _stacked(columns: list[Tensor]) -> Tensor:
    """Tensors [n] as the columns of one [n, P]."""
    return columns[0].unsqueeze(-1) if len(columns) == 1 else torch.stack(columns, -1)
