"""Workers that run actors, and the transfer of weights from the learner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space
from torch import nn

from maze_train.collect.collector import RolloutCollector
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.collect.simulators import collector_class
from maze_train.core.errors import TrainingError
from maze_train.core.step_end import StepBatch
from maze_train.core.types import Array, Buffer, Tensor
from maze_train.data.rollout import rollout_columns, slots_in
from maze_train.envs.building import close_all
from maze_train.envs.calls import EnvCall
from maze_train.envs.vector import MazeVectorEnv
from maze_train.nets.acting import ActingModel, acting
from maze_train.nets.joint import JointModel
from maze_train.spaces.columns import Columns
from maze_train.spaces.describe import flat_space
from maze_train.workers.backends import Pickled
from maze_train.workers.pool import Memory, Worker, WorkerContext, check_spaces

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
