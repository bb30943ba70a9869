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
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import wrappers as known

from maze_train.core.errors import EnvError
from maze_train.core.state import StatePart
from maze_train.envs.journal_blocks import (
    MERGED_BLOCKS,
    Block,
    blocks_from,
    checked_columns,
    merged,
)
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

RECENT_NBYTES = 2**20
"""Size of the chunks after which they become a block."""


ROUNDING = 1e-9
"""Relative difference that counts as rounding; of float32 and shorter types, 8 units in the last
place."""

LEAST_ROUNDING = 1e-12
"""Absolute difference that counts as rounding, for numbers that are differences themselves."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How the replay of an episode differs from the episode."""

    text: str
    is_rounding: bool = False
    """Whether only the last digits of numbers differ."""


def is_rounding(found: Array, expected: Array) -> bool:
    """Whether two arrays differ in the last digits of floating-point numbers only."""
    if expected.dtype.kind != "f" or not np.isfinite(found).all():
        return False
    share = max(ROUNDING, 8.0 * float(np.finfo(expected.dtype).eps))
    wide = expected.astype(np.float64)
    bound = share * np.abs(wide).max(initial=0.0) + LEAST_ROUNDING
    return bool((np.abs(found.astype(np.float64) - wide) <= bound).all())


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

    def difference(self, obs: Mapping[str, Array], reward: float) -> Difference | None:
        """Describe the difference after these actions; None if every byte is the same."""
        found = []
        for key, expected in self.obs.items():
            if obs[key].tobytes() != expected.tobytes():
                name = f"observation {key!r}" if key else "the observation"
                gap = np.abs(obs[key].astype(np.float64) - expected.astype(np.float64)).max()
                text = f"{name} differs by up to {gap:.3g}"
                found.append(Difference(text, is_rounding(obs[key], expected)))
        if reward != self.reward and not (math.isnan(reward) and math.isnan(self.reward)):
            text = f"the last reward is {reward:.9g} instead of {self.reward:.9g}"
            found.append(Difference(text, is_rounding(np.array(reward), np.array(self.reward))))
        return min(found, key=lambda difference: difference.is_rounding, default=None)

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


class Journal:
    """Keeps the actions of `n` environments since their bases, and counts their episodes.

    One step costs one assignment per part of the actions. The actions of the last steps are kept
    for all environments. Older ones are kept in blocks, for those environments alone whose records
    reach back so far; a checkpoint writes each block once.

    Args:
        columns: The arrays in which the actions of a step lie, [n, ...] per part.

    Attributes:
        episodes: Episodes started, by environment.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = dict(columns)
        # The one object of each type: a state is the same wherever it was made.
        self._dtypes = {key: np.dtype(column.dtype.str) for key, column in columns.items()}
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
        self._blocks: list[Block] = []
        self._loaded: Block | None = None  # Actions of a state that were in no block.
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

    def load(self, records: Sequence[EpisodeRecord], blocks: Sequence[Block] = ()) -> None:
        """Continue from records that all environments were put back by.

        Args:
            records: One per environment.
            blocks: The blocks that hold the first of their actions, see `read_state`.
        """
        self._restart()
        self.episodes = [record.episodes for record in records]
        self._episode_starts = [-record.steps for record in records]
        self._bases = [
            RecordStart(record.base_episodes, -record.num_actions, record.options, record.own)
            for record in records
        ]
        self._blocks = list(blocks)
        first = blocks[-1].end if blocks else min(base.step for base in self._bases)
        members = [i for i, base in enumerate(self._bases) if base.step < 0]
        if first == 0 or not members:
            return
        columns = {}
        for key, column in self._columns.items():
            shape = (-first, len(members), *column.shape[1:])
            columns[key] = np.zeros(shape, self._dtypes[key])
            for place, i in enumerate(members):
                actions = records[i].actions[key][first:]
                columns[key][-first - len(actions) :, place] = actions
        self._loaded = Block(first, members, columns)

    def read_state(
        self, state: Any, obs: Mapping[str, Array]
    ) -> tuple[int | None, list[EpisodeRecord], list[Block]]:
        """Root seed, records and blocks of a state that was kept; no records before a reset.

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
            return None, [], []
        if len(envs) != n:
            raise EnvError(
                f"the state is one of {len(envs)} environments, but there are {n}: resume with as "
                "many"
            )
        blocks = blocks_from(state.get("blocks", {}), self._columns)
        records = [record_from(env, i, self._columns, obs, blocks) for i, env in enumerate(envs)]
        return root, records, blocks

    def state(self, obs: Mapping[str, Array], rewards: Array) -> dict[str, Any]:
        """Records of all environments as plain values, and the blocks that they share.

        Args:
            obs: The observations to act on, [n, ...] per leaf.
            rewards: The last rewards, [n].

        Raises:
            EnvError: As for `record_of`, or if the options of a reset are no plain values.
        """
        self._tidy()
        now, envs = self._first + self._row, []
        start = self._blocks[-1].end if self._blocks else min(base.step for base in self._bases)
        for i, base in enumerate(self._bases):
            values = self.record_of(i, obs, rewards, since=start).to_dict(i)
            if base.step < start:
                values["shared"] = start - base.step
            envs.append(values)
        blocks: dict[str, Any] = {}
        for block in self._blocks:
            name = block.version  # not its number, which changes when an earlier one goes
            while name in blocks:
                name += "+"
            part = StatePart(block.version, partial(dict, block.columns))
            place = {"first": block.first - now, "level": block.level}
            blocks[name] = {**place, "members": np.array(block.members), "columns": part}
        return {"envs": envs, **({"blocks": blocks} if blocks else {})}

    @property
    def nbytes(self) -> int:
        """Size of all blocks."""
        return sum(column.nbytes for block in self._blocks for column in block.columns.values())

    def record_of(
        self, i: int, obs: Mapping[str, Array], rewards: Array, *, since: int | None = None
    ) -> EpisodeRecord:
        """Return the record from which an environment is put back.

        Args:
            i: The environment.
            obs: The observations to act on, [n, ...] per leaf.
            rewards: The last rewards, [n].
            since: First step whose actions count; None: that of the base.

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
            actions={key: self._actions_of(i, key, since) for key in self._columns},
            obs={key: np.array(column[i]) for key, column in obs.items()},
            reward=float(rewards[i]),
        )

    def _actions_of(self, i: int, key: str, since: int | None) -> Array:
        """The actions of environment i since its base, or a later step, [k, ...]."""
        step, column = self._bases[i].step, self._columns[key]
        step = step if since is None else max(step, since)
        parts = [np.empty((0, *column.shape[1:]), self._dtypes[key])]
        loaded = [] if self._loaded is None else [self._loaded]
        for block in (*self._blocks, *loaded):
            if block.end > step and i in block.places:
                parts.append(block.columns[key][max(0, step - block.first) :, block.places[i]])
        for first, chunk in self._chunks:
            used = self._row if first == self._first else self._rows
            parts.append(chunk[key][max(0, step - first) : used, i])
        return np.concatenate(parts)

    def _next_chunk(self) -> None:
        self._first += self._row
        self._row = 0
        oldest = min(base.step for base in self._bases)
        self._chunks = [kept for kept in self._chunks if kept[0] + self._rows > oldest]
        nbytes = sum(chunk.nbytes for _, parts in self._chunks for chunk in parts.values())
        if nbytes >= RECENT_NBYTES:
            self._add_block()
        chunk = {
            key: np.empty((self._rows, *column.shape), self._dtypes[key])
            for key, column in self._columns.items()
        }
        self._chunks.append((self._first, chunk))
        self._pairs = [(chunk[key], column) for key, column in self._columns.items()]

    def _add_block(self) -> None:
        """Let a block take the place of the chunks, which are full."""
        members = [i for i, base in enumerate(self._bases) if base.step < self._first]
        columns = {
            key: np.concatenate([chunk[key][:, members] for _, chunk in self._chunks])
            for key in self._columns
        }
        block = Block(self._chunks[0][0], members, columns)
        if self._loaded is not None and block.first == self._loaded.end:
            block = merged([self._loaded, block], 0)
        self._blocks.append(block)
        self._loaded, self._chunks = None, []
        self._tidy()
        while len(last := self._blocks[-MERGED_BLOCKS:]) == MERGED_BLOCKS:
            if last[0].level != last[-1].level:
                break
            self._blocks[-MERGED_BLOCKS:] = [merged(last, last[0].level + 1)]

    def _tidy(self) -> None:
        """Give back blocks that no record needs, and those parts that few of them need."""
        kept = []
        for block in self._blocks:
            used = [i for i in block.members if self._bases[i].step < block.end]
            if used:
                kept.append(block.of(used) if 2 * len(used) <= len(block.members) else block)
        self._blocks = kept


def _record_fields(given: Any, i: int) -> tuple[dict[str, Any], int]:
    """Fields of the record of environment i, and how many of its actions are in blocks."""
    expected = sorted(item.name for item in fields(EpisodeRecord))
    values = dict(given) if isinstance(given, dict) else {}
    shared = values.pop("shared", 0)
    if sorted(values) != expected:
        raise EnvError(f"the state of environment {i} is not one: expected the keys {expected}")
    return values, shared


def record_from(
    given: Any,
    i: int,
    actions: Mapping[str, Array],
    obs: Mapping[str, Array],
    blocks: Sequence[Block],
) -> EpisodeRecord:
    """The record of environment i, checked, with the actions that are in blocks."""
    given, shared = _record_fields(given, i)
    record = EpisodeRecord(**given)
    counts = (record.steps, record.base_episodes - 1, record.episodes - record.base_episodes)
    for name in ("options", "own"):
        if not isinstance(given[name], dict | None):
            raise EnvError(f"{name} of environment {i} is {given[name]!r}: expected a dict or None")
    if type(record.reward) is not float or not all(type(k) is int and k >= 0 for k in counts):
        raise EnvError(f"the counts of environment {i} are damaged: {counts}, {record.reward!r}")
    record.actions = checked_columns(record.actions, actions, f"actions of environment {i}", True)
    record.obs = checked_columns(record.obs, obs, f"observation of environment {i}", False)
    if shared:
        its = [block for block in blocks if i in block.places]
        if type(shared) is not int or not 0 < shared <= sum(block.rows for block in its):
            raise EnvError(f"the counts of environment {i} are damaged: {shared!r} shared actions")
        for key, tail in record.actions.items():
            parts = [block.columns[key][:, block.places[i]] for block in its]
            record.actions[key] = np.concatenate([np.concatenate(parts)[-shared:], tail])
    return record
