"""Where the members of a population play: what trainers ask for, and its form in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.rollout.members import PairDraws
from maze_train.rollout.population import ESRolloutWorkerWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.members import MemberResult
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.rollout.population import MemberSettings

__all__ = ["ESDistributedRollouts", "ESDummyDistributedRollouts", "ESRolloutResult", "trained_size"]


@dataclass(frozen=True, slots=True)
class ESRolloutResult:
    """The episodes of an antithetic pair."""

    pair: int
    """Number of the pair in its iteration."""

    noise_index: int
    """Where its noise ε begins in the noise table."""

    members: tuple[MemberResult, MemberResult]
    """What θ + σε and θ - σε did."""

    @property
    def lost(self) -> bool:
        """Whether one of the episodes was given up; then neither counts."""
        return any(member.lost for member in self.members)

    @property
    def num_steps(self) -> int:
        """Environment steps of both."""
        return sum(member.length for member in self.members)


class ESDistributedRollouts(ABC):
    """Plays the pairs of an iteration, somewhere, in any order, and tells of them in theirs.

    The result of a pair follows from the policy, the deviation of the noise, the iteration and the
    number of the pair. So the numbers of training do not depend on who plays.

    Args:
        noise_table: The noise.
        settings: How members act.

    Attributes:
        steps_made: Environment steps made so far, those included that nobody asked for.
    """

    def __init__(self, noise_table: SharedNoiseTable, settings: MemberSettings) -> None:
        self.noise_table = noise_table
        self.settings = settings
        self.steps_made = 0
        self._draws: PairDraws | None = None
        self._results: dict[int, MemberResult] = {}

    @property
    def worker_restarts(self) -> int:
        """How many times processes were started again."""
        return 0

    @property
    @abstractmethod
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""

    @abstractmethod
    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Get the policy, before the first iteration.

        Args:
            model: The policy as it is trained.
            make_model: Builds one like it, which may be sent to another process.

        Raises:
            ConfigError: If there is nothing to perturb, or the noise table is too small for it.
        """
        dim = trained_size(model)
        if not dim:
            raise ConfigError("model", "no parameter of the policy can be trained", "0 parameters")
        self.noise_table.check_dim(dim)
        self._draws = PairDraws(self.settings.seed, self.noise_table, dim)

    def generate_rollouts(
        self,
        iteration: int,
        noise_stddev: float,
        expected: int,
        idle: Callable[[], object] = lambda: None,
    ) -> Generator[ESRolloutResult, None, None]:
        """The pairs 0, 1, 2, ... of an iteration, without an end; close it when it is enough.

        Args:
            iteration: Number of the iteration, >= 0. The policy plays as it is at its beginning.
            noise_stddev: Deviation σ of the perturbation, >= 0.
            expected: Pairs that are needed at least. Further ones are begun when they are asked
                for, a few at a time.
            idle: Called again and again meanwhile; what it raises goes through.

        Raises:
            EnvError: If an environment raises or returns something invalid.
            WorkerError: If a process fails and is not started again.
        """
        assert self._draws is not None, "begin() comes first"
        self._results.clear()
        self._begin_iteration(iteration, noise_stddev)
        try:
            for pair in count():
                # All that can play at once, so that none waits for the next question.
                ahead = 0 if pair < expected else self._capacity // 2
                limit = 2 * max(expected, pair + 1 + ahead)
                while not {2 * pair, 2 * pair + 1} <= self._results.keys():
                    for result in self._advance(limit):
                        self._results[result.member] = result
                    idle()
                members = (self._results.pop(2 * pair), self._results.pop(2 * pair + 1))
                noise_index = self._draws.draw(iteration, pair).noise_index
                yield ESRolloutResult(pair, noise_index, members)
        finally:
            self._end_iteration()

    @property
    @abstractmethod
    def _capacity(self) -> int:
        """Members that can play at a time."""

    @abstractmethod
    def _begin_iteration(self, iteration: int, noise_stddev: float) -> None:
        """Take the policy over as it is now."""

    @abstractmethod
    def _advance(self, limit: int) -> list[MemberResult]:
        """Go on playing for a while; returns what came of it.

        Args:
            limit: Members 0, ..., limit - 1 are to play; it never falls within an iteration.
        """

    @abstractmethod
    def _end_iteration(self) -> None:
        """Stop playing; what has not ended is dropped."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments; calling it again does nothing."""


class ESDummyDistributedRollouts(ESDistributedRollouts):
    """All members play in this process.

    Args:
        slots: The environments.
        noise_table: The noise.
        settings: How members act.
    """

    def __init__(
        self, slots: EnvSlots, noise_table: SharedNoiseTable, settings: MemberSettings
    ) -> None:
        super().__init__(noise_table, settings)
        self._slots: EnvSlots | None = slots
        self._spaces = slots.env_observation_space, slots.single_action_space
        self._worker: ESRolloutWorkerWrapper | None = None
        self._next = 0

    @property
    def spaces(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._spaces

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Get the policy."""
        super().begin(model, make_model)
        assert self._slots is not None
        self._worker = ESRolloutWorkerWrapper(
            self._slots, model, self.noise_table, self.settings, self._count_steps
        )

    def _count_steps(self, steps: int) -> None:
        self.steps_made += steps

    @property
    def _capacity(self) -> int:
        return 0 if self._slots is None else len(self._slots)

    def _begin_iteration(self, iteration: int, noise_stddev: float) -> None:
        assert self._worker is not None
        self._worker.begin(iteration, noise_stddev)
        self._next = 0

    def _advance(self, limit: int) -> list[MemberResult]:
        assert self._worker is not None
        self._worker.add(range(self._next, limit))
        self._next = max(self._next, limit)
        return self._worker.step()

    def _end_iteration(self) -> None:
        """Nothing plays between two steps."""

    def close(self) -> None:
        """Close the environments; calling it again does nothing."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()


def trained_size(model: nn.Module) -> int:
    """Number of parameters that can be trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
