"""Journal of the actions of running episodes, used to replay the episodes.

The seed and the actions determine an episode. The journal stores the index and the actions of each
running episode; an `EpisodeRecord` contains the data of one replay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from maze_train.core.errors import EnvError
from maze_train.core.state import StatePart, plain_copy
from maze_train.envs.calls import EnvCall, calls_from
from maze_train.envs.vector import Array

RECENT_NBYTES, RECENT_STEPS = 2**18, (16, 1024)
"""Size of the buffer of recent actions in bytes, and minimum and maximum number of buffered
steps."""

PIECE_NBYTES = 2**18
"""Minimum size in bytes of actions that checkpoints store as a separate part."""

MAX_NBYTES = 2**30
"""Maximum size in bytes of the stored actions of running episodes."""

NOT_KEPT = "the actions were not stored, because the episode is too long"

NO_SEEDS: Mapping[int, int] = MappingProxyType({})
"""The seeds of all episodes are derived from the root seed."""

ROUNDING = 1e-9
"""Maximum relative difference attributed to rounding; at least 8 machine epsilons of the dtype."""

MIN_ROUNDING = 1e-12
"""Maximum absolute difference attributed to rounding, for values close to 0."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between a replay and the recorded episode."""

    text: str
    is_rounding: bool = False
    """Whether the difference is within rounding."""


def is_rounding(found: Array, expected: Array) -> bool:
    """Whether two arrays differ only by floating-point rounding."""
    if expected.dtype.kind != "f" or not np.isfinite(found).all():
        return False
    share = max(ROUNDING, 8.0 * float(np.finfo(expected.dtype).eps))
    wide = expected.astype(np.float64)
    bound = share * np.abs(wide).max(initial=0.0) + MIN_ROUNDING
    return bool((np.abs(found.astype(np.float64) - wide) <= bound).all())


@dataclass(slots=True)
class EpisodeRecord:
    """Data to restore one environment.

    A replay starts at the base, which is the beginning of the running episode, the beginning of an
    earlier episode of the same game, or the last saved state of the environment.
    """

    episodes: int
    """Number of episodes begun, including the running one."""
    base_episodes: int
    """Number of episodes begun when the base was recorded; at most `episodes`."""
    steps: int
    """Number of steps of the running episode."""
    options: dict[str, Any] | None
    """Options passed to the reset that begins the replay."""
    own: dict[str, Any] | None
    """State of the environment at the base; None if the environment cannot save its state."""
    is_kept: bool
    """Whether the actions are stored."""
    actions: dict[str, Array]
    """Actions not yet contained in `pieces`, [k, ...] per leaf."""
    obs: dict[str, Array]
    """The current observation, [...] per leaf."""
    reward: float
    """The last reward."""
    calls: int = 0
    """Number of environment calls made before the base."""
    calls_at: list[int] = field(default_factory=list)
    """Number of actions between the base and each later call."""
    pieces: list[StatePart] = field(default_factory=list)
    """Oldest actions since the base, stored in immutable parts."""
    seed: int | None = None
    """Seed of the reset that begins the replay; None if it is derived from the root seed."""

    def all_actions(self) -> dict[str, Array]:
        """Return a copy of the actions since the base, [k, ...] per leaf."""
        return joined([*(piece.read() for piece in self.pieces), self.actions])

    @property
    def num_actions(self) -> int:
        """Number of actions since the base."""
        parts = [*(piece.read() for piece in self.pieces), self.actions]
        return sum(min(map(len, part.values()), default=0) for part in parts)

    def difference(self, obs: Mapping[str, Array], reward: float) -> Difference | None:
        """Return the difference between replay and record, or None if all bytes are equal."""
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


@dataclass(slots=True)
class Base:
    """Start of the record of an environment, and the actions since the start."""

    episodes: int
    row: int
    """First row in the buffer of recent actions."""
    options: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    actions: list[dict[str, Array]] = field(default_factory=list)
    """Actions after `pieces` and before the buffer of recent actions, [k, ...] per leaf."""
    nbytes: int = 0
    """Size of pieces and actions in bytes."""
    is_kept: bool = True
    start: int = 0
    """Index of the first step after the base."""
    calls: int = 0
    """Number of environment calls made before the base."""
    calls_at: list[int] = field(default_factory=list)
    pieces: list[StatePart] = field(default_factory=list)
    seed: int | None = None
    """See `EpisodeRecord`."""


class Journal:
    """Stores the actions of `n` environments since their bases, and counts their episodes.

    Recent actions of all environments are stored in one buffer, so a step costs one assignment per
    action leaf. Older actions are stored in one list per environment. When a state is saved, long
    lists are converted to immutable parts, which are written to disk only once.

    Args:
        columns: The arrays with the actions of a step, [n, ...] per leaf.

    Attributes:
        episodes: Number of episodes begun, by environment.
        has_begun: Whether the first episodes have begun.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = dict(columns)
        self._n = len(next(iter(columns.values())))
        nbytes = max(1, sum(column.nbytes for column in columns.values()))
        self._rows = int(np.clip(RECENT_NBYTES // nbytes, *RECENT_STEPS))
        # With canonical dtype objects, pickles of equal states are equal.
        self._recent = {
            key: np.empty((self._rows, *column.shape), np.dtype(column.dtype.str))
            for key, column in columns.items()
        }
        self._pairs = [(self._recent[key], column) for key, column in columns.items()]
        self._num_calls = 0
        self.begin(None)
        self.has_begun = False

    def begin(self, options: dict[str, Any] | None, seeds: Mapping[int, int] = NO_SEEDS) -> None:
        """Record that all environments begin their first episodes; see `ended`."""
        self._first = self._row = 0
        self._valid = self.has_begun = True
        self.episodes = [1] * self._n
        self._episode_starts = [0] * self._n
        self._bases = [self._base_of(i, options, seed=seeds.get(i)) for i in range(self._n)]

    def _base_of(
        self,
        i: int,
        options: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> Base:
        """Return a base at the current step of an environment."""
        if options is not None:
            with suppress(EnvError):  # The error is reported when a state is saved.
                options = plain_copy(options, "options")  # The environment may modify the original.
        begun, start = self.episodes[i], self._first + self._row
        return Base(begun, self._row, options, own, start=start, calls=self._num_calls, seed=seed)

    def given_seed(self, i: int) -> int | None:
        """Return the seed of the running episode; None if it is derived from the root seed."""
        return self._bases[i].seed if self._bases[i].episodes == self.episodes[i] else None

    def invalidate(self) -> None:
        """Mark the journal as invalid after a failed call."""
        self._valid = False

    def record(self) -> None:
        """Store the actions of the last step."""
        row = self._row
        for recent, column in self._pairs:
            recent[row] = column
        self._row = row + 1
        if self._row == self._rows:
            self._distribute()

    def ended(
        self,
        indices: Iterable[int],
        continuing: Sequence[int] = (),
        options: dict[str, Any] | None = None,
        seeds: Mapping[int, int] = NO_SEEDS,
    ) -> None:
        """Record that episodes ended in the last recorded step and new ones began.

        Args:
            indices: Indices of the environments.
            continuing: Environments whose new episode continues the same game. Replays of these
                episodes must include the previous episode.
            options: Options of the resets.
            seeds: Seeds of the new episodes that are not derived from the root seed, by index.
        """
        for i in indices:
            self.episodes[i] += 1
            self._episode_starts[i] = self._first + self._row
            if i not in continuing:
                self._bases[i] = self._base_of(i, options, seed=seeds.get(i))

    def rebase(self, i: int, own: dict[str, Any]) -> None:
        """Move the base of an environment to the current state."""
        self._bases[i] = self._base_of(i, own=own, seed=self.given_seed(i))

    def called(self, count: int) -> None:
        """Record that all environments received `count` calls after the last recorded step."""
        self._num_calls += count
        for base in self._bases:
            base.calls_at += [self._first + self._row - base.start] * count

    @property
    def nbytes(self) -> int:
        """Size in bytes of the stored actions, without the buffer of recent actions."""
        return sum(base.nbytes for base in self._bases)

    def state(self, obs: Mapping[str, Array], rewards: Array) -> list[dict[str, Any]]:
        """Return the records of all environments as plain values and arrays.

        Args:
            obs: The current observations, [n, ...] per leaf.
            rewards: The last rewards, [n].

        Raises:
            EnvError: If the last call failed, or the options of a reset are not plain values.
        """
        self._distribute()
        envs = []
        for i, base in enumerate(self._bases):
            if sum(map(nbytes_of, base.actions)) >= PIECE_NBYTES:
                base.pieces.append(piece_of(joined(base.actions)))
                base.actions = []
            env = asdict(replace(self.record_of(i, obs, rewards), pieces=[]))
            env["options"] = plain_copy(env["options"], f"reset options of environment {i}")
            envs.append({**env, "pieces": list(base.pieces)})
        return envs

    def record_of(self, i: int, obs: Mapping[str, Array], rewards: Array) -> EpisodeRecord:
        """Return the data to restore an environment.

        Args:
            i: Index of the environment.
            obs: The current observations, [n, ...] per leaf.
            rewards: The last rewards, [n].

        Raises:
            EnvError: If the last call failed.
        """
        if not self._valid:
            raise EnvError(
                "the state of the environments is unknown, because the last call failed: call "
                "reset() or load_state_dict() first"
            )
        base = self._bases[i]
        recent = {key: rows[base.row : self._row, i] for key, rows in self._recent.items()}
        return EpisodeRecord(
            episodes=self.episodes[i],
            base_episodes=base.episodes,
            steps=self._first + self._row - self._episode_starts[i],
            options=base.options,
            own=base.own,
            is_kept=base.is_kept,
            actions=joined([*base.actions, recent]),
            obs={key: np.array(column[i]) for key, column in obs.items()},
            reward=float(rewards[i]),
            calls=base.calls,
            calls_at=list(base.calls_at),
            pieces=list(base.pieces),
            seed=base.seed,
        )

    def read_state(
        self, state: object, obs: Mapping[str, Array]
    ) -> tuple[int | None, list[EnvCall], list[EpisodeRecord]]:
        """Read the root seed, the calls and the records (if any) from a saved state.

        Args:
            state: Result of `MazeVectorEnv.state_dict`.
            obs: Observation arrays of these environments, [n, ...] per leaf.

        Raises:
            EnvError: If the state is damaged, or the number of environments, the actions or the
                observations do not match.
        """
        n = self._n
        given = state if isinstance(state, dict) else {}
        root, envs = given.get("root_seed", ...), given.get("envs")
        if not isinstance(envs, list) or not (root is None or (type(root) is int and root >= 0)):
            expected = "expected root_seed and envs"
            raise EnvError(f"the state is not from a vector environment: {expected}")
        if root is None:
            return None, [], []
        if len(envs) != n:
            raise EnvError(
                f"the state has {len(envs)} environments, expected {n}: resume with the same "
                "number of environments"
            )
        calls = calls_from(given.get("calls"))
        found = [record_from(env, i, self._columns, obs) for i, env in enumerate(envs)]
        for i, record in enumerate(found):
            check_calls(record, i, len(calls))
        return root, calls, found

    def load(self, records: Sequence[EpisodeRecord]) -> None:
        """Load the records after all environments were restored."""
        self.begin(None)
        self.episodes = [record.episodes for record in records]
        self._episode_starts = [-record.steps for record in records]
        for i, record in enumerate(records):
            start = record.base_episodes, 0, record.options, record.own
            kept = [record.actions], nbytes_of(record.all_actions()), record.is_kept
            calls = -record.num_actions, record.calls, list(record.calls_at)
            self._bases[i] = Base(*start, *kept, *calls, list(record.pieces), record.seed)
            self._num_calls = record.calls + len(record.calls_at)

    def _distribute(self) -> None:
        """Move the recent actions to the lists of the environments."""
        for i, base in enumerate(self._bases):
            if base.is_kept and base.row < self._row:
                rows = {key: x[base.row : self._row, i].copy() for key, x in self._recent.items()}
                base.actions.append(rows)
                base.nbytes += nbytes_of(rows)
            base.row = 0
        self._first += self._row
        self._row = 0
        while self.nbytes > MAX_NBYTES:
            longest = max(self._bases, key=lambda base: base.nbytes)
            longest.actions, longest.pieces = [], []
            longest.nbytes, longest.is_kept = 0, False


def nbytes_of(actions: Mapping[str, Array]) -> int:
    """Return the size of actions in bytes."""
    return sum(part.nbytes for part in actions.values())


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Concatenate actions, [k, ...] per leaf."""
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def piece_of(actions: dict[str, Array]) -> StatePart:
    """Return actions as a part of a state. The actions must not be modified later."""
    digest = hashlib.sha256()
    for column in actions.values():
        digest.update(column.tobytes())
    return StatePart(digest.hexdigest()[:32], partial(dict, actions))


def record_from(
    given: object,
    i: int,
    actions: Mapping[str, Array],
    obs: Mapping[str, Array],
) -> EpisodeRecord:
    """Check and return the record of environment i."""
    if isinstance(given, dict):
        given = {"seed": None, **given}  # Version 0.3.0 does not store it.
    expected = sorted(item.name for item in fields(EpisodeRecord))
    if not isinstance(given, dict) or sorted(given) != expected:
        raise EnvError(f"the state of environment {i} is invalid: expected the keys {expected}")
    record = EpisodeRecord(**given)
    counts = [record.steps, record.base_episodes - 1, record.episodes - record.base_episodes]
    counts += [] if record.seed is None else [record.seed]
    for name in ("options", "own"):
        if not isinstance(given[name], dict | None):
            raise EnvError(f"{name} of environment {i} is {given[name]!r}: expected a dict or None")
    if type(record.reward) is not float or not all(type(k) is int and k >= 0 for k in counts):
        raise EnvError(f"the counts of environment {i} are damaged: {counts}, {record.reward!r}")
    name, pieces = f"actions of environment {i}", given["pieces"]
    if not isinstance(pieces, list) or not all(type(piece) is StatePart for piece in pieces):
        raise EnvError(f"the {name} in the state are damaged: pieces {pieces!r}")
    record.pieces = [
        piece_of(checked_columns(piece.read(), actions, name, True)) for piece in pieces
    ]
    record.actions = checked_columns(record.actions, actions, name, True)
    record.obs = checked_columns(record.obs, obs, f"observation of environment {i}", False)
    return record


def check_calls(record: EpisodeRecord, i: int, num_calls: int) -> None:
    """Check the positions of the calls in the record of environment i.

    Raises:
        EnvError: If environment i did not receive all calls in order, between its actions.
    """
    before, at = record.calls, record.calls_at
    is_valid = type(before) is int and before >= 0 and isinstance(at, list)
    is_valid = is_valid and all(type(k) is int and k >= 0 for k in at) and at == sorted(at)
    if is_valid and at and record.is_kept:
        is_valid = at[-1] <= record.num_actions
    if not is_valid or before + len(at) != num_calls:
        raise EnvError(
            f"the calls of environment {i} in the state are damaged: calls = {before!r}, calls_at "
            f"= {at!r}; expected {num_calls} calls in the order of its {record.num_actions} actions"
        )


def checked_columns(
    given: Any, expected: Mapping[str, Array], name: str, any_length: bool
) -> dict[str, Array]:
    """Return copies of arrays after checking that they match the environments.

    Raises:
        EnvError: If a key, dtype, shape or length differs.
    """
    keys = sorted(given) if isinstance(given, dict) else given
    if keys != sorted(expected):
        raise EnvError(f"the {name} in the state have the keys {keys}, not {sorted(expected)}")
    lengths = set()
    for key, column in expected.items():
        array = given[key]
        if not isinstance(array, (np.ndarray, np.generic)) or array.dtype != column.dtype:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
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
