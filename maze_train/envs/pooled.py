"""Vector environment that is stepped by a pool of workers, with restarts of failed workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.notices import warn
from maze_train.core.seeding import episode_seed
from maze_train.core.step_end import EpisodeEnd, StepBatch, has_ended
from maze_train.envs.batch import StepReport, columns_of, infos_of
from maze_train.envs.calls import CALL_ENVS, EnvCall, calls_to_state
from maze_train.envs.faults import ON_NON_FINITE
from maze_train.envs.journal import MAX_NBYTES, Difference, Journal
from maze_train.envs.slice import EnvSlice, SliceSettings
from maze_train.envs.types import Env
from maze_train.envs.vector import (
    ArgumentError,
    Array,
    ArrayTree,
    MazeVectorEnv,
    MissingAttributeError,
    StepBuffers,
    StepResult,
    checked_seed,
    masked_rows,
)
from maze_train.envs.wrappers import note_on_ignored_mask
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.describe import MASK_KEY, FlatView
from maze_train.workers.backends import Pickled, ThisProcess, WorkerBackend
from maze_train.workers.pool import (
    WorkerFailedError,
    WorkerSpecs,
    check_spaces,
    shares,
    worker_names,
)

LOG = logging.getLogger(__package__)

CALLS = {
    "step": "a step",
    "reset": "a reset",
    "reset_rows": "a reset",
    "begin_anew": "a reset",
    "make_calls": f"calls of {CALL_ENVS}",
    "restore": "replaying episodes",
    "call_envs": "a call",
    "set_attrs": "setting an attribute",
    "own_states": "saving the state of its environments",
    "load_own_states": "loading the state of its environments",
    "map": "mapping the shared memory",
}
"""Description of each method, for messages."""

DOES_NOT_REPEAT = (
    "seed and actions do not reproduce an episode of the environment; it may have a "
    "separate random generator or keep state between episodes"
)
NEW_EPISODES = (
    "Set checkpoint.allow_new_episodes=true to drop its running episodes and begin new ones; "
    "results then differ from an uninterrupted run. An environment with state_dict() "
    "and load_state_dict() resumes exactly"
)
"""Cause and remedies if an environment cannot be restored."""


MUCH_NBYTES = 10_000_000
"""If stored actions exceed this size in bytes, a note is printed."""

LONG_EPISODES = (
    "the actions of running episodes exceed 10 MB. Checkpoints store the actions (up to "
    f"{MAX_NBYTES >> 20:,} MB), and a resumed run replays them: add state_dict() and "
    "load_state_dict() to the environment, or set env.max_episode_steps"
)


# skrl recognises vector environments by their direct base class.
class PooledVectorEnv(MazeVectorEnv, VectorEnv[Any, Any, Any]):
    """Vector environment whose environments are stepped by the workers of a backend.

    Stepping environments sequentially in this process is easiest to debug, and fastest for steps of
    a few microseconds. Worker processes are faster if a step takes tens of microseconds or more.
    Results are bit-for-bit identical for all backends and any number of workers.

    After an exception of an environment in this process, the vector environment can be reset. If a
    worker process raises, dies or hangs, a `WorkerError` is raised and the vector environment is
    closed. With `on_worker_failure="restart"`, the worker is restarted instead: its environments
    replay their episodes and repeat the step, so results do not change. If the replay fails, the
    worker is restarted again, and its environments begin new episodes (see `MazeVectorEnv`). A
    journal stores the actions for replays; it is not needed for environments with `state_dict()`
    and `load_state_dict(state)`.

    The autoreset modes are those of Gymnasium. Collectors, `state_dict` and restarts of workers
    require SAME_STEP.

    * SAME_STEP: see `MazeVectorEnv`.
    * NEXT_STEP: the last step of an episode returns its last observation. The next step ignores the
      action of this environment, resets it, and returns the first observation and reward 0.
    * DISABLED: the last step of an episode returns its last observation. The environment must be
      reset with `reset(options={"reset_mask": mask})` before the next step.

    Args:
        env_factories: One function per environment that returns a new environment; lambdas are
            allowed.
        backend: Backend of the workers (`maze_train.workers.backends`); None selects this process.
        copy: Whether to return copies of the observations; if False, internal buffers are returned,
            which the next step overwrites.
        step_infos: Whether to return the infos of every step; if False, only the infos of resets
            and last steps are returned, which reduces the data sent between processes.
        info_keys: Keys of the values to keep from final infos; if None, whole infos are kept.
        on_non_finite: Reaction to rewards, observations and final observations of truncated
            episodes that are not finite in float32: `raise` an error, or `skip` the episode.
            Non-finite first observations always raise an error.
        keeps_terminal_obs: Whether final observations of terminated episodes must be finite too.
        can_be_restored: Whether to store the actions of running episodes for `state_dict`.
        autoreset_mode: The autoreset mode, or its value (`SameStep`, `NextStep`, `Disabled`).
        autoreset: Whether the next episode begins at the end of an episode, in mode SAME_STEP. If
            False, environments are paused until `begin`, and no actions are stored.
        first_env: Index of the first environment in messages.
        total_envs: See `MazeVectorEnv`.

    Raises:
        ConfigError: If `env_factories` is empty, a factory rejects its settings, an argument is
            out of range, or the mode is not SAME_STEP and failed workers are restarted.
        EnvError: If an environment cannot be built, or if the spaces of the environments differ.
        WorkerError: If a worker process raises an exception, dies or hangs.
        SpaceError: If a space cannot be flattened, or differs between workers.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], Env]],
        backend: WorkerBackend | None = None,
        *,
        copy: bool = True,
        step_infos: bool = True,
        info_keys: Sequence[str] | None = None,
        on_non_finite: Literal["raise", "skip"] = "raise",
        keeps_terminal_obs: bool = False,
        can_be_restored: bool = True,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        autoreset: bool = True,
        first_env: int = 0,
        total_envs: int = 0,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        check_one_of("on_non_finite", on_non_finite, ON_NON_FINITE)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        backend = ThisProcess() if backend is None else backend
        value = (
            autoreset_mode.value if isinstance(autoreset_mode, AutoresetMode) else autoreset_mode
        )
        check_one_of("autoreset_mode", value, [mode.value for mode in AutoresetMode])
        mode = AutoresetMode(value)
        if mode is not AutoresetMode.SAME_STEP:
            autoreset = False
            if backend.may_restart:
                problem = "requires on_worker_failure='fail'; expected SameStep for restarts"
                raise ConfigError("autoreset_mode", problem, value)
        self.can_be_restored = can_be_restored and autoreset
        self.starts_itself = autoreset
        self._paused: set[int] = set()
        self._dropped: set[int] = set()  # Dropped by `begin`; reported by the next `advance`.
        self.first_env, self.total_envs = first_env, total_envs
        self.keeps_terminal_obs = keeps_terminal_obs
        # Differences found by the last `load_state_dict`.
        self.differences: list[Difference] = []
        n = len(env_factories)
        count = backend.num_workers(n)
        self._slices = shares(n, count)
        self._indices = range(count)
        final_obs: Literal["truncated", "all"] = "all" if keeps_terminal_obs else "truncated"
        self._seeded_as = (first_env, total_envs) if total_envs else (0, n)
        settings = SliceSettings(
            step_infos, info_keys, on_non_finite, final_obs, self._seeded_as, autoreset=autoreset
        )
        make_workers = [
            partial(
                EnvSlice,
                Pickled(list(env_factories[part.start : part.stop]), "env"),
                part.start,
                n,
                first_env + part.start,
                settings,
            )
            for part in self._slices
        ]
        names = worker_names("worker", self._slices)
        self._pool = backend.pool(WorkerSpecs(make_workers, names, CALLS))
        self._closing.callback(self._pool.close)
        try:
            self._share_memory(n)
        except BaseException:
            self.close()
            raise
        self.metadata["autoreset_mode"] = self.autoreset_mode = mode

    def _share_memory(self, num_envs: int) -> None:
        """Query the spaces from the workers, and map the shared memory."""
        described = self._pool.call_new("describe")
        observation_space, action_space, metadata, self.render_mode, _ = described[0]
        self.offers_own_state = any(offers for *_, offers in described)
        for part, spaces in zip(self._slices, described, strict=True):
            check_spaces(part.start, spaces[:2], described[0][:2])
        self._describe(observation_space, action_space, num_envs, metadata)
        LOG.debug("%d environments, %d workers (%s)", num_envs, len(self._pool), self._pool.host)
        columns = StepBuffers.columns(FlatView(observation_space), self._action, num_envs)
        self._memory = memory = self._pool.allocate(columns.nbytes)
        self._closing.callback(memory.close)
        self._pool.call_all("map", memory)
        self._buffers = buffers = StepBuffers.over(memory.buffer, columns)
        self._journal: Journal | None = None
        if self.can_be_restored or self._pool.may_restart:
            self._journal = Journal(buffers.actions)
        # Copies of observations and rewards before the current call, for restarts.
        self._obs_before: dict[str, Array] = {}
        self._rewards_before = buffers.rewards.copy()
        self._copies: list[tuple[Array, Array]] = []
        if not self._pool.workers:  # Exceptions of workers in this process propagate.
            if self._pool.may_restart:
                self._obs_before = {key: column.copy() for key, column in buffers.obs.items()}
                self._copies = [(self._obs_before[key], buffers.obs[key]) for key in buffers.obs]
                self._copies.append((self._rewards_before, buffers.rewards))
            for index, part in enumerate(self._slices):
                rows = buffers.rows(part.start, part.stop)
                self._pool.sends(index, memory, rows.actions.values())

    @property
    def envs(self) -> list[Env]:
        """The environments in this process; empty if workers are remote."""
        slices = [worker for worker in self._pool.workers if isinstance(worker, EnvSlice)]
        return [env for part in slices for env in part.envs]

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self._pool)

    @property
    def worker_restarts(self) -> int:
        """Number of worker restarts."""
        return self._pool.restarts

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Begin new episodes in all environments, or in those selected by a mask.

        Args:
            seed: Seed of all following episodes, an integer >= 0; if None, a seed is drawn. A
                sequence contains the seed of the next episode of each environment. Later seeds are
                derived from the sequence. If it contains None, the seeds of these environments and
                all later seeds are derived from a drawn seed.
            options: Passed to this reset of every environment, but not to later autoresets. The key
                `reset_mask` is not passed on: a bool array [num_envs] that selects the environments
                to reset. `seed` then applies to their next episode only; if None, they continue
                their sequence of seeds.

        Returns:
            The current observations, [num_envs, ...], and the infos of the resets. If a failed
            worker was restarted, the mask `infos["lost"]` marks other environments whose episodes
            were dropped.

        Raises:
            EnvError: If an environment raises an exception or returns an invalid value, or not all
                environments were reset before a reset with `reset_mask`.
            ShapeError: If the number of seeds or the mask is invalid; also a ValueError and
                TypeError.
            SpaceError: If a seed is not an integer >= 0.
            WorkerError: If a worker process raises an exception, dies or hangs.
        """
        self._check_not_stepping("reset()")
        rows, options = masked_rows(options, self.num_envs)
        if rows is None or (self.root_seed is None and len(rows) == self.num_envs):
            report, lost = self._reset_all(seed, options), set[int]()
        else:
            report = self._reset_rows(rows, options, self._seeds_by_index(seed))
            lost = set(report.dropped) - set(rows)
        infos = columns_of(report.infos, self.num_envs)
        if self.notify is not None:
            for text in report.notes[:1]:
                self.notify(text)
            self._note_on_bounds()
        if lost:
            infos["lost"] = np.isin(range(self.num_envs), list(lost))
        if self.notify is not None and MASK_KEY in infos:
            note = note_on_ignored_mask(infos, self.env_observation_space, self.single_action_space)
            if note is not None:
                self.notify(note)
        return self._observations(), infos

    def _reset_all(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None
    ) -> StepReport:
        """Begin new episodes in all environments."""
        seeds: dict[int, int] = {}
        if isinstance(seed, (Sequence, np.ndarray)):
            seeds = self._seeds_by_index(seed)
            words = np.random.SeedSequence([*seeds.values()]).generate_state(1)
            seed = int(words[0]) if len(seeds) == self.num_envs else None
        arguments = self._seed_for(seed), options, seeds
        self._paused.clear()
        self._dropped.clear()
        if self._journal is not None:
            self._journal.begin(options, seeds)
        self._call("reset", *arguments)
        report = self._gather("reset", *arguments) or StepReport()
        if not self.starts_itself:
            self._paused.update(report.dropped)
        if self._journal is not None:
            self._journal.ended(report.dropped)
        return report

    def _reset_rows(
        self, rows: list[int], options: dict[str, Any] | None, seeds: dict[int, int]
    ) -> StepReport:
        """Begin new episodes in some environments; see `EnvSlice.reset_rows`."""
        if self.root_seed is None:
            raise EnvError("reset() with reset_mask: reset all environments once before")
        self._remember()
        self._call("reset_rows", rows, options, seeds)
        report = self._gather("reset_rows", rows, options, seeds) or StepReport()
        self._paused.difference_update(rows)
        if self._journal is not None:
            self._journal.ended(set(rows) - set(report.dropped), (), options, seeds)
            self._journal.ended(report.dropped)
        return report

    @property
    def playing(self) -> list[int]:
        """Rows of the environments that are not paused."""
        return [row for row in range(self.num_envs) if row not in self._paused]

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Begin episodes in paused environments, with the given seed per row."""
        waiting = dict(seeds)
        while waiting:
            lost = set(self._reset_rows(list(waiting), None, waiting).dropped)
            # A restarted worker that cannot restore its environments pauses all of them.
            self._paused |= lost
            self._dropped |= lost - seeds.keys()
            waiting = {row: seed for row, seed in waiting.items() if row in lost}

    def advance(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Step the environments that play; see `collect.play.PlayableEnv`."""
        dropped = dict[int, EpisodeEnd | None].fromkeys(self._dropped)
        self._dropped.clear()
        return dropped | super().advance(actions)

    def _seeds_by_index(self, seed: int | Sequence[int | None] | None) -> dict[int, int]:
        """Return the seeds of the next episodes of a reset with `seed`; see `reset`."""
        if seed is None:
            return {}
        if not isinstance(seed, (Sequence, np.ndarray)):
            (first, total), root = self._seeded_as, checked_seed(seed)
            return {i: episode_seed(root, first + i, total, 1) for i in range(self.num_envs)}
        if len(seed) != self.num_envs:
            raise ArgumentError(f"reset(): {len(seed)} seeds for {self.num_envs} environments")
        return {i: checked_seed(own) for i, own in enumerate(seed) if own is not None}

    def step_async(self, actions: Any) -> None:
        """Start a step in all workers; see `MazeVectorEnv`.

        Raises:
            EnvError: If an environment waits for a reset (mode DISABLED).
            WorkerError: If this vector environment is closed.
        """
        if self.autoreset_mode is AutoresetMode.DISABLED and self._paused:
            rows = ", ".join(map(str, sorted(self._paused)))
            raise EnvError(
                f"step() was called after the end of the episodes of environments {rows} "
                "(autoreset mode DISABLED): call reset(options={'reset_mask': mask}) first"
            )
        super().step_async(actions)
        self._remember()
        self._call("step")

    def step_wait(self) -> StepResult:
        """Wait for the step started by `step_async`; see `MazeVectorEnv`."""
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return super().step_wait()
        resetting = sorted(self._paused)
        batch = super().receive()
        ended = has_ended(batch.end)
        for key, column in self._buffers.obs.items():
            column[ended] = self._buffers.final_obs[key][ended]
        batch.rewards[resetting] = 0.0
        batch.infos = [*batch.infos, *((end.env, end.info) for end in batch.ends)]
        batch.ends = ()
        if resetting:
            batch.infos += self._reset_rows(resetting, None, {}).infos
        flags = batch.terminated, batch.truncated
        return self._observations(), batch.rewards, *flags, infos_of(batch, self.num_envs)

    def receive(self) -> StepBatch[Array]:
        """Wait for a step; see `MazeVectorEnv`.

        Raises:
            EnvError: If the autoreset mode is not SAME_STEP.
        """
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise EnvError(f"autoreset_mode = {self.autoreset_mode.value}: expected SameStep")
        return super().receive()

    def _finish_step(self) -> StepBatch[Array]:
        report, buffers, journal = self._gather("step"), self._buffers, self._journal
        if journal is not None:
            journal.record()
        batch = StepBatch(self._observations(), buffers.rewards.copy(), buffers.end.copy())
        if report is None:
            return batch
        if not self.starts_itself:
            self._paused.update((end.env for end in report.ends), report.dropped)
        elif journal is not None:
            journal.ended([end.env for end in report.ends], report.continuing)
            journal.ended(report.dropped)
        batch.ends, batch.infos, batch.has_gaps = report.ends, report.infos, bool(report.dropped)
        if report.ends:
            batch.final_obs = buffers.final_obs[""] if self._is_single else buffers.final_obs
        return batch

    def _make_calls(self, calls: list[EnvCall]) -> None:
        self._remember()
        every = [*self.calls_made, *calls]
        self._call("make_calls", every)
        self._gather("make_calls", every)
        if self._journal is not None:
            self._journal.called(len(calls))

    def _call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        found = self._call_each("call_envs", [(name, args, kwargs)] * len(self._slices))
        for problem in [each for each in found if isinstance(each, str)]:
            raise MissingAttributeError(problem)
        return [*chain(*found)]

    def _set_attrs(self, name: str, values: Sequence[Any]) -> None:
        self._call_each("set_attrs", [(name, values[x.start : x.stop]) for x in self._slices])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every environment; see `MazeVectorEnv.state_dict`.

        Returns:
            `root_seed`, and in `envs` one dict per environment with the fields of
            `maze_train.envs.journal.EpisodeRecord`. Before the first reset, the seed is None and
            `envs` is empty. `calls` contains all environment calls.

        Raises:
            EnvError: If the last call failed, a step is in progress, or the state contains values
                that are not plain.
        """
        journal = self._checked_journal("state_dict()")
        if self.root_seed is None:
            return {"root_seed": None, "envs": []}
        if self.offers_own_state:
            for i, own in enumerate(self.own_states()):
                if own is not None:
                    journal.rebase(i, own)
        envs = journal.state(self._buffers.obs, self._buffers.rewards)
        if journal.nbytes > MUCH_NBYTES and self.notify is not None:
            self.notify(LONG_EPISODES)
        calls = calls_to_state(self.calls_made)
        return {"root_seed": self.root_seed, "envs": envs, "calls": calls}

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[ArrayTree, npt.NDArray[np.bool_]]:
        """Restore every environment; see `MazeVectorEnv.load_state_dict`."""
        journal = self._checked_journal("load_state_dict()")
        root, calls, records = journal.read_state(state, self._buffers.obs)
        began: npt.NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.root_seed = None
        if root is None:
            return self._observations(), began
        journal.invalidate()
        own = [records[part.start : part.stop] for part in self._slices]
        given = [(root, calls, each, allow_new_episodes) for each in own]
        found = self._call_each("restore", given)
        self.calls_made[:] = calls
        problems: list[tuple[int, Difference]] = [*chain(*found)]
        self.differences = [problem for _, problem in problems]
        self.is_exact = not problems
        refused = [problem for problem in self.differences if not problem.is_rounding]
        if refused and not allow_new_episodes:
            raise EnvError(f"{refused[0].text}: {DOES_NOT_REPEAT}. {NEW_EPISODES}")
        for text in [problem.text for problem in self.differences if problem.is_rounding][:1]:
            warn(
                f"{text}; the difference is within rounding, so the run resumes, but its results "
                "may differ from an uninterrupted run (exact: false in summary.json)"
            )
        self.root_seed = root
        journal.load(records)
        began[[i for i, problem in problems if not problem.is_rounding]] = True
        journal.ended(began.nonzero()[0].tolist())
        return self._observations(), began

    def _checked_journal(self, call: str) -> Journal:
        """Return the journal. Raise EnvError if the state cannot be accessed."""
        self._check_not_stepping(call)
        if self._journal is None:
            raise EnvError(
                "the actions of these environments are not stored: can_be_restored=False"
            )
        return self._journal

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the states of the environments; see `MazeVectorEnv`."""
        states: list[dict[str, Any] | None] = []
        problem = None
        self._remember()
        self._call("own_states")
        try:
            for index, part in enumerate(self._slices):
                try:
                    given = self._pool.receive(index)
                except WorkerFailedError as error:
                    if self.can_be_restored:
                        # The failure is reported in the next step; the journal suffices to restore
                        # the environments.
                        given = [None] * len(part)
                    else:
                        given = self._repeat(error.with_traceback(None), "own_states")
                problem = problem or (given if isinstance(given, str) else None)
                states += given
        except BaseException:
            self._give_up()
            raise
        if problem is not None:
            raise EnvError(problem)
        return states

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the states from `own_states`; see `MazeVectorEnv`."""
        if len(states) != self.num_envs:
            raise EnvError(f"got {len(states)} states for {self.num_envs} environments")
        self._call_each("load_own_states", [(states[x.start : x.stop],) for x in self._slices])

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every worker with different arguments; return the results."""
        try:
            for index, own in enumerate(arguments):
                self._pool.call(index, method, *own)
            return self._pool.receive_all()
        except BaseException:
            self._give_up()
            raise

    def _call(self, method: str, *args: object) -> None:
        """Start a call in all workers."""
        try:
            for index in self._indices:
                self._pool.call(index, method, *args)
        except BaseException:
            self._give_up()
            raise

    def _gather(self, method: str, *args: object) -> StepReport | None:
        """Join the reports of all workers; failed workers are restarted and repeat the call."""
        reports: list[StepReport | None] = []
        failures: list[WorkerFailedError] = []
        try:
            # Receiving in order causes fewer wake-ups than waiting for any worker.
            for index in self._indices:
                try:
                    reports.append(self._pool.receive(index))
                except WorkerFailedError as error:
                    # The frames of the traceback would keep this object alive.
                    failures.append(error.with_traceback(None))
            for failure in failures:
                reports.insert(failure.index, self._repeat(failure, method, *args))
        except BaseException:
            self._give_up()
            raise
        joined = reports[0]
        for report in reports[1:]:
            if joined is None:
                joined = report
            elif report is not None:
                joined.add(report)
        return joined

    def _give_up(self) -> None:
        """Invalidate the journal, and close this object if a worker is still busy.

        After Ctrl-C, pending results would be mistaken for results of later calls.
        """
        if self._journal is not None:
            self._journal.invalidate()
        if not len(self._pool) or any(map(self._pool.pending, self._indices)):
            self.close()

    def _remember(self) -> None:
        """Copy observations and rewards before a call; a restarted worker must reproduce them."""
        for kept, column in self._copies:
            kept[...] = column

    def _repeat(self, failure: WorkerFailedError, method: str, *args: object) -> Any:
        """Restart a worker until it completes the call or begins new episodes; return its result.

        If a call of `run.call_envs`, or saving the state of environments, fails again after a
        restart, the run ends instead.

        Args:
            failure: Failure of the worker.
            method: Method of the call.
            *args: Arguments of the call.

        Raises:
            MazeTrainError: If the worker cannot be restarted.
            SpaceError: If the environments of the restarted worker have different spaces.
        """
        index, given_up = failure.index, 0
        part = self._slices[index]
        while True:
            repeats = given_up > 0 and method in ("make_calls", "own_states")
            failure.final = failure.final or repeats
            outlook = "begin new episodes" if given_up else "are restored"
            self._pool.restart(
                failure,
                f"{failure.text}{self._seeds_of(failure)}",
                f"and its environments {outlook}",
            )
            try:
                spaces = self._pool.ask(index, "describe")[:2]
                own = self.env_observation_space, self.single_action_space
                check_spaces(part.start, spaces, own)
                self._pool.ask(index, "map", self._memory)
            except WorkerFailedError as another:
                # The worker failed before it restored episodes.
                failure = another.with_traceback(None)
                continue
            try:
                if given_up:
                    return self._begin_anew(index, given_up)
                self._put_back(index, restores=method != "reset")
                return self._pool.ask(index, method, *args)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _put_back(self, index: int, restores: bool) -> None:
        """Restore the environments of a restarted worker to their state before the call."""
        assert self._journal is not None
        if not (restores and self._journal.has_begun):
            self._pool.ask(index, "make_calls", self.calls_made)
            return
        part, before = self._slices[index], (self._obs_before, self._rewards_before)
        records = [self._journal.record_of(i, *before) for i in part]
        paused = [i - part.start for i in part if i in self._paused]
        restored = self.root_seed or 0, self.calls_made, records, False, paused
        for _, problem in self._pool.ask(index, "restore", *restored):
            text = f"{worker_names('worker', self._slices)[index]}: {problem.text}"
            if not problem.is_rounding:
                raise WorkerFailedError(index, text, raised=True)
            warn(f"{text}; the difference is within rounding, so training continues")

    def _begin_anew(self, index: int, given_up: int) -> StepReport:
        """Begin new episodes in a restarted worker after `given_up` failed attempts to restore."""
        assert self._journal is not None
        self._pool.ask(index, "make_calls", self.calls_made)
        started = [self._journal.episodes[i] + given_up - 1 for i in self._slices[index]]
        report: StepReport = self._pool.ask(index, "begin_anew", self.root_seed or 0, started)
        report.dropped *= given_up
        return report

    def _seeds_of(self, failure: WorkerFailedError) -> str:
        """Return the seeds of the episodes of a worker, for messages without a seed."""
        if failure.raised or self._journal is None:
            return ""
        seeds, (first, total) = [], self._seeded_as
        for i in self._slices[failure.index]:
            seed, count = self._journal.given_seed(i), self._journal.episodes[i]
            if seed is None:
                seed = episode_seed(self.root_seed or 0, first + i, total, count)
            seeds.append(seed)
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"


AutoresetVectorEnv = SequentialVectorEnv = PooledVectorEnv
"""Aliases of `PooledVectorEnv`, which by default steps the environments in this process."""


def SubprocVectorEnv(  # noqa: N802 (established name)
    env_factories: Sequence[Callable[[], Env]],
    *,
    n_workers: int = 0,
    start_method: str = "forkserver",
    timeout_s: float = 300.0,
    on_worker_failure: str = "fail",
    max_worker_restarts: int = 10,
    **settings: Any,
) -> PooledVectorEnv:
    """Create a vector environment in processes; see `LocalProcesses` for the arguments.

    `**settings` are arguments of `PooledVectorEnv`.
    """
    from maze_train.workers.process_pool import LocalProcesses

    backend = LocalProcesses(
        n_workers, timeout_s, on_worker_failure, max_worker_restarts, start_method
    )
    return PooledVectorEnv(env_factories, backend, **settings)
