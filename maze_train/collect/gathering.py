"""Exchange of experience between the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from maze_train.collect.actors import (
    ActorPolicy,
    DistributedActors,
    GatheredRollouts,
    MakeActorEnv,
    SeedOf,
    StepCounts,
)
from maze_train.collect.collector import Collector, RolloutCollector
from maze_train.collect.episodes import FinishedEpisodes
from maze_train.core.types import Array, Tensor, TensorTree, as_tree, leaves_by_key
from maze_train.data.rollout import ENV_DIM, Rollout, join_rollouts
from maze_train.learner.ranks import Ranks


class GatheringCollector(Collector):
    """Collects with the environments of this process, and returns the rollouts of all processes.

    The environments of all processes are joined in the order of ranks, so the result is identical
    to the rollout of a single process with all environments.

    Args:
        processes: The processes, with equal numbers of environments.
        own: Collector of this process.
    """

    def __init__(self, processes: Ranks, own: Collector) -> None:
        super().__init__()
        self._processes, self._own = processes, own
        self.records_log_probs = own.records_log_probs

    @property
    def stepping(self) -> RolloutCollector | None:
        """The collector that steps the environments of this process."""
        return self._own.stepping

    def collect_steps(
        self, model: nn.Module, overlap: Callable[[], object] | None = None
    ) -> tuple[Rollout, FinishedEpisodes]:
        """Collect T steps of the environments of all processes."""
        own = self._own
        own.records_log_probs = self.records_log_probs
        own.keeps_terminal_obs = self.keeps_terminal_obs
        rollout, episodes = own.collect_steps(model, overlap)
        self.env_s = own.env_s
        return gathered(self._processes, rollout), gathered_episodes(self._processes, episodes)

    def make_calls(self) -> None:
        """Make new calls in the environments of this process, see `EnvCalls`."""
        self._own.make_calls()

    def state_dict(self) -> dict[str, Any]:
        """Return the collector states of all processes, including unfinished turns."""
        own = {**self._own.state_dict(), "turns": self.turns.state_dict()}
        return self._processes.state(own) or {}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Restore from `state`; see `Collector`."""
        state = self._processes.own_state(state)
        lost: Array = np.concatenate(
            self._processes.gather(self._own.load_state_dict(state).tolist())
        )
        self.is_exact = all(self._processes.gather(self._own.is_exact))
        self.turns.load_state_dict(state["turns"], torch.from_numpy(lost))
        return lost


class GatheringActors(DistributedActors):
    """The actors of this process; `gather` returns the rollouts of all processes.

    Args:
        processes: The processes; each has the same number of actors.
        make_env: See `DistributedActors`.
        num_actors: Number of actors of all processes.
        *args: See `DistributedActors`.
        **workers: See `DistributedActors`.
    """

    def __init__(
        self,
        processes: Ranks,
        make_env: MakeActorEnv,
        num_actors: int,
        *args: Any,
        **workers: Any,
    ) -> None:
        self._processes, self._total = processes, StepCounts()
        super().__init__(make_env, num_actors // processes.count, *args, **workers)

    @property
    def total_counts(self) -> StepCounts:
        """Step counts of the actors of all processes at the last `gather`."""
        return self._total

    def begin(self, model: nn.Module, policy: ActorPolicy, seed_of: SeedOf, **how: Any) -> None:
        """Begin; each actor is seeded by its index among the actors of all processes."""
        first = self.num_actors * self._processes.rank
        super().begin(model, policy, lambda actor, begun: seed_of(first + actor, begun), **how)

    def gather(
        self,
        count: int,
        idle: Callable[[], None] | None = None,
        overlap: Callable[[], object] | None = None,
    ) -> GatheredRollouts:
        """Return the next `count` rollouts, an equal number from each process.

        Queued rollouts are counted in all processes; `lost` and times are those of this process.
        `idle` is not called, because processes may wait for different lengths of time.
        """
        processes = self._processes
        own = super().gather(count // processes.count, overlap=overlap)
        each = processes.gather((own.queue_before, own.queue_after, *astuple(self.counts)))
        before, after, *counts = map(sum, zip(*each, strict=True))
        self._total = StepCounts(*counts)
        return replace(
            own,
            rollouts={key: gathered(processes, part) for key, part in own.rollouts.items()},
            episodes=gathered_episodes(processes, own.episodes),
            queue_before=before,
            queue_after=after,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the actors of all processes."""
        return self._processes.state(super().state_dict()) or {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().load_state_dict(self._processes.own_state(state))
        self.is_exact = all(self._processes.gather(self.is_exact))


def gathered(processes: Ranks, rollout: Rollout) -> Rollout:
    """Return the rollouts of all processes, joined along the environments."""
    own = torch.tensor([len(rollout.final_positions), bool(rollout.has_gaps)])
    counts, gaps = torch.stack(processes.gather_tensor(own)).T.tolist()
    parts: list[dict[str, Any]] = [{"has_gaps": bool(has_gaps)} for has_gaps in gaps]
    for name, column in rollout.columns.items():
        sizes = None if name in ENV_DIM else counts
        for part, tree in zip(parts, _gathered(processes, column, sizes), strict=True):
            part[name] = tree
    return join_rollouts([Rollout(**part) for part in parts])


def gathered_episodes(processes: Ranks, episodes: FinishedEpisodes) -> FinishedEpisodes:
    """Return the episodes of all processes, in the order of ranks."""
    first, *others = processes.gather(asdict(episodes))
    joined = FinishedEpisodes(**first)
    for other in others:
        joined.extend(FinishedEpisodes(**other))
    return joined


def _gathered(processes: Ranks, tree: TensorTree, sizes: Sequence[int] | None) -> list[TensorTree]:
    """Return the trees of all processes; `sizes` are the numbers of rows if they differ."""
    found: list[dict[str, Tensor]] = [{} for _ in range(processes.count)]
    for key, leaf in leaves_by_key(tree).items():
        if sizes is not None:
            padded = leaf.new_zeros(max(sizes), *leaf.shape[1:])
            padded[: len(leaf)] = leaf
            leaf = padded
        for rank, other in enumerate(processes.gather_tensor(leaf)):
            found[rank][key] = other if sizes is None else other[: sizes[rank]]
    return [as_tree(leaves, isinstance(tree, dict)) for leaves in found]
