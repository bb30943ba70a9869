"""Environments of one process: stepped one after the other, or episode by episode in slots."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from maze_train.core.errors import ConfigError, EnvError, MissingExtraError
from maze_train.core.step_end import DROPPED, RUNNING, TERMINATED, TRUNCATED
from maze_train.envs.agents import JointEnv
from maze_train.envs.faults import (
    MAX_FLOAT32,
    FiniteCheck,
    NonFiniteError,
    check_finite,
    check_finite_reward,
    episode_fault,
    explained,
    non_finite_rewards,
    non_finite_rows,
    own_processes,
)
from maze_train.envs.journal import load_own_state, offers_own_state, own_state
from maze_train.envs.monitoring import MonitoringWrapper, continuing_layers, layers_of
from maze_train.envs.vector import masked_writer, row_writer
from maze_train.spaces.describe import FlatView, flat_space
from maze_train.spaces.masks import mask_layout
from maze_train.workers.pool import check_spaces

if TYPE_CHECKING:
    from maze_train.core.types import Array, ArrayTree


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
        EnvError: If an environment cannot be built, or differs in its spaces from the first.
        SpaceError: If a space cannot be flattened.
    """

    obs: dict[str, Array]
    rewards: Array
    end: Array

    def __init__(
        self,
        env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        number: int,
        on_non_finite: str,
    ) -> None:
        self.envs = build_envs(env_factories, number)
        self._number = number
        self._skips = on_non_finite == "skip"
        with closed_on_error(self.envs):
            self._observation = FlatView(self.envs[0].observation_space)
            self._action = FlatView(self.envs[0].action_space)
            self._continuing = [continuing_layers(env) for env in self.envs]
            self._monitors = [monitor_of(env) for env in self.envs]
        for joint in (env.unwrapped for env in self.envs):
            if isinstance(joint, JointEnv):
                joint.skips_non_finite = self._skips

    def close(self) -> None:
        """Close every environment, all of them also when one raises."""
        close_all(self.envs)

    def _step_into(self, obs: dict[str, Array], rewards: Array, end: Array) -> None:
        """Set the arrays; `end` is written where an episode ends only.

        Raises:
            SpaceError: If a mask in the observations does not fit the actions.
        """
        self.obs, self.rewards, self.end = obs, rewards, end
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
            infos: Takes the infos of rows that continue, if they are asked for.

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
                    self.end[i] = TERMINATED if terminated else TRUNCATED
                    following = self._end_episode(i, obs, info, bool(truncated))
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
    def _end_episode(self, i: int, obs: Any, info: Any, truncated: bool) -> tuple[Any, Any] | None:
        """Note the end of an episode; returns where to continue, None if the row means nothing.

        `truncated`: whether the step was truncated, perhaps in a terminal state.
        """

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
        self._counted(i)
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

    def _counted(self, i: int) -> tuple[float, int] | None:
        """Raw return and length of the game that ended last, once; None: none did."""
        monitor = self._monitors[i]
        return None if monitor is None else monitor.take()

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


ONE_PER_PROCESS = "; if a process can have only one of them, " + own_processes(
    "<runner.concurrency>"
)
"""What may have kept an environment from being built after another one was."""


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
    with closed_on_error(envs):
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
            raise
        except BaseException as error:
            problem = f"environment {index} could not be built: {explained(error)}"
            if envs and len(envs) == index - first and not isinstance(error, TypeError):
                problem += ONE_PER_PROCESS
            raise EnvError(problem) from error
    return envs


def spaces_of(env: gymnasium.Env[Any, Any]) -> tuple[Any, Any]:
    """Observation and action space."""
    return env.observation_space, env.action_space


class Closeable(Protocol):
    """An environment, or many."""

    def close(self) -> Any:
        """Release what it holds."""
        ...


@contextmanager
def closed_on_error(envs: Iterable[Closeable]) -> Iterator[None]:
    """Close environments if the block raises; an error of closing does not replace that one."""
    try:
        yield
    except BaseException:
        with suppress(EnvError):
            close_all(envs)
        raise


def close_all(envs: Iterable[Closeable]) -> None:
    """Close environments; the first exception is raised after all were closed."""
    first_error: BaseException | None = None
    for env in envs:
        try:
            env.close()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise EnvError(f"closing an environment failed: {explained(first_error)}") from first_error


class EpisodeError(EnvError):
    """An episode failed.

    Args:
        text: Description of the failure, with place and time.
        seed: Seed of the episode.
    """

    def __init__(self, text: str, seed: int) -> None:
        self.text, self.seed = text, seed
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.seed)


class EnvSlots(SteppedEnvs):
    """Slots with an environment each; episodes begin and end in one slot without the others.

    Vector environments begin the next episode where one ended. Here the caller says which
    episode a slot plays, by its seed, and steps the first slots only, so that slots which have
    nothing to play cost nothing. Where a wrapper ends an episode without a new game
    (`EpisodicLifeWrapper`), the episode of the slot continues until the game is over. An
    environment that offers `state_dict` begins each episode in the state of a new one.

    Args:
        env_factories: One function per slot, each of which returns a new environment.
        rows: Rows of the arrays, at least the number of slots; those of no slot hold what networks
            can read.
        first: Number of the first environment in messages.
        on_non_finite: Reaction to NaN and infinities in rewards and observations: `raise`, or
            `skip`: the episode ends and counts as lost.

    Attributes:
        obs: Observations to act on, `[rows, ...]`, by leaf (the key of a lone leaf is empty).
        returns: Sums of the rewards of the episodes, `[rows]`.
        lengths: Steps of the episodes, `[rows]`.
        rewards: Rewards of the last step, `[rows]`; those of slots that were not stepped mean
            nothing.
        end: How the episode of a slot ended, codes of `StepEnd`, `[rows]`.
        seeds: Seeds of the episodes, by slot.
        final_infos: Infos of the last steps of episodes, by slot.
        counted: Raw returns and lengths of the episodes of monitored environments, by slot.
        final_obs: Observations after the last steps of episodes as the environment gave them, by
            slot; it may use their memory again when it is reset.

    Raises:
        ConfigError: If a factory refuses its settings.
        EnvError: If an environment cannot be built, or differs in its spaces from the first.
        SpaceError: If a space cannot be flattened, or masks do not fit the actions.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        rows: int,
        *,
        first: int = 0,
        on_non_finite: str = "raise",
    ) -> None:
        super().__init__(env_factories, first, on_non_finite)
        with closed_on_error(self.envs):
            self._make_arrays(rows)

    def _make_arrays(self, rows: int) -> None:
        env = self.envs[0]
        self.env_observation_space = env.observation_space
        self.single_observation_space = flat_space(env.observation_space)
        self.single_action_space = env.action_space
        self._blank = {key: blank(leaf) for key, leaf in self._observation.leaves.items()}
        obs: dict[str, Array] = {
            key: np.repeat(value[None], rows, axis=0) for key, value in self._blank.items()
        }
        self._step_into(obs, np.zeros(rows), np.zeros(rows, np.uint8))
        self.returns = np.zeros(rows)
        self.lengths = np.zeros(rows, np.int64)
        self.final_infos: dict[int, dict[str, Any]] = {}
        self.counted: dict[int, tuple[float, int]] = {}
        self.final_obs: dict[int, Any] = {}
        self.seeds = [0] * len(self.envs)
        self._unplayed: list[dict[str, Any] | None] = [None] * len(self.envs)
        self._offers_own_state = [offers_own_state(env) for env in self.envs]
        self._games = [watched_game(layers) for layers in self._continuing]

    def __len__(self) -> int:
        return len(self.envs)

    def start(self, slot: int, seed: int) -> None:
        """Begin an episode.

        Args:
            slot: Where.
            seed: Seed; with the actions, it determines the episode.

        Raises:
            EnvError: If the environment raises or returns something invalid.
        """
        self.seeds[slot] = seed
        self.returns[slot] = self.lengths[slot] = 0
        self.end[slot] = RUNNING
        self.final_infos.pop(slot, None)
        self.counted.pop(slot, None)
        self.final_obs.pop(slot, None)
        try:
            if self._offers_own_state[slot]:
                self._forget_earlier_episodes(slot)
            self._begin_game(slot, seed=seed)
        except BaseException as error:
            raise self._fault(slot, error) from error

    def _forget_earlier_episodes(self, slot: int) -> None:
        """Restore the state in which no episode was played, so that episodes are independent."""
        state, env = self._unplayed[slot], self.envs[slot]
        if state is None:
            self._begin_game(slot, seed=0)
            self._unplayed[slot] = own_state(env)
        else:
            load_own_state(env, state)

    def step(self, count: int, actions: ArrayTree) -> list[int]:
        """Step the first slots once.

        Args:
            count: How many slots.
            actions: `[rows, ...]`, or a flat dict of such arrays when the action space is a Dict or
                Tuple.

        Returns:
            The slots whose episodes ended, growing. Their observations mean nothing.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        ended: list[int] = []
        self._ended = ended
        parts = actions if isinstance(actions, dict) else {"": actions}
        total = self._step_envs(parts, count)
        self.lengths[:count] += 1
        sums = self.returns[:count] + self.rewards[:count]
        bounded = total <= MAX_FLOAT32 and math.isfinite(float(sums.sum()))
        if not (bounded and self._finite.passes()):
            ended = self._lose_non_finite(sums, ended)
        self.returns[:count] = sums
        return ended

    def swap(self, i: int, j: int) -> None:
        """Exchange two slots with all that belongs to them."""
        pair, other = [i, j], [j, i]
        for column in (*self.obs.values(), self.returns, self.lengths, self.end):
            column[pair] = column[other]
        items: Any
        lists = (self.envs, self.seeds, self._continuing, self._monitors, self._games)
        for items in (*lists, self._unplayed, self._offers_own_state):
            items[i], items[j] = items[j], items[i]
        found: Any
        for found in (self.final_infos, self.counted, self.final_obs):
            moved = {i: found.pop(j, None), j: found.pop(i, None)}
            found |= {slot: value for slot, value in moved.items() if value is not None}

    def last_observation(self, slot: int) -> dict[str, Array] | None:
        """Return a copy, by leaf, of the observation after the last step of an episode that ended.

        Returns:
            The leaves; None if a number in them is not finite and `on_non_finite` is `skip`: the
            episode then counts as lost.

        Raises:
            EpisodeError: If it does not fit the space, or holds a number that is not finite.
        """
        leaf = {key: np.empty_like(value)[None] for key, value in self._blank.items()}
        try:
            row_writer(self._observation, leaf, is_last=True)(0, self.final_obs[slot])
            found: dict[str, Array] = {key: column[0] for key, column in leaf.items()}
            check_finite(found, "last observation")
        except BaseException as error:
            if self._skips and isinstance(error, NonFiniteError):
                self.end[slot] = DROPPED
                return None
            raise self._fault(slot, error) from error
        return found

    def render(self, slot: int) -> Any:
        """Render the environment: a picture, where its render mode is `rgb_array`.

        Raises:
            EpisodeError: If the environment raises.
        """
        try:
            return self.envs[slot].render()
        except BaseException as error:
            raise self._fault(slot, error) from error

    def _end_episode(
        self, slot: int, obs: Any, info: Any, truncated: bool
    ) -> tuple[Any, Any] | None:
        """Note how an episode ended, unless the game continues."""
        if self._goes_on(slot) and not truncated:
            obs, end = self._next_life(slot, obs, info)
            if end is None:
                self.end[slot] = RUNNING
                return obs, info
            self.end[slot], last_info = end
            info = {**checked_info(info), **last_info}
        self.final_infos[slot] = checked_info(info)
        monitor = self._monitors[slot]
        if monitor is not None:
            monitor.end()  # a wrapper may have ended the episode from outside
            counted = monitor.take()
            if counted is not None:
                self.counted[slot] = counted
        self.final_obs[slot] = obs
        self._ended.append(slot)
        return None

    def _next_life(self, slot: int, obs: Any, info: Any) -> tuple[Any, Any]:
        """Continue with a game; returns the observation to act on, and None.

        Going on takes steps without the agent, which may end the game. Then the observation is the
        one after the last step of the agent, and comes with the end of the game.
        """
        game = self._games[slot]
        if game is not None:
            game.end = None
        following = going_on(self.envs[slot])
        if game is None or game.end is None:
            return following, None
        return obs, game.end

    def _lose_non_finite(self, sums: Array, ended: list[int]) -> list[int]:
        """Look for numbers that are not finite, and raise or end the episodes; returns the ended.

        What is observed after an episode is not looked at.
        """
        count = len(sums)
        bad = ~np.isfinite(sums) | non_finite_rewards(self.rewards[:count])
        bad |= non_finite_rows(self.obs)[:count]
        for i in [int(k) for k in bad.nonzero()[0]]:
            try:
                check_finite_reward(self.rewards[i])
                if not math.isfinite(sums[i]):
                    raise NonFiniteError("the sum of the rewards is not a finite number")
                if i not in ended:
                    check_finite(self._row(i))
            except NonFiniteError as error:
                if not self._skips:
                    raise self._fault(i, error) from error
                self.end[i] = DROPPED
                sums[i] = self.returns[i]
                for key, column in self.obs.items():
                    column[i] = self._blank[key]
        return sorted({*ended, *np.flatnonzero(self.end[:count] == DROPPED).tolist()})

    def _when(self, slot: int, in_step: bool) -> tuple[int, int]:
        return int(self.lengths[slot]) + in_step, self.seeds[slot]

    def _fault(self, slot: int, error: BaseException, *, in_step: bool = False) -> EpisodeError:
        steps, seed = self._when(slot, in_step)
        return EpisodeError(episode_fault(self._number + slot, steps, seed, error), seed)


class _Game(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Remembers how the game ended last that a layer around it continues with.

    Attributes:
        end: The code of the end, and the last info; None: it continues.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.end: tuple[int, dict[str, Any]] | None = None

    def step(self, action: Any) -> Any:
        """Step."""
        result = self.env.step(action)
        if result[2] or result[3]:
            self.end = TERMINATED if result[2] else TRUNCATED, checked_info(result[4])
        return result


def watched_game(continuing: Sequence[Any]) -> _Game | None:
    """Watch the game that the layers continue with; None without such layers."""
    if not continuing or not isinstance(continuing[-1], gymnasium.Wrapper):
        return None
    continuing[-1].env = game = _Game(continuing[-1].env)
    return game


def going_on(env: gymnasium.Env[Any, Any]) -> Any:
    """Continue with a game; returns the observation. Limits of steps around it count on."""
    around = takewhile(lambda layer: not hasattr(layer, "goes_on"), layers_of(env))
    limits = [layer for layer in around if isinstance(layer, TimeLimit)]
    elapsed = [layer._elapsed_steps for layer in limits]
    obs, info = env.reset()
    checked_info(info)
    for layer, steps in zip(limits, elapsed, strict=True):
        layer._elapsed_steps = steps
    return obs


def blank(leaf: gymnasium.Space[Any]) -> Array:
    """An observation that networks can read: the first category, or zeros."""
    value: Array = np.zeros(leaf.shape or (), leaf.dtype)
    if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
        value += leaf.start
    return value


def monitor_of(env: gymnasium.Env[Any, Any]) -> MonitoringWrapper | None:
    """Return the monitor of raw rewards within the wrappers of training, if there is one."""
    found = [layer for layer in layers_of(env) if isinstance(layer, MonitoringWrapper)]
    return found[-1] if found else None
