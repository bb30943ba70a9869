"""PettingZoo environments: lookup by name, and adapters to `MultiAgentEnv`.

Source: Terry et al. (2021), arXiv:2009.14471; the API of PettingZoo 1.27.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maze_train.core.errors import ConfigError, EnvError, MissingExtraError, nearest
from maze_train.core.targets import import_extra
from maze_train.envs.agents import MultiAgentEnv, Turn, check_mapping, shortened
from maze_train.envs.types import Space
from maze_train.envs.wrappers import MaskOfInfo, mask_size, metadata_of
from maze_train.spaces.agents import TEAMS
from maze_train.spaces.describe import MASK_KEY
from maze_train.spaces.masks import mask_layout

EXTRA = "pettingzoo"
PREFIX = "pettingzoo:"
MPE = "mpe2"
"""Package that contains the environments of the former family `mpe`."""


RESET = ("observations", "infos")
STEP = ("observations", "rewards", "terminations", "truncations", "infos")
"""Items returned by `step` of a `ParallelEnv`."""


class PettingZoo:
    """Adapter of PettingZoo environments; see `EnvConfig.pettingzoo`."""

    @staticmethod
    def kinds() -> tuple[type, type]:
        """Return PettingZoo's base classes `ParallelEnv` and `AECEnv`.

        Raises:
            MissingExtraError: If PettingZoo is not installed.
        """
        package = import_extra("pettingzoo", EXTRA, "this environment")
        return package.ParallelEnv, package.AECEnv

    @staticmethod
    def adapted(env: object) -> object:
        """Convert a PettingZoo environment to a `MultiAgentEnv`; return other objects unchanged."""
        parallel, aec = PettingZoo.kinds()
        if isinstance(env, parallel):
            return CyclingAgents(env) if is_cycle(env) else ParallelAgents(env)
        return AlternatingAgents(without_checks(env)) if isinstance(env, aec) else env

    @staticmethod
    def maker_named(env_id: str) -> Callable[..., Any]:
        """Return the function that creates an environment; the parallel version is preferred.

        Args:
            env_id: `pettingzoo:family/name`, such as `pettingzoo:classic/tictactoe_v3`.

        Raises:
            ConfigError: If the environment does not exist, or a required package cannot be
                imported.
            MissingExtraError: If PettingZoo or a package required by the environment is not
                installed.
        """
        name = module_named(env_id)
        try:
            with warnings.catch_warnings():
                # The modules are deprecated, but provide the only list of all names.
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(name)
        except Exception as error:
            package, family, *_ = name.split(".")
            package = MPE if package == MPE else f"pettingzoo[{family}]"
            problem = (
                f"importing it failed: {type(error).__name__}: {error}; pip install '{package}'"
            )
            raise ConfigError("env.id", problem, env_id) from error
        maker: Callable[..., Any] = getattr(module, "parallel_env", None) or module.env
        return maker


def without_checks(env: Any) -> object:
    """Remove outer PettingZoo wrappers of an `AECEnv` that only check arguments and call order.

    These wrappers forward every attribute access, which takes longer than a move in a board game.
    """
    wrappers = importlib.import_module("pettingzoo.utils.wrappers")
    while type(env) in (wrappers.OrderEnforcingWrapper, wrappers.AssertOutOfBoundsWrapper):
        env = env.env
    return env


def is_cycle(env: Any) -> bool:
    """Whether a `ParallelEnv` was converted from an `AECEnv` without wrappers other than checks."""
    conversions = importlib.import_module("pettingzoo.utils.conversions")
    is_converted = type(env) is conversions.aec_to_parallel_wrapper
    return is_converted and without_checks(env.aec_env) is env.unwrapped


class PettingZooAgents(MultiAgentEnv):
    """Base class of adapters of PettingZoo environments.

    If the infos of the first reset contain legal actions (`action_mask`), masks are added to the
    observations as in `ActionMaskWrapper`. If a later info has no mask, all actions are legal.

    Args:
        env: The PettingZoo environment.

    Raises:
        EnvError: If the environment declares no agents; in `reset` and `step`, if the environment
            violates the PettingZoo API.
    """

    def __init__(self, env: Any) -> None:
        if getattr(env, "possible_agents", None) is None:
            raise EnvError(
                f"{env} has no possible_agents: expected a list of all agents that can act, "
                "because their policies are created before the first episode"
            )
        self.env = env
        self.possible_agents: Sequence[str] = tuple(env.possible_agents)
        # PettingZoo's classes declare the attribute without setting it.
        self.metadata: Mapping[str, Any] = dict(metadata_of(env))
        self.teams: Mapping[str, Sequence[str]] = self.metadata.get(TEAMS, {})
        self.render_mode: str | None = getattr(env, "render_mode", None)
        self._over: set[str] = set()
        self._paid: set[str] = set()
        self._masks: dict[str, MaskOfInfo] = {}
        if any(MASK_KEY in info for info in self._first_infos().values()):
            self._masks = {
                agent: MaskOfInfo(agent, env.observation_space(agent), env.action_space(agent))
                for agent in self.possible_agents
                if mask_size(env.action_space(agent))
                and mask_layout(env.observation_space(agent), env.action_space(agent)) is None
            }

    def observation_space(self, agent: str) -> Space:
        """Return the observation space of an agent."""
        masks = self._masks.get(agent)
        found: Space = self.env.observation_space(agent)
        return found if masks is None else masks.space

    def action_space(self, agent: str) -> Space:
        """Return the action space of an agent."""
        found: Space = self.env.action_space(agent)
        return found

    def render(self) -> Any:
        """Render the environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    @abstractmethod
    def _first_infos(self) -> Mapping[str, Mapping[str, Any]]:
        """Reset the environment, and return the infos."""

    def _observed(self, agent: str, obs: object, info: Mapping[str, Any]) -> object:
        """Return the observation, with the mask from the info if the agent has action masks."""
        masks = self._masks.get(agent)
        return obs if masks is None else masks.observe(obs, info)

    def _rewards_of(self, env: Any) -> dict[str, float]:
        """Return the rewards that an `AECEnv` reports after a step.

        Raises:
            EnvError: If the cumulative reward of an agent is not 0 but all its rewards were 0.
        """
        rewards = dict(env.rewards)
        self._paid.update(agent for agent, reward in rewards.items() if reward)
        # `AECEnv.last` requires these sums, so they always exist.
        sums = env._cumulative_rewards.items()
        if hidden := [agent for agent, total in sums if total and agent not in self._paid]:
            raise EnvError(
                f"the rewards of the agents {hidden} are only in `_cumulative_rewards`, and are 0 "
                "in `rewards`: step() must set `rewards` of all agents, call "
                "_accumulate_rewards(), and not clear `rewards` before the next step"
            )
        return rewards


class ParallelAgents(PettingZooAgents):
    """Adapter of a `ParallelEnv`; all live agents act simultaneously.

    An agent that remains in `agents` after it has ended may still receive rewards. Therefore its
    end is reported when the agent is removed, or when no agent acts any more.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Turn:
        """Begin an episode."""
        obs, infos = by_agent("reset", self.env.reset(seed=seed, options=options), RESET)
        self._over = set()
        self._ended: dict[str, Turn] = {}
        return self._turn(obs, {}, {}, {}, infos)

    def step(self, actions: dict[str, Any]) -> Turn:
        """Advance to the next turn."""
        return self._turn(*by_agent("step", self.env.step(actions), STEP))

    def _first_infos(self) -> Mapping[str, Mapping[str, Any]]:
        _, infos = by_agent("reset", self.env.reset(seed=0), RESET)
        return infos

    def _turn(
        self,
        obs: Mapping[str, Any],
        rewards: Mapping[str, float],
        terminations: Mapping[str, Any],
        truncations: Mapping[str, Any],
        infos: Mapping[str, Any],
    ) -> Turn:
        for agent in dict.fromkeys((*terminations, *truncations)):
            flags = terminations.get(agent, False), truncations.get(agent, False)
            if any(flags) and agent not in self._over | self._ended.keys():
                self._ended[agent] = Turn(
                    {agent: obs[agent]} if agent in obs else {},
                    terminated=[agent] if flags[0] else [],
                    truncated=[agent] if flags[1] else [],
                    infos={agent: infos.get(agent, {})},
                )
        acting = [agent for agent in self.env.agents if agent not in self._ended]
        blind = [agent for agent in acting if agent not in obs]
        if blind:
            raise EnvError(
                f"the agents {blind} are in `agents` of the environment, but it returned "
                f"observations of {sorted(obs)} only: expected observations of all live agents"
            )
        left = [agent for agent in self._ended if not acting or agent not in self.env.agents]
        self._over.update(left)
        turns = [self._ended.pop(agent) for agent in left]
        turns.append(Turn({k: obs[k] for k in acting}, infos={k: infos.get(k, {}) for k in acting}))
        own_infos = {agent: info for turn in turns for agent, info in turn.infos.items()}
        return Turn(
            {
                agent: self._observed(agent, seen, own_infos[agent])
                for turn in turns
                for agent, seen in turn.obs.items()
            },
            rewards,
            {agent for turn in turns for agent in turn.terminated},
            {agent for turn in turns for agent in turn.truncated},
            own_infos,
        )


class CyclingAgents(ParallelAgents):
    """Adapter of a `ParallelEnv` that PettingZoo converted from an `AECEnv`.

    Turns are the steps of PettingZoo's conversion. The conversion also computes and discards an
    observation before each action; this class omits this step.
    """

    def step(self, actions: dict[str, Any]) -> Turn:
        """Advance to the next turn."""
        env = self.env.unwrapped
        rewards = dict.fromkeys(env.agents, 0.0)
        for _ in range(len(env.agents)):
            env.step(actions[env.agent_selection])
            reported = self._rewards_of(env)
            for agent in env.agents:
                rewards[agent] += reported[agent]
        ends = dict(env.terminations), dict(env.truncations)
        obs = {agent: env.observe(agent) for agent in env.agents}
        infos = dict(env.infos)
        while env.agents and any(flags[env.agent_selection] for flags in ends):
            env.step(None)
        self.env.agents = env.agents
        return self._turn(obs, rewards, *ends, infos)


class AlternatingAgents(PettingZooAgents):
    """Adapter of an `AECEnv`; agents act one after the other.

    In every turn, one live agent acts. The rewards of a turn are the `rewards` of all agents after
    this action; the cumulative sums are not used. The adapter also performs the steps without an
    action that remove ended agents. An agent may receive rewards until it is removed, so its end is
    reported on removal.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Turn:
        """Begin an episode."""
        self.env.reset(seed=seed, options=options)
        self._over = set()
        return self._turn({})

    def step(self, actions: dict[str, Any]) -> Turn:
        """Advance to the next turn."""
        (action,) = actions.values()
        self.env.step(action)
        # Rewards are read first, because removing agents also removes their rewards.
        return self._turn(self._rewards_of(self.env))

    def _first_infos(self) -> Mapping[str, Mapping[str, Any]]:
        self.env.reset(seed=0)
        found: Mapping[str, Mapping[str, Any]] = self.env.infos
        return found

    def _turn(self, rewards: dict[str, float]) -> Turn:
        """Remove ended agents until an agent can act."""
        env = self.env
        terminated: set[str] = set()
        truncated: set[str] = set()
        seen: dict[str, Any] = {}
        infos: dict[str, dict[str, Any]] = {}

        def show(name: str) -> None:
            infos[name] = dict(env.infos.get(name, {}))
            seen[name] = self._observed(name, env.observe(name), infos[name])

        while True:
            # Each attribute is read once, because wrappers forward each attribute access.
            agents, ends = env.agents, (env.terminations, env.truncations)
            agent = env.agent_selection if agents else None
            over = {name for flags in ends for name, flag in flags.items() if flag}
            for name in sorted(over - self._over):
                if name == agent or name not in agents:
                    self._over.add(name)
                    terminated.update([name] * bool(ends[0].get(name)))
                    truncated.update([name] * bool(ends[1].get(name)))
                    show(name)
            if agent is None:
                break
            if agent not in over:
                show(agent)
                break
            env.step(None)
            if agent in env.agents:
                raise EnvError(
                    f"agent {agent!r} has ended, and step(None) does not remove it from `agents`: "
                    "test the environment by pettingzoo.test.api_test"
                )
        return Turn(seen, rewards, terminated, truncated, infos)


def by_agent(method: str, result: object, names: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Check and return the result of a method of a `ParallelEnv`.

    Args:
        method: Name of the method.
        result: The result.
        names: Names of the expected items.

    Raises:
        EnvError: If the result is not a tuple of mappings, one per name.
    """
    if not isinstance(result, tuple) or len(result) != len(names):
        expected = f"expected ({', '.join(names)}), a dict by agent each"
        raise EnvError(f"{method}() returned {shortened(result)}: {expected}")
    for name, value in zip(names, result, strict=True):
        check_mapping(f"{name} of {method}()", value)
    return result


def module_named(env_id: str) -> str:
    """Return the module of an environment without importing it.

    Raises:
        ConfigError: If the environment does not exist.
        MissingExtraError: If PettingZoo or a package required by the environment is not installed.
    """
    homes = installed()
    name = env_id.removeprefix(PREFIX)
    if name in homes:
        return homes[name]
    if name.startswith("mpe/") and not any(known.startswith("mpe/") for known in homes):
        raise MissingExtraError(MPE, EXTRA, env_id)
    close = ", ".join(PREFIX + known for known in nearest(name, homes)) or "none"
    families = ", ".join(dict.fromkeys(known.partition("/")[0] for known in homes))
    problem = (
        f"PettingZoo has no such environment; nearest names: {close}. Expected "
        f"pettingzoo:family/name with one of the families {families}"
    )
    raise ConfigError("env.id", problem, env_id)


def nearest_names(env_id: str) -> list[str]:
    """Return similar ids of installed environments; may be empty."""
    try:
        names = {known.rpartition("/")[2]: PREFIX + known for known in installed()}
    except MissingExtraError:
        return []
    return [names[near] for near in nearest(env_id, names, count=1)]


def installed() -> dict[str, str]:
    """Return the modules of all installed environments, keyed by `family/name`.

    Raises:
        MissingExtraError: If PettingZoo is not installed.
    """
    root = Path(import_extra("pettingzoo", EXTRA, "this environment").__path__[0])
    families = {
        found.name: (root / found.name, f"pettingzoo.{found.name}")
        for found in pkgutil.iter_modules([str(root)])
        if found.ispkg
    }
    mpe = importlib.util.find_spec(MPE)
    if mpe is not None and mpe.submodule_search_locations:
        families["mpe"] = Path(mpe.submodule_search_locations[0]), MPE
    return {
        f"{family}/{found.name}": f"{package}.{found.name}"
        for family, (folder, package) in families.items()
        for found in pkgutil.iter_modules([str(folder)])
        if re.fullmatch(r"\w+_v\d+", found.name)
    }
