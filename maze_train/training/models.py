"""The model of a run: networks for the spaces of its environment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.rollout.config import SNAPSHOT
from maze_train.spaces.agents import agent_spaces
from maze_train.targets import locate
from maze_train.training.leagues import with_leagues
from maze_train.training.policies import build_joint_model, learner_with_frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gymnasium import spaces
    from torch import nn

    from maze_train.learner.learner import Learner
    from maze_train.nets.config import ModelConfig
    from maze_train.training.config import AlgorithmConfig, PolicyConfig
    from maze_train.types import Tensor


def modules_of(model: nn.Module) -> dict[str, Any]:
    """The modules of a model by id: the policies of several agents, or the model itself."""
    by_policy: dict[str, Any] = getattr(model, "by_policy", {DEFAULT_MODULE: model})
    return by_policy


def model_weights(
    modules: Mapping[str, dict[str, Tensor]],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
) -> dict[str, Tensor]:
    """The weights of a model from those of its modules by id, as `make_model` would build it."""
    if agent_spaces(observation_space, action_space) is None:
        return modules[DEFAULT_MODULE]
    return {
        f"policies.{policy}.{name}": value
        for policy, weights in modules.items()
        if SNAPSHOT not in policy
        for name, value in weights.items()
    }


def make_model(
    algorithm: AlgorithmConfig,
    config: ModelConfig,
    policies: Mapping[str, PolicyConfig],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    seed: int,
) -> nn.Module:
    """The model of an algorithm for the spaces of an environment, of one agent or several.

    Raises:
        ConfigError: If the algorithm does not learn for several agents, policies do not fit them,
            or a network can not be built.
    """
    build = partial(locate(algorithm.model_builder), **algorithm.model_settings)
    several = agent_spaces(observation_space, action_space)
    model: nn.Module
    if several is None:
        if policies:
            problem = "the environment has one agent; leave it out"
            raise ConfigError("policies", problem, list(policies))
        if config.centralized_critic:
            problem = "the environment has one agent; leave it out"
            raise ConfigError("model.centralized_critic", problem, True)
        model = build(config, observation_space, action_space, seed)
        return model
    if not algorithm.learns_for_several_agents:
        problem = (
            "learns for one agent, the environment has several; choose one of ppo, a2c, impala, "
            "sac, td3, dqn, bc, es"
        )
        raise ConfigError("algorithm", problem, algorithm.name)
    model = build_joint_model(build, config, several, policies, seed)
    return model


def learner_maker(
    algorithm: AlgorithmConfig, policies: Mapping[str, PolicyConfig], chosen: Sequence[str] | None
) -> Callable[..., Learner[Any, Any, Any]]:
    """What makes the learner of an algorithm of modules by id, and further arguments.

    Args:
        algorithm: Settings of the algorithm.
        policies: Settings of the policies by id.
        chosen: Ids of those that learn; None: all that are not frozen.

    Raises:
        ConfigError: If there are to be snapshots, which the algorithm does not have.
    """
    for policy, own in policies.items():
        if own.opponents is not None and not algorithm.has_snapshots:
            problem = f"{algorithm.name} has no self-play against snapshots; choose a2c or ppo"
            raise ConfigError(f"policies.{policy}.opponents", problem, own.opponents.draw)
    make_learner: Callable[..., Learner[Any, Any, Any]] = locate(algorithm.learner_class)
    if policies or chosen is not None:
        make_learner = partial(learner_with_frozen, make_learner, policies, chosen)
    return make_learner


def with_opponents(collector: Any, model: Any, context: Any, learners: Any) -> Any:
    """A collector in which policies also play against their snapshots, if settings say so.

    Args:
        collector: Collects rollouts.
        model: The model of all policies.
        context: The `BuildContext` of the run.
        learners: The `LearnerGroup`, which gets the snapshots.
    """
    if any(own.opponents for own in context.policies.values()):
        return with_leagues(collector, model, context, learners)
    return collector
