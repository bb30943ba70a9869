"""Gymnasium's autoreset modes. The import fails if the installed gymnasium is not supported."""

from __future__ import annotations

import gymnasium

from maze_train.core.errors import DependencyError

try:
    from gymnasium.vector import AutoresetMode as AutoresetMode
except ImportError as error:
    raise DependencyError(
        f"gymnasium {gymnasium.__version__} is installed, but maze_train needs gymnasium >= 1.1: "
        "pip install 'gymnasium>=1.1'. If another package pins an older version, upgrade that "
        "package, or install shimmy, which adapts environments of gym and older gymnasium"
    ) from error
