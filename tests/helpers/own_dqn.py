"""A custom deep Q-learning algorithm: settings, model and learner on the off-policy base."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from maze_train import Event, OffPolicyConfig, OffPolicyLearner
from maze_train.distributions.categorical import Categorical
from maze_train.learner.events import LearnerEvents


class DQNEvents(LearnerEvents):
    """Statistics of deep Q-learning."""

    td_loss = Event("Half the mean squared error.")


@dataclass(kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Deep Q-learning with a softmax over the values as exploration."""

    name: ClassVar[str] = "own_dqn"
    learner_class: ClassVar[str] = "own_dqn.DQNLearner"
    model_builder: ClassVar[str] = "own_dqn.build_model"

    temperature: float = 0.1
    """Temperature of the softmax. > 0."""

    @property
    def model_settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}


class DQNModel(nn.Module):
    """Values of the actions of a Discrete space, and their target network."""

    masking = None

    def __init__(self, inputs: int, hidden: int, action_space: Any, temperature: float) -> None:
        super().__init__()
        self.distribution = Categorical(action_space)
        outputs = int(action_space.n)
        self.q = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
        self.target = deepcopy(self.q).requires_grad_(False)
        self.temperature = temperature

    def policy_params(self, obs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.q(obs) / self.temperature
        return logits

    @torch.no_grad()
    def update_targets(self, tau: float) -> None:
        for target, source in zip(self.target.parameters(), self.q.parameters(), strict=True):
            target.lerp_(source, tau)


def build_model(
    config: Any, observation_space: Any, action_space: Any, seed: int, temperature: float
) -> DQNModel:
    """Build the model for the spaces of an environment."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = (config.hidden_sizes or [32])[0]
        return DQNModel(observation_space.shape[0], hidden, action_space, temperature)


class DQNLearner(OffPolicyLearner[DQNConfig]):
    """Learner with the squared error to one-step targets of the target network."""

    def compute_loss_for_module(self, module_id: str, batch: Any, statistics: Any) -> torch.Tensor:
        model: Any = self.modules[module_id]
        with torch.no_grad():
            values = model.target(batch.next_obs).amax(-1)
            targets = batch.rewards + batch.discounts * values
        chosen = model.q(batch.obs).gather(-1, batch.actions.long()[:, None])[:, 0]
        loss: torch.Tensor = (chosen - targets).square().mean() / 2
        statistics.record(DQNEvents.td_loss, loss)
        return loss
