"""Policies without networks, and episodes from Python: environment and policy in, data out."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from maze_train.collect.agents import PolicyAgent, RandomAgent, built_policy
from maze_train.collect.episode_player import ModelAgent, PlaySettings
from maze_train.collect.initial_policies import FixedPolicy, GivenPolicy, RandomPolicy
from maze_train.collect.player import RolloutPlayer
from maze_train.core.checks import check_at_least
from maze_train.core.errors import ConfigError
from maze_train.core.targets import build_target, is_target
from maze_train.core.types import tree_leaves, tree_map
from maze_train.distributions.mapping import distribution_for
from maze_train.envs.agents import nearest_to_zero
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.nets.policy_model import build_masking
from maze_train.spaces.describe import FlatView
from maze_train.spaces.masks import mask_layout
from maze_train.workers.places import ThisProcess
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import gymnasium
    from gymnasium import Space

    from maze_train.collect.episode_player import PlayedEpisode, SlotAgent
    from maze_train.collect.player import MakeAgent
    from maze_train.core.types import Tensor, TensorTree
    from maze_train.data.trajectories import Trajectory
    from maze_train.envs.config import EnvConfig
    from maze_train.envs.stepped import EnvSlots


RANDOM = "random"


class RolloutGenerator(RolloutPlayer):
    """Plays episodes with a policy and records them.

        with RolloutGenerator("CartPole-v1", load_policy(run_dir)) as generator:
            trajectories = generator.rollout(100)

    An episode follows from the policy and its seed, to the bit: not from `concurrency`, `n_workers`
    or what else is played. To be closed; it is a context manager that does so.

    Args:
        env: A registered id, an `EnvConfig`, a factory, or a class or function that returns an
            environment. Wrappers for training are left out.
        policy: The policy: `"random"`; a model, or an object with a model as its attribute `model`,
            such as a `TrainedPolicy`; an object with a method `act(observation)`, a function of one
            observation, or a class of such objects. See `PolicyAgent`. Of an object, each
            environment gets a copy. Models act with the weights that they have now.
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
            n_episodes: How many, >= 1.
            seeds: Their seeds, that many; None: the next ones, so that another call plays others.

        Raises:
            ConfigError: If these are not as described, or the settings record nothing.
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

    def episodes(self, seeds: Sequence[int]) -> Iterator[PlayedEpisode]:
        """Play an episode for each seed; see `RolloutPlayer.play`."""
        return self.play(seeds)


def agent_maker(policy: Any, deterministic: bool = True) -> MakeAgent:
    """A function that builds the agent for slots, for any form in which a caller names a policy.

    Args:
        policy: See `RolloutGenerator`.
        deterministic: Whether a model takes the most likely action instead of a sampled one.

    Raises:
        ConfigError: If it is no policy.
    """
    if isinstance(policy, str):
        if policy != RANDOM:
            raise ConfigError("policy", "expected 'random', a model, an object or function", policy)
        return RandomAgent
    model = model_of(policy)
    if model is not None:
        return partial(_model_agent, model, deterministic)
    if isinstance(policy, type):
        return partial(PolicyAgent, policy)
    if not callable(policy) and not callable(getattr(policy, "act", None)):
        raise ConfigError(
            "policy",
            "expected 'random', a model, an object with a method act(observation), or a function",
            policy,
        )
    return partial(PolicyAgent, partial(copy.deepcopy, policy))


def model_of(policy: Any) -> nn.Module | None:
    """Return the model that acts for a policy: itself or its `model`; otherwise None."""
    for model in (policy, getattr(policy, "model", None)):
        if isinstance(model, nn.Module) and acts(model):
            return model
    return None


def acts(model: nn.Module) -> bool:
    """Whether a module is an `ActingModel` or `RecurrentModel`."""
    return hasattr(model, "distribution") and (
        hasattr(model, "policy_params") or hasattr(model, "policy_step")
    )


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


def _model_agent(model: nn.Module, deterministic: bool, slots: EnvSlots) -> SlotAgent:
    return ModelAgent(model, len(slots), deterministic)


class OneByOne:
    """A policy for batches, of policies that take single observations.

    Args:
        policies: Policies of the rows of a batch, which its owner may change; of the last one are
            all further rows. Each has a method `act(observation)`, or is called itself.
        observation_space: Observation space of one environment.
        action_space: Its action space.
    """

    def __init__(
        self, policies: list[Any], observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        self._policies = policies
        self._observation = FlatView(observation_space)
        self._action = FlatView(action_space)

    def act(self, observations: Any) -> Any:
        """Actions for a batch of observations: nested as the spaces are, [n, ...] per part.

        Raises:
            SpaceError: If an action lacks a part.
        """
        columns = dict(self._observation.read(observations))
        found = []
        for row in range(len(next(iter(columns.values())))):
            policy = self._policies[min(row, len(self._policies) - 1)]
            act = policy.act if callable(getattr(policy, "act", None)) else policy
            parts = {key: np.array(column[row]) for key, column in columns.items()}
            single = self._observation.is_single
            action = act(parts[""] if single else self._observation.build(parts))
            found.append(dict(self._action.read(action)))
        actions = {key: [parts[key] for parts in found] for key in found[0]}
        return actions[""] if self._action.is_single else self._action.build(actions)


class EpisodicPolicy(FixedPolicy):
    """Policies of a user with a method `reset`, one for each agent in each running episode.

    They are asked in turns of their agents only, and reset where an episode begins. The memory of
    an agent is the number of its policy, from 1; 0: its episode begins with its next turn. A number
    of a checkpoint means a policy that has just been reset.

    Args:
        make_policy: Makes a policy.
        observation_space: Observation space of the agents.
        action_space: Their action space.
    """

    state_size = 1

    def __init__(
        self,
        make_policy: Callable[[], Any],
        observation_space: Space[Any],
        action_space: Space[Any],
    ) -> None:
        spaces = observation_space, action_space
        asked: list[Any] = []
        given = OneByOne(asked, *spaces)
        super().__init__(GivenPolicy(given, distribution_for(action_space), *spaces))
        leaves = FlatView(action_space).leaves.values()
        self._of_waiting = np.concatenate([nearest_to_zero(leaf).ravel() for leaf in leaves])
        self._make, self._asked = make_policy, asked
        self._policies: list[Any] = []
        self._free: list[int] = []

    def policy_params(self, obs: TensorTree) -> Tensor:
        """Parameters of the actions where each observation is the first one of an episode."""
        first = torch.zeros(len(tree_leaves(obs)[0]), 1)
        params, state = self.turn_step(obs, first, first == 0)
        self.end_episodes(state)
        return params

    def turn_step(self, obs: TensorTree, state: Tensor, acts: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the actions, and the recurrent state `[n, 1]` after `obs`.

        Args:
            obs: Observations of n agents.
            state: Their memory.
            acts: Whether they act, `[n]`.
        """
        numbers = state[:, 0].long().tolist()
        while len(self._policies) < max(numbers):  # those of a checkpoint
            self._add()
        rows = acts.nonzero()[:, 0].tolist()
        for row in rows:
            numbers[row] = numbers[row] or self._begin()
        self._asked[:] = [self._policies[numbers[row] - 1] for row in rows]
        waiting = torch.from_numpy(self._of_waiting).to(state.device, torch.float32)
        params = waiting.repeat(len(numbers), 1)
        if rows:
            params[rows] = super().policy_params(tree_map(lambda x: x[rows], obs))
        return params, state.new_tensor(numbers)[:, None]

    def end_episodes(self, states: Tensor) -> None:
        """Take policies back, by the recurrent states of their agents, `[k, 1]`."""
        self._free += [number for number in states[:, 0].long().tolist() if number]

    def _begin(self) -> int:
        """Reset a policy that is free; returns its number."""
        if not self._free:
            self._add()
            return len(self._policies)
        self._policies[self._free[-1] - 1].reset()
        return self._free.pop()

    def _add(self) -> None:
        """Make one more policy.

        Raises:
            ConfigError: If it is one that is there already.
        """
        policy = self._make()
        if any(policy is other for other in self._policies):
            problem = "the same object was returned twice; let it build a new one for each episode"
            raise ConfigError("policy", problem, type(policy).__name__)
        policy.reset()
        self._policies.append(policy)


def fixed_policy(
    source: Any, key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """The policy that a setting names, where it is not one of a run.

    Args:
        source: `random`, or a node that names a policy of the user.
        key: Where the configuration names it.
        observation_space: Observation space of the agents.
        action_space: Their action space.

    Raises:
        ConfigError: See `own_policy`.
    """
    if is_target(source):
        return own_policy(source, key, observation_space, action_space)
    return random_policy(observation_space, action_space)


def random_policy(observation_space: Space[Any], action_space: Space[Any]) -> FixedPolicy:
    """A policy whose actions are uniform over the legal ones, see `RandomPolicy`."""
    distribution = distribution_for(action_space)
    masking = build_masking(distribution, mask_layout(observation_space, action_space))
    return FixedPolicy(RandomPolicy(distribution, action_space, masking))


def own_policy(
    node: dict[str, Any], key: str, observation_space: Space[Any], action_space: Space[Any]
) -> nn.Module:
    """The policy that a node names, called with observation and action space.

    Args:
        node: A mapping with the key `_target_`.
        key: Where the configuration names it.
        observation_space: Observation space of the agents.
        action_space: Their action space.

    Raises:
        ConfigError: If it cannot be built, or gives neither a module that acts, nor an object with
            a method `act(observation)`, nor a function, or its `reset` needs an argument.
    """

    def make() -> Any:
        return built_policy(lambda: build_target(node, observation_space, action_space, key=key))

    policy = make()
    if isinstance(policy, nn.Module) and acts(policy):
        return policy
    if isinstance(policy, nn.Module) or not callable(getattr(policy, "act", policy)):
        problem = (
            "expected an ActingModel that is a module, an object with a method act(observation), "
            "or a function of one observation"
        )
        raise ConfigError(key, problem, type(policy).__name__)
    reset = getattr(policy, "reset", None)
    if callable(reset):
        try:
            inspect.signature(reset).bind()
        except TypeError as error:
            problem = f"among several agents, reset() is called without arguments: {error}"
            raise ConfigError(key, problem, type(policy).__name__) from error
        return EpisodicPolicy(make, observation_space, action_space)
    given = OneByOne([policy], observation_space, action_space)
    distribution = distribution_for(action_space)
    return FixedPolicy(GivenPolicy(given, distribution, observation_space, action_space))
