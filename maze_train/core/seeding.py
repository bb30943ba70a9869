"""Seeds: one integer gives every random stream of a run.

Streams are derived with `numpy.random.SeedSequence`, so runs with neighbouring seeds share nothing,
and adding a stream changes no other.
"""

from __future__ import annotations

import secrets
import zlib

import numpy as np

EPISODES_PER_BLOCK = 64


def draw_seed() -> int:
    """A fresh seed in [0, 2^31) from the operating system's entropy."""
    return secrets.randbelow(2**31)


class Seeds:
    """Named, independent random streams of one run.

    Args:
        root: The seed of the run, an integer >= 0.
    """

    def __init__(self, root: int) -> None:
        self.root = root

    def integer(self, name: str) -> int:
        """A seed in [0, 2^63) for the stream `name`; the same name always gives the same seed."""
        sequence = np.random.SeedSequence(self.root, spawn_key=(zlib.crc32(name.encode()),))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def generator(self, name: str) -> np.random.Generator:
        """A numpy generator for the stream `name`."""
        return np.random.default_rng(self.integer(name))


class EpisodeSeeds:
    """The seeds of the episodes of one environment out of `num_envs`.

    Episodes are numbered over all environments: the k-th episode of environment i is number
    `i + k * num_envs`. The seed of an episode depends on its number alone, so the same episodes are
    played however they are spread.

    Args:
        root: Seed of the whole set of environments, an integer >= 0.
        index: Which environment, in [0, num_envs).
        num_envs: How many environments share the episodes.
    """

    def __init__(self, root: int, index: int, num_envs: int) -> None:
        self.root = root
        self.index = index
        self.num_envs = num_envs
        self.episodes_started = 0
        self._block_number = -1
        self._block: list[int] = []

    def next(self) -> int:
        """The seed of the next episode, in [0, 2^32)."""
        number = self.index + self.episodes_started * self.num_envs
        self.episodes_started += 1
        block_number, offset = divmod(number, EPISODES_PER_BLOCK)
        if block_number != self._block_number:
            sequence = np.random.SeedSequence(self.root, spawn_key=(block_number,))
            self._block = [int(word) for word in sequence.generate_state(EPISODES_PER_BLOCK)]
            self._block_number = block_number
        return self._block[offset]
