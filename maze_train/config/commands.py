"""The command that a composed configuration is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


TRAIN = "train"

KEYS = {
    "compare": {"runs", "n_resamples"},
    "export": {"run", "format", "output"},
    "push": {"run", "repo_id"},
    "rollout": {"run", "policy", "n_episodes"},
    "search": {"n_trials", "sampler"},
}
"""Commands beside training, which are names of primary configs, and keys that only theirs have."""


def command_of(name: str | None, values: Mapping[Any, Any]) -> str:
    """The command of a composed configuration.

    Args:
        name: Name of the primary config.
        values: Composed values; a primary config of the user may extend ours.
    """
    if name in KEYS:
        return name
    return next((command for command, keys in KEYS.items() if keys <= values.keys()), TRAIN)
