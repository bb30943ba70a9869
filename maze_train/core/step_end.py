"""Results of one vector step, with an end code per environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Rows = TypeVar("Rows", npt.NDArray[Any], "Tensor")


class StepEnd(IntEnum):
    """Codes in the column `end`, uint8; codes up to TRUNCATED mark transitions."""

    RUNNING = 0
    """The episode continues."""

    TERMINATED = 1
    """The step led to a terminal state, possibly with truncation in the same step."""

    TRUNCATED = 2
    """The episode was truncated, for example by a time limit, in a nonterminal state."""

    DROPPED = 3
    """Not a transition: the episode was dropped (failed worker, skipped non-finite value). The next
    observation begins a new episode."""

    RESET_ONLY = 4
    """Not a transition: reset step of a NEXT_STEP environment."""

    WAITING = 5
    """Not a transition: the agent does not act in this step, and its episode continues."""


RUNNING, TERMINATED, TRUNCATED, DROPPED, RESET_ONLY, WAITING = (int(code) for code in StepEnd)
"""Codes as plain integers; comparisons with arrays are ten times faster than for enum members."""


def end_codes(
    terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Return end codes from the flags of transitions; termination takes precedence."""
    codes = truncated.view(np.uint8) * np.uint8(TRUNCATED)
    codes[terminated] = TERMINATED
    return codes


def is_transition(end: Rows) -> Rows:
    """Return a mask of the rows that are transitions."""
    rows: Rows = end <= TRUNCATED
    return rows


def is_terminated(end: Rows) -> Rows:
    """Return a mask of the rows that ended in a terminal state."""
    rows: Rows = end == TERMINATED
    return rows


def is_truncated(end: Rows) -> Rows:
    """Return a mask of the rows that were truncated."""
    rows: Rows = end == TRUNCATED
    return rows


def has_ended(end: Rows) -> Rows:
    """Return a mask of the rows that are the last transition of their episode."""
    rows: Rows = (end == TERMINATED) | (end == TRUNCATED)
    return rows


def is_followed_by_new(end: Rows) -> Rows:
    """Return a mask of the rows followed by a new episode, with a reset of recurrent states."""
    rows: Rows = (end != RUNNING) & (end != WAITING)
    return rows


@dataclass(slots=True)
class EpisodeEnd:
    """The end of an episode of one environment."""

    env: int
    """Index of the environment."""

    info: dict[str, Any]
    """Info of the last step: the whole mapping, or the requested values keyed by key. The info is
    copied before the reset."""

    agent_returns: dict[str, float] = field(default_factory=dict)
    """Undiscounted return of each agent of a multi-agent environment."""

    counted: tuple[float, int] | None = None
    """Raw return and length of the game, if the environment is monitored and the game ended."""


@dataclass(slots=True)
class StepBatch(Generic[Rows]):
    """Results of one step of n environments: arrays, or tensors of a simulator."""

    obs: Rows | dict[str, Rows]
    """Observations for the next actions, `[n, ...]`."""

    rewards: Rows
    """Rewards, `[n]`."""

    end: Rows
    """Codes of `StepEnd`, `[n]`."""

    final_obs: Rows | dict[str, Rows] | None = None
    """Final observations of the episodes that ended, `[n, ...]`, valid until the next step; other
    rows are undefined. None: no episode ended."""

    ends: Sequence[EpisodeEnd] = ()
    """Episodes that ended in this step."""

    has_gaps: bool = False
    """Whether some rows are not transitions."""

    infos: Sequence[tuple[int, dict[str, Any]]] = ()
    """Infos of this step by environment index, if infos of every step are reported."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Third-party vector environments: infos in Gymnasium's vector format. Simulators: metrics by
    name, either `[n]` (valid for ended episodes) or 0-d (mean over all environments)."""

    @property
    def terminated(self) -> Rows:
        """Whether the step led to a terminal state, `[n]`."""
        return is_terminated(self.end)

    @property
    def truncated(self) -> Rows:
        """Whether the episode was truncated in a nonterminal state, `[n]`."""
        return is_truncated(self.end)
