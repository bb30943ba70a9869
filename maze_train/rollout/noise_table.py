"""Random numbers that are drawn once for all processes, which refer to noise by its index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError, ShapeError, TrainingError
from maze_train.workers.memory import SharedMemory

if TYPE_CHECKING:
    from maze_train.types import Array, Tensor


NUMBER_NBYTES = 4


class SharedNoiseTable:
    """Standard normal numbers in memory that several processes map.

    A piece of `dim` numbers at a random index serves as one vector of noise, so processes exchange
    indices instead of vectors. The numbers are one stream of one generator,
    `numpy.random.default_rng(seed)`: no part of the table repeats another one. Pieces may overlap.

    Nobody writes to the numbers, though nothing prevents it: all processes would see it. A worker
    that gets the table as an argument of a call maps the same memory.

    Args:
        count: How many numbers, >= 1.
        seed: Seed of the numbers, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2.1.
    """

    def __init__(self, count: int = 10_000_000, seed: int = 0) -> None:
        check_at_least("count", count, 1)
        check_at_least("seed", seed, 0)
        self._lay_over(SharedMemory(count * NUMBER_NBYTES), count, seed)
        np.random.default_rng(seed).standard_normal(dtype=np.float32, out=self._array)

    def _lay_over(self, memory: SharedMemory, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._memory = memory
        self._array: Array = np.ndarray(count, np.float32, buffer=memory.buffer)
        self._numbers = torch.from_numpy(self._array)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._memory, self.count, self.seed

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._lay_over(*state)

    @property
    def array(self) -> Array:
        """All numbers, [count] float32; not to be written."""
        return self._array

    def close(self) -> None:
        """Close the memory for further workers; again does nothing.

        The numbers stay as long as this object, or a view of them, does.
        """
        self._memory.close()

    def check_dim(self, dim: int) -> None:
        """Refuse a policy for which the table has no two different pieces.

        Args:
            dim: Number of parameters of the policy.

        Raises:
            ConfigError: Unless `count` > `dim`.
        """
        if self.count <= dim:
            raise ConfigError(
                "algorithm.noise_table_size",
                f"expected more than {dim}, the number of parameters of the policy, "
                "and better a hundred times as many",
                self.count,
            )

    def get(self, index: int, dim: int) -> Tensor:
        """One vector of noise.

        Args:
            index: Where it begins, in [0, count - dim].
            dim: Its length, in [1, count].

        Returns:
            A view of the table, [dim] float32; not to be written.

        Raises:
            ShapeError: If the vector would begin before the table or end behind it.
        """
        last = self._last_index(dim)
        if not 0 <= index <= last:
            raise ShapeError(
                f"index = {index}: expected one in [0, {last}], "
                f"where {dim} of {self.count} numbers begin"
            )
        return self._numbers[index : index + dim]

    @overload
    def sample_index(self, generator: np.random.Generator, dim: int, size: None = None) -> int: ...

    @overload
    def sample_index(self, generator: np.random.Generator, dim: int, size: int) -> Array: ...

    def sample_index(
        self, generator: np.random.Generator, dim: int, size: int | None = None
    ) -> int | Array:
        """Draw where vectors of noise begin: every place in [0, count - dim] is as likely.

        Args:
            generator: Source of the random numbers.
            dim: Length of the vectors, in [1, count].
            size: How many; None: a single one.

        Returns:
            An index for `get`, or [size] int64.

        Raises:
            ShapeError: If the table holds no vector of that length.
        """
        drawn = generator.integers(0, self._last_index(dim), size=size, endpoint=True)
        return int(drawn) if size is None else drawn

    def _last_index(self, dim: int) -> int:
        if not 1 <= dim <= self.count:
            raise ShapeError(f"dim = {dim}: expected one in [1, {self.count}], the table's size")
        return self.count - dim

    def state_dict(self) -> dict[str, Any]:
        """Seed and size, from which the numbers follow."""
        return {"seed": self.seed, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make sure that `state` is that of a table of the same numbers.

        Raises:
            TrainingError: If seed or count differ: indices would mean other noise.
        """
        own = self.state_dict()
        if state != own:
            raise TrainingError(f"the noise table is that of {own}, the state is that of {state}")
