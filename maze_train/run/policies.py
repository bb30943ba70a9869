"""The policies of agents that settings name: of runs, of users, random, opponents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maze_train.collect.episode_player import ModelAgent
from maze_train.collect.fixed_policies import fixed_policy
from maze_train.core.errors import ConfigError, RunDirectoryError
from maze_train.core.targets import is_target
from maze_train.nets.config import ModelConfig
from maze_train.nets.joint import JointModel, acting_alone
from maze_train.run.base_policy import POLICY_SETTINGS, SavedBasePolicy
from maze_train.run.saved_policies import (
    RolloutPolicy,
    SavedPolicy,
    read_saved_policy,
    read_source,
    score_of,
)
from maze_train.spaces.agents import AgentSpaces, agent_spaces
from maze_train.spaces.describe import check_same_spaces
from maze_train.training.config import RANDOM, PolicyConfig
from maze_train.training.evaluators import RolloutEvaluator
from maze_train.training.generators import generators_kept
from maze_train.training.models import (
    check_id,
    is_trainable,
    matching,
    modules_of,
    policies_of_agents,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from maze_train.collect.collector import ActingModel, RecurrentModel
    from maze_train.collect.episode_player import SlotAgent
    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.config.train_config import TrainConfig
    from maze_train.core.types import Array
    from maze_train.envs.stepped import EnvSlots
    from maze_train.envs.vector import MazeVectorEnv
    from maze_train.training.builder import AlgorithmBuilder


@dataclass(frozen=True)
class NamedPolicy:
    """A policy that settings name for agents; it can be sent to other processes.

    Attributes:
        source: Its name, see `PolicyConfig.source`.
        key: Where the settings name it.
        spaces: Observation and action space of the agents.
        saved: The policy, where a run has saved it.
    """

    source: Any
    key: str
    spaces: tuple[Any, Any]
    saved: SavedPolicy | None

    @property
    def fits(self) -> bool:
        """Whether it is for the spaces of the agents."""
        return self.saved is None or self.saved.spaces == self.spaces

    def make_model(self) -> nn.Module:
        """A new model that acts.

        Raises:
            ConfigError: If it cannot be built, or does not act.
            RunDirectoryError: If the saved weights do not fit.
        """
        if self.saved is not None:
            return self.saved.make_model()
        return fixed_policy(self.source, self.key, *self.spaces)


def named_policy(
    source: Any,
    key: str,
    spaces: tuple[Any, Any],
    agent: str,
    trust: Sequence[str],
    own: Any,
) -> NamedPolicy:
    """Find the policy that settings name.

    Args:
        source: Its name.
        key: Where they name it.
        spaces: Observation and action space of the agents that it acts for.
        agent: One of them, whose policy it is where a run has several.
        trust: Modules that the configuration of a run may name.
        own: Settings of the user, who trusts what they name.

    Raises:
        ConfigError: If a run has no such policy, or names what is not trusted.
    """
    saved = None
    if source != RANDOM and not is_target(source):
        try:
            saved = read_source(source, trust, own, agent)
        except RunDirectoryError as error:
            raise ConfigError(key, str(error), source) from error
    return NamedPolicy(source, key, spaces, saved)


class PolicySource(SavedBasePolicy):
    """The policy of the run that `policies.<id>.source` names; see `SavedBasePolicy`.

    Args:
        config: Configuration of the new run.
        policy: Id of the policy; its source is a run.
    """

    def __init__(self, config: TrainConfig, policy: str) -> None:
        own = config.policies[policy]
        self.config, self.policy, self.directory = config, policy, str(own.run)
        self.key, self.is_frozen = f"policies.{policy}.source", own.frozen

    def read(self) -> SavedPolicy:
        """Read the policy, of a run with one agent or with several."""
        return read_source(self.directory, self.config.trust, self.config)

    def model_of(self, config: TrainConfig) -> ModelConfig:
        """The settings of its networks; what `model` says is not said of them."""
        own, defaults = config.policies[self.policy].model, ModelConfig()
        unsaid = {name: getattr(defaults, name) for name in POLICY_SETTINGS}
        return replace(config.model, **unsaid) if own is None else own

    def with_model(self, model: ModelConfig) -> TrainConfig:
        """The configuration with other settings of its networks."""
        policies = self.config.policies
        changed = replace(policies[self.policy], model=model)
        return replace(self.config, policies={**policies, self.policy: changed})

    def check_spaces(self, own_spaces: tuple[Any, Any]) -> None:
        """Refuse other spaces than those of its agents, see `SavedBasePolicy.check_spaces`."""
        several = agent_spaces(*own_spaces)
        if several is None:
            return  # building the model refuses policies of one agent
        owners = policies_of_agents(several, self.config.policies)
        agent = next(agent for agent, owner in owners.items() if owner == self.policy)
        problem = f"its policy has the {{kind}} space {{found}}, {agent} has {{wanted}}"
        spaces = several.of(agent)
        check_same_spaces(self.key, problem, self.saved.spaces, spaces, self.directory)

    def take_over(self, model: nn.Module) -> str:
        """Write its weights into its part of a model, see `SavedBasePolicy.take_over`."""
        return super().take_over(modules_of(model)[self.policy])


OF_RUN = "_of_run"
"""End of the id of a policy of the run, where the user has given its id to another one."""


def with_policies(
    base: RolloutPolicy, config: RolloutConfig, spaces: tuple[Any, Any]
) -> RolloutPolicy:
    """The policies that a rollout names, and for all other agents those of its run.

    Args:
        base: What plays for agents that are not named.
        config: The configuration, with `policies`.
        spaces: Observation and action space of the environment.

    Raises:
        ConfigError: If there is one agent, agents and policies do not fit, or one cannot be built.
        RunDirectoryError: If saved weights do not fit.
    """
    several = agent_spaces(*spaces)
    if several is None:
        problem = "the environment has one agent; leave it out"
        raise ConfigError("policies", problem, list(config.policies))
    policies = _all_policies(config, several)
    owners = policies_of_agents(several, policies)
    found: dict[str, NamedPolicy] = {}
    for agent, policy in owners.items():
        if policy not in found:
            check_id(policy)
            found[policy] = _found(policy, policies[policy], agent, several, config)
    models = [named.make_model() for named in found.values()]  # what fails does so here
    learned = any(True for model in models for _ in model.parameters())
    described = {
        policy: {
            "agents": [agent for agent, owner in owners.items() if owner == policy],
            "source": named.source,
            **(score_of(named.saved) if named.saved else {}),
        }
        for policy, named in found.items()
    }
    return replace(
        base,
        label=", ".join(f"{policy}: {_title(named)}" for policy, named in found.items()),
        settings={"policies": described},
        make_agent=partial(_agent_of, found, owners, config.deterministic),
        spaces=spaces,
        deterministic=config.deterministic if learned else None,
        owners=owners,
    )


def _all_policies(config: RolloutConfig, several: AgentSpaces) -> dict[str, PolicyConfig]:
    """The policies that are named, and those of the run for agents that are not."""
    of_run: dict[str, str] = {}
    own: Mapping[str, PolicyConfig] = {}
    if config.run is not None:
        saved = read_saved_policy(config.run, config.trust, config)
        own = saved.config.policies
        of_run = _policies_of_run(saved, several)
    elif config.policy == RANDOM:
        kinds = policies_of_agents(several, {})  # a policy is for agents with the same spaces
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
    """Id of the policy that a run has for each agent, of those for which it has just one."""
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
    """Names of the agents of a policy, which settings may call as a policy of the run does."""
    found: list[str] = []
    for name in policy.agents:
        agents = matching(name, several.agents)
        agents = agents or [agent for agent, owner in of_run.items() if owner == name]
        if not agents:
            known = ", ".join(dict.fromkeys((*several.agents, *of_run.values())))
            problem = f"no such agent, and no such policy of the run; there are: {known}"
            raise ConfigError(f"policies.{key}.agents", problem, name)
        found += agents
    return found


def _found(
    policy: str, own: PolicyConfig, agent: str, several: AgentSpaces, config: RolloutConfig
) -> NamedPolicy:
    """The policy that settings name, which has to be for the spaces of its agents."""
    key, spaces = f"policies.{policy}.source", several.of(agent)
    named = named_policy(own.source, key, spaces, agent, config.trust, config)
    if named.saved is not None:
        problem = f"its policy has the {{kind}} space {{found}}, {agent} has {{wanted}}"
        check_same_spaces(key, problem, named.saved.spaces, spaces, own.source)
    return named


def _title(named: NamedPolicy) -> str:
    if named.saved is not None:
        return named.saved.config.algorithm.name.upper()
    return RANDOM if named.source == RANDOM else str(named.source["_target_"])


def _agent_of(
    policies: Mapping[str, NamedPolicy],
    owners: Mapping[str, str],
    deterministic: bool,
    slots: EnvSlots,
) -> SlotAgent:
    models = {policy: named.make_model() for policy, named in policies.items()}
    return ModelAgent(JointModel(models, owners), len(slots), deterministic)


class OpponentEvaluator(RolloutEvaluator):
    """Plays n episodes in each seat against each opponent, and reports who won.

    An opponent plays all other agents that it can; the rest keep their policies. A larger return
    than those of all that the opponent plays wins an episode, a smaller one than any of them loses
    it, and else it is a draw.

    Args:
        make_env: See `RolloutEvaluator`.
        n_episodes: Episodes in each seat against each opponent, >= 1.
        opponents: The models by agent that an opponent can play, by its name.
        seats: Agents that the policies which are judged play, one at a time.
        **kwargs: Further arguments of `RolloutEvaluator`.
    """

    def __init__(
        self,
        make_env: Callable[[int], MazeVectorEnv],
        n_episodes: int,
        opponents: Mapping[str, Mapping[str, nn.Module]],
        seats: Sequence[str],
        **kwargs: Any,
    ) -> None:
        super().__init__(make_env, n_episodes, **kwargs)
        self._opponents, self._seats = opponents, list(seats)

    def evaluate(self, policy: ActingModel | RecurrentModel) -> dict[str, float]:
        """Play; metrics are `<prefix>/vs_<name>/return_mean`, `win_rate` and so on."""
        metrics: dict[str, float] = {}
        with generators_kept(), torch.no_grad():
            if self._env is None:
                self._env = self._make_env(self._num_envs)
            for name, models in self._opponents.items():
                results = [
                    self._play_seat(seat, policy, models, self._env)
                    for seat in self._seats
                    if models.keys() - {seat}
                ]
                own, best = (np.concatenate(column) for column in zip(*results, strict=True))
                found = {
                    "return_mean": own.mean(),
                    "win_rate": (own > best).mean(),
                    "draw_rate": (own == best).mean(),
                    "loss_rate": (own < best).mean(),
                }
                start = f"{self.prefix}/vs_{name}"
                metrics.update({f"{start}/{key}": float(value) for key, value in found.items()})
        return metrics

    def _play_seat(
        self, seat: str, policy: Any, models: Mapping[str, nn.Module], env: MazeVectorEnv
    ) -> tuple[Array, Array]:
        """Returns of the policy in a seat, and the best ones of the others, `[n]`."""
        own = {agent: policy.by_policy[owner] for agent, owner in policy.agents.items()}
        others = models.keys() - {seat}
        chosen = {agent: models[agent] if agent in others else own[agent] for agent in own}
        *_, returns = self._play(acting_alone(chosen), env)
        return returns[seat], np.max([returns[agent] for agent in others], axis=0)


def opponent_evaluator(config: TrainConfig, builder: AlgorithmBuilder[Any]) -> OpponentEvaluator:
    """The evaluator that `evaluation.opponents` asks for.

    Raises:
        ConfigError: If there is one agent, or an opponent is not a policy or does not fit.
    """
    settings, spaces = config.evaluation, agent_spaces(*builder.spaces)
    if spaces is None or len(spaces.agents) < 2:
        problem = "the environment has one agent; leave it out"
        raise ConfigError("evaluation.opponents", problem, list(settings.opponents))
    owners = policies_of_agents(spaces, config.policies)
    seats = [
        agent
        for agent, owner in owners.items()
        if is_trainable(owner, config.policies, config.policies_to_train)
    ]
    opponents = {}
    for name, source in settings.opponents.items():
        key = f"evaluation.opponents.{name}"
        named = {
            agent: named_policy(source, key, spaces.of(agent), agent, config.trust, config)
            for agent in spaces.agents
        }
        opponents[name] = {
            agent: policy.make_model().to(builder.context.device)
            for agent, policy in named.items()
            if policy.fits
        }
        if not any(opponents[name].keys() - {seat} for seat in seats):
            problem = f"it is for no agent besides one that learns; there are {', '.join(named)}"
            raise ConfigError(key, problem, source)
    return OpponentEvaluator(
        lambda num_envs: builder.context.make_env(num_envs, training=False),
        settings.n_episodes,
        opponents,
        seats,
        concurrency=settings.concurrency,
        seed=builder.context.seeds.integer("opponents"),
        deterministic=settings.deterministic,
    )
