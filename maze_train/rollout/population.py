"""Plays the episodes of many perturbed policies at once, in one process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.envs.slots import EnvSlots
from maze_train.errors import MazeTrainError
from maze_train.nets.population import build_population, find_normalizer, row_blocks
from maze_train.rollout.agents import first_observations
from maze_train.rollout.episode_worker import play_on
from maze_train.rollout.episodes import success_of
from maze_train.rollout.members import MemberActions, MemberResult, ObservationMoments, PairDraws
from maze_train.rollout.weights import WeightsReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import gymnasium
    from torch import nn

    from maze_train.nets.normalization import ObservationNormalizer
    from maze_train.rollout.noise_table import SharedNoiseTable
    from maze_train.types import Array, TensorTree
    from maze_train.workers.messages import Portable
    from maze_train.workers.pool import WorkerContext

__all__ = ["ESAbortException", "ESRolloutWorkerWrapper", "MemberSettings", "PopulationWorker"]

TELL_S = 0.005
"""Seconds for which results wait for others, while members play."""


class ESAbortException(MazeTrainError):  # noqa: N818 (the name is part of the interface)
    """The episodes that are being played are not needed any more."""


@dataclass(frozen=True)
class MemberSettings:
    """Settings of members for acting."""

    seed: int
    """Seed of episodes and noise."""

    deterministic: bool
    """Whether the most likely action is taken instead of a sampled one."""

    action_noise_stddev: float
    """Deviation of the noise that is added to real-valued actions."""


class ESRolloutWorkerWrapper:
    """Members of a population that play one episode each, as many at a time as there are slots.

    Member 2 k of an iteration has the parameters θ + σε of pair k, member 2 k + 1 has θ - σε; both
    play the episode with the same seed. What a member does follows from θ, σ, the statistics of
    observations, the iteration and its number: not from which others are played with it.

    Parameters are perturbed, buffers are not. Statistics of observations stay as they are while
    members play; those of what a member observed are part of its result.

    Args:
        slots: Environments with `row_blocks(len(slots))` rows; closed by their owner.
        model: The policy θ; perturbed copies of it act.
        noise_table: The noise.
        settings: How members act.
        on_step: Called after each step with the number of environments that were stepped.

    Attributes:
        iteration: Iteration that is being played, -1 before the first.

    Source: Salimans et al. (2017), arXiv:1703.03864, algorithm 2; pairs: section 2.
    """

    def __init__(
        self,
        slots: EnvSlots,
        model: nn.Module,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        self._slots = slots
        self._model = model
        self._population = build_population(model, len(slots))
        noise_table.check_dim(self._population.dim)
        self._table = noise_table
        self._draws = PairDraws(settings.seed, noise_table, self._population.dim)
        self._actions = MemberActions(
            model.distribution,  # type: ignore[arg-type]  # that of an acting model
            len(slots),
            deterministic=settings.deterministic,
            noise_stddev=settings.action_noise_stddev,
        )
        self._normalizer = find_normalizer(model)
        self._observed: _Observed | None = None
        self._on_step = on_step
        self._waiting: deque[int] = deque()
        self._playing: list[int] = []
        self._aborted = False
        self._theta: Array = np.zeros(0)
        self._noise_stddev = 0.0
        self.iteration = -1

    def __len__(self) -> int:
        """Number of members that can play at a time."""
        return len(self._slots)

    @property
    def load(self) -> int:
        """Members that play or wait."""
        return len(self._playing) + len(self._waiting)

    def begin(self, iteration: int, noise_stddev: float) -> None:
        """Begin an iteration with the parameters that the policy has now; drops what is left.

        Args:
            iteration: Its number, >= 0.
            noise_stddev: Deviation σ of the perturbation, >= 0.
        """
        self.drop()
        trained = [p.detach().reshape(-1) for p in self._model.parameters() if p.requires_grad]
        self._theta = torch.cat(trained).numpy() if trained else np.zeros(0, np.float32)
        self._noise_stddev = noise_stddev
        self.iteration = iteration
        normalizer, self._observed = self._normalizer, None
        if normalizer is not None and not bool(normalizer.frozen):
            self._observed = _Observed(normalizer, len(self._slots))

    def drop(self) -> None:
        """Forget the members that play and wait."""
        self._waiting.clear()
        self._playing.clear()
        self._aborted = False

    def add(self, members: Iterable[int]) -> None:
        """Add members, which play in this order as soon as there are slots."""
        self._waiting.extend(members)

    def set_abort(self) -> None:
        """Make the next step raise; may be called from anywhere."""
        self._aborted = True

    def clear_abort(self) -> None:
        """Go on with the members that play and wait."""
        self._aborted = False

    def step(self) -> list[MemberResult]:
        """One step of every member that plays; returns the results of those that are done.

        Raises:
            ESAbortException: After `set_abort`.
            EnvError: If an environment raises or returns something invalid.
        """
        if self._aborted:
            raise ESAbortException("the episodes of this iteration are not needed any more")
        while self._waiting and len(self._playing) < len(self._slots):
            self._start(self._waiting.popleft())
        count = len(self._playing)
        if not count:
            return []
        obs = self._observe(count)
        with torch.no_grad():
            params = self._population.params(count, obs)
            actions = self._actions.choose(params, count)
        ended = self._slots.step(count, actions)
        if self._on_step is not None:
            self._on_step(count)
        results = [self._result(slot) for slot in ended]
        for slot in reversed(ended):
            self._vacate(slot)
        return results

    def _start(self, member: int) -> None:
        """Let a member play in the first free slot."""
        row = len(self._playing)
        draw = self._draws.draw(self.iteration, member // 2)
        noise = self._table.array[draw.noise_index : draw.noise_index + self._population.dim]
        signed = self._noise_stddev if member % 2 == 0 else -self._noise_stddev
        weights = self._population.weights[row]
        np.multiply(noise, weights.dtype.type(signed), out=weights)
        weights += self._theta
        self._population.forget(row)
        self._actions.begin(row, draw.action_seed)
        if self._observed is not None:
            self._observed.forget(row)
        self._slots.start(row, draw.env_seed)
        self._playing.append(member)

    def _observe(self, count: int) -> TensorTree:
        """The observations of this step, `[row_blocks(count), ...]`, which are counted as well."""
        obs = first_observations(self._slots, count)
        if self._observed is not None:
            self._observed.take_in(count, obs)
        return obs

    def _result(self, slot: int) -> MemberResult:
        slots = self._slots
        info = slots.final_infos.get(slot, {})
        fitness, length = float(slots.returns[slot]), int(slots.lengths[slot])
        report = info.get("episode", {"r": fitness, "l": length})
        return MemberResult(
            member=self._playing[slot],
            fitness=fitness,
            episode_return=float(report["r"]),
            length=length,
            success=success_of(info),
            lost=bool(slots.lost[slot]),
            moments=None if self._observed is None else self._observed.moments(slot),
        )

    def _vacate(self, slot: int) -> None:
        """Free a slot; the last member that plays moves there, so that the first slots play."""
        last = len(self._playing) - 1
        member = self._playing.pop()
        if slot == last:
            return
        self._playing[slot] = member
        for rows in (self._slots, self._population, self._actions, self._observed):
            if rows is not None:
                rows.swap(slot, last)


class PopulationWorker:
    """A worker of `ESDistributedRollouts`, see `TaskQueue`.

    Args:
        factories: Functions that build its environments.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        context: Where it lives.
    """

    def __init__(
        self,
        factories: Portable[Sequence[Callable[[], gymnasium.Env[Any, Any]]]],
        on_non_finite: str,
        context: WorkerContext,
    ) -> None:
        count = len(factories.value)
        self._slots = EnvSlots(
            factories.value,
            row_blocks(count),
            first=context.index * count,
            on_non_finite=on_non_finite,
        )
        self._context = context
        self._members: ESRolloutWorkerWrapper | None = None

    def describe(self) -> tuple[Any, Any]:
        """Observation and action space of one environment."""
        return self._slots.env_observation_space, self._slots.single_action_space

    def set_policy(
        self,
        make_model: Portable[Callable[[], nn.Module]],
        weights: Any,
        noise_table: SharedNoiseTable,
        settings: MemberSettings,
    ) -> None:
        """Get the policy.

        Args:
            make_model: Builds it.
            weights: Memory of its weights.
            noise_table: The noise.
            settings: How members act.
        """
        model = make_model.value()
        self._reader = WeightsReader(model, weights.buffer)
        self._members = ESRolloutWorkerWrapper(
            self._slots, model, noise_table, settings, self._context.count
        )

    def begin_round(self, iteration: int, noise_stddev: float) -> None:
        """Begin an iteration with the weights that were published last."""
        assert self._members is not None, "set_policy() comes first"
        self._reader.load()
        self._members.begin(iteration, noise_stddev)

    def advance(self, members: list[int]) -> list[MemberResult]:
        """Play for a while, further members too."""
        assert self._members is not None, "set_policy() comes first"
        return play_on(self._members, members, TELL_S if self._context.is_remote else 0.0)

    def drop(self) -> None:
        """Forget all members."""
        if self._members is not None:
            self._members.drop()

    def close(self) -> None:
        """Close the environments."""
        self._slots.close()


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
        """Take in the observations of the first members."""
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
