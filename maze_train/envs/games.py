"""Atari games as environments: their ids, and the wrappers around them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium

from maze_train.envs.atari import AtariPreprocessing, EpisodicLifeWrapper, SignRewardWrapper
from maze_train.envs.factory import make, other_than_screen
from maze_train.envs.wrappers import ObservationStackWrapper
from maze_train.errors import ConfigError
from maze_train.extras import import_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from maze_train.envs.config import EnvConfig

__all__ = ["check_game", "for_training", "make_game", "register_atari"]

ENTRY_POINT = "ale_py.env:AtariEnv"

STACKED_SCREENS = 4
"""Screens that the agent sees of an Atari game (Mnih et al., 2015)."""


def check_game(config: EnvConfig) -> None:
    """Refuse to preprocess an environment that is no Atari game whose screen is observed.

    Raises:
        ConfigError: If the id is of no Atari game, or the arguments ask for other observations.
        MissingExtraError: If ale-py is not installed.
    """
    register_atari()
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    if spec is not None and spec.entry_point != ENTRY_POINT:
        raise ConfigError(
            "env.preprocessing", f"`atari` is for ids of Atari games, not for {config.id}", "atari"
        )
    if other_than_screen(config):
        raise ConfigError(
            "env.kwargs",
            "Atari preprocessing observes the screen: leave these out, or set "
            "env.preprocessing=none",
            other_than_screen(config),
        )


def register_atari() -> None:
    """Make the `ALE/` ids known to gymnasium.

    Raises:
        MissingExtraError: If ale-py is not installed.
    """
    ale_py = import_extra("ale-py", "atari", "the ALE environments", "ale_py")
    gymnasium.register_envs(ale_py)
    # Else every game that is made writes a banner.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)


def make_game(config: EnvConfig, maker: Callable[..., Any] | None) -> gymnasium.Env[Any, Any]:
    """Build an Atari game with the preprocessing that training and evaluation share."""
    kwargs = config.kwargs if config.id is None else {"frameskip": 1, **config.kwargs}
    game = make(replace(config, kwargs=kwargs, max_episode_steps=None), maker)
    env: gymnasium.Env[Any, Any] = AtariPreprocessing(game)
    if config.max_episode_steps is not None:
        # Outside, where steps are those of the agent.
        env = gymnasium.wrappers.TimeLimit(env, config.max_episode_steps)
    return ObservationStackWrapper(env, STACKED_SCREENS)


def for_training(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Let lost lives end episodes, and turn rewards into their signs."""
    return SignRewardWrapper(EpisodicLifeWrapper(env))
