"""Checks of an environment before training: API, reproducibility, shared state and speed."""

from __future__ import annotations

import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.utils.env_checker import check_env as check_gymnasium_api

from maze_train.collect.custom_policies import UniformPolicy
from maze_train.core.errors import ConfigError
from maze_train.core.types import leaves_by_key
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import EnvFactory, env_name
from maze_train.envs.faults import separate_processes
from maze_train.envs.pooled import NEW_EPISODES, PooledVectorEnv
from maze_train.envs.vector import zeroed_columns
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.describe import FlatView, flat_spaces, is_mask_key

SEPARATE = separate_processes("<runner.concurrency>")
"""Remedy if an environment supports only one instance per process."""

COLOR = re.compile(r"\x1b\[\d+m|WARN: ")
"""Decoration of Gymnasium's warnings."""

WRAPPED = "is different from the unwrapped version"
"""Text of a warning of Gymnasium's checker that concerns the check and not the environment."""


@dataclass(frozen=True)
class EnvReport:
    """Result of `check_env`."""

    env: str
    """Name of the environment."""

    problems: tuple[str, ...]
    """Failed checks, each with a remedy."""

    notes: tuple[str, ...]
    """Warnings of Gymnasium's checker."""

    reset_s: float
    """Mean time of a reset in seconds."""

    step_s: float
    """Mean time of a step in seconds."""

    def __str__(self) -> str:
        times = f"reset {1e3 * self.reset_s:.3g} ms, step {1e3 * self.step_s:.3g} ms"
        head = f"{self.env}: {len(self.problems)} problems; {times}"
        return "\n- ".join([head, *self.problems, *(f"note: {note}" for note in self.notes)])


def check_env(
    env: str | EnvConfig | Callable[..., Env[Any, Any]], *, seed: int = 0, n_steps: int = 100
) -> EnvReport:
    """Check an environment: build a few instances in this process and take random actions.

        print(check_env("CartPole-v1"))

    Runs Gymnasium's checker; checks that seed and actions reproduce an episode, as exact resume
    requires, and that instances in one process do not share state; measures reset and step.

    Args:
        env: Registered ID, environment class or factory function, or an `EnvConfig`.
        seed: Seed of the episodes and actions, >= 0.
        n_steps: Number of steps of each episode prefix, >= 1.

    Raises:
        ConfigError: If `env` is not a single environment.
        EnvError: If the environment cannot be built, reset or stepped.
    """
    make = EnvFactory.from_any(env)
    backend = make.config.backend
    if backend != "gymnasium":
        raise ConfigError("env.backend", "only environments of gymnasium can be checked", backend)
    problems, notes = _api_problems(make)
    before = _global_states()
    with PooledVectorEnv([make]) as first:
        before = {**_global_states(), **before}  # Building the environment may import PyTorch.
        # The first episode is ignored, because the constructor may leave a different state.
        _, alone, again = (list(_episode(first, seed, n_steps)) for _ in range(3))
        after = _global_states()
        generators = [name for name in before if before[name] != after[name]]
        if generators:
            problems.append(
                f"the environment uses global random generators ({', '.join(generators)}), which "
                "all environments in a process share, so results depend on runner and on the "
                "number of workers; use self.np_random instead"
            )
        try:
            with PooledVectorEnv([make]) as second:
                others = _episode(second, seed + 1, n_steps)
                beside = [
                    row for row, _ in zip(_episode(first, seed, n_steps), others, strict=True)
                ]
                if not generators and alone == again != beside:
                    problem = "environments in one process change each other's observations"
                    problems.append(f"{problem}: {SEPARATE}")
                list(_episode(first, seed, n_steps))
                second.load_state_dict(first.state_dict(), allow_new_episodes=True)
                problems += [
                    f"the same seed and actions lead to another episode ({found.text}), so a run "
                    f"cannot be resumed exactly. {NEW_EPISODES}"
                    for found in second.differences
                    if not found.is_rounding
                ]
        except Exception as error:
            problems.append(f"a second environment in one process fails ({error}): {SEPARATE}")
    times = _times(make, seed, n_steps)
    return EnvReport(env_name(make.config), tuple(problems), tuple(notes), *times)


def _api_problems(make: EnvFactory) -> tuple[list[str], list[str]]:
    """Return the errors and warnings of Gymnasium's checker, which ignores masks and agents."""
    env = make()
    try:
        leaves = flat_spaces(env.observation_space)
        is_special = agent_spaces(env.observation_space, env.action_space) is not None
        if is_special or any(map(is_mask_key, leaves)):
            return [], []
        problems = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                check_gymnasium_api(env, skip_render_check=True, skip_close_check=True)
            except Exception as error:  # The checker raises assertions and errors of all kinds.
                problems = [f"Gymnasium's checker: {error}"]
        texts = dict.fromkeys(COLOR.sub("", str(warning.message)) for warning in caught)
        return problems, [text for text in texts if WRAPPED not in text]
    finally:
        env.close()


def _episode(env: PooledVectorEnv, seed: int, n_steps: int) -> Iterator[bytes]:
    """Yield observations and rewards of the first steps after a reset; actions are random."""
    observation, action = FlatView(env.env_observation_space), FlatView(env.single_action_space)
    policy = UniformPolicy(env.env_observation_space, env.single_action_space)
    policy.reset(seed)
    obs, _ = env.reset(seed=seed)
    rewards = b""
    for _ in range(n_steps):
        leaves = leaves_by_key(obs)
        yield rewards + b"".join(leaf.tobytes() for leaf in leaves.values())
        actions = zeroed_columns(action, 1)
        for key, value in action.read(policy.act(observation.row(leaves, 0))):
            actions[key][0] = value
        env.step_async(actions[""] if action.is_single else actions)
        batch = env.receive()
        obs, rewards = batch.obs, batch.rewards.tobytes()


def _times(make: EnvFactory, seed: int, n_steps: int) -> tuple[float, float]:
    """Return the mean time of a reset and of a step in seconds."""
    env = make()
    policy = UniformPolicy(env.observation_space, env.action_space)
    policy.reset(seed)
    reset_s: list[float] = []
    step_s: list[float] = []
    is_over = True
    try:
        while len(step_s) < n_steps:
            if is_over:
                started = time.perf_counter()
                obs, _ = env.reset(seed=seed + len(reset_s))
                reset_s.append(time.perf_counter() - started)
            action = policy.act(obs)
            started = time.perf_counter()
            obs, _, terminated, truncated, _ = env.step(action)
            step_s.append(time.perf_counter() - started)
            is_over = terminated or truncated
    finally:
        env.close()
    return float(np.mean(reset_s)), float(np.mean(step_s))


def _global_states() -> dict[str, object]:
    """Return the states of the global random number generators by name."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002
    states: dict[str, object] = {
        "random": random.getstate(),
        "np.random": (legacy["state"]["key"].tobytes(), legacy["state"]["pos"]),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states
