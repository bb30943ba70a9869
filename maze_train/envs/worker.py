"""A worker that steps a slice of the environments of a vector environment."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.step_end import DROPPED, RUNNING, TRUNCATED, EpisodeEnd
from maze_train.envs.batch import asked_keys, episode_end
from maze_train.envs.faults import (
    MAX_FLOAT32,
    NonFiniteError,
    check_finite,
    check_finite_reward,
    explained,
    non_finite_rewards,
    non_finite_rows,
)
from maze_train.envs.journal import (
    NOT_KEPT,
    Difference,
    EpisodeRecord,
    load_own_state,
    offers_own_state,
    own_state,
)
from maze_train.envs.monitoring import described_metadata
from maze_train.envs.stepped import SteppedEnvs, checked_info
from maze_train.envs.vector import StepBuffers, row_writer
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import MASK_KEY
from maze_train.workers.places import Portable
from maze_train.workers.pool import CallCancelledError, WorkerContext

CALLS = {
    "step": "a step",
    "reset": "a reset",
    "begin": "a reset",
    "restore": "playing episodes again",
    "own_states": "telling the state of its environments",
    "load_own_states": "loading the state of its environments",
    "busy_s": "telling its time",
    "map": "mapping the shared memory",
}
"""Names of the calls of workers in messages."""


@dataclass(slots=True)
class StepReport:
    """Ends of episodes and infos of one step, in the order of the environments."""

    ends: list[EpisodeEnd] = field(default_factory=list)
    """Episodes that ended."""
    infos: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Infos of resets and of all other steps by index of the environment, if they are asked for."""
    lost: list[int] = field(default_factory=list)
    """Environments whose row is no transition, because their episode was given up."""
    continuing: list[int] = field(default_factory=list)
    """Environments whose new episode continues with the game of the old one."""

    def add(self, other: StepReport) -> None:
        """Append the report of the environments that follow."""
        self.ends += other.ends
        self.infos += other.infos
        self.lost += other.lost
        self.continuing += other.continuing


class EnvWorker(SteppedEnvs):
    """The environments `first, first + 1, ...` of a vector environment, reset where episodes end.

    Args:
        factories: Functions that build them.
        first: Index of the first one.
        num_envs: Number of environments of the whole vector environment.
        number: Number of the first one in messages.
        step_infos: Whether to report the infos of every step and autoreset, not only those of last
            steps.
        info_keys: Keys of the numbers to report of last infos; None: report whole infos.
        on_non_finite: Reaction to a step that returns NaN or an infinity: `raise`, or `skip`:
            the episode is given up, and the next one begins.
        keeps_terminal_obs: Whether last observations of terminated episodes must be finite too.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[Callable[[], gymnasium.Env[Any, Any]]]],
        first: int,
        num_envs: int,
        number: int,
        step_infos: bool,
        info_keys: Sequence[str] | None,
        on_non_finite: str,
        keeps_terminal_obs: bool,
        context: WorkerContext,
    ) -> None:
        super().__init__(factories.value, number, on_non_finite)
        self._first, self._num_envs = first, num_envs
        self._step_infos = step_infos
        self._keeps_terminal_obs = keeps_terminal_obs
        several = agent_spaces(self._observation.space, self._action.space)
        self._agents = several.agents if several is not None else ()
        self._keys = None if info_keys is None else asked_keys(info_keys, self._agents)
        self._context = context
        self._seeds: list[EpisodeSeeds] = []
        self._episode_seed = [0] * len(self.envs)
        self._episode_start = [0] * len(self.envs)
        self._steps, self._busy_s = 0, 0.0
        self._report: StepReport | None = None
        self._columns: list[Any] = []
        self._final_columns: list[Any] = []

    def describe(self) -> tuple[Any, Any, Any, Any, bool]:
        """Spaces, metadata and render mode, and whether an environment offers its state."""
        env, offers = self.envs[0], any(map(offers_own_state, self.envs))
        metadata = described_metadata(env)
        return env.observation_space, env.action_space, metadata, env.render_mode, offers

    def map(self, memory: Any) -> None:
        """Step into memory of the whole vector environment from now on.

        Raises:
            SpaceError: If a mask in the observations does not fit the actions.
        """
        columns = StepBuffers.columns(self._observation, self._action, self._num_envs)
        buffers = StepBuffers.over(memory.buffer, columns)
        self._buffers = part = buffers.rows(self._first, self._first + len(self.envs))
        self._step_into(part.obs, part.rewards, part.end)
        self._columns = [*part.obs.values(), part.rewards, part.end]
        self._final_columns = list(part.final_obs.values())
        self._write_final_obs = row_writer(self._observation, part.final_obs, is_last=True)

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
            if self._keys is not None and not self._step_infos:
                info = {MASK_KEY: info[MASK_KEY]} if MASK_KEY in info else {}
            report.infos.append((self._first + i, info))
        return report

    def step(self) -> StepReport | None:
        """Step every environment once, and start the next episode where one ended.

        Returns:
            The infos to pass on, or None without any.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        started = time.perf_counter()
        self._report = None
        self._steps += 1
        self.end.fill(RUNNING)
        infos: list[tuple[int, Any]] | None = [] if self._step_infos else None
        # Environments may keep or change the action that they are given, so they get a copy.
        actions = {key: column.copy() for key, column in self._buffers.actions.items()}
        total = self._step_envs(actions, len(self.envs), infos)
        if infos is not None:
            report = self._report_of_step()
            report.infos += [(self._first + i, info) for i, info in infos]
        if not (total <= MAX_FLOAT32 and self._finite.passes()):
            self._give_up_non_finite()
        self._busy_s += time.perf_counter() - started
        return self._report

    def written(self) -> list[Any]:
        """Return what the last call wrote: the rows, and last observations of ended episodes."""
        ends = self._report.ends if self._report else ()
        rows = [end.env - self._first for end in ends]
        return [*self._columns, *(x[i : i + 1] for x in self._final_columns for i in rows)]

    def busy_s(self) -> float:
        """Seconds that steps took, since the worker began."""
        return self._busy_s

    def restore(
        self, seed: int, records: Sequence[EpisodeRecord], allow_new_episodes: bool
    ) -> list[tuple[int, Difference]]:
        """Put every environment where its record says, by playing its episode again.

        Args:
            seed: Names the run of episodes.
            records: One per environment.
            allow_new_episodes: Whether an environment that did not do the same again begins a new
                episode. One whose replay differs within rounding continues its episode in any case,
                with the observation of the record.

        Returns:
            The environments whose replay differed, and how.

        Raises:
            EnvError: If an environment raises or returns something invalid.
        """
        self._begin_run(seed)
        problems = []
        for i, record in enumerate(records):
            problem: Difference | None
            try:
                problem = self._replay(i, record)
            except CallCancelledError:
                raise  # no one needs the result
            except BaseException as error:
                problem = Difference(f"it raised {explained(error)}")
            self._counted(i)
            self.rewards[i] = record.reward
            self._episode_start[i] = -record.steps
            if problem is None:
                continue
            name = f"environment {self._number + i} "
            name += "" if problem.is_rounding else "could not be put back where it was: "
            name += f"after {record.num_actions} actions in the episode with seed "
            text = f"{name}{self._episode_seed[i]}, {problem.text}"
            problems.append((self._first + i, replace(problem, text=text)))
            if problem.is_rounding:
                self._restore_obs(i, record)
            elif allow_new_episodes:
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
        self.end.fill(DROPPED)
        report = StepReport(lost=[self._first + i for i in range(len(self.envs))])
        for i, count in enumerate(episodes):
            self._seeds[i].episodes_started = count
            info = self._begin_anew(i, None)
            if self._step_infos:
                report.infos.append((self._first + i, info))
        return report

    def own_states(self) -> list[dict[str, Any] | None] | str:
        """States that environments give of themselves, or None; a text if one cannot."""
        states: list[dict[str, Any] | None] = []
        for i, env in enumerate(self.envs):
            try:
                states.append(own_state(env) if offers_own_state(env) else None)
            except BaseException as error:
                return str(self._fault(i, error))
        return states

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Give the environments the states that `own_states` returned; a reset has to follow.

        Raises:
            EnvError: If an environment raises, or a state does not fit.
        """
        self._begin_run(0)
        for i, state in enumerate(states):
            if state is not None:
                self._begin_anew(i, None)
                try:
                    load_own_state(self.envs[i], state)
                except BaseException as error:
                    raise self._fault(i, error) from error

    def _begin_run(self, seed: int) -> None:
        indices = range(self._first, self._first + len(self.envs))
        self._seeds = [EpisodeSeeds(seed, index, self._num_envs) for index in indices]
        self._context.seed_generators(seed)
        self.rewards.fill(0.0)
        self.end.fill(RUNNING)
        self._steps = 0

    def _drop(self, i: int) -> None:
        """Note that the episode was given up: the row is no transition."""
        self.rewards[i] = 0.0
        self.end[i] = DROPPED
        self._report_of_step().lost.append(self._first + i)

    def _report_of_step(self) -> StepReport:
        """The report of this step, made where there is something to report."""
        if self._report is None:
            self._report = StepReport()
        return self._report

    def _next_seed(self, i: int) -> int:
        """Count an episode that begins now; returns its seed."""
        self._episode_start[i] = self._steps
        self._episode_seed[i] = seed = self._seeds[i].next()
        return seed

    def _begin_anew(self, i: int, options: dict[str, Any] | None) -> dict[str, Any]:
        """Start an episode that is independent of earlier ones; returns the info."""
        try:
            return self._begin_game(i, seed=self._next_seed(i), options=options)
        except BaseException as error:
            raise self._fault(i, error) from error

    def _go_on(self, i: int) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, perhaps in the same game; returns observation and info."""
        obs, info = self.envs[i].reset(seed=self._next_seed(i), options=None)
        return obs, checked_info(info)

    def _end_episode(self, i: int, obs: Any, info: Any, truncated: bool) -> tuple[Any, Any]:
        """Report the end of an episode and start the next one; returns its observation and info."""
        report = self._report_of_step()
        self._write_final_obs(i, obs)
        # Before the reset: the environment may use the memory of the info again.
        end = episode_end(self._first + i, checked_info(info), self._keys, self._agents)
        try:
            check_finite_reward(self.rewards[i])
            if self.end[i] == TRUNCATED or self._keeps_terminal_obs:
                final = {key: column[i] for key, column in self._buffers.final_obs.items()}
                check_finite(final, "final observation")
        except NonFiniteError:
            if not self._skips:
                raise
            self._drop(i)
            self._let_go(i)
        else:
            report.ends.append(end)
            if self._goes_on(i):
                report.continuing.append(self._first + i)
        following = self._go_on(i)
        # After the reset, which ends the game if a training wrapper ended the episode.
        end.counted = self._counted(i)
        return following

    def _give_up_non_finite(self) -> None:
        """Look for numbers that are not finite, and raise or give up the episodes."""
        bad = non_finite_rows(self.obs) | non_finite_rewards(self.rewards)
        for i in [int(k) for k in bad.nonzero()[0]]:
            try:
                check_finite_reward(self.rewards[i])
                check_finite(self._row(i))
            except NonFiniteError as error:
                # There is nothing to give up in the first observation of an episode.
                if not self._skips or self._episode_start[i] == self._steps:
                    raise self._fault(i, error) from error
            self._drop(i)
            self._begin_anew(i, None)

    def _restore_obs(self, i: int, record: EpisodeRecord) -> None:
        """Let the observation to act on be that of a record."""
        for key, column in self.obs.items():
            column[i] = record.obs[key]

    def _replay(self, i: int, record: EpisodeRecord) -> Difference | None:
        """Play an episode again; returns the difference."""
        env, seeds = self.envs[i], self._seeds[i]
        seeds.episodes_started = record.base_episodes - 1
        self._let_go(i)
        seed = self._next_seed(i)
        if not record.is_kept:
            return Difference(NOT_KEPT)
        obs, info = env.reset(seed=seed, options=copy.deepcopy(record.options))
        checked_info(info)
        if record.own is not None:
            load_own_state(env, record.own)
        reward: Any = record.reward
        actions = {key: column.copy() for key, column in record.actions.items()}
        for k, action in enumerate(self._built(actions, record.num_actions), start=1):
            self._episode_start[i] -= 1
            obs, reward, terminated, truncated, _ = env.step(action)
            self._context.count()
            if terminated or truncated:
                if seeds.episodes_started == record.episodes:
                    return Difference(f"the episode has ended, already after {k} of them")
                obs, _ = self._go_on(i)
        if seeds.episodes_started != record.episodes:
            left = record.episodes - seeds.episodes_started
            return Difference(f"{left} episodes have not ended")
        if record.own is not None and not record.num_actions:
            self._restore_obs(i, record)
            return None
        self._write_obs(i, obs)
        return record.difference(self._row(i), float(reward))

    def _when(self, i: int, in_step: bool) -> tuple[int, int]:
        return self._steps - self._episode_start[i], self._episode_seed[i]
