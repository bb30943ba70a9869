"""The training loop of algorithms with a replay buffer: collect while learning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from maze_train.algorithms.off_policy.events import ReplayEvents, ReplayTimeEvents
from maze_train.errors import TrainingError
from maze_train.learner.config import scheduled_value
from maze_train.training.events import TimeEvents
from maze_train.training.models import modules_of
from maze_train.training.trainer import Trainer

if TYPE_CHECKING:
    from maze_train.algorithms.off_policy.config import OffPolicyConfig
    from maze_train.data.transitions import BaseReplayBuffer
    from maze_train.data.turn_replay import PolicyReplayBuffers
    from maze_train.events import Event, Statistics
    from maze_train.learner.config import Progress, Schedule
    from maze_train.rollout.collector import RolloutCollector
    from maze_train.rollout.initial_policies import GivenPolicy, RandomPolicy
    from maze_train.rollout.random_agents import RandomAgents
    from maze_train.rollout.turn_collector import TurnCollector


class OffPolicy(Trainer):
    """Base of trainers that step environments, and learn from what was stored before.

    The gradient steps that are due for the transitions of one update are taken in the next one,
    while its environments are on their way. So processes that step environments and the learner
    work at the same time, and the numbers are the same when they do not. See
    `OffPolicyLearner`.

    Args:
        config: Settings of the algorithm.
        learners: The learners.
        model: The model that the learner updates and the collector acts with.
        services: Tracker, evaluator, model selection, limits, checkpoints.
        collector: Collects rollouts, of several agents by policy.
        replay_buffer: Holds transitions.
        initial_policy: Policy that acts until `initial_buffer_size` transitions were collected; of
            several agents, in so many steps of the environments.
    """

    algorithm_config: OffPolicyConfig
    model: Any

    def __init__(
        self,
        *args: Any,
        collector: RolloutCollector | TurnCollector,
        replay_buffer: BaseReplayBuffer | PolicyReplayBuffers,
        initial_policy: RandomPolicy | GivenPolicy | RandomAgents,
    ) -> None:
        super().__init__(*args)
        self.collector: Any = collector
        self.replay_buffer: Any = replay_buffer
        self.gradient_steps = 0
        self._initial_policy = initial_policy
        self._stored = len(replay_buffer)
        # Those among the stored transitions that gradient steps are due for.
        self._learned_from = 0

    def update_once(self, progress: Progress, statistics: Statistics) -> int:
        """Step the environments, and learn meanwhile."""
        started = time.perf_counter()
        update_s = 0.0

        def learn() -> None:
            nonlocal update_s
            update_s = self._learn(progress, statistics)

        if self._fills_buffer:
            rollout, episodes = self.collector.collect(self._initial_policy)
        else:
            rollout, episodes = self.collector.collect(self.model, meanwhile=learn)
        episodes.record(statistics)
        steps: int = episodes.steps
        self.check_lost(steps)
        self.replay_buffer.add_rollout(rollout)
        self._stored += steps
        if not self._fills_buffer:
            self._learned_from += steps
        self.learners.foreach_learner(lambda learner: learner.observe(rollout))  # type: ignore[attr-defined]  # an OffPolicyLearner
        statistics.record(ReplayEvents.size, float(len(self.replay_buffer)))
        statistics.record(TimeEvents.collect_s, time.perf_counter() - started - update_s)
        statistics.record(TimeEvents.env_s, self.collector.env_s)
        statistics.record(TimeEvents.update_s, update_s)
        return steps

    def explore(
        self, how: Event, setting: float | Schedule, progress: Progress, statistics: Statistics
    ) -> None:
        """Set a buffer of the models that says how they explore, and is saved with the weights.

        It is 0 for models that do not learn, which act as they would without training.

        Args:
            how: The metric, which has the name of the buffer.
            setting: Its value over the run.
            progress: Progress of training.
            statistics: Statistics of the update.
        """
        value, learner = scheduled_value(setting, progress), self.learners.first
        for key, module in modules_of(self.model).items():
            if hasattr(module, how.name):  # all but those without networks
                getattr(module, how.name).fill_(value if learner.may_learn(key) else 0.0)
        statistics.record(how, value)

    @property
    def _fills_buffer(self) -> bool:
        return self._stored < self.algorithm_config.initial_buffer_size

    @property
    def gradient_steps_due(self) -> int:
        """Gradient steps that are due for the transitions that were collected."""
        due = int(self._learned_from * self.algorithm_config.update_to_data_ratio)
        return due - self.gradient_steps

    def _learn(self, progress: Progress, statistics: Statistics) -> float:
        """Take the gradient steps that are due; returns the seconds that it took."""
        started = time.perf_counter()
        buffer, sample_s = self.replay_buffer, 0.0
        buffer.set_progress(progress.fraction)
        for _ in range(self.gradient_steps_due):
            before = time.perf_counter()
            batch = buffer.sample_batch(self.algorithm_config.batch_size)
            sample_s += time.perf_counter() - before
            statistics.merge(self.learners.update(batch, progress))
            self.gradient_steps += 1
            if getattr(batch, "weights", None) is not None:
                errors = self.learners.foreach_learner(lambda learner: learner.errors)[0]  # type: ignore[attr-defined]  # an OffPolicyLearner
                if errors is None:
                    raise TrainingError(
                        "the replay buffer sorts transitions by their errors, of which the loss "
                        "says none: set learner.errors = |Q - y|, [n], in it, or "
                        "algorithm.replay_buffer=uniform"
                    )
                # Those of a gradient step that was left out are meaningless.
                finite = errors.isfinite()
                buffer.update_priorities(batch.indices[finite], errors[finite])
        picks = self.gradient_steps * self.algorithm_config.batch_size / self._stored
        statistics.record(ReplayEvents.picks_per_transition, picks)
        statistics.record(ReplayTimeEvents.sample_s, sample_s)
        return time.perf_counter() - started

    def state_dict(self) -> dict[str, Any]:
        """Everything that influences later numbers; valid between two updates."""
        return {
            **super().state_dict(),
            "collector": self.collector.state_dict(),
            "replay_buffer": self.replay_buffer.state_dict(),
            "initial_policy": self._initial_policy.state_dict(),
            "transitions": (self._stored, self._learned_from, self.gradient_steps),
        }

    def load_experience(self, state: dict[str, Any]) -> None:
        """Put the replay buffer and the environments where they were."""
        self.replay_buffer.load_state_dict(state["replay_buffer"])
        self._initial_policy.load_state_dict(state["initial_policy"])
        self._stored, self._learned_from, self.gradient_steps = state["transitions"]
        lost = torch.from_numpy(self.collector.load_state_dict(state["collector"]))
        if lost.any():
            self.replay_buffer.interrupt()
