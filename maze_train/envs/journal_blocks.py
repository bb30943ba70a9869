"""Blocks of actions of long episodes: written once, and freed when no episode needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from maze_train.core.errors import EnvError
from maze_train.envs.vector import Array

MERGED_BLOCKS = 8
"""Blocks of one level that become one of the next level."""


@dataclass(eq=False)
class Block:
    """Actions of the environments with long records in consecutive steps; never changed."""

    first: int
    """The first step."""
    members: list[int]
    """The environments."""
    columns: dict[str, Array]
    """Their actions, [rows, len(members), ...] per part; zero before the base of an environment."""
    level: int = 0
    """How many times blocks were merged into it."""

    @property
    def rows(self) -> int:
        """Number of steps."""
        return len(next(iter(self.columns.values())))

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.first + self.rows

    @cached_property
    def version(self) -> str:
        """Digest of the content."""
        digest = hashlib.sha256()
        for column in self.columns.values():
            digest.update(np.ascontiguousarray(column).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()[:32]

    @cached_property
    def places(self) -> dict[int, int]:
        """The column of each environment."""
        return {i: place for place, i in enumerate(self.members)}

    def of(self, members: list[int]) -> Block:
        """The actions of fewer environments."""
        chosen = [self.places[i] for i in members]
        columns = {key: column[:, chosen] for key, column in self.columns.items()}
        return Block(self.first, members, columns, self.level)


def merged(blocks: Sequence[Block], level: int) -> Block:
    """One block of consecutive ones; the last one has every environment that is needed."""
    members, columns = blocks[-1].members, {}
    for key, last in blocks[-1].columns.items():
        rows = sum(block.rows for block in blocks)
        columns[key] = column = np.zeros((rows, *last.shape[1:]), last.dtype)
        for block in blocks:
            its = [i for i in members if i in block.places]
            start = block.first - blocks[0].first
            to, source = [blocks[-1].places[i] for i in its], [block.places[i] for i in its]
            column[start : start + block.rows, to] = block.columns[key][:, source]
    return Block(blocks[0].first, members, columns, level)


def blocks_from(given: Any, columns: Mapping[str, Array]) -> list[Block]:
    """The blocks of a state, checked.

    Raises:
        EnvError: If they are damaged.
    """
    blocks: list[Block] = []
    n = len(next(iter(columns.values())))
    try:
        for part in sorted(given.values(), key=lambda part: int(part["first"])):
            members = [int(i) for i in part["members"]]
            shaped = {
                key: np.empty((0, len(members), *column.shape[1:]), column.dtype)
                for key, column in columns.items()
            }
            actions = checked_columns(part["columns"].read(), shaped, "actions of a block", True)
            blocks.append(Block(int(part["first"]), members, actions, int(part["level"])))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvError(f"the actions that environments share are damaged: {error!r}") from error
    ends = [block.first for block in blocks[1:]] + [min(0, blocks[-1].end)] if blocks else []
    are_members = all(0 <= i < n for block in blocks for i in block.members)
    if not are_members or [block.end for block in blocks] != ends:
        raise EnvError("the actions that environments share are damaged: steps are missing")
    return blocks


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
