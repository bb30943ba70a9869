"""One step of many environments, and how it ended: one code per environment, up to the loss."""

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
    """Codes of the column `end`, uint8; those up to TRUNCATED are transitions."""

    RUNNING = 0
    """The episode continues."""

    TERMINATED = 1
    """The step led to a terminal state; also where the episode was truncated in the same step."""

    TRUNCATED = 2
    """The episode was cut off (time limit) in a state that is not terminal."""

    DROPPED = 3
    """No transition: the episode was given up (worker lost, non-finite value skipped). The next
    observation is the first of a new episode."""

    RESET_ONLY = 4
    """No transition: a NEXT_STEP environment only began its next episode."""

    WAITING = 5
    """No transition: the agent does not act in this step, and its episode continues."""


RUNNING, TERMINATED, TRUNCATED, DROPPED, RESET_ONLY, WAITING = (int(code) for code in StepEnd)
"""The codes as plain integers, which arrays compare ten times as fast as members of an enum."""


def end_codes(
    terminated: npt.NDArray[np.bool_], truncated: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Return the codes of transitions from their two flags; terminated wins."""
    codes = truncated.view(np.uint8) * np.uint8(TRUNCATED)
    codes[terminated] = TERMINATED
    return codes


def is_transition(end: Rows) -> Rows:
    """Return which rows are transitions."""
    rows: Rows = end <= TRUNCATED
    return rows


def is_terminated(end: Rows) -> Rows:
    """Return which rows led to a terminal state."""
    rows: Rows = end == TERMINATED
    return rows


def is_truncated(end: Rows) -> Rows:
    """Return which rows were truncated."""
    rows: Rows = end == TRUNCATED
    return rows


def has_ended(end: Rows) -> Rows:
    """Return which rows are the last transition of their episode."""
    rows: Rows = (end == TERMINATED) | (end == TRUNCATED)
    return rows


def is_followed_by_new(end: Rows) -> Rows:
    """Return after which rows an episode begins, so that a recurrent state starts at zero."""
    rows: Rows = (end != RUNNING) & (end != WAITING)
    return rows


@dataclass(slots=True)
class EpisodeEnd:
    """The end of an episode of one environment."""

    env: int
    """Index of the environment."""

    info: dict[str, Any]
    """Info of the last step, copied before the environment is reset: all of it, or the numbers that
    were asked for, by key."""

    agent_returns: dict[str, float] = field(default_factory=dict)
    """Undiscounted return of each agent of a multi-agent environment."""

    counted: tuple[float, int] | None = None
    """Raw return and length of the game, if the environment is monitored and the game is over."""


@dataclass(slots=True)
class StepBatch(Generic[Rows]):
    """Results of one step of n environments: arrays, or tensors of a simulator."""

    obs: Rows | dict[str, Rows]
    """Observations to act on, `[n, ...]`."""

    rewards: Rows
    """`[n]`."""

    end: Rows
    """Codes of `StepEnd`, `[n]`."""

    final_obs: Rows | dict[str, Rows] | None = None
    """Last observations of the episodes that ended, `[n, ...]`, valid until the next step; other
    rows mean nothing. None: no episode ended."""

    ends: Sequence[EpisodeEnd] = ()
    """The episodes that ended in the step."""

    has_gaps: bool = False
    """Whether there are rows that are not transitions."""

    infos: Sequence[tuple[int, dict[str, Any]]] = ()
    """Infos of this step by index of the environment, if infos of every step are reported."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """The same in gymnasium's form, from vector environments of other packages; numbers by name
    from simulators: `[n]`, which count where an episode ended, or 0-d: a mean over all."""

    @property
    def terminated(self) -> Rows:
        """Whether the step led to a terminal state, `[n]`."""
        return is_terminated(self.end)

    @property
    def truncated(self) -> Rows:
        """Whether the episode was truncated after the step, in a state that is not terminal."""
        return is_truncated(self.end)
