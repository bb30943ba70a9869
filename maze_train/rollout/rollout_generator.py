"""Episodes from Python: an environment and a policy in, trajectories out."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from maze_train.checks import check_at_least
from maze_train.envs.factory import BoundedEnvFactory, EnvFactory
from maze_train.errors import ConfigError
from maze_train.rollout.agents import PolicyAgent, RandomAgent
from maze_train.rollout.episode_player import PlaySettings
from maze_train.rollout.player import RolloutPlayer
from maze_train.rollout.population import ModelAgent
from maze_train.workers.places import ThisProcess
from maze_train.workers.process_pool import LocalProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import gymnasium

    from maze_train.data.trajectories import Trajectory
    from maze_train.envs.config import EnvConfig
    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.episode_player import PlayedEpisode
    from maze_train.rollout.player import MakeAgent
    from maze_train.rollout.slot_agent import SlotAgent


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
        EnvError: If an environment can not be built.
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
            seeds: Their seeds, so many; None: the next ones, so that another call plays others.

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
    """The model that acts for a policy: itself, or its attribute `model`; None: there is none."""
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
