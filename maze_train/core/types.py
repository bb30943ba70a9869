"""Names for the data that every room shares, and helpers for one tensor or a flat mapping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]
Shape: TypeAlias = tuple[int, ...]
Device: TypeAlias = torch.device | str | None

TensorTree: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""Observations or actions: one tensor, or one flat mapping for a Dict or Tuple space
(keys joined by `/`)."""

ArrayTree: TypeAlias = np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]
"""The same on the side of the environments."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Layout of the samples of a batch in time, for recurrent networks.

    The batch has L * n samples: step l of sequence i is sample `l * n + i`.
    """

    hidden_state: torch.Tensor
    """Hidden state before the first step of each sequence, `[n, S]`."""

    resets: torch.Tensor
    """Whether an episode begins at a step, so that the hidden state is zero, `[L, n]` bool."""

    valid: torch.Tensor | None = None
    """Samples that are transitions, as indices into the L * n, int64; None: all are."""


T = TypeVar("T")
S = TypeVar("S")


def tree_map(function: Callable[[T], S], tree: T | dict[str, T]) -> S | dict[str, S]:
    """`function` applied to the tensor, or to each tensor of the mapping."""
    if isinstance(tree, dict):
        return {key: function(leaf) for key, leaf in tree.items()}
    return function(tree)


def is_on(x: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without a number is any of its type."""
    return x.device.type == device.type and device.index in (None, x.device.index)


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without a wait for what that still computes; itself, if it is there."""
    # CUDA has read ordinary memory when the call returns; others may read it later.
    return x.to(device, non_blocking=device.type == "cuda")


def on_device(columns: T, device: torch.device) -> T:
    """A dataclass of tensors, or trees of them, on a device; the other entries stay."""
    record: Any = columns
    given = {field.name: getattr(record, field.name) for field in fields(record)}
    moved = {
        name: tree_map(lambda x: x.to(device), value)
        for name, value in given.items()
        if isinstance(value, dict) or hasattr(value, "to")
    }
    result: T = replace(record, **moved)
    return result


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
