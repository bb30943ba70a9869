"""The policy of an earlier run as the beginning of one of several policies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from maze_train.nets.config import ModelConfig
from maze_train.runners.base_policy import POLICY_SETTINGS, SavedBasePolicy
from maze_train.runners.saved_policies import SavedPolicy, read_source
from maze_train.spaces.agents import agent_spaces
from maze_train.spaces.compare import check_same_spaces
from maze_train.training.models import modules_of
from maze_train.training.policies import policies_of_agents

if TYPE_CHECKING:
    from torch import nn

    from maze_train.config.train_config import TrainConfig


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
