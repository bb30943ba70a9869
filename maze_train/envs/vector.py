"""Base of all vector environments, and the arrays that they step into."""

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
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from maze_train.core.errors import EnvError, ShapeError, SpaceError
from maze_train.core.seeding import draw_seed
from maze_train.core.step_end import StepBatch
from maze_train.envs.facade import infos_of
from maze_train.envs.types import Space
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.autoreset import AutoresetMode
from maze_train.spaces.columns import Columns, Spec, leaves_of
from maze_train.spaces.describe import FlatView, flat_space
from maze_train.spaces.masks import MaskLayout

if TYPE_CHECKING:
    from typing import Self

Array: TypeAlias = npt.NDArray[Any]
ArrayTree: TypeAlias = "Array | dict[str, Array]"
StepResult: TypeAlias = "tuple[ArrayTree, npt.NDArray[np.float64], Array, Array, dict[str, Any]]"


class MazeVectorEnv(VectorEnv[Any, Any, Any], ABC):
    """Base of vector environments that step into `StepBuffers`.

    Autoreset is SAME_STEP: where an episode ends, the returned observation is the first of the next
    episode, and `infos["final_obs"][i]` and `infos["final_info"]` belong to the last step of the
    old one, under the masks `infos["_final_obs"]` and `infos["_final_info"]`. Every episode starts
    from its own seed, see `maze_train.core.seeding.EpisodeSeeds`.

    A step has two halves, so that the caller can compute while environments are on their way:
    `step_async` sends the actions, and `step_wait` waits for the results. `step` is both. What
    works meanwhile are the worker processes of `SubprocVectorEnv`; other vector environments do all
    of the work in `step_wait`. Between the two only `close` may be called, and the numbers in
    internal buffers mean nothing.

    Observations of Dict and Tuple spaces are flat dicts of arrays, see
    `maze_train.spaces.describe`. With `copy=False`, which training uses, the returned observation
    arrays are the internal buffers and are overwritten by the next step; final observations,
    rewards and flags are always copies.

    An episode that was given up in a step, because a worker process could not be repaired or a
    number that is not finite was skipped, is in `infos["lost"]`, a mask `[num_envs]` that is there
    only then. Such a row is no transition: `infos["ignored"][i]` is True as well, the reward is 0,
    the flags are False, and the returned observation is the first of the next episode.

    `state_dict` and `load_state_dict` let the running episodes continue in other objects, where
    `can_be_restored` is set.

    Args:
        copy: Whether to return copies of the observations.
        step_infos: Whether to return the infos of every step and autoreset; false: only those of
            resets and `final_info`.

    Attributes:
        env_observation_space: Observation space of one environment, as the environment gives it.
        single_observation_space: The same, flat.
        single_action_space: Action space of one environment, as the environment gives it.
        root_seed: The seed of the last reset, given or drawn; None before the first one.
        frame_stack: Observations that are stacks of the last n frames along their first dimension,
            newest last: n by key (the key of a lone observation is empty).
        monitored: Whether wrappers end episodes early or change rewards for training, so that only
            `EpisodeEnd.counted`, or `r` and `l` in `final_info["episode"]`, has the returns and
            lengths of episodes.
        agents: Names of the agents of a multi-agent environment; empty for a single agent.
        can_be_restored: Whether the running episodes can be kept: not those of vector environments
            of other packages.
        simulator: The `Simulator` behind it, which gives and takes tensors; None: there is none.
        first_env: Number of the first environment in messages.
        keeps_terminal_obs: Whether last observations of terminated episodes are stored, so that
            they must be finite as those of truncated ones.
        notify: Prints a line about unexpected behaviour of environments; None: it is not printed.
    """

    root_seed: int | None = None
    first_env: int = 0
    keeps_terminal_obs: bool = False
    can_be_restored: bool = False
    simulator: Any = None
    notify: Callable[[str], object] | None = None
    is_exact: bool = True
    """Whether the episodes continue exactly as `load_state_dict` got them."""
    frame_stack: dict[str, int]
    monitored: bool
    agents: tuple[str, ...]
    _buffers: StepBuffers
    _action: FlatView
    _is_single: bool
    _is_stepping: bool = False

    def __init__(self, *, copy: bool = True, step_infos: bool = True) -> None:
        self.copy = copy
        self.step_infos = step_infos
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def worker_restarts(self) -> int:
        """Number of workers that were started again."""
        return 0

    def step(self, actions: Any) -> StepResult:
        """Step every environment once.

        Args:
            actions: [num_envs, ...]. If the action space is a Dict or Tuple, a value of
                `action_space`, or a flat dict of such arrays.

        Returns:
            Observations, rewards (float64), terminated, truncated (bool), [num_envs, ...] each, and
            infos.

        Raises:
            EnvError: If an environment raises or returns something invalid, or was never reset. It
                is a WorkerError where a worker process raises, dies or hangs.
            ShapeError: If the actions have the wrong shape.
            SpaceError: If the actions have the wrong type.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Begin a step, and do not wait for it.

        Args:
            actions: As `step` takes them; they are copied.

        Raises:
            EnvError: If there was no reset before, or the last step was not waited for.
            ShapeError: If the actions have the wrong shape.
            SpaceError: If the actions have the wrong type.
        """
        self._check_not_stepping("step_async()")
        self._put_actions(actions)
        self._is_stepping = True

    def step_wait(self) -> StepResult:
        """Wait for the step that `step_async` began.

        Returns:
            What `step` returns.

        Raises:
            EnvError: As `receive`.
        """
        batch = self.receive()
        ends = batch.obs, batch.rewards, batch.terminated, batch.truncated
        return *ends, infos_of(batch, self.num_envs)

    def receive(self) -> StepBatch[Array]:
        """Wait for the step that `step_async` began; infos are not converted to gymnasium's form.

        Raises:
            EnvError: If no step was begun, or an environment raises or returns something invalid.
                It is a WorkerError where a worker process raises, dies or hangs.
        """
        if self.closed or not self._is_stepping:
            why = "after close()" if self.closed else "without step_async(actions) before it"
            raise EnvError(f"step_wait() was called {why}")
        try:
            return self._finish_step()
        finally:
            self._is_stepping = False

    @abstractmethod
    def _finish_step(self) -> StepBatch[Array]:
        """Finish a step after its actions were put into the buffers."""

    def _check_not_stepping(self, call: str) -> None:
        if self._is_stepping and not self.closed:
            raise EnvError(
                f"{call} was called between step_async() and step_wait(): call step_wait() first"
            )

    def state_dict(self) -> dict[str, Any]:
        """State of every environment, as plain values and arrays; between two steps only.

        It does not depend on how the environments are spread over processes.

        Raises:
            EnvError: If the state is not known, or cannot be kept.
        """
        raise self._not_restored("state_dict()")

    def load_state_dict(
        self, state: dict[str, Any], *, allow_new_episodes: bool = False
    ) -> tuple[ArrayTree, npt.NDArray[np.bool_]]:
        """Put every environment where it was.

        Args:
            state: Result of `state_dict`, of as many environments of the same kind.
            allow_new_episodes: Whether an environment that does not do the same again begins its
                next episode instead.

        Returns:
            The observations to act on, [num_envs, ...], which mean nothing after a state from
            before the first reset; and which environments begin a new episode, [num_envs].

        Raises:
            EnvError: If the state does not fit, an environment raises, or it does not do the same
                again and must not begin a new episode; or episodes cannot be restored.
        """
        raise self._not_restored("load_state_dict()")

    offers_own_state: bool = False
    """Whether an environment offers `state_dict` and `load_state_dict`."""

    def own_states(self) -> Sequence[dict[str, Any] | None]:
        """Return the states that the environments give of themselves, between two steps.

        They hold what lasts longer than an episode, such as the stage of a curriculum.

        Returns:
            One state per environment, or per simulator; None for one that offers none.

        Raises:
            EnvError: If a state is not made of plain values and arrays.
        """
        return []

    def load_own_states(self, states: Sequence[dict[str, Any] | None]) -> None:
        """Restore the result of `own_states`; a reset has to follow.

        Raises:
            EnvError: If a state does not fit.
        """

    def _not_restored(self, call: str) -> EnvError:
        return EnvError(
            f"{call}: the running episodes of {type(self).__name__} cannot be kept, because "
            "vector environments of other packages neither return their state nor take one seed "
            "per episode: use env.backend=gymnasium"
        )

    def _describe(
        self,
        observation_space: Space,
        action_space: Space,
        num_envs: int,
        metadata: Mapping[str, Any],
    ) -> None:
        """Set the public attributes that follow from one environment.

        Args:
            observation_space: Its observation space, as the environment gives it.
            action_space: Its action space.
            num_envs: Number of environments.
            metadata: Its metadata, see `maze_train.envs.monitoring.described_metadata`.
        """
        self.num_envs = num_envs
        self.metadata = {**metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.env_observation_space = observation_space
        self.single_observation_space = flat_space(observation_space)
        self.observation_space = batched(self.single_observation_space, num_envs)
        self.single_action_space = action_space
        self.action_space = batch_space(action_space, num_envs)
        # Turns of several agents are separate rows, which share no frames.
        several = agent_spaces(observation_space, action_space)
        declared = metadata.get("frame_stack", {}) if several is None else {}
        self.frame_stack = fitting_stacks(observation_space, declared)
        self.monitored = bool(metadata.get("monitored", False))
        self.agents = () if several is None else several.agents
        self._action = FlatView(action_space)
        self._is_single = not isinstance(self.single_observation_space, gymnasium.spaces.Dict)

    def _seed_for(self, seed: int | None, options: Mapping[str, Any] | None) -> int:
        """The seed of a reset, drawn when none is given."""
        if options is not None and "reset_mask" in options:
            raise SpaceError(
                "reset(options={'reset_mask': ...}): not supported, a reset begins new episodes in "
                "all environments; where an episode ended, the next one has begun already"
            )
        if seed is not None and (not isinstance(seed, (int, np.integer)) or seed < 0):
            raise SpaceError(f"reset(seed={seed!r}): expected an integer >= 0, or None")
        self.root_seed = draw_seed() if seed is None else int(seed)
        return self.root_seed

    def _put_actions(self, actions: Any) -> None:
        """Copy actions into the buffers.

        Raises:
            EnvError: If there was no reset before.
            ShapeError: If they do not have one row per environment, in the shape of the space.
            SpaceError: If they are floats where the space holds integers, or a part is missing.
        """
        if self.root_seed is None:
            raise EnvError("step() was called before the first reset(): call reset() first")
        parts = self._parts_of(actions)
        for key, column in self._buffers.actions.items():
            part = np.asarray(parts[key])
            name = f"actions[{key!r}]" if key else "actions"
            if part.shape != column.shape:
                raise ShapeError(f"{name} has shape {part.shape}, expected {column.shape}")
            if part.dtype.kind == "f" and column.dtype.kind != "f":
                raise SpaceError(f"{name} has dtype {part.dtype}, its space says {column.dtype}")
            column[...] = part

    def _parts_of(self, actions: Any) -> Mapping[str, Any]:
        """Actions by leaf, of a flat dict or of a value of `action_space`."""
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
        """The observations to return."""
        columns = self._buffers.obs
        if self.copy:
            columns = {key: column.copy() for key, column in columns.items()}
        return columns[""] if self._is_single else columns


def fitting_stacks(space: Space, declared: Mapping[str, int]) -> dict[str, int]:
    """The declared stacks of frames whose leaf really has n as its first dimension."""
    shapes = {key: leaf.shape or () for key, leaf in FlatView(space).leaves.items()}
    return {key: n for key, n in declared.items() if shapes.get(key, ())[:1] == (n,)}


def batched(space: Space, n: int) -> Space:
    """The space of n values, with the order of the keys kept."""
    if not isinstance(space, gymnasium.spaces.Dict):
        return batch_space(space, n)
    parts = OrderedDict((key, batch_space(part, n)) for key, part in space.spaces.items())
    return gymnasium.spaces.Dict(parts)


def zeroed_columns(view: FlatView, n: int) -> dict[str, Array]:
    """Zeroed arrays for n values of a space, by leaf."""
    return Columns.of(view.leaves, stored=False).batched(n).arrays()


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Buffers that one step of `n` environments reads and writes.

    Observations and actions are keyed by leaf; a space that is one leaf has the key `""`.
    """

    obs: dict[str, Array]
    """Observations to act on, [n, ...] per leaf."""
    final_obs: dict[str, Array]
    """Last observations of the episodes that ended in this step, [n, ...] per leaf; other rows mean
    nothing."""
    actions: dict[str, Array]
    """Actions to take, [n, ...] per leaf."""
    rewards: npt.NDArray[np.float64]
    """[n]."""
    end: npt.NDArray[np.uint8]
    """Codes of `StepEnd`, [n]."""

    @staticmethod
    def columns(observation: FlatView, action: FlatView, n: int) -> Columns:
        """Columns of the buffers; `over` gets memory of `nbytes` bytes."""
        views = {"obs": observation, "final_obs": observation, "actions": action}
        found: dict[str, Spec] = {}
        for name, view in views.items():
            found |= Columns.of(view.leaves, name, stored=False)
        found["rewards"] = Spec((), np.dtype(np.float64))
        found["end"] = Spec((), np.dtype(np.uint8))
        return Columns(found).batched(n)

    @classmethod
    def over(cls, memory: Any, columns: Columns) -> StepBuffers:
        """The buffers in `memory`, a writable buffer."""
        arrays = columns.arrays(memory)
        obs, final_obs, actions = (leaves_of(arrays, x) for x in ("obs", "final_obs", "actions"))
        return cls(obs, final_obs, actions, arrays["rewards"], arrays["end"])

    def rows(self, first: int, stop: int) -> StepBuffers:
        """The part of the environments first, ..., stop - 1, as views."""
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

    Rows of columns `[rows, n, ...]` hold batches of n observations. `is_last`: see `within_range`.
    """
    writers = {
        key: within_range(key, view.leaves[key], column, column_writer(key, column), is_last)
        for key, column in columns.items()
    }
    if view.is_single:
        return writers[""]

    def write(i: int, observation: Any) -> None:
        for key, value in view.read(observation):
            writers[key](i, value)

    return write


FILL_MASKS = "; with env.empty_mask=all_legal all actions are legal then"
"""Remedy for masks that rule out every action."""


def masked_writer(
    write: Callable[[int, Any], None], masks: MaskLayout, columns: dict[str, Array]
) -> Callable[[int, Any], None]:
    """`write`, and then a check that every choice has a legal action in row i."""
    leaves = {leaf: columns[leaf] for leaf in masks.leaves}

    def write_checked(i: int, observation: Any) -> None:
        write(i, observation)
        problem = masks.illegal_part({leaf: column[i] for leaf, column in leaves.items()})
        if problem is not None:
            raise SpaceError(f"{problem}{FILL_MASKS}")

    return write_checked


def column_writer(key: str, column: Array) -> Callable[[int, Any], None]:
    """A function `write(i, value)` that copies a value into row i of a column."""
    shape, dtype = column.shape[1:], column.dtype

    def write(i: int, value: Any) -> None:
        # Assignment alone would broadcast a wrong shape, and cut floats down to integers, without a
        # word.
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
    """`write`, and then a check that categories exist: an encoder would read others instead.

    In the last observation of an episode (`is_last`) a category just outside becomes the nearest
    one: counters run one step beyond their space there.
    """
    if not isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
        return write
    low = np.asarray(leaf.start)
    high = low + (leaf.n if isinstance(leaf, spaces.Discrete) else leaf.nvec)

    def write_checked(i: int, value: Any) -> None:
        write(i, value)
        if is_last:
            column[i] = column[i] + (column[i] == low - 1) - (column[i] == high)
        written = column[i]
        is_wrong = (written < low) | (written >= high)
        if is_wrong.any():
            name = f"observation {key!r}" if key else "the observation"
            first = tuple(np.argwhere(is_wrong)[0][: written.ndim - low.ndim])
            raise SpaceError(f"{name} is {written[first]}, which is not in {leaf}")

    return write_checked


def converted(key: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`value` as an array that may be stored under `dtype`.

    Raises:
        SpaceError: If its shape is not `shape`, or it is not a number of the kind that the space
            holds.
    """
    name = f"observation {key!r}" if key else "the observation"
    array = as_array(key, value)
    if array.shape != shape:
        raise SpaceError(f"{name} has shape {array.shape}, its space says {shape}")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and dtype.kind != "f"):
        raise SpaceError(f"{name} has dtype {array.dtype}, its space says {dtype}")
    if array.dtype.kind in "iu" and dtype.kind in "iu" and (array.astype(dtype) != array).any():
        raise SpaceError(f"{name} holds {array.min()} to {array.max()}, which {dtype} cannot hold")
    return array


def as_array(key: str, value: Any) -> Array:
    """One leaf of an observation as an array.

    Raises:
        SpaceError: If it cannot be converted, such as a list of lists of unequal lengths.
    """
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        name = f"observation {key!r}" if key else "the observation"
        raise SpaceError(f"{name} is no array of numbers: {error}") from error
