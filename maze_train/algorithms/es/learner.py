"""Learner and statistics of evolution strategies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Unpack

import torch

from maze_train.algorithms.es.config import ESAlgorithmConfig
from maze_train.algorithms.es.population import ESRolloutResult, SharedNoiseTable
from maze_train.collect.play import ObservationMoments, PlayedEpisode
from maze_train.core.events import Event, EventInterface, Statistics
from maze_train.core.types import Tensor
from maze_train.functional.evolution import antithetic_gradient, shaped_returns
from maze_train.functional.moments import Moments, merge_moments
from maze_train.learner.config import Progress
from maze_train.learner.events import statistics_of
from maze_train.learner.learner import Learner
from maze_train.learner.modules import LearnerOptions, Modules
from maze_train.learner.optimizers import DEFAULT_OPTIMIZER
from maze_train.nets.normalization import find_normalizer


class ESEvents(EventInterface, prefix="train"):
    """Statistics of an update of evolution strategies.

    `train/grad_norm` includes the L2 penalty.
    """

    policy_grad_norm = Event("L2 norm of the estimated gradient, without the L2 penalty.")
    policy_norm = Event("L2 norm of the parameters before the update.")
    update_ratio = Event("L2 norm of the step divided by the L2 norm of the parameters.")
    fitness_std = Event("Standard deviation of the returns over the population.")
    noise_stddev = Event(
        "Standard deviation of the perturbations in the last update.", reduce="last"
    )


class PopulationEvents(EventInterface, prefix="population"):
    """Step counts of a population. The number of dropped steps depends on the workers' speed."""

    steps_dropped = Event("Number of steps so far that were not used in any update.", reduce="last")


@dataclass(frozen=True)
class EvaluatedPopulation:
    """Results of the mirrored pairs of one update."""

    pairs: Sequence[ESRolloutResult]
    """Pairs in order, excluding lost pairs."""

    noise_table: SharedNoiseTable
    """Noise table to which the noise indices of the pairs refer."""

    agents: Sequence[str] = ()
    """Agents of the policy; the fitness is their mean return. Empty for single-agent training."""

    offset: int = 0
    """Index of the policy's first value in a noise vector, after the noise of preceding
    policies."""

    @property
    def fitness(self) -> Tensor:
        """Fitness of the members of each pair, `[n, 2]` float64."""
        found = [[self._fitness_of(member) for member in pair.members] for pair in self.pairs]
        return torch.tensor(found, dtype=torch.float64)

    def _fitness_of(self, member: PlayedEpisode) -> float:
        if not self.agents:
            return member.fitness
        return sum(member.agent_returns[agent] for agent in self.agents) / len(self.agents)

    def noise(self, dim: int) -> Iterator[Tensor]:
        """Yield the noise of the policy for each pair, `[dim]`."""
        for pair in self.pairs:
            yield self.noise_table.get(pair.noise_index + self.offset, dim)


class ESLearner(Learner[EvaluatedPopulation, EvaluatedPopulation, EvaluatedPopulation]):
    """Learner of evolution strategies: steps along an estimated gradient of the expected return.

    g = 1/(2n) Σ_k (u_k⁺ - u_k⁻) ε_k,  u: shaped returns of θ + σ ε_k and θ - σ ε_k

    The optimizer minimises with the gradient -g + l2_penalty θ. If all returns are equal, g is 0
    and no step is taken, because Adam would take full-sized steps along the gradient of the
    penalty. The factor 1/σ of the paper is included in the learning rate. θ are the trainable
    parameters in the order of `module.parameters()`. Observation statistics of all members are
    merged after the update. With multiple agents, all policies of a member are perturbed together,
    and the fitness of a policy is the mean return of its agents.

    Args:
        modules: The policy, or the policies of a multi-agent environment by id.
        config: Settings.
        device: `cpu`.
        seed: Unused, because the experience contains the noise.

    Source: Salimans et al. (2017), arXiv:1703.03864, section 2 and algorithm 2.
    """

    most_empty_updates: ClassVar[int] = 100
    """Number of consecutive updates without a finite gradient after which training fails."""
    config: ESAlgorithmConfig
    _moments: Sequence[ObservationMoments] = ()

    def __init__(
        self, modules: Modules, config: ESAlgorithmConfig, **options: Unpack[LearnerOptions]
    ) -> None:
        super().__init__(modules, config, **options)
        self._before: dict[str, Sequence[Tensor]] = {}

    def preprocess(
        self, module_id: str, experience: EvaluatedPopulation, statistics: Statistics
    ) -> EvaluatedPopulation:
        """Store the observation moments of the members until the end of the update."""
        members = [member for pair in experience.pairs for member in pair.members]
        self._moments = [member.moments for member in members if member.moments is not None]
        return experience

    def minibatches(
        self, prepared: Mapping[str, EvaluatedPopulation], statistics: Statistics
    ) -> Iterator[Mapping[str, EvaluatedPopulation]]:
        """Yield the whole population."""
        yield prepared

    def compute_loss_for_module(
        self, module_id: str, batch: EvaluatedPopulation, statistics: Statistics
    ) -> Tensor:
        """Return the surrogate loss -g · θ + ½ l2_penalty |θ|², the loss of the optimizer."""
        params = self.optimizers[module_id, DEFAULT_OPTIMIZER].params
        fitness = batch.fitness
        utilities = shaped_returns(fitness, self.config.fitness_shaping)
        dim = sum(p.numel() for p in params)
        ascent = antithetic_gradient(utilities, batch.noise(dim), dim)
        statistics.keep("moves", ascent.any())
        self._before[module_id] = before = [p.detach().clone() for p in params]
        statistics.record(ESEvents.policy_grad_norm, torch.linalg.vector_norm(ascent))
        statistics.record(ESEvents.policy_norm, _norm(before))
        statistics.record(ESEvents.fitness_std, fitness.std(correction=0))

        theta = torch.cat([p.reshape(-1) for p in params])
        return 0.5 * self.config.l2_penalty * theta.square().sum() - (ascent * theta).sum()

    def modules_to_stop(self, kept: Mapping[str, Mapping[str, Tensor]]) -> Collection[str]:
        """Return the policies whose gradient estimate is 0."""
        return {module_id for module_id, moves in kept.get("moves", {}).items() if not moves}

    def after_gradient_based_update(self, progress: Progress, statistics: Statistics) -> None:
        """Record the norm of the parameter changes, and merge the observation statistics."""
        for module_id, before in self._before.items():
            params = self.optimizers[module_id, DEFAULT_OPTIMIZER].params
            steps = [p.detach() - old for p, old in zip(params, before, strict=True)]
            size = float(_norm(before))
            if size:
                own = statistics_of(module_id, statistics)
                own.record(ESEvents.update_ratio, float(_norm(steps)) / size)
        self._before.clear()
        normalizer = find_normalizer(self.module) if self._moments else None
        if normalizer is not None:
            parts = [Moments(*map(torch.as_tensor, part)) for part in self._moments]
            normalizer.merge(reduce(merge_moments, parts))
            self._moments = ()


def _norm(parts: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.cat([part.reshape(-1) for part in parts]))
    return norm
