"""Type aliases for Gymnasium's interface with arbitrary values."""

from __future__ import annotations

from typing import Any, SupportsFloat, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt

Env: TypeAlias = gymnasium.Env[Any, Any]
Wrapper: TypeAlias = gymnasium.Wrapper[Any, Any, Any, Any]
Space: TypeAlias = gymnasium.Space[Any]

Reset: TypeAlias = tuple[Any, dict[str, Any]]
"""Result of `reset`: the observation and the info."""

Step: TypeAlias = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]
"""Result of `step`: observation, reward, terminated, truncated, and info."""

Mask: TypeAlias = npt.NDArray[np.bool_]
