"""EnvPool: environments stepped by threads of C++ (Weng et al. 2022)."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.envs.backends import Backend, built, check_preprocessing, smaller
from maze_train.errors import ConfigError, EnvError, nearest
from maze_train.extras import import_extra

if TYPE_CHECKING:
    from maze_train.envs.config import EnvConfig


ATARI = {
    "frame_skip": 4,
    "img_height": 84,
    "img_width": 84,
    "gray_scale": True,
    "stack_num": 4,
    "noop_max": 30,
    "use_fire_reset": True,
    "episodic_life": False,
    "reward_clip": False,
    "repeat_action_probability": 0.25,
}
"""Preprocessing of Mnih et al. (2015), Methods, with the repeated actions that ids of version 5
stand for (Machado et al. 2018, section 5); EnvPool's own default is 0."""


class EnvPoolVectorEnv(VectorEnv[Any, Any, Any]):
    """An EnvPool whose seeds are given at reset: each reset builds it anew.

    A step that ends an episode at the time limit counts as truncated, also where the episode would
    have ended by itself: EnvPool does not tell these apart.

    Args:
        name: EnvPool's name of the environment.
        num_envs: Number of environments.
        options: Arguments of `envpool.make_gymnasium`, without seeds.

    Raises:
        ConfigError: If the environments have several players.
        MissingExtraError: If EnvPool is not installed.
        TypeError: If EnvPool does not know an option.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as in the base class)

    def __init__(self, name: str, num_envs: int, options: dict[str, Any]) -> None:
        envpool = import_envpool()
        self._make = partial(envpool.make_gymnasium, name, num_envs=num_envs, **options)
        self._pool: Any = None
        with warnings.catch_warnings():
            # Gymnasium warns of bounds that EnvPool states in double precision.
            warnings.simplefilter("ignore", UserWarning)
            spec = envpool.make_spec(name, num_envs=num_envs, **options)
            observation, action = spec.gymnasium_observation_space, spec.gymnasium_action_space
        self.config = spec.config
        if self.config.max_num_players > 1:
            raise ConfigError("env.id", "environments of several players are not supported", name)
        self.num_envs = num_envs
        self.single_observation_space = with_true_bounds(observation)
        self.single_action_space = with_true_bounds(action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Build the environments with these seeds, and start their first episodes.

        Args:
            seed: One seed per environment, or the first of `num_envs` consecutive ones.
            options: None; EnvPool knows no options.

        Raises:
            EnvError: If options are given.
        """
        if options:
            raise EnvError(f"reset(options={options!r}): EnvPool knows no options")
        self._pool = None  # Its threads end before new ones start.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self._pool = self._make(seed=0 if seed is None else seed)
            result: tuple[Any, dict[str, Any]] = self._pool.reset()
        return result

    def step(self, actions: Any) -> Any:
        """Step every environment once."""
        return self._pool.step(actions)

    def close_extras(self, **kwargs: Any) -> None:
        """End the threads, which EnvPool does when it is let go of."""
        self._pool = None


def build_envpool(
    config: EnvConfig, num_envs: int, num_threads: int, max_episode_steps: int | None
) -> Backend:
    """Build the EnvPool environment of a name; `ALE/Pong-v5` is its `Pong-v5`.

    Args:
        config: Settings of the environment.
        num_envs: Number of environments.
        num_threads: Threads that step the environments; 0: one per environment, at most one per
            core.
        max_episode_steps: Steps after which an episode is truncated at the latest; a limit of the
            environment's own that is smaller stays.

    Raises:
        ConfigError: If EnvPool has no such environment, or it does not fit the settings.
        EnvError: If building it failed.
        MissingExtraError: If EnvPool is not installed.
    """
    if config.id is None:
        raise ConfigError(
            "env._target_",
            "EnvPool steps its own environments only: set env.id, or use env.backend=gymnasium",
            config.target,
        )
    known = import_envpool().list_all_envs()
    name = config.id.removeprefix("ALE/")
    if name not in known:
        close = nearest(name, known)
        hint = f"; nearest ids: {', '.join(close)}" if close else ""
        problem = f"EnvPool has no environment of this name: use env.backend=gymnasium{hint}"
        raise ConfigError("env.id", problem, config.id)
    default = pool_of(name, config, 1, {})
    is_atari = check_preprocessing(config, "zero_discount_on_life_loss" in default.config._fields)
    options = {**(ATARI if is_atari else {}), **config.kwargs}
    limit = config.max_episode_steps or default.config.max_episode_steps
    options["max_episode_steps"] = smaller(limit, max_episode_steps)
    if num_threads:
        options.setdefault("num_threads", num_threads)
    env = pool_of(name, config, num_envs, options)
    stack = options["stack_num"] if is_atari and options["gray_scale"] else 1
    return Backend(env, is_atari, {"": stack} if stack > 1 else {})


def pool_of(
    name: str, config: EnvConfig, num_envs: int, options: dict[str, Any]
) -> EnvPoolVectorEnv:
    """An EnvPool, with its complaints turned into ours."""
    env = built(name, config, lambda: EnvPoolVectorEnv(name, num_envs, options))
    assert isinstance(env, EnvPoolVectorEnv)
    return env


def import_envpool() -> Any:
    """The module.

    Raises:
        MissingExtraError: If it is not installed.
    """
    return import_extra("envpool", "envpool", "env.backend=envpool")


def with_true_bounds(space: Any) -> Any:
    """The space, unbounded where EnvPool writes the extremes of the number type.

    For floats its lower bound is the smallest positive number, which observations do not keep.
    """
    if isinstance(space, (dict, spaces.Dict)):
        return spaces.Dict({key: with_true_bounds(part) for key, part in space.items()})
    if not isinstance(space, spaces.Box) or space.dtype is None or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    unbounded_below = (space.low == limits.tiny) | (space.low == limits.min)
    low = np.where(unbounded_below, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)
