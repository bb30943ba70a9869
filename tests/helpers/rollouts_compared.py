"""Comparison of rollouts column by column."""

from __future__ import annotations

from dataclasses import fields

import torch

from maze_train.core.types import leaves_by_key


def columns_of(rollout):
    """Return the leaves of all columns that are set, by name."""
    return {
        f"{column.name}/{key}": leaf
        for column in fields(rollout)
        if column.name != "has_gaps" and getattr(rollout, column.name) is not None
        for key, leaf in leaves_by_key(getattr(rollout, column.name)).items()
    }


def assert_same_rollouts(found, expected):
    """Check that columns, types, dtypes and values are identical."""
    ours, theirs = columns_of(found), columns_of(expected)
    assert list(ours) == list(theirs)
    for name, leaf in ours.items():
        assert type(leaf) is type(theirs[name]), name
        assert leaf.dtype is theirs[name].dtype, name
        assert torch.equal(leaf, theirs[name]), name
