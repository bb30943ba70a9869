"""Rollouts column by column, for tests of what stores, joins and sends them."""

from __future__ import annotations

from dataclasses import fields

import torch

from maze_train.core.types import leaves_by_key
from maze_train.data.frames import FrameStacks

__all__ = ["assert_same_rollouts", "columns_of", "whole"]


def whole(leaf):
    """A tensor of what may be stacks of frames."""
    return leaf.whole() if isinstance(leaf, FrameStacks) else leaf


def columns_of(rollout):
    """The leaves of the columns that are there, by name."""
    return {
        f"{column.name}/{key}": leaf
        for column in fields(rollout)
        if getattr(rollout, column.name) is not None
        for key, leaf in leaves_by_key(getattr(rollout, column.name)).items()
    }


def assert_same_rollouts(found, expected):
    """Refuse other columns, forms and dtypes, and another bit."""
    ours, theirs = columns_of(found), columns_of(expected)
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        assert type(leaf) is type(theirs[name]), name
        column, expected_column = whole(leaf), whole(theirs[name])
        assert column.dtype is expected_column.dtype, name
        assert torch.equal(column, expected_column), name
