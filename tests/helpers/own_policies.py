"""Custom policies."""

from __future__ import annotations

from typing import Any


class Counting:
    """Stateful policy with the actions -1, 0, 1 in turn."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.t = 0

    def reset(self, seed: int) -> None:
        """Reset the counter."""
        self.t = 0

    def act(self, observation: Any) -> int:
        """Return the next action."""
        self.t += 1
        return (self.first + self.t - 1) % 3 - 1


def always_one(observation: Any) -> int:
    """Return action 1 for every observation."""
    return 1


class TakesOne:
    """Policy that takes one stone from a heap."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self._contains = observation_space.contains

    def act(self, observation: Any) -> int:
        assert self._contains(observation)
        return 0


class AlwaysOne(TakesOne):
    """Policy that takes action 1."""

    def act(self, observation: Any) -> int:
        return 1


class CountsTurns(TakesOne):
    """Policy that takes one stone from a heap and counts its turns in the episode."""

    def reset(self) -> None:
        self.turns = 0

    def act(self, observation: Any) -> int:
        if isinstance(observation, dict):  # no referee
            assert observation["observation"][1] // 2 == self.turns
            self.turns += 1
        return super().act(observation)


class Nothing:
    """Policy without `act`."""

    def __init__(self, *spaces: Any) -> None: ...
