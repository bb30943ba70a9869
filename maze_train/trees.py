"""The two helpers for data that is one tensor or one flat mapping of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tree_leaves", "tree_map"]

T = TypeVar("T")
S = TypeVar("S")


def tree_map(function: Callable[[T], S], tree: T | dict[str, T]) -> S | dict[str, S]:
    """`function` applied to the tensor, or to each tensor of the mapping."""
    if isinstance(tree, dict):
        return {key: function(leaf) for key, leaf in tree.items()}
    return function(tree)


def tree_leaves(tree: T | dict[str, T]) -> list[T]:
    """The tensor in a list, or the tensors of the mapping in its order."""
    if isinstance(tree, dict):
        return list(tree.values())
    return [tree]
