"""Policies of agents, by the words in which settings name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze_train.errors import ConfigError, RunDirectoryError
from maze_train.rollout.fixed_policies import fixed_policy
from maze_train.runners.saved_policies import SavedPolicy, read_source
from maze_train.targets import is_target
from maze_train.training.config import RANDOM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


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
            ConfigError: If it can not be built, or does not act.
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
