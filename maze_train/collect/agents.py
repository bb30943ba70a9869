"""Agents that act in environments which play episodes: policies of users, random actions, models.

Each row is a separate episode: what is done there follows from the policy, the seed that the
episode began with, and what was observed in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import nn

from maze_train.collect.custom_policies import UserPolicy, built_policy, check_are_new
from maze_train.collect.episode_player import EpisodeTask, ModelAgent, PlaySettings, RowAgent
from maze_train.collect.player import MakeAgent, RolloutPlayer
from maze_train.collect.uniform import UniformPolicy
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError, SpaceError
from maze_train.core.types import Array, ArrayTree
from maze_train.data.trajectory import Trajectory
from maze_train.envs.config import EnvConfig
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.envs.faults import EpisodeError
from maze_train.envs.slice import EnvSlice
from maze_train.envs.vector import zeroed_columns
from maze_train.nets.acting import acts
from maze_train.workers.places import ThisProcess
from maze_train.workers.process_pool import LocalProcesses

RANDOM = "random"


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

    def act(self, envs: EnvSlice) -> ArrayTree:
        """Choose the actions of the environments that play, see `RowAgent`.

        Raises:
            EpisodeError: If a policy raises, or returns something that is not in the action space.
        """
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


def agent_maker(policy: Any, deterministic: bool = True) -> MakeAgent:
    """Return what builds the agent, for any form in which a caller names a policy.

    Args:
        policy: See `RolloutGenerator`.
        deterministic: Whether a model takes the most likely action instead of a sampled one.

    Raises:
        ConfigError: If it is no policy.
    """
    if isinstance(policy, str) and policy == RANDOM:
        return RandomAgent
    model = model_of(policy)
    if model is not None:
        return partial(_model_agent, model, deterministic)
    if isinstance(policy, type):
        return partial(PolicyAgent, policy)
    return partial(PolicyAgent, partial(copy.deepcopy, UserPolicy(policy).policy))


def model_of(policy: Any) -> nn.Module | None:
    """Return the model that acts for a policy: itself or its `model`; otherwise None."""
    for model in (policy, getattr(policy, "model", None)):
        if isinstance(model, nn.Module) and acts(model):
            return model
    return None


def spaces_of_policy(policy: Any) -> tuple[Any, Any]:
    """Observation and action space that a policy names; None: it names none."""
    if isinstance(policy, type):
        return None, None
    return getattr(policy, "observation_space", None), getattr(policy, "action_space", None)


def check_policy_spaces(found: tuple[Any, Any], spaces: tuple[Any, Any]) -> None:
    """Refuse spaces that a policy names, if those of the environment are others.

    Raises:
        ConfigError: Naming both.
    """
    names = ("observation_space", "action_space")
    for name, own, space in zip(names, found, spaces, strict=True):
        if own is not None and own != space:
            raise ConfigError("policy", f"its {name} is {own}, that of the environment is {space}")


def _model_agent(model: nn.Module, deterministic: bool, envs: EnvSlice) -> RowAgent:
    return ModelAgent(model, envs, deterministic)


class RolloutGenerator(RolloutPlayer):
    """Plays episodes with a policy and records them.

        with RolloutGenerator("CartPole-v1", load_policy(run_dir)) as generator:
            trajectories = generator.rollout(100)

    An episode depends on the policy and its seed only, to the bit; not on `concurrency`,
    `n_workers` or other episodes. Call `close` at the end, or use it as a context manager.

    Args:
        env: A registered id, an `EnvConfig`, a factory, or a class or function that returns an
            environment. Wrappers for training are left out.
        policy: The policy: `"random"`; a model, or an object with a model as its attribute `model`,
            such as a `TrainedPolicy`; an object with a method `act(observation)`, a function of one
            observation, or a class of such objects. See `PolicyAgent`. Each environment gets a copy
            of an object. Models act with their current weights.
        deterministic: Whether a model takes the most likely action instead of a sampled one.
        concurrency: Episodes that are played at a time, >= 1.
        n_workers: Processes that play them; 0: this one.
        seed: Seed of the first episode, >= 0; the next ones have `seed + 1`, `seed + 2`, ...
        max_episode_steps: Steps after which an episode is truncated, >= 1; None: as the environment
            says.
        settings: How episodes are played; None: they are recorded. Its `deterministic` has no
            meaning here.
        on_non_finite: Reaction to numbers that are not finite: `raise` or `skip`.
        **processes: With processes, further settings of `LocalProcesses`: `start_method`,
            `timeout_s`, `on_worker_failure`, `max_worker_restarts`.

    Raises:
        ConfigError: If a setting is wrong, or a policy is for other spaces.
        EnvError: If an environment cannot be built.
        MissingExtraError: If a package that is needed is not installed.
    """

    def __init__(
        self,
        env: str | EnvConfig | EnvFactory | Callable[..., gymnasium.Env[Any, Any]],
        policy: Any = RANDOM,
        *,
        deterministic: bool = True,
        concurrency: int = 8,
        n_workers: int = 0,
        seed: int = 0,
        max_episode_steps: int | None = None,
        settings: PlaySettings | None = None,
        on_non_finite: str = "raise",
        **processes: Any,
    ) -> None:
        check_at_least("concurrency", concurrency, 1)
        check_at_least("n_workers", n_workers, 0)
        check_at_least("seed", seed, 0)
        factory: Any = EnvFactory.from_any(env).for_evaluation()
        if max_episode_steps is not None:
            check_at_least("max_episode_steps", max_episode_steps, 1)
            factory = BoundedEnvFactory(factory, max_episode_steps)
        self._next_seed = seed
        super().__init__(
            factory,
            agent_maker(policy, deterministic),
            PlaySettings(record=True) if settings is None else settings,
            LocalProcesses(n_workers, **processes) if n_workers else ThisProcess(),
            num_envs=concurrency,
            on_non_finite=on_non_finite,
        )
        try:
            check_policy_spaces(spaces_of_policy(policy), self.spaces)
        except BaseException:
            self.close()
            raise

    def rollout(self, n_episodes: int, seeds: Sequence[int] | None = None) -> list[Trajectory]:
        """Play episodes and return them, without those that were lost.

        Args:
            n_episodes: Number of episodes, >= 1.
            seeds: One seed for each; None: the next seeds, so that each call plays new episodes.

        Raises:
            ConfigError: If an argument is invalid, or the settings record nothing.
            EnvError: If an environment or the policy raises or returns something invalid.
            WorkerError: If a process fails and is not started again.
        """
        check_at_least("n_episodes", n_episodes, 1)
        if not self.settings.record:
            raise ConfigError(
                "settings.record", "rollout() returns what is recorded: set it", False
            )
        if seeds is None:
            seeds = range(self._next_seed, self._next_seed + n_episodes)
            self._next_seed += n_episodes
        elif len(seeds) != n_episodes:
            raise ConfigError("seeds", f"expected {n_episodes} of them, one per episode", seeds)
        played = self.play(seeds)
        return [episode.trajectory for episode in played if episode.trajectory is not None]
