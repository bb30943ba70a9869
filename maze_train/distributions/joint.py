"""One distribution over several actions taken at once."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from maze_train.distributions.base import Distribution
from maze_train.errors import SpaceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maze_train.types import Tensor


class JointDistribution(Distribution):
    """Independent parts: p(a) = Π_k p_k(a_k), for Dict and Tuple action spaces.

    Actions are a flat mapping with one tensor per part. Log-probabilities, entropies and
    divergences are the sums over parts. `params` hold what the network computes for every part, in
    the order of the parts, and then the state-independent parameters of every part.

    Args:
        parts: Single-part distributions by key (the keys of nested spaces joined by `/`).

    Raises:
        SpaceError: If there is no part.
    """

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        if not parts:
            raise SpaceError("a joint distribution needs at least one part, the space has none")
        self._parts = dict(parts)
        families = self._parts.values()
        self.param_size = sum(part.param_size for part in families)
        self.noise_size = sum(part.noise_size for part in families)
        self.free_param_size = sum(part.free_param_size for part in families)
        self.free_params_move_mode = any(
            part.free_param_size > 0 and part.free_params_move_mode for part in families
        )
        self._noise_sizes = [part.noise_size for part in families]
        self._net_sizes = [part.param_size - part.free_param_size for part in families]
        self._free_sizes = [part.free_param_size for part in families]

    @property
    def parts(self) -> dict[str, Distribution]:
        """The parts as given; shapes and data types of the actions are theirs."""
        return self._parts

    def initial_free_params(self) -> Tensor:
        """Start of the state-independent parameters, part by part, [free_param_size]."""
        return torch.cat([part.initial_free_params() for part in self.parts.values()])

    def draw_noise(
        self,
        shape: tuple[int, ...],
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The noise of every part, one after the other, [*shape, noise_size]."""
        draws = [part.draw_noise(shape, generator, device) for part in self.parts.values()]
        return torch.cat(draws, dim=-1)

    def sample(self, params: Tensor, noise: Tensor) -> dict[str, Any]:
        """Actions of every part, drawn independently."""
        return {
            key: part.sample(own, own_noise)
            for (key, part), own, own_noise in zip(
                self.parts.items(), self.split(params), self.split_noise(noise), strict=True
            )
        }

    def mode(self, params: Tensor) -> dict[str, Any]:
        """The most probable actions of every part."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        return {key: part.mode(own) for (key, part), own in pairs}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """Σ_k log p_k(a_k), [...]."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        return _total([part.log_prob(own, actions[key]) for (key, part), own in pairs])

    def entropy(self, params: Tensor) -> Tensor:
        """Σ_k of the entropies of the parts, [...]."""
        pairs = zip(self.parts.values(), self.split(params), strict=True)
        return _total([part.entropy(own) for part, own in pairs])

    def kl(self, params_p: Tensor, params_q: Tensor) -> Tensor:
        """Σ_k KL(p_k || q_k), [...]."""
        pairs = zip(self.split(params_p), self.split(params_q), strict=True)
        parts = zip(self.parts.values(), pairs, strict=True)
        return _total([part.kl(own_p, own_q) for part, (own_p, own_q) in parts])

    def log_prob_and_entropy(
        self, params: Tensor, actions: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Sums of what the parts compute, each [...]."""
        pairs = zip(self.parts.items(), self.split(params), strict=True)
        both = [part.log_prob_and_entropy(own, actions[key]) for (key, part), own in pairs]
        return _total([log_prob for log_prob, _ in both]), _total([entropy for _, entropy in both])

    def to_env(self, actions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Each part as the environment takes it, still flat."""
        return {key: part.to_env(actions[key]) for key, part in self.parts.items()}

    def from_env(self, actions: Mapping[str, Tensor]) -> dict[str, Any]:
        """Each part as the agent has it, from flat actions of the environment."""
        return {key: part.from_env(actions[key]) for key, part in self.parts.items()}

    def split(self, params: Tensor) -> list[Tensor]:
        """The params of every part, each [..., param_size of the part], free ones last."""
        if not self.free_param_size:
            return list(params.split_with_sizes(self._net_sizes, -1))
        pieces = params.split_with_sizes(self._net_sizes + self._free_sizes, -1)
        count = len(self.parts)
        return [
            torch.cat((net, free), dim=-1) if size else net
            for net, free, size in zip(
                pieces[:count], pieces[count:], self._free_sizes, strict=True
            )
        ]

    def split_noise(self, noise: Tensor) -> list[Tensor]:
        """The noise of every part, each [..., noise_size of the part]."""
        return list(noise.split_with_sizes(self._noise_sizes, -1))


def _total(terms: list[Tensor]) -> Tensor:
    """Sum of tensors of one shape, one operation for each after the first."""
    return reduce(torch.add, terms)
