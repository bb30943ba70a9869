"""Slice of training environments whose running episodes can be restored."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.step_end import DROPPED, RUNNING
from maze_train.envs.batch import StepReport
from maze_train.envs.calls import EnvCall
from maze_train.envs.faults import explained
from maze_train.envs.journal import NOT_KEPT, Difference, EpisodeRecord
from maze_train.envs.slice import EnvSlice
from maze_train.envs.wrappers import load_own_state, own_state
from maze_train.spaces.describe import MASK_KEY
from maze_train.workers.pool import CallCancelledError


class TrainingSlice(EnvSlice):
    """Worker of a `PooledVectorEnv`; the seeds of all episodes are derived from one seed.

    Running episodes are restored by replaying the records of a journal, or from saved states of the
    environments.
    """

    _run: list[EpisodeSeeds]

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
        report = StepReport(lost=[self._first + i for i in range(len(self.envs))])
        if not self._settings.autoreset:
            self.rest()
        for i, count in enumerate(episodes):
            self._run[i].episodes_started = count
            if i in self.resting:
                continue
            info = self.start(i, self._run[i].next())
            if self._settings.step_infos:
                report.infos.append((self._first + i, info))
        return report

    def _begin_run(self, seed: int) -> None:
        first, num_envs = self._settings.seeded_as
        indices = range(first + self._first, first + self._first + len(self.envs))
        self._run = [EpisodeSeeds(seed, index, num_envs) for index in indices]
        continues = self._settings.autoreset
        self._next_seed = lambda i: self._run[i].next() if continues else None
        self._context.seed_generators(seed + first)
        self._clear_rows(slice(None))
        self._steps = 0
        self.resting = set()
        self._arrange()

    def _clear_rows(self, rows: int | slice) -> None:
        self.rewards[rows] = 0.0
        self.end[rows] = RUNNING

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
                self.resting.add(i)
                self._arrange()
                continue
            try:
                problem = self._replay(i, record)
            except CallCancelledError:
                raise  # The caller no longer waits for the result.
            except BaseException as error:
                problem = Difference(f"it raised {explained(error)}")
            self._counted(i)
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
        self._let_go(i)
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
