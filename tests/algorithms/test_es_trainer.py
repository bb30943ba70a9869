"""Trainer of evolution strategies: pairs used in an update, and counters."""

from __future__ import annotations

import math
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases import everyday, sweep
from es_problems import WalkEnv
from gymnasium import spaces
from practice import make_run

from maze_train import SequentialVectorEnv, Statistics, load_config
from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.es.learner import ESLearner
from maze_train.algorithms.es.population import (
    ESDistributedRollouts,
    PairDraws,
    SharedNoiseTable,
    trained_size,
)
from maze_train.algorithms.es.trainer import ESTrainer
from maze_train.collect.play import ObservationMoments, PlayedEpisode
from maze_train.core.errors import TrainingError
from maze_train.core.step_end import DROPPED, TERMINATED
from maze_train.learner.config import Progress, Schedule
from maze_train.learner.flat_parameters import get_flat_parameters
from maze_train.learner.group import LearnerGroup
from maze_train.nets.config import ModelConfig, ObservationNormalizationConfig
from maze_train.nets.policy_model import build_policy
from maze_train.run.build import build_run
from maze_train.training.evaluators import RolloutEvaluator
from maze_train.training.outcome import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
CAPACITY = 6


@pytest.fixture(autouse=True)
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make workers return after each step on any machine."""
    monkeypatch.setattr("maze_train.collect.episode_pool.LONGEST_S", 0.0)


class ScriptedRollouts(ESDistributedRollouts):
    """Scripted episodes; all members up to the limit are played at once.

    Args:
        model: The policy.
        length: Episode length by iteration and member.
        lost: Whether an episode is lost, by iteration and member.
    """

    ended = 0

    def __init__(self, model: Any, length: Any, lost: Any) -> None:
        self.noise_table = SharedNoiseTable(500, seed=1)
        self._draws = PairDraws(3, self.noise_table, trained_size(model))
        self.length, self.lost = length, lost
        self.begun: list[tuple[int, float]] = []
        self.limits: list[int] = []
        self._writer = self._weights = Mock()  # There are no workers.
        played = {"capacity": CAPACITY, "steps_made": 0, "worker_restarts": 0}
        self.pool: Any = Mock(**played, run=self._run)

    def generate_rollouts(self, iteration: int, noise_stddev: float, *args: Any) -> Any:
        """Return the pairs of an iteration."""
        self.begun.append((iteration, noise_stddev))
        return super().generate_rollouts(iteration, noise_stddev, *args)

    def _run(self, numbers: Any, episode_of: Any, limit_of: Any, *args: Any) -> Any:
        """Yield the episodes of all members up to a limit."""
        iteration, played = self.begun[-1][0], list[PlayedEpisode]()
        try:
            for number in numbers:
                if number == len(played):
                    self.limits.append(limit_of(number))
                    found = range(number, self.limits[-1])
                    played += [self.result(iteration, member) for member in found]
                    self.pool.steps_made += sum(episode.length for episode in played[number:])
                yield played[number]
        finally:
            self.ended += 1

    def result(self, iteration: int, member: int) -> PlayedEpisode:
        """Return the episode of a member; all its observations are 1."""
        length = self.length(iteration, member)
        return PlayedEpisode(
            number=member,
            seed=0,
            episode_return=100.0 + member,
            length=length,
            success=float(member % 3 == 0) if member % 2 == 0 else math.nan,
            end=DROPPED if self.lost(iteration, member) else TERMINATED,
            fitness=float(member * 7 % 5),
            moments=ObservationMoments(np.array(float(length)), np.ones(2), np.zeros(2)),
        )

    def close(self) -> None:
        self.noise_table.close()


class NotedLearner(ESLearner):
    """Learner that records the pairs of each update."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pairs: list[list[Any]] = []

    def preprocess(self, module_id: str, experience: Any, statistics: Any) -> Any:
        self.pairs.append(list(experience.pairs))
        return super().preprocess(module_id, experience, statistics)


@contextmanager
def scripted(
    length: Any = lambda iteration, member: 1,
    lost: Any = lambda iteration, member: False,
    services: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[ESTrainer, ScriptedRollouts, NotedLearner]]:
    """Yield a trainer with scripted episodes, its rollouts and its learner."""
    config = ESAlgorithmConfig(**{"n_rollouts_per_update": 6, **settings})
    normalization = ObservationNormalizationConfig(mode="running")
    model = build_policy(
        ModelConfig(hidden_sizes=[3], normalization=normalization), BOX, spaces.Discrete(2), seed=0
    )
    learner = NotedLearner(model, config)
    rollouts = ScriptedRollouts(model, length, lost)
    group = LearnerGroup(learner)
    yield (
        ESTrainer(make_run(config, model, group, **services or {}), rollouts=rollouts),
        rollouts,
        (learner),
    )
    rollouts.close()


def update(trainer: Any, progress: Progress | None = None) -> tuple[int, dict[str, float]]:
    """Run one update; return its environment steps and metrics."""
    statistics = Statistics()
    return trainer.update_once(progress or Progress(), statistics), statistics.reduce()


# -- which pairs ---------------------------------------------------------------------------------

LENGTHS: dict[str, Any] = {
    "one step": lambda iteration, member: 1,
    "growing": lambda iteration, member: 1 + member,
    "random": lambda iteration, member: 1 + (member * 37 + iteration * 11) % 13,
}
LOSSES: dict[str, Any] = {
    "none": lambda iteration, member: False,
    "first of a pair": lambda iteration, member: member in (0, 4, 6),
    "second of a pair": lambda iteration, member: member in (3, 5, 11),
    "both of a pair": lambda iteration, member: member // 2 in (1, 2, 3, 9),
    "another one each time": lambda iteration, member: member == 2 * iteration + 1,
}


def shortest_prefix(length: Any, lost: Any, iteration: int, episodes: int, steps: int) -> list[int]:
    """Return the first pairs without lost episodes that have enough episodes and steps."""
    used: list[int] = []
    pair = 0
    while 2 * len(used) < episodes or total(length, iteration, used) < steps:
        if not (lost(iteration, 2 * pair) or lost(iteration, 2 * pair + 1)):
            used.append(pair)
        pair += 1
    return used


def total(length: Any, iteration: int, pairs: list[int]) -> int:
    """Return the number of steps of the pairs."""
    return sum(length(iteration, 2 * k) + length(iteration, 2 * k + 1) for k in pairs)


@pytest.mark.parametrize(
    ("episodes", "steps"), [(2, 0), (6, 0), (2, 20), (2, 21), (2, 22), (6, 6), (6, 7), (20, 20)]
)
@sweep("lost", LOSSES)
@sweep("length", LENGTHS)
def test_update_uses_the_shortest_sufficient_prefix_of_pairs(
    episodes: int, steps: int, length: str, lost: str
) -> None:
    """An update uses pairs without lost episodes in order; later pairs affect no metric."""
    settings = {"n_rollouts_per_update": episodes, "n_timesteps_per_update": steps}
    rules = (LENGTHS[length], LOSSES[lost])
    with scripted(*rules, **settings) as (trainer, rollouts, learner):
        counts = []
        for iteration in range(3):
            used = shortest_prefix(*rules, iteration, episodes, steps)
            num_steps, metrics = update(trainer)
            assert [pair.pair for pair in learner.pairs[-1]] == used
            assert num_steps == total(rules[0], iteration, used)
            members = [m for k in used for m in (2 * k, 2 * k + 1)]
            assert [m.number for pair in learner.pairs[-1] for m in pair.members] == members
            assert metrics["train/episodes"] == 2 * len(used)
            lengths = [rules[0](iteration, m) for m in members]
            assert metrics["train/episode_length_mean"] == pytest.approx(np.mean(lengths))
            assert metrics["train/episode_return_mean"] == 100.0 + np.mean(members)
            assert metrics["train/episode_return_max"] == 100.0 + max(members)
            assert metrics["train/episode_return_min"] == 100.0 + min(members)
            assert metrics["train/success_rate"] == np.mean([m % 6 == 0 for m in members])
            gone = [m for m in range(members[-1]) if rules[1](iteration, m)]
            assert metrics.get("train/lost_episodes", 0.0) == len(gone)
            counts.append(num_steps)
            dropped = rollouts.pool.steps_made - sum(counts)
            assert metrics["population/steps_dropped"] == dropped >= 0
            # Observations of other pairs are not counted.
            assert float(trainer.model.normalizer.count) == sum(counts)  # type: ignore[union-attr]
        assert [iteration for iteration, _ in rollouts.begun] == [0, 1, 2]
        assert rollouts.ended == 3


def test_iteration_starts_as_many_pairs_as_the_last_used() -> None:
    """The next iteration starts as many pairs as the last one needed, including lost pairs.

    Further pairs start in groups of the capacity. Without a minimum number of steps, exactly the
    pairs of an update start, and none are dropped.
    """
    with scripted(LENGTHS["random"]) as (trainer, rollouts, _):
        for _ in range(3):
            assert update(trainer)[1]["population/steps_dropped"] == 0
        assert rollouts.limits == [6, 6, 6]
    settings = {"n_rollouts_per_update": 2, "n_timesteps_per_update": 16}
    with scripted(lost=LOSSES["both of a pair"], **settings) as (trainer, rollouts, _):
        update(trainer)  # pairs 0, 4, 5, 6, 7, 8, 10, 11
        assert rollouts.limits == [2, 2 * 5, 2 * 9, 2 * 13]
        rollouts.limits.clear()
        update(trainer)
        assert rollouts.limits == [2 * 12]


def test_losing_all_pairs_raises() -> None:
    """An update raises an error after losing more than ten pairs per episode."""
    settings = {"n_rollouts_per_update": 4}
    for count in (40, 41):

        def lost(iteration: int, member: int, count: int = count) -> bool:
            return iteration == 1 and member % 2 == 1 and member < 2 * count

        with scripted(lost=lost, **settings) as (trainer, rollouts, learner):
            before, _ = update(trainer), rollouts.ended
            weights = get_flat_parameters(trainer.model)
            if count == 40:
                _, metrics = update(trainer)
                assert metrics["train/lost_episodes"] == 40
                assert [pair.pair for pair in learner.pairs[-1]] == [40, 41]
                continue
            message = r"an update of 4 episodes lost 41 pairs"
            with pytest.raises(TrainingError, match=message) as caught:
                update(trainer)
            assert rollouts.ended == 2, "while the error is known, and all that it refers to"
            del caught
            assert before[0] == 4
            assert torch.equal(get_flat_parameters(trainer.model), weights)


def test_noise_std_follows_its_schedule() -> None:
    """The noise std follows its schedule, and members use the reported value."""
    setting = Schedule(points=[[0, 0.5], [100, 0.1]], by="env_steps")
    with scripted(noise_stddev=setting) as (trainer, rollouts, _):
        rows = [update(trainer, Progress(env_steps=n))[1] for n in (0, 50, 200)]
        expected = pytest.approx([0.5, 0.3, 0.1])
        assert [row["train/noise_stddev"] for row in rows] == expected
        assert [stddev for _, stddev in rollouts.begun] == expected


# -- when training ends --------------------------------------------------------------------------


def test_total_steps_counts_used_steps() -> None:
    """`total_steps` counts the steps used in updates, not lost or dropped steps."""
    services = {"limits": Limits(total_steps=36)}
    settings = {"n_rollouts_per_update": 2, "n_timesteps_per_update": 10, "epoch_length": 2}
    lost = LOSSES["both of a pair"]
    with scripted(lost=lost, services=services, **settings) as (trainer, rollouts, learner):
        summary = trainer.train()
        assert (summary.stop_reason, summary.updates, summary.epochs) == ("total_steps", 4, 2)
        assert summary.env_steps == 40 == sum(p.num_steps for ps in learner.pairs for p in ps)
        rows = trainer.run.tracker.history
        assert [row["env_steps"] for row in rows] == [20, 40]
        assert rollouts.pool.steps_made == 40 + rows[-1]["population/steps_dropped"] > 40


# -- with environments ---------------------------------------------------------------------------


@contextmanager
def walking(services: dict[str, Any], **changes: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a trainer before its first update, and its runner."""
    config = load_config(
        {
            "env": WalkEnv,
            "algorithm": "es",
            "algorithm.n_rollouts_per_update": 8,
            "algorithm.epoch_length": 2,
            "algorithm.noise_stddev": 0.3,
            "algorithm.noise_table_size": 2000,
            "model.hidden_sizes": [4],
            "runner.concurrency": 5,
            "seed": 3,
            **changes,
        }
    )
    with build_run(config) as run:
        run.limits = Limits(n_epochs=3)
        for name, value in services.items():
            setattr(run, name, value)
        run.trainer.before_training()
        yield run.trainer, run


MODELS: dict[str, dict[str, Any]] = {
    "together": {},
    "one by one": {"model": "vector_rnn", "model.rnn.size": 4},
}


@pytest.mark.parametrize("model", everyday(1, MODELS))
def test_evaluations_use_unperturbed_weights(model: str) -> None:
    """Evaluations use the unperturbed weights, before the first and after each update."""
    made = RolloutEvaluator(
        lambda count: SequentialVectorEnv([WalkEnv] * count), 6, seed=8, deterministic=False
    )
    with walking({"evaluator": made}, **MODELS[model]) as (trainer, runner):
        plain: Any = build_policy(
            runner.config.model, *runner.spaces, seed=runner.seeds.integer("model")
        )
        own, same = trainer.model.state_dict(), plain.state_dict()
        assert all(torch.equal(own[key], same[key]) for key in own)
        generator, other = torch.Generator().manual_seed(1), deepcopy(plain)
        for _ in range(3):
            assert trainer.evaluate() == made.evaluate(plain)
            with torch.no_grad():
                for param, old in zip(other.parameters(), plain.parameters(), strict=True):
                    param.copy_(old + torch.randn(old.shape, generator=generator))
            assert trainer.evaluate() != made.evaluate(other)
            update(trainer)
            plain.load_state_dict(trainer.learners.get_weights()["default"])
    made.close()
