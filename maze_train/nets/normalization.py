"""Normalization of observations to mean 0 and standard deviation 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.core.errors import ConfigError, TrainingError, did_you_mean, nearest
from maze_train.core.types import Tensor, TensorTree, precise_dtype
from maze_train.functional.moments import Moments, batch_moments, merge_moments
from maze_train.nets.config import ObservationNormalizationConfig
from maze_train.spaces.describe import is_image

EPSILON = 1e-8
"""Constant added to the variance."""

RESOLUTION, WIDE_RESOLUTION = 1e-6, 1e-12
"""Entries with a smaller relative standard deviation count as constant, because their changes are
rounding errors: in float32, and in float64 for wide integers (see `_is_wide`)."""

STATISTICS = ("count", "mean", "var")


class ObservationNormalizer(nn.Module):
    """Normalizes Box observations other than images elementwise: (x - mean) / sqrt(var + 1e-8).

    The result is clipped to `config.clip`. Mean and variance are taken over all observations passed
    to `update`; before the first update, observations are only converted to float32. Entries that
    have been constant so far are centred but not scaled, so a later small change remains small.
    Discrete, MultiDiscrete and MultiBinary observations, images and excluded keys are returned
    unchanged.

    For 32-bit and 64-bit integers, the mean is subtracted in float64, because float32 would round
    time stamps in seconds to multiples of 128. For floats and narrow integers, the float64 mean is
    subtracted as the sum of two float32 values, which is as precise and faster. The statistics of
    all keys are float64 buffers (float32 on MPS), even if the module is converted to a different
    dtype. Training and evaluation mode are equivalent.

    Args:
        space: Flat observation space, without action masks.
        config: Settings.

    Raises:
        ConfigError: If an excluded key is not in the space.
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
            # Keys may contain characters that are not allowed in buffer names.
            dtype = torch.float64 if self._wide[i] else torch.get_default_dtype()
            self.register_buffer(f"_mean_{i}", torch.zeros(shape, dtype=dtype), persistent=False)
            self.register_buffer(f"_rest_{i}", torch.zeros(shape, dtype=dtype), persistent=False)
            self.register_buffer(f"_factor_{i}", torch.ones(shape), persistent=False)
        self._has_statistics = False

    @property
    def keys(self) -> list[str]:
        """Keys of normalized observations; the key of an unnested observation is empty."""
        return list(self._shapes)

    def forward(self, obs: TensorTree) -> TensorTree:
        """Normalize observations.

        Args:
            obs: Observations, `[..., *obs shape]`; not modified. Keys may be missing.

        Returns:
            Observations of the same shapes; float32 if normalized.
        """
        if not isinstance(obs, dict):
            return self._normalized(0, obs) if self._shapes else obs
        normalized = dict(obs)
        for i, key in enumerate(self._shapes):
            if key in obs:
                normalized[key] = self._normalized(i, obs[key])
        return normalized

    def _normalized(self, i: int, x: Tensor) -> Tensor:
        mean, rest = self._buffers[f"_mean_{i}"], self._buffers[f"_rest_{i}"]
        factor = self._buffers[f"_factor_{i}"]
        assert mean is not None
        assert rest is not None
        assert factor is not None
        if not self._has_statistics:
            return x.to(factor.dtype)
        # For a large mean, subtracting first is more precise than x * factor - mean * factor.
        x = x.to(mean.dtype) - mean
        x = (x if self._wide[i] else x.sub_(rest)).to(factor.dtype).mul_(factor)
        return x.clamp_(-self._clip, self._clip) if self._clip else x

    def update(self, obs: TensorTree) -> None:
        """Add observations to the statistics; has no effect after `freeze`.

        Args:
            obs: Observations, `[..., *obs shape]`, with the same number of rows for each key in
                `keys`; other keys are ignored.

        Raises:
            TrainingError: If an observation is not finite. The statistics are not modified.
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
        """Add moments of observations to the statistics; has no effect after `freeze`.

        Args:
            moments: Moments of all normalized entries as one vector, in the order of `keys`.
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
        """Whether more observations are required before training can start."""
        return not self.frozen and int(self.count) < self.config.initial_steps

    def freeze(self) -> None:
        """Freeze the statistics."""
        self.frozen.fill_(True)

    def _refresh(self) -> None:
        """Compute the buffers of `forward` from the statistics."""
        self._has_statistics = bool(self.count > 0)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        pieces = zip(torch.split(self.mean, sizes), torch.split(self.var, sizes), strict=True)
        for i, (mean, var) in enumerate(pieces):
            resolution = WIDE_RESOLUTION if self._wide[i] else RESOLUTION
            is_constant = var <= (resolution * mean).square()
            factor = torch.where(is_constant, 1.0, (var + EPSILON).rsqrt())
            rest = mean - mean.to(self.get_buffer(f"_mean_{i}").dtype)
            for name, values in (("mean", mean), ("rest", rest), ("factor", factor)):
                own = self.get_buffer(f"_{name}_{i}")
                own.copy_(values.view(own.shape))

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ObservationNormalizer:
        # Statistics are moved to the module's device, but keep their dtype.
        wide = (f"_mean_{i}" for i, is_wide in enumerate(self._wide) if is_wide)
        kept = {name: self.get_buffer(name) for name in (*STATISTICS, *wide)}
        device = fn(self.frozen).device
        for name, buffer in kept.items():
            kept[name] = self._buffers[name] = buffer.to(precise_dtype(device, buffer.dtype))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for name, buffer in kept.items():
            self._buffers[name] = buffer.to(device).to(precise_dtype(device))
        return self


def find_normalizer(model: nn.Module) -> ObservationNormalizer | None:
    """Return the first observation normalizer among a model and its submodules, or None."""
    found = (own for own in model.modules() if isinstance(own, ObservationNormalizer))
    return next(found, None)


def _is_vector(leaf: spaces.Box) -> bool:
    """Return whether a Box is neither an image nor empty."""
    return not is_image(leaf) and math.prod(leaf.shape) > 0


def _is_wide(dtype: np.dtype[Any] | None) -> bool:
    """Return whether a Box dtype contains integers that float32 cannot represent."""
    return (
        dtype is not None and dtype.kind in "iu" and dtype.itemsize >= np.dtype(np.int32).itemsize
    )


def _check_excluded(excluded: list[str], keys: list[str]) -> None:
    for key in excluded:
        if key in keys and key:
            continue
        expected = f"expected keys of the observation space, {keys}"
        if keys == [""]:
            expected = "the observation space is a single Box without keys: leave it empty"
        else:
            expected += did_you_mean(map(repr, nearest(key, keys, 1)))
        raise ConfigError("model.normalization.exclude", expected, key)


def _check_finite(key: str, shape: tuple[int, ...], rows: Tensor) -> None:
    """Raise if observations `[N, entries]` of a key are not finite."""
    finite = torch.isfinite(rows)
    if bool(finite.all()):
        return
    row, column = finite.logical_not().nonzero()[0].tolist()
    index = [int(i) for i in np.unravel_index(column, shape)] if shape else []
    where = f"the observation {key!r}" if key else "the observation"
    raise TrainingError(
        f"entry {index} of {where} is {float(rows[row, column])}: expected finite values; fix the "
        "environment, or add the key to model.normalization.exclude"
    )
