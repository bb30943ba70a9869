"""Agents whose actions come from models or from a population, and the workers that play it."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.collect.actor_worker import WeightsReader, WeightsWriter, weights_nbytes
from maze_train.collect.episode_player import PlaySettings
from maze_train.collect.members import (
    EpisodeTask,
    MemberActions,
    ObservationMoments,
    PairDraws,
    SlotAgent,
)
from maze_train.collect.player import PlayerPool
from maze_train.core.errors import ConfigError
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import build_population, find_normalizer, row_blocks
from maze_train.spaces.tensors import as_tensors
from maze_train.workers.places import Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torch import nn

    from maze_train.collect.episode_player import PlayedEpisode
    from maze_train.collect.members import SharedNoiseTable
    from maze_train.collect.player import MakeEnv
    from maze_train.core.types import Array, ArrayTree, TensorTree
    from maze_train.envs.stepped import EnvSlots
    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.workers.places import Place


class PopulationAgent(SlotAgent):
    """Copies of a model act, one in each slot.

    Actions do not depend on what else is played, nor on the row, to the bit; see `nets.population`.

    Args:
        model: An `ActingModel` or `RecurrentModel` that is a module, on the CPU.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: See `MemberActions`.
    """

    def __init__(
        self, model: Any, rows: int, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._population = build_population(model, rows)
        self._actions = MemberActions(
            model.distribution, rows, deterministic=deterministic, noise_stddev=noise_stddev
        )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `SlotAgent`."""
        self._population.forget(row)
        self._actions.begin(row, task.action_seed)

    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, see `SlotAgent`."""
        obs = self._observe(count, slots)
        with torch.no_grad(), one_thread():
            return self._actions.choose(self._population.params(count, obs), count)

    def _observe(self, count: int, slots: EnvSlots) -> TensorTree:
        return first_observations(slots, count)

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows, see `SlotAgent`."""
        self._population.swap(i, j)
        self._actions.swap(i, j)


class ModelAgent(PopulationAgent):
    """A model acts, with a copy of the weights that it has now; see `PopulationAgent`.

    Args:
        model: The model; it is copied to the CPU, in the mode of evaluation.
        rows: Number of slots, >= 1.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    def __init__(self, model: nn.Module, rows: int, deterministic: bool = True) -> None:
        own: Any = copy.deepcopy(acting_part(model)).cpu().eval()
        super().__init__(own, rows, deterministic)
        trained = [p.detach().reshape(-1) for p in own.parameters() if p.requires_grad]
        if trained:
            self._population.weights[:] = torch.cat(trained).numpy()


def acting_part(model: nn.Module) -> nn.Module:
    """An actor-critic without its critic, also among several agents; others as they are."""
    if type(model) is JointModel:
        policies = {key: acting_part(own) for key, own in model.by_policy.items()}
        return JointModel(policies, model.agents)
    # The exact type: a subclass may act in another way.
    if type(model) is not ActorCriticModel:
        return model
    return PolicyModel(model.policy, **model.around)


def first_observations(slots: EnvSlots, count: int) -> TensorTree:
    """The observations of the first slots, with rows up to a whole block of them.

    Args:
        slots: The environments, with at least `row_blocks(count)` rows.
        count: How many slots.

    Returns:
        Observations as networks read them, `[row_blocks(count), ...]`.
    """
    columns: Any = {key: column[: row_blocks(count)] for key, column in slots.obs.items()}
    return as_tensors(slots.single_observation_space, columns.get("", columns))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread of PyTorch: several may add up in another order."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class MemberSettings:
    """Settings of members for acting."""

    seed: int
    """Seed of episodes and noise."""

    deterministic: bool
    """Whether the most likely action is taken instead of a sampled one."""

    action_noise_stddev: float
    """Deviation of the noise that is added to real-valued actions."""


class MemberAgent(PopulationAgent):
    """Members of a population act, each with weights that follow from its number.

    The member of an even number 2 k has the parameters θ + σε of pair k, member 2 k + 1 has θ - σε;
    both play the episode with the same seed. What a member does follows from θ, σ, ε, the
    statistics of observations and the seeds: not from which others are played with it.

    Parameters are perturbed, buffers are not. Statistics of observations stay as they are while
    members play; those of what a member observed are part of its result.

    Args:
        make_model: Builds the policy θ; perturbed copies of it act.
        slots: The environments.
        weights: Memory that a `WeightsWriter` writes.
        noise_table: The noise.
        settings: How members act.

    Source: Salimans et al. (2017), arXiv:1703.03864, algorithm 2; pairs: section 2.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        slots: EnvSlots,
        weights: Any,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
    ) -> None:
        self._model = make_model()
        self._reader = WeightsReader(self._model, weights.buffer)
        super().__init__(
            self._model, len(slots), settings.deterministic, settings.action_noise_stddev
        )
        self._table = noise_table
        self._normalizer = find_normalizer(self._model)
        self._observed: _Observed | None = None
        self._theta: Array = np.zeros(0)
        self._noise_stddev = 0.0

    def begin_round(self, noise_stddev: float) -> None:
        """Begin an iteration with the weights that were published last.

        Args:
            noise_stddev: Deviation σ of the perturbation, >= 0.
        """
        self._reader.load()
        trained = [p.detach().reshape(-1) for p in self._model.parameters() if p.requires_grad]
        self._theta = torch.cat(trained).numpy()
        self._noise_stddev = noise_stddev
        normalizer, self._observed = self._normalizer, None
        if normalizer is not None and not bool(normalizer.frozen):
            self._observed = _Observed(normalizer, self._population.rows)

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin the episode of a member, see `SlotAgent`."""
        super().begin(row, task)
        noise = self._table.array[task.noise_index : task.noise_index + self._population.dim]
        signed = self._noise_stddev if task.number % 2 == 0 else -self._noise_stddev
        weights = self._population.weights[row]
        np.multiply(noise, weights.dtype.type(signed), out=weights)
        weights += self._theta
        if self._observed is not None:
            self._observed.forget(row)

    def _observe(self, count: int, slots: EnvSlots) -> TensorTree:
        """The observations of this step, which are counted as well."""
        obs = super()._observe(count, slots)
        if self._observed is not None:
            self._observed.take_in(count, obs)
        return obs

    def moments(self, row: int) -> ObservationMoments | None:
        """Moments of the observations of the episode, where they are normalised."""
        return None if self._observed is None else self._observed.moments(row)

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows, see `SlotAgent`."""
        super().swap(i, j)
        if self._observed is not None:
            self._observed.swap(i, j)


class _Observed:
    """Moments of the observations of each member, by Welford's method, float64.

    Each row is computed entry by entry, so that it does not depend on the others.
    """

    def __init__(self, normalizer: ObservationNormalizer, rows: int) -> None:
        self._keys = normalizer.keys
        size = len(normalizer.mean)
        self._count = np.zeros((rows, 1))
        self._mean = np.zeros((rows, size))
        self._squares = np.zeros((rows, size))

    def forget(self, row: int) -> None:
        """Begin an episode."""
        for column in (self._count, self._mean, self._squares):
            column[row] = 0.0

    def take_in(self, count: int, obs: TensorTree) -> None:
        """Store the observations of the first members."""
        leaves = obs if isinstance(obs, dict) else {"": obs}
        parts = [leaves[key][:count].reshape(count, -1).numpy() for key in self._keys]
        x = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).astype(np.float64)
        mean = self._mean[:count]
        self._count[:count] += 1.0
        shift = x - mean
        mean += shift / self._count[:count]
        x -= mean
        x *= shift
        self._squares[:count] += x

    def moments(self, row: int) -> ObservationMoments:
        """Moments of the episode of a member."""
        count = float(self._count[row, 0])
        return ObservationMoments(
            int(count), self._mean[row].copy(), self._squares[row] / max(count, 1.0)
        )

    def swap(self, i: int, j: int) -> None:
        """Exchange two members."""
        for column in (self._count, self._mean, self._squares):
            column[[i, j]] = column[[j, i]]


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
        EnvError: If an environment cannot be built; it is a WorkerError where a worker process
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
