"""Loss of behavioral cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from maze_train.algorithms.bc.metrics import parts_of
from maze_train.checks import check_at_least, check_one_of
from maze_train.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from maze_train.distributions.base import Distribution
    from maze_train.types import Tensor, TensorTree


class BCLoss:
    """Loss of recorded actions: a sum over their parts, minus an entropy bonus.

    L = 1/n Σ_i Σ_k [ l_k(a_ik) - entropy_coef · H(π_k(·|s_i)) ]

    l_k of a part k is

    - for Discrete, MultiDiscrete and MultiBinary: the cross-entropy -Σ_j w_j(a_j) log π(a_j | s),
      summed over the choices j (bits, for MultiBinary) that are made at once;
    - for a Box with `box_loss="nll"`: -log π(a | s), the density over actions as the distribution
      has them;
    - for a Box with `box_loss="mse"`: the mean over dimensions of (m(s) - a)², where m is the most
      likely action, both scaled to [-1, 1] in dimensions with two bounds. Such a part has no
      entropy bonus: nothing would oppose it.

    Actions that a mask forbids have no chance in π: recorded ones make the loss huge, not NaN.

    Args:
        distribution: The family of action distributions.
        box_loss: `nll` or `mse`.
        entropy_coef: Weight of the entropy, >= 0.
        class_weights: Weights w of the choices of discrete parts, by the key of the part (empty for
            a lone one): `[N]`, in the order of `Distribution.choice_probs`. Others have weight 1.

    Raises:
        ConfigError: If a setting is out of its range, or there is an entropy bonus of no part.
        ShapeError: If there are not as many weights as choices.
    """

    def __init__(
        self,
        distribution: Distribution,
        *,
        box_loss: str = "nll",
        entropy_coef: float = 0.0,
        class_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_one_of("box_loss", box_loss, ("nll", "mse"))
        check_at_least("entropy_coef", entropy_coef, 0.0)
        self.distribution = distribution
        self.box_loss = box_loss
        self.entropy_coef = entropy_coef
        self.class_weights = dict(class_weights or {})
        for key, weights in self.class_weights.items():
            count = getattr(distribution, "parts", {"": distribution})[key].num_choices
            if weights.shape != (count,):
                raise ShapeError(
                    f"class_weights[{key!r}] has the shape {list(weights.shape)}, "
                    f"expected [{count}]"
                )
        self._is_likelihood = box_loss == "nll" and not self.class_weights
        parts = getattr(distribution, "parts", {"": distribution}).values()
        if entropy_coef and all(self._is_squared_error(part) for part in parts):
            problem = "does nothing with box_loss=mse, where no other part has one; expected 0"
            raise ConfigError("entropy_coef", problem, entropy_coef)

    def _is_squared_error(self, part: Distribution) -> bool:
        return self.box_loss == "mse" and part.critic_input_size > 0

    def __call__(self, params: Tensor, actions: TensorTree) -> Tensor:
        """The loss, 0-d, differentiable in params.

        Args:
            params: Parameters, `[n, param_size]`.
            actions: The agent's actions, `[n, ...]`.
        """
        policy_loss = self.per_sample(params, actions).mean()
        return policy_loss - self.bonus(params).mean()

    def bonus(self, params: Tensor) -> Tensor:
        """`entropy_coef` times the entropy of the parts that have a bonus, `[n]`."""
        total = params.new_zeros(params.shape[:-1])
        if not self.entropy_coef:
            return total
        if self.box_loss == "nll":
            return self.entropy_coef * self.distribution.entropy(params)
        parts = self.distribution.parts.values()
        for part, own_params in zip(parts, self.distribution.split(params), strict=True):
            if not self._is_squared_error(part):
                total = total + part.entropy(own_params)
        return self.entropy_coef * total

    def per_sample(self, params: Tensor, actions: TensorTree) -> Tensor:
        """Σ_k l_k of each sample, `[n]`; override it for another loss of actions."""
        if self._is_likelihood:
            return -self.distribution.log_prob(params, actions)
        total: Tensor | None = None
        for key, part, own_params, own_actions in parts_of(self.distribution, params, actions):
            loss = self._part_loss(key, part, own_params, own_actions)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _part_loss(self, key: str, part: Distribution, params: Tensor, actions: Tensor) -> Tensor:
        if self._is_squared_error(part):
            return (part.unit_mode(params) - part.critic_input(actions)).square().mean(-1)
        weights = self.class_weights.get(key)
        if weights is None:
            return -part.log_prob(params, actions)
        chosen = part.choices(actions)
        log_probs = part.choice_log_probs(params).gather(-1, chosen)
        return -(weights.to(log_probs)[chosen] * log_probs).sum(-1)


def balanced_weights(
    distribution: Distribution, batches: Iterable[TensorTree]
) -> dict[str, Tensor]:
    """Weights of choices that give all choices of a kind the same say.

    w_c = Σ_c' n_c' / (K n_c), for a choice c that was made n_c times, among the K of its kind that
    were made at all. The mean of the weights over the data is 1. Those never made have weight 0.

    Args:
        distribution: The family of action distributions.
        batches: The agent's actions, `[n, ...]` each.

    Returns:
        Weights of each discrete part by key (empty for a lone one), `[N]` float32.
    """
    counts: dict[str, Tensor] = {}
    kinds: dict[str, Tensor] = {}
    for actions in batches:
        empty = torch.zeros(1, distribution.param_size)
        for key, part, _, own in parts_of(distribution, empty, actions):
            if not part.num_choices:
                continue
            places = part.choices(own)
            if key not in counts:
                counts[key] = torch.zeros(part.num_choices, dtype=torch.int64)
                kinds[key] = torch.zeros(part.num_choices, dtype=torch.int64)
            counts[key] += torch.bincount(places.flatten(), minlength=part.num_choices)
            _note_kinds(kinds[key], places)
    return {key: _balanced(count, kinds[key]) for key, count in counts.items()}


def _note_kinds(kinds: Tensor, places: Tensor) -> None:
    """Note which of the choices made at once each place belongs to."""
    for k in range(places.shape[-1]):
        kinds[torch.unique(places[..., k])] = k


def _balanced(counts: Tensor, kinds: Tensor) -> Tensor:
    weights = torch.zeros(len(counts))
    for kind in torch.unique(kinds):
        made = (kinds == kind) & (counts > 0)
        if made.any():
            total, number = counts[made].sum(), int(made.sum())
            weights[made] = (total / (number * counts[made])).float()
    return weights
