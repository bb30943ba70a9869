"""Settings of the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze_train.checks import check_at_least
from maze_train.errors import ConfigError
from maze_train.targets import is_target

__all__ = ["EnvConfig"]


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """Which environment to train on: a registered id, or a class or function of one's own."""

    id: str | None = None
    """Registered gymnasium id, such as `CartPole-v1` or `ALE/Pong-v5`; `my_module:MyEnv-v0` imports
    the module first."""
    target: str | None = None
    """Own environment instead of `id`: dotted path of a class, or of a function that returns one;
    `_target_` in YAML."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `gymnasium.make` or for the target."""
    wrappers: list[dict[str, Any]] = field(default_factory=list)
    """Wrappers from the inside out: `{_target_: dotted path, key: value}` each, called with the
    environment first."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated, >= 1; null: as registered, and no limit for an own
    environment."""

    def __post_init__(self) -> None:
        """Check what can be checked before the environment is built.

        Raises:
            ConfigError: If a value is out of its range.
        """
        if self.max_episode_steps is not None:
            check_at_least("max_episode_steps", self.max_episode_steps, 1)
        for i, wrapper in enumerate(self.wrappers):
            if not is_target(wrapper):
                raise ConfigError(
                    f"wrappers[{i}]",
                    "expected a mapping with the key `_target_`, the dotted path of the wrapper",
                    wrapper,
                )
