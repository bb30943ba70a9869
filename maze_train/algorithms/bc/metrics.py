"""Metrics of imitated actions, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gymnasium.spaces import Box, MultiBinary

from maze_train.algorithms.bc.events import ImitationEvents
from maze_train.spaces.describe import choice_sizes, flat_spaces
from maze_train.types import Tensor, TensorTree, leaves_by_key

if TYPE_CHECKING:
    from gymnasium import Space

    from maze_train.distributions.base import Distribution
    from maze_train.events import Event


TOP_5_MIN, TOP_10_MIN = 10, 20
"""Numbers of choices above which it is worth knowing whether one is among the 5 or 10 likeliest."""


def parts_of(
    distribution: Distribution, params: Tensor, actions: TensorTree
) -> list[tuple[str, Distribution, Tensor, Tensor]]:
    """Key, distribution, parameters and actions of each part; the key of a lone one is empty."""
    by_key = leaves_by_key(actions)
    pieces = zip(distribution.parts.items(), distribution.split(params), strict=True)
    return [(key, part, own, by_key[key]) for (key, part), own in pieces]


class ImitationMetrics:
    """Compares the most likely actions with recorded ones.

    Args:
        distribution: The family of action distributions.
        action_space: Action space of one environment.
    """

    def __init__(self, distribution: Distribution, action_space: Space[Any]) -> None:
        self._distribution = distribution
        self._leaves = flat_spaces(action_space)

    @torch.no_grad()
    def __call__(self, params: Tensor, actions: TensorTree) -> list[tuple[Event, Tensor]]:
        """Events with their values, 0-d.

        Args:
            params: Parameters, `[n, param_size]`, of observations.
            actions: The agent's actions that were recorded there, `[n, ...]`.

        Returns:
            Where actions have several parts, the mean of an event over the parts, then those of the
            parts.
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
        return [(ImitationEvents.multi_binary_accuracy, (mode == actions).double().mean())]
    if isinstance(space, Box):
        chosen, recorded = part.to_env(mode), part.to_env(actions)
        assert isinstance(chosen, torch.Tensor)
        assert isinstance(recorded, torch.Tensor)
        deviation = (chosen.double() - recorded.double()).abs()
        return [(ImitationEvents.box_mean_abs_deviation, deviation.mean())]
    sizes = torch.tensor(choice_sizes(space))
    ranks = _ranks(sizes.tolist(), part, params, actions)
    events = ImitationEvents
    found = [(events.discrete_accuracy, _share(ranks, 1))]
    if (sizes > TOP_5_MIN).any():
        found.append((events.discrete_top_5_accuracy, _share(ranks[:, sizes > TOP_5_MIN], 5)))
    if (sizes > TOP_10_MIN).any():
        found.append((events.discrete_top_10_accuracy, _share(ranks[:, sizes > TOP_10_MIN], 10)))
    return [*found, (events.discrete_action_rank, ranks.double().mean())]


def _share(ranks: Tensor, k: int) -> Tensor:
    """Share of the ranks that are at most k."""
    return (ranks <= k).double().mean()


def _ranks(sizes: list[int], part: Distribution, params: Tensor, actions: Tensor) -> Tensor:
    """Place of each choice among those of its kind, from 1, `[n, K]`; of equals the first is first.

    So a choice has place 1 exactly if it is the mode.
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
