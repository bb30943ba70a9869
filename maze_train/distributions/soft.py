"""Action distributions for soft actor-critics: features, choices and entropies by component."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maze_train.core.errors import SpaceError
from maze_train.core.types import Tensor, TensorTree
from maze_train.distributions.base import Distribution


@dataclass(frozen=True, slots=True)
class SoftSample:
    """For n actions: samples of continuous components and all categories of discrete components."""

    features: Tensor
    """Critic features of the continuous components, [n, D]."""

    log_probs: Tensor
    """Log-densities of the C continuous components, with actions scaled to [-1, 1], [n, C]."""

    probs: Tensor
    """Probabilities of the choices of all discrete components, [n, N]."""

    choice_log_probs: Tensor
    """Log-probabilities of the choices, or 0 if the probability is 0, [n, N]."""


class SoftActions:
    """Common interface of single and joint distributions with P continuous or discrete components.

    The critic takes the features of the continuous components, [n, D], and outputs one value for
    each of the N choices of the discrete components. The Q-value of an action is the sum over its
    choices; if there are no discrete components, the critic outputs a single value.

    Args:
        distribution: A single family or a joint distribution.

    Attributes:
        part_keys: Keys of the P components; [""] for a single family.
        parts: Families of the components.
        is_discrete: Whether each component is discrete.
        critic_input_size: D, the sum of the critic input sizes of all components.
        num_choices: N, the sum of the numbers of categories of all components.

    Raises:
        SpaceError: If a component is neither continuous nor discrete.
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
                f"{_names(parts)}: soft actor-critics require distributions with critic_input or "
                "choice_log_probs; choose another distribution, or implement a method"
            )
        self.critic_input_size = sum(self._feature_sizes)
        self.num_choices = sum(self._choice_sizes)

    def critic_input(self, actions: TensorTree) -> Tensor:
        """Return the concatenated features of the continuous components of actions, [n, D]."""
        own = self._own(actions)
        pairs = zip(self.parts, own, strict=True)
        pieces = [part.critic_input(a) for part, a in pairs if not part.num_choices]
        return _joined(pieces) if pieces else own[0].new_empty((len(own[0]), 0), dtype=torch.float)

    def choices(self, actions: TensorTree) -> Tensor:
        """Return indices of the K chosen actions among the N choices, int64, [n, K]."""
        own, pieces, offset = self._own(actions), [], 0
        for part, part_actions in zip(self.parts, own, strict=True):
            if part.num_choices:
                chosen = part.choices(part_actions)
                pieces.append(chosen + offset if offset else chosen)
                offset += part.num_choices
        return _joined(pieces) if pieces else own[0].new_empty((len(own[0]), 0), dtype=torch.int64)

    def sample(self, params: Tensor, noise: Tensor) -> SoftSample:
        """Sample actions, differentiable in the params.

        Args:
            params: Parameters of the distribution, [n, param_size].
            noise: Noise of the distribution, [n, noise_size].
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
        """Entropy estimates of the components in nats, [n, P], used to tune the temperatures.

        `-log_probs` for a continuous component, with actions scaled to [-1, 1]; the exact entropy
        -Σ_a p_a log p_a for a discrete component.
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
        """Target entropies of the components, [n, P].

        -multiplier · D for a continuous component of D dimensions; multiplier · discrete_fraction ·
        the maximum entropy over the legal actions for a discrete component.

        Sources: Haarnoja et al. (2018), arXiv:1812.05905, appendix D; Christodoulou (2019),
        arXiv:1910.07207, section 5.

        Args:
            params: Parameters of the distribution, [n, param_size].
            multiplier: Factor for all components.
            discrete_fraction: Additional factor for discrete components, in [0, 1].
        """
        targets = [
            part.max_entropy(own) * (multiplier * discrete_fraction)
            if part.num_choices
            else own.new_full(own.shape[:-1], -multiplier * part.critic_input_size)
            for part, own in zip(self.parts, self._distribution.split(params), strict=True)
        ]
        return _stacked(targets)

    def _own(self, actions: TensorTree) -> list[Tensor]:
        """Return the actions of each component."""
        if isinstance(actions, torch.Tensor):
            return [actions]
        return [actions[key] for key in self.part_keys]


def _names(parts: dict[str, Distribution]) -> str:
    """Return the names of components that are neither continuous nor discrete, for messages."""
    lacking = {
        key: type(part).__name__
        for key, part in parts.items()
        if not (part.num_choices or part.critic_input_size)
    }
    return ", ".join(f"{key}: {name}" if key else name for key, name in lacking.items())


def _joined(pieces: list[Tensor]) -> Tensor:
    """Concatenate tensors [n, ...] along the last dimension."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def _stacked(columns: list[Tensor]) -> Tensor:
    """Stack tensors [n] as columns of a tensor [n, P]."""
    return columns[0].unsqueeze(-1) if len(columns) == 1 else torch.stack(columns, -1)
