"""Atari games: preprocessing, wrappers for training, and episodes per life.

Sources: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518, 2015
(Methods: frame skip 4, maximum of two frames, 84x84 luminance, stack 4, no-ops, life loss, sign
rewards); Machado et al., "Revisiting the Arcade Learning Environment", JAIR 61, 2018 (sticky
actions, limit of 108 000 frames, evaluation on whole games).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import seeding
from gymnasium.wrappers import (
    AtariPreprocessing,
    ClipReward,
    FrameStackObservation,
    OrderEnforcing,
    PassiveEnvChecker,
    TimeLimit,
)

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.step_end import RUNNING, TERMINATED, EpisodeEnd, StepBatch, is_transition
from maze_train.core.targets import import_extra
from maze_train.envs.building import closed_on_error, register_atari
from maze_train.envs.config import EnvConfig
from maze_train.envs.types import Env, Reset, Step, Wrapper
from maze_train.envs.wrappers import ContinuingWrapper, layers_of

if TYPE_CHECKING:
    from maze_train.core.types import Array

PURPOSE = "the preprocessing of Atari games"


class SeededGame(Wrapper):
    """Atari game that depends only on the seed of its reset; innermost wrapper.

    The emulator starts from a saved state instead of reloading the game, which would take 60 ms.
    Sticky actions (`repeat_action_probability`, Machado et al., 2018, section 5.2) and the no-ops
    of `gymnasium.wrappers.AtariPreprocessing` are sampled from one generator.

    Args:
        env: A game created with `frameskip=1`. The game must not be wrapped.

    Raises:
        ConfigError: If `env` is not an unwrapped Atari game with `frameskip=1`.
        MissingExtraError: If ale-py is not installed.
    """

    def __init__(self, env: Env) -> None:
        self._ale = checked_game(env)
        super().__init__(env.unwrapped)
        self._stickiness = self._ale.getFloat("repeat_action_probability")
        # The emulator applies the new probability when the game is loaded.
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._start: object = None
        self._random, _ = seeding.np_random()
        self._last_action = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin a game."""
        if self._start is None:
            self._obs, self._info = self.env.reset(seed=0, options=options)  # Loads the game.
            self._start = self._ale.cloneState()
        if seed is not None:
            self._random, _ = seeding.np_random(seed)
        self.env.np_random = self._random
        # Both calls are needed: in ale-py 0.12, a reset keeps some state of the previous game in 23
        # of 104 games, and restoring a saved state does so in 5 games.
        self._ale.reset_game()
        self._ale.restoreState(self._start)
        self._last_action = 0
        return self._obs, {key: value for key, value in self._info.items() if key != "seeds"}

    def step(self, action: Any) -> Step:
        """Play one frame; the previous action may be repeated."""
        if self._start is None:
            raise ResetNeeded("step() was called before the first reset(): call reset() first")
        if self._random.random() >= self._stickiness:
            self._last_action = action
        return self.env.step(self._last_action)


class FireWrapper(Wrapper):
    """Presses FIRE after a reset and after the loss of a life, in games with a fire button.

    Some games, such as Breakout, do not start without FIRE.

    Args:
        env: A game whose infos contain `lives`.

    Attributes:
        executed: Action executed in the last step: the agent's action, or FIRE after a lost life.
    """

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        game: Any = env.unwrapped
        buttons = [action.name for action in game.ale.getMinimalActionSet()]
        self._fire = game.get_action_meanings().index("FIRE") if "FIRE" in buttons else None
        self._lives = 0
        self._must_fire = False
        self.executed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin a game."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            obs, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                obs, info = self.env.reset(options=options)
        self._lives, self._must_fire = info["lives"], False
        return obs, info

    def step(self, action: Any) -> Step:
        """Step the game; FIRE replaces the action after the loss of a life."""
        self.executed = self._fire if self._fire is not None and self._must_fire else int(action)
        obs, reward, terminated, truncated, info = self.env.step(self.executed)
        self._must_fire = self._fire is not None and info["lives"] < self._lives
        self._lives = info["lives"]
        return obs, reward, terminated, truncated, info


class EpisodicLifeWrapper(ContinuingWrapper):
    """Terminates an episode when a life is lost, without restarting the game; for training only.

    After the loss of a life, `reset` continues the same game with one no-op step and ignores the
    seed. A new game begins only after the end of the previous one.

    Args:
        env: An environment whose infos contain `lives`, the number of remaining lives.
        noop: The no-op action.

    Raises:
        EnvError: In `reset` and `step`, if the info has no `lives`.
    """

    remembers: ClassVar = ("_lives", "goes_on")

    def __init__(self, env: Env, noop: Any = 0) -> None:
        super().__init__(env)
        self.noop = noop
        self._lives = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Continue the game after the loss of a life, otherwise begin a new one."""
        if self.goes_on:
            self.goes_on = False
            obs, _, terminated, truncated, info = self.env.step(self.noop)
            if not (terminated or truncated):
                self._lives = lives_of(info)
                return obs, info
            self.game_end = bool(terminated), info
        obs, info = self.env.reset(seed=seed, options=options)
        self._lives = lives_of(info)
        return obs, info

    def step(self, action: Any) -> Step:
        """Step the environment; also terminate if a life was lost."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = lives_of(info)
        # Some games continue for a few frames after the last life is lost.
        lost = 0 < lives < self._lives
        self._lives = lives
        self.goes_on = lost and not (terminated or truncated)
        return obs, reward, terminated or lost, truncated, info


def lives_of(info: dict[str, Any]) -> int:
    """Return the number of lives in an info."""
    if "lives" not in info:
        raise EnvError(
            f"EpisodicLifeWrapper requires the key 'lives' in infos, got {sorted(info)}: remove "
            "the wrapper"
        )
    return int(info["lives"])


def checked_game(env: Env) -> Any:
    """Return the emulator of a game that can be preprocessed.

    Raises:
        ConfigError: If the environment is not an Atari game, skips frames itself, has wrappers, or
            has continuous actions.
        MissingExtraError: If ale-py is not installed.
    """
    interface = import_extra("ale-py", "atari", PURPOSE, "ale_py").ALEInterface
    layer = env
    while isinstance(layer, (OrderEnforcing, PassiveEnvChecker)):
        layer = layer.env
    game = env.unwrapped
    ale = getattr(game, "ale", None)
    if not isinstance(ale, interface):
        raise ConfigError(
            "env.preprocessing", f"expected an Atari game, got {env}: set this to none"
        )
    if layer is not game:
        raise ConfigError(
            "env.preprocessing",
            f"Atari preprocessing must be the innermost wrapper, but {env} already has a wrapper: "
            "move it to env.wrappers, and a step limit to env.max_episode_steps",
        )
    frame_skip = getattr(game, "_frameskip", 1)
    if frame_skip != 1:
        raise ConfigError(
            "env.kwargs.frameskip",
            "Atari preprocessing already skips frames: remove this argument, or set "
            "env.preprocessing=none",
            frame_skip,
        )
    if not isinstance(env.action_space, spaces.Discrete):
        raise ConfigError(
            "env.preprocessing",
            f"Atari preprocessing requires discrete actions, got {env.action_space}: remove "
            "continuous, or set env.preprocessing=none",
        )
    return ale


ENTRY_POINT = "ale_py.env:AtariEnv"

STACKED_SCREENS = 4
"""Number of stacked screens in an observation (Mnih et al., 2015)."""


def game_under(env: Env) -> FireWrapper | None:
    """Return the Atari game of an environment, or None if an outer wrapper changes actions."""
    for layer in layers_of(env):
        if isinstance(layer, FireWrapper):
            return layer
        if isinstance(layer, gymnasium.ActionWrapper):
            break
    return None


def other_than_screen(config: EnvConfig) -> dict[str, Any]:
    """Return the arguments that select observations other than the colour screen."""
    defaults = {"obs_type": "rgb", "sound_obs": False}
    return {
        name: config.kwargs[name]
        for name, screen in defaults.items()
        if config.kwargs.get(name, screen) != screen
    }


def check_game(config: EnvConfig) -> None:
    """Check that the environment is an Atari game with screen observations.

    Raises:
        ConfigError: If the id is not an Atari game, or arguments select other observations.
        MissingExtraError: If ale-py is not installed.
    """
    register_atari()
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    if spec is not None and spec.entry_point != ENTRY_POINT:
        raise ConfigError(
            "env.preprocessing",
            f"`atari` requires the id of an Atari game, got {config.id}",
            "atari",
        )
    if other_than_screen(config):
        raise ConfigError(
            "env.kwargs",
            "Atari preprocessing reads the screen: remove these arguments, or set "
            "env.preprocessing=none",
            other_than_screen(config),
        )


class AtariGames:
    """Atari preprocessing, as applied by `EnvFactory`."""

    @staticmethod
    def fits(config: EnvConfig) -> bool:
        """Return whether preprocessing applies to the environment.

        Raises:
            ConfigError: If preprocessing is requested, but the id is not an Atari game, or
                arguments request observations other than the screen.
            MissingExtraError: If preprocessing is requested, and ale-py is not installed.
        """
        if config.preprocessing == "auto":
            return not other_than_screen(config)
        check_game(config)
        return True

    @staticmethod
    def make(config: EnvConfig, make: Callable[[EnvConfig], Env]) -> Env:
        """Build a game with the preprocessing shared by training and evaluation."""
        kwargs = config.kwargs
        if config.id is not None:  # Grayscale frames are the fastest; colours are not needed.
            kwargs = {"frameskip": 1, **kwargs, "obs_type": "grayscale"}
        game = make(replace(config, kwargs=kwargs, max_episode_steps=None))
        with closed_on_error([game]):
            seeded = SeededGame(game)
            import_extra("opencv-python-headless", "atari", PURPOSE, "cv2")
            env: Env = FireWrapper(AtariPreprocessing(seeded))
        if config.max_episode_steps is not None:
            # The limit is in agent steps, not frames: this wraps AtariPreprocessing.
            env = TimeLimit(env, config.max_episode_steps)
        return FrameStackObservation(env, STACKED_SCREENS)

    @staticmethod
    def for_training(env: Env) -> Env:
        """Add the wrappers that change episodes and rewards in training."""
        # The rewards of games are integers, so that clipping leaves their signs.
        return ClipReward(EpisodicLifeWrapper(env), -1.0, 1.0)


class AtariLives:
    """Terminates an episode when a life is lost (Mnih et al. 2015, Methods).

    The next episode continues the game from the last frame. `EpisodeEnd.counted` contains raw
    returns and lengths of whole games.

    Args:
        name: Name of the environments in messages.
        num_envs: Number of environments.
    """

    def __init__(self, name: str, num_envs: int) -> None:
        self._name = name
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self._lives = np.zeros(num_envs, np.int64)

    def begin(self, infos: Mapping[str, Any]) -> None:
        """Begin new games."""
        self._returns[:] = self._lengths[:] = 0
        self._lives = self._read(infos)

    def apply(self, batch: StepBatch[Array], infos: Mapping[str, Any]) -> None:
        """Replace rewards by their signs and add the episode ends of lost lives, in place."""
        before, self._lives = self._lives, self._read(infos)
        self._returns += batch.rewards
        self._lengths += is_transition(batch.end)
        for end in batch.ends:
            i = end.env
            end.counted = float(self._returns[i]), int(self._lengths[i])
            self._returns[i] = self._lengths[i] = 0
        batch.rewards = np.sign(batch.rewards)
        # Some games continue for a few frames after the last life is lost.
        lost = (self._lives < before) & (self._lives > 0) & (batch.end == RUNNING)
        if not lost.any():
            return
        batch.end[lost] = TERMINATED
        ends = [*batch.ends, *(EpisodeEnd(i, {}) for i in np.flatnonzero(lost).tolist())]
        batch.ends = sorted(ends, key=lambda end: end.env)
        obs: Any = batch.obs
        final: Any = batch.final_obs
        rows = lost.reshape(-1, *[1] * (obs.ndim - 1))
        batch.final_obs = obs if final is None else np.where(rows, obs, final)

    def _read(self, infos: Mapping[str, Any]) -> Array:
        if "lives" not in infos:
            raise EnvError(
                f"{self._name} does not report infos['lives'], which Atari training requires: got "
                f"{sorted(infos)}"
            )
        return np.array(infos["lives"])
