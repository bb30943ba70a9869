"""Shards of a minibatch for data-parallel learners."""

from __future__ import annotations

from dataclasses import replace

import torch

from maze_train.algorithms.actor_critic.batch import ActorCriticBatch
from maze_train.core.types import Sequences, Tensor, tree_map


def shard_batch(batch: ActorCriticBatch, rank: int, count: int) -> tuple[ActorCriticBatch, int]:
    """Return the shard of a rank, with every `count`-th transition or sequence, and its size.

    If there are fewer units than ranks, a rank without samples gets the first one and size 0.
    """
    units = batch.size if batch.sequences is None else len(batch.sequences.hidden_state)
    start, is_empty = (rank, False) if rank < units else (0, True)
    rows = torch.arange(units, device=batch.columns.device)[start :: units if is_empty else count]
    samples, positions, sequences = rows, rows, None
    if batch.sequences is not None:
        positions = torch.arange(len(batch.sequences.resets) * units, device=rows.device)
        positions = positions.view(-1, units)[:, rows].flatten()
        samples, sequences = _select(batch.sequences, rows, positions)
    part = replace(
        batch,
        obs=tree_map(lambda x: x.index_select(0, positions), batch.obs),
        actions=tree_map(lambda x: x.index_select(0, samples), batch.actions),
        columns=batch.columns.index_select(1, samples),
        sequences=sequences,
    )
    return part, 0 if is_empty else part.size


def _select(sequences: Sequences, rows: Tensor, positions: Tensor) -> tuple[Tensor, Sequences]:
    """Select sequences, and return the indices of their samples with them.

    Args:
        sequences: All sequences.
        rows: Indices of the selected sequences.
        positions: Indices of their steps, in the order of the result.
    """
    samples, valid = positions, None
    if sequences.valid is not None:
        numbers = torch.full((sequences.resets.numel(),), -1, device=rows.device)
        numbers[sequences.valid] = torch.arange(len(sequences.valid), device=rows.device)
        samples = numbers[positions]
        valid = (samples >= 0).nonzero().squeeze(1)
        samples = samples[valid]
    return samples, Sequences(sequences.hidden_state[rows], sequences.resets[:, rows], valid)
