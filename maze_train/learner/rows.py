"""Shards of minibatches for data-parallel learners."""

from __future__ import annotations

from typing import TypeVar

from maze_train.core.errors import TrainingError
from maze_train.core.types import Tensor, tree_leaves, tree_map, trees_of, with_trees

Batch = TypeVar("Batch")


def own_rows(rows: Tensor, rank: int, count: int) -> Tensor:
    """Return every `count`-th row from row `rank` on; if there is none, return the first row."""
    return rows[rank::count] if len(rows) > rank else rows[:1]


def shard_rows(batch: Batch, rank: int, count: int) -> tuple[Batch, int, int]:
    """Return a shard of a dataclass of tensors `[n, ...]` or mappings of tensors.

    Args:
        batch: The minibatch.
        rank: Index of the shard.
        count: Number of shards.

    Returns:
        The shard (the first row of the batch if the shard is empty), the number of rows in the
        shard, and the number of rows in the batch.

    Raises:
        TrainingError: If the batch is not a dataclass of tensors, or row counts differ.
    """
    trees = {name: tree for name, tree in trees_of(batch).items() if tree_leaves(tree)}
    sizes = {len(leaf) for tree in trees.values() for leaf in tree_leaves(tree)}
    if len(sizes) != 1:
        raise TrainingError(
            f"a minibatch of the type {type(batch).__name__} cannot be sharded: expected a "
            "dataclass of tensors with one row per sample, a custom Learner.shard method, or "
            "learner_group.n_learners=1"
        )
    own = {name: tree_map(lambda x: own_rows(x, rank, count), t) for name, t in trees.items()}
    size = sizes.pop()
    return with_trees(batch, own), len(range(rank, size, count)), size
