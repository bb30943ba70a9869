"""Agents that act in slots of environments: policies of users, random actions.

Each row is its own episode: what is done there follows from the policy, the seed that the
episode began with, and what was observed in it.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from maze_train.collect.episode_player import SlotAgent
from maze_train.core.errors import ConfigError, MazeTrainError, SpaceError
from maze_train.core.seeding import Seeds
from maze_train.envs.stepped import EpisodeError
from maze_train.spaces.actions import LegalChoices, random_action
from maze_train.spaces.describe import FlatView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gymnasium import spaces

    from maze_train.collect.episode_player import EpisodeTask
    from maze_train.core.types import Array, ArrayTree
    from maze_train.envs.stepped import EnvSlots


class PolicyAgent(SlotAgent):
    """Policies of users act, one for each slot, so that they may remember.

    A policy has a method `act(observation)`, or is called itself. It gets a copy of one observation
    in the form and the types of the space, and returns one action. Real numbers of another size are
    converted. If it has a method `reset`, that is called where an episode begins: with a seed of
    the episode if it has a parameter `seed` or needs an argument, else without. The seed differs
    from that of the environment, so that both can feed generators with it.

    A policy that remembers needs `reset` to forget: the same object plays one episode after the
    other.

    Args:
        make_policy: Returns a new policy.
        slots: The environments.

    Raises:
        ConfigError: If `make_policy` fails, or returns something that does not act.
    """

    def __init__(self, make_policy: Callable[[], object], slots: EnvSlots) -> None:
        self._slots = slots
        self._observation = FlatView(slots.env_observation_space)
        self._action = FlatView(slots.single_action_space)
        self._policies = [_Actor(built_policy(make_policy)) for _ in range(len(slots))]
        if any(
            a.shares_memory(b) for a, b in zip(self._policies, self._policies[1:], strict=False)
        ):
            raise ConfigError(
                "policy",
                "the function returned the same object twice; let it build a new one, since each "
                "environment needs its own",
                self._policies[0].name,
            )

    def begin(self, row: int, task: EpisodeTask) -> None:
        """Begin an episode, see `SlotAgent`.

        Raises:
            EpisodeError: If the policy raises.
        """
        try:
            self._policies[row].reset(task.action_seed)
        except Exception as error:
            raise self._fault(row, f"{type(error).__name__}: {error}") from error

    def act(self, count: int, slots: EnvSlots) -> ArrayTree:
        """Actions of the first slots, see `SlotAgent`.

        Raises:
            EpisodeError: If a policy raises, or returns something that is not in the action space.
        """
        columns: dict[str, Array] = {
            key: np.zeros((count, *(leaf.shape or ())), leaf.dtype)
            for key, leaf in self._action.leaves.items()
        }
        for row in range(count):
            found = {key: column[row].copy() for key, column in slots.obs.items()}
            obs = found[""] if self._observation.is_single else self._observation.build(found)
            try:
                action = self._policies[row].act(obs)
            except Exception as error:
                raise self._fault(row, f"{type(error).__name__}: {error}") from error
            for key, value in self._checked(row, action):
                columns[key][row] = value
        return columns[""] if self._action.is_single else columns

    def _checked(self, row: int, action: Any) -> Iterator[tuple[str, Array]]:
        """The parts of an action in the types of the space."""
        problem = ""
        try:
            parts = [
                (key, converted_action(part, self._action.leaves[key]))
                for key, part in self._action.read(action)
            ]
        except SpaceError as error:
            problem, parts = f": {error}", []
        except Exception as error:  # whatever NumPy or the class of the action raises
            text = f"{type(error).__name__}: {error}"
            raise self._fault(row, f"its action cannot be read: {text}") from error
        if problem or any(value is None for _, value in parts):
            raise self._fault(
                row,
                f"it returned {action!r}, which is not in the action space "
                f"{self._action.space}{problem}",
            )
        for key, value in parts:
            assert value is not None
            yield key, value

    def _fault(self, row: int, problem: str) -> EpisodeError:
        name, seed = self._policies[row].name, self._slots.seeds[row]
        step = self._slots.lengths[row] + 1
        return EpisodeError(
            f"policy {name} failed at step {step} of the episode with seed {seed}: {problem}", seed
        )

    def swap(self, i: int, j: int) -> None:
        """Exchange two rows, see `SlotAgent`."""
        policies = self._policies
        policies[i], policies[j] = policies[j], policies[i]


class RandomAgent(PolicyAgent):
    """Actions are uniform over the action space, and legal where observations have masks.

    Args:
        slots: The environments.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(self, slots: EnvSlots) -> None:
        found = slots.env_observation_space, slots.single_action_space
        super().__init__(partial(UniformPolicy, *found), slots)


class UniformPolicy:
    """A policy whose actions are those of `Space.sample`, of the legal ones where there are masks.

    Args:
        observation_space: Observation space of one environment.
        action_space: Its action space.

    Raises:
        SpaceError: If masks do not fit the actions.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self._legal = LegalChoices(observation_space, action_space)
        self._action = FlatView(copy.deepcopy(action_space))
        self._generator = np.random.default_rng()

    def reset(self, seed: int) -> None:
        """Begin an episode: what is drawn in it follows from the seed, >= 0."""
        seeds = Seeds(seed)
        self._action.space.seed(seeds.integer("actions") % 2**31)
        self._generator = seeds.generator("legal actions")

    def act(self, observation: Any) -> Any:
        """A random action.

        Raises:
            SpaceError: If no action is legal.
        """
        legal = self._legal.read(observation) if self._legal.has_masks else ()
        return random_action(self._action, legal, self._generator)


class _Actor:
    """A policy of a user, in any form that is accepted."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        act = getattr(policy, "act", None)
        self.act: Callable[[Any], Any] = act if callable(act) else policy
        named = policy if hasattr(policy, "__qualname__") else type(policy)
        self.name = f"{named.__module__}.{named.__qualname__}"
        if not callable(self.act):
            raise ConfigError("policy", "expected a method act(observation), or a function", policy)
        reset = getattr(policy, "reset", None)
        self._reset = reset if callable(reset) else None
        self._form = "none" if self._reset is None else seed_form(self._reset)

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        if self._reset is None:
            return
        if self._form == "keyword":
            self._reset(seed=seed)
        elif self._form == "positional":
            self._reset(seed)
        else:
            self._reset()

    def shares_memory(self, other: _Actor) -> bool:
        """Whether another is the same object, with something to forget."""
        return self._reset is not None and self._policy is other._policy


def built_policy(make_policy: Callable[[], object]) -> object:
    """Call a function that builds a policy.

    Raises:
        ConfigError: In place of what the function raises, unless that is an error of this package.
    """
    try:
        return make_policy()
    except MazeTrainError:
        raise
    except Exception as error:
        raise ConfigError(
            "policy", f"building it failed: {type(error).__name__}: {error}"
        ) from error


def seed_form(reset: Callable[..., Any]) -> str:
    """Form in which a method takes a seed: `keyword`, `positional`, or not at all (`none`)."""
    try:
        params = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return "none"
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(param.name == "seed" and param.kind in by_name for param in params):
        return "keyword"
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in params if p.default is p.empty and p.kind in by_place]
    return "positional" if len(needed) == 1 else "none"


def converted_action(part: Any, leaf: spaces.Space[Any]) -> Array | None:
    """A part of an action in the type of its space; None: it is not in the space."""
    dtype = np.dtype(leaf.dtype)
    try:
        array = np.asarray(part)
    except ValueError:  # lists of unequal lengths
        return None
    if array.shape != (leaf.shape or ()):
        return None
    if array.dtype.kind not in ("fiub" if dtype.kind == "f" else "iub"):
        return None
    with np.errstate(over="ignore"):
        found: Array = array.astype(dtype)
    kept = np.isfinite(found) if dtype.kind == "f" else found == array
    return found if np.all(kept) and leaf.contains(found) else None
