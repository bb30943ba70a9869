"""Checks whether the environments of one process share state.

The checks build and step additional environments, so they run in a disposable process.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze_train.collect.uniform import UniformPolicy
from maze_train.core.types import ArrayTree, leaves_by_key
from maze_train.envs.faults import separate_processes
from maze_train.envs.pooled import PooledVectorEnv
from maze_train.envs.slice import EnvSlice
from maze_train.envs.vector import zeroed_columns
from maze_train.spaces.describe import FlatView

STEPS = 20
"""Number of steps of each episode prefix."""

REPLAYED, REPLAYED_S = 100, 0.4
"""Maximum number of replayed steps, and time limit for recording in seconds."""

SEED = 0

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]


@dataclass(frozen=True)
class Findings:
    """State shared by the environments of one process.

    Attributes:
        second_fails: Error message if a second environment cannot be built or stepped, else empty.
        shares_state: Whether stepping one environment changes the observations of another.
        generators: Global random generators that the environment uses.
    """

    second_fails: str = ""
    shares_state: bool = False
    generators: tuple[str, ...] = ()


def examine(make_env: MakeEnv) -> Findings:
    """Play an episode prefix alone and beside a different episode, and compare the results.

    Environments that are not deterministic, or that use global random number generators, are not
    checked for shared state.

    Args:
        make_env: Builds an environment.

    Raises:
        EnvError: If the first environment fails.
    """
    before = global_states()
    first = EnvSlice.for_playing([make_env])
    before = {**global_states(), **before}  # Building the environment may import PyTorch.
    # Ignore the first episode: the environment itself may leave state behind.
    _, alone, again = (prefix(first) for _ in range(3))
    after = global_states()
    generators = tuple(name for name in before if before[name] != after[name])
    try:
        second = EnvSlice.for_playing([make_env])
        beside = prefix(first, second)
    except Exception as error:
        return Findings(str(error), generators=generators)
    is_comparable = not generators and alone == again
    return Findings("", is_comparable and beside != alone, generators)


def replay_difference(make_env: MakeEnv) -> str:
    """Play an episode prefix and replay it in a second environment, as when a run is resumed.

    Args:
        make_env: Builds an environment.

    Returns:
        Description of the difference after the replay; empty if the results are equal up to
        rounding.

    Raises:
        EnvError: If an environment fails.
    """
    with PooledVectorEnv([make_env]) as env, PooledVectorEnv([make_env]) as other:
        act = uniform_actions(env.env_observation_space, env.single_action_space, SEED)
        obs, _ = env.reset(seed=SEED)
        started = time.monotonic()
        for _ in range(REPLAYED):
            env.step_async(act(obs))
            obs = env.receive().obs
            if time.monotonic() - started > REPLAYED_S:
                break
        other.load_state_dict(env.state_dict(), allow_new_episodes=True)
        found = [difference.text for difference in other.differences if not difference.is_rounding]
    return found[0].rpartition(": ")[2] if found else ""


def prefix(envs: EnvSlice, beside: EnvSlice | None = None) -> list[bytes]:
    """Play the first steps of an episode; return the observations and rewards as bytes.

    Args:
        envs: The environment.
        beside: A second environment, in which a different episode is played in lockstep.
    """
    pair = [(envs, SEED)] if beside is None else [(envs, SEED), (beside, SEED + 1)]
    policies = [
        uniform_actions(each.observation.space, each.action.space, seed) for each, seed in pair
    ]
    for each, seed in pair:
        each.start(0, seed)
    seen = [row_of(envs)]
    for step in range(1, STEPS):
        for act, (each, seed) in zip(policies, pair, strict=True):
            for key, actions in leaves_by_key(act(each.obs)).items():
                each.actions[key][:] = actions
            each.step()
            if each.resting:
                each.start(0, seed + 2 * step)
        seen.append(row_of(envs))
    return seen


def uniform_actions(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], seed: int
) -> Callable[[ArrayTree], ArrayTree]:
    """Return a function from observations `[1, ...]` to random actions `[1, ...]`.

    Args:
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        seed: Seed of the actions, >= 0.

    Raises:
        SpaceError: If a mask does not fit the action space, or no action is legal.
    """
    observation, view = FlatView(observation_space), FlatView(action_space)
    policy = UniformPolicy(observation_space, action_space)
    policy.reset(seed)

    def act(obs: ArrayTree) -> ArrayTree:
        actions = zeroed_columns(view, 1)
        for key, value in view.read(policy.act(observation.row(leaves_by_key(obs), 0))):
            actions[key][0] = value
        return actions[""] if view.is_single else actions

    return act


def row_of(envs: EnvSlice) -> bytes:
    """Return the observation and the last reward as bytes."""
    columns = (envs.rewards, *envs.obs.values())
    return b"".join(column[0].tobytes() for column in columns)


def global_states() -> dict[str, Any]:
    """Return the states of the global random number generators by name."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002
    states: dict[str, Any] = {
        "random": random.getstate(),
        "np.random": (legacy["state"]["key"].tobytes(), legacy["state"]["pos"]),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def notes(findings: Findings, num_envs: int, num_eval_envs: int, num_workers: int) -> list[str]:
    """Return the findings as lines for the console.

    Args:
        findings: Result of `examine`.
        num_envs: Number of training environments.
        num_eval_envs: Number of evaluation environments; 0 if there are none.
        num_workers: Number of worker processes; 0 if all environments run in one process.
    """
    lines = []
    if findings.generators:
        lines.append(
            f"the environment uses global random generators ({', '.join(findings.generators)}), "
            "which all environments in a process share, so results depend on runner and on the "
            "number of workers; use self.np_random instead"
        )
    is_alone = num_workers >= max(num_envs, num_eval_envs) or num_envs + num_eval_envs == 1
    if is_alone or not (findings.shares_state or findings.second_fails):
        return lines
    problem = "environments of one process change each other's observations"
    if findings.second_fails:
        problem = f"a second environment in one process fails ({findings.second_fails})"
    lines.append(f"{problem}, in training and evaluation: {separate_processes(num_envs)}")
    return lines
