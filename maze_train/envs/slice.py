"""Slice of environments that one worker steps sequentially, restores and plays."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, cast

import numpy as np
import numpy.typing as npt

from maze_train.core.errors import ConfigError
from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.step_end import DROPPED, RUNNING, TERMINATED, TRUNCATED, EpisodeEnd
from maze_train.envs import faults
from maze_train.envs.batch import StepReport, episode_end, required_keys
from maze_train.envs.building import build_envs, close_all, closed_on_error
from maze_train.envs.calls import EnvCall, new_calls
from maze_train.envs.journal import NOT_KEPT, Difference, EpisodeRecord
from maze_train.envs.types import Env, Reset
from maze_train.envs.vector import (
    Array,
    ArrayTree,
    StepBuffers,
    masked_writer,
    note_on_lists,
    row_writer,
)
from maze_train.envs.wrappers import (
    continue_game,
    continuing_layers,
    described_metadata,
    load_own_state,
    monitor_of,
    offers_own_state,
    own_state,
)
from maze_train.spaces.agents import agent_spaces, agents_of
from maze_train.spaces.describe import MASK_KEY, FlatView
from maze_train.spaces.masks import mask_layout
from maze_train.workers.backends import Pickled
from maze_train.workers.pool import CallCancelledError, Memory, PrivateMemory, Worker, WorkerContext

if TYPE_CHECKING:
    from maze_train.envs.agents import JointEnv


@dataclass(frozen=True)
class SliceSettings:
    """Settings of a slice of environments."""

    step_infos: bool = False
    """Whether to report the infos of every step and reset; if False, only final infos are
    reported."""

    info_keys: Sequence[str] | None = ()
    """Keys of the values to report from final infos; if None, whole infos are reported."""

    on_non_finite: str = "raise"
    """Reaction to NaN and infinity, one of `ON_NON_FINITE`; `skip` drops the episode."""

    final_obs: Literal["none", "truncated", "all"] = "truncated"
    """Which final observations are stored and checked: of truncated episodes, of all episodes, or
    of none."""

    seeded_as: tuple[int, int] = (0, 1)
    """Index of the first environment of all slices among the environments of all processes of a
    run, and the total number of environments. Both values determine the seeds of episodes."""

    autoreset: bool = True
    """Whether an episode is followed by the next one; if False, the environment is paused."""

    whole_games: bool = False
    """Whether each episode is a whole game, independent of earlier episodes: a reset never
    continues a game (see `EpisodicLifeWrapper`), and restores the initial state of environments
    with `state_dict`."""


class EnvSlice(Worker):
    """The environments `first, first + 1, ...`; each one uses one row of every array.

    In training (`reset`), the seeds of all episodes are derived from one seed, and running episodes
    can be restored by replaying the records of a journal, or from saved states of the environments.
    In playing (`begin`), the caller gives the seed of each episode. Without `autoreset`, an
    environment is paused at the end of its episode: it is not stepped, and its row does not change.
    Errors of environments are raised as `EpisodeError`.

    Args:
        factories: Functions that build the environments.
        first: Index of the first environment.
        num_envs: Number of environments of all slices.
        number: Index of the first environment in messages.
        settings: Settings of the slice.
        context: Context of the worker.

    Attributes:
        envs: The environments.
        num_envs: Number of environments n.
        agents: Names of the agents; empty in single-agent environments.
        observation: View of the observation space.
        action: View of the action space.
        playing: Rows of the environments that are not paused, in increasing order.
        rows: `playing` as an array.
        paused: Rows of the paused environments.
        seeds: Seed of the running or last episode of each environment.
        obs: Current observations, `[n, ...]` per leaf.
        final_obs: Final observations of episodes that ended in the last step, `[n, ...]` per leaf.
        actions: Actions of the next step, `[n, ...]` per leaf.
        rewards: Rewards of the last step, `[n]`.
        end: `StepEnd` codes of the last step, `[n]`.

    Raises:
        ConfigError: If a factory rejects its settings.
        EnvError: If an environment cannot be built, or the spaces of the environments differ.
        SpaceError: If a space cannot be flattened.
    """

    starts_itself = False
    paused: set[int]
    obs: dict[str, Array]
    final_obs: dict[str, Array]
    actions: dict[str, Array]
    rewards: npt.NDArray[np.float64]
    end: npt.NDArray[np.uint8]

    def __init__(
        self,
        factories: Pickled[Sequence[Callable[[], Env]]],
        first: int,
        num_envs: int,
        number: int,
        settings: SliceSettings,
        context: WorkerContext,
    ) -> None:
        self.envs = build_envs(factories.value, number)
        self.num_envs = len(self.envs)
        self._first, self._total_envs, self._number = first, num_envs, number
        self._settings, self._context = settings, context
        self._skips = settings.on_non_finite == "skip"
        with closed_on_error(self.envs):
            self.observation = FlatView(self.envs[0].observation_space)
            self.action = FlatView(self.envs[0].action_space)
            self._continuing = [continuing_layers(env) for env in self.envs]
            self._monitors = [monitor_of(env) for env in self.envs]
            self._offers_own_state = [offers_own_state(env) for env in self.envs]
        for inner in (env.unwrapped for env in self.envs if self._skips):
            if agent_spaces(inner.observation_space, inner.action_space) is not None:
                cast("JointEnv", inner).skips_non_finite = True
        self.agents = agents_of((self.observation.space, self.action.space))
        keys = settings.info_keys
        self._keys = None if keys is None else required_keys(keys, self.agents)
        self._run: list[EpisodeSeeds] = []
        self._unplayed: dict[int, dict[str, Any]] = {}
        self._calls: list[EnvCall] = []
        self._num_called = [0] * len(self.envs)
        self._has_begun = [False] * len(self.envs)
        self.seeds = [0] * len(self.envs)
        self._episode_start = [0] * len(self.envs)
        self._steps = 0
        self._report: StepReport | None = None
        self._note: str | None = None
        self._columns: list[Array] = []
        self.pause_all()

    @classmethod
    def for_playing(
        cls,
        factories: Sequence[Callable[[], Env]],
        *,
        number: int = 0,
        on_non_finite: str = "raise",
        final_obs: Literal["none", "all"] = "none",
    ) -> EnvSlice:
        """Create a slice for whole games, whose episodes begin on request.

        Raises:
            SpaceError: If a mask does not match the action space. See also the class.
        """
        settings = SliceSettings(
            on_non_finite=on_non_finite, final_obs=final_obs, autoreset=False, whole_games=True
        )
        made = cls(Pickled(factories, "env"), 0, len(factories), number, settings, WorkerContext())
        with closed_on_error(made.envs):
            columns = StepBuffers.columns(made.observation, made.action, len(factories))
            made.map(PrivateMemory(columns.nbytes))
        return made

    def __len__(self) -> int:
        return len(self.envs)

    def describe(self) -> tuple[Any, Any, Any, Any, bool]:
        """Return spaces, metadata, render mode, and whether any environment can save its state."""
        env, offers = self.envs[0], any(self._offers_own_state)
        metadata = described_metadata(env)
        return env.observation_space, env.action_space, metadata, env.render_mode, offers

    def close(self) -> None:
        """Close all environments, then raise the first error."""
        close_all(self.envs)

    def map(self, memory: Memory) -> None:
        """Set the memory for the results of steps, shared by all slices.

        Raises:
            SpaceError: If a mask in the observations does not match the action space.
        """
        columns = StepBuffers.columns(self.observation, self.action, self._total_envs)
        buffers = StepBuffers.over(memory.buffer, columns)
        part = buffers.rows(self._first, self._first + len(self.envs))
        self.obs, self.final_obs, self.actions = part.obs, part.final_obs, part.actions
        self.rewards, self.end = part.rewards, part.end
        self._write_obs = row_writer(self.observation, self.obs)
        masks = mask_layout(self.observation.space, self.action.space)
        if masks is not None:
            self._write_obs = masked_writer(self._write_obs, masks, self.obs)
        self._write_final_obs = row_writer(self.observation, self.final_obs, is_last=True)
        self._finite = faults.FiniteCheck(self.obs)
        self._columns = [*self.obs.values(), self.rewards, self.end]

    def written(self) -> list[Any]:
        """Return the rows written by the last call, and final observations of ended episodes."""
        rows = [end.env - self._first for end in (self._report.ends if self._report else ())]
        final = [column[i : i + 1] for i in rows for column in self.final_obs.values()]
        return [*self._columns, *final]

    def _row(self, i: int) -> dict[str, Array]:
        return {key: column[i] for key, column in self.obs.items()}

    def reset(
        self, seed: int, options: dict[str, Any] | None, seeds: Mapping[int, int]
    ) -> StepReport:
        """Begin a sequence of episodes whose seeds are derived from `seed`; see `reset_rows`."""
        self._begin_run(seed)
        rows = range(self._first, self._first + len(self.envs))
        return self.reset_rows(rows, options, seeds)

    def reset_rows(
        self, rows: Collection[int], options: dict[str, Any] | None, seeds: Mapping[int, int]
    ) -> StepReport:
        """Begin the next episode in some environments.

        Args:
            rows: Indices of the environments; those of other slices are ignored.
            options: Options of the resets.
            seeds: Seeds by index; the seeds of other environments are derived.
        """
        report = StepReport()
        for i, source in enumerate(self._run):
            index = self._first + i
            if index not in rows:
                continue
            derived = source.next()
            # The options are copied, because an environment may modify its argument.
            info = self.start(i, seeds.get(index, derived), copy.deepcopy(options))
            if self._note is not None:
                report.notes.append(self._note)
                self._note = None
            if self._keys is not None and not self._settings.step_infos:
                info = {MASK_KEY: info[MASK_KEY]} if MASK_KEY in info else {}
            report.infos.append((index, info))
        return report

    def begin_anew(self, seed: int, episodes: Sequence[int]) -> StepReport:
        """Drop the running episodes and begin the next episode in every environment.

        Without `autoreset`, the environments are paused instead.

        Args:
            seed: Seed of the sequence of episodes.
            episodes: Number of episodes begun so far, by environment.
        """
        self._begin_run(seed)
        self.end.fill(DROPPED)
        report = StepReport(dropped=[self._first + i for i in range(len(self.envs))])
        if not self._settings.autoreset:
            self.pause_all()
        for i, count in enumerate(episodes):
            self._run[i].episodes_started = count
            if i in self.paused:
                continue
            info = self.start(i, self._run[i].next())
            if self._settings.step_infos:
                report.infos.append((self._first + i, info))
        return report

    def _begin_run(self, seed: int) -> None:
        first, num_envs = self._settings.seeded_as
        indices = range(first + self._first, first + self._first + len(self.envs))
        self._run = [EpisodeSeeds(seed, index, num_envs) for index in indices]
        self._context.seed_generators(seed + first)
        self._clear_rows(slice(None))
        self._steps = 0
        self.paused = set()
        self._arrange()

    def _clear_rows(self, rows: int | slice) -> None:
        self.rewards[rows] = 0.0
        self.end[rows] = RUNNING

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Begin episodes in paused environments, with the given seed per row."""
        for i, seed in seeds.items():
            self.start(i, seed)

    def advance(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Step the environments that play; see `collect.play.PlayableEnv`."""
        rows = self.rows
        for key, column in (actions if isinstance(actions, dict) else {"": actions}).items():
            self.actions[key][rows] = column[: len(rows)]
        report = self.step()
        if report is None:
            return {}
        return {**{end.env: end for end in report.ends}, **dict.fromkeys(report.dropped)}

    def start(self, i: int, seed: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin an episode in a new game; return the info."""
        try:
            self._force_new_game(i)
            is_first = i == 0 and not self._has_begun[i]
            obs, info = self._reset(i, seed, options)
            if is_first:
                self._note = note_on_lists(self.observation, obs)
            self._take_monitor_result(i)
            self._write_obs(i, obs)
            faults.check_finite(self._row(i))
        except BaseException as error:
            raise self._fault(i, error) from error
        if i in self.paused:
            self.paused.remove(i)
            self._arrange()
        return info

    def pause_all(self) -> None:
        """End all running episodes."""
        self.paused = set(range(len(self.envs)))
        self._arrange()

    def _pause(self, i: int) -> None:
        self.paused.add(i)
        self._arrange()

    def steps_of(self, i: int) -> int:
        """Return the length of the running or last episode of an environment."""
        return self._steps - self._episode_start[i]

    def render(self, i: int) -> object:
        """Render an environment; returns an image if its render mode is `rgb_array`."""
        try:
            return self.envs[i].render()
        except BaseException as error:
            raise self._fault(i, error) from error

    def _arrange(self) -> None:
        """Update the lists of environments that are stepped."""
        self.playing = [i for i in range(len(self.envs)) if i not in self.paused]
        self.rows = np.array(self.playing, np.int64)
        self._in_turn = [(i, self.envs[i]) for i in self.playing]

    def _reset(self, i: int, seed: int, options: dict[str, Any] | None) -> Reset:
        """Reset an environment. A running game may continue."""
        self._episode_start[i], self.seeds[i] = self._steps, seed
        self._has_begun[i] = True
        if self._settings.whole_games and self._offers_own_state[i]:
            self._forget_earlier_episodes(i)
        obs, info = self.envs[i].reset(seed=seed, options=options)
        return obs, faults.checked_info(info)

    def _forget_earlier_episodes(self, i: int) -> None:
        """Restore the initial state of an environment, including the effect of all calls."""
        if i in self._unplayed:
            load_own_state(self.envs[i], self._unplayed[i])
        else:
            self.envs[i].reset(seed=0)
            self._unplayed[i] = own_state(self.envs[i])

    def _force_new_game(self, i: int) -> None:
        """Begin a new game at the next reset."""
        for layer in self._continuing[i]:
            layer.goes_on = False

    def _game_continues(self, i: int) -> bool:
        """Whether a wrapper ended an episode within a running game."""
        return any(layer.goes_on for layer in self._continuing[i])

    def _take_monitor_result(self, i: int) -> tuple[float, int] | None:
        """Return and clear the raw return and length of the last game; None if no game ended."""
        monitor = self._monitors[i]
        return None if monitor is None else monitor.take()

    def _fault(self, i: int, error: BaseException) -> faults.EpisodeError:
        """Return the error for a failed environment."""
        seed = self.seeds[i]
        return faults.EpisodeError(
            faults.episode_fault(self._number + i, self.steps_of(i), seed, error), seed
        )

    def make_calls(self, calls: Sequence[EnvCall]) -> None:
        """Make the calls that have not been made yet, between two steps.

        Args:
            calls: All calls since the environments were created, in order.

        Raises:
            EnvError: If an environment raises, or `calls` is shorter than before.
        """
        new_calls(calls, max(self._num_called))
        self._calls = list(calls)
        for i in range(len(self.envs)):
            self._make_calls(i, len(self._calls))

    def _make_calls(self, i: int, stop: int) -> None:
        """Apply calls to an environment until `stop` calls have been made."""
        calls = self._calls[self._num_called[i] : stop]
        if not calls:
            return
        self._num_called[i] += len(calls)
        env, offers = self.envs[i], self._offers_own_state[i]
        plays_anew = offers and self._settings.whole_games
        try:
            if plays_anew:
                self._forget_earlier_episodes(i)
            elif not self._has_begun[i]:
                env.reset(seed=0)  # Some methods require a running episode.
                self._has_begun[i] = True
            for call in calls:
                call.make(env, may_draw=offers)
            if plays_anew:
                self._unplayed[i] = own_state(env)
        except ConfigError:
            raise
        except BaseException as error:
            raise self._fault(i, error) from error

    def step(self) -> StepReport | None:
        """Step all environments that are not paused.

        Returns:
            Episode ends and infos; None if there are neither.
        """
        self._report = None
        self._steps += 1
        self.end.fill(RUNNING)
        infos: list[tuple[int, Any]] | None = [] if self._settings.step_infos else None
        rewards, write_obs, total, i = self.rewards, self._write_obs, 0.0, 0
        try:
            for (i, env), action in zip(self._in_turn, self._next_actions(), strict=False):
                obs, reward, terminated, truncated, info = env.step(action)
                # `float` raises for None; assignment to an array would convert None to NaN.
                rewards[i] = number = float(reward)
                total += abs(number)
                if terminated or truncated:
                    following = self._end_episode(i, obs, terminated, truncated, info)
                    if following is None:
                        continue
                    obs, info = following
                write_obs(i, obs)
                if infos is not None:
                    infos.append((self._first + i, faults.checked_info(info)))
        except BaseException as error:
            raise self._fault(i, error) from error
        if infos:
            self._report_of_step().infos += infos
        # One check for all environments; `_drop_non_finite` finds the environment.
        if not (total <= faults.MAX_FLOAT32 and self._finite.passes()):
            self._drop_non_finite()
        return self._report

    def _next_actions(self) -> Iterable[Any]:
        """Return copies of the actions, because environments may keep or modify them."""
        rows = self.rows
        if len(rows) == len(self.envs):
            columns = {key: column.copy() for key, column in self.actions.items()}
        else:
            columns = {key: column[rows] for key, column in self.actions.items()}
        return self._built(columns, len(rows))

    def _built(self, actions: Mapping[str, Array], count: int) -> Iterable[Any]:
        """Return the first `count` actions, in the structure of the space."""
        if self.action.is_single:
            column: Iterable[Any] = actions[""]
            return column
        return [
            self.action.build({key: column[i] for key, column in actions.items()})
            for i in range(count)
        ]

    def _report_of_step(self) -> StepReport:
        """Return the report of this step, created on demand."""
        if self._report is None:
            self._report = StepReport()
        return self._report

    def _end_episode(
        self, i: int, obs: object, terminated: bool, truncated: bool, info: object
    ) -> tuple[Any, dict[str, Any]] | None:
        """Report the end of an episode; return the next observation and info, or None if paused."""
        kept = self._settings.final_obs
        faults.checked_flags(terminated, truncated)
        if self._settings.whole_games and not truncated and self._game_continues(i):
            following, game_end = continue_game(self.envs[i], self._continuing[i])
            if game_end is None:
                return following, faults.checked_info(info)
            terminated, last_info = game_end
            info = {**faults.checked_info(info), **last_info}
        self.end[i] = TERMINATED if terminated else TRUNCATED
        if kept != "none":
            self._write_final_obs(i, obs)
        # The final info is read before the reset, because the environment may reuse the dict.
        end = episode_end(self._first + i, faults.checked_info(info), self._keys, self.agents)
        try:
            faults.check_finite_reward(self.rewards[i])
            if kept == "all" or (kept == "truncated" and not terminated):
                final = {key: column[i] for key, column in self.final_obs.items()}
                faults.check_finite(final, "final observation")
        except faults.NonFiniteError:
            if not self._skips:
                raise
            self._drop(i)
        else:
            self._report_of_step().ends.append(end)
        monitor, upcoming = self._monitors[i], None
        if self._settings.whole_games:
            self._force_new_game(i)
            if monitor is not None:
                monitor.end()  # An outer wrapper may have ended the episode.
        elif self._game_continues(i):
            self._report_of_step().continuing.append(self._first + i)
        if self._settings.autoreset:
            upcoming = self._reset(i, self._run[i].next(), None)
        else:
            self._pause(i)
        # The game statistics are read after the reset, because the reset may end the game.
        end.counted = self._take_monitor_result(i)
        return upcoming

    def _drop(self, i: int) -> None:
        """Drop an episode; the next reset begins a new game."""
        self.rewards[i], self.end[i] = 0.0, DROPPED
        self._report_of_step().dropped.append(self._first + i)
        self._force_new_game(i)

    def _drop_non_finite(self) -> None:
        """Find non-finite values; raise an error or drop the episodes."""
        bad = faults.non_finite_rows(self.obs) | faults.non_finite_rewards(self.rewards)
        for i in [k for k in self.playing if bad[k]]:
            try:
                faults.check_finite_reward(self.rewards[i])
                faults.check_finite(self._row(i))
            except faults.NonFiniteError as error:
                # A non-finite first observation always raises an error: there is no episode to
                # drop.
                if not self._skips or self._episode_start[i] == self._steps:
                    raise self._fault(i, error) from error
            self._drop(i)
            if self._settings.autoreset:
                self.start(i, self._run[i].next())
                continue
            self._pause(i)
            for column in self.obs.values():
                column[i] = 0

    def restore(
        self,
        seed: int,
        calls: Sequence[EnvCall],
        records: Sequence[EpisodeRecord],
        allow_new_episodes: bool,
        paused: Collection[int] = (),
    ) -> list[tuple[int, Difference]]:
        """Restore every environment by replaying the actions of its record.

        Args:
            seed: Seed of the sequence of episodes.
            calls: All calls of the environments so far.
            records: One record per environment.
            allow_new_episodes: Whether to begin a new episode if a replay differs from its record.
                If the difference is within rounding, the episode always continues, with the
                recorded observation.
            paused: Rows of the environments that are paused instead.

        Returns:
            Index and difference of each environment whose replay differed.
        """
        self._begin_run(seed)
        self._calls = list(calls)
        problems = []
        for i, record in enumerate(records):
            if i in paused:
                self._make_calls(i, len(calls))
                self._restore_obs(i, record)
                self._pause(i)
                continue
            try:
                problem = self._replay(i, record)
            except CallCancelledError:
                raise  # The caller no longer waits for the result.
            except BaseException as error:
                problem = Difference(f"it raised {faults.explained(error)}")
            self._take_monitor_result(i)
            self.rewards[i] = record.reward
            self._episode_start[i] = -record.steps
            if problem is None:
                continue
            outcome = "" if problem.is_rounding else "could not be restored: "
            place = f"{record.num_actions} actions in the episode with seed {self.seeds[i]}"
            text = f"environment {self._number + i} {outcome}after {place}, {problem.text}"
            problems.append((self._first + i, replace(problem, text=text)))
            if problem.is_rounding:
                self._restore_obs(i, record)
            elif allow_new_episodes:
                self._run[i].episodes_started = record.episodes
                self._clear_rows(i)
                self._make_calls(i, len(calls))
                self.start(i, self._run[i].next())
        return problems

    def _restore_obs(self, i: int, record: EpisodeRecord) -> None:
        """Set the current observation to the recorded one."""
        for key, column in self.obs.items():
            column[i] = record.obs[key]

    def _replay(self, i: int, record: EpisodeRecord) -> Difference | None:
        """Replay an episode; return the difference from the record, if any."""
        env, seeds = self.envs[i], self._run[i]
        seeds.episodes_started = record.base_episodes - 1
        self._force_new_game(i)
        seed = seeds.next()
        self.seeds[i] = seed = seed if record.seed is None else record.seed
        if not record.is_kept:
            return Difference(NOT_KEPT)
        if self._num_called[i] > record.calls:
            return Difference("the environment received different calls before")
        self._make_calls(i, record.calls)
        obs, _ = self._reset(i, seed, copy.deepcopy(record.options))
        if record.own is not None:
            load_own_state(env, record.own)
        reward: SupportsFloat = record.reward
        actions = record.all_actions()
        for k, action in enumerate(self._built(actions, record.num_actions), start=1):
            self._make_calls_at(i, record, k - 1)
            self._episode_start[i] -= 1
            obs, reward, terminated, truncated, _ = env.step(action)
            self._context.count()
            if terminated or truncated:
                if seeds.episodes_started == record.episodes:
                    return Difference(f"the episode already ended after {k} of them")
                obs, _ = self._reset(i, seeds.next(), None)
        if seeds.episodes_started != record.episodes:
            left = record.episodes - seeds.episodes_started
            return Difference(f"{left} episodes have not ended")
        self._make_calls_at(i, record, record.num_actions)
        if record.own is not None and not record.num_actions:
            self._restore_obs(i, record)
            return None
        self._write_obs(i, obs)
        return record.difference(self._row(i), float(reward))

    def _make_calls_at(self, i: int, record: EpisodeRecord, k: int) -> None:
        """Make the calls that are due after k actions of a record."""
        if record.calls_at:
            self._make_calls(i, record.calls + bisect_right(record.calls_at, k))

    def call_envs(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | str:
        """Call a method of every environment, or read an attribute.

        Returns:
            The results, or an error message if an environment has no such attribute.
        """
        try:
            found = [env.get_wrapper_attr(name) for env in self.envs]
        except AttributeError as error:
            return str(error)
        return [value(*args, **kwargs) if callable(value) else value for value in found]

    def set_attrs(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        for env, value in zip(self.envs, values, strict=True):
            env.set_wrapper_attr(name, value)

    def own_states(self) -> list[dict[str, Any] | None] | str:
        """Return the state of each environment (None if not supported), or an error message."""
        states: list[dict[str, Any] | None] = []
        for i, env in enumerate(self.envs):
            try:
                states.append(own_state(env) if self._offers_own_state[i] else None)
            except BaseException as error:
                return str(self._fault(i, error))
        return states

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Load states from `own_states`; must be followed by a reset."""
        self._begin_run(0)
        for i, state in enumerate(states):
            if state is not None:
                self.start(i, self._run[i].next())
                try:
                    load_own_state(self.envs[i], state)
                except BaseException as error:
                    raise self._fault(i, error) from error
