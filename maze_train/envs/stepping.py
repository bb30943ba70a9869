"""Steps environments of one process, one after the other, into arrays.

Both vector environments of the package run this code, the sequential one on all environments and
each worker process on its slice, so that their numbers are the same by construction.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maze_train.envs.building import close_all
from maze_train.envs.faults import episode_fault, explained
from maze_train.envs.finite import (
    MAX_REWARD,
    FiniteCheck,
    NonFiniteError,
    check_finite,
    check_finite_reward,
    non_finite_rewards,
    non_finite_rows,
)
from maze_train.envs.layers import (
    continuing_layers,
    load_own_state,
    offers_own_state,
    own_state,
)
from maze_train.envs.rows import masked_writer, row_writer
from maze_train.errors import EnvError
from maze_train.seeding import EpisodeSeeds
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import gymnasium

    from maze_train.envs.buffers import Array, StepBuffers
    from maze_train.envs.journal import EpisodeRecord

__all__ = ["ON_NON_FINITE", "EnvSlice", "StepReport"]

ON_NON_FINITE = ("raise", "skip")
"""Reactions to numbers that are not finite."""


@dataclass(slots=True)
class StepReport:
    """Infos of one step, by index of the environment, in the order in which they arose."""

    final: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of the last steps of episodes."""
    ordinary: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Of resets and of all other steps, when they are asked for."""
    lost: list[int] = field(default_factory=list)
    """Environments whose row is no transition, because their episode was given up."""
    continuing: list[int] = field(default_factory=list)
    """Environments whose new episode goes on with the game of the old one."""


class EnvSlice:
    """The consecutive environments `first, first + 1, ...` of a vector environment.

    Args:
        envs: The environments, with equal spaces.
        buffers: Arrays of as many rows as there are environments. Actions are read from there, all
            else is written.
        first: Index of the first environment in the vector environment.
        number: Number of the first environment in messages; None: `first`.
        num_envs: Number of environments of the whole vector environment.
        step_infos: Whether to report the infos of every step and autoreset, not only those of last
            steps.
        on_non_finite: Reaction to a step that returns NaN or an infinity: `raise`, or `skip`:
            the episode is given up, and the next one begins.

    Raises:
        SpaceError: If a mask in the observations does not fit the actions.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        buffers: StepBuffers,
        *,
        first: int = 0,
        number: int | None = None,
        num_envs: int | None = None,
        step_infos: bool = False,
        on_non_finite: str = "raise",
    ) -> None:
        self.envs = list(envs)
        self.first = first
        self._number = first if number is None else number
        self._buffers = buffers
        self._num_envs = len(self.envs) if num_envs is None else num_envs
        self._step_infos = step_infos
        self._skips = on_non_finite == "skip"
        observation = FlatView(self.envs[0].observation_space)
        self._action = FlatView(self.envs[0].action_space)
        self._write_obs = row_writer(observation, buffers.obs)
        masks = mask_layout(observation.space, self._action.space)
        if masks is not None:
            self._write_obs = masked_writer(self._write_obs, masks, buffers.obs)
        self._write_final_obs = row_writer(observation, buffers.final_obs)
        self._finite = FiniteCheck(buffers.obs)
        self._continuing = [continuing_layers(env) for env in self.envs]
        self._seeds: list[EpisodeSeeds] = []
        self._episode_seed = [0] * len(self.envs)
        self._episode_start = [0] * len(self.envs)
        self._steps = 0

    def reset(self, seed: int, options: dict[str, Any] | None) -> StepReport:
        """Start the first episodes of the run of episodes that `seed` names.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        self._begin_run(seed)
        report = StepReport()
        for i in range(len(self.envs)):
            # A copy: an environment may change it.
            info = self._begin_anew(i, copy.deepcopy(options))
            report.ordinary.append((self.first + i, info))
        return report

    def step(self) -> StepReport | None:
        """Step every environment once, and start the next episode where one ended.

        Returns:
            The infos to pass on, or None when there are none.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        buffers = self._buffers
        rewards, terminated, truncated = buffers.rewards, buffers.terminated, buffers.truncated
        write_obs = self._write_obs
        report = StepReport() if self._step_infos else None
        self._steps += 1
        i = 0
        total = 0.0
        try:
            for i, (env, action) in enumerate(zip(self.envs, self._actions(), strict=True)):
                obs, reward, is_terminated, is_truncated, info = env.step(action)
                # As a float: an array of numbers would take None for NaN.
                rewards[i] = number = float(reward)
                total += number
                terminated[i] = is_terminated
                truncated[i] = is_truncated
                if is_terminated or is_truncated:
                    report = report or StepReport()
                    obs, info = self._end_episode(i, obs, info, report)
                write_obs(i, obs)
                if self._step_infos and report is not None:
                    report.ordinary.append((self.first + i, checked_info(info)))
        except BaseException as error:
            raise self._fault(i, error) from error
        if not (abs(total) <= MAX_REWARD and self._finite.passes()):
            report = self._give_up_non_finite(report)
        return report

    def restore(
        self,
        seed: int,
        records: Sequence[EpisodeRecord],
        *,
        allow_new_episodes: bool = False,
        progress: Callable[[], object] | None = None,
    ) -> list[tuple[int, str]]:
        """Put every environment where its record says, by playing its episode again.

        Args:
            seed: Names the run of episodes.
            records: One per environment.
            allow_new_episodes: Whether an environment that did not do the same again begins a new
                episode.
            progress: Called after each step that was played again.

        Returns:
            The environments that did not do the same again, and what was different.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        self._begin_run(seed)
        problems = []
        for i, record in enumerate(records):
            try:
                problem = self._replay(i, record, progress or no_progress)
            except BaseException as error:
                problem = f"it raised {explained(error)}"
            self._buffers.rewards[i] = record.reward
            self._episode_start[i] = -record.steps
            if problem is None:
                continue
            name = f"environment {self._number + i} could not be put back where it was: after "
            name += f"{record.num_actions} actions in the episode with seed "
            problems.append((self.first + i, f"{name}{self._episode_seed[i]}, {problem}"))
            if allow_new_episodes:
                self._seeds[i].episodes_started = record.episodes
                self._begin_anew(i, None)
        return problems

    def begin(self, seed: int, episodes: Sequence[int]) -> StepReport:
        """Start the next episode of every environment.

        Args:
            seed: Names the run of episodes.
            episodes: How many episodes each environment has started before.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        self._begin_run(seed)
        report = StepReport(lost=list(range(self.first, self.first + len(self.envs))))
        for i, count in enumerate(episodes):
            self._seeds[i].episodes_started = count
            info = self._begin_anew(i, None)
            if self._step_infos:
                report.ordinary.append((self.first + i, info))
        return report

    def own_states(self) -> list[dict[str, Any] | None]:
        """Ask each environment for its own state; None from one that has none to give.

        Raises:
            EnvError: If an environment raises, or gives something else than plain values.
        """
        states: list[dict[str, Any] | None] = []
        for i, env in enumerate(self.envs):
            try:
                states.append(own_state(env) if offers_own_state(env) else None)
            except BaseException as error:
                raise self._fault(i, error) from error
        return states

    def close(self) -> None:
        """Close every environment, all of them also when one raises."""
        close_all(self.envs)

    def _begin_run(self, seed: int) -> None:
        indices = range(self.first, self.first + len(self.envs))
        self._seeds = [EpisodeSeeds(seed, index, self._num_envs) for index in indices]
        self._clear_rows(slice(None))
        self._steps = 0

    def _clear_rows(self, rows: int | slice) -> None:
        self._buffers.rewards[rows] = 0.0
        self._buffers.terminated[rows] = False
        self._buffers.truncated[rows] = False

    def _actions(self) -> Iterable[Any]:
        # Environments may keep or change the action that they are given, so they get a copy of the
        # buffer.
        return self._built({k: column.copy() for k, column in self._buffers.actions.items()})

    def _built(self, columns: Mapping[str, Array]) -> Iterable[Any]:
        """Actions in the form of the space, one after the other."""
        if self._action.is_single:
            column: Iterable[Any] = columns[""]
            return column
        length = len(next(iter(columns.values())))
        return [
            self._action.build({key: column[i] for key, column in columns.items()})
            for i in range(length)
        ]

    def _start_episode(self, i: int, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._episode_start[i] = self._steps
        self._episode_seed[i] = self._seeds[i].next()
        obs, info = self.envs[i].reset(seed=self._episode_seed[i], options=options)
        return obs, checked_info(info)

    def _begin_anew(self, i: int, options: dict[str, Any] | None) -> dict[str, Any]:
        """Start an episode that has nothing to do with what was before; returns the info."""
        try:
            self._let_go(i)
            obs, info = self._start_episode(i, options)
            self._write_obs(i, obs)
            check_finite(self._row(i))
        except BaseException as error:
            raise self._fault(i, error) from error
        return info

    def _let_go(self, i: int) -> None:
        """Make the next reset begin a new game, whatever wrappers want."""
        for layer in self._continuing[i]:
            layer.goes_on = False

    def _end_episode(
        self, i: int, obs: Any, info: Any, report: StepReport
    ) -> tuple[Any, dict[str, Any]]:
        """Report the end of an episode and start the next one; returns its observation and info."""
        self._write_final_obs(i, obs)
        checked_info(info)
        try:
            check_finite_reward(self._buffers.rewards[i])
            if self._buffers.truncated[i]:
                final = {key: column[i] for key, column in self._buffers.final_obs.items()}
                check_finite(final, "final observation")
        except NonFiniteError:
            if not self._skips:
                raise
            self._clear_rows(i)
            report.lost.append(self.first + i)
            self._let_go(i)
        else:
            report.final.append((self.first + i, info))
            if any(layer.goes_on for layer in self._continuing[i]):
                report.continuing.append(self.first + i)
        obs, reset_info = self._start_episode(i, None)
        report_broken_off(info, reset_info)
        return obs, reset_info

    def _give_up_non_finite(self, report: StepReport | None) -> StepReport | None:
        """Look for numbers that are not finite, and raise or give up the episodes."""
        bad = non_finite_rows(self._buffers.obs) | non_finite_rewards(self._buffers.rewards)
        for i in [int(k) for k in bad.nonzero()[0]]:
            try:
                check_finite_reward(self._buffers.rewards[i])
                check_finite(self._row(i))
            except NonFiniteError as error:
                # There is nothing to give up in the first observation of an episode.
                if not self._skips or self._episode_start[i] == self._steps:
                    raise self._fault(i, error) from error
            report = report or StepReport()
            self._clear_rows(i)
            report.lost.append(self.first + i)
            self._begin_anew(i, None)
        return report

    def _row(self, i: int) -> dict[str, Array]:
        return {key: column[i] for key, column in self._buffers.obs.items()}

    def _replay(self, i: int, record: EpisodeRecord, progress: Callable[[], object]) -> str | None:
        """Play an episode again; returns what was different."""
        env, seeds = self.envs[i], self._seeds[i]
        seeds.episodes_started = record.base_episodes - 1
        self._let_go(i)
        obs, _ = self._start_episode(i, copy.deepcopy(record.options))
        if record.own is not None:
            load_own_state(env, record.own)
        reward: Any = record.reward
        columns = {key: column.copy() for key, column in record.actions.items()}
        for k, action in enumerate(self._built(columns), start=1):
            self._episode_start[i] -= 1
            obs, reward, terminated, truncated, _ = env.step(action)
            progress()
            if terminated or truncated:
                if seeds.episodes_started == record.episodes:
                    return f"the episode has ended, already after {k} of them"
                obs, _ = self._start_episode(i, None)
        if seeds.episodes_started != record.episodes:
            return f"{record.episodes - seeds.episodes_started} episodes have not ended"
        if record.own is not None and not record.num_actions:
            for key, column in self._buffers.obs.items():
                column[i] = record.obs[key]
            return None
        self._write_obs(i, obs)
        return record.difference(self._row(i), float(reward))

    def _fault(self, i: int, error: BaseException) -> EnvError:
        step = self._steps - self._episode_start[i]
        return EnvError(episode_fault(self._number + i, step, self._episode_seed[i], error))


def no_progress() -> None:
    """Ignore progress."""


def report_broken_off(final_info: dict[str, Any], reset_info: dict[str, Any]) -> None:
    """Move the report of an episode that a wrapper ended from outside to its last step."""
    if "episode" in reset_info:
        final_info["episode"] = reset_info.pop("episode")


def checked_info(info: Any) -> dict[str, Any]:
    """`info` itself.

    Raises:
        TypeError: If it is not a dict.
    """
    if not isinstance(info, dict):
        raise TypeError(f"info is {info!r}, expected a dict")
    return info
