"""Helpers for data that is one tensor or one flat mapping of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["as_tree", "leaves_by_key", "tree_leaves", "tree_map"]

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


def leaves_by_key(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by key; the key of a lone one is empty."""
    return tree if isinstance(tree, dict) else {"": tree}


def as_tree(leaves: dict[str, T], has_keys: bool) -> T | dict[str, T]:
    """The tree of leaves by key; the inverse of `leaves_by_key`."""
    return leaves if has_keys else leaves[""]
