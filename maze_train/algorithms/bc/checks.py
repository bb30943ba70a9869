"""Checks of recorded actions before a policy learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.bc.metrics import parts_of
from maze_train.distributions.gaussian import DiagonalGaussian
from maze_train.errors import DatasetError
from maze_train.notices import warn
from maze_train.spaces.masks import mask_layout
from maze_train.types import tree_leaves

if TYPE_CHECKING:
    from gymnasium import spaces

    from maze_train.data.transition_data import TransitionData
    from maze_train.distributions.base import Distribution


SCALES = (0.05, 20.0)
"""Deviations of recorded actions between which a Gaussian with deviation 1 finds them soon."""


def check_legal(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    distribution: Distribution,
    data: TransitionData,
) -> None:
    """Refuse recorded actions that the masks of their observations forbid.

    Args:
        observation_space: Observation space of one environment, or of the agents.
        action_space: Action space, likewise.
        distribution: The family of action distributions.
        data: The transitions.

    Raises:
        DatasetError: If there is one, with its episode and step.
    """
    layout = mask_layout(observation_space, action_space)
    if layout is None:
        return
    first = 0
    for obs, actions in data.blocks():
        assert isinstance(obs, dict)
        empty = torch.zeros(1, distribution.param_size)
        by_key = {key: (part, own) for key, part, _, own in parts_of(distribution, empty, actions)}
        for masked in layout.parts:
            part, own = by_key[masked.part]
            mask = obs[masked.leaf].flatten(1)[:, masked.start : masked.stop]
            is_legal = (mask.gather(1, part.choices(own)) != 0).all(1)
            if not is_legal.all():
                row = int(is_legal.logical_not().nonzero()[0, 0])
                episode, step, agent = data.place(first + row)
                name = f"part {masked.part!r} of the action" if masked.part else "the action"
                whose = f" of {agent}" if agent else ""
                raise DatasetError(
                    f"episode {episode}, step {step} of the data set: the mask of the observation"
                    f"{whose} forbids {name} that was recorded"
                )
        first += len(tree_leaves(actions)[0])


def warn_of_scale(distribution: Distribution, data: TransitionData) -> None:
    """Say where actions are far larger or smaller than what a Gaussian policy begins with."""
    _, actions = next(data.blocks())
    empty = torch.zeros(1, distribution.param_size)
    for key, part, _, own in parts_of(distribution, empty, actions):
        if not isinstance(part, DiagonalGaussian):
            continue
        size = float(own.double().square().mean().sqrt())
        if SCALES[0] <= size <= SCALES[1] or size == 0:
            continue
        name = f"part {key!r} of the recorded actions" if key else "recorded actions"
        warn(
            f"{name} are about {size:.3g}, and a diagonal_gaussian begins with 0 ± 1: it "
            "takes long to get there. Scale actions with a wrapper, or, between finite bounds, set "
            "model.distributions={Box: squashed_gaussian}"
        )
