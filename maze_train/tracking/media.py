"""Conversion of images, histograms and videos that callbacks log."""

from __future__ import annotations

from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike

from maze_train.core.checks import check_positive
from maze_train.core.errors import ConfigError
from maze_train.core.types import Array, Tensor

Values: TypeAlias = Tensor | ArrayLike
"""Values that callbacks log."""


def as_pixels(key: str, image: Values, has_frames: bool = False) -> Array:
    """Return an image, or the frames of a video, as uint8 `[H, W, C]` or `[T, H, W, C]`.

    Args:
        key: Name for error messages.
        image: Array or tensor `[H, W]` or `[H, W, C]` with 1, 3 or 4 channels: uint8, or floats in
            [0, 1]. Videos have an additional first dimension T >= 1.
        has_frames: Whether `image` is a video.

    Raises:
        ConfigError: If shape, dtype or values are invalid.
    """
    pixels = as_array(image)
    if pixels.ndim == 2 + has_frames:
        pixels = pixels[..., None]
    expected = "[T, H, W, C]" if has_frames else "[H, W, C]"
    if pixels.ndim != 3 + has_frames or pixels.shape[-1] not in (1, 3, 4) or not pixels.size:
        problem = f"expected the shape {expected} with C = 1, 3 or 4"
        raise ConfigError(key, problem, list(pixels.shape))
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind not in "fb" or not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ConfigError(key, "expected uint8, or floats in [0, 1]", str(pixels.dtype))
    return np.rint(pixels * 255.0).astype(np.uint8)


def as_numbers(key: str, values: Values) -> Array:
    """Return the values of a histogram as float64 `[n]`.

    Raises:
        ConfigError: If there are no values, or a value is not finite.
    """
    numbers = as_array(values).astype(np.float64).ravel()
    if not numbers.size or not np.isfinite(numbers).all():
        raise ConfigError(key, "expected finite numbers", f"{numbers.size} values")
    return numbers


def as_array(values: Values) -> Array:
    """Return values, or a tensor on any device, as an array."""
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def animation(frames: Array, fps: float) -> bytes:
    """Encode a video `[T, H, W, C]`, uint8, as an animated GIF; requires no codec."""
    from PIL import Image  # A dependency of matplotlib.

    check_positive("fps", fps)
    pictures = [Image.fromarray(f[..., 0] if f.shape[-1] == 1 else f[..., :3]) for f in frames]
    file = BytesIO()
    duration_ms = max(20, round(1000.0 / fps))  # Viewers play shorter frames too slowly.
    how: dict[str, Any] = {"append_images": pictures[1:], "duration": duration_ms, "loop": 0}
    pictures[0].save(file, "GIF", save_all=True, **how)
    return file.getvalue()
