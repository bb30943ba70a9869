"""Base class of all vector environments, and the arrays for the results of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.core.errors import EnvError, ShapeError, SpaceError, WorkerError
from maze_train.core.seeding import draw_seed
from maze_train.core.step_end import DROPPED, EpisodeEnd, StepBatch
from maze_train.envs.batch import infos_of
from maze_train.envs.calls import EnvCall, new_calls
from maze_train.envs.types import Space
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.columns import Columns, Spec, leaves_of
from maze_train.spaces.describe import FlatView, flat_space
from maze_train.spaces.masks import MaskLayout

if TYPE_CHECKING:
    from typing import Self

    from maze_train.core.types import Buffer

Array: TypeAlias = npt.NDArray[Any]
ArrayTree: TypeAlias = "Array | dict[str, Array]"
StepResult: TypeAlias = "tuple[ArrayTree, npt.NDArray[np.float64], Array, Array, dict[str, Any]]"


class ArgumentError(ShapeError, ValueError, TypeError):
    """Wrong number, shape or type of values; also the built-in errors that Gymnasium raises."""


class PendingCallError(EnvError, AlreadyPendingCallError):
    """A call between `step_async` and `step_wait`."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class NoCallError(EnvError, NoAsyncCallError):
    """A call of `step_wait` without `step_async`."""

    def __init__(self, message: str, name: str = "step") -> None:
        super().__init__(message, name)


class ClosedError(WorkerError, ClosedEnvironmentError):
    """A vector environment is used after `close`."""


class MissingAttributeError(EnvError, AttributeError):
    """An environment has no attribute of the requested name."""


class MazeVectorEnv(VectorEnv[Any, Any, Any], ABC):
    """Base class of vector environments that step into `StepBuffers`.

    Autoreset mode is SAME_STEP: when an episode ends, the returned observation is the first of the
    next episode, and `infos["final_obs"][i]` and `infos["final_info"]` belong to the last step of
    the previous episode, under the masks `infos["_final_obs"]` and `infos["_final_info"]`. Each
    episode has a separate seed, see `maze_train.core.seeding.EpisodeSeeds`.

    `step` calls `step_async`, which sends the actions, and then `step_wait`. Worker processes of
    `SubprocVectorEnv` run in parallel between these calls; other vector environments do all the
    work in `step_wait`. Between `step_async` and `step_wait`, only `close` may be called, and the
    contents of internal buffers are undefined.

    Observations of Dict and Tuple spaces are flat dicts of arrays, see
    `maze_train.spaces.describe`. With `copy=False`, as in training, returned observations are
    internal buffers, which the next step overwrites; final observations, rewards and flags are
    always copies.

    An episode is dropped after the failure of a worker, or if a non-finite value is skipped. The
    mask `infos["lost"]` marks dropped episodes, and exists only if an episode was dropped. The row
    of a dropped episode is not a transition: `infos["ignored"][i]` is True, the reward is 0, the
    flags are False, and the observation is the first of the next episode.

    If `can_be_restored`, the running episodes can be saved and restored with `state_dict` and
    `load_state_dict`.

    Args:
        copy: Whether to return copies of the observations.
        step_infos: Whether to return the infos of every step and autoreset; if False, only the
            infos of resets and `final_info` are returned.

    Attributes:
        env_observation_space: Observation space of one environment, before flattening.
        single_observation_space: Flattened observation space.
        single_action_space: Action space of one environment, before flattening.
        spaces: Observation and action space of one environment, before flattening.
        root_seed: Seed of the last reset; None before the first reset.
        frame_stack: Number of stacked frames n by key of the observation (empty for a single leaf);
            frames are along the first dimension, newest last.
        monitored: Whether training wrappers may end episodes early or change rewards. Raw returns
            and lengths are in `EpisodeEnd.counted`, or `r` and `l` in `final_info["episode"]`.
        agents: Names of the agents of a multi-agent environment; empty for a single agent.
        can_be_restored: Whether running episodes can be saved; False for third-party vector
            environments.
        simulator: The underlying `Simulator`, if any.
        device: Device of observations, actions and results, if they are tensors; None for arrays.
        first_env: Index of the first environment in messages.
        total_envs: Number of environments in all processes of a run. If other processes have
            environments too, the environments of this object are numbered from `first_env`, and
            these indices determine the seeds of episodes and actions. 0 means that no other process
            has environments.
        keeps_terminal_obs: Whether final observations of terminated episodes are stored and must be
            finite, as for truncated episodes.
        calls_made: Calls made in the environments so far, in order.
        notify: Prints a note about unexpected behaviour of environments; if None, nothing is
            printed.
    """

    root_seed: int | None = None
    first_env: int = 0
    total_envs: int = 0
    keeps_terminal_obs: bool = False
    can_be_restored: bool = False
    simulator: Any = None
    device: Any = None
    notify: Callable[[str], object] | None = None
    is_exact: bool = True
    """Whether `load_state_dict` restored the episodes exactly."""
    starts_itself: bool = True
    """Whether the next episode begins without `begin`; otherwise environments are paused."""
    obs: ArrayTree
    """Current observations, after `begin_all` or `advance`."""
    rewards: Array
    """Rewards of the last `advance`."""
    end: Array
    """`StepEnd` codes of the last `advance`."""
    frame_stack: dict[str, int]
    monitored: bool
    agents: tuple[str, ...]
    _buffers: StepBuffers
    _bounds: dict[str, tuple[Space, Array, Array]]
    _action: FlatView
    _is_single: bool
    _is_stepping: bool = False
    _num_steps, _next_check, _has_noted = 0, 1, False
    closed = True  # Until `__init__` succeeds; old versions of Gymnasium close deleted objects.

    def __init__(self, *, copy: bool = True, step_infos: bool = True) -> None:
        self.copy = copy
        self.step_infos = step_infos
        self.calls_made: list[EnvCall] = []
        self._closing = ExitStack()
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close_extras(self, **kwargs: object) -> None:
        """Close the environments and stop the workers; kill workers that do not stop in time."""
        self._closing.close()

    @property
    def worker_restarts(self) -> int:
        """Number of worker restarts."""
        return 0

    def step(self, actions: Any) -> StepResult:
        """Step every environment once.

        Args:
            actions: [num_envs, ...]. For a Dict or Tuple action space, an element of `action_space`
                or a flat dict of such arrays.

        Returns:
            Observations, rewards (float64), terminated, truncated (bool), [num_envs, ...] each, and
            infos.

        Raises:
            EnvError: If an environment raises an exception, returns an invalid value, or was not
                reset.
            WorkerError: If a worker process raises an exception, dies or hangs.
            ShapeError: If the actions have the wrong shape.
            SpaceError: If the actions have the wrong type.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Start a step without waiting for it.

        Args:
            actions: See `step`. The actions are copied.

        Raises:
            EnvError: If the environments were not reset, or the last step is not finished.
            ShapeError: If the actions have the wrong shape.
            SpaceError: If the actions have the wrong type.
        """
        self._check_not_stepping("step_async()")
        self._put_actions(actions)
        self._is_stepping = True

    def step_wait(self) -> StepResult:
        """Wait for the step started by `step_async`.

        Returns:
            See `step`.

        Raises:
            EnvError: See `receive`.
        """
        batch = self.receive()
        ends = batch.obs, batch.rewards, batch.terminated, batch.truncated
        return *ends, infos_of(batch, self.num_envs)

    def receive(self) -> StepBatch[Array]:
        """Wait for the step started by `step_async`, and return it as a `StepBatch`.

        Raises:
            EnvError: If no step was started, or if an environment raises an exception or returns an
                invalid value.
            WorkerError: If a worker process raises an exception, dies or hangs.
        """
        if self.closed:
            raise ClosedError("step_wait() was called after close()")
        if not self._is_stepping:
            raise NoCallError("step_wait() was called without step_async(actions) before it")
        try:
            batch = self._finish_step()
        finally:
            self._is_stepping = False
        self._num_steps += 1
        if self._num_steps == self._next_check:
            self._next_check *= 2
            self._note_on_bounds()
        return batch

    def _note_on_bounds(self) -> None:
        """Print a note, once, if observations are outside their space."""
        if self.notify is None or self._has_noted:
            return
        for key, (leaf, low, high) in self._bounds.items():
            column = self._buffers.obs[key]
            is_wrong = (column < low) | (column > high)
            if is_wrong.any():
                self._has_noted = True
                name = f"observation {key!r}" if key else "the observation"
                self.notify(
                    f"{name} contains {column[is_wrong][0]}, which is not in {leaf}; training uses "
                    "such values as they are"
                )
                return

    @abstractmethod
    def _finish_step(self) -> StepBatch[Array]:
        """Finish the step started by `step_async`."""

    @property
    def playing(self) -> list[int]:
        """Rows of the environments that play: not paused, and not reset by the next step."""
        return list(range(self.num_envs))

    def begin_all(self, seed: int) -> None:
        """Begin an episode in every environment, before `advance`."""
        self.obs, _ = self.reset(seed=seed)

    def begin(self, seeds: Mapping[int, int]) -> None:
        """Begin episodes in paused environments, with the given seed per row."""
        raise EnvError(f"{type(self).__name__} does not pause environments")

    def advance(self, actions: ArrayTree) -> dict[int, EpisodeEnd | None]:
        """Step the environments that play; see `collect.play.PlayableEnv`."""
        rows = self.playing
        if len(rows) < self.num_envs:
            columns = self._buffers.actions
            for key, part in self._parts_of(actions).items():
                columns[key][rows] = part
            actions = columns[""] if self._action.is_single else columns
        self.step_async(actions)
        batch = self.receive()
        self.obs, self.rewards, self.end = batch.obs, batch.rewards, batch.end
        dropped = np.flatnonzero(batch.end == DROPPED).tolist() if batch.has_gaps else []
        return {**{end.env: end for end in batch.ends}, **dict.fromkeys(dropped)}

    def _check_not_stepping(self, call: str) -> None:
        if self.closed:
            raise ClosedError(f"{call} was called after close()")
        if self._is_stepping:
            raise PendingCallError(
                f"{call} was called between step_async() and step_wait(): call step_wait() first"
            )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; call between steps.

        Args:
            name: Name of the method or attribute of the environment or one of its wrappers.
            *args: Arguments of the method.
            **kwargs: Keyword arguments of the method.

        Returns:
            One result per environment.

        Raises:
            AttributeError: If an environment has no such attribute; nothing is called then.
            EnvError: If calls are not supported; a WorkerError if the call fails in a worker.
        """
        self._check_not_stepping(f"call({name!r})")
        return tuple(self._call_envs(name, args, kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment; see `call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment; call between steps.

        Restarted workers and restored states do not repeat the change; `run.set_env_attr` in a
        callback does.

        Args:
            name: Name of the attribute.
            values: One value per environment as a list or tuple, or one value for all.

        Raises:
            ShapeError: If the number of values differs from the number of environments.
            EnvError: See `call`.
        """
        self._check_not_stepping(f"set_attr({name!r})")
        every = values if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(every) != self.num_envs:
            raise ArgumentError(f"set_attr: {len(every)} values for {self.num_envs} environments")
        self._set_attrs(name, every)

    def render(self) -> tuple[Any, ...]:
        """Return the rendered frame of every environment."""
        return self.call("render")

    def _call_envs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Call a method of every environment."""
        raise EnvError(f"call({name!r}): not supported by {type(self).__name__}")

    def _set_attrs(self, name: str, values: Sequence[Any]) -> None:
        """Set an attribute of every environment."""
        raise EnvError(f"set_attr({name!r}): not supported by {type(self).__name__}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every environment as plain values and arrays; call between steps.

        The state does not depend on the number of worker processes.

        Raises:
            EnvError: If the state is unknown or cannot be saved.
        """
        raise self._not_restored("state_dict()")

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[ArrayTree, npt.NDArray[np.bool_]]:
        """Restore every environment.

        Args:
            state: Result of `state_dict` for the same number of environments of the same kind.
            allow_new_episodes: Whether an environment begins its next episode if the replay
                differs.

        Returns:
            The current observations, [num_envs, ...] (undefined if the state was saved before the
            first reset), and a mask [num_envs] of environments that begin a new episode.

        Raises:
            EnvError: If restoring is not supported, the state does not match the environments, an
                environment raises, or a replay differs and new episodes are not allowed.
        """
        raise self._not_restored("load_state_dict()")

    def make_calls(self, calls: Sequence[EnvCall]) -> None:
        """Make the calls that have not been made yet; call between steps.

        Args:
            calls: All calls since the environments were made, in order.

        Raises:
            ConfigError: If an environment does not have the method or attribute, or the call
                samples from its generator and the environment cannot save its state.
            EnvError: If an environment raises an exception, or `calls` is shorter than before.
            WorkerError: If a worker process fails.
        """
        new = new_calls(calls, len(self.calls_made))
        if new:
            self._check_not_stepping("make_calls()")
            self._make_calls(new)
            self.calls_made += new

    @abstractmethod
    def _make_calls(self, calls: list[EnvCall]) -> None:
        """Apply calls to all environments."""

    offers_own_state: bool = False
    """Whether an environment has `state_dict` and `load_state_dict`."""

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the saved states of environments that support saving; call between steps.

        These states persist across episodes, for example the stage of a curriculum.

        Returns:
            One state per environment, or per simulator; None for environments without `state_dict`.

        Raises:
            EnvError: If a state contains values other than plain values and arrays.
        """
        return []

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore states from `own_states`; must be followed by a reset.

        Raises:
            EnvError: If a state does not match its environment.
        """

    def _not_restored(self, call: str) -> EnvError:
        return EnvError(
            f"{call}: the running episodes of {type(self).__name__} cannot be saved, because "
            "third-party vector environments do not support saving their state or one seed per "
            "episode: use env.backend=gymnasium"
        )

    def _describe(
        self,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Set the public attributes from the properties of one environment.

        Args:
            observation_space: Observation space of the environment, before flattening.
            action_space: Action space of the environment.
            num_envs: Number of environments.
            metadata: Metadata, see `maze_train.envs.wrappers.described_metadata`.
        """
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode.SAME_STEP
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self.env_observation_space = observation_space
        self.spaces = observation_space, action_space
        self.single_observation_space = flat_space(observation_space)
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.single_action_space = action_space
        self.action_space = batch_space(action_space, num_envs)
        # In multi-agent environments, frames are not shared between rows.
        several = agent_spaces(observation_space, action_space)
        declared = metadata.get("frame_stack", {}) if several is None else {}
        self.frame_stack = fitting_stacks(observation_space, declared)
        self.monitored = bool(metadata.get("monitored", False))
        self.agents = () if several is None else several.agents
        self._action = FlatView(action_space)
        self._bounds = bounds_of(FlatView(observation_space))
        self._is_single = not isinstance(self.single_observation_space, gymnasium.spaces.Dict)

    def _seed_for(self, seed: int | None) -> int:
        """Return the seed of a reset of all environments; if `seed` is None, a seed is drawn."""
        self.root_seed = draw_seed() if seed is None else checked_seed(seed)
        VectorEnv.reset(self, seed=None if seed is None else self.root_seed)  # Seeds `np_random`.
        return self.root_seed

    def _put_actions(self, actions: object) -> None:
        """Copy actions into the buffers.

        Raises:
            EnvError: If the environments were not reset.
            ShapeError: If the shape is not [num_envs, *shape of the space].
            SpaceError: If actions are floats but the space is integer, or a leaf is missing.
        """
        if self.root_seed is None:
            raise EnvError("step() was called before the first reset(): call reset() first")
        parts = self._parts_of(actions)
        for key, column in self._buffers.actions.items():
            part = np.asarray(parts[key])
            name = f"actions[{key!r}]" if key else "actions"
            if part.shape != column.shape:
                raise ArgumentError(f"{name} has shape {part.shape}, expected {column.shape}")
            if part.dtype.kind == "f" and column.dtype.kind != "f":
                raise SpaceError(f"{name} has dtype {part.dtype}, its space has {column.dtype}")
            column[...] = part

    def _parts_of(self, actions: object) -> Mapping[str, Any]:
        """Return actions by leaf, from a flat dict or an element of `action_space`."""
        if self._action.is_single:
            return {"": actions}
        if isinstance(actions, Mapping) and actions.keys() >= self._buffers.actions.keys():
            return actions
        try:
            return dict(self._action.read(actions))
        except SpaceError as error:
            leaves = ", ".join(map(repr, self._action.leaves))
            raise SpaceError(
                f"actions: {error}; expected a value of action_space, or a dict with {leaves}"
            ) from None

    def _observations(self) -> ArrayTree:
        """Return the observations, copied if requested."""
        columns = self._buffers.obs
        if self.copy:
            columns = {key: column.copy() for key, column in columns.items()}
        return columns[""] if self._is_single else columns


def checked_seed(seed: object) -> int:
    """Return a seed as an integer >= 0.

    Raises:
        SpaceError: If the seed is not an integer >= 0.
    """
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise SpaceError(f"reset(seed={seed!r}): expected an integer >= 0, or None")
    return int(seed)


def masked_rows(
    options: Mapping[str, Any] | None, num_envs: int
) -> tuple[list[int] | None, dict[str, Any] | None]:
    """Return the indices selected by `options["reset_mask"]` (None: no mask), and other options.

    Raises:
        ArgumentError: If the mask is not a bool array [num_envs] with at least one True value.
    """
    if options is None or "reset_mask" not in options:
        return None, None if options is None else dict(options)
    mask = np.asarray(options["reset_mask"])
    problem = None
    if mask.shape != (num_envs,):
        problem = f"have shape `({num_envs},)`, got {mask.shape}"
    elif mask.dtype != np.bool_:
        problem = f"have `dtype=np.bool_`, got {mask.dtype}"
    elif not mask.any():
        problem = f"contain a boolean array with at least one True value, got reset_mask={mask}"
    if problem is not None:
        raise ArgumentError(f"`options['reset_mask']` must {problem}")
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    return mask.nonzero()[0].tolist(), rest


def fitting_stacks(space: Space, declared: Mapping[str, int]) -> dict[str, int]:
    """Return the declared frame stacks n whose leaves have the first dimension n."""
    shapes = {key: leaf.shape or () for key, leaf in FlatView(space).leaves.items()}
    return {key: n for key, n in declared.items() if shapes.get(key, ())[:1] == (n,)}


def bounds_of(view: FlatView) -> dict[str, tuple[Space, Array, Array]]:
    """Return the leaves that can contain values outside the space, with their bounds.

    Categories are excluded, because `within_range` checks each of them. A relative excess of 1e-5
    counts as rounding.
    """
    found: dict[str, tuple[Space, Array, Array]] = {}
    for key, leaf in view.leaves.items():
        if isinstance(leaf, spaces.MultiBinary):
            found[key] = leaf, np.zeros(()), np.ones(())
        elif isinstance(leaf, spaces.Box):
            if leaf.dtype == np.uint8 and not leaf.low.any() and (leaf.high == 255).all():
                continue
            low, high = leaf.low.astype(np.float64), leaf.high.astype(np.float64)
            found[key] = leaf, low - 1e-5 * np.abs(low), high + 1e-5 * np.abs(high)
    return found


def note_on_lists(view: FlatView, obs: object) -> str | None:
    """Return a note if parts of an observation are lists, otherwise None."""
    for key, value in view.read(obs):
        if isinstance(value, (list, tuple)):
            name = f"observation {key!r}" if key else "the observation"
            return (
                f"{name} is a {type(value).__name__}, which is converted in every step: return a "
                f"NumPy array of dtype {view.leaves[key].dtype}, which is faster"
            )
    return None


def batched(space: Space, n: int) -> Space:
    """Return the space of batches of n values, keeping the order of keys."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return batch_space(space, n)
    parts = OrderedDict((key, batch_space(part, n)) for key, part in space.spaces.items())
    return gymnasium.spaces.Dict(parts)


def zeroed_columns(view: FlatView, n: int) -> dict[str, Array]:
    """Return zeroed arrays for n elements of a space, by leaf."""
    return Columns.of(view.leaves, stored=False).batched(n).arrays()


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Inputs and outputs of one step of `n` environments.

    Observations and actions are keyed by leaf; the key of a single leaf is `""`.
    """

    obs: dict[str, Array]
    """Current observations, [n, ...] per leaf."""
    final_obs: dict[str, Array]
    """Final observations of episodes that ended in this step, [n, ...] per leaf; other rows are
    undefined."""
    actions: dict[str, Array]
    """Actions of the step, [n, ...] per leaf."""
    rewards: npt.NDArray[np.float64]
    """Rewards, [n]."""
    end: npt.NDArray[np.uint8]
    """`StepEnd` codes, [n]."""

    @staticmethod
    def columns(observation: FlatView, action: FlatView, n: int) -> Columns:
        """Return the columns of the buffers; `over` requires `columns.nbytes` bytes."""
        views = {"obs": observation, "final_obs": observation, "actions": action}
        found: dict[str, Spec] = {}
        for name, view in views.items():
            found |= Columns.of(view.leaves, name, stored=False)
        found["rewards"] = Spec((), np.dtype(np.float64))
        found["end"] = Spec((), np.dtype(np.uint8))
        return Columns(found).batched(n)

    @classmethod
    def over(cls, memory: Buffer, columns: Columns) -> StepBuffers:
        """Create the buffers over `memory`, a writable buffer."""
        arrays = columns.arrays(memory)
        obs, final_obs, actions = (leaves_of(arrays, x) for x in ("obs", "final_obs", "actions"))
        return cls(obs, final_obs, actions, arrays["rewards"], arrays["end"])

    def rows(self, first: int, stop: int) -> StepBuffers:
        """Return views of the rows first, ..., stop - 1."""
        obs, final_obs, actions = (
            {key: array[first:stop] for key, array in columns.items()}
            for columns in (self.obs, self.final_obs, self.actions)
        )
        rewards, end = self.rewards[first:stop], self.end[first:stop]
        return StepBuffers(obs, final_obs, actions, rewards, end)


def row_writer(
    view: FlatView, columns: dict[str, Array], *, is_last: bool = False
) -> Callable[[int, Any], None]:
    """Return a function `write(i, observation)` that copies an observation into row i.

    For columns `[rows, n, ...]`, a row is a batch of n observations. `is_last`: see `within_range`.
    """
    writers = {
        key: within_range(key, view.leaves[key], column, column_writer(key, column), is_last)
        for key, column in columns.items()
    }
    if view.is_single:
        return writers[""]

    def write(i: int, observation: object) -> None:
        for key, value in view.read(observation):
            writers[key](i, value)

    return write


FILL_MASKS = "; to make all actions legal in this case, set env.empty_mask=all_legal"
"""Hint for masks without a legal action."""


def masked_writer(
    write: Callable[[int, Any], None], masks: MaskLayout, columns: dict[str, Array]
) -> Callable[[int, Any], None]:
    """Return `write` with a check that every action component in row i has a legal action."""
    leaves = {leaf: columns[leaf] for leaf in masks.leaves}

    def write_checked(i: int, observation: object) -> None:
        write(i, observation)
        problem = masks.illegal_part({leaf: column[i] for leaf, column in leaves.items()})
        if problem is not None:
            raise SpaceError(f"{problem}{FILL_MASKS}")

    return write_checked


def column_writer(key: str, column: Array) -> Callable[[int, Any], None]:
    """Return a function `write(i, value)` that copies a value into row i of a column."""
    shape, dtype = column.shape[1:], column.dtype

    def write(i: int, value: object) -> None:
        # Plain assignment would silently broadcast wrong shapes and truncate floats to integers.
        if type(value) is not np.ndarray or value.shape != shape or value.dtype != dtype:
            value = converted(key, value, shape, dtype)
        column[i] = value

    return write


def within_range(
    key: str,
    leaf: Space,
    column: Array,
    write: Callable[[int, Any], None],
    is_last: bool = False,
) -> Callable[[int, Any], None]:
    """Return `write` with a check that categories are in the space.

    In the final observation of an episode (`is_last`), a category that exceeds the space by one is
    clipped, because step counters often exceed their space at the end of an episode.
    """
    if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
        return write
    low = np.asarray(leaf.start)
    # `start + n` may exceed the dtype; the last category does not.
    count = np.asarray(leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec)
    last = np.asarray(low + (count - 1))

    def write_checked(i: int, value: object) -> None:
        write(i, value)
        written = column[i]
        if is_last:
            is_below = (written < low) & (low - written == 1)
            is_above = (written > last) & (written - last == 1)
            column[i] = np.where(is_below, low, np.where(is_above, last, written))
            written = column[i]
        is_wrong = (written < low) | (written > last)
        if is_wrong.any():
            name = f"observation {key!r}" if key else "the observation"
            first = tuple(np.argwhere(is_wrong)[0][: written.ndim - low.ndim])
            raise SpaceError(f"{name} is {written[first]}, which is not in {leaf}")

    return write_checked


def converted(key: str, value: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Convert `value` to an array that can be stored under `dtype`.

    Raises:
        SpaceError: If the shape differs, or `dtype` cannot represent the values.
    """
    name = f"observation {key!r}" if key else "the observation"
    array = as_array(key, value)
    if array.shape != shape:
        raise SpaceError(f"{name} has shape {array.shape}, its space has {shape}")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise SpaceError(f"{name} has dtype {array.dtype}, its space has {dtype}")
    if array.dtype.kind in "iu" and dtype.kind in "iu" and (array.astype(dtype) != array).any():
        raise SpaceError(
            f"{name} has values {array.min()} to {array.max()}, outside the range of {dtype}"
        )
    return array


def as_array(key: str, value: object) -> Array:
    """Convert a leaf of an observation to an array.

    Raises:
        SpaceError: If conversion fails, for example for lists of unequal lengths.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        name = f"observation {key!r}" if key else "the observation"
        raise SpaceError(f"{name} is not a numeric array: {error}") from error
