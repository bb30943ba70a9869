"""Settings of opponents in self-play."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from maze_train.core.checks import check_fields
from maze_train.core.conversion import convert_fields
from maze_train.core.errors import ConfigError

SNAPSHOT = "@"
"""Stands in the ids of snapshots between that of the policy and a number."""


@dataclass(kw_only=True)
class OpponentsConfig:
    """Earlier versions of a policy, its snapshots, against which it plays in training."""

    add_every: int = 10
    """Epochs from one snapshot to the next; 0: the win rate alone says it. The first one is the
    policy that training begins with."""

    at_win_rate: float = 0.0
    """Share of points against the snapshots, since the last one was added, at which the next one
    is: 1 for an episode with a larger return than the opponent (of its team, see `env.teams`), 0.5
    for an equal one; 0: never."""

    least_episodes: int = 50
    """Episodes against snapshots that this share needs. >= 1."""

    keep: int = 20
    """Newest snapshots that are kept. >= 1."""

    draw: Literal["latest", "uniform", "by_strength"] = "uniform"
    """Rule by which opponents are drawn: the newest snapshot; all alike; by_strength: with weight
    (1 - w)^2, where w is the share of points against it."""

    share: float = 0.5
    """Share of the episodes against snapshots; in the others the policy plays all seats. From 0
    to 1."""

    def __post_init__(self) -> None:
        convert_fields(self)
        check_fields(self, 0, "add_every", "at_win_rate", "share")
        check_fields(self, 1, "keep", "least_episodes")
        for key in ("at_win_rate", "share"):
            if getattr(self, key) > 1:
                raise ConfigError(key, "expected a number from 0 to 1", getattr(self, key))
        if not self.add_every and not self.at_win_rate:
            problem = "no snapshot would be added; set it, or at_win_rate"
            raise ConfigError("add_every", problem, self.add_every)
