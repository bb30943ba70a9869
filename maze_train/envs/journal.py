"""The state of environments: a journal of actions to repeat, or what they give themselves.

An episode follows from its seed and the actions. The journal keeps the number of the episode and
the actions; what is to be replayed is an `EpisodeRecord`.

An environment may offer `state_dict()` and `load_state_dict(state)`; it is then asked for its state
instead of being replayed. Every layer around it has to offer them too, or to be one that is known
here. A state consists of plain values and arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers as known

from maze_train.core.errors import EnvError
from maze_train.envs.monitoring import gives_state, layers_of
from maze_train.envs.vector import Array

STATELESS = (
    known.ClipAction,
    known.ClipReward,
    known.DtypeObservation,
    known.FilterObservation,
    known.FlattenObservation,
    known.GrayscaleObservation,
    known.OrderEnforcing,
    known.PassiveEnvChecker,
    known.RescaleAction,
    known.RescaleObservation,
    known.ReshapeObservation,
    known.ResizeObservation,
)
"""Wrappers of gymnasium whose state a reset with a seed restores."""

REMEMBERED: dict[type[Any], tuple[str, ...]] = {
    known.TimeLimit: ("_elapsed_steps",),
    **dict.fromkeys(STATELESS, ()),
}
"""Attributes in which known wrappers remember; those of this package name them in `remembers`."""


def offers_own_state(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether the environment and all its wrappers can give their state."""
    *around, inner = layers_of(env)
    return gives_state(inner) and all(
        gives_state(layer) or remembered_by(layer) is not None for layer in around
    )


def own_state(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    """The state of an environment that offers it, as plain values and copies of arrays.

    Raises:
        EnvError: If the state holds anything else.
    """
    names, states = [], []
    for layer in layers_of(env):
        name = type(layer).__name__
        if gives_state(layer):
            state = layer.state_dict()
        else:
            state = {key: getattr(layer, key) for key in remembered_by(layer) or ()}
        names.append(name)
        states.append(plain_copy(state, f"{name}.state_dict()"))
    return {"layers": names, "states": states}


def load_own_state(env: gymnasium.Env[Any, Any], state: Any) -> None:
    """Give an environment the state that it had; layer by layer, from the inside out.

    Args:
        env: The environment, after a reset with the seed of the episode.
        state: Result of `own_state`.

    Raises:
        EnvError: If the state is of an environment with other layers.
    """
    layers = list(layers_of(env))
    names = [type(layer).__name__ for layer in layers]
    given = state.get("layers") if isinstance(state, dict) else None
    states = state.get("states") if isinstance(state, dict) else None
    if given != names or not isinstance(states, list) or len(states) != len(names):
        raise EnvError(
            f"its own state is of the layers {given}, but it consists of {names}: restore it with "
            "the same wrappers"
        )
    for layer, part in zip(reversed(layers), reversed(states), strict=True):
        if gives_state(layer):
            layer.load_state_dict(plain_copy(part, "state"))
            continue
        for key in remembered_by(layer) or ():
            restore_attribute(layer, key, part[key])


def restore_attribute(layer: Any, name: str, value: Any) -> None:
    """Set an attribute; arrays by key are overwritten, because others hold them too."""
    if not isinstance(value, dict):
        setattr(layer, name, value)
        return
    for key, array in getattr(layer, name).items():
        array[...] = value[key]


def remembered_by(layer: Any) -> tuple[str, ...] | None:
    """The attributes in which a known wrapper remembers; None for others."""
    # Of the very class: a subclass may remember more.
    found: tuple[str, ...] | None = vars(type(layer)).get("remembers")
    return REMEMBERED.get(type(layer)) if found is None else found


def plain_copy(value: Any, path: str) -> Any:
    """A deep copy of plain values, lists, tuples, dicts with keys of text, and arrays of numbers.

    Args:
        value: The value to copy.
        path: Name in messages.

    Raises:
        EnvError: If there is anything else in it, naming its path.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)(plain_copy(part, f"{path}[{i}]") for i, part in enumerate(value))
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: plain_copy(part, f"{path}[{key!r}]") for key, part in value.items()}
    raise EnvError(
        f"{path} is {type(value).__name__} {str(value)[:80]!r}: expected None, bool, int, float, "
        "str, lists, dicts with keys of text, or numpy arrays of numbers"
    )


CHUNK_BYTES = 2**18
CHUNK_ROWS = (16, 1024)
"""Fewest and most steps per chunk of memory."""


@dataclass(slots=True)
class EpisodeRecord:
    """Record from which one environment is put back where it was.

    The record starts at its base: the start of the running episode, or an earlier one where the
    running episode continued with the game of those before, or the state that the environment gave
    of itself.
    """

    episodes: int
    """Number of episodes that were started, the running one included."""
    base_episodes: int
    """Number of episodes that were started at the base; at most `episodes`."""
    steps: int
    """Steps of the running episode."""
    options: dict[str, Any] | None
    """Options of the reset at the base."""
    own: dict[str, Any] | None
    """State that the environment itself gave at the base, if it did."""
    actions: dict[str, Array]
    """Actions since the base, [k, ...] per part."""
    obs: dict[str, Array]
    """The observation to act on, [...] per leaf."""
    reward: float
    """The last reward."""

    @property
    def num_actions(self) -> int:
        """Number of actions since the base."""
        return min((len(part) for part in self.actions.values()), default=0)

    def difference(self, obs: Mapping[str, Array], reward: float) -> str | None:
        """Describe the difference after these actions; None if every byte is the same."""
        for key, expected in self.obs.items():
            if obs[key].tobytes() != expected.tobytes():
                name = f"observation {key!r}" if key else "the observation"
                gap = np.abs(obs[key].astype(np.float64) - expected.astype(np.float64)).max()
                return f"{name} differs by up to {gap:.3g}"
        if reward != self.reward and not (math.isnan(reward) and math.isnan(self.reward)):
            return f"the last reward is {reward:.9g} instead of {self.reward:.9g}"
        return None

    def to_dict(self, index: int) -> dict[str, Any]:
        """Plain values and arrays, for the environment of this index.

        Raises:
            EnvError: If the options of the reset are no such values.
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["options"] = plain_copy(self.options, f"reset options of environment {index}")
        return values


@dataclass(slots=True)
class RecordStart:
    """Start of the record of an environment."""

    episodes: int
    step: int
    """Step of the journal from which on the actions count."""
    options: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    earlier: dict[str, Array] = field(default_factory=dict)
    """Actions between the base and that step: those of a record that was loaded."""


class Journal:
    """Keeps the actions of `n` environments since their bases, and counts their episodes.

    One step costs one assignment per part of the actions. Memory of the time before the oldest base
    is given back.

    Args:
        columns: The arrays in which the actions of a step lie, [n, ...] per part.

    Attributes:
        episodes: Episodes started, by environment.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = dict(columns)
        nbytes = max(1, sum(column.nbytes for column in columns.values()))
        self._rows = int(np.clip(CHUNK_BYTES // nbytes, *CHUNK_ROWS))
        self._n = len(next(iter(columns.values())))
        self._valid = False
        self.begin(None)

    def begin(self, options: dict[str, Any] | None) -> None:
        """All environments start their first episodes."""
        with suppress(EnvError):  # It is reported when a state is asked for.
            options = plain_copy(options, "options")  # The environment may change its own.
        self._restart()
        self.episodes = [1] * self._n
        self._episode_starts = [0] * self._n
        self._bases = [RecordStart(1, 0, options) for _ in range(self._n)]

    def _restart(self) -> None:
        self._chunks: list[tuple[int, dict[str, Array]]] = []
        self._pairs: list[tuple[Array, Array]] = []
        self._first = 0
        self._row = 0
        self._valid = True

    def invalidate(self) -> None:
        """Mark the record as invalid: it no longer says where the environments are."""
        self._valid = False

    def record(self) -> None:
        """Keep the actions of the step that was made."""
        row = self._row
        if row == self._rows or not self._chunks:
            self._next_chunk()
            row = 0
        for chunk, column in self._pairs:
            chunk[row] = column
        self._row = row + 1

    def ended(self, indices: Iterable[int], continuing: Sequence[int] = ()) -> None:
        """Episodes ended in the step that was recorded last, and new ones began.

        Args:
            indices: The environments.
            continuing: Those whose new episode continues the game of the old one, and cannot be
                replayed alone.
        """
        now = self._first + self._row
        for i in indices:
            self.episodes[i] += 1
            self._episode_starts[i] = now
            if i not in continuing:
                self._bases[i] = RecordStart(self.episodes[i], now)

    def rebase(self, i: int, own: dict[str, Any]) -> None:
        """Let the record of an environment begin now, with the state that it gives of itself."""
        self._bases[i] = RecordStart(self.episodes[i], self._first + self._row, own=own)

    def load(self, records: Sequence[EpisodeRecord]) -> None:
        """Continue from records that all environments were put back by."""
        self._restart()
        self.episodes = [record.episodes for record in records]
        self._episode_starts = [-record.steps for record in records]
        self._bases = [
            RecordStart(record.base_episodes, 0, record.options, record.own, record.actions)
            for record in records
        ]

    def read_state(
        self, state: Any, obs: Mapping[str, Array]
    ) -> tuple[int | None, list[EpisodeRecord]]:
        """Root seed and records of a state that was kept; no records before a reset.

        Args:
            state: Result of `MazeVectorEnv.state_dict`.
            obs: Arrays of observations of these environments, [n, ...] per leaf.

        Raises:
            EnvError: If the state is not one of as many environments, with such actions and
                observations.
        """
        n = self._n
        root = state.get("root_seed", ...) if isinstance(state, dict) else ...
        envs = state.get("envs") if isinstance(state, dict) else None
        if not isinstance(envs, list) or not (root is None or (type(root) is int and root >= 0)):
            expected = "expected root_seed and envs"
            raise EnvError(f"the state is not one of a vector environment: {expected}")
        if root is None:
            return None, []
        if len(envs) != n:
            raise EnvError(
                f"the state is one of {len(envs)} environments, but there are {n}: resume with as "
                "many"
            )
        return root, [record_from(env, i, self._columns, obs) for i, env in enumerate(envs)]

    def record_of(self, i: int, obs: Mapping[str, Array], rewards: Array) -> EpisodeRecord:
        """Return the record from which an environment is put back.

        Args:
            i: The environment.
            obs: The observations to act on, [n, ...] per leaf.
            rewards: The last rewards, [n].

        Raises:
            EnvError: If the last step failed, or none of the environments was ever reset.
        """
        if not self._valid:
            raise EnvError(
                "the state of the environments is not known, because the last call failed: call "
                "reset() or load_state_dict() first"
            )
        base = self._bases[i]
        return EpisodeRecord(
            episodes=self.episodes[i],
            base_episodes=base.episodes,
            steps=self._first + self._row - self._episode_starts[i],
            options=base.options,
            own=base.own,
            actions={key: self._actions_of(i, key) for key in self._columns},
            obs={key: np.array(column[i]) for key, column in obs.items()},
            reward=float(rewards[i]),
        )

    def _actions_of(self, i: int, key: str) -> Array:
        """The actions of environment i since its base, [k, ...]."""
        base = self._bases[i]
        parts = [base.earlier[key]] if base.earlier else []
        for first, chunk in self._chunks:
            used = self._row if first == self._first else self._rows
            parts.append(chunk[key][max(0, base.step - first) : used, i])
        column = self._columns[key]
        parts.append(np.empty((0, *column.shape[1:]), column.dtype))
        return np.concatenate(parts)

    def _next_chunk(self) -> None:
        self._first += self._row
        self._row = 0
        oldest = min(base.step for base in self._bases)
        self._chunks = [kept for kept in self._chunks if kept[0] + self._rows > oldest]
        chunk = {
            key: np.empty((self._rows, *column.shape), column.dtype)
            for key, column in self._columns.items()
        }
        self._chunks.append((self._first, chunk))
        self._pairs = [(chunk[key], column) for key, column in self._columns.items()]


def record_from(
    given: Any, i: int, actions: Mapping[str, Array], obs: Mapping[str, Array]
) -> EpisodeRecord:
    """The record of environment i, checked."""
    expected = sorted(item.name for item in fields(EpisodeRecord))
    if not isinstance(given, dict) or sorted(given) != expected:
        raise EnvError(f"the state of environment {i} is not one: expected the keys {expected}")
    record = EpisodeRecord(**given)
    counts = (record.steps, record.base_episodes - 1, record.episodes - record.base_episodes)
    for name in ("options", "own"):
        if not isinstance(given[name], dict | None):
            raise EnvError(f"{name} of environment {i} is {given[name]!r}: expected a dict or None")
    if type(record.reward) is not float or not all(type(k) is int and k >= 0 for k in counts):
        raise EnvError(f"the counts of environment {i} are damaged: {counts}, {record.reward!r}")
    record.actions = checked_columns(record.actions, actions, f"actions of environment {i}", True)
    record.obs = checked_columns(record.obs, obs, f"observation of environment {i}", False)
    return record


def checked_columns(
    given: Any, expected: Mapping[str, Array], name: str, any_length: bool
) -> dict[str, Array]:
    """Copies of arrays that fit those of the environments.

    Raises:
        EnvError: If a key, dtype or shape differs, or lengths do.
    """
    keys = sorted(given) if isinstance(given, dict) else given
    if keys != sorted(expected):
        raise EnvError(f"the {name} in the state have the keys {keys}, not {sorted(expected)}")
    lengths = set()
    for key, column in expected.items():
        array: Any = given[key]
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype != column.dtype:
            kind = getattr(array, "dtype", type(array).__name__)
            raise EnvError(f"the {name} in the state ({key!r}) are {kind}, not {column.dtype}")
        shape = array.shape[1:] if any_length else array.shape
        if shape != column.shape[1:] or (any_length and not array.ndim):
            raise EnvError(
                f"the {name} in the state ({key!r}) have shape {array.shape}, expected "
                f"{('k', *column.shape[1:]) if any_length else column.shape[1:]}"
            )
        lengths.add(sum(array.shape[:1]) if any_length else 0)
    if len(lengths) > 1:
        raise EnvError(f"the {name} in the state differ in their lengths: {sorted(lengths)}")
    return {key: np.array(given[key]) for key in expected}
