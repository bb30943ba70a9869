"""The trainer of evolution strategies."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from maze_train.algorithms.es.events import ESEvents, PopulationEvents
from maze_train.algorithms.es.learner import EvaluatedPopulation
from maze_train.errors import TrainingError
from maze_train.learner.config import Progress, scheduled_value
from maze_train.rollout.episodes import FinishedEpisodes
from maze_train.rollout.es_rollouts import trained_size
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.algorithms.es.config import ESAlgorithmConfig
    from maze_train.events import Statistics
    from maze_train.rollout.es_rollouts import ESDistributedRollouts, ESRolloutResult


MOST_LOST = 10
"""Pairs that may be lost in an update, for each episode that it needs or pair that it has."""


class ESTrainer(Trainer):
    """Lets perturbed copies of the policy play, and learns from their returns, in turns.

    An update learns from the pairs 0, 1, 2, ... of its iteration, until there are
    `n_rollouts_per_update` episodes and `n_timesteps_per_update` steps. Pairs of which an episode
    was lost are passed over. See `ESLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The policy that the learner updates.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        rollouts: Where the population plays; has begun with `model`.
    """

    algorithm_config: ESAlgorithmConfig

    def __init__(self, *args: Any, rollouts: ESDistributedRollouts) -> None:
        super().__init__(*args)
        self.rollouts = rollouts
        self._expected = self.algorithm_config.n_rollouts_per_update // 2
        self._trained_steps = 0
        sizes = {policy: trained_size(own) for policy, own in modules_of(self.model).items()}
        self._sizes = {policy: size for policy, size in sizes.items() if size}

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Play the pairs of an iteration, and learn from them."""
        started = time.perf_counter()
        noise_stddev = scheduled_value(self.algorithm_config.noise_stddev, progress)
        episodes = FinishedEpisodes()
        pairs = self._play(noise_stddev, episodes)
        played = time.perf_counter()
        episodes.record(statistics)
        statistics.merge(self.learners.update(self._populations(pairs), progress))
        num_steps = sum(pair.num_steps for pair in pairs)
        self._trained_steps += num_steps
        dropped = self.rollouts.steps_made - self._trained_steps
        statistics.record(ESEvents.noise_stddev, noise_stddev)
        statistics.record(PopulationEvents.steps_dropped, float(dropped))
        statistics.record(TimeEvents.collect_s, played - started)
        statistics.record(TimeEvents.update_s, time.perf_counter() - played)
        return num_steps

    def _populations(self, pairs: list[ESRolloutResult]) -> dict[str, EvaluatedPopulation]:
        """What each policy learns from."""
        table, members = self.rollouts.noise_table, getattr(self.model, "members", {})
        found, offset = {}, 0
        for policy, size in self._sizes.items():
            found[policy] = EvaluatedPopulation(pairs, table, members.get(policy, ()), offset)
            offset += size
        return found

    def _play(self, noise_stddev: float, episodes: FinishedEpisodes) -> list[ESRolloutResult]:
        """The pairs that the next update learns from."""
        config = self.algorithm_config
        restarts = self.rollouts.worker_restarts
        pairs: list[ESRolloutResult] = []
        num_steps = lost = 0
        results = self.rollouts.generate_rollouts(
            self.learners.weights_seq_no, noise_stddev, self._expected, self.interruption.check
        )
        with closing(results):
            for pair in results:
                if pair.lost:
                    lost += 1
                    episodes.lost += sum(member.lost for member in pair.members)
                    self._check_lost(lost, len(pairs))
                    continue
                pairs.append(pair)
                num_steps += pair.num_steps
                for member in pair.members:
                    episodes.returns.append(member.episode_return)
                    episodes.lengths.append(member.length)
                    if member.success == member.success:
                        episodes.successes.append(member.success)
                    episodes.add_agents({a: [own] for a, own in member.agent_returns.items()})
                enough = 2 * len(pairs) >= config.n_rollouts_per_update
                if enough and num_steps >= config.n_timesteps_per_update:
                    break
        self._expected = pair.pair + 1
        episodes.worker_restarts = self.rollouts.worker_restarts - restarts
        return pairs

    def _check_lost(self, lost: int, found: int) -> None:
        """Refuse to go on when nothing but lost episodes comes."""
        needed = self.algorithm_config.n_rollouts_per_update
        if lost > MOST_LOST * max(needed, found):
            raise TrainingError(
                f"an update of {needed} episodes lost {lost} pairs of "
                "them: the environments return numbers that are not finite, again and again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers, and what was counted."""
        return {
            **super().state_dict(),
            "noise_table": self.rollouts.noise_table.state_dict(),
            "steps_dropped": self.rollouts.steps_made - self._trained_steps,
            "expected": self._expected,
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Continue to count, with the same noise."""
        self.rollouts.noise_table.load_state_dict(state["noise_table"])
        self._expected = state["expected"]
        self._trained_steps = self.rollouts.steps_made - state["steps_dropped"]
