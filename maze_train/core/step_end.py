"""Results of one vector step, with one code per environment for how the step ended."""

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
    """Codes of the column `end`, uint8; codes up to TRUNCATED are transitions."""

    RUNNING = 0
    """The episode continues."""

    TERMINATED = 1
    """The step led to a terminal state; also used if the episode was truncated in the same step."""

    TRUNCATED = 2
    """The episode was truncated, for example by a time limit, in a nonterminal state."""

    DROPPED = 3
    """Not a transition: the episode was abandoned (worker lost, non-finite value skipped). The next
    observation starts a new episode."""

    RESET_ONLY = 4
    """Not a transition: a NEXT_STEP environment only reset."""

    WAITING = 5
    """Not a transition: the agent does not act in this step, and its episode continues."""


RUNNING, TERMINATED, TRUNCATED, DROPPED, RESET_ONLY, WAITING = (int(code) for code in StepEnd)
"""The codes as plain integers, which compare ten times faster with arrays than enum members."""


def end_codes(
    terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Return the codes of transitions from their two flags; terminated takes precedence."""
    codes = truncated.view(np.uint8) * np.uint8(TRUNCATED)
    codes[terminated] = TERMINATED
    return codes


def is_transition(end: Rows) -> Rows:
    """Return a mask of the rows that are transitions."""
    rows: Rows = end <= TRUNCATED
    return rows


def is_terminated(end: Rows) -> Rows:
    """Return a mask of the rows that led to a terminal state."""
    rows: Rows = end == TERMINATED
    return rows


def is_truncated(end: Rows) -> Rows:
    """Return a mask of the rows whose episode was truncated."""
    rows: Rows = end == TRUNCATED
    return rows


def has_ended(end: Rows) -> Rows:
    """Return a mask of the rows that are the last transition of their episode."""
    rows: Rows = (end == TERMINATED) | (end == TRUNCATED)
    return rows


def is_followed_by_new(end: Rows) -> Rows:
    """Return a mask of the rows after which a new episode begins and recurrent states are reset."""
    rows: Rows = (end != RUNNING) & (end != WAITING)
    return rows


@dataclass(slots=True)
class EpisodeEnd:
    """The end of an episode of one environment."""

    env: int
    """Index of the environment."""

    info: dict[str, Any]
    """Info of the last step, copied before the reset: the whole mapping, or the requested values by
    key."""

    agent_returns: dict[str, float] = field(default_factory=dict)
    """Undiscounted return of each agent of a multi-agent environment."""

    counted: tuple[float, int] | None = None
    """Raw return and length of the game, if the environment is monitored and the game has ended."""


@dataclass(slots=True)
class StepBatch(Generic[Rows]):
    """Results of one step of n environments: arrays, or tensors of a simulator."""

    obs: Rows | dict[str, Rows]
    """Observations to act on, `[n, ...]`."""

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
    """Infos in gymnasium's vector format, from third-party vector environments; from simulators,
    metrics by name, either `[n]`, used where an episode ended, or 0-d, a mean over all."""

    @property
    def terminated(self) -> Rows:
        """Whether the step led to a terminal state, `[n]`."""
        return is_terminated(self.end)

    @property
    def truncated(self) -> Rows:
        """Whether the episode was truncated in a nonterminal state, `[n]`."""
        return is_truncated(self.end)
