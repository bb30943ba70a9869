"""Shuffled minibatches of a data set, pass after pass, that can be continued anywhere."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from maze_train.checks import check_at_least
from maze_train.errors import TrainingError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from maze_train.types import Tensor, TensorTree


AHEAD = 4
"""Minibatches for each worker that are read before they are needed."""


class BatchSource(Protocol):
    """Source of minibatches."""

    num_samples: int
    """Number of samples."""

    def batch(self, indices: Tensor) -> tuple[TensorTree, TensorTree]:
        """The samples of some numbers, `[n]` int64."""
        ...


class BatchLoader:
    """Gives minibatches without end: each pass has every sample once, in an order of its own.

    The last minibatch of a pass is smaller when the sizes do not divide. Minibatch k follows from
    the seed and k alone, so that neither workers nor an interruption change anything.

    Args:
        source: The samples.
        batch_size: Samples per minibatch, >= 1.
        seed: Seed of the orders.
        n_workers: Threads that read minibatches ahead; 0: each is read when it is asked for.

    Attributes:
        position: Minibatches that were given.

    Raises:
        TrainingError: If there is no sample.
    """

    def __init__(
        self, source: BatchSource, batch_size: int, *, seed: int = 0, n_workers: int = 0
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        check_at_least("n_workers", n_workers, 0)
        if source.num_samples < 1:
            raise TrainingError("the data set has no transition to learn from")
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
        """Minibatches of one pass over the data."""
        return -(-self.source.num_samples // self.batch_size)

    def next(self) -> tuple[TensorTree, TensorTree]:
        """The next minibatch."""
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
        """Numbers of the samples of a minibatch."""
        epoch, place = divmod(number, self.batches_per_pass)
        order = self._orders.get(epoch)
        if order is None:
            order = self._order(epoch)
            self._orders = {k: kept for k, kept in self._orders.items() if k >= epoch - 1}
            self._orders[epoch] = order
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def _order(self, epoch: int) -> Tensor:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(epoch,))
        generator = torch.Generator().manual_seed(
            int(sequence.generate_state(1, np.uint64)[0] >> 1)
        )
        return torch.randperm(self.source.num_samples, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Number of minibatches given so far."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._drop_ahead()
        self.position = state["position"]
        self._orders.clear()

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """End the workers; calling it again does nothing."""
        self._drop_ahead()
        if self._workers is not None:
            self._workers.shutdown(wait=True)
            self._workers = None
