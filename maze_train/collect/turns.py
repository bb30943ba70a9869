"""The turns of the policies of several agents."""

from __future__ import annotations

from typing import Any

from maze_train.data.turns import TurnSplitter
from maze_train.nets.joint import JointModel


def turns_of(model: JointModel, **settings: Any) -> TurnSplitter:
    """Return what makes the rollouts of the policies of several agents.

    Args:
        model: The policies, and who acts with which.
        **settings: All other arguments of `TurnSplitter`.
    """
    sizes, centralized = model.state_sizes, model.centralized
    return TurnSplitter(model.members, sizes, centralized=centralized, **settings)
