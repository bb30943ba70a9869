"""Policies that act in the rows of an environment: models, user-defined policies, random actions.

`BatchRows` evaluates a model in one batch on its device. In the other classes, each row is an
independent episode: the actions depend only on the policy, and on the seed and the observations of
the episode, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze_train.collect.custom_policies import (
    UniformPolicy,
    UserPolicy,
    built_policy,
    check_are_new,
)
from maze_train.collect.play import Episode, RowPolicy
from maze_train.core.errors import SpaceError
from maze_train.core.types import Array, ArrayTree, Tensor, TensorTree, tree_leaves, tree_map
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.envs.vector import MazeVectorEnv, zeroed_columns
from maze_train.learner.modules import torch_threads
from maze_train.nets.acting import ActingModel, Actor, acting, as_arrays
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import build_population, row_blocks
from maze_train.spaces.agents import ACTS
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import as_tensors

STEPS_PER_DRAW = 64
"""Number of steps for which action noise is sampled at a time."""


def num_reals(model: ActingModel) -> int:
    """Return the number of real-valued entries of an action, in the policy's representation."""
    leaves = tree_leaves(model.example_actions())
    return sum(leaf.numel() for leaf in leaves if leaf.is_floating_point())


class BatchRows(RowPolicy):
    """Acts with a model in all environments of a vector environment, in one batch.

    The batch always contains all rows, so that results do not depend on which of them play.

    Args:
        model: The model; its current weights are used at each step.
        env: The environments.
        deterministic: Whether to take the most likely action instead of sampling.
        seed: Seed of the actions.
    """

    def __init__(
        self, model: nn.Module, env: MazeVectorEnv, deterministic: bool, seed: int
    ) -> None:
        self._env, self._deterministic = env, deterministic
        self._actor = Actor(model, env.num_envs)
        self._generator = torch.Generator().manual_seed(seed)
        self._ended = np.zeros(env.num_envs, np.bool_)
        self._has_acted = False

    def begin(self, row: int, episode: Episode) -> None:
        """Begin an episode; see `RowPolicy`."""
        self._ended[row] = self._has_acted

    def act(self) -> ArrayTree:
        """Choose actions; see `RowPolicy`."""
        self._forget()
        self._has_acted = True
        env, actor, deterministic = self._env, self._actor, self._deterministic
        device = actor.hidden_state.device
        obs = as_tensors(env.single_observation_space, env.obs)
        noise = actor.model.noise_for(env.num_envs, self._generator, deterministic, device)
        sent = tree_map(lambda x: x.to(device), obs)
        rows = env.playing
        if len(rows) == env.num_envs:
            return as_arrays(actor.act(sent, noise, deterministic).env_actions)
        # User-defined policies are not asked for actions in paused rows.
        plays = torch.zeros(env.num_envs, dtype=torch.bool, device=device)
        plays[rows] = True
        if env.agents:
            assert isinstance(sent, dict)
            sent[ACTS] = torch.where(plays[:, None], sent[ACTS], torch.zeros_like(sent[ACTS]))
        acted = actor.act(sent, noise, deterministic, None if env.agents else plays)
        return tree_map(lambda x: x[rows], as_arrays(acted.env_actions))

    def close(self) -> None:
        """End the running episodes of a stateful policy."""
        self._ended[:] = True
        self._forget()

    def _forget(self) -> None:
        if self._ended.any():
            self._actor.forget(self._ended)
            self._ended[:] = False


class PopulationRows(RowPolicy):
    """Acts with one copy of a model and one random stream per environment.

    Actions are bit-for-bit independent of other episodes and of the row; see `nets.population`.

    Args:
        model: The model, on the CPU.
        envs: The environments.
        deterministic: Whether to take the most likely action instead of sampling.
        noise_stddev: Standard deviation (>= 0) of normal noise added to real-valued actions, in the
            policy's representation.
    """

    def __init__(
        self, model: nn.Module, envs: EnvSlice, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._envs, self._space = envs, flat_space(envs.observation.space)
        self._population = build_population(model, len(envs))
        self._acting = acting(model)
        self._deterministic, self._added_stddev = deterministic, noise_stddev
        is_sampled = not deterministic or self._acting.is_random
        self._num_sampled = self._acting.noise_size if is_sampled else 0
        self._num_added = num_reals(self._acting) if noise_stddev else 0
        size = self._num_sampled + self._num_added
        self._noise = torch.zeros(len(envs), STEPS_PER_DRAW, size) if size else None
        self._steps = np.zeros(len(envs), np.int64)
        self._generators = [torch.Generator() for _ in range(len(envs) if size else 0)]

    def begin(self, row: int, episode: Episode) -> None:
        """Begin an episode; see `RowPolicy`."""
        self._population.forget(row)
        if self._noise is not None:
            self._steps[row] = 0
            self._generators[row].manual_seed(episode.action_seed)

    def act(self) -> ArrayTree:
        """Choose the actions of the environments with a running episode; see `RowPolicy`."""
        obs = self._observe()
        with torch.no_grad(), torch_threads(1):  # Multiple threads may change the order of sums.
            return as_arrays(self._choose(obs, self._envs.playing))

    def _observe(self) -> TensorTree:
        """Return the observations of all environments as network inputs, `[n, ...]`."""
        columns = self._envs.obs
        return as_tensors(self._space, columns.get("", columns))

    def _choose(self, obs: TensorTree, rows: list[int]) -> TensorTree:
        """Return the environment actions of the given rows, `[row_blocks(len(rows)), ...]`."""
        if self._noise is None:
            return self._population.act(rows, obs, None, self._deterministic).env_actions
        noise = torch.zeros(row_blocks(len(rows)), self._noise.shape[2])
        noise[: len(rows)] = self._next_noise(rows)
        own = noise[:, : self._num_sampled] if self._num_sampled else None
        acted = self._population.act(rows, obs, own, self._deterministic)
        if not self._num_added:
            return acted.env_actions
        return self._acting.to_env(self._with_added(acted.actions, noise[:, self._num_sampled :]))

    def _next_noise(self, rows: list[int]) -> Tensor:
        """Return the noise of this step, `[len(rows), size]`."""
        assert self._noise is not None
        at = self._steps[rows] % STEPS_PER_DRAW
        for row in (row for row, step in zip(rows, at, strict=True) if step == 0):
            generator = self._generators[row]
            drawn = self._acting.draw_noise((STEPS_PER_DRAW,), generator)
            self._noise[row, :, : self._num_sampled] = drawn[:, : self._num_sampled]
            self._noise[row, :, self._num_sampled :] = torch.randn(
                STEPS_PER_DRAW, self._num_added, generator=generator
            )
        self._steps[rows] += 1
        return self._noise[torch.tensor(rows), torch.from_numpy(at)]

    def _with_added(self, actions: TensorTree, noise: Tensor) -> TensorTree:
        """Add noise `[n, size]` to the real-valued components of actions."""
        real = [leaf for leaf in tree_leaves(actions) if leaf.is_floating_point()]
        parts = iter(torch.split(noise, [leaf[0].numel() for leaf in real], dim=1))

        def add(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf + self._added_stddev * next(parts).view_as(leaf)

        return tree_map(add, actions)


def model_rows(model: nn.Module, envs: EnvSlice, deterministic: bool = True) -> PopulationRows:
    """Return rows that acts with a copy of the current weights of a model.

    Args:
        model: The model. The copy is on the CPU and in evaluation mode.
        envs: The environments.
        deterministic: Whether to take the most likely action instead of sampling.
    """
    own = copy.deepcopy(acting_part(model)).cpu().eval()
    # Frozen parameters are shared by all rows.
    return PopulationRows(own.requires_grad_(False), envs, deterministic)


def acting_part(model: nn.Module) -> nn.Module:
    """Return an actor-critic or multi-agent model without critics, or any other model unchanged."""
    if type(model) is JointModel:
        policies = {key: acting_part(own) for key, own in model.by_policy.items()}
        return JointModel(policies, model.agents)
    # Only this exact type is converted, because a subclass may act differently.
    if type(model) is not ActorCriticModel:
        return model
    return PolicyModel(model.policy, **model.around)


class UserRows(RowPolicy):
    """Acts with user-defined policies, one per environment. Policies may be stateful.

    A policy is a function, or an object with a method `act`. The argument is a copy of one
    observation with the structure and dtypes of the space; the result is one action. Floats of a
    different precision are converted. The optional method `reset` is called at the beginning of
    each episode; stateful policies require it, because one object acts in several episodes. If
    `reset` has a parameter `seed` or one required argument, a seed is passed, which differs from
    the seed of the environment.

    Args:
        make_policy: Returns a new policy.
        envs: The environments.

    Raises:
        ConfigError: If `make_policy` raises, or does not return a policy.
    """

    def __init__(self, make_policy: Callable[[], object], envs: EnvSlice) -> None:
        self._envs = envs
        self._action = envs.action
        self._policies = [UserPolicy(built_policy(make_policy)) for _ in envs.envs]
        check_are_new([own.policy for own in self._policies if own.is_reset])

    def begin(self, row: int, episode: Episode) -> None:
        """Begin an episode; see `RowPolicy`.

        Raises:
            EpisodeError: If the policy raises.
        """
        try:
            self._policies[row].reset(episode.action_seed)
        except Exception as error:
            raise self._fault(row, f"{type(error).__name__}: {error}") from error

    def act(self) -> ArrayTree:
        """Choose the actions of the environments with a running episode; see `RowPolicy`.

        Raises:
            EpisodeError: If a policy raises, or returns an action outside the action space.
        """
        envs = self._envs
        columns = zeroed_columns(self._action, len(envs.playing))
        for i, row in enumerate(envs.playing):
            obs = envs.observation.row(envs.obs, row)
            try:
                action = self._policies[row].act(obs)
            except Exception as error:
                raise self._fault(row, f"{type(error).__name__}: {error}") from error
            for key, value in self._checked(row, action):
                columns[key][i] = value
        return columns[""] if self._action.is_single else columns

    def _checked(self, row: int, action: object) -> list[tuple[str, Array]]:
        """Return the components of an action, with the dtypes of the space."""
        try:
            parts = self._action.read(action)
            return [(key, converted_action(part, self._action.leaves[key])) for key, part in parts]
        except SpaceError as error:
            space = self._action.space
            problem = f"it returned {action!r}, which is not in the action space {space}: {error}"
            raise self._fault(row, problem) from error
        except Exception as error:  # NumPy or the class of the action may raise any exception.
            text = f"{type(error).__name__}: {error}"
            raise self._fault(row, f"the action is invalid: {text}") from error

    def _fault(self, row: int, problem: str) -> EpisodeError:
        name, seed = self._policies[row].name, self._envs.seeds[row]
        step = self._envs.steps_of(row) + 1
        return EpisodeError(
            f"policy {name} failed at step {step} of the episode with seed {seed}: {problem}", seed
        )


def random_rows(envs: EnvSlice) -> UserRows:
    """Return rows that samples uniformly from the legal actions.

    Args:
        envs: The environments.

    Raises:
        SpaceError: If a mask does not match the action space.
    """
    return UserRows(partial(UniformPolicy, envs.observation.space, envs.action.space), envs)


def converted_action(part: object, leaf: spaces.Space[Any]) -> Array:
    """Convert a component of an action to the dtype of its space.

    Raises:
        SpaceError: If the component is not in the space.
    """
    dtype = np.dtype(leaf.dtype)
    with suppress(ValueError):  # Lists of unequal lengths.
        array = np.asarray(part)
        kinds = "fiub" if dtype.kind == "f" else "iub"
        if array.shape == (leaf.shape or ()) and array.dtype.kind in kinds:
            with np.errstate(over="ignore"):
                found: Array = array.astype(dtype)
            kept = np.isfinite(found) if dtype.kind == "f" else found == array
            if np.all(kept) and leaf.contains(found):
                return found
    raise SpaceError(f"{part!r} is not in {leaf}")
