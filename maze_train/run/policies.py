"""Resolve policies named in the settings: saved runs, user code, random, opponents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from maze_train.collect.custom_policies import built_policy
from maze_train.collect.episode_pool import (
    RANDOM,
    check_policy_spaces,
    model_of,
    rows_maker,
    spaces_of_policy,
)
from maze_train.collect.fixed_policies import fixed_policy
from maze_train.collect.play import RowPolicy
from maze_train.collect.row_policies import UserRows, model_rows, random_rows
from maze_train.config.rollout_config import RolloutConfig
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.config.train_config import TrainConfig
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.targets import TARGET, InlineObject, build_target, is_target
from maze_train.envs.config import EnvConfig
from maze_train.envs.slice import EnvSlice
from maze_train.nets.joint import JointModel
from maze_train.run.saved_policies import (
    SavedPolicy,
    read_saved_policy,
    read_source,
    score_of,
    shareable,
)
from maze_train.spaces.agents import AgentSpaces, agent_spaces, matching
from maze_train.spaces.describe import check_same_spaces
from maze_train.training.config import PolicyConfig
from maze_train.training.models import modules_of
from maze_train.training.multi_agent_models import check_id, policies_of_agents


@dataclass(frozen=True)
class RolloutPolicy:
    """Policy of a rollout."""

    name: str
    """Short name that can be used for a directory."""

    settings: dict[str, Any]
    """Plain values that identify the policy."""

    make_rows: Callable[[EnvSlice], RowPolicy]
    """Builds the agent for a slice of environments; may be called in other processes."""

    spaces: tuple[Any, Any] = (None, None)
    """Observation and action space of the policy; None: any."""

    deterministic: bool | None = None
    """Whether the most likely action is taken; None: the policy is not a model."""

    run_dir: Path | None = None
    """Directory of the run of the policy, if any."""

    env: EnvConfig | None = None
    """Environment settings that the policy was trained with, if any."""

    owners: dict[str, str] = field(default_factory=dict)
    """Policy ID of each agent in multi-agent environments with several policies."""

    label: str = ""
    """Display name if the rollout has several policies."""

    @property
    def title(self) -> str:
        """Display name; algorithm names are in capitals."""
        return self.label or (self.name if self.run_dir is None else self.name.upper())

    def check_spaces(self, env: str, spaces: tuple[Any, Any]) -> None:
        """Raise ConfigError if the spaces of the environment differ from the spaces of the policy.

        Args:
            env: Name of the environment.
            spaces: Observation and action space of the environment.

        Raises:
            ConfigError: If the spaces differ.
        """
        if self.run_dir is None:
            check_policy_spaces(self.spaces, spaces)
            return
        problem = (
            "this environment has the {kind} space {found}, but the policy has {wanted}; choose an "
            "environment with equal spaces"
        )
        check_same_spaces("env", problem, spaces, self.spaces, env)


def chosen_policy(config: RolloutConfig) -> RolloutPolicy:
    """Return the policy of a rollout configuration.

    Args:
        config: The configuration; in Python, the policy can have any type that `RolloutGenerator`
            accepts.

    Raises:
        ConfigError: If a class of the saved policy is missing, or `policy` is not a policy or
            cannot be built.
        RunDirectoryError: If the run has no policy, or the policy is damaged.
    """
    if config.run is not None:
        parts = PARTS_OF_POLICY if config.env is not None else (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        saved = read_saved_policy(config.run, config.trust, config, parts)
        saved.make_model()  # Raise errors in this process, not in a worker.
        several = agent_spaces(*saved.spaces)
        settings = {"run": shareable(config.run), **score_of(saved)}
        return RolloutPolicy(
            saved.config.algorithm.name,
            {**settings, "deterministic": config.deterministic},
            partial(_trained_rows, saved, config.deterministic),
            saved.spaces,
            config.deterministic,
            saved.run_dir,
            saved.config.env,
            {} if several is None else policies_of_agents(several, saved.config.policies),
        )
    if not isinstance(config.policy, dict):
        name = "policies" if config.policies else RANDOM
        return RolloutPolicy(name, {"policy": RANDOM}, random_rows)
    build = partial(build_target, config.policy, key="policy")
    target = config.policy[TARGET]
    is_given = isinstance(target, InlineObject)
    found = target.value if is_given else built_policy(build)
    make_rows = rows_maker(found, config.deterministic)
    is_model = model_of(found) is not None
    if not is_given and not is_model:
        make_rows = partial(UserRows, build)  # Some instances do not support copying.
    name = str(target).replace(":", ".").rpartition(".")[2].strip("<>")
    chance = config.deterministic if is_model else None
    return RolloutPolicy(
        name, {"policy": config.policy}, make_rows, spaces_of_policy(found), chance
    )


def _trained_rows(saved: SavedPolicy, deterministic: bool, envs: EnvSlice) -> RowPolicy:
    model: Any = saved.make_model()
    several = agent_spaces(envs.observation.space, envs.action.space)
    if several is not None:  # Use the order of agents in the environment.
        owners = {agent: model.agents[agent] for agent in several.agents}
        model = JointModel(modules_of(model), owners)
    return model_rows(model, envs, deterministic)


@dataclass(frozen=True)
class NamedPolicy:
    """Policy for some agents, as named in the settings; can be sent to worker processes.

    Attributes:
        source: Name of the policy, see `PolicyConfig.source`.
        key: Key of the setting.
        spaces: Observation and action space of the agents.
        saved: Saved policy, if it comes from a run.
    """

    source: Any
    key: str
    spaces: tuple[Any, Any]
    saved: SavedPolicy | None

    @property
    def fits(self) -> bool:
        """Whether the policy matches the spaces of the agents."""
        return self.saved is None or self.saved.spaces == self.spaces

    @property
    def title(self) -> str:
        """Display name."""
        if self.saved is not None:
            return self.saved.config.algorithm.name.upper()
        return RANDOM if self.source == RANDOM else str(self.source[TARGET])

    def make_model(self) -> nn.Module:
        """Build a new acting model.

        Raises:
            ConfigError: If the policy cannot be built, or is not a policy.
            RunDirectoryError: If the saved weights do not match.
        """
        if self.saved is not None:
            return self.saved.make_model()
        return fixed_policy(self.source, self.key, *self.spaces)


def resolve(
    source: Any, key: str, spaces: tuple[Any, Any], agent: str, config: RolloutConfig | TrainConfig
) -> NamedPolicy:
    """Resolve a policy named in the settings.

    Args:
        source: Name of the policy.
        key: Key of the setting.
        spaces: Observation and action space of the agents.
        agent: Agent whose policy is used if a run has several policies.
        config: The configuration; `trust` lists modules that saved runs may import.

    Raises:
        ConfigError: If the policy does not exist in the run, or the run requires untrusted code.
    """
    saved = None
    if source != RANDOM and not is_target(source):
        try:
            saved = read_source(source, config.trust, config, agent)
        except RunDirectoryError as error:
            raise ConfigError(key, str(error), source) from error
    return NamedPolicy(source, key, spaces, saved)


OF_RUN = "_of_run"
"""Suffix for the ID of a run's policy if the ID is already used by a different policy."""


def with_policies(
    base: RolloutPolicy, config: RolloutConfig, spaces: tuple[Any, Any]
) -> RolloutPolicy:
    """Return the policy of a rollout for which `policies` is set.

    Args:
        base: Policy of the agents without an entry in `policies`.
        config: The configuration, with `policies`.
        spaces: Observation and action space of the environment.

    Raises:
        ConfigError: If the environment has a single agent, the policies do not match the agents, or
            a policy cannot be built.
        RunDirectoryError: If saved weights do not match.
    """
    several = agent_spaces(*spaces)
    if several is None:
        problem = "only for multi-agent environments; remove this setting"
        raise ConfigError("policies", problem, list(config.policies))
    policies = _all_policies(config, several)
    owners = policies_of_agents(several, policies)
    found: dict[str, NamedPolicy] = {}
    for agent, policy in owners.items():
        if policy not in found:
            check_id(policy)
            key, own = f"policies.{policy}.source", several.of(agent)
            named = resolve(policies[policy].source, key, own, agent, config)
            if named.saved is not None:
                problem = f"its policy has the {{kind}} space {{found}}, but {agent} has {{wanted}}"
                check_same_spaces(key, problem, named.saved.spaces, own, named.source)
            found[policy] = named
    models = [named.make_model() for named in found.values()]  # Raise errors in this process.
    learned = any(True for model in models for _ in model.parameters())
    described = {
        policy: {
            "agents": [agent for agent, owner in owners.items() if owner == policy],
            "source": shareable(named.source) if named.saved else named.source,
            **(score_of(named.saved) if named.saved else {}),
        }
        for policy, named in found.items()
    }
    return replace(
        base,
        label=", ".join(f"{policy}: {named.title}" for policy, named in found.items()),
        settings={"policies": described},
        make_rows=partial(_rows_of, found, owners, config.deterministic),
        spaces=spaces,
        deterministic=config.deterministic if learned else None,
        owners=owners,
    )


def _all_policies(config: RolloutConfig, several: AgentSpaces) -> dict[str, PolicyConfig]:
    """Return the policies in the settings, and the policies of the run for the other agents."""
    of_run: dict[str, str] = {}
    own: Mapping[str, PolicyConfig] = {}
    if config.run is not None:
        saved = read_saved_policy(config.run, config.trust, config)
        own = saved.config.policies
        of_run = _policies_of_run(saved, several)
    elif config.policy == RANDOM:
        kinds = policies_of_agents(several, {})  # Agents of a policy have the same spaces.
        one = len(set(kinds.values())) == 1
        of_run = {agent: RANDOM if one else f"{RANDOM}_{kind}" for agent, kind in kinds.items()}
    named = {
        key: replace(policy, agents=_agents(key, policy, several, of_run))
        for key, policy in config.policies.items()
    }
    taken = {agent for policy in named.values() for agent in policy.agents}
    rest: dict[str, list[str]] = {}
    for agent, owner in of_run.items():
        if agent not in taken:
            rest.setdefault(owner, []).append(agent)
    for owner, agents in rest.items():
        source = own[owner].source if owner in own and own[owner].run is None else None
        if source is None:
            source = RANDOM if config.run is None else f"{config.run}:{owner}"
        key = owner
        while key in named:
            key += OF_RUN
        named[key] = PolicyConfig(agents=agents, source=source)
    return named


def _policies_of_run(saved: SavedPolicy, several: AgentSpaces) -> dict[str, str]:
    """Return the policy of a run by agent, for agents with exactly one policy."""
    theirs, own = agent_spaces(*saved.spaces), saved.config.policies
    if theirs is None:
        return {}
    if not own:
        owners = policies_of_agents(several, {}) | policies_of_agents(theirs, {})
        return {agent: owners[agent] for agent in several.agents}
    found: dict[str, set[str]] = {agent: set() for agent in several.agents}
    for policy, config in own.items():
        for pattern in config.agents:
            for agent in matching(pattern, several.agents):
                found[agent].add(policy)
    return {agent: ids.pop() for agent, ids in found.items() if len(ids) == 1}


def _agents(
    key: str, policy: PolicyConfig, several: AgentSpaces, of_run: Mapping[str, str]
) -> list[str]:
    """Return the agents of a policy; a name in `agents` may also be a policy of the run."""
    found: list[str] = []
    for name in policy.agents:
        agents = matching(name, several.agents)
        agents = agents or [agent for agent, owner in of_run.items() if owner == name]
        if not agents:
            known = ", ".join(dict.fromkeys((*several.agents, *of_run.values())))
            problem = f"no such agent, and no such policy of the run; available: {known}"
            raise ConfigError(f"policies.{key}.agents", problem, name)
        found += agents
    return found


def _rows_of(
    policies: Mapping[str, NamedPolicy],
    owners: Mapping[str, str],
    deterministic: bool,
    envs: EnvSlice,
) -> RowPolicy:
    models = {policy: named.make_model() for policy, named in policies.items()}
    return model_rows(JointModel(models, owners), envs, deterministic)
