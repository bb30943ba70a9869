"""Simulators of functional JAX environments: Brax, MuJoCo Playground, gymnax and custom ones.

A functional environment is stateless: `reset(key) -> state` and `step(state, action) -> state`,
where the state is a pytree with `obs`, `reward` and `done`. One compiled function steps all copies,
and PyTorch tensors share memory with the JAX arrays (DLPack).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch.utils.dlpack import from_dlpack

from maze_train.core.errors import ConfigError, EnvError
from maze_train.core.step_end import TERMINATED, TRUNCATED, StepBatch
from maze_train.core.targets import import_extra
from maze_train.core.types import Tensor, TensorTree, tree_map
from maze_train.simulators.simulator import Simulator, flat_leaves, offered
from maze_train.spaces.describe import FlatView

EXTRA = "jax"


@dataclass(frozen=True)
class FunctionalEnv:
    """Functional environment in a package-independent form."""

    reset: Callable[[Any], Any]
    """Returns the initial state for a random key: a pytree with `obs`, `reward` and `done`."""
    step: Callable[[Any, Any], Any]
    """Returns the next state for a state and an action."""
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    max_episode_steps: int | None = None
    """Maximum number of steps of an episode; None disables truncation."""
    render: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """Returns an image for each state; None if rendering is not supported."""


class FunctionalSimulator(Simulator):
    """B copies of a functional environment, stepped by one compiled function.

    Episode e of environment i starts from the key `fold_in(fold_in(key(seed), i), e)`. When an
    episode ends, the next one begins in the same step.

    Args:
        env: The environment.
        num_envs: B.
        device: Device of all computations.
        name: Name in messages.

    Raises:
        ConfigError: If the device is not available to JAX.
    """

    can_be_restored = True

    def __init__(self, env: FunctionalEnv, num_envs: int, device: torch.device, name: str) -> None:
        self._jax = import_extra("jax", EXTRA, name)
        self.num_envs, self.device, self.name = num_envs, device, name
        self._env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._observation = FlatView(self.observation_space)
        self._action = FlatView(self.action_space)
        self._place = jax_device(self._jax, device)
        begin, advance = functions(self._jax, env, num_envs)
        self._begin, self._advance = self._jax.jit(begin), self._jax.jit(advance)
        self._carry: Any = None

    @property
    def called(self) -> Any:
        """Not supported: compiled functions ignore later changes of the environment."""
        raise EnvError(f"{self.name} is compiled by JAX and cannot be changed during a run")

    def reset(self, seed: int) -> TensorTree:
        """Begin a new episode in every environment."""
        with self._jax.default_device(self._place):
            self._carry = self._begin(self._jax.random.PRNGKey(seed))
        return self._tensors(self._carry["state"].obs)

    def _step(self, actions: TensorTree) -> StepBatch[Tensor]:
        """Step every environment once."""
        given = tree_map(as_array_of(self._jax), actions)
        nested = given if self._action.is_single else self._action.build(given)
        self._carry, result = self._advance(self._carry, nested)
        return StepBatch(
            obs=self._tensors(result["obs"]),
            rewards=from_dlpack(result["rewards"]),
            end=from_dlpack(result["end"]),
            final_obs=self._tensors(result["final_obs"]),
            columns={key: from_dlpack(value) for key, value in result["infos"].items()},
        )

    def _tensors(self, obs: object) -> TensorTree:
        return tree_map(from_dlpack, flat_leaves(self._observation, obs))

    def render(self) -> Any:
        """Return an image of the first environment, rendered by `env.render([state])`.

        MuJoCo Playground renders its states; Brax renders their `pipeline_state`.
        """
        if self._env.render is None:
            return None
        state = self._jax.tree.map(
            lambda leaf: leaf[0] if leaf.shape[:1] == (self.num_envs,) else leaf,
            self._carry["state"],
        )
        return self._env.render([offered(state, ["pipeline_state"]).get("pipeline_state", state)])[
            0
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves of the state pytree as arrays."""
        return {"leaves": [np.asarray(leaf) for leaf in self._jax.tree.leaves(self._carry)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running episodes from `state`.

        Raises:
            EnvError: If shapes or dtypes in the state do not match this simulator.
        """
        jax = self._jax
        expected = jax.eval_shape(self._begin, jax.random.PRNGKey(0))
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(expected)]
        if shapes != [(leaf.shape, leaf.dtype) for leaf in state["leaves"]]:
            raise EnvError(
                f"the saved state does not fit {self.num_envs} environments {self.name}: use "
                "the settings and package versions of the original run"
            )
        leaves = [jax.device_put(leaf, self._place) for leaf in state["leaves"]]
        self._carry = jax.tree.unflatten(jax.tree.structure(expected), leaves)


def functions(
    jax: ModuleType, env: FunctionalEnv, num_envs: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a function that begins all episodes and one that steps all environments."""
    jnp, limit = jax.numpy, env.max_episode_steps

    def begin_episodes(root: object, episodes: object) -> object:
        fold_in = jax.random.fold_in
        keys = jax.vmap(lambda i, e: fold_in(fold_in(root, i), e))(jnp.arange(num_envs), episodes)
        return jax.vmap(env.reset)(keys)

    def begin(root: object) -> dict[str, object]:
        zeros = jnp.zeros(num_envs, jnp.int32)
        state = begin_episodes(root, zeros)
        return {"state": state, "root": root, "episodes": zeros, "steps": zeros}

    def advance(carry: dict[str, Any], actions: object) -> tuple[dict[str, Any], dict[str, Any]]:
        state = jax.vmap(env.step)(carry["state"], actions)
        steps = carry["steps"] + 1
        terminated = state.done.astype(bool)
        truncated = jnp.zeros_like(terminated) if limit is None else (steps >= limit) & ~terminated
        ended = terminated | truncated
        episodes = carry["episodes"] + ended

        def chosen(new: Any, old: Any) -> Any:
            if old.shape[:1] != (num_envs,):
                return old  # All environments share this array, as in the data of MuJoCo Warp.
            return jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

        # A scalar condition compiles to a branch, so resets cost nothing if no episode ended.
        following = jax.lax.cond(
            ended.any(),
            lambda: jax.tree.map(chosen, begin_episodes(carry["root"], episodes), state),
            lambda: state,
        )
        steps = jnp.where(ended, 0, steps)
        result = {
            "obs": following.obs,
            "rewards": state.reward.astype(jnp.float32),
            "end": (terminated * TERMINATED + truncated * TRUNCATED).astype(jnp.uint8),
            "final_obs": state.obs,
            "infos": numbers_of(state, num_envs),
        }
        return {
            "state": following,
            "root": carry["root"],
            "episodes": episodes,
            "steps": steps,
        }, result

    return begin, advance


def numbers_of(state: object, num_envs: int) -> dict[str, Any]:
    """Return the metrics of a state that have shape `[B]`, by name (`metrics` in Brax)."""
    metrics = offered(state, ["metrics"]).get("metrics") or {}
    return {key: value for key, value in metrics.items() if value.shape == (num_envs,)}


def as_array_of(jax: ModuleType) -> Callable[[torch.Tensor], Any]:
    """Return a function that converts a tensor to a JAX array; int64 becomes int32."""

    def convert(x: torch.Tensor) -> Any:
        x = x.int() if x.dtype == torch.int64 else x
        return jax.dlpack.from_dlpack(x.detach().contiguous())

    return convert


def jax_device(jax: ModuleType, device: torch.device) -> object:
    """Return the JAX device for a PyTorch device.

    Raises:
        ConfigError: If the device is not available to JAX.
    """
    kind = "gpu" if device.type == "cuda" else device.type
    try:
        return jax.devices(kind)[device.index or 0]
    except (RuntimeError, IndexError) as error:
        problem = f"not available to JAX ({error}): install JAX for it, or set env.device=cpu"
        raise ConfigError("env.device", problem, str(device)) from error


GYMNAX = ("default_params", "reset_env", "step_env")
"""Attributes that identify environments of gymnax and Craftax."""

BRAX = (
    "num_envs",
    "reset",
    "step",
    "observation_space",
    "action_space",
    "max_episode_steps",
    "render",
)
"""Attributes read from Brax-style environments. Environments with `num_envs` are not Brax-style."""


def functional_env(env: Any, limit: int | None = None) -> FunctionalEnv | None:
    """Convert an environment to its functional form; return None if it is not functional.

    Args:
        env: Environment in the style of gymnax, or of Brax with `reset(key)` and `step(state,
            action)`. A Brax-style environment declares Gymnasium spaces (`observation_space`,
            `action_space`) or sizes.
        limit: Maximum number of steps of an episode if the environment declares none.
    """
    if isinstance(env, FunctionalEnv):
        return env
    found = offered(env, GYMNAX)
    if len(found) == len(GYMNAX):
        return gymnax_env(env, found["default_params"], {})
    found = offered(env, BRAX)
    if "num_envs" in found or not found.keys() >= {"reset", "step"}:
        return None
    observation, action = found.get("observation_space"), found.get("action_space")
    if not isinstance(observation, spaces.Space):
        observation = space_of_size(env.observation_size)
    if not isinstance(action, spaces.Space):
        action = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
    limit = found.get("max_episode_steps", limit)
    return FunctionalEnv(
        found["reset"], found["step"], observation, action, limit, found.get("render")
    )


def space_of_size(size: int | Sequence[int] | Mapping[str, Any]) -> spaces.Space[Any]:
    """Return an unbounded Box for an observation size: an int, a shape, or a mapping of sizes."""
    if isinstance(size, Mapping):
        return spaces.Dict({key: space_of_size(part) for key, part in size.items()})
    shape = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


class GymnaxState(NamedTuple):
    """State of a gymnax environment."""

    inner: object
    key: object
    obs: object
    reward: object
    done: object


GYMNAX_LIMITS = ("max_steps_in_episode", "max_timesteps")
"""Parameters of gymnax and Craftax that limit the steps of an episode."""


def gymnax_env(env: Any, params: Any, changes: Mapping[str, Any]) -> FunctionalEnv:
    """Convert an environment of gymnax, whose functions take a random key, to its functional form.

    Args:
        env: The environment.
        params: Default parameters of the environment.
        changes: Parameters to replace.
    """
    jax = import_extra("jax", EXTRA, "gymnax")
    params = params.replace(**changes)
    limit = None
    for name, value in [*offered(params, GYMNAX_LIMITS).items()][:1]:
        # gymnax would report its time limit as termination, so it is disabled.
        limit, params = int(value), params.replace(**{name: 2**30})

    def reset(key: object) -> GymnaxState:
        first, key = jax.random.split(key)
        obs, inner = env.reset_env(first, params)
        return GymnaxState(inner, key, obs, jax.numpy.float32(0), jax.numpy.bool_(False))

    def step(state: GymnaxState, action: object) -> GymnaxState:
        own, key = jax.random.split(state.key)
        obs, inner, reward, done, _ = env.step_env(own, state.inner, action, params)
        return GymnaxState(inner, key, obs, reward, done)

    observation, action = env.observation_space(params), env.action_space(params)
    return FunctionalEnv(reset, step, gymnasium_space(observation), gymnasium_space(action), limit)


def gymnasium_space(space: Any) -> spaces.Space[Any]:
    """Convert a gymnax space to a Gymnasium space."""
    match offered(space, ("spaces", "n")):
        case {"spaces": parts}:
            named = parts if isinstance(parts, Mapping) else dict(enumerate(parts))
            return spaces.Dict({str(key): gymnasium_space(part) for key, part in named.items()})
        case {"n": n}:
            return spaces.Discrete(int(n))
    dtype = np.dtype(space.dtype).type
    low, high = (
        np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high)
    )
    return spaces.Box(low, high, tuple(space.shape), dtype)


def brax(name: str, kwargs: Mapping[str, Any]) -> FunctionalEnv | None:
    """Return a Brax environment (Freeman et al. 2021) with the usual limit of 1000 steps."""
    envs = import_extra("brax", EXTRA, f"brax:{name}", "brax.envs")
    return functional_env(envs.get_environment(name, **kwargs), 1000)


def playground(name: str, kwargs: Mapping[str, Any]) -> FunctionalEnv | None:
    """Return a MuJoCo Playground environment (Zakka et al. 2025) with its step limit."""
    registry = import_extra("mujoco_playground", EXTRA, f"playground:{name}").registry
    limit = int(registry.get_default_config(name).episode_length)
    return functional_env(registry.load(name, **kwargs), limit)


def gymnax(name: str, kwargs: Mapping[str, Any]) -> FunctionalEnv | None:
    """Return a gymnax environment (Lange 2022) with its step limit."""
    env, params = import_extra("gymnax", EXTRA, f"gymnax:{name}").make(name)
    return gymnax_env(env, params, kwargs)


SUITES = {"brax": brax, "gymnax": gymnax, "playground": playground}
"""Packages of functional environments, by the prefix of an id."""
