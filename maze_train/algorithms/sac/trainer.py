"""The SAC trainer."""

from __future__ import annotations

from maze_train.algorithms.off_policy.trainer import OffPolicy


class SAC(OffPolicy):
    """Soft actor-critic: steps environments and learns from a replay buffer; see `SACLearner`."""
