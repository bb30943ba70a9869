"""Many environments, stepped by the workers of a place; failed workers are started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from maze_train.core.checks import check_one_of
from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.notices import warn
from maze_train.core.seeding import EpisodeSeeds
from maze_train.core.step_end import StepBatch
from maze_train.envs.batch import StepReport
from maze_train.envs.facade import columns_of
from maze_train.envs.faults import ON_NON_FINITE
from maze_train.envs.journal import MAX_NBYTES, Difference, Journal
from maze_train.envs.monitoring import note_on_ignored_mask
from maze_train.envs.restoring import TrainingSlice
from maze_train.envs.slice import SliceSettings
from maze_train.envs.types import Env
from maze_train.envs.vector import Array, ArrayTree, MazeVectorEnv, StepBuffers
from maze_train.spaces.describe import MASK_KEY, FlatView
from maze_train.workers.places import Place, Portable, ThisProcess
from maze_train.workers.pool import (
    Crew,
    WorkerFailedError,
    WorkerPool,
    check_spaces,
    shares,
    worker_names,
)

CALLS = {
    "step": "a step",
    "reset": "a reset",
    "begin_anew": "a reset",
    "restore": "playing episodes again",
    "own_states": "telling the state of its environments",
    "load_own_states": "loading the state of its environments",
    "busy_s": "telling its time",
    "map": "mapping the shared memory",
}
"""Names of the calls of workers in messages."""

DOES_NOT_REPEAT = (
    "the environment does not repeat an episode from its seed and actions, as if it had its own "
    "random generator or kept something between episodes"
)
NEW_EPISODES = (
    "checkpoint.allow_new_episodes=true resumes all the same: its running episodes are dropped and "
    "new ones begin, so results differ from those of an uninterrupted run. An environment with "
    "state_dict() and load_state_dict() resumes exactly"
)
"""What it means if an environment cannot be put back, the remedy, and its cost."""


class WorkerRepair:
    """Restarts of the workers of a vector environment.

    Args:
        pool: The workers.
        slices: Indices of the environments of each.
        spaces: Observation and action space of an environment.
        memory: Memory into which they step.
        journal: Journal of the running episodes; None: workers are never started again.
    """

    def __init__(
        self,
        pool: WorkerPool,
        slices: Sequence[range],
        spaces: tuple[Any, Any],
        memory: Any,
        journal: Journal | None,
    ) -> None:
        self._pool, self._slices, self._spaces = pool, slices, spaces
        self._memory, self._journal = memory, journal
        self._num_envs = slices[-1].stop
        self._obs: dict[str, Array] = {}
        self._pairs: list[tuple[Array, Array]] = []

    def keep(self, buffers: StepBuffers) -> None:
        """Let `remember` copy these observations and rewards."""
        self._obs = {key: column.copy() for key, column in buffers.obs.items()}
        self._rewards = buffers.rewards.copy()
        self._pairs = [(self._obs[key], buffers.obs[key]) for key in buffers.obs]
        self._pairs.append((self._rewards, buffers.rewards))

    def remember(self) -> None:
        """Keep the numbers from before a step, to which a new worker has to come."""
        for kept, column in self._pairs:
            kept[...] = column

    def repeat(
        self, failure: WorkerFailedError, root_seed: int, method: str, *args: Any
    ) -> StepReport | None:
        """Start a worker again until it does the call; returns its report.

        Args:
            failure: Failure of the worker.
            root_seed: Seed of the run of episodes.
            method: The call.
            *args: Its arguments.

        Raises:
            MazeTrainError: If it is not to be started again.
            SpaceError: If the environments of a new worker differ in their spaces.
        """
        given_up = 0
        while True:
            outlook = "begin new episodes" if given_up else "are put back where they were"
            self._pool.restart(
                failure,
                f"{failure.text}{self._seeds_of(failure, root_seed, method)}",
                f"and its environments {outlook}",
            )
            try:
                self._begin_again(failure.index)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)  # before it came to the episodes
                continue
            try:
                if given_up:
                    return self._begin_anew(failure.index, root_seed, method, given_up)
                return self._put_back(failure.index, root_seed, method, *args)
            except WorkerFailedError as another:
                failure = another.with_traceback(None)
                given_up += 1

    def _begin_again(self, index: int) -> None:
        """Give a new worker its memory."""
        spaces = self._pool.ask(index, "describe")[:2]
        check_spaces(self._slices[index].start, spaces, self._spaces)
        self._pool.ask(index, "map", self._memory)

    def _put_back(self, index: int, root_seed: int, method: str, *args: Any) -> StepReport | None:
        """Put the environments of a new worker back, and let it do the call."""
        if method == "step":
            assert self._journal is not None
            part = self._slices[index]
            records = [self._journal.record_of(i, self._obs, self._rewards) for i in part]
            problems = self._pool.ask(index, "restore", root_seed, records, False)
            for _, problem in problems:
                text = f"{worker_names('worker', self._slices)[index]}: {problem.text}"
                if not problem.is_rounding:
                    raise WorkerFailedError(index, text, raised=True)
                warn(f"{text}, which is within rounding: training continues")
        report: StepReport | None = self._pool.ask(index, method, *args)
        return report

    def _begin_anew(self, index: int, root_seed: int, method: str, given_up: int) -> StepReport:
        """Begin new episodes in a new worker, after `given_up` attempts."""
        started = [self._started(i, method) + given_up - 1 for i in self._slices[index]]
        report: StepReport = self._pool.ask(index, "begin_anew", root_seed, started)
        report.lost *= given_up
        return report

    def _started(self, i: int, method: str) -> int:
        """Number of episodes that an environment has started when it does the call."""
        assert self._journal is not None
        return 1 if method == "reset" else self._journal.episodes[i]

    def _seeds_of(self, failure: WorkerFailedError, root_seed: int, method: str) -> str:
        """The seeds of the episodes of a worker, for a message that does not name one."""
        if failure.raised or self._journal is None:
            return ""
        seeds = [
            episode_seed(root_seed, i, self._num_envs, self._started(i, method))
            for i in self._slices[failure.index]
        ]
        return f"; seeds of its episodes: {', '.join(map(str, seeds))}"


def episode_seed(root: int, index: int, num_envs: int, episodes: int) -> int:
    """The seed of the last one of `episodes` >= 1 episodes of an environment."""
    seeds = EpisodeSeeds(root, index, num_envs)
    seeds.episodes_started = episodes - 1
    return seeds.next()


MUCH_NBYTES = 10_000_000
"""Size of the actions of running episodes from which on a run says so."""

LONG_EPISODES = (
    "the actions of running episodes take more than 10 MB, which checkpoints keep (up to "
    f"{MAX_NBYTES >> 20:,} MB) and a resumed run plays again: let the environment offer "
    "state_dict() and load_state_dict(), or set env.max_episode_steps"
)


class PooledVectorEnv(MazeVectorEnv):
    """Steps its environments in the workers of a place, each of which has a slice of them.

    In this process, the fastest place for environments that take microseconds and the easiest one
    to debug, they are stepped one after the other. Worker processes are for environments that take
    tens of microseconds or more per step. The numbers are the same, bit for bit, wherever they are
    stepped and whatever the number of workers. Observations, copies and infos are described at
    `MazeVectorEnv`.

    In this process an environment that raises leaves the vector environment open for another
    reset. A worker process that raises, dies or hangs ends the whole vector environment with a
    `WorkerError`; no process is left. With `on_worker_failure="restart"` of the place it is started
    again with a line on stderr; its environments play their episodes again up to the step that
    failed, and make that step, so that no number is another one. Where that fails too, the worker
    is started once more, and its environments begin new episodes, as described at `MazeVectorEnv`.
    A number that is not finite is no failure of the worker.

    A journal keeps the actions of the running episodes: an episode is played again from its seed
    and its actions. An environment that offers `state_dict()` and `load_state_dict(state)` itself,
    as all of its wrappers have to, is not played again.

    Args:
        env_factories: One function per environment, each of which returns a new environment.
            Lambdas and local classes are fine.
        place: Where they are stepped, see `maze_train.workers.places`; None: in this process.
        copy: Whether to return copies of the observations; false: the internal buffers, which the
            next step overwrites.
        step_infos: Whether to return the infos of every step, which have to travel between
            processes; false: only those of resets and last steps.
        info_keys: Keys of the numbers to keep of last infos; None: keep last infos and those of
            resets as they are.
        on_non_finite: Reaction to NaN, infinities, and numbers that float32 cannot hold, in
            rewards, observations, and last observations of truncated episodes: `raise`, or `skip`:
            the episode is dropped as described at `MazeVectorEnv`. In the first observation of an
            episode they are always an error.
        keeps_terminal_obs: Whether that holds for last observations of terminated episodes too.
        can_be_restored: Whether the actions of running episodes are kept, so that `state_dict` can
            say where the environments are. They use memory until an episode ends.
        first_env: Number of the first environment in messages.

    Raises:
        ConfigError: If there is no factory, or one refuses its settings, or an argument is out of
            its range.
        EnvError: If an environment cannot be built, or differs in its spaces from the first. It
            is a WorkerError where a worker process raises, dies or hangs.
        SpaceError: If a space cannot be flattened, or differs between workers.
    """

    def __init__(
        self,
        env_factories: Sequence[Callable[[], Env]],
        place: Place | None = None,
        *,
        copy: bool = True,
        step_infos: bool = True,
        info_keys: Sequence[str] | None = None,
        on_non_finite: Literal["raise", "skip"] = "raise",
        keeps_terminal_obs: bool = False,
        can_be_restored: bool = True,
        first_env: int = 0,
    ) -> None:
        super().__init__(copy=copy, step_infos=step_infos)
        check_one_of("on_non_finite", on_non_finite, ON_NON_FINITE)
        if not env_factories:
            raise ConfigError("env_factories", "expected at least one factory", env_factories)
        place = ThisProcess() if place is None else place
        self.can_be_restored, self.first_env = can_be_restored, first_env
        self.keeps_terminal_obs = keeps_terminal_obs
        self.differences: list[Difference] = []  # of the replays of the last `load_state_dict`
        n = len(env_factories)
        count = place.num_workers(n)
        self._slices = shares(n, count)
        self._indices = range(count)
        final_obs: Literal["truncated", "all"] = "all" if keeps_terminal_obs else "truncated"
        settings = SliceSettings(step_infos, info_keys, on_non_finite, final_obs)
        make_workers = [
            partial(
                TrainingSlice,
                Portable(list(env_factories[part.start : part.stop]), "env"),
                part.start,
                n,
                first_env + part.start,
                settings,
            )
            for part in self._slices
        ]
        names = worker_names("worker", self._slices)
        self._pool = place.pool(Crew(make_workers, names, CALLS))
        self._closing.callback(self._pool.close)
        try:
            self._share_memory(n)
        except BaseException:
            self.close()
            raise

    def _share_memory(self, num_envs: int) -> None:
        """Learn the spaces from the workers, and give them the memory to step into."""
        described = self._pool.call_new("describe")
        observation_space, action_space, metadata, self.render_mode, _ = described[0]
        self.offers_own_state = any(offers for *_, offers in described)
        for part, spaces in zip(self._slices, described, strict=True):
            check_spaces(part.start, spaces[:2], described[0][:2])
        self._describe(observation_space, action_space, num_envs, metadata)
        columns = StepBuffers.columns(FlatView(observation_space), self._action, num_envs)
        memory = self._pool.allocate(columns.nbytes)
        self._closing.callback(memory.close)
        self._pool.call_all("map", memory)
        self._buffers = buffers = StepBuffers.over(memory.buffer, columns)
        self._journal: Journal | None = None
        if self.can_be_restored or self._pool.may_restart:
            self._journal = Journal(buffers.actions)
        self._repair: WorkerRepair | None = None
        if not self._pool.workers:  # What workers of this process raise goes through.
            spaces = (observation_space, action_space)
            self._repair = WorkerRepair(self._pool, self._slices, spaces, memory, self._journal)
            if self._pool.may_restart:
                self._repair.keep(buffers)
            for index, part in enumerate(self._slices):
                rows = buffers.rows(part.start, part.stop)
                self._pool.sends(index, memory, rows.actions.values())

    @property
    def envs(self) -> list[Env]:
        """The environments that live in this process; none where workers are elsewhere."""
        slices = [worker for worker in self._pool.workers if isinstance(worker, TrainingSlice)]
        return [env for part in slices for env in part.envs]

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self._pool)

    @property
    def worker_restarts(self) -> int:
        """Number of workers that were started again."""
        return self._pool.restarts

    def busy_s(self) -> float:
        """Seconds for which environments were stepped so far, over all workers.

        Raises:
            WorkerError: If a worker is gone.
        """
        return float(sum(self._pool.call_all("busy_s")))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ArrayTree, dict[str, Any]]:
        """Start a run of episodes.

        Args:
            seed: Names the run of episodes, an integer >= 0; None draws one.
            options: Passed to the reset of every environment, not to later autoresets.

        Returns:
            The first observations, [num_envs, ...], and the infos of the resets.

        Raises:
            EnvError: If an environment raises or returns something invalid. It is a WorkerError
                where a worker process raises, dies or hangs.
        """
        self._check_not_stepping("reset()")
        arguments = self._seed_for(seed, options), options
        self._call("reset", *arguments)
        report = self._gather("reset", *arguments) or StepReport()
        if self._journal is not None:
            self._journal.begin(options)
            self._journal.ended(report.lost)
        infos = columns_of(report.infos, self.num_envs)
        if self.notify is not None and MASK_KEY in infos:
            note = note_on_ignored_mask(infos, self.env_observation_space, self.single_action_space)
            if note is not None:
                self.notify(note)
        return self._observations(), infos

    def step_async(self, actions: Any) -> None:
        """Let the workers begin a step, see `MazeVectorEnv`.

        Raises:
            WorkerError: If this vector environment is closed.
        """
        super().step_async(actions)
        if self._repair is not None:
            self._repair.remember()
        self._call("step")

    def _finish_step(self) -> StepBatch[Array]:
        report, buffers, journal = self._gather("step"), self._buffers, self._journal
        if journal is not None:
            journal.record()
        batch = StepBatch(self._observations(), buffers.rewards.copy(), buffers.end.copy())
        if report is not None:
            self._add_report(batch, report)
        return batch

    def _add_report(self, batch: StepBatch[Array], report: StepReport) -> None:
        """Add the ends of episodes and the infos of a step."""
        if self._journal is not None:
            self._journal.ended([end.env for end in report.ends], report.continuing)
            self._journal.ended(report.lost)
        batch.ends, batch.infos, batch.has_gaps = report.ends, report.infos, bool(report.lost)
        if report.ends:
            final_obs = self._buffers.final_obs
            batch.final_obs = final_obs[""] if self._is_single else final_obs

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments and end; kill those that take too long."""
        self._closing.close()

    # -- the state of running episodes -----------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of every environment, see `MazeVectorEnv.state_dict`.

        Returns:
            `root_seed` and, in `envs`, one dict per environment: the fields of
            `maze_train.envs.journal.EpisodeRecord`. No seed and no dicts before the first reset.
            The first actions of long episodes are in `pieces`, as parts that do not change.

        Raises:
            EnvError: If the state is not known because the last call failed, or holds something
                else than plain values, or a step is on its way.
        """
        journal = self._checked_journal("state_dict()")
        if self.root_seed is None:
            return {"root_seed": None, "envs": []}
        if self.offers_own_state:
            for i, own in enumerate(self.own_states()):
                if own is not None:
                    journal.rebase(i, own)
        state = journal.state(self._buffers.obs, self._buffers.rewards)
        if journal.nbytes > MUCH_NBYTES and self.notify is not None:
            self.notify(LONG_EPISODES)
        return {"root_seed": self.root_seed, **state}

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[ArrayTree, npt.NDArray[np.bool_]]:
        """Put every environment where it was, see `MazeVectorEnv.load_state_dict`."""
        journal = self._checked_journal("load_state_dict()")
        root, records, pieces = journal.read_state(state, self._buffers.obs)
        began: npt.NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.root_seed = None
        if root is None:
            return self._observations(), began
        journal.invalidate()
        own = [records[part.start : part.stop] for part in self._slices]
        found = self._call_each("restore", [(root, each, allow_new_episodes) for each in own])
        problems: list[tuple[int, Difference]] = [*chain(*found)]
        self.differences = [problem for _, problem in problems]
        self.is_exact = not problems
        refused = [problem for problem in self.differences if not problem.is_rounding]
        if refused and not allow_new_episodes:
            raise EnvError(f"{refused[0].text}: {DOES_NOT_REPEAT}. {NEW_EPISODES}")
        for text in [problem.text for problem in self.differences if problem.is_rounding][:1]:
            warn(
                f"{text}, which is within rounding: the run resumes, but its results may differ "
                "from those of an uninterrupted run (exact: false in summary.json)"
            )
        self.root_seed = root
        journal.load(records, pieces)
        began[[i for i, problem in problems if not problem.is_rounding]] = True
        journal.ended(began.nonzero()[0].tolist())
        return self._observations(), began

    def _checked_journal(self, call: str) -> Journal:
        """The journal, if the state of the environments may be asked for now."""
        if self.closed:
            raise EnvError(f"{call} was called after close()")
        self._check_not_stepping(call)
        if self._journal is None:
            raise EnvError("the actions of these environments are not kept: can_be_restored=False")
        return self._journal

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the states that the environments give of themselves, see `MazeVectorEnv`."""
        states: list[dict[str, Any] | None] = []
        problem = None
        self._call("own_states")
        try:
            for index, part in enumerate(self._slices):
                given: Any = [None] * len(part)
                # The next step finds a worker that died. Until then the journal knows as much.
                with suppress(WorkerFailedError):
                    given = self._pool.receive(index)
                problem = problem or (given if isinstance(given, str) else None)
                states += given
        except BaseException:
            self._give_up()
            raise
        if problem is not None:
            raise EnvError(problem)
        return states

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the states that the environments gave of themselves, see `MazeVectorEnv`."""
        if len(states) != self.num_envs:
            raise EnvError(f"there are {len(states)} states of {self.num_envs} environments")
        self._call_each("load_own_states", [(states[x.start : x.stop],) for x in self._slices])

    # -- calls of the workers --------------------------------------------------------------------

    def _call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every worker with its own arguments; returns the results."""
        try:
            for index, own in enumerate(arguments):
                self._pool.call(index, method, *own)
            return self._pool.receive_all()
        except BaseException:
            self._give_up()
            raise

    def _call(self, method: str, *args: Any) -> None:
        """Start a call in all workers."""
        try:
            for index in self._indices:
                self._pool.call(index, method, *args)
        except BaseException:
            self._give_up()
            raise

    def _gather(self, method: str, *args: Any) -> StepReport | None:
        """Join what workers report of a call; those that failed are repaired and called again."""
        reports: list[StepReport | None] = []
        failures: list[WorkerFailedError] = []
        try:
            # Waiting for one after the other wakes this process less often than waiting for all.
            for index in self._indices:
                try:
                    reports.append(self._pool.receive(index))
                except WorkerFailedError as error:
                    # Without its frames, which would keep this object alive.
                    failures.append(error.with_traceback(None))
            for failure in failures:
                assert self._repair is not None
                root = self.root_seed or 0
                reports.insert(failure.index, self._repair.repeat(failure, root, method, *args))
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
        """Forget where the environments are; close unless all workers wait for the next call.

        After Ctrl+C, results that were not received would be taken for later ones.
        """
        if self._journal is not None:
            self._journal.invalidate()
        if not len(self._pool) or any(map(self._pool.pending, self._indices)):
            self.close()


SequentialVectorEnv = PooledVectorEnv
"""Steps in this process where no place is given."""
