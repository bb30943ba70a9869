"""Builds single environments from their settings."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium import spaces

from maze_train.core.errors import ConfigError, EnvError, MazeTrainError
from maze_train.core.targets import TARGET, Given, build_target, locate, maker_of
from maze_train.envs.building import ConvertibleEnv, closed_on_error
from maze_train.envs.config import EnvConfig
from maze_train.envs.faults import SHIMMY, explained
from maze_train.envs.monitoring import AllLegalWrapper, MonitoringWrapper, layers_of
from maze_train.envs.registered import (
    build_failure,
    import_env_module,
    register_atari,
    register_installed,
    registered_failure,
)
from maze_train.envs.types import Env
from maze_train.spaces.agents import AGENTS, TEAMS, agent_spaces, partition

if TYPE_CHECKING:
    from maze_train.envs.atari import AtariGames


REWARD_WRAPPERS = (gymnasium.RewardWrapper, gymnasium.wrappers.NormalizeReward)


@dataclass(frozen=True)
class EnvFactory:
    """Builds one environment per call; can be sent to other processes.

    Args:
        config: Settings of the environment.
        training: Whether the environments are for training; otherwise wrappers for training only
            are left out.
    """

    config: EnvConfig
    training: bool = True

    @classmethod
    def from_any(cls, env: Any, **kwargs: Any) -> EnvFactory:
        """A factory for any form in which a caller names an environment.

        Args:
            env: A registered id, an `EnvConfig`, a factory, a class or function that returns an
                environment, or a vector environment, which serves training only.
            **kwargs: Keyword arguments for the environment, added to those of a config.

        Raises:
            ConfigError: If `env` is not one of these.
        """
        if isinstance(env, EnvFactory):
            merged = replace(env.config, kwargs={**env.config.kwargs, **kwargs})
            return replace(env, config=merged)
        if isinstance(env, EnvConfig):
            return cls(replace(env, kwargs={**env.kwargs, **kwargs}))
        if isinstance(env, str):
            return cls(EnvConfig(id=env, kwargs=kwargs))
        if isinstance(env, gymnasium.vector.VectorEnv):
            return cls(EnvConfig(target=Given(env), backend="native", kwargs=kwargs))
        if isinstance(env, gymnasium.Env) and env.spec is not None:
            problem = (
                f"one environment cannot be many: give its id, env={env.spec.id!r}, or a function "
                f"that makes it, env=lambda: gymnasium.make({env.spec.id!r})"
            )
            raise ConfigError("env", problem, env)
        if isinstance(env, gymnasium.Env) or not callable(env):
            raise ConfigError(
                "env",
                "expected an id, an EnvConfig, or a class or function that returns an env; "
                "one environment cannot be many",
                env,
            )
        return cls(EnvConfig(target=Given(env), kwargs=kwargs))

    def __call__(self) -> Env:
        """A new environment.

        From the inside out: the environment, Atari preprocessing, `wrappers`; in training also what
        reports the returns of whole episodes, the parts of Atari preprocessing that change
        episodes and rewards, and `training_wrappers`.

        Raises:
            ConfigError: If the settings name no environment, or name it wrongly.
            EnvError: If building it failed.
            MissingExtraError: If a package that it needs is not installed.
        """
        config = self.config
        config.check_named()
        games = preprocessing_of(config)
        env = make(config) if games is None else games.make(config, make)
        for i, wrapper in enumerate(config.wrappers):
            with closed_on_error([env]):
                env = wrap(env, wrapper, key=f"env.wrappers[{i}]")
        if config.empty_mask == "all_legal":
            env = AllLegalWrapper(env)
        if not self.training or not (games or config.training_wrappers):
            return env
        env = MonitoringWrapper(env)
        if games is not None:
            env = games.for_training(env)
        for i, wrapper in enumerate(config.training_wrappers):
            key = f"env.training_wrappers[{i}]"
            with closed_on_error([env]):
                wrapped = wrap(env, wrapper, key=key)
                check_spaces_kept(env, wrapped, key, wrapper)
            env = wrapped
        return env

    def for_evaluation(self) -> EnvFactory:
        """Builds the same environments without the parts for training only."""
        return replace(self, training=False)


GUARD_STEPS = 30_000
"""Steps after which an episode is truncated if neither settings nor environment set a limit."""


@dataclass(frozen=True)
class BoundedEnvFactory:
    """Builds environments whose episodes end after a number of steps at the latest.

    Args:
        factory: Builds the environments.
        max_episode_steps: Steps after which an episode is truncated, >= 1; a smaller limit of the
            environment remains in force. None: the limit of the environment, or `GUARD_STEPS`
            without one. 0: no other limit than that of the environment.
    """

    factory: Callable[[], Env]
    max_episode_steps: int | None

    def __call__(self) -> Env:
        """A new environment."""
        env, limit = self.factory(), self.max_episode_steps
        if limit is None:
            limit = 0 if has_time_limit(env) else GUARD_STEPS
        return gymnasium.wrappers.TimeLimit(env, limit) if limit else env


def has_time_limit(env: Env) -> bool:
    """Whether a `TimeLimit` wrapper truncates the episodes, as in registered environments."""
    return any(isinstance(layer, gymnasium.wrappers.TimeLimit) for layer in layers_of(env))


def cap_on_episodes(config: EnvConfig, max_episode_steps: int | None) -> int:
    """Return the limit of `BoundedEnvFactory` for environments that are not built one by one."""
    if max_episode_steps is not None:
        return max_episode_steps
    spec = gymnasium.registry.get((config.id or "").rpartition(":")[2])
    registered = None if spec is None else spec.max_episode_steps
    return max(GUARD_STEPS, config.max_episode_steps or registered or 0)


def guard_note(lengths: Iterable[float], key: str) -> str | None:
    """The line about episodes that were truncated after `GUARD_STEPS` steps; None without any.

    Args:
        lengths: Lengths of episodes.
        key: Setting that changes the limit.
    """
    count = sum(length == GUARD_STEPS for length in lengths)
    if not count:
        return None
    return (
        f"note: {count} {'episodes were' if count > 1 else 'episode was'} truncated after "
        f"{GUARD_STEPS:,} steps, since the environment declares no time limit, and counted as far "
        f"as they came: {key} sets another limit, 0 none"
    )


def preprocessing_of(config: EnvConfig) -> type[AtariGames] | None:
    """The preprocessing of the environment; None: there is none.

    Raises:
        ConfigError: See `AtariGames.fits`.
        MissingExtraError: See `AtariGames.fits`.
    """
    is_game = (config.id or "").rpartition(":")[2].startswith("ALE/")
    if config.preprocessing == "none" or (config.preprocessing == "auto" and not is_game):
        return None
    games: type[AtariGames] = locate(config.atari_games)
    return games if games.fits(config) else None


def env_name(config: EnvConfig) -> str:
    """A short name of the environment that is fit for a directory.

    A function is named with its module, since many are called `make`.

    Raises:
        ConfigError: If the settings name no environment.
    """
    if config.id is not None:
        return re.sub(r"[/:]", "-", config.id)
    if config.target is None:
        raise ConfigError("env", "expected an id or a _target_, got neither")
    *modules, name = re.split(r"[.:]", config.target)
    is_function = name[:1].islower() and modules and modules[-1].isidentifier()
    return f"{modules[-1]}-{name}" if is_function else name.strip("<>")


def make(config: EnvConfig) -> Env:
    """Build the environment that the settings name, without wrappers."""
    env = _made(config)
    if config.teams:
        with closed_on_error([env]):
            joint = env.unwrapped
            several = agent_spaces(joint.observation_space, joint.action_space)
            if several is None:
                problem = "the environment has one agent; leave it out"
                raise ConfigError("env.teams", problem, list(config.teams))
            teams = partition(config.teams, several.agents)
            joint.metadata = {**joint.metadata, TEAMS: teams}
    return env


def _made(config: EnvConfig) -> Env:
    if config.maker is not None:
        made: Env = locate(config.maker)(config)
        return made
    if config.id is None:
        return make_own(config, own_maker(config.target or ""))
    if config.id.startswith("pettingzoo:"):
        from maze_train.envs.pettingzoo import maker_named  # few environments are of PettingZoo

        return make_own(config, maker_named(config.id))
    return make_registered(config, config.id)


def make_registered(config: EnvConfig, env_id: str) -> Env:
    """Build a registered environment, turning gymnasium's complaints into ours."""
    import_env_module(env_id)
    if env_id.rpartition(":")[2].startswith("ALE/"):
        register_atari()
    elif ":" not in env_id and env_id not in gymnasium.registry:
        register_installed()
    # The checker costs time in every step and warns about style; what matters is checked where
    # values are stored.
    options = {"disable_env_checker": True, "max_episode_steps": config.max_episode_steps}
    try:
        return gymnasium.make(env_id, **{**options, **config.kwargs})
    except MazeTrainError:
        raise
    except BaseException as error:
        # The message alone: a traceback through an installed package helps no one, and repeats what
        # the environment quotes of a file that a stranger's settings name.
        spec = gymnasium.registry.get(env_id)
        entry = str(spec.entry_point) if spec is not None else ""
        is_told = entry.startswith(("gymnasium", "minigrid.")) or isinstance(error, ImportError)
        cause = None if is_told else error
        raise registered_failure(env_id, config, error) from cause


def make_own(config: EnvConfig, make: Callable[..., Any]) -> Env:
    """Build an environment from a class or function, with a time limit when one is set."""
    target = str(config.target or config.id)
    try:
        env = make(**config.kwargs)
        if not isinstance(env, gymnasium.Env):
            env = converted(env)
    except MazeTrainError:
        raise
    except BaseException as error:
        raise build_failure(target, config, error, make) from error
    if not isinstance(env, gymnasium.Env):
        raise EnvError(
            f"{target} returned {type(env).__name__}: expected a gymnasium.Env, "
            "so let its class derive from gymnasium.Env, or from maze_train.MultiAgentEnv for "
            f"several agents. {SHIMMY}"
        )
    if config.max_episode_steps is None:
        return env
    return gymnasium.wrappers.TimeLimit(env, config.max_episode_steps)


def converted(env: Any) -> Any:
    """Return an environment of another interface as one of gymnasium; anything else as it is."""
    if "pettingzoo" in sys.modules:
        from maze_train.envs.pettingzoo import adapted

        env = adapted(env)
    if not isinstance(env, ConvertibleEnv):
        return env
    with closed_on_error([env]):
        return env.converted()


def own_maker(target: str) -> Callable[..., Any]:
    """Return the class or function of environments that a dotted path names.

    Raises:
        ConfigError: If it cannot be found, or makes no environments.
    """
    key = "env._target_"
    locate(target, key)  # imports the package that its class may be of
    others: tuple[type, ...] = (ConvertibleEnv,)
    if "pettingzoo" in sys.modules:
        from maze_train.envs.pettingzoo import kinds

        others += kinds()
    return maker_of(target, key, gymnasium.Env, *others)


def wrap(env: Env, node: dict[str, Any], key: str) -> Env:
    """Put the wrapper that a configuration node names around an environment."""
    try:
        wrapped: Env = build_target(node, env, key=key, kind=gymnasium.Env)
    except MazeTrainError:
        raise
    except BaseException as error:
        raise EnvError(f"{key} failed: {explained(error)}") from error
    if agent_spaces(env.observation_space, env.action_space) is None:
        return wrapped
    known, given = (
        {*space} if isinstance(space, spaces.Dict) else set()
        for space in (env.observation_space, wrapped.observation_space)
    )
    if AGENTS in given and given != known:
        changed = [*(f"adds {key!r}" for key in sorted(given - known))]
        changed += [f"takes {key!r} away" for key in sorted(known - given)]
        problem = (
            f"{' and '.join(changed)} where all agents observe together, which no policy reads: "
            "let the environment change what each agent observes"
        )
        raise ConfigError(key, problem, node[TARGET])
    if isinstance(wrapped, REWARD_WRAPPERS):
        problem = (
            "changes the mean of the rewards, and agents learn from their own: let the environment "
            "change these"
        )
        raise ConfigError(key, problem, node[TARGET])
    return wrapped


def check_spaces_kept(env: Env, wrapped: Env, key: str, node: dict[str, Any]) -> None:
    """Refuse a wrapper for training only after which the policy would not fit the evaluation."""
    for name, before, after in (
        ("observation_space", env.observation_space, wrapped.observation_space),
        ("action_space", env.action_space, wrapped.action_space),
    ):
        if before != after:
            raise ConfigError(
                key,
                f"changes the {name} from {before} to {after}, which evaluation does not have: put "
                "the wrapper into env.wrappers",
                node,
            )
