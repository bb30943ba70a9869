"""Actors of a run, which collect whole rollouts with copies of the policy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from maze_train.rollout.actor_collector import ActorCollector
from maze_train.rollout.actor_pool import Actors
from maze_train.training.config import TRIAL_STEPS
from maze_train.training.environments import build_vector_env, close_quietly
from maze_train.workers.places import ThisProcess

if TYPE_CHECKING:
    from maze_train.rollout.actor_worker import MakeActorEnv
    from maze_train.training.builder import AlgorithmBuilder, BuildContext
    from maze_train.types import Array


def actor_env_maker(context: BuildContext[Any], num_envs: int) -> MakeActorEnv:
    """What builds the environments of one actor, in the process in which it lives."""
    return partial(
        build_vector_env,
        [context.env_factory] * num_envs,
        context.env,
        ThisProcess(),
        context.algorithm.on_non_finite_step,
    )


def build_actors(builder: AlgorithmBuilder[Any]) -> Actors:
    """The actors that `runner.envs_per_actor` asks for, closed at the end of the run."""
    context, num_envs = builder.context, builder.context.envs_per_actor
    num_actors = builder.num_envs // num_envs
    actors = Actors(
        actor_env_maker(context, num_envs),
        num_actors,
        num_envs,
        context.place,
        num_workers=context.place.num_workers(num_actors),
        can_be_restored=True,
    )
    context.closing.callback(close_quietly, actors)
    return actors


def build_actor_collector(
    builder: AlgorithmBuilder[Any], num_steps: int, acting: Any, stream: str
) -> ActorCollector:
    """What collects rollouts with the actors of a run; see `AlgorithmBuilder.make_collector`."""
    context = builder.context
    actors: Any = builder.env

    def forget(lost: Array) -> None:
        envs = torch.from_numpy(lost)
        builder.learners.foreach_learner(lambda learner: learner.forget_episodes(envs))

    return ActorCollector(
        actors,
        acting,
        builder.model_maker(),
        min(num_steps, TRIAL_STEPS) if context.is_trial else num_steps,
        env_seed=context.seeds.integer(f"{stream}episodes"),
        action_seed=context.seeds.integer(f"{stream}actions"),
        on_lost=forget,
        allow_new_episodes=context.checkpoint.allow_new_episodes,
        info_keys=context.info_keys,
    )
