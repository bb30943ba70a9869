"""The model of a run: networks for the spaces of its environment."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError
from maze_train.learner.modules import DEFAULT_MODULE
from maze_train.spaces.agents import agent_spaces
from maze_train.targets import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymnasium import spaces
    from torch import nn

    from maze_train.nets.config import ModelConfig
    from maze_train.training.config import AlgorithmConfig, PolicyConfig
    from maze_train.types import Tensor


BUILD_JOINT_MODEL = "maze_train.training.policies.build_joint_model"
"""Found where there are several agents."""


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
        model = build(config, observation_space, action_space, seed)
        return model
    if not algorithm.learns_for_several_agents:
        problem = (
            "learns for one agent, the environment has several; choose one of ppo, a2c, impala, "
            "sac, td3, dqn"
        )
        raise ConfigError("algorithm", problem, algorithm.name)
    model = locate(BUILD_JOINT_MODEL)(build, config, several, policies, seed)
    return model
