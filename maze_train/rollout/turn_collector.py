"""Collects the turns of several agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from maze_train.data.turns import TurnSplitter

if TYPE_CHECKING:
    from maze_train.data.rollout import Rollout
    from maze_train.nets.joint import JointModel
    from maze_train.rollout.collector import RolloutCollector
    from maze_train.rollout.episodes import FinishedEpisodes
    from maze_train.types import Array


class TurnCollector:
    """Steps environments with several agents, and gives each policy its rollout.

    Args:
        collector: Collects rollouts of all agents.
        model: The policies, and who acts with which.
        multiple: The number of turns of a rollout is a multiple of this.
    """

    def __init__(self, collector: RolloutCollector, model: JointModel, multiple: int = 1) -> None:
        collector.keeps_terminal_obs = True
        self.collector = collector
        self.splitter = TurnSplitter(model.members, model.state_sizes, multiple)

    @property
    def env_s(self) -> float:
        """See `RolloutCollector`."""
        return self.collector.env_s

    def collect(self, model: JointModel) -> tuple[dict[str, Rollout], FinishedEpisodes]:
        """The turns that ended in T steps of the environments, by policy, and the episodes."""
        rollout, episodes = self.collector.collect(model)
        return self.splitter.split(rollout), episodes

    def state_dict(self) -> dict[str, Any]:
        """State of the environments and of the turns that have not ended."""
        return {**self.collector.state_dict(), "turns": self.splitter.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> Array:
        """Continue from `state`; see `RolloutCollector`."""
        lost = self.collector.load_state_dict(state)
        self.splitter.load_state_dict(state["turns"])
        self.splitter.forget(torch.from_numpy(lost))
        return lost
