"""What acts in environments that play episodes: policies of users, random actions, models.

Each row is a separate episode: what is done there follows from the policy, the seed that the
episode began with, and what was observed in it.
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

from maze_train.collect.custom_policies import UserPolicy, built_policy, check_are_new
from maze_train.collect.episode_runner import EpisodeTask, RowAgent
from maze_train.collect.uniform import UniformPolicy
from maze_train.core.errors import SpaceError
from maze_train.core.types import Array, ArrayTree, Tensor, TensorTree, tree_leaves, tree_map
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.envs.vector import zeroed_columns
from maze_train.learner.modules import torch_threads
from maze_train.nets.acting import ActingModel, acting, as_arrays
from maze_train.nets.actor_critic import ActorCriticModel
from maze_train.nets.joint import JointModel
from maze_train.nets.policy_model import PolicyModel
from maze_train.nets.population import Population, build_population, row_blocks
from maze_train.spaces.describe import flat_space
from maze_train.spaces.tensors import as_tensors

STEPS_PER_DRAW = 64
"""Steps of an episode for which the noise of actions is drawn at once."""


def num_reals(model: ActingModel) -> int:
    """Number of real numbers in an action, as the agent has it."""
    leaves = tree_leaves(model.example_actions())
    return sum(leaf.numel() for leaf in leaves if leaf.is_floating_point())


class MemberActions:
    """Chooses the actions of members, each with its own random numbers.

    Args:
        model: What acts.
        count: Number of members at a time.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: Deviation of normal noise that is added to real-valued actions as the agent
            has them, >= 0.
    """

    def __init__(
        self,
        model: ActingModel,
        count: int,
        *,
        deterministic: bool = True,
        noise_stddev: float = 0.0,
    ) -> None:
        self._model = model
        self._noise_stddev = noise_stddev
        self._deterministic = deterministic
        self._num_sampled = 0 if deterministic and not model.is_random else model.noise_size
        self._num_added = num_reals(model) if noise_stddev else 0
        size = self._num_sampled + self._num_added
        self._noise = torch.zeros(count, STEPS_PER_DRAW, size) if size else None
        self._steps = np.zeros(count, np.int64)
        self._generators = [torch.Generator() for _ in range(count if size else 0)]

    def begin(self, row: int, seed: int) -> None:
        """Begin an episode."""
        if self._noise is not None:
            self._steps[row] = 0
            self._generators[row].manual_seed(seed)

    def choose(self, population: Population, obs: TensorTree, rows: list[int]) -> ArrayTree:
        """Actions of some members, as the environment takes them.

        Args:
            population: The members.
            obs: Observations of all members.
            rows: The members that act.

        Returns:
            Actions, `[row_blocks(len(rows)), ...]`.
        """
        if self._noise is None:
            return as_arrays(population.act(rows, obs, None, self._deterministic).env_actions)
        noise = torch.zeros(row_blocks(len(rows)), self._noise.shape[2])
        noise[: len(rows)] = self._next_noise(rows)
        own = noise[:, : self._num_sampled] if self._num_sampled else None
        acted = population.act(rows, obs, own, self._deterministic)
        if not self._num_added:
            return as_arrays(acted.env_actions)
        actions = self._with_added(acted.actions, noise[:, self._num_sampled :])
        return as_arrays(self._model.to_env(actions))

    def _next_noise(self, rows: list[int]) -> Tensor:
        """The noise of this step, `[len(rows), size]`."""
        assert self._noise is not None
        at = self._steps[rows] % STEPS_PER_DRAW
        for row in (row for row, step in zip(rows, at, strict=True) if step == 0):
            generator = self._generators[row]
            drawn = self._model.draw_noise((STEPS_PER_DRAW,), generator)
            self._noise[row, :, : self._num_sampled] = drawn[:, : self._num_sampled]
            self._noise[row, :, self._num_sampled :] = torch.randn(
                STEPS_PER_DRAW, self._num_added, generator=generator
            )
        self._steps[rows] += 1
        return self._noise[torch.tensor(rows), torch.from_numpy(at)]

    def _with_added(self, actions: TensorTree, noise: Tensor) -> TensorTree:
        """Actions with noise `[n, size]` added to those that are real numbers."""
        real = [leaf for leaf in tree_leaves(actions) if leaf.is_floating_point()]
        parts = iter(torch.split(noise, [leaf[0].numel() for leaf in real], dim=1))

        def add(leaf: Tensor) -> Tensor:
            if not leaf.is_floating_point():
                return leaf
            return leaf + self._noise_stddev * next(parts).view_as(leaf)

        return tree_map(add, actions)


class PopulationAgent(RowAgent):
    """Copies of a model act, one in each environment.

    Actions do not depend on other episodes, nor on the row, to the bit; see `nets.population`.

    Args:
        model: The model, on the CPU.
        envs: The environments.
        deterministic: Whether the most likely action is taken instead of a sampled one.
        noise_stddev: See `MemberActions`.
    """

    def __init__(
        self, model: nn.Module, envs: EnvSlice, deterministic: bool, noise_stddev: float = 0.0
    ) -> None:
        self._envs, self._space = envs, flat_space(envs.observation.space)
        self._population = build_population(model, len(envs))
        self._actions = MemberActions(
            acting(model), len(envs), deterministic=deterministic, noise_stddev=noise_stddev
        )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `RowAgent`."""
        self._population.forget(row)
        self._actions.begin(row, task.action_seed)

    def act(self) -> ArrayTree:
        """Choose the actions of the environments that play, see `RowAgent`."""
        obs, rows = self._observe(), self._envs.playing
        with torch.no_grad(), torch_threads(1):  # several may add up in another order
            return self._actions.choose(self._population, obs, rows)

    def _observe(self) -> TensorTree:
        """Observations of all environments as networks read them, `[n, ...]`."""
        columns: Any = self._envs.obs
        return as_tensors(self._space, columns.get("", columns))


class ModelAgent(PopulationAgent):
    """A model acts, with one copy of the weights that it has now; see `PopulationAgent`.

    Args:
        model: The model; it is copied to the CPU, in the mode of evaluation.
        envs: The environments.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    def __init__(self, model: nn.Module, envs: EnvSlice, deterministic: bool = True) -> None:
        own: Any = copy.deepcopy(acting_part(model)).cpu().eval()
        # All rows share the parameters that are frozen.
        super().__init__(own.requires_grad_(False), envs, deterministic)


def acting_part(model: nn.Module) -> nn.Module:
    """An actor-critic without its critic, also among several agents; others as they are."""
    if type(model) is JointModel:
        policies = {key: acting_part(own) for key, own in model.by_policy.items()}
        return JointModel(policies, model.agents)
    # The exact type: a subclass may act in another way.
    if type(model) is not ActorCriticModel:
        return model
    return PolicyModel(model.policy, **model.around)


class PolicyAgent(RowAgent):
    """Policies of users act, one for each environment, so that they may remember.

    A policy has a method `act(observation)`, or is called itself. It gets a copy of one observation
    in the form and the types of the space, and returns one action. Real numbers of another size are
    converted. If it has a method `reset`, that is called where an episode begins: with a seed of
    the episode if it has a parameter `seed` or needs an argument, else without. The seed differs
    from that of the environment, so that both can feed generators with it.

    A policy that remembers needs `reset` to forget: the same object plays one episode after the
    other.

    Args:
        make_policy: Returns a new policy.
        envs: The environments.

    Raises:
        ConfigError: If `make_policy` fails, or returns something that does not act.
    """

    def __init__(self, make_policy: Callable[[], object], envs: EnvSlice) -> None:
        self._envs = envs
        self._action = envs.action
        self._policies = [UserPolicy(built_policy(make_policy)) for _ in envs.envs]
        check_are_new([own.policy for own in self._policies if own.is_reset])

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `RowAgent`.

        Raises:
            EpisodeError: If the policy raises.
        """
        try:
            self._policies[row].reset(task.action_seed)
        except Exception as error:
            raise self._fault(row, f"{type(error).__name__}: {error}") from error

    def act(self) -> ArrayTree:
        """Choose the actions of the environments that play, see `RowAgent`.

        Raises:
            EpisodeError: If a policy raises, or returns something that is not in the action space.
        """
        envs = self._envs
        columns = zeroed_columns(self._action, len(envs.playing))
        for i, row in enumerate(envs.playing):
            found = {key: column[row].copy() for key, column in envs.obs.items()}
            obs = found[""] if envs.observation.is_single else envs.observation.build(found)
            try:
                action = self._policies[row].act(obs)
            except Exception as error:
                raise self._fault(row, f"{type(error).__name__}: {error}") from error
            for key, value in self._checked(row, action):
                columns[key][i] = value
        return columns[""] if self._action.is_single else columns

    def _checked(self, row: int, action: Any) -> list[tuple[str, Array]]:
        """The parts of an action in the types of the space."""
        try:
            parts = self._action.read(action)
            return [(key, converted_action(part, self._action.leaves[key])) for key, part in parts]
        except SpaceError as error:
            space = self._action.space
            problem = f"it returned {action!r}, which is not in the action space {space}: {error}"
            raise self._fault(row, problem) from error
        except Exception as error:  # whatever NumPy or the class of the action raises
            text = f"{type(error).__name__}: {error}"
            raise self._fault(row, f"its action cannot be read: {text}") from error

    def _fault(self, row: int, problem: str) -> EpisodeError:
        name, seed = self._policies[row].name, self._envs.seeds[row]
        step = self._envs.steps_of(row) + 1
        return EpisodeError(
            f"policy {name} failed at step {step} of the episode with seed {seed}: {problem}", seed
        )


class RandomAgent(PolicyAgent):
    """Actions are uniform over the action space, and legal where observations have masks.

    Args:
        envs: The environments.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(self, envs: EnvSlice) -> None:
        found = envs.observation.space, envs.action.space
        super().__init__(partial(UniformPolicy, *found), envs)


def converted_action(part: Any, leaf: spaces.Space[Any]) -> Array:
    """A part of an action in the type of its space.

    Raises:
        SpaceError: If it is not in the space.
    """
    dtype = np.dtype(leaf.dtype)
    with suppress(ValueError):  # lists of unequal lengths
        array = np.asarray(part)
        kinds = "fiub" if dtype.kind == "f" else "iub"
        if array.shape == (leaf.shape or ()) and array.dtype.kind in kinds:
            with np.errstate(over="ignore"):
                found: Array = array.astype(dtype)
            kept = np.isfinite(found) if dtype.kind == "f" else found == array
            if np.all(kept) and leaf.contains(found):
                return found
    raise SpaceError(f"{part!r} is not in {leaf}")
