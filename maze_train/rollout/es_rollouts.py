"""Workers that play the members of a population, as trainers ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from maze_train.errors import ConfigError
from maze_train.rollout.episode_player import PlaySettings
from maze_train.rollout.members import PairDraws
from maze_train.rollout.player import PlayerPool
from maze_train.rollout.population import MemberAgent
from maze_train.rollout.slot_agent import EpisodeTask
from maze_train.rollout.weights import WeightsWriter, weights_nbytes
from maze_train.workers.places import Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

    from maze_train.rollout.episode_player import PlayedEpisode
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.rollout.player import MakeEnv
    from maze_train.rollout.population import MemberSettings
    from maze_train.workers.places import Place


REPORT_S = 0.005
"""Seconds for which results wait for others, while members play."""


@dataclass(frozen=True, slots=True)
class ESRolloutResult:
    """The episodes of an antithetic pair."""

    pair: int
    """Number of the pair in its iteration."""

    noise_index: int
    """Index of its noise ε in the noise table."""

    members: tuple[PlayedEpisode, PlayedEpisode]
    """Results of θ + σε and θ - σε."""

    @property
    def lost(self) -> bool:
        """Whether one of the episodes was given up; then neither counts."""
        return any(member.lost for member in self.members)

    @property
    def num_steps(self) -> int:
        """Environment steps of both."""
        return sum(member.length for member in self.members)


class ESDistributedRollouts(PlayerPool):
    """Plays the pairs of an iteration in any order, and returns their results in order.

    The result of a pair follows from the policy, the deviation of the noise, the iteration and the
    number of the pair. So the numbers of training do not depend on who plays.

    Workers get numbers of members and send back returns. Members of a worker that fails are
    given to others, or to the one that takes its place with `on_worker_failure="restart"`, and do
    the same again. One that fails again after that ends training: when an episode with its seed
    raised for the second time, or when the third worker died or hung with it.

    Args:
        env_factory: Builds an environment.
        num_envs: Environments of all workers together, >= 1, rounded up to equally many in each.
        noise_table: The noise.
        settings: How members act.
        place: Where they play; None: in this process.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.

    Raises:
        EnvError: If an environment can not be built; it is a WorkerError where a worker process
            fails.
        SpaceError: If the environments differ in their spaces.
    """

    def __init__(
        self,
        env_factory: MakeEnv,
        num_envs: int,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        place: Place | None = None,
        *,
        on_non_finite: str = "raise",
    ) -> None:
        self.noise_table = noise_table
        self.settings = settings
        self._draws: PairDraws | None = None
        self._writer: WeightsWriter | None = None
        super().__init__(env_factory, num_envs, PlaySettings(), place, on_non_finite, REPORT_S)

    def begin(self, model: nn.Module, make_model: Callable[[], nn.Module]) -> None:
        """Get the policy, before the first iteration.

        Args:
            model: The policy as it is trained.
            make_model: Builds one like it, in whatever process.

        Raises:
            ConfigError: If there is nothing to perturb, or the noise table is too small for it.
        """
        dim = trained_size(model)
        if not dim:
            raise ConfigError("model", "no parameter of the policy can be trained", "0 parameters")
        self.noise_table.check_dim(dim)
        self._draws = PairDraws(self.settings.seed, self.noise_table, dim)
        self._weights = self._pool.allocate(weights_nbytes(model))
        self._writer = WeightsWriter(model, self._weights.buffer)
        make_agent = Portable(partial(MemberAgent, make_model), "model")
        self._queue.set_up("set_agent", make_agent, self._weights, self.noise_table, self.settings)

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
            WorkerError: If a worker fails and is not started again.
        """
        assert self._draws is not None, "begin() comes first"
        assert self._writer is not None
        draws = self._draws

        def task_of(member: int) -> EpisodeTask:
            drawn = draws.draw(iteration, member // 2)
            return EpisodeTask(member, drawn.env_seed, drawn.action_seed, drawn.noise_index)

        self.waiting.clear()
        self._writer.publish(iteration)
        self._pool.publish(self._weights, self._writer.newest())
        self._queue.begin(
            noise_stddev, task_of=task_of, seed_of=lambda member: task_of(member).seed
        )
        try:
            for pair in count():
                # All that can play at once, so that none waits for the next question.
                ahead = 0 if pair < expected else self._queue.capacity // 2
                limit = 2 * max(expected, pair + 1 + ahead)
                while not {2 * pair, 2 * pair + 1} <= self.waiting.keys():
                    self._queue.advance(limit, self._note)
                    idle()
                members = (self.waiting.pop(2 * pair), self.waiting.pop(2 * pair + 1))
                yield ESRolloutResult(pair, draws.draw(iteration, pair).noise_index, members)
        finally:
            self._queue.drop()

    def close(self) -> None:
        """Close the environments; calling it again does nothing."""
        super().close()
        if self._writer is not None:
            self._weights.close()


def trained_size(model: nn.Module) -> int:
    """Number of parameters that can be trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
