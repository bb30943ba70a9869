"""Builds the simulator selected by the settings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError
from maze_train.core.targets import maker_of
from maze_train.simulators.functional import (
    SUITES,
    FunctionalEnv,
    FunctionalSimulator,
    functional_env,
)
from maze_train.simulators.simulator import Simulator
from maze_train.simulators.tensors import TensorSimulator


def make_simulator(
    env_id: str | None,
    target: str | None,
    kwargs: Mapping[str, Any],
    num_envs: int,
    *,
    device: torch.device | str = "cpu",
    max_episode_steps: int | None = None,
    at_most: int | None = None,
) -> Simulator:
    """Build a simulator.

    Args:
        env_id: `brax:<name>`, `gymnax:<name>` or `playground:<name>`; None if `target` is given.
        target: Class or function that returns a vector environment of tensors or a functional JAX
            environment. The arguments `num_envs` and `device` are passed if accepted. None if
            `env_id` is given.
        kwargs: Arguments of the environment.
        num_envs: Number of environments.
        device: Device of the environments, if accepted.
        max_episode_steps: Maximum length of an episode; None selects the environment's default.
        at_most: Upper bound on `max_episode_steps`, if the environment accepts a limit; None
            disables this bound.

    Raises:
        ConfigError: If the name is unknown, or the environment rejects a setting.
        EnvError: If the simulator cannot be built, or has an unknown interface.
        MissingExtraError: If a required package is not installed.
    """
    device = torch.device(device)
    name = env_id or str(target)
    if env_id is not None:
        env = from_suite(env_id, kwargs)
    else:
        env = built(target or "", kwargs, num_envs, device, max_episode_steps, at_most)
    functional = functional_env(env)
    if functional is not None:
        limits = [max_episode_steps or functional.max_episode_steps, at_most]
        limit = min((steps for steps in limits if steps), default=None)
        functional = replace(functional, max_episode_steps=limit)
        return FunctionalSimulator(functional, num_envs, device, name)
    simulator = TensorSimulator(env, name)
    if simulator.num_envs != num_envs:
        simulator.close()
        raise EnvError(
            f"{name} has {simulator.num_envs} environments, expected {num_envs}: build as many as "
            "the argument num_envs requests, or set runner.concurrency to match"
        )
    return simulator


def from_suite(env_id: str, kwargs: Mapping[str, Any]) -> FunctionalEnv | None:
    """Return a functional environment by its id."""
    suite, _, name = env_id.partition(":")
    if suite not in SUITES:
        known = ", ".join(f"{key}:<name>" for key in SUITES)
        problem = f"env.backend=tensor expects {known}, or a class or function in env._target_"
        raise ConfigError("env.id", problem, env_id)
    try:
        return SUITES[suite](name, kwargs)
    except MazeTrainError:
        raise
    except Exception as error:  # Each package raises different errors.
        problem = f"{suite} failed to build it: {type(error).__name__}: {error}"
        raise ConfigError("env", problem, env_id) from error


def built(
    target: str,
    kwargs: Mapping[str, Any],
    num_envs: int,
    device: torch.device,
    max_episode_steps: int | None,
    at_most: int | None,
) -> Any:
    """Call the target to build an environment, with the smaller of the two step limits."""
    make = maker_of(target, "env._target_")
    parameters = inspect.signature(make).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    offered = {"num_envs": num_envs, "device": device, "max_episode_steps": max_episode_steps}
    if at_most is not None and "max_episode_steps" in parameters:
        own = max_episode_steps or parameters["max_episode_steps"].default
        offered["max_episode_steps"] = min(own, at_most) if isinstance(own, int) else at_most
    if offered["max_episode_steps"] is None:
        del offered["max_episode_steps"]
    given = {k: v for k, v in offered.items() if k in parameters or (takes_all and k != "device")}
    try:
        return make(**{**given, **kwargs})
    except MazeTrainError:
        raise
    except Exception as error:  # Third-party code may raise anything.
        raise EnvError(f"{target} could not be built: {type(error).__name__}: {error}") from error
