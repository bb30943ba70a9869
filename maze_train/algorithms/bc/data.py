"""Transitions from selected episodes of a dataset, and a loader for shuffled minibatches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from maze_train.core.checks import check_at_least
from maze_train.core.errors import TrainingError
from maze_train.core.types import Array, Tensor, TensorTree, tree_leaves, tree_map
from maze_train.data.trajectories import TrajectoryPart, groups_of, leaf_spaces, row_columns
from maze_train.spaces.agents import ACTS, AGENTS, agent_spaces
from maze_train.spaces.describe import flat_space
from maze_train.spaces.masks import checked_actions
from maze_train.spaces.tensors import as_tensors, part_of

if TYPE_CHECKING:
    from maze_train.data.trajectory_dataset import TrajectoryDataset


BLOCK_NBYTES = 2**25
"""Chunk size of conversions in bytes."""


def split_episodes(
    num_episodes: int, validation_percentage: float, seed: int
) -> tuple[Array, Array]:
    """Split episodes into training and validation sets.

    Whole episodes are assigned to a set, because consecutive steps are highly correlated. If steps
    were assigned individually, training data would leak into the validation set.

    Args:
        num_episodes: N >= 1.
        validation_percentage: Percentage of episodes held out for validation, [0, 100). The number
            of episodes is rounded. If the percentage is above 0, at least one episode is held out,
            and at least one is used for training.
        seed: Seed of the random split.

    Returns:
        Increasing indices of training and validation episodes, int64. A single episode is used for
        training.
    """
    count = round(num_episodes * validation_percentage / 100)
    if validation_percentage > 0:
        count = min(max(count, 1), num_episodes - 1)
    order = np.random.default_rng(seed).permutation(num_episodes)
    return np.sort(order[count:]), np.sort(order[:count])


class TransitionData:
    """Transitions from selected episodes of a dataset, numbered from 0.

    Final observations are excluded, because they have no action. Each batch is read from the
    (mapped) dataset, unless `load` was called.

    In multi-agent environments, a transition contains the observation and the action of an agent at
    the start of a turn, see `TurnSplitter`.

    Args:
        dataset: The dataset.
        episodes: Increasing indices of the episodes.
        from_env: Converts environment actions to policy actions, see `Distribution.from_env`.
        agents: Agents to include, which must have the same spaces; empty for single-agent datasets.

    Attributes:
        num_samples: Number N of transitions.

    Raises:
        SpaceError: If an action is not in the action space.
    """

    def __init__(
        self,
        dataset: TrajectoryDataset,
        episodes: Array,
        from_env: Callable[[TensorTree], TensorTree],
        *,
        agents: Sequence[str] = (),
    ) -> None:
        metadata = dataset.metadata
        spaces = metadata.observation_space, metadata.action_space
        several = agent_spaces(*spaces) if agents else None
        columns: dict[str, int] = {}
        if several is not None:
            spaces = several.of(agents[0])
            columns = {agent: several.agents.index(agent) for agent in agents}
        self._space = flat_space(spaces[0])
        self._leaves = leaf_spaces(*spaces)
        del self._leaves["rewards"]
        self._columns = row_columns(self._leaves)
        self._from_env = from_env
        self._pieces = _pieces(dataset.parts, episodes, columns)
        ends = np.cumsum([len(piece.steps) for piece in self._pieces], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), ends])
        self.num_samples = int(self._starts[-1])
        self._kept: tuple[TensorTree, TensorTree] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all converted transitions in bytes."""
        return self.num_samples * self._sample_nbytes if self.num_samples else 0

    @cached_property
    def _sample_nbytes(self) -> int:
        obs, actions = self.batch(torch.zeros(1, dtype=torch.int64))
        return sum(leaf.nbytes for leaf in (*tree_leaves(obs), *tree_leaves(actions)))

    def place(self, number: int) -> tuple[int, int, str]:
        """Return the episode, step and agent of a transition (agent "" in single-agent data)."""
        k = int(np.searchsorted(self._starts, number, side="right")) - 1
        piece, row = self._pieces[k], number - int(self._starts[k])
        step = int(piece.steps[row])
        episode = int(piece.obs_rows[row]) - step
        return piece.first + episode, step - int(piece.part.starts[episode]), piece.agent

    def batch(self, indices: Tensor) -> tuple[TensorTree, TensorTree]:
        """Return the observations and policy actions of a batch of transitions.

        Args:
            indices: Indices of transitions, `[n]` int64.

        Returns:
            `[n, *obs shape]` and `[n, *action shape]`, each a tensor or a mapping of tensors.
        """
        if self._kept is None:
            return self._read(indices.numpy())
        obs, actions = self._kept
        return (
            tree_map(lambda x: x.index_select(0, indices), obs),
            tree_map(lambda x: x.index_select(0, indices), actions),
        )

    def blocks(self, nbytes: int = BLOCK_NBYTES) -> Iterator[tuple[TensorTree, TensorTree]]:
        """Yield all transitions in order, in chunks of about `nbytes`."""
        size = max(1, nbytes // self._sample_nbytes) if self.num_samples else 1
        for start in range(0, self.num_samples, size):
            yield self.batch(torch.arange(start, min(start + size, self.num_samples)))

    def load(self) -> None:
        """Convert all transitions and store them in memory, so that batches need no files."""
        if self._kept is not None or not self.num_samples:
            return

        def empty(x: Tensor) -> Tensor:
            return x.new_empty((self.num_samples, *x.shape[1:]))

        first = self._read(np.zeros(1, np.int64))
        obs, actions = tree_map(empty, first[0]), tree_map(empty, first[1])
        start = 0
        for block in self.blocks():
            stop = start + len(tree_leaves(block[0])[0])
            for target, source in zip((obs, actions), block, strict=True):
                for leaf, values in zip(tree_leaves(target), tree_leaves(source), strict=True):
                    leaf[start:stop] = values
            start = stop
        self._kept = obs, actions

    def _read(self, numbers: Array) -> tuple[TensorTree, TensorTree]:
        """Read transitions from the arrays of the dataset."""
        where = np.searchsorted(self._starts, numbers, side="right") - 1
        arrays = self._columns.batched(len(numbers)).arrays()
        for k in np.unique(where):
            piece, chosen = self._pieces[k], where == k
            rows = numbers[chosen] - self._starts[k]
            recorded = piece.part.arrays
            for name, array in arrays.items():
                own_rows = piece.obs_rows if name.startswith("obs") else piece.steps
                array[chosen] = recorded[name][own_rows[rows]]
        for name, leaf in self._leaves.items():
            if name.startswith("actions"):  # The files are not necessarily verified.
                checked_actions(name, arrays[name], len(numbers), leaf)
        trees = groups_of(arrays)
        actions = tree_map(torch.from_numpy, trees["actions"])
        return as_tensors(self._space, trees["obs"]), self._from_env(actions)


class _Piece:
    """Selected transitions of one part (and one agent in multi-agent datasets).

    Args:
        part: The part.
        episodes: Indices of the episodes within the part.
        first: Index of the part's first episode in the dataset.
    """

    def __init__(self, part: TrajectoryPart, episodes: Array, first: int) -> None:
        self.part = part
        self.first = first
        self.agent = ""
        self.steps: Array = _ranges(part.starts[episodes], part.lengths[episodes])
        # Each episode has one more observation than steps.
        self.obs_rows: Array = self.steps + np.repeat(episodes, part.lengths[episodes])

    def of_agent(self, agent: str, column: int) -> _Piece:
        """Return the steps in which an agent acted; `column` is the index in the `acts` flags."""
        obs: Any = self.part.obs
        found = copy(self)
        found.agent = agent
        acts = obs[ACTS][self.obs_rows, column] != 0
        found.steps, found.obs_rows = self.steps[acts], self.obs_rows[acts]
        own = part_of(part_of(obs, AGENTS), agent)
        actions = part_of(cast("dict[str, Array]", self.part.actions), agent)
        found.part = replace(self.part, obs=own, actions=actions)
        return found


def _pieces(
    parts: Sequence[TrajectoryPart], episodes: Array, columns: Mapping[str, int]
) -> list[_Piece]:
    pieces: list[_Piece] = []
    first = 0
    for part in parts:
        count = len(part.lengths)
        own = episodes[(episodes >= first) & (episodes < first + count)] - first
        if len(own):
            piece = _Piece(part, own, first)
            pieces += [piece.of_agent(*each) for each in columns.items()] or [piece]
        first += count
    return pieces


def _ranges(starts: Array, lengths: Array) -> Array:
    """Concatenate the ranges `start, ..., start + length - 1`."""
    total = int(lengths.sum())
    offsets = np.repeat(np.cumsum(lengths) - lengths, lengths)
    ranges: Array = np.arange(total) - offsets + np.repeat(starts, lengths)
    return ranges


AHEAD = 4
"""Number of prefetched minibatches per worker."""


class BatchLoader:
    """Infinite iterator over shuffled minibatches; each pass contains every sample once.

    The last minibatch of a pass may be smaller. Minibatch k depends only on the seed and k, so
    results do not depend on the number of workers or on interruptions.

    Args:
        source: The transitions.
        batch_size: Samples per minibatch, >= 1.
        seed: Seed of the shuffling.
        n_workers: Number of threads that prefetch minibatches; 0 loads in the calling thread.

    Attributes:
        position: Number of minibatches returned so far.

    Raises:
        TrainingError: If there are no transitions.
    """

    def __init__(
        self, source: TransitionData, batch_size: int, *, seed: int = 0, n_workers: int = 0
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        check_at_least("n_workers", n_workers, 0)
        if source.num_samples < 1:
            raise TrainingError("the dataset has no transitions")
        self.source = source
        self.batch_size = batch_size
        self.position = 0
        self._seed = seed
        self._n_workers = n_workers
        self._workers: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[tuple[TensorTree, TensorTree]]] = deque()
        self._orders: dict[int, Tensor] = {}

    @property
    def batches_per_pass(self) -> int:
        """Number of minibatches per pass."""
        return -(-self.source.num_samples // self.batch_size)

    def next(self) -> tuple[TensorTree, TensorTree]:
        """Return the next minibatch."""
        if not self._n_workers:
            batch = self.source.batch(self._indices(self.position))
        else:
            batch = self._next_of_workers()
        self.position += 1
        return batch

    def _next_of_workers(self) -> tuple[TensorTree, TensorTree]:
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._n_workers, "batch-loader")
        while len(self._ahead) < AHEAD * self._n_workers:
            indices = self._indices(self.position + len(self._ahead))
            self._ahead.append(self._workers.submit(self.source.batch, indices))
        return self._ahead.popleft().result()

    def _indices(self, number: int) -> Tensor:
        """Return the sample indices of a minibatch."""
        epoch, place = divmod(number, self.batches_per_pass)
        order = self._orders.get(epoch)
        if order is None:
            order = self._order(epoch)
            self._orders = {k: kept for k, kept in self._orders.items() if k >= epoch - 1}
            self._orders[epoch] = order
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def _order(self, epoch: int) -> Tensor:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        # Converted first, because NumPy 1 raises an error for shifts of uint64 by int.
        seed = int(sequence.generate_state(1, np.uint64)[0]) >> 1
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.source.num_samples, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of minibatches returned so far."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`."""
        self._drop_ahead()
        self.position = state["position"]
        self._orders.clear()

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Stop the workers. Closing again has no effect."""
        self._drop_ahead()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None
