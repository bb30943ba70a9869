"""Environments of one process: builds them, steps one after the other into arrays, closes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import gymnasium

from maze_train.envs.buffers import masked_writer, row_writer
from maze_train.envs.faults import FiniteCheck, check_finite, episode_fault, explained
from maze_train.envs.monitoring import continuing_layers
from maze_train.errors import ConfigError, EnvError, MissingExtraError
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout
from maze_train.workers.pool import check_spaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from gymnasium.vector import VectorEnv

    from maze_train.types import Array


ON_NON_FINITE = ("raise", "skip")
"""Reactions to numbers that are not finite."""


class SteppedEnvs(ABC):
    """Environments with equal spaces that are stepped in turn; each has a row of all arrays.

    A subclass makes the arrays, gives them to `_step_into`, and says what happens where an episode
    ends.

    Args:
        env_factories: One function per environment, each of which returns a new environment.
        number: Number of the first environment in messages.
        on_non_finite: Reaction to NaN and infinities, one of `ON_NON_FINITE`.

    Raises:
        ConfigError: If a factory refuses its settings.
        EnvError: If an environment can not be built, or differs in its spaces from the first.
        SpaceError: If a space can not be flattened.
    """

    obs: dict[str, Array]
    rewards: Array
    terminations: Array
    truncations: Array

    def __init__(
        self,
        env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        number: int,
        on_non_finite: str,
    ) -> None:
        self.envs = build_envs(env_factories, number)
        self._number = number
        self._skips = on_non_finite == "skip"
        self._observation = FlatView(self.envs[0].observation_space)
        self._action = FlatView(self.envs[0].action_space)
        self._continuing = [continuing_layers(env) for env in self.envs]

    def close(self) -> None:
        """Close every environment, all of them also when one raises."""
        close_all(self.envs)

    def _step_into(
        self, obs: dict[str, Array], rewards: Array, terminations: Array, truncations: Array
    ) -> None:
        """Set the arrays; flags are written where an episode ends only.

        Raises:
            SpaceError: If a mask in the observations does not fit the actions.
        """
        self.obs, self.rewards = obs, rewards
        self.terminations, self.truncations = terminations, truncations
        self._write_obs = row_writer(self._observation, obs)
        masks = mask_layout(self._observation.space, self._action.space)
        if masks is not None:
            self._write_obs = masked_writer(self._write_obs, masks, obs)
        self._finite = FiniteCheck(obs)

    def _step_envs(
        self, actions: Mapping[str, Array], count: int, infos: list[tuple[int, Any]] | None = None
    ) -> float:
        """Step the first environments once.

        Args:
            actions: Actions by leaf, [at least count, ...]; environments may change them.
            count: Number of environments.
            infos: Takes the infos of rows that go on, if they are asked for.

        Returns:
            The sum of the magnitudes of the rewards.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        rewards, write_obs, total, i = self.rewards, self._write_obs, 0.0, 0
        try:
            built = self._built(actions, count)
            for i, env, action in zip(range(count), self.envs, built, strict=False):
                obs, reward, terminated, truncated, info = env.step(action)
                # As a float: an array of numbers would take None for NaN.
                rewards[i] = number = float(reward)
                total += abs(number)
                if terminated or truncated:
                    self.terminations[i], self.truncations[i] = terminated, truncated
                    following = self._end_episode(i, obs, info)
                    if following is None:
                        continue
                    obs, info = following
                write_obs(i, obs)
                if infos is not None:
                    infos.append((i, checked_info(info)))
        except BaseException as error:
            raise self._fault(i, error, in_step=True) from error
        return total

    @abstractmethod
    def _end_episode(self, i: int, obs: Any, info: Any) -> tuple[Any, Any] | None:
        """Note the end of an episode; returns what to go on from, None if the row means nothing."""

    def _built(self, actions: Mapping[str, Array], count: int) -> Iterable[Any]:
        """The first actions in the form of the space, one after the other."""
        if self._action.is_single:
            column: Iterable[Any] = actions[""]
            return column
        return [
            self._action.build({key: column[i] for key, column in actions.items()})
            for i in range(count)
        ]

    def _begin_game(self, i: int, **seed_and_options: Any) -> dict[str, Any]:
        """Begin an episode of a new game, whatever wrappers want; returns the info."""
        self._let_go(i)
        obs, info = self.envs[i].reset(**seed_and_options)
        checked_info(info)
        self._write_obs(i, obs)
        check_finite(self._row(i))
        return info

    def _let_go(self, i: int) -> None:
        """Make the next reset begin a new game."""
        for layer in self._continuing[i]:
            layer.goes_on = False

    def _goes_on(self, i: int) -> bool:
        """Whether a wrapper ended an episode of a game that is not over."""
        return any(layer.goes_on for layer in self._continuing[i])

    def _row(self, i: int) -> dict[str, Array]:
        return {key: column[i] for key, column in self.obs.items()}

    @abstractmethod
    def _when(self, i: int, in_step: bool) -> tuple[int, int]:
        """Steps of the running episode, one that is being made included, and its seed."""

    def _fault(self, i: int, error: BaseException, *, in_step: bool = False) -> EnvError:
        """The error about an environment that failed, maybe in a step that is being made."""
        return EnvError(episode_fault(self._number + i, *self._when(i, in_step), error))


def checked_info(info: Any) -> dict[str, Any]:
    """`info` itself.

    Raises:
        TypeError: If it is not a dict.
    """
    if not isinstance(info, dict):
        raise TypeError(f"info is {info!r}, expected a dict")
    return info


def build_envs(
    factories: Sequence[Callable[[], Any]], first: int = 0
) -> list[gymnasium.Env[Any, Any]]:
    """Call the factories, and check that the environments have equal spaces.

    Args:
        factories: Functions that return one environment each.
        first: Index of the first one in its vector environment.

    Raises:
        ConfigError: If a factory refuses its settings.
        EnvError: If a factory raises, returns no environment, or one whose spaces differ
            from the first's.
        MissingExtraError: If a package that an environment needs is not installed.
    """
    envs: list[gymnasium.Env[Any, Any]] = []
    index = first
    try:
        for index, factory in enumerate(factories, start=first):
            env = factory()
            if not isinstance(env, gymnasium.Env):
                raise TypeError(f"the factory returned {env!r}, expected a gymnasium.Env")
            if any(env is other for other in envs):
                raise TypeError(
                    "the factory returned the same environment twice; let it build a new one"
                )
            envs.append(env)
            check_spaces(index, spaces_of(env), spaces_of(envs[0]), first)
    except (ConfigError, MissingExtraError):
        close_all(envs)
        raise
    except BaseException as error:
        close_all(envs)
        raise EnvError(f"environment {index} could not be built: {explained(error)}") from error
    return envs


def spaces_of(env: gymnasium.Env[Any, Any]) -> tuple[Any, Any]:
    """Observation and action space."""
    return env.observation_space, env.action_space


def close_all(envs: Iterable[gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]]) -> None:
    """Close environments; the first exception is raised after all were closed."""
    first_error: BaseException | None = None
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise EnvError(f"closing an environment failed: {explained(first_error)}") from first_error
