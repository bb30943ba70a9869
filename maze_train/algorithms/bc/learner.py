"""Learner, loss, metrics and events of behavioral cloning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from gymnasium import Space
from gymnasium.spaces import Box, MultiBinary

from maze_train.algorithms.bc.config import BCAlgorithmConfig
from maze_train.core.checks import check_at_least, check_one_of
from maze_train.core.errors import ConfigError, ShapeError
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor, TensorTree, leaves_by_key, on_device, precise_dtype
from maze_train.distributions.base import Distribution
from maze_train.learner.learner import Learner
from maze_train.learner.optimizers import norm_of
from maze_train.nets.policy_model import PolicyModel
from maze_train.spaces.describe import choice_sizes, flat_spaces


class ImitationEvents(EventInterface, prefix="train"):
    """Metrics of behavioral cloning.

    Action metrics and the parameter norm are computed for the first and every 16th minibatch of an
    epoch. Action metrics are averaged over action components; with several components, each
    component also has a separate metric `<tag>/<component>`. Metrics of the validation data are
    named `validation/...`; `validation/loss` includes the entropy bonus.
    """

    policy_loss = Event("Imitation loss, summed over action parts, without the entropy bonus.")
    policy_entropy = Event("Entropy of the policy, in nats.")
    policy_l2_norm = Event("L2 norm of the parameters of the policy.", reduce="last")
    discrete_accuracy = Event("Fraction of discrete choices with the highest probability.")
    discrete_top_5_accuracy = Event(
        "Top-5 accuracy of discrete choices with more than 10 alternatives."
    )
    discrete_top_10_accuracy = Event(
        "Top-10 accuracy of discrete choices with more than 20 alternatives."
    )
    discrete_action_rank = Event("Rank of the recorded action by probability, from 1.")
    multi_binary_accuracy = Event("Fraction of bits with the more likely value.")
    box_mean_abs_deviation = Event(
        "Mean absolute error of the most likely action, in units of the environment."
    )


@dataclass(frozen=True)
class BCBatch:
    """n recorded transitions."""

    obs: TensorTree
    """Observations, `[n, ...]`."""

    actions: TensorTree
    """Actions in the representation of the distribution, `[n, ...]`."""

    is_measured: bool = False
    """Whether to record action metrics."""


class BCLearner(Learner[BCBatch, BCBatch, BCBatch]):
    """Learner of behavioral cloning: one gradient step per minibatch of transitions; see `BCLoss`.

    Args:
        module: The policy, or policies keyed by id.
        config: Settings.
        loss: The loss, or losses keyed by module id.
        metrics: Action metrics, or action metrics keyed by module id; None: no metrics.
        device: Device on which the policy is stored and updated.
    """

    most_empty_updates: ClassVar[int] = 100
    """Number of consecutive updates without a finite gradient after which training fails."""

    def __init__(
        self,
        module: PolicyModel | Mapping[str, PolicyModel],
        config: BCAlgorithmConfig,
        loss: BCLoss | Mapping[str, BCLoss],
        metrics: ImitationMetrics | Mapping[str, ImitationMetrics] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(module, config, device=device)
        self.loss = loss
        self.metrics = metrics

    def preprocess(self, module_id: str, experience: BCBatch, statistics: Statistics) -> BCBatch:
        """Move the minibatch to the device of the policy."""
        return experience if self.device.type == "cpu" else on_device(experience, self.device)

    def minibatches(
        self, prepared: Mapping[str, BCBatch], statistics: Statistics
    ) -> Iterator[Mapping[str, BCBatch]]:
        """Yield the minibatch."""
        yield prepared

    def compute_loss_for_module(
        self, module_id: str, batch: BCBatch, statistics: Statistics
    ) -> Tensor:
        """Imitation loss of the minibatch, 0-d."""
        model = self.modules[module_id]
        assert isinstance(model, PolicyModel)
        params = model.policy_params(batch.obs)
        own, metrics = _of(self.loss, module_id), _of(self.metrics, module_id)
        loss: Tensor = own(params, batch.actions)
        weight = float(len(params))
        with torch.no_grad():
            policy_loss = loss + own.bonus(params).mean()
            entropy = model.distribution.entropy(params).mean()
        statistics.record(ImitationEvents.policy_loss, policy_loss, weight)
        statistics.record(ImitationEvents.policy_entropy, entropy, weight)
        if metrics is not None and batch.is_measured:
            for event, value in metrics(params.detach(), batch.actions):
                statistics.record(event, value, weight)
            norm = norm_of([param.detach() for param in model.parameters()])
            statistics.record(ImitationEvents.policy_l2_norm, norm)
        return loss


T = TypeVar("T")


def _of(each: T | Mapping[str, T], module_id: str) -> T:
    """Return the entry of a module in a mapping, or the common value."""
    return each[module_id] if isinstance(each, Mapping) else each


TOP_5_MIN, TOP_10_MIN = 10, 20
"""Number of discrete actions above which top-5 and top-10 accuracy are reported."""


def parts_of(
    distribution: Distribution, params: Tensor, actions: TensorTree
) -> list[tuple[str, Distribution, Tensor, Tensor]]:
    """Return key, distribution, params and actions of each component; a single one has key ""."""
    by_key = leaves_by_key(actions)
    pieces = zip(distribution.parts.items(), distribution.split(params), strict=True)
    return [(key, part, own, by_key[key]) for (key, part), own in pieces]


class ImitationMetrics:
    """Metrics that compare the most likely actions with recorded actions.

    Args:
        distribution: Distribution of the actions.
        action_space: Action space of one environment.
    """

    def __init__(self, distribution: Distribution, action_space: Space[Any]) -> None:
        self._distribution = distribution
        self._leaves = flat_spaces(action_space)

    @torch.no_grad()
    def __call__(self, params: Tensor, actions: TensorTree) -> list[tuple[Event, Tensor]]:
        """Compute the metrics, and return their events with the values, 0-d.

        Args:
            params: Distribution parameters, `[n, param_size]`.
            actions: The recorded actions, `[n, ...]`.

        Returns:
            For actions with several components, the mean of each event over the components,
            followed by the values for each component.
        """
        found: list[tuple[str, Event, Tensor]] = []
        for key, part, own_params, own_actions in parts_of(self._distribution, params, actions):
            values = _part_metrics(self._leaves[key], part, own_params, own_actions)
            found += [(key, event, value) for event, value in values]
        if len(self._leaves) == 1 and "" in self._leaves:
            return [(event, value) for _, event, value in found]
        events = dict.fromkeys(event for _, event, _ in found)
        means = [
            (event, torch.stack([value for _, other, value in found if other is event]).mean())
            for event in events
        ]
        return means + [(event.of_part(key), value) for key, event, value in found]


def _part_metrics(
    space: Space[Any], part: Distribution, params: Tensor, actions: Tensor
) -> list[tuple[Event, Tensor]]:
    mode = part.mode(params)
    assert isinstance(mode, torch.Tensor)
    if isinstance(space, MultiBinary):
        return [(ImitationEvents.multi_binary_accuracy, _mean(mode == actions))]
    if isinstance(space, Box):
        chosen, recorded = part.to_env(mode), part.to_env(actions)
        assert isinstance(chosen, torch.Tensor)
        assert isinstance(recorded, torch.Tensor)
        precise = precise_dtype(chosen.device)
        deviation = (chosen.to(precise) - recorded.to(precise)).abs()
        return [(ImitationEvents.box_mean_abs_deviation, deviation.mean())]
    sizes = choice_sizes(space)
    ranks = _ranks(sizes, part, params, actions)
    events = ImitationEvents
    found = [(events.discrete_accuracy, _mean(ranks <= 1))]
    for event, k, least in (
        (events.discrete_top_5_accuracy, 5, TOP_5_MIN),
        (events.discrete_top_10_accuracy, 10, TOP_10_MIN),
    ):
        columns = [column for column, size in zip(ranks.T, sizes, strict=True) if size > least]
        if columns:
            found.append((event, _mean(torch.stack(columns) <= k)))
    return [*found, (events.discrete_action_rank, _mean(ranks))]


def _mean(values: Tensor) -> Tensor:
    """Return the mean of integers, or the fraction of true values."""
    return values.to(precise_dtype(values.device)).mean()


def _ranks(sizes: Sequence[int], part: Distribution, params: Tensor, actions: Tensor) -> Tensor:
    """Return the rank of each recorded action by probability, from 1, `[n, K]`; ties in order.

    The mode has rank 1.
    """
    probs = part.choice_probs(params)[0]
    places = part.choices(actions)
    ranks, start = [], 0
    for k, size in enumerate(sizes):
        own = probs[:, start : start + size]
        place = places[:, k : k + 1] - start
        chosen = own.gather(1, place)
        before = torch.arange(size, device=own.device) < place
        ranks.append(((own > chosen) | ((own == chosen) & before)).sum(1) + 1)
        start += size
    return torch.stack(ranks, dim=1)


class BCLoss:
    """Imitation loss, summed over the action components, minus an entropy bonus.

    L = 1/n Σ_i Σ_k [ l_k(a_ik) - entropy_coef · H(π_k(·|s_i)) ]

    with the following l_k for component k:

    - Discrete, MultiDiscrete and MultiBinary: the cross-entropy -Σ_j w_j(a_j) log π(a_j | s),
      summed over the sub-actions (or bits) j of the component;
    - Box with `box_loss="nll"`: -log π(a | s), the density of the agent's action;
    - Box with `box_loss="mse"`: the mean over dimensions of (m(s) - a)², where m is the most likely
      action, both scaled to [-1, 1] in dimensions with two bounds. `mse` has no entropy bonus,
      which would be unbounded.

    For illegal recorded actions, the loss is very large but not NaN.

    Args:
        distribution: Distribution of the actions.
        box_loss: `nll` or `mse`.
        entropy_coef: Weight of the entropy, >= 0.
        class_weights: Class weights w of each discrete component by key (empty for a single
            component): `[N]`, in the order of `Distribution.choice_probs`; default: 1.

    Raises:
        ConfigError: If a setting is out of range, or the entropy bonus applies to no component.
        ShapeError: If the number of weights differs from the number of choices.
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
            count = distribution.parts[key].num_choices
            if weights.shape != (count,):
                raise ShapeError(
                    f"class_weights[{key!r}] has the shape {list(weights.shape)}, "
                    f"expected [{count}]"
                )
        self._is_likelihood = box_loss == "nll" and not self.class_weights
        if entropy_coef and all(map(self._is_squared_error, distribution.parts.values())):
            problem = "has no effect with box_loss=mse and no discrete parts; expected 0"
            raise ConfigError("entropy_coef", problem, entropy_coef)

    def _is_squared_error(self, part: Distribution) -> bool:
        return self.box_loss == "mse" and part.critic_input_size > 0

    def __call__(self, params: Tensor, actions: TensorTree) -> Tensor:
        """Compute the loss, 0-d, differentiable in params.

        Args:
            params: Distribution parameters, `[n, param_size]`.
            actions: The agent's actions, `[n, ...]`.
        """
        policy_loss = self.per_sample(params, actions).mean()
        return policy_loss - self.bonus(params).mean()

    def bonus(self, params: Tensor) -> Tensor:
        """Entropy bonus: `entropy_coef` times the entropy, without components with `mse`, `[n]`."""
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
        """Loss Σ_k l_k of each sample, `[n]`; override this method for a custom loss."""
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
    """Compute class weights that balance the classes of each discrete sub-action.

    w_c = Σ_c' n_c' / (K n_c) for a class c with n_c > 0 occurrences, where K is the number of
    classes of the sub-action that occur. The mean weight over the data is 1. Classes that do not
    occur have weight 0.

    Args:
        distribution: Distribution of the actions.
        batches: The agent's actions, `[n, ...]` each.

    Returns:
        Weights of each discrete component by key (empty for a single component), `[N]` float32.
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
            for k in range(places.shape[-1]):  # Index of the sub-action within the component.
                kinds[key][torch.unique(places[..., k])] = k
    return {key: _balanced(count, kinds[key]) for key, count in counts.items()}


def _balanced(counts: Tensor, kinds: Tensor) -> Tensor:
    weights = torch.zeros(len(counts))
    for kind in torch.unique(kinds):
        made = (kinds == kind) & (counts > 0)
        if made.any():
            total, number = counts[made].sum(), int(made.sum())
            weights[made] = (total / (number * counts[made])).float()
    return weights
