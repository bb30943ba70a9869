"""Policies that play in a rollout: saved ones, random actions, or those of the user."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.nets.joint import JointModel
from maze_train.rollout.agents import PolicyAgent, RandomAgent, built_policy
from maze_train.rollout.population import ModelAgent
from maze_train.rollout.rollout_generator import (
    agent_maker,
    check_policy_spaces,
    model_of,
    spaces_of_policy,
)
from maze_train.runners.saved_policies import SavedPolicy, read_saved_policy
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.compare import check_same_spaces
from maze_train.targets import TARGET, Given, build_target
from maze_train.training.config import RANDOM
from maze_train.training.models import modules_of
from maze_train.training.policies import policies_of_agents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.envs.config import EnvConfig
    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.slot_agent import SlotAgent


@dataclass(frozen=True)
class RolloutPolicy:
    """Policy that plays in a rollout."""

    name: str
    """A short name, which is fit for a directory."""

    settings: dict[str, Any]
    """Plain values that tell it apart from others."""

    make_agent: Callable[[EnvSlots], SlotAgent]
    """Builds the agent that acts in some slots, also in other processes."""

    spaces: tuple[Any, Any] = (None, None)
    """Observation and action space that it is for; None: any."""

    deterministic: bool | None = None
    """Whether the most likely action is taken; None: actions are not those of a model."""

    run_dir: Path | None = None
    """Directory of the run that it comes from; None: of none."""

    env: EnvConfig | None = None
    """Settings of the environment that it was trained in; None: of none."""

    owners: dict[str, str] = field(default_factory=dict)
    """Id of the policy of each agent, where there are several agents with policies of their own."""

    label: str = ""
    """Names of policies for people, where several are named."""

    @property
    def title(self) -> str:
        """A short name for people: algorithms are written in capitals."""
        return self.label or (self.name if self.run_dir is None else self.name.upper())

    def check_spaces(self, env: str, spaces: tuple[Any, Any]) -> None:
        """Refuse an environment with other spaces than the policy has.

        Args:
            env: Name of the environment.
            spaces: Its observation and action space.

        Raises:
            ConfigError: If they differ.
        """
        if self.run_dir is None:
            check_policy_spaces(self.spaces, spaces)
            return
        problem = (
            "this environment has the {kind} space {found}, the policy has {wanted}: choose one "
            "with equal spaces"
        )
        check_same_spaces("env", problem, spaces, self.spaces, env)


def chosen_policy(config: RolloutConfig) -> RolloutPolicy:
    """The policy that a configuration names.

    Args:
        config: The configuration; a policy that was given in Python takes the forms that
            `RolloutGenerator` takes.

    Raises:
        ConfigError: If the saved policy is that of a class that is not there, or what `policy` or
            the configuration names is no policy, or can not be built.
        RunDirectoryError: If the run has no policy, or it is damaged.
    """
    if config.run is not None:
        parts = PARTS_OF_POLICY if config.env is not None else (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        saved = read_saved_policy(config.run, config.trust, config, parts)
        saved.make_model()  # what does not fit fails here, and not in a worker
        return trained_policy(saved, config.deterministic)
    if not isinstance(config.policy, dict):
        name = "policies" if config.policies else RANDOM
        return RolloutPolicy(name, {"policy": RANDOM}, RandomAgent)
    build = partial(build_target, config.policy, key="policy")
    target = config.policy[TARGET]
    is_given = isinstance(target, Given)
    found = target.value if is_given else built_policy(build)
    agent = agent_maker(found, config.deterministic)
    is_model = model_of(found) is not None
    if not is_given and not is_model:
        agent = partial(PolicyAgent, build)  # not copies: what is built may not take to that
    name = str(target).replace(":", ".").rpartition(".")[2].strip("<>")
    chance = config.deterministic if is_model else None
    return RolloutPolicy(name, {"policy": config.policy}, agent, spaces_of_policy(found), chance)


def trained_policy(saved: SavedPolicy, deterministic: bool) -> RolloutPolicy:
    """A policy that training has saved.

    Args:
        saved: The policy.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """
    name, several = saved.config.algorithm.name, agent_spaces(*saved.spaces)
    settings = {
        "run": str(saved.run_dir.absolute()),
        **score_of(saved),
        "deterministic": deterministic,
    }
    return RolloutPolicy(
        name,
        settings,
        partial(_trained_agent, saved, deterministic),
        (saved.observation_space, saved.action_space),
        deterministic,
        saved.run_dir,
        saved.config.env,
        {} if several is None else policies_of_agents(several, saved.config.policies),
    )


def score_of(saved: SavedPolicy) -> dict[str, Any]:
    """Algorithm, epoch and score of a saved policy, as files of results have them."""
    score = saved.score.get("score")
    is_number = isinstance(score, (int, float)) and math.isfinite(score)
    return {
        "algorithm": saved.config.algorithm.name,
        "epoch": saved.score.get("epoch"),
        "score": score if is_number else None,
    }


def _trained_agent(saved: SavedPolicy, deterministic: bool, slots: EnvSlots) -> SlotAgent:
    model: Any = saved.make_model()
    several = agent_spaces(slots.env_observation_space, slots.single_action_space)
    if several is not None:  # flags of agents are in the order that they have here
        owners = {agent: model.agents[agent] for agent in several.agents}
        model = JointModel(modules_of(model), owners)
    return ModelAgent(model, len(slots), deterministic)
