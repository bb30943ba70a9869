"""Steps environments of one process, one after the other, into arrays.

Both vector environments of the package run this code, the sequential one on all environments and
each worker process on its slice, so that their numbers are the same by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.errors import ConfigError, EnvError, MissingExtraError, SpaceError
from maze_train.seeding import EpisodeSeeds
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from maze_train.envs.buffers import Array, StepBuffers
    from maze_train.spaces.masks import MaskLayout

__all__ = ["EnvSlice", "StepReport", "build_envs", "check_equal_spaces"]


@dataclass(slots=True)
class StepReport:
    """Infos of one step, by index of the environment, in the order in which they arose."""

    final: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of the last steps of episodes."""
    ordinary: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of resets and of all other steps, when they are asked for."""


class EnvSlice:
    """The consecutive environments `first, first + 1, ...` of a vector environment.

    Args:
        envs: The environments, with equal spaces.
        buffers: Arrays of as many rows as there are environments. Actions are read from there, all
            else is written.
        first: Index of the first environment in the vector environment.
        num_envs: Number of environments of the whole vector environment.
        step_infos: Whether to report the infos of every step and autoreset, not only those of last
            steps.

    Raises:
        SpaceError: If a mask in the observations does not fit the actions.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        buffers: StepBuffers,
        *,
        first: int = 0,
        num_envs: int | None = None,
        step_infos: bool = False,
    ) -> None:
        self.envs = list(envs)
        self._buffers = buffers
        self._first = first
        self._num_envs = len(self.envs) if num_envs is None else num_envs
        self._step_infos = step_infos
        observation = FlatView(self.envs[0].observation_space)
        self._action = FlatView(self.envs[0].action_space)
        self._write_obs = row_writer(observation, buffers.obs)
        masks = mask_layout(observation.space, self._action.space)
        if masks is not None:
            self._write_obs = masked_writer(self._write_obs, masks, buffers.obs)
        self._write_final_obs = row_writer(observation, buffers.final_obs)
        self._seeds: list[EpisodeSeeds] = []
        self._episode_seed = [0] * len(self.envs)
        self._episode_start = [0] * len(self.envs)
        self._steps = 0

    def reset(self, seed: int, options: dict[str, Any] | None) -> StepReport:
        """Start the first episodes of the run of episodes that `seed` names.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        n = self._num_envs
        indices = range(self._first, self._first + len(self.envs))
        self._seeds = [EpisodeSeeds(seed, index, n) for index in indices]
        self._buffers.rewards[:] = 0.0
        self._buffers.terminated[:] = False
        self._buffers.truncated[:] = False
        self._steps = 0
        report = StepReport()
        for i in range(len(self.envs)):
            try:
                obs, info = self._start_episode(i, options)
                self._write_obs(i, obs)
            except Exception as error:
                raise self._fault(i, error) from error
            report.ordinary.append((self._first + i, info))
        return report

    def step(self) -> StepReport | None:
        """Step every environment once, and start the next episode where one ended.

        Returns:
            The infos to pass on, or None when there are none.

        Raises:
            EnvError: If an environment raises or returns something invalid, or was never
                reset.
        """
        if not self._seeds:
            raise EnvError("step() was called before the first reset(): call reset() first")
        buffers = self._buffers
        rewards, terminated, truncated = buffers.rewards, buffers.terminated, buffers.truncated
        write_obs = self._write_obs
        report = StepReport() if self._step_infos else None
        self._steps += 1
        i = 0
        try:
            for i, (env, action) in enumerate(zip(self.envs, self._actions(), strict=True)):
                obs, reward, is_terminated, is_truncated, info = env.step(action)
                # As a float: an array of numbers would take None for NaN.
                rewards[i] = float(reward)
                terminated[i] = is_terminated
                truncated[i] = is_truncated
                if is_terminated or is_truncated:
                    report = report or StepReport()
                    self._write_final_obs(i, obs)
                    report.final.append((self._first + i, checked_info(info)))
                    obs, info = self._start_episode(i, None)
                    report_broken_off(report.final[-1][1], info)
                write_obs(i, obs)
                if self._step_infos and report is not None:
                    report.ordinary.append((self._first + i, checked_info(info)))
        except Exception as error:
            raise self._fault(i, error) from error
        return report

    def close(self) -> None:
        """Close every environment, all of them also when one raises."""
        close_all(self.envs)

    def _actions(self) -> Iterable[Any]:
        # Environments may keep or change the action that they are given, so they get a copy of the
        # buffer.
        columns = {key: column.copy() for key, column in self._buffers.actions.items()}
        if self._action.is_single:
            column: Iterable[Any] = columns[""]
            return column
        return [
            self._action.build({key: column[i] for key, column in columns.items()})
            for i in range(len(self.envs))
        ]

    def _start_episode(self, i: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._episode_start[i] = self._steps
        self._episode_seed[i] = self._seeds[i].next()
        obs, info = self.envs[i].reset(seed=self._episode_seed[i], options=options)
        return obs, checked_info(info)

    def _fault(self, i: int, error: Exception) -> EnvError:
        step = self._steps - self._episode_start[i]
        when = f"at step {step}" if step else "in the reset"
        return EnvError(
            f"environment {self._first + i} failed {when} of the episode with seed "
            f"{self._episode_seed[i]}: {type(error).__name__}: {error}"
        )


def report_broken_off(final_info: dict[str, Any], reset_info: dict[str, Any]) -> None:
    """Move the report of an episode that a wrapper ended from outside to its last step."""
    if "episode" in reset_info:
        final_info["episode"] = reset_info.pop("episode")


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
            check_equal_spaces(envs[0], env, index, first)
    except (ConfigError, MissingExtraError):
        close_all(envs)
        raise
    except Exception as error:
        close_all(envs)
        raise EnvError(
            f"environment {index} could not be built: {type(error).__name__}: {error}"
        ) from error
    return envs


def check_equal_spaces(one: Any, other: Any, index: int, first: int = 0) -> None:
    """Refuse an environment whose spaces differ from those of environment `first`.

    Raises:
        SpaceError: If the observation or action spaces of the two are not equal.
    """
    for name in ("observation_space", "action_space"):
        expected, given = getattr(one, name), getattr(other, name)
        if expected != given:
            raise SpaceError(
                f"the {name} of environment {index} is {given}, that of environment {first} is "
                f"{expected}: all environments must have equal spaces"
            )


def close_all(envs: Iterable[gymnasium.Env[Any, Any]]) -> None:
    """Close environments; the first exception is raised after all were closed."""
    first_error: Exception | None = None
    for env in envs:
        try:
            env.close()
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise EnvError(f"closing an environment failed: {first_error}") from first_error


def row_writer(view: FlatView, columns: dict[str, Array]) -> Callable[[int, Any], None]:
    """A function `write(i, observation)` that copies an observation into row i of the columns."""
    writers = {
        key: within_range(key, view.leaves[key], column_writer(key, column))
        for key, column in columns.items()
    }
    if view.is_single:
        return writers[""]

    def write(i: int, observation: Any) -> None:
        for key, value in view.read(observation):
            writers[key](i, value)

    return write


def masked_writer(
    write: Callable[[int, Any], None], masks: MaskLayout, columns: dict[str, Array]
) -> Callable[[int, Any], None]:
    """`write`, and then a check that every choice has a legal action in row i."""
    leaves = {leaf: columns[leaf] for leaf in masks.leaves}

    def write_checked(i: int, observation: Any) -> None:
        write(i, observation)
        problem = masks.illegal_part({leaf: column[i] for leaf, column in leaves.items()})
        if problem is not None:
            raise SpaceError(problem)

    return write_checked


def column_writer(key: str, column: Array) -> Callable[[int, Any], None]:
    """A function `write(i, value)` that copies a value into row i of a column."""
    shape, dtype = column.shape[1:], column.dtype

    def write(i: int, value: Any) -> None:
        # Assignment alone would broadcast a wrong shape, and cut floats down to integers, without a
        # word.
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            value = converted(key, value, shape, dtype)
        column[i] = value

    return write


def within_range(
    key: str, leaf: gymnasium.Space[Any], write: Callable[[int, Any], None]
) -> Callable[[int, Any], None]:
    """`write`, after a check that categories exist: networks would take another one's place."""
    if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
        return write
    low = np.asarray(leaf.start)
    high = low + (leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec)

    def write_checked(i: int, value: Any) -> None:
        if ((value < low) | (value >= high)).any():
            name = f"observation {key!r}" if key else "the observation"
            raise SpaceError(f"{name} is {value}, which is not in {leaf}")
        write(i, value)

    return write_checked


def converted(key: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`value` as an array that may be stored under `dtype`.

    Raises:
        SpaceError: If its shape is not `shape`, or it is not a number of the kind that the space
            holds.
    """
    name = f"observation {key!r}" if key else "the observation"
    array = np.asarray(value)
    if array.shape != shape:
        raise SpaceError(f"{name} has shape {array.shape}, its space says {shape}")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise SpaceError(f"{name} has dtype {array.dtype}, its space says {dtype}")
    if array.dtype.kind in "iu" and dtype.kind in "iu" and (array.astype(dtype) != array).any():
        raise SpaceError(f"{name} holds {array.min()} to {array.max()}, which {dtype} can not hold")
    return array


def checked_info(info: Any) -> dict[str, Any]:
    """`info` itself.

    Raises:
        TypeError: If it is not a dict.
    """
    if not isinstance(info, dict):
        raise TypeError(f"info is {info!r}, expected a dict")
    return info
