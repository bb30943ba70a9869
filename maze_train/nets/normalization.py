"""Observations scaled to mean 0 and deviation 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.errors import ConfigError, TrainingError, did_you_mean, nearest
from maze_train.core.types import Tensor, TensorTree
from maze_train.functional.moments import Moments, batch_moments, merge_moments
from maze_train.nets.config import ObservationNormalizationConfig
from maze_train.spaces.describe import is_image

EPSILON = 1e-8
"""Added to the variance."""

RESOLUTION, WIDE_RESOLUTION = 1e-6, 1e-12
"""An entry whose standard deviation is below this fraction of its mean counts as constant: so
little is rounding error in float32, and in float64 for the integers of `_is_wide`."""

STATISTICS = ("count", "mean", "var", "frozen")


class ObservationNormalizer(nn.Module):
    """Normalises Box observations other than images, entry by entry.

    (x - mean) / sqrt(var + 1e-8), clipped

    Mean and variance are those of all observations that `update` has got; before the first update
    observations pass as float32, unchanged, not clipped either. An entry that never changed is
    centred but not scaled: it gives 0, and a small number should it change a little later.
    Discrete, MultiDiscrete and MultiBinary observations, images and excluded keys always pass
    unchanged.

    The mean is subtracted from integers of 32 and 64 bits in float64: in float32, time stamps in
    seconds would be rounded to multiples of 128.

    The statistics are float64 buffers, all keys in one vector, whatever dtype the module is
    converted to. Training mode makes no difference.

    Args:
        space: Flat observation space, without action masks.
        config: Settings; of these the bound, and keys to leave out.

    Raises:
        ConfigError: If an excluded key is not one of the space.
    """

    count: Tensor
    mean: Tensor
    var: Tensor
    frozen: Tensor

    def __init__(self, space: spaces.Space[Any], config: ObservationNormalizationConfig) -> None:
        super().__init__()
        leaves = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        _check_excluded(config.exclude, list(leaves))
        self._shapes = {
            key: leaf.shape
            for key, leaf in leaves.items()
            if isinstance(leaf, spaces.Box) and key not in config.exclude and _is_vector(leaf)
        }
        self._wide = [_is_wide(leaves[key].dtype) for key in self._shapes]
        self.config = config
        self._clip = config.clip
        total = sum(math.prod(shape) for shape in self._shapes.values())
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(total, dtype=torch.float64))
        self.register_buffer("var", torch.zeros(total, dtype=torch.float64))
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        for i, shape in enumerate(self._shapes.values()):
            # Numbered, because a key may hold characters that names of buffers must not have.
            dtype = torch.float64 if self._wide[i] else torch.get_default_dtype()
            self.register_buffer(f"_mean_{i}", torch.zeros(shape, dtype=dtype), persistent=False)
            self.register_buffer(f"_factor_{i}", torch.ones(shape), persistent=False)
        self._has_statistics = False

    @property
    def keys(self) -> list[str]:
        """Keys that are normalised; the key of a lone observation is empty."""
        return list(self._shapes)

    def forward(self, obs: TensorTree) -> TensorTree:
        """Normalised observations.

        Args:
            obs: Observations, `[..., *obs shape]`; not modified. Keys may be missing.

        Returns:
            Observations of the same shapes; what is normalised is float32.
        """
        if not isinstance(obs, dict):
            return self._normalized(0, obs) if self._shapes else obs
        normalized = dict(obs)
        for i, key in enumerate(self._shapes):
            if key in obs:
                normalized[key] = self._normalized(i, obs[key])
        return normalized

    def _normalized(self, i: int, x: Tensor) -> Tensor:
        mean, factor = self._buffers[f"_mean_{i}"], self._buffers[f"_factor_{i}"]
        assert mean is not None
        assert factor is not None
        if not self._has_statistics:
            return x.to(factor.dtype)
        # A difference first: x * factor - mean * factor would cancel digits of large means.
        x = (x.to(mean.dtype) - mean).to(factor.dtype).mul_(factor)
        return x.clamp_(-self._clip, self._clip) if self._clip else x

    def update(self, obs: TensorTree) -> None:
        """Add observations to the statistics; nothing happens after `freeze`.

        Args:
            obs: Observations, `[..., *obs shape]`, the same number for each key in `keys`; other
                keys are not looked at.

        Raises:
            TrainingError: If an observation is not finite; nothing was added then.
        """
        if not self._shapes or bool(self.frozen):
            return
        batches = []
        for key, shape in self._shapes.items():
            leaf = obs[key] if isinstance(obs, dict) else obs
            rows = leaf.reshape(-1, math.prod(shape))
            _check_finite(key, shape, rows)
            batches.append(batch_moments(rows))
        self.merge(
            Moments(
                batches[0].count.to(self.count),
                torch.cat([batch.mean for batch in batches]).to(self.mean),
                torch.cat([batch.var for batch in batches]).to(self.var),
            )
        )

    def merge(self, moments: Moments) -> None:
        """Take the moments of observations into the statistics; nothing happens after `freeze`.

        Args:
            moments: Of all entries that are normalised, in one vector in the order of `keys`.
        """
        if not self._shapes or bool(self.frozen):
            return
        merged = merge_moments(Moments(self.count, self.mean, self.var), moments)
        self.count.copy_(merged.count)
        self.mean.copy_(merged.mean)
        self.var.copy_(merged.var)
        self._refresh()

    @property
    def is_waiting(self) -> bool:
        """Whether there are fewer observations than wanted before training."""
        return not self.frozen and int(self.count) < self.config.initial_steps

    def freeze(self) -> None:
        """Keep the statistics as they are from now on."""
        self.frozen.fill_(True)

    def _refresh(self) -> None:
        """Compute from the statistics what `forward` works with."""
        self._has_statistics = bool(self.count > 0)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        pieces = zip(torch.split(self.mean, sizes), torch.split(self.var, sizes), strict=True)
        for i, (mean, var) in enumerate(pieces):
            resolution = WIDE_RESOLUTION if self._wide[i] else RESOLUTION
            is_constant = var <= (resolution * mean).square()
            factor = torch.where(is_constant, 1.0, (var + EPSILON).rsqrt())
            for name, values in (("mean", mean), ("factor", factor)):
                own = self.get_buffer(f"_{name}_{i}")
                own.copy_(values.view(own.shape))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ObservationNormalizer:
        # Statistics move with the module, but keep their precision.
        wide = (f"_mean_{i}" for i, is_wide in enumerate(self._wide) if is_wide)
        kept = {name: self.get_buffer(name) for name in (*STATISTICS, *wide)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for name, buffer in kept.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self


def _is_vector(leaf: spaces.Box) -> bool:
    """Whether a Box is not an image, and has entries."""
    return not is_image(leaf) and math.prod(leaf.shape) > 0


def _is_wide(dtype: np.dtype[Any] | None) -> bool:
    """Whether a Box of a dtype holds integers that float32 cannot hold."""
    return (
        dtype is not None and dtype.kind in "iu" and dtype.itemsize >= np.dtype(np.int32).itemsize
    )


def _check_excluded(excluded: list[str], keys: list[str]) -> None:
    for key in excluded:
        if key in keys and key:
            continue
        expected = f"expected keys of the observation space, {keys}"
        if keys == [""]:
            expected = "the observation space has no keys, it is a single Box: leave it empty"
        else:
            expected += did_you_mean(map(repr, nearest(key, keys, 1)))
        raise ConfigError("model.normalization.exclude", expected, key)


def _check_finite(key: str, shape: tuple[int, ...], rows: Tensor) -> None:
    """Refuse observations `[N, entries]` of a key, naming the first entry that is not finite."""
    finite = torch.isfinite(rows)
    if bool(finite.all()):
        return
    row, column = finite.logical_not().nonzero()[0].tolist()
    index = [int(i) for i in np.unravel_index(column, shape)] if shape else []
    where = f"the observation {key!r}" if key else "the observation"
    raise TrainingError(
        f"entry {index} of {where} is {float(rows[row, column])}: expected finite numbers; repair "
        "the environment, or name the key in model.normalization.exclude"
    )
