"""Optional components of an algorithm, passed in by the code that assembles a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector, Turns
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners
from maze_train.training.checkpoints import CheckpointStore
from maze_train.training.evaluators import Evaluator
from maze_train.training.outcome import Interruption
from maze_train.workers.backends import WorkerBackend

AdaptEvaluator: TypeAlias = "Callable[[Evaluator | None], Evaluator | None]"
"""Adapts an evaluator for the processes of a run; None is returned unchanged."""


def _interruption() -> tuple[Interruption, AdaptEvaluator]:
    return Interruption(), lambda evaluator: evaluator


class ActorParts(NamedTuple):
    """Functions that create actors for an `AlgorithmBuilder`."""

    make: Callable[[Any], Any]
    """Creates the actors, which are used in place of environments."""

    make_collector: Callable[[Any, Any, int, Mapping[str, Any]], Collector]
    """Creates the collector from builder, acting model, steps per rollout, and settings."""


class AgentParts(NamedTuple):
    """Functions for multi-agent training."""

    make_model: Callable[..., nn.Module]
    """Creates the model; same arguments as `make_model` in `training/models.py`."""

    turns_of: Callable[..., Turns]
    """Creates the splitter of multi-agent rollouts; see `TurnSplitter`."""


class ProcessParts(NamedTuple):
    """Parts of a trainer that depend on the number of processes; defaults: one process."""

    make_store: Callable[..., CheckpointStore] = CheckpointStore
    """Creates the checkpoints; same arguments as `CheckpointStore`."""

    make_interruption: Callable[[], tuple[Interruption, AdaptEvaluator]] = _interruption
    """Creates the signal handler, and a function that adapts evaluators."""


@dataclass(frozen=True, kw_only=True)
class BuildFeatures:
    """Optional components of an algorithm; the defaults suit most runs."""

    agents: Callable[[], AgentParts]
    """Returns the multi-agent parts; called for multi-agent environments."""

    make_group: (
        Callable[[Learner[Any, Any, Any], LearnerGroupConfig, WorkerBackend], Learners] | None
    ) = None
    """Creates a learner group; None: one learner with synchronous updates."""

    gather: Callable[[Collector], Collector] | None = None
    """Adds the experience of the other processes to a collector; None: a single process."""

    make_actors: Callable[..., Any] | None = None
    """Creates the actors of IMPALA that exchange rollouts with other processes; None: no such
    actors."""

    actors: ActorParts | None = None
    """Functions for actors; None: the learner's policy acts in all environments."""

    make_league: Callable[..., Collector] | None = None
    """Creates the collector for self-play against snapshots, see `make_league_collector`; None: no
    snapshots."""

    make_vector_env: Callable[..., MazeVectorEnv] | None = None
    """Creates vector environments for an `env.backend` other than gymnasium; see
    `make_third_party_env`."""

    collector_class: Callable[[MazeVectorEnv], type[RolloutCollector]] | None = None
    """Returns the collector class for these environments; None: `RolloutCollector`."""
