"""Shared type aliases, and helpers for trees: one tensor, or a flat mapping of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from mmap import mmap
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = Array | mmap
"""Memory that arrays can be views of."""
Shape: TypeAlias = tuple[int, ...]
Device: TypeAlias = torch.device | str | None

TensorTree: TypeAlias = torch.Tensor | dict[str, torch.Tensor]
"""Observations or actions: one tensor, or a flat mapping for a Dict or Tuple space
(keys joined by `/`)."""

ArrayTree: TypeAlias = np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]
"""Counterpart of `TensorTree` on the environment side."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Time layout of the samples of a batch, for recurrent networks.

    The batch has L * n samples: step l of sequence i is sample `l * n + i`.
    """

    hidden_state: torch.Tensor
    """Hidden state before the first step of each sequence, `[n, S]`."""

    resets: torch.Tensor
    """Whether an episode begins at a step, which resets the hidden state to 0, `[L, n]` bool."""

    valid: torch.Tensor | None = None
    """Indices of the transitions among the L * n samples, int64; None: all samples are
    transitions."""

    max_resets: int | None = None
    """Upper bound of the number of resets of a sequence, not counting its first step. None: counted
    where it is needed, which synchronises the device."""


def count_resets(resets: torch.Tensor) -> int:
    """Return the maximum number of resets of a sequence, not counting the first step.

    Args:
        resets: Whether the state is reset before a step, bool, `[..., L, n]`.
    """
    counts = resets[..., 1:, :].sum(-2)
    return int(counts.max()) if counts.numel() else 0


T = TypeVar("T")
S = TypeVar("S")


def tree_map(function: Callable[[T], S], tree: T | dict[str, T]) -> S | dict[str, S]:
    """Apply `function` to the tensor, or to each tensor of the mapping."""
    if isinstance(tree, dict):
        return {key: function(leaf) for key, leaf in tree.items()}
    return function(tree)


def precise_dtype(device: torch.device, dtype: torch.dtype = torch.float64) -> torch.dtype:
    """Return `dtype`; on MPS, which does not support float64, float32 instead of float64."""
    lacks_it = device.type == "mps" and dtype == torch.float64
    return torch.float32 if lacks_it else dtype


def is_on(x: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; a device without index matches any index."""
    return x.device.type == device.type and device.index in (None, x.device.index)


def send(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device without synchronising the device; copies only if necessary."""
    # CUDA copies from pageable memory before the call returns; other backends may copy later.
    return x.to(device, non_blocking=device.type == "cuda")


def on_device(columns: T, device: torch.device) -> T:
    """Move the tensors and trees of tensors of a dataclass to a device; keep other fields."""

    def moved(tree: TensorTree) -> TensorTree:
        return tree_map(lambda x: x.to(device), tree)

    return with_trees(columns, {name: moved(tree) for name, tree in trees_of(columns).items()})


def trees_of(record: object) -> dict[str, TensorTree]:
    """Return the tensors and trees of tensors of a dataclass by field; {} for other objects."""
    if not is_dataclass(record) or isinstance(record, type):
        return {}
    given = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: x for name, x in given.items() if isinstance(x, dict | torch.Tensor)}


def with_trees(record: T, trees: Mapping[str, TensorTree]) -> T:
    """Return a copy of a dataclass with some fields replaced."""
    given: Any = record
    result: T = replace(given, **trees)
    return result


def rows_of(tree: TensorTree, rows: int | slice | Tensor | tuple[Tensor, ...]) -> TensorTree:
    """Index each tensor of a tree."""
    return tree_map(lambda x: x[rows], tree)


def tree_leaves(tree: T | dict[str, T]) -> list[T]:
    """Return the tensors of a tree as a list; a single tensor gives a list of one."""
    if isinstance(tree, dict):
        return list(tree.values())
    return [tree]


def leaves_by_key(tree: T | dict[str, T]) -> dict[str, T]:
    """Return the leaves of a tree by key; a single leaf has the key ""."""
    return tree if isinstance(tree, dict) else {"": tree}


def as_tree(leaves: dict[str, T], has_keys: bool) -> T | dict[str, T]:
    """Build a tree from leaves by key; the inverse of `leaves_by_key`."""
    return leaves if has_keys else leaves[""]
