"""Random streams of a run, all derived from one seed.

Streams are derived with `numpy.random.SeedSequence`, so runs with adjacent seeds are independent,
and additional streams do not change existing streams.
"""

from __future__ import annotations

import importlib.util
import random
import secrets
import sys
import zlib
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np

EPISODES_PER_BLOCK = 64

SEED_LIMIT = 2**31
"""Exclusive upper bound of seeds for environments and user-defined policies.

Simulators written in C or C++ store the seed in a signed 32-bit integer.
"""


def draw_seed() -> int:
    """Return a new seed in [0, 2^31) from the operating system's entropy."""
    return secrets.randbelow(SEED_LIMIT)


class Seeds:
    """Named, independent random streams of one run.

    Args:
        root: The seed of the run, an integer >= 0.
    """

    def __init__(self, root: int) -> None:
        self.root = root

    def integer(self, name: str) -> int:
        """Return a seed in [0, 2^63) for the stream `name`; deterministic for each name."""
        sequence = np.random.SeedSequence(self.root, spawn_key=(zlib.crc32(name.encode()),))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def generator(self, name: str) -> np.random.Generator:
        """Return a NumPy generator for the stream `name`."""
        return np.random.default_rng(self.integer(name))


class EpisodeSeeds:
    """Seeds of the episodes of one of `num_envs` environments.

    Episodes are numbered over all environments: episode k of environment i has the number `i + k *
    num_envs`. The seed of an episode depends only on this number, so results do not depend on the
    distribution of environments over processes.

    Args:
        root: Seed of all environments, an integer >= 0.
        index: Index of the environment, in [0, num_envs).
        num_envs: Number of environments.
    """

    def __init__(self, root: int, index: int, num_envs: int) -> None:
        self.root = root
        self.index = index
        self.num_envs = num_envs
        self.episodes_started = 0
        self._block_number = -1
        self._block: list[int] = []

    def next(self) -> int:
        """Return the seed of the next episode, in [0, 2^31)."""
        number = self.index + self.episodes_started * self.num_envs
        self.episodes_started += 1
        block_number, offset = divmod(number, EPISODES_PER_BLOCK)
        if block_number != self._block_number:
            sequence = np.random.SeedSequence(self.root, spawn_key=(block_number,))
            words = sequence.generate_state(EPISODES_PER_BLOCK)
            self._block = [int(word) % SEED_LIMIT for word in words]
            self._block_number = block_number
        return self._block[offset]


def episode_seed(root: int, index: int, num_envs: int, episodes: int) -> int:
    """Return the seed of episode number `episodes` (>= 1) of an environment."""
    seeds = EpisodeSeeds(root, index, num_envs)
    seeds.episodes_started = episodes - 1
    return seeds.next()


def global_entropy() -> int:
    """Derive an integer in [0, 2^32) from the state of NumPy's global generator."""
    state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    return zlib.crc32(state["key"].tobytes() + int(state["pos"]).to_bytes(4, "little"))


def seed_generators(*key: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch.

    If PyTorch is not imported yet, its generator is seeded on import: in worker processes, PyTorch
    is imported only if an environment requires PyTorch, possibly during a step.

    Args:
        key: Integers >= 0; different keys give independent streams.
    """
    words = [int(word) for word in np.random.SeedSequence(key).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])  # noqa: NPY002
    pending = [finder for finder in sys.meta_path if isinstance(finder, _SeedTorchOnImport)]
    for finder in pending:
        sys.meta_path.remove(finder)
    torch = sys.modules.get("torch")
    if torch is None:
        sys.meta_path.insert(0, _SeedTorchOnImport(words[2]))
    else:
        torch.manual_seed(words[2])


class _SeedTorchOnImport(MetaPathFinder):
    """Import hook that seeds PyTorch's global generator when PyTorch is imported."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return PyTorch's spec with a seeding loader; None for other modules."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _SeedingLoader(spec.loader, self._seed)
        return spec


class _SeedingLoader(Loader):
    """Loads PyTorch with its original loader, then seeds its global generator."""

    def __init__(self, loader: Loader, seed: int) -> None:
        self._loader = loader
        self._seed = seed

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module; see `Loader`."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module and seed its generator."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        module.manual_seed(self._seed)


def distinct_seeds(root: int, count: int) -> list[int]:
    """Return `count` different seeds in [0, 2^31), independent of the seeds for other roots."""
    words = np.random.SeedSequence(root).generate_state(count + 64)
    return list(dict.fromkeys(int(word) >> 1 for word in words))[:count]
