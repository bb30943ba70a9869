"""Policies that play in a rollout: saved ones, random actions, or those of the user."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from maze_train.config.rollout_config import RANDOM
from maze_train.config.stored import PARTS_OF_ENV, PARTS_OF_POLICY
from maze_train.rollout.agents import PolicyAgent, RandomAgent, built_policy
from maze_train.rollout.model_agents import ModelAgent
from maze_train.rollout.rollout_generator import (
    agent_maker,
    check_told_spaces,
    model_of,
    told_spaces,
)
from maze_train.runners.saved_policies import SavedPolicy, read_saved_policy
from maze_train.spaces.compare import check_same_spaces
from maze_train.targets import TARGET, build_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maze_train.config.rollout_config import RolloutConfig
    from maze_train.envs.config import EnvConfig
    from maze_train.envs.slots import EnvSlots
    from maze_train.rollout.slot_agent import SlotAgent

__all__ = ["OwnPolicy", "RandomActions", "RolloutPolicy", "TrainedActions", "chosen_policy"]


class RolloutPolicy(ABC):
    """Policy that plays in a rollout; can be sent to other processes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name, which is fit for a directory."""

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.name

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain values that tell it apart from others."""

    @abstractmethod
    def make_agent(self, slots: EnvSlots) -> SlotAgent:
        """Build the agent that acts in some slots."""

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run that it comes from; None: of none."""
        return None

    @property
    def env(self) -> EnvConfig | None:
        """Settings of the environment that it was trained in; None: of none."""
        return None

    @property
    def deterministic(self) -> bool | None:
        """Whether the most likely action is taken; None: actions are not those of a model."""
        return None

    def check_spaces(self, env: str, observation_space: Any, action_space: Any) -> None:  # noqa: B027 (most policies have none)
        """Refuse an environment with other spaces than the policy has.

        Args:
            env: Name of the environment.
            observation_space: Its observation space.
            action_space: Its action space.

        Raises:
            ConfigError: If they differ.
        """


@dataclass(frozen=True)
class TrainedActions(RolloutPolicy):
    """A policy that training has saved.

    Args:
        saved: The policy.
        deterministic: Whether the most likely action is taken instead of a sampled one.
    """

    saved: SavedPolicy
    deterministic: bool = True

    @property
    def name(self) -> str:
        """The algorithm."""
        return self.saved.config.algorithm.name

    @property
    def title(self) -> str:
        """The algorithm, as people write it."""
        return self.name.upper()

    @property
    def settings(self) -> dict[str, Any]:
        """Run, algorithm, and what selected the policy."""
        score = self.saved.score.get("score")
        is_number = isinstance(score, (int, float)) and math.isfinite(score)
        return {
            "run": str(self.saved.run_dir.absolute()),
            "algorithm": self.name,
            "epoch": self.saved.score.get("epoch"),
            "score": score if is_number else None,
            "deterministic": self.deterministic,
        }

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run."""
        return self.saved.run_dir

    @property
    def env(self) -> EnvConfig | None:
        """Settings of the environment of the run."""
        return self.saved.config.env

    def make_agent(self, slots: EnvSlots) -> SlotAgent:
        """The model with its weights."""
        return ModelAgent(self.saved.make_model(), len(slots), self.deterministic)

    def check_spaces(self, env: str, observation_space: Any, action_space: Any) -> None:
        """Refuse an environment with other spaces than the policy has, see `RolloutPolicy`."""
        check_same_spaces(
            "env",
            "this environment has the {kind} space {found}, the policy has {wanted}: choose one "
            "with equal spaces",
            (observation_space, action_space),
            (self.saved.observation_space, self.saved.action_space),
            env,
        )


@dataclass(frozen=True)
class RandomActions(RolloutPolicy):
    """Actions that are uniformly random, and legal where observations have masks."""

    @property
    def name(self) -> str:
        """The word in the configuration."""
        return RANDOM

    @property
    def settings(self) -> dict[str, Any]:
        """The word in the configuration."""
        return {"policy": RANDOM}

    def make_agent(self, slots: EnvSlots) -> SlotAgent:
        """Random actions."""
        return RandomAgent(slots)


@dataclass(frozen=True)
class OwnPolicy(RolloutPolicy):
    """A policy of the user.

    Args:
        node: Node of the configuration, with the key `_target_`.
        agent: Builds what acts in some slots.
        spaces: Observation and action space that the policy names; None: it names none.
        deterministic: Whether the most likely action is taken; None: it is not for a model.
    """

    node: dict[str, Any]
    agent: Callable[[EnvSlots], SlotAgent]
    spaces: tuple[Any, Any] = (None, None)
    deterministic: bool | None = None

    @property
    def name(self) -> str:
        """The last part of the dotted path."""
        return str(self.node[TARGET]).replace(":", ".").rpartition(".")[2].strip("<>")

    @property
    def settings(self) -> dict[str, Any]:
        """Node of the configuration that names the policy."""
        return {"policy": self.node}

    def make_agent(self, slots: EnvSlots) -> SlotAgent:
        """A policy for each slot, or a model for all of them."""
        return self.agent(slots)

    def check_spaces(self, env: str, observation_space: Any, action_space: Any) -> None:
        """Refuse an environment with other spaces than those of a policy, see `RolloutPolicy`."""
        check_told_spaces(self.spaces, (observation_space, action_space))


def chosen_policy(config: RolloutConfig, policy: Any = None) -> RolloutPolicy:
    """The policy that a configuration names.

    Args:
        config: The configuration.
        policy: A policy of the user that takes the place of what `config.policy` names.

    Raises:
        ConfigError: If the saved policy is that of a class that is not there, or what `policy` or
            the configuration names is no policy, or can not be built.
        RunDirectoryError: If the run has no policy, or it is damaged.
    """
    if config.run is not None:
        parts = PARTS_OF_POLICY if config.env is not None else (*PARTS_OF_POLICY, *PARTS_OF_ENV)
        saved = read_saved_policy(config.run, config.trust, config, parts)
        saved.make_model()  # what does not fit fails here, and not in a worker
        return TrainedActions(saved, config.deterministic)
    if not isinstance(config.policy, dict):
        return RandomActions()
    build = partial(build_target, config.policy, key="policy")
    found = built_policy(build) if policy is None else policy
    agent = agent_maker(found, config.deterministic)
    is_model = model_of(found) is not None
    if policy is None and not is_model:
        agent = partial(PolicyAgent, build)  # not copies: what is built may not take to that
    told = config.deterministic if is_model else None
    return OwnPolicy(config.policy, agent, told_spaces(found), told)
