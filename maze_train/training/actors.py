"""Actors: copies of the policy that collect experience in the environment processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from maze_train.collect.actor_collector import ActorCollector
from maze_train.collect.actors import DistributedActors
from maze_train.core.types import Array
from maze_train.envs.building import close_quietly
from maze_train.training.builder import AlgorithmBuilder, BuildContext
from maze_train.training.features import ActorParts
from maze_train.workers.backends import ThisProcess


def build_actors(
    context: BuildContext[Any], num_actors: int, num_envs: int, **workers: Any
) -> DistributedActors:
    """Build actors and register them to be closed at the end of the run.

    Args:
        context: Settings, environment and services of the run.
        num_actors: Number of actors.
        num_envs: Number of environments per actor.
        **workers: Further arguments of `DistributedActors`.
    """
    make_env = partial(context.env_maker(ThisProcess()), num_envs, device="cpu")
    calls = context.env_calls.training
    make_actors = context.features.make_actors or DistributedActors
    actors: DistributedActors = make_actors(
        make_env, num_actors, num_envs, context.backend, calls=calls, **workers
    )
    context.closing.callback(close_quietly, actors)
    return actors


def make_actors(builder: AlgorithmBuilder[Any]) -> DistributedActors:
    """Build the actors requested by `runner.envs_per_actor`."""
    context = builder.context
    per_actor, backend = context.config.runner.envs_per_actor, context.backend
    num_actors = builder.num_envs // per_actor
    return build_actors(
        context,
        num_actors,
        per_actor,
        num_workers=backend.num_workers(num_actors),
        can_be_restored=context.config.checkpoint.is_on or backend.may_restart,
    )


def make_actor_collector(
    builder: AlgorithmBuilder[Any], acting: nn.Module, num_steps: int, settings: Mapping[str, Any]
) -> ActorCollector:
    """Build the collector that gathers rollouts from the builder's actors."""
    actors: Any = builder.env

    def forget(lost: Array) -> None:
        envs = torch.from_numpy(lost)
        builder.learners.foreach_learner(lambda learner: learner.forget_episodes(envs))

    return ActorCollector(
        actors,
        acting,
        builder.model_maker(),
        num_steps,
        on_lost=forget,
        **settings,
    )


PARTS = ActorParts(make_actors, make_actor_collector)
"""Functions that create the actors of A2C and PPO."""
