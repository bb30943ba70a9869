"""Distributed actors: collect rollouts in this process or in workers.

Rollouts are collected in one of two modes:

- ordered (always used in this process): when the learner requests rollouts, the next actors collect
  one rollout each, with the last published weights. Results are reproducible.
- unordered: actors collect in parallel with the learner. Each actor fills its memory slots one
  after the other, and pauses when all slots contain rollouts that the learner has not received.
  Processes do not share locks.

Exceptions of environments in this process propagate. If a remote actor raises, dies or hangs,
training ends with a `WorkerError`, or its worker is restarted within the limit of the backend and
the steps of the running rollout are dropped and counted. With `ActorPolicy.returns_states`,
restarted actors continue from their state after the last rollout, so results do not change. Actors
without states, and actors that fail twice in a row, begin new episodes with new seeds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space
from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector, SingleModule, Turns, turns_of
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.collect.simulators import collector_class
from maze_train.core.errors import ConfigError, TrainingError
from maze_train.core.notices import warn
from maze_train.core.seeding import Seeds
from maze_train.core.step_end import StepBatch
from maze_train.core.types import Array, Buffer, Tensor
from maze_train.data.rollout import (
    Rollout,
    RolloutStorage,
    join_rollouts,
    rollout_columns,
    slot_nbytes,
    slots_in,
)
from maze_train.envs.building import close_all
from maze_train.envs.calls import CALL_ENVS, EnvCall
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.modules import DEFAULT_MODULE, torch_threads
from maze_train.nets.acting import ActingModel, acting
from maze_train.nets.joint import JointModel
from maze_train.spaces.columns import Columns
from maze_train.spaces.describe import flat_space
from maze_train.workers.backends import Pickled, ThisProcess, WorkerBackend
from maze_train.workers.pool import (
    Memory,
    Worker,
    WorkerContext,
    WorkerFailedError,
    WorkerSpecs,
    check_spaces,
    shares,
    worker_names,
)

HEADER_NBYTES = 64
CURRENT, STAMPS = 0, 1
"""Header positions: index of the newest buffer, and the first of the two buffer stamps.

A stamp is odd during a write to the buffer.
"""

SEQ_NO = "<weights_seq_no>"
"""Key of the update count in a buffer of weights; differs from all parameter names."""


def weights_nbytes(model: nn.Module) -> int:
    """Return the memory in bytes required by `WeightsWriter` and `WeightsReader`."""
    return HEADER_NBYTES + 2 * _columns(model).nbytes


def acting_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers needed for acting, by name.

    Submodules listed in `learner_only` of the model or of a submodule are excluded.
    """
    left_out = tuple(
        f"{path}.{name}.".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, ActingModel)
        for name in module.learner_only
    )
    state = model.state_dict(keep_vars=True)
    return {
        key: value
        for key, value in state.items()
        if not f"{key}.".startswith(left_out) and isinstance(value, torch.Tensor)
    }


def _columns(model: nn.Module) -> Columns:
    """Return the columns of a buffer."""
    state = {key: value.detach().cpu().numpy() for key, value in acting_state(model).items()}
    return Columns.like({SEQ_NO: np.zeros(1, np.int64), **state})


def _tensors(columns: Columns, memory: Buffer) -> dict[str, Tensor]:
    """Return the tensors of a buffer."""
    return {key: torch.from_numpy(x) for key, x in columns.arrays(memory).items()}


class _SharedWeights:
    """Double buffer of weights with a header, in shared memory.

    The writer fills the older buffer, then marks it as the newest. If the stamp of a buffer changed
    during a read, the reader reads again. There are no locks, so a killed process cannot block
    other processes.
    """

    def __init__(self, nbytes: int, memory: Buffer) -> None:
        self.header: Array = np.ndarray(HEADER_NBYTES // 8, np.int64, buffer=memory)
        self.buffers = [
            torch.from_numpy(np.ndarray(nbytes, np.uint8, memory, HEADER_NBYTES + i * nbytes))
            for i in range(2)
        ]
        self._fence = threading.Lock()

    def fence(self) -> None:
        """Order memory accesses: all accesses before the fence precede all accesses after it.

        A processor may reorder memory accesses, but not across the release and acquisition of a
        lock.
        """
        for _ in range(2):
            with self._fence:
                pass


class WeightsWriter(_SharedWeights):
    """Publishes the weights of the learner's model.

    Args:
        model: The model.
        memory: Writable memory, `weights_nbytes(model)` bytes.
    """

    def __init__(self, model: nn.Module, memory: Buffer) -> None:
        self._model = model
        columns = _columns(model)
        super().__init__(columns.nbytes, memory)
        self._views = [_tensors(columns, buffer.numpy()) for buffer in self.buffers]

    @torch.no_grad()
    def publish(self, weights_seq_no: int) -> None:
        """Publish the current weights."""
        # The tensors are collected in each call, because a module may replace its buffers.
        state = {SEQ_NO: torch.tensor([weights_seq_no]), **acting_state(self._model)}
        for key, view in self._views[0].items():
            if state[key].shape != view.shape:
                raise TrainingError(
                    f"{key} of the model has the shape {list(state[key].shape)}, had "
                    f"{list(view.shape)} at the start: the shapes of acting weights must not change"
                )

        def write(target: int) -> None:
            for key, view in self._views[target].items():
                view.copy_(state[key])

        self._write(write)

    def _write(self, write: Callable[[int], object]) -> None:
        """Call `write` to fill the older buffer, then mark this buffer as the newest."""
        header = self.header
        target = 1 - int(header[CURRENT])
        header[STAMPS + target] += 1
        self.fence()
        write(target)
        self.fence()
        header[STAMPS + target] += 1
        self.fence()
        header[CURRENT] = target

    def newest(self) -> list[Array]:
        """Return the newest weights and the header."""
        return [self.buffers[int(self.header[CURRENT])].numpy(), self.header]

    def state_dict(self) -> dict[str, Any]:
        """Return the published weights, which may be older than the weights of the model."""
        current = int(self.header[CURRENT])
        return {"published": self.buffers[current].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Publish the weights of `state`."""
        self._write(lambda target: self.buffers[target].copy_(state["published"]))


class WeightsReader(_SharedWeights):
    """Loads the newest weights into the model of an actor.

    The parameters of the model become views of one array, so loading is a single copy.

    Args:
        model: A model of the same architecture, on the CPU.
        memory: Memory of the writer.
    """

    def __init__(self, model: nn.Module, memory: Buffer) -> None:
        self._model = model
        columns = _columns(model)
        super().__init__(columns.nbytes, memory)
        self._private = torch.zeros(columns.nbytes, dtype=torch.uint8)
        self._seen = (-1, -1)
        self.weights_seq_no = -1
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = _tensors(columns, self._private.numpy())
        self._loaded_seq_no = self._buffers.pop(SEQ_NO)
        for key in [key for key in self._buffers if key in parameters]:
            parameters[key].data = self._buffers.pop(key)

    def load(self) -> int:
        """Load the newest weights; return the number of updates of these weights."""
        for seen in self._newest():
            if seen == self._seen:
                return self.weights_seq_no
            self._private.copy_(self.buffers[seen[0]])
            if self._is_whole(seen):
                self._seen = seen
                break
        self.weights_seq_no = int(self._loaded_seq_no)
        if self._buffers:
            # Modules may cache values derived from buffers, so buffers are not written in place.
            self._model.load_state_dict(self._buffers, strict=False)
        return self.weights_seq_no

    def _newest(self) -> Iterator[tuple[int, int]]:
        """Yield the index and stamp of the newest buffer, repeatedly."""
        while True:
            current = int(self.header[CURRENT])
            self.fence()
            seen = (current, int(self.header[STAMPS + current]))
            self.fence()
            # If the index changed, the stamp may belong to unpublished weights.
            if int(self.header[CURRENT]) == current:
                yield seen

    def _is_whole(self, seen: tuple[int, int]) -> bool:
        """Whether the buffer was unchanged during the read."""
        self.fence()
        current, stamp = seen
        return stamp % 2 == 0 and int(self.header[STAMPS + current]) == stamp


MakeActorEnv: TypeAlias = Callable[..., MazeVectorEnv]
"""Builds the environments of an actor: `make(first_env, can_be_restored=...)`.

`first_env` is the index of the first environment in messages; `can_be_restored` is true if the
state of the environments will be requested. The environments are not reset yet.
"""


@dataclass(frozen=True)
class ActorPolicy:
    """Settings of the policy of all actors.

    Attributes:
        make_model: Builds the policy.
        num_steps: Number of steps T of each environment per rollout.
        allow_new_episodes: See `RolloutCollector`.
        info_keys: See `RolloutCollector`.
        records_log_probs: See `RolloutCollector`.
        keeps_terminal_obs: See `RolloutCollector`.
        returns_states: Whether rollouts include the state of the actor after the last step.
    """

    make_model: Pickled[Callable[[], nn.Module]]
    num_steps: int
    allow_new_episodes: bool
    info_keys: Sequence[str] = ()
    records_log_probs: bool = True
    keeps_terminal_obs: bool = False
    returns_states: bool = False

    def columns(self, model: nn.Module, observation_space: Space[Any], num_envs: int) -> Columns:
        """Return the columns of the rollouts of an actor.

        Args:
            model: The policy.
            observation_space: Observation space of one environment.
            num_envs: Number of environments per actor.
        """
        own = acting(model)
        log_probs = (len(own.agents),) if isinstance(own, JointModel) else ()
        return rollout_columns(
            flat_space(observation_space),
            own.example_actions(),
            self.num_steps,
            num_envs,
            state_size=own.state_size,
            log_probs=log_probs if self.records_log_probs else None,
        )


@dataclass(frozen=True)
class CollectedRollout:
    """Description of a collected rollout.

    Attributes:
        actor: Index of the actor.
        slot: Index of the memory slot of the rollout.
        weights_seq_no: Number of updates of the acting weights.
        num_final_obs: Number of final observations in the slot.
        has_gaps: Whether some rows are not transitions.
        episodes: Episodes that ended.
        finished: Wall-clock time at the end of the rollout, on the actor's machine, in seconds.
        env_s: Time in seconds spent in the environments.
        seconds: Total time in seconds.
        state: State of the actor after the rollout, see `ActorPolicy.returns_states`.
    """

    actor: int
    slot: int
    weights_seq_no: int
    num_final_obs: int
    has_gaps: bool
    episodes: FinishedEpisodes
    finished: float
    env_s: float
    seconds: float
    state: dict[str, Any] | None = None


class ActorWorker(Worker):
    """Worker that runs one or more actors.

    Args:
        make_env: Builds the environments of one actor.
        num_envs: Number of environments per actor.
        actors: Indices of the actors of this worker.
        can_be_restored: Whether states will be requested; None means True only for a local worker.
        context: Context of the worker.
    """

    def __init__(
        self,
        make_env: Pickled[MakeActorEnv],
        num_envs: int,
        actors: Sequence[int],
        can_be_restored: bool | None,
        context: WorkerContext,
    ) -> None:
        is_kept = not context.is_remote if can_be_restored is None else can_be_restored
        self._envs: dict[int, MazeVectorEnv] = {}
        self._collectors: dict[int, RolloutCollector] = {}
        self._context = context
        self._written: list[Array] = []
        try:
            for actor in actors:
                self._envs[actor] = make_env.value(actor * num_envs, can_be_restored=is_kept)
        except BaseException:
            self.close()
            raise

    def describe(self) -> tuple[Any, Any]:
        """Return the observation and action space of one environment.

        Raises:
            SpaceError: If the spaces of the environments differ.
        """
        env, *others = self._envs.values()
        found = spaces_of(env)
        for other in others:
            check_spaces(other.first_env, spaces_of(other), found, env.first_env)
        return found

    def set_policy(
        self,
        policy: ActorPolicy,
        spaces: tuple[Any, Any],
        seeds: Sequence[tuple[int, int]],
        states: Sequence[dict[str, Any] | None],
        weights: Memory,
        slots: Memory,
    ) -> list[tuple[Array, bool] | None]:
        """Set the policy. Each rollout loads the newest published weights.

        Args:
            policy: The policy.
            spaces: Observation and action space of the policy; must equal the result of `describe`.
            seeds: Seeds of the episodes and of the actions of each actor.
            states: State to restore for each actor, from `state_dict`; if None, new episodes begin.
            weights: Memory of the `WeightsWriter`.
            slots: Memory for rollouts, with the same number of slots per actor.

        Returns:
            For each restored actor, a mask `[E]` of environments that began new episodes, and
            whether all other environments were restored exactly; None for actors without a state.

        Raises:
            SpaceError: If the spaces of the environments differ.
        """
        first = next(iter(self._envs.values()))
        check_spaces(first.first_env, self.describe(), spaces)
        self._context.seed_generators(seeds[0][0])
        self._policy = policy
        self._model = policy.make_model.value()
        self._weights = WeightsReader(self._model, weights.buffer)
        columns = policy.columns(self._model, first.env_observation_space, first.num_envs)
        found = slots_in(slots, columns)
        count = len(found) // len(self._envs)
        self._slots = {
            actor: found[i * count : (i + 1) * count] for i, actor in enumerate(self._envs)
        }
        continued: list[tuple[Array, bool] | None] = []
        for actor, (env_seed, action_seed), state in zip(self._envs, seeds, states, strict=True):
            env = self._envs[actor]
            collector = collector_class(env)(
                env,
                policy.num_steps,
                env_seed=env_seed,
                action_seed=action_seed,
                allow_new_episodes=policy.allow_new_episodes,
                records_log_probs=policy.records_log_probs,
                info_keys=policy.info_keys,
                on_step=partial(self._count_step, env.num_envs),
            )
            collector.keeps_terminal_obs = policy.keeps_terminal_obs
            self._collectors[actor] = collector
            lost = None if state is None else collector.load_state_dict(state)
            continued.append(None if lost is None else (lost, collector.is_exact))
            self._context.count()  # Report progress, because restoring environments can take long.
        return continued

    def _count_step(self, num_envs: int, batch: StepBatch[Any]) -> None:
        self._context.count(num_envs)

    def collect(self, actor: int, slot: int, calls: Sequence[EnvCall]) -> CollectedRollout:
        """Collect a rollout of an actor with the newest weights into a slot.

        Args:
            actor: Index of the actor.
            slot: Index of the slot within the actor's memory.
            calls: All calls of the environments so far.
        """
        began = time.perf_counter()
        seq_no, collector = self._weights.load(), self._collectors[actor]
        into, collector.calls = self._slots[actor][slot], calls
        rollout, episodes = collector.collect_steps(self._model, into=into)
        self._written = into.fill(rollout)
        return CollectedRollout(
            actor,
            slot,
            seq_no,
            into.num_final_obs,
            into.has_gaps,
            episodes,
            time.time(),
            collector.env_s,
            time.perf_counter() - began,
            collector.state_dict() if self._policy.returns_states else None,
        )

    def make_calls(self, actor: int, calls: Sequence[EnvCall]) -> None:
        """Make the new calls in the environments of an actor."""
        self._envs[actor].make_calls(calls)

    def written(self) -> list[Array]:
        """Return and clear the list of arrays written by the last rollout."""
        written, self._written = self._written, []
        return written

    def state_dict(self, actor: int) -> dict[str, Any]:
        """Return the state of an actor's environments and random number generators."""
        return self._collectors[actor].state_dict()

    def close(self) -> None:
        """Close the environments."""
        close_all(self._envs.values())


def spaces_of(env: MazeVectorEnv) -> tuple[Any, Any]:
    """Return the observation and action space of one environment, before flattening."""
    return env.env_observation_space, env.single_action_space


SeedOf: TypeAlias = "Callable[[int, int], tuple[int, int]]"
"""Maps an actor and its generation to the seeds of its episodes and actions."""

CALLS = {
    "collect": "a step of a rollout",
    "make_calls": f"calls of {CALL_ENVS}",
    "set_policy": "building its policy or restoring its environments",
    "state_dict": "reporting its state",
}
"""Description of each method, for messages."""

POLL_S = 0.1
"""Maximum time in seconds that the learner waits between checks for finished rollouts."""


@dataclass
class StepCounts:
    """Step counts of all actors: made = trained + queued + in progress + dropped.

    Steps are dropped if an actor fails, their episode is dropped, or they are in flight when a run
    stops.
    """

    made: int = 0
    trained: int = 0
    dropped: int = 0

    @property
    def in_flight(self) -> int:
        """Number of steps in queued and unfinished rollouts."""
        return self.made - self.trained - self.dropped


@dataclass(frozen=True)
class GatheredRollouts:
    """Rollouts of actors for one update.

    Attributes:
        rollouts: Rollouts concatenated along the batch, with their `weights_seq_no`, by module id.
        episodes: Episodes that ended in these rollouts.
        lost: Mask `[A * E]` of environments whose episodes were lost in worker failures since the
            last call.
        queue_before: Number of queued rollouts before the call.
        queue_after: Number of queued rollouts after the call.
        waited_s: Time in seconds that the learner waited.
        env_s: Time in seconds spent in environments, in the slowest worker.
    """

    rollouts: dict[str, Rollout]
    episodes: FinishedEpisodes
    lost: Array
    queue_before: int
    queue_after: int
    waited_s: float
    env_s: float


class DistributedActors:
    """Actors of one learner, distributed over local or remote workers.

    An actor consists of a copy of the policy and a set of environments. The rollouts of an actor do
    not depend on the assignment of actors to workers.

    Args:
        make_env: Builds the environments of one actor; called in the worker.
        num_actors: Number of actors.
        num_envs: Number of environments per actor.
        backend: Backend of the workers; None selects this process.
        num_workers: Number of workers; 0 selects one per actor.
        can_be_restored: Whether states will be requested; None means True only if actors run in
            this process.
        calls: See `RolloutCollector`.

    Attributes:
        pool: The workers.
        slices: Indices of the actors of each worker.
        spaces: Observation and action space of one environment, before flattening.
        env_observation_space: The observation space.
        single_action_space: The action space.
        writer: Publishes the weights. Available after `begin`, like the following attributes.
        has_weights: Whether weights have been published.
        generations: Number of times each actor was restarted with new seeds.
        states: State to restore for each actor when its worker is set up; if None, new episodes
            begin.
        counts: Step counts.
        is_exact: Whether all environments continued exactly from the restored state.

    Raises:
        SpaceError: If the spaces of the environments differ.
        WorkerError: If an environment cannot be built, or a worker dies or hangs.
    """

    writer: WeightsWriter
    generations: list[int]
    states: list[Any]

    def __init__(
        self,
        make_env: MakeActorEnv,
        num_actors: int,
        num_envs: int,
        backend: WorkerBackend | None = None,
        *,
        num_workers: int = 0,
        can_be_restored: bool | None = None,
        calls: Sequence[EnvCall] = (),
    ) -> None:
        self._calls = calls
        self.num_actors, self.num_envs = num_actors, num_envs
        self.counts = StepCounts()
        self.has_weights, self.is_exact = False, True
        self.slices = shares(num_actors, num_workers or num_actors)
        self._workers = [worker for worker, part in enumerate(self.slices) for _ in part]
        self._weights_lock, self._have_changed = threading.Lock(), False
        self._memories: list[Any] = []
        self._queue: deque[CollectedRollout] = deque()
        self._made_before = 0  # Steps of the run before this object was created.
        make = partial(ActorWorker, Pickled(make_env, "env"), num_envs)
        makers = [partial(make, part, can_be_restored) for part in self.slices]
        envs = [range(part.start * num_envs, part.stop * num_envs) for part in self.slices]
        names = worker_names("worker" if num_workers else "actor", envs)
        self.pool = (backend or ThisProcess()).pool(WorkerSpecs(makers, names, CALLS))
        found = self.pool.call_new("describe")
        self.spaces: tuple[Any, Any] = found[0]
        self.env_observation_space, self.single_action_space = self.spaces
        try:
            for part, spaces in zip(self.slices, found, strict=True):
                check_spaces(part.start * num_envs, spaces, self.spaces)
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        model: nn.Module,
        policy: ActorPolicy,
        seed_of: SeedOf,
        *,
        queue_size: int = 0,
        ordered: bool = False,
        splits_turns: bool = False,
    ) -> None:
        """Allocate memory for the weights and the rollouts of a policy.

        Args:
            model: The model that the learner updates.
            policy: The policy of the actors, of the same architecture.
            seed_of: Returns the seeds of an actor.
            queue_size: Maximum number of queued rollouts, rounded up to a multiple of the number of
                actors. Each actor may have one additional rollout in progress.
            ordered: Whether rollouts are collected only when the learner requests them.
            splits_turns: Whether multi-agent rollouts are split by policy.
        """
        self._policy, self._seed_of = policy, seed_of
        self._is_ordered = ordered or bool(self.pool.workers)
        self.num_slots = 1 + -(-queue_size // self.num_actors)
        self.generations = [0] * self.num_actors
        self.states = [None] * self.num_actors
        self._make_turns: Callable[[], Turns] = SingleModule
        if splits_turns and isinstance(model, JointModel):
            self._make_turns = partial(turns_of, model, as_steps=True)
        self._turns = [self._make_turns() for _ in range(self.num_actors)]
        self._turn, self._has_begun, self._is_collecting = 0, False, False
        self._lost: Array = np.zeros((self.num_actors, self.num_envs), np.bool_)
        self._restarts = 0
        # Pending calls of each worker, excluding `set_policy`.
        self._open: list[deque[tuple[str, int, int]]] = [deque() for _ in self.slices]
        self._is_set_up = [False] * len(self.slices)
        self._failures = [0] * len(self.slices)  # Number of consecutive failures.
        # Steps of each worker in received or dropped rollouts.
        self._settled = [self.pool.steps(worker) for worker in range(len(self.slices))]
        self._make_memories(model)

    def _make_memories(self, model: nn.Module) -> None:
        self._close_memories()
        weights = self.pool.allocate(weights_nbytes(model))
        self.writer = WeightsWriter(model, weights.buffer)
        self._memories = [weights]
        columns = self._policy.columns(model, self.env_observation_space, self.num_envs)
        self._slots: list[RolloutStorage] = []
        for part in self.slices:
            nbytes = len(part) * self.num_slots * slot_nbytes(columns)
            self._memories.append(self.pool.allocate(nbytes))
            self._slots += slots_in(self._memories[-1], columns)

    def publish(self, weights_seq_no: int) -> None:
        """Publish the current weights of the learner; the next `gather` sends them to the actors.

        May be called in the thread of a learner queue; only the thread that calls `gather` sends.

        Args:
            weights_seq_no: Number of updates of the weights.
        """
        with self._weights_lock:
            self.writer.publish(weights_seq_no)
            self._have_changed = self.has_weights = True

    def _send_weights(self) -> None:
        """Send the latest published weights. Called in the thread that calls the actors."""
        if self._have_changed:
            with self._weights_lock:
                self._have_changed = False
                self.pool.publish(self._memories[0], self.writer.newest())

    def gather(
        self,
        count: int,
        idle: Callable[[], None] | None = None,
        overlap: Callable[[], object] | None = None,
    ) -> GatheredRollouts:
        """Return the next rollouts, in actor order or in the order in which they finished.

        Args:
            count: Number of rollouts.
            idle: In unordered mode, function to call repeatedly while the learner waits. If the
                function raises, no rollout is lost.
            overlap: In ordered mode, function to call once during collection, with gradients
                enabled.

        Returns:
            The rollouts, in memory that later calls do not overwrite.

        Raises:
            ConfigError: If `count` exceeds the number of slots.
            WorkerError: If an actor fails and is not restarted, or the actors are closed.
        """
        if count > self.num_actors * self.num_slots:
            raise ConfigError(
                "queue_size",
                f"expected at least {count - self.num_actors}, to receive {count} rollouts at once",
                self.num_slots * self.num_actors - self.num_actors,
            )
        self._send_weights()
        self._begin_to_act()
        if not self._is_ordered:
            self._look(0.0)
        before, started = len(self._queue), time.perf_counter()
        if self._is_ordered:
            taken = self._collect_in_turn(count, overlap)
        else:
            while len(self._queue) < count:
                self._look(POLL_S)
                if idle is not None:
                    idle()
            taken = [self._queue.popleft() for _ in range(count)]
        waited_s = time.perf_counter() - started
        parts = [self._split(collected) for collected in taken]
        rollouts = {key: join_rollouts([part[key] for part in parts]) for key in parts[0]}
        lost = self.take_lost()
        episodes = FinishedEpisodes(worker_restarts=self._restarts, lost=int(lost.sum()))
        env_s = [0.0] * len(self.slices)
        for collected in taken:
            episodes.extend(collected.episodes)
            env_s[self._workers[collected.actor]] += collected.env_s
            self.counts.trained += collected.episodes.steps
            # Rows of lost episodes are not used for learning.
            self.counts.dropped += self._num_rows - collected.episodes.steps
            if not self._is_ordered:
                self._call("collect", collected.actor, collected.slot)
        self._restarts = 0
        self._count_made()
        return GatheredRollouts(
            rollouts, episodes, lost, before, len(self._queue), waited_s, max(env_s)
        )

    @property
    def total_counts(self) -> StepCounts:
        """Step counts of the actors of all processes."""
        return self.counts

    def take_lost(self) -> Array:
        """Return the mask `[A * E]` of episodes lost since the last call, and clear it."""
        lost = self._lost.flatten()
        self._lost[:] = False
        return lost

    @property
    def _num_rows(self) -> int:
        return self.num_envs * self._policy.num_steps

    def _split(self, collected: CollectedRollout) -> dict[str, Rollout]:
        """Return the rollouts of an actor by module id, as views of the slot or split by policy."""
        slot = self._slots[collected.actor * self.num_slots + collected.slot]
        rollout = slot.view(collected.num_final_obs, collected.has_gaps)
        found = self._turns[collected.actor].split(rollout)
        return {key: _with_seq_no(part, collected.weights_seq_no) for key, part in found.items()}

    def _collect_in_turn(
        self, count: int, overlap: Callable[[], object] | None
    ) -> list[CollectedRollout]:
        """Collect one rollout from each of the next `count` actors."""
        taken = []
        try:
            turns = range(self._turn, self._turn + count)
            for i, turn in enumerate(turns):
                self._call("collect", turn % self.num_actors, i // self.num_actors)
            if overlap is not None:
                with torch.enable_grad():
                    overlap()
            with torch_threads(1):  # Remote workers use one thread as well.
                for turn in turns:
                    taken.append(self._received(self._workers[turn % self.num_actors]))
        except BaseException:
            # Otherwise pending results would be mistaken for results of later calls.
            self.close()
            raise
        self._turn = turns.stop % self.num_actors
        return taken

    def _look(self, timeout_s: float) -> None:
        """Receive the rollouts that actors have finished."""
        self._send_weights()
        # An actor may have finished several rollouts since the last check.
        while ready := self.pool.ready(timeout_s):
            timeout_s = 0.0
            for worker in ready:
                if isinstance(collected := self._receive(worker), CollectedRollout):
                    self._queue.append(collected)
        self._queue = deque(sorted(self._queue, key=lambda queued: queued.finished))

    def make_calls(self) -> None:
        """Make new calls in all environments, after the rollouts in progress; see `EnvCalls`."""
        self._set_up_all()
        try:
            for actor in range(self.num_actors):
                self._call("make_calls", actor)
            while any(call[0] == "make_calls" for open_ in self._open for call in open_):
                self._look(POLL_S)
        except BaseException:
            self.close()
            raise

    def _begin_to_act(self) -> None:
        """Set up all workers once; in unordered mode, also start collecting."""
        self._set_up_all()
        if not (self._is_ordered or self._is_collecting):
            self._is_collecting = True
            for actor in range(self.num_actors):
                for slot in range(self.num_slots):
                    self._call("collect", actor, slot)

    def _set_up_all(self) -> None:
        """Send the policy to all workers once."""
        if not self._has_begun:
            self._has_begun = True
            for worker in range(len(self.slices)):
                self._set_up(worker)

    def _set_up(self, worker: int, **changes: Any) -> None:
        """Send the policy, with `changes` applied, and the states of its actors to a worker."""
        weights, *slots = self._memories
        part = self.slices[worker]
        states = self.states[part.start : part.stop]
        seeds = [self._seed_of(actor, self.generations[actor]) for actor in part]
        policy = replace(self._policy, **changes)
        self._is_set_up[worker] = False
        self.pool.call(
            worker, "set_policy", policy, self.spaces, seeds, states, weights, slots[worker]
        )

    def _call(self, method: str, actor: int, slot: int = 0) -> None:
        """Start a call of an actor. The call is repeated if the worker fails."""
        worker = self._workers[actor]
        self._open[worker].append((method, actor, slot))
        self._call_worker(worker, method, actor, slot)

    def _call_worker(self, worker: int, method: str, actor: int, slot: int) -> None:
        calls = tuple(self._calls)
        arguments = {"collect": (slot, calls), "make_calls": (calls,)}
        self.pool.call(worker, method, actor, *arguments.get(method, ()))

    def _receive(self, worker: int) -> object:
        """Receive the next result of a worker; return None for a setup or a restart."""
        try:
            result = self.pool.receive(worker)
        except WorkerFailedError as failure:
            self._repair(failure.with_traceback(None))
            return None
        if not self._is_set_up[worker]:
            self._is_set_up[worker] = True
            for actor, found in zip(self.slices[worker], result, strict=True):
                if found is not None:
                    self._note_continued(actor, *found)
            return None
        self._failures[worker] = 0
        self._open[worker].popleft()
        if isinstance(result, CollectedRollout):
            self.states[result.actor] = result.state
            self._settled[worker] += self._num_rows
        return result

    def _received(self, worker: int) -> Any:
        """Wait for the result of the oldest call of a worker."""
        while (found := self._receive(worker)) is None:
            pass
        return found

    def _note_continued(self, actor: int, lost: Array, is_exact: bool) -> None:
        """Record which environments `[E]` of a restored actor began new episodes."""
        self._lost[actor] |= lost
        self.is_exact = self.is_exact and is_exact
        self._turns[actor].load_state_dict(self.states[actor]["turns"], torch.from_numpy(lost))

    def _repair(self, failure: WorkerFailedError) -> None:
        """Restart a worker and repeat its calls, or end training.

        Raises:
            MazeTrainError: If the worker cannot be restarted.
        """
        worker = failure.index
        part, calls = self.slices[worker], self._open[worker]
        try:
            if failure.raised and not calls:  # The environment cannot be restored.
                raise failure.as_error() from None
            self.pool.stop(worker)
            # The step count is final only after the worker has stopped.
            dropped = self.pool.steps(worker) - self._settled[worker]
            self._settled[worker] += dropped
            self.counts.dropped += dropped
            self._failures[worker] += 1
            if failure.raised and self._failures[worker] > 1 and calls:
                failure.final = failure.final or calls[0][0] == "make_calls"
            over: Sequence[int] = () if self._policy.returns_states else part
            if self._failures[worker] > 1 and calls and not over:
                over = (calls[0][1],)
            outlook = "are restored to their state after the last rollout"
            if over:
                first, stop = over[0] * self.num_envs, (over[-1] + 1) * self.num_envs
                outlook = f"{first} to {stop - 1} begin new episodes"
            description = f"{failure.text}; {dropped} steps of its rollout are dropped"
            self.pool.restart(failure, description, f"and its environments {outlook}")
        except BaseException:
            self.close()
            raise
        for actor in over:
            self._start_over(actor)
        self._restarts += 1
        self._set_up(worker, allow_new_episodes=True)
        for call in calls:
            self._call_worker(worker, *call)

    def _start_over(self, actor: int) -> None:
        """Let an actor begin new episodes with new seeds at the next setup."""
        self.generations[actor] += 1
        self.states[actor] = None
        self._lost[actor] = True
        self._turns[actor] = self._make_turns()

    def _count_made(self) -> None:
        self.counts.made = self._made_before + sum(map(self.pool.steps, range(len(self.slices))))

    def _close_memories(self) -> None:
        for memory in self._memories:
            memory.close()

    def close(self) -> None:
        """Stop the actors. Steps in flight count as dropped. Closing again has no effect."""
        try:
            self.pool.close()
        finally:
            self._close_memories()
            self._count_made()
            self.counts.dropped += self.counts.in_flight
            self._queue.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, published weights and generations; in ordered mode, also actor states.

        In unordered mode, environments and rollouts in flight are not saved.
        """
        actors = None
        if self._is_ordered:
            self._begin_to_act()
            try:
                for actor in range(self.num_actors):
                    self._call("state_dict", actor)
                found = [self._received(worker) for worker in self._workers]
            except BaseException:
                self.close()
                raise
            turns = [turns.state_dict() for turns in self._turns]
            actors = [{**state, "turns": own} for state, own in zip(found, turns, strict=True)]
        self._count_made()
        return {
            "generations": list(self.generations),
            "actors": actors,
            "counts": asdict(self.counts),
            "weights": self.writer.state_dict() if self.has_weights else None,
            "turn": self._turn,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`, before the first rollout.

        Environments are restored if the state was saved in ordered mode and this object is in
        ordered mode. Otherwise environments begin new episodes.
        """
        self.counts = StepCounts(**state["counts"])
        self._made_before = self.counts.made - sum(self._settled)
        if state["weights"] is not None:
            with self._weights_lock:
                self.writer.load_state_dict(state["weights"])
                self._have_changed = self.has_weights = True
        self.generations = list(state["generations"])
        if not self._is_ordered or state["actors"] is None:
            self._begin_anew()
            return
        self.states, self._turn = list(state["actors"]), state["turn"]
        self._has_begun = False
        self._begin_to_act()
        for worker in range(len(self.slices)):
            while not self._is_set_up[worker]:
                self._receive(worker)

    def _begin_anew(self) -> None:
        """Begin new episodes in all environments; rollouts in flight are dropped."""
        dropped = self.counts.in_flight
        self.counts.dropped += dropped
        self.is_exact = False
        for actor in range(self.num_actors):
            self._start_over(actor)
        lost = f", and {dropped} steps that were in flight are dropped" if dropped else ""
        warn(f"the environments of the actors begin new episodes{lost}")


def _with_seq_no(rollout: Rollout, seq_no: int) -> Rollout:
    seq_nos = torch.full((rollout.num_envs,), seq_no, dtype=torch.int64)
    return replace(rollout, weights_seq_no=seq_nos)


class ActorCollector(Collector):
    """Collects one rollout per actor with the current weights, and concatenates the rollouts.

    Interface and guarantees are the same as for `RolloutCollector`.

    Args:
        actors: The actors.
        model: The acting model.
        make_model: Builds a model of the same architecture in any process.
        num_steps: Number of steps T per rollout.
        env_seed: Seed of the episodes of all actors.
        action_seed: Seed of the actions of all actors.
        on_lost: Callback for episodes lost in an actor failure, called with the mask `[B]` of the
            environments before the next rollout is used for learning.
        allow_new_episodes: See `RolloutCollector`.
        info_keys: See `RolloutCollector`.
    """

    def __init__(
        self,
        actors: DistributedActors,
        model: nn.Module,
        make_model: Callable[[], nn.Module],
        num_steps: int,
        *,
        env_seed: int,
        action_seed: int,
        on_lost: Callable[[Array], object] = lambda lost: None,
        allow_new_episodes: bool = False,
        info_keys: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._actors, self._model = actors, model
        self._on_lost = on_lost
        self._seeds = [Seeds(env_seed), Seeds(action_seed)]
        self._policy = ActorPolicy(
            Pickled(make_model, "model"),
            num_steps,
            allow_new_episodes,
            info_keys,
            returns_states=actors.pool.may_restart,
        )
        self._has_begun = False

    def _begin(self) -> DistributedActors:
        """Set up the actors on the first call."""
        if not self._has_begun:
            self._has_begun = True
            policy = replace(
                self._policy,
                records_log_probs=self.records_log_probs,
                keeps_terminal_obs=self.keeps_terminal_obs,
            )
            self._actors.begin(self._model, policy, self._seeds_of, ordered=True)
        return self._actors

    def _seeds_of(self, actor: int, generation: int) -> tuple[int, int]:
        env_seed, action_seed = (seeds.integer(f"{actor}/{generation}") for seeds in self._seeds)
        return env_seed, action_seed

    def collect_steps(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps with every actor.

        Args:
            model: The acting model; must be the one passed to the constructor.
            overlap: Function to call once during collection, with gradients enabled. The actors use
                copies of the weights, so the function may change the weights of the model.

        Returns:
            The rollout, in memory that later calls do not overwrite, and the finished episodes.
        """
        assert model is self._model, "the actors were built for another model"
        actors = self._begin()
        actors.publish(0)
        gathered = actors.gather(actors.num_actors, overlap=overlap)
        self.env_s = gathered.env_s
        if gathered.lost.any():
            self._on_lost(gathered.lost)
        rollout = gathered.rollouts[DEFAULT_MODULE]
        return replace(rollout, weights_seq_no=None), gathered.episodes

    def make_calls(self) -> None:
        """Make new calls in the environments of all actors, see `EnvCalls`."""
        self._begin().make_calls()

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the generation of each actor; call between rollouts."""
        state = self._begin().state_dict()
        kept = {name: state[name] for name in ("generations", "actors")}
        return {**kept, "turns": self.turns.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore from `state`; see `Collector`."""
        actors = self._begin()
        actors.load_state_dict({"counts": {}, "weights": None, "turn": 0, **state})
        lost, self.is_exact = actors.take_lost(), actors.is_exact
        self.turns.load_state_dict(state["turns"], torch.from_numpy(lost))
        return lost
