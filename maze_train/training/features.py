"""Optional parts of an algorithm; whoever assembles a run passes in those that it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from maze_train.collect.collector import Collector, RolloutCollector, Turns
from maze_train.envs.vector import MazeVectorEnv
from maze_train.learner.config import LearnerGroupConfig
from maze_train.learner.learner import Learner
from maze_train.learner.learners import Learners
from maze_train.workers.places import Place


class ActorParts(NamedTuple):
    """Actors that collect experience, made for an `AlgorithmBuilder`."""

    make: Callable[[Any], Any]
    """Makes the actors, in the place of environments."""

    make_collector: Callable[[Any, Any, int, Mapping[str, Any]], Collector]
    """Makes their collector from the builder, what acts, steps per rollout, and settings."""

    worker_use: Callable[[Any], tuple[float, int] | None]
    """See `AlgorithmBuilder.worker_use`; takes the actors."""


class AgentParts(NamedTuple):
    """What an algorithm needs where there are several agents."""

    make_model: Callable[..., nn.Module]
    """Takes the arguments of `make_model` in `training/models.py`."""

    turns_of: Callable[..., Turns]
    """Makes the rollouts of the policies of a model; see `TurnSplitter`."""


@dataclass(frozen=True, kw_only=True)
class BuildFeatures:
    """Optional parts from which an algorithm is built; the defaults are those of most runs."""

    agents: Callable[[], AgentParts]
    """Returns the parts for several agents; called if the environment has some."""

    make_group: Callable[[Learner[Any, Any, Any], LearnerGroupConfig, Place], Learners] | None = (
        None
    )
    """Makes a group of learners; None: there is one learner, which updates in the foreground."""

    actors: ActorParts | None = None
    """Actors; None: the policy of the learner acts in all environments."""

    make_league: Callable[..., Collector] | None = None
    """Makes the collector of policies that play against their snapshots, see
    `make_league_collector`; None: none has snapshots."""

    make_vector_env: Callable[..., MazeVectorEnv] | None = None
    """Makes vector environments of another `env.backend` than gymnasium; see `make_foreign_env`."""

    collector_class: Callable[[MazeVectorEnv], type[RolloutCollector]] | None = None
    """Returns the collector for such environments; None: `RolloutCollector`."""
