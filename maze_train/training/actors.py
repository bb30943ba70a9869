"""Actors of a run, which collect whole rollouts with copies of the policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.rollout.actor_pool import Actors
from maze_train.training.environments import build_vector_env, close_quietly
from maze_train.workers.places import ThisProcess

if TYPE_CHECKING:
    from maze_train.rollout.actor_worker import MakeActorEnv
    from maze_train.training.build_context import BuildContext


def actor_env_maker(context: BuildContext[Any], num_envs: int) -> MakeActorEnv:
    """What builds the environments of one actor, in the process in which it lives."""
    return partial(
        build_vector_env,
        [context.env_factory] * num_envs,
        context.env,
        ThisProcess(),
        context.algorithm.on_non_finite_step,
    )


def build_actors(context: BuildContext[Any], num_envs: int) -> Actors:
    """The actors that `runner.envs_per_actor` asks for, closed at the end of the run."""
    num_actors = num_envs // context.envs_per_actor
    actors = Actors(
        actor_env_maker(context, context.envs_per_actor),
        num_actors,
        context.envs_per_actor,
        context.place,
        num_workers=context.place.num_workers(num_actors),
        can_be_restored=True,
    )
    context.closing.callback(close_quietly, actors)
    return actors
