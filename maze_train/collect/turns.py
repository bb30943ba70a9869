"""Splits rollouts of multi-agent environments by policy."""

from __future__ import annotations

from typing import Unpack

from maze_train.data.turns import TurnOptions, TurnSplitter
from maze_train.nets.joint import JointModel


def turns_of(model: JointModel, **options: Unpack[TurnOptions]) -> TurnSplitter:
    """Create a `TurnSplitter` for the policies of a multi-agent model.

    Args:
        model: The policies and their agents.
        **options: Other arguments of `TurnSplitter`.
    """
    sizes, centralized = model.state_sizes, model.centralized
    return TurnSplitter(model.members, sizes, centralized=centralized, **options)
