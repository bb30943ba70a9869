"""gymnasium's autoreset modes, which tell whether the installed gymnasium is recent enough."""

from __future__ import annotations

import gymnasium

from maze_train.core.errors import DependencyError

try:
    from gymnasium.vector import AutoresetMode as AutoresetMode
except ImportError as error:
    raise DependencyError(
        f"gymnasium {gymnasium.__version__} is installed: maze_train needs gymnasium >= 1.1. "
        "pip install 'gymnasium>=1.1'; if another package pins an older version, use its newest "
        "release, or install shimmy, which adapts environments of gym and older gymnasium"
    ) from error
